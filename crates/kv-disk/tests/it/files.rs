//! Tiers over real files: what survives, what is refused, and whose a folder is.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use crate::prelude::*;

fn options(folder: &Path, slots: u64) -> DiskOptions {
    let mut options = DiskOptions::new(folder, 0, RECORD_BYTES, b"a model");
    options.bytes = slots * 8192 + 3 * 4096;
    options.reserve_bytes = 0;
    assert_eq!(options.slots(), Some(slots));
    options
}

/// A folder of its own, and options of a tier there.
fn in_folder(slots: u64) -> (tempfile::TempDir, DiskOptions) {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), slots);
    (folder, options)
}

struct Opened {
    worker: Worker,
    watch: DiskWatch,
    found: BTreeSet<(u16, u64)>,
}

fn open(options: &DiskOptions) -> Opened {
    let tier = DiskTier::open(options).unwrap();
    let watch = tier.watch();
    let tier = Arc::new(Mutex::new(tier));
    let worker = Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES);
    let found = worker.survivors(&tier);
    Opened { worker, watch, found }
}

fn file_in(folder: &Path) -> PathBuf {
    folder.join("kv-disk-000.slots")
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// Stores block 1 in a file of its own.
fn fill(options: &DiskOptions) {
    open(options).worker.keep(0, &[1]);
}

#[test]
fn what_was_stored_survives_the_process_with_every_backend() {
    for (backend, punches) in [
        (BackendChoice::Best, false),
        (BackendChoice::Threads, false),
        (BackendChoice::Best, true),
        (BackendChoice::Threads, true),
    ] {
        let (_folder, mut options) = in_folder(20);
        options.backend = backend;
        options.rules.punches = punches;
        options.survives_power_loss = punches;
        let mut one = open(&options);
        assert_eq!(one.found, BTreeSet::new());
        if backend == BackendChoice::Threads {
            let threads = matches!(one.watch.files()[0].backend, Backend::Threads { threads: 24 });
            assert!(threads, "{:?}", one.watch.files());
        }
        one.worker.store(0, &[1, 2, 3, 4, 5]);
        one.worker.keep(1, &[1, 2]);
        one.worker.forget(0, &[2, 4]);
        one.worker.keep(0, &[4]);
        assert!(one.worker.loads(0, 1) && one.worker.loads(1, 1) && one.worker.loads(0, 4));
        assert!(!one.worker.loads(0, 2));
        drop(one);

        let mut two = open(&options);
        assert_eq!(two.found, BTreeSet::from([(0, 1), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]));
        assert_eq!(two.watch.stats().survivors, 6);
        for (group, name) in two.found.clone() {
            assert!(two.worker.loads(group, name), "{group} {name}");
        }
        assert!(!two.worker.loads(0, 2));
        two.worker.clear();
        two.worker.keep(0, &[7]);
        assert!(!two.worker.loads(0, 1));
        drop(two);

        let mut three = open(&options);
        assert_eq!(three.found, BTreeSet::from([(0, 7)]));
        assert!(!three.worker.loads(0, 1) && three.worker.loads(0, 7));
        drop(three);
        options.rules.keep = Keep::Nothing;
        let mut four = open(&options);
        assert!(four.found.is_empty() && !four.worker.loads(0, 7));
    }
}

#[test]
fn blocks_are_striped_and_evicted_in_turn() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut options = options(folders[0].path(), 4);
    options.folders = folders.iter().map(|folder| folder.path().to_owned()).collect();
    options.bytes *= 2;
    let mut one = open(&options);
    assert_eq!(one.watch.stats().slots, 8);
    for name in 0..30 {
        one.worker.keep(0, &[name]);
    }
    let stats = counted(&one.watch, |stats| stats.evicted == 22 && stats.used_slots == 8);
    assert_eq!((stats.evicted, stats.used_slots), (22, 8));
    one.worker.poll();
    assert_eq!(one.worker.has.len(), 8, "{:?}", one.worker.has);
    let has = one.worker.has.clone();
    drop(one);
    let mut two = open(&options);
    assert_eq!(two.found, has);
    for (group, name) in has {
        assert!(two.worker.loads(group, name));
    }
    drop(two);
    // With the files of each other's folders, they are not those of the set in this order.
    let [first, second] = [0, 1].map(|at| folders[at].path().join(format!("kv-disk-00{at}.slots")));
    let between = folders[0].path().join("between");
    fs::rename(&first, &between).unwrap();
    fs::rename(&second, &first).unwrap();
    fs::rename(&between, &second).unwrap();
    assert!(matches!(DiskTier::open(&options), Err(OpenError::Stripe { .. })));
}

#[test]
fn one_tier_has_a_folder_and_a_second_one_is_told_so() {
    let (_folder, options) = in_folder(4);
    let one = open(&options);
    assert!(matches!(DiskTier::open(&options), Err(OpenError::Locked { .. })));
    drop(one);
    drop(open(&options));
}

#[test]
fn another_model_size_or_version_is_refused_or_wiped_by_choice() {
    let (folder, right) = in_folder(6);
    let fill = || {
        let mut one = open(&right);
        one.worker.keep(0, &[1, 2]);
    };
    fill();
    let model = DiskOptions { rules: kv_disk::SlotRules::new(b"another"), ..right.clone() };
    let slots = options(folder.path(), 7);
    for (wrong, is_it) in [
        (
            model.clone(),
            (|error| matches!(error, OpenError::Model { .. })) as fn(&OpenError) -> bool,
        ),
        (slots.clone(), |error| matches!(error, OpenError::Geometry { .. })),
    ] {
        let error = DiskTier::open(&wrong).unwrap_err();
        assert!(is_it(&error), "{error}");
        assert_eq!(open(&right).found.len(), 2, "it is as it was");
    }
    for mut wrong in [model, slots, options(folder.path(), 3)] {
        wrong.rules.mismatch = Mismatch::Wipe;
        let mut wiped = open(&wrong);
        assert!(wiped.found.is_empty());
        assert!(!wiped.worker.loads(0, 1));
        wiped.worker.keep(0, &[3]);
        assert!(wiped.worker.loads(0, 3));
        drop(wiped);
        assert_eq!(open(&wrong).found, BTreeSet::from([(0, 3)]));
    }
    // A heading of another version, at both places.
    let mut bytes = fs::read(file_in(folder.path())).unwrap();
    bytes[8] = 9;
    bytes[4096 + 8] = 9;
    fs::write(file_in(folder.path()), &bytes).unwrap();
    let mut last = options(folder.path(), 3);
    let error = DiskTier::open(&last).unwrap_err();
    assert!(error.to_string().contains("not read"), "{error}");
    assert!(format!("{error:?}").contains("version 9"), "{error:?}");
    last.rules.mismatch = Mismatch::Wipe;
    assert!(open(&last).found.is_empty());
}

#[test]
fn a_hostile_folder_is_refused_and_left_as_it_is() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, vec![0; 1 << 16]).unwrap();
    let reason = |make: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        make(&file_in(folder.path()));
        let mut options = options(folder.path(), 4);
        options.rules.mismatch = Mismatch::Wipe;
        match DiskTier::open(&options).unwrap_err() {
            OpenError::Hostile { reason, path } => {
                assert_eq!(path, file_in(folder.path()));
                reason
            }
            other => panic!("{other}"),
        }
    };
    let link = reason(&|path| std::os::unix::fs::symlink(&secret, path).unwrap());
    assert_eq!(link, Hostility::Link);
    let dangling = outside.path().join("nothing");
    let link = reason(&|path| std::os::unix::fs::symlink(&dangling, path).unwrap());
    assert_eq!((link, dangling.exists()), (Hostility::Link, false));
    assert_eq!(reason(&|path| fs::create_dir(path).unwrap()), Hostility::NotRegular);
    let links = reason(&|path| fs::hard_link(&secret, path).unwrap());
    assert_eq!(links, Hostility::Links { links: 2 });
    let text = reason(&|path| {
        fs::write(path, b"somebody's letters").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    });
    assert_eq!(text, Hostility::Foreign);
    let open_to_all = reason(&|path| {
        fs::write(path, b"").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
    });
    assert_eq!(open_to_all, Hostility::Writable { mode: 0o666 });
    let noise = reason(&|path| {
        let mut state = 5_u64;
        let noise: Vec<u8> = (0..8192).flat_map(|_| random(&mut state).to_le_bytes()).collect();
        fs::write(path, noise).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    });
    assert_eq!(noise, Hostility::Foreign);
    assert_eq!(fs::read(&secret).unwrap(), vec![0; 1 << 16]);
    // Another user's file, where this process may give one away.
    let folder = tempfile::tempdir().unwrap();
    fs::write(file_in(folder.path()), b"").unwrap();
    fs::set_permissions(file_in(folder.path()), fs::Permissions::from_mode(0o644)).unwrap();
    if std::os::unix::fs::chown(file_in(folder.path()), Some(12345), None).is_ok() {
        let error = DiskTier::open(&options(folder.path(), 4)).unwrap_err();
        let reason = matches!(
            error,
            OpenError::Hostile { reason: Hostility::Owner { owner: 12345, .. }, .. }
        );
        assert!(reason, "{error}");
    }
}

#[test]
fn bytes_that_changed_in_the_file_are_misses_with_their_reason() {
    let (folder, options) = in_folder(4);
    // Slots 0 and 1 hold blocks 1 and 2; the table is one page, behind two headings.
    let slot = |at: usize| 3 * 4096 + at * 8192;
    let entry = |at: usize| 2 * 4096 + at * 128;
    type Change = fn(&mut Vec<u8>, &dyn Fn(usize) -> usize, &dyn Fn(usize) -> usize);
    let cases: [(&str, Change, Option<Miss>); 7] = [
        ("a bit of the record", |bytes, slot, _| bytes[slot(0) + 3000] ^= 1, Some(Miss::Torn)),
        ("a bit of the entry", |bytes, slot, _| bytes[slot(0) + 20] ^= 1, Some(Miss::Torn)),
        ("zeros", |bytes, slot, _| bytes[slot(0)..slot(0) + 8192].fill(0), Some(Miss::Stale)),
        ("noise", |bytes, slot, _| bytes[slot(0)..slot(0) + 8192].fill(0x5a), Some(Miss::Foreign)),
        (
            "another block",
            |bytes, slot, _| bytes.copy_within(slot(1)..slot(2), slot(0)),
            Some(Miss::Foreign),
        ),
        ("an entry of the table", |bytes, _, entry| bytes[entry(0) + 70] ^= 1, None),
        (
            "swapped entries",
            |bytes, _, entry| bytes.copy_within(entry(1)..entry(2), entry(0)),
            None,
        ),
    ];
    for (what, change, miss) in cases {
        let _ = fs::remove_file(file_in(folder.path()));
        let mut one = open(&options);
        one.worker.keep(0, &[1]);
        one.worker.keep(0, &[2]);
        drop(one);
        let mut bytes = fs::read(file_in(folder.path())).unwrap();
        change(&mut bytes, &slot, &entry);
        fs::write(file_in(folder.path()), &bytes).unwrap();
        let mut two = open(&options);
        assert!(!two.worker.loads(0, 1), "{what}");
        assert!(two.worker.loads(0, 2), "{what}");
        let right = |stats: &DiskStats| {
            stats.loaded == 1 && miss.is_none_or(|miss| stats.missed_as(miss) == 1)
        };
        let stats = counted(&two.watch, right);
        match miss {
            Some(miss) => assert_eq!(stats.missed_as(miss), 1, "{what}: {stats:?}"),
            None => assert_eq!((stats.discarded, stats.survivors), (1, 1), "{what}"),
        }
        // The slot is used again.
        two.worker.keep(0, &[1, 3, 4]);
        assert_eq!(counted(&two.watch, |stats| stats.used_slots == 4).used_slots, 4, "{what}");
    }
    let cut = fs::read(file_in(folder.path())).unwrap();
    fs::write(file_in(folder.path()), &cut[..cut.len() - 1]).unwrap();
    assert!(matches!(DiskTier::open(&options), Err(OpenError::Geometry { .. })));
}

#[test]
fn a_record_of_another_format_is_given_up() {
    let (_folder, options) = in_folder(4);
    fill(&options);
    let tier = DiskTier::open(&options).unwrap();
    let watch = tier.watch();
    let mut worker = Worker::of_format(tier, BLOCK_BYTES, 8);
    assert!(!worker.loads(0, 1));
    assert_eq!(worker.missed, [BlockFault::Foreign]);
    let refused = |stats: &DiskStats| stats.missed_as(Miss::Refused) == 1;
    assert!(refused(&counted(&watch, refused)));
    assert!(!worker.loads(0, 1));
    let absent = |stats: &DiskStats| stats.missed_as(Miss::Absent) == 1;
    assert!(absent(&counted(&watch, absent)), "it has gone");
}

#[test]
fn limits_hold_and_are_counted() {
    let (folder, mut limited) = in_folder(8);
    limited.rules.write_bytes_per_day = Some(3 * 8192);
    limited.rules.write_bytes_per_second = Some(1 << 20);
    limited.rules.read_bytes_per_second = Some(1 << 20);
    let mut one = open(&limited);
    one.worker.keep(0, &[1, 2, 3, 4, 5]);
    assert_eq!(one.worker.has.len(), 3);
    let daily = |stats: &DiskStats| stats.unstored_as(Unstored::Daily) == 2;
    assert!(daily(&counted(&one.watch, daily)));
    for _ in 0..30 {
        one.worker.load(0, &[1, 2, 3]);
        one.worker.settle();
    }
    assert_eq!(one.worker.loaded, 90, "each came in the end");
    drop(one);
    let mut long = options(folder.path(), 8);
    long.record_bytes = 100;
    long.bytes = 1 << 20;
    long.rules.mismatch = Mismatch::Wipe;
    let mut short = open(&long);
    short.worker.keep(0, &[1]);
    let long = |stats: &DiskStats| stats.unstored_as(Unstored::TooLong) == 1;
    assert!(long(&counted(&short.watch, long)));
}

#[test]
fn options_that_cannot_be_are_refused_by_name() {
    let (_folder, right) = in_folder(4);
    let none = DiskOptions { folders: Vec::new(), ..right.clone() };
    assert!(matches!(DiskTier::open(&none), Err(OpenError::NoFolder)));
    let small = DiskOptions { bytes: 8192, ..right.clone() };
    assert!(matches!(DiskTier::open(&small), Err(OpenError::TooSmall { bytes: 8192, .. })));
    let reserve = DiskOptions { reserve_bytes: u64::MAX, ..right.clone() };
    assert!(matches!(DiskTier::open(&reserve), Err(OpenError::NoRoom { .. })));
    let mut depth = right.clone();
    depth.rules.read_depth = 0;
    assert!(matches!(DiskTier::open(&depth), Err(OpenError::Depth { reads: 0, .. })));
    // A load would never begin, and a store would keep its host blocks for good.
    let (mut reads, mut writes) = (right.clone(), right.clone());
    reads.rules.read_bytes_per_second = Some(0);
    writes.rules.write_bytes_per_second = Some(0);
    assert!(matches!(DiskTier::open(&reads), Err(OpenError::Rate { act: "reads" })));
    assert!(matches!(DiskTier::open(&writes), Err(OpenError::Rate { act: "writes" })));
    let under_file = DiskOptions::new("/dev/null/folder", 1 << 20, RECORD_BYTES, b"");
    assert!(matches!(DiskTier::open(&under_file), Err(OpenError::System { .. })));
}

#[test]
fn a_tier_that_is_dropped_with_stores_open_has_let_go_of_its_files() {
    for backend in [BackendChoice::Best, BackendChoice::Threads] {
        let (folder, mut options) = in_folder(20);
        options.folders.push(folder.path().to_owned());
        options.bytes *= 2;
        options.backend = backend;
        options.lock_wait = Duration::ZERO;
        for _ in 0..30 {
            let mut opened = open(&options);
            opened.worker.store(0, &(0..20).collect::<Vec<_>>());
            // What is open is waited for, and what waits is given up.
        }
        let mut last = open(&options);
        let found: Vec<_> = last.found.iter().copied().collect();
        assert!(found.into_iter().all(|(group, name)| last.worker.loads(group, name)));
    }
}

#[test]
fn a_file_is_its_owners_alone_and_one_that_others_may_read_becomes_so() {
    let (folder, options) = in_folder(4);
    fill(&options);
    let path = file_in(folder.path());
    assert_eq!(mode_of(&path), 0o600, "a new one");
    // As of a file that was copied back.
    for mode in [0o644, 0o640, 0o611, 0o755] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let mut one = open(&options);
        assert_eq!(mode_of(&path), 0o600, "from {mode:o}");
        assert!(one.worker.loads(0, 1));
    }
    // One that is refused stays as it is, in this too.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let other = DiskOptions { rules: kv_disk::SlotRules::new(b"another"), ..options };
    assert!(matches!(DiskTier::open(&other), Err(OpenError::Model { .. })));
    assert_eq!(mode_of(&path), 0o644);
}

#[test]
fn a_file_of_somebody_else_is_left_as_it_is_whatever_it_begins_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = file_in(folder.path());
    // Images of disks begin with zeros, and have holes.
    for (length, at) in [(1 << 20, 65_536), (1 << 30, (1 << 30) - 1), (8193, 8192), (100, 99)] {
        for mismatch in [Mismatch::Refuse, Mismatch::Wipe] {
            let file = fs::File::create(&path).unwrap();
            file.set_len(length).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, b"_", at).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let mut options = options(folder.path(), 4);
            options.rules.mismatch = mismatch;
            let error = DiskTier::open(&options).unwrap_err();
            let reason = Hostility::Foreign;
            assert!(matches!(error, OpenError::Hostile { reason: of, .. } if of == reason));
            let (seen, mut byte) = (fs::File::open(&path).unwrap(), [0]);
            std::os::unix::fs::FileExt::read_exact_at(&seen, &mut byte, at).unwrap();
            assert_eq!((seen.metadata().unwrap().len(), byte), (length, *b"_"));
        }
    }
    // One whose making was cut short has nothing but zeros, in a hole or not.
    for (length, written) in [(0, 0), (1 << 20, 0), (1 << 20, 1 << 20)] {
        fs::write(&path, vec![0; written]).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        assert!(open(&options(folder.path(), 4)).found.is_empty(), "{length} {written}");
    }
}

#[test]
fn a_spoilt_file_that_is_wiped_has_its_length_and_its_room_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = file_in(folder.path());
    let mut options = options(folder.path(), 20);
    fill(&options);
    let whole = fs::read(&path).unwrap();
    let part = &crate::common::bytes_of(0, 1, BLOCK_BYTES)[1000..1064];
    let shows = |bytes: &[u8]| bytes.windows(part.len()).any(|window| window == part);
    assert!(shows(&whole));
    options.rules.mismatch = Mismatch::Wipe;
    for length in [8192, 100_000, whole.len(), 1 << 20] {
        let mut bytes = whole.clone();
        (bytes[100], bytes[4096 + 100]) = (1, 1);
        bytes.resize(length, 0);
        fs::write(&path, &bytes).unwrap();
        drop(open(&options));
        let seen = fs::metadata(&path).unwrap();
        assert_eq!(seen.len(), whole.len() as u64, "from {length}");
        assert!(seen.blocks() * 512 >= seen.len(), "{} blocks from {length}", seen.blocks());
        assert!(!shows(&fs::read(&path).unwrap()), "from {length}");
    }
}

fn heading_of(path: &Path) -> Heading {
    let bytes = fs::read(path).unwrap();
    Heading::newer(&bytes[..4096], &bytes[4096..8192]).unwrap()
}

#[test]
fn no_two_files_and_no_two_sets_have_the_same_number() {
    let folders = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let set = |folders: &[tempfile::TempDir]| {
        let mut options = options(folders[0].path(), 4);
        options.folders = folders.iter().map(|folder| folder.path().to_owned()).collect();
        options.bytes *= 2;
        drop(open(&options));
        options
    };
    let (one, _) = (set(&folders[..2]), set(&folders[2..]));
    let names = [0, 1, 0, 1].map(|stripe| format!("kv-disk-00{stripe}.slots"));
    let paths: Vec<_> = folders.iter().zip(names).map(|(of, name)| of.path().join(name)).collect();
    let headings: Vec<_> = paths.iter().map(|path| heading_of(path)).collect();
    let files: BTreeSet<_> = headings.iter().map(|heading| heading.file).collect();
    let sets: Vec<_> = headings.iter().map(|heading| heading.set).collect();
    assert_eq!(files.len(), 4, "{files:x?}");
    assert!(sets[0] == sets[1] && sets[2] == sets[3] && sets[0] != sets[2], "{sets:x?}");
    // The second file of the other set is the right one in all but that.
    fs::copy(&paths[3], &paths[1]).unwrap();
    let error = DiskTier::open(&one).unwrap_err();
    assert!(matches!(error, OpenError::Stripe { stripe: 1, expected: 1, .. }), "{error}");
}

#[test]
fn a_store_that_is_to_survive_a_loss_of_power_is_written_through() {
    // linux/fcntl.h: O_DSYNC.
    const DSYNC: u32 = 0o10_000;
    for survives in [false, true] {
        let (folder, mut options) = in_folder(4);
        options.survives_power_loss = survives;
        options.backend = BackendChoice::Threads;
        // A new file, and one that is there.
        for _ in 0..2 {
            let opened = open(&options);
            let path = file_in(folder.path()).canonicalize().unwrap();
            let open = fs::read_dir("/proc/self/fd")
                .unwrap()
                .flatten()
                .filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path));
            let flags: Vec<u32> = open
                .map(|fd| {
                    let info = Path::new("/proc/self/fdinfo").join(fd.file_name());
                    let info = fs::read_to_string(info).unwrap();
                    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
                    u32::from_str_radix(flags.unwrap().trim(), 8).unwrap()
                })
                .collect();
            assert!(!flags.is_empty());
            assert!(flags.iter().all(|flags| (flags & DSYNC != 0) == survives), "{flags:x?}");
            drop(opened);
        }
    }
}

#[test]
fn an_entry_of_a_later_write_or_of_more_than_a_slot_is_not_believed() {
    let (folder, options) = in_folder(4);
    type Change = fn(&mut Entry, &Heading);
    let cases: [(&str, Change, usize); 5] = [
        ("as it is", |_, _| (), 1),
        ("the last write", |entry, heading| entry.generation = heading.ceiling - 1, 1),
        ("a write that is not yet", |entry, heading| entry.generation = heading.ceiling, 0),
        ("a slot and a page", |entry, _| entry.length += 8192, 0),
        ("all bytes there are", |entry, _| entry.length = u64::MAX, 0),
    ];
    for (what, change, survivors) in cases {
        let _ = fs::remove_file(file_in(folder.path()));
        fill(&options);
        let heading = heading_of(&file_in(folder.path()));
        let mut bytes = fs::read(file_in(folder.path())).unwrap();
        let mut seen = 0;
        for at in (heading.geometry.table_page(0)..heading.geometry.slot(0)).step_by(128) {
            let at = at as usize;
            if let Ok(mut entry) = Entry::parse(&bytes[at..]) {
                change(&mut entry, &heading);
                bytes[at..at + 128].copy_from_slice(&entry.to_bytes());
                seen += 1;
            }
        }
        assert_eq!(seen, 1);
        fs::write(file_in(folder.path()), &bytes).unwrap();
        assert_eq!(open(&options).found.len(), survivors, "{what}");
    }
}

/// What there is below a folder: each path, with its bytes and its mode.
fn tree(folder: &Path) -> Vec<(PathBuf, Vec<u8>, u32)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        if kind.is_symlink() {
            found.push((path, Vec::new(), 0));
            continue;
        }
        let bytes = if kind.is_dir() { Vec::new() } else { fs::read(&path).unwrap() };
        found.push((path.clone(), bytes, mode_of(&path)));
        if kind.is_dir() {
            found.append(&mut tree(&path));
        }
    }
    found.sort();
    found
}

#[test]
fn when_one_file_is_refused_nothing_has_become_of_the_others() {
    type Spoil = fn(&Path, &mut DiskOptions);
    let cases: [(&str, Spoil); 8] = [
        ("a link", |path, _| std::os::unix::fs::symlink("/nowhere", path).unwrap()),
        ("another's file", |path, _| fs::write(path, b"somebody's letters").unwrap()),
        ("zeros and more", |path, _| fs::write(path, [&[0; 9000][..], &[1]].concat()).unwrap()),
        ("another model", |path, options| {
            let beside = tempfile::tempdir().unwrap();
            let mut other = options.clone();
            other.rules = kv_disk::SlotRules::new(b"another");
            other.folders = vec![beside.path().to_owned(), path.parent().unwrap().to_owned()];
            drop(DiskTier::open(&other).unwrap());
        }),
        ("a spoilt heading", |path, _| fs::write(path, b"KVDISK01").unwrap()),
        ("a depth of 0", |_, options| options.rules.read_depth = 0),
        ("no room", |_, options| options.reserve_bytes = u64::MAX),
        ("a folder that cannot be", |_, options| options.folders[1] = "/dev/null/kv".into()),
    ];
    for (what, spoil) in cases {
        let whole = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| whole.path().join(name));
        let mut options = options(&first, 4);
        options.folders = vec![first, second.clone()];
        options.bytes *= 2;
        // The first is new, or is one that would be wiped, or one of the right model.
        for before in ["new", "wiped", "right"] {
            for folder in &options.folders {
                let _ = fs::remove_dir_all(folder);
            }
            if before != "new" {
                let mut earlier = options.clone();
                earlier.folders.truncate(1);
                earlier.bytes /= if before == "wiped" { 1 } else { 2 };
                fill(&earlier);
                fs::set_permissions(
                    file_in(&earlier.folders[0]),
                    fs::Permissions::from_mode(0o644),
                )
                .unwrap();
            }
            fs::create_dir(&second).unwrap();
            let mut wrong = options.clone();
            spoil(&second.join("kv-disk-001.slots"), &mut wrong);
            // Only what is none of this crate's is refused by one that wipes.
            let wipes = ["a link", "another's file", "zeros and more", "a depth of 0"];
            if wipes.contains(&what) || before == "wiped" {
                wrong.rules.mismatch = Mismatch::Wipe;
            }
            if ["another model", "a spoilt heading"].contains(&what) && before == "wiped" {
                continue;
            }
            let seen = tree(whole.path());
            let error = DiskTier::open(&wrong).map(drop).unwrap_err();
            assert!(tree(whole.path()) == seen, "{what}, {before}: {error:?}");
        }
    }
}

#[test]
fn a_refusal_names_the_file_and_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = file_in(folder.path());
    let right = options(folder.path(), 4);
    fill(&right);
    let says = |options: &DiskOptions, remedy: &str| {
        let error = DiskTier::open(options).map(drop).unwrap_err();
        let told = format!("{error:?}");
        let named = told.contains(&folder.path().display().to_string());
        assert!(named && told.contains(remedy), "{told}");
    };
    let other = DiskOptions { rules: kv_disk::SlotRules::new(b"another"), ..right.clone() };
    says(&other, "Mismatch::Wipe");
    says(&options(folder.path(), 5), "Mismatch::Wipe");
    let full = DiskOptions { reserve_bytes: u64::MAX, bytes: right.bytes * 2, ..right.clone() };
    let _ = fs::rename(&path, folder.path().join("away"));
    says(&full, "reserve_bytes");
    fs::write(&path, b"letters").unwrap();
    says(&right, "move it away");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
    says(&right, "chmod 600");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/nowhere", &path).unwrap();
    says(&right, "name the folder");
    fs::remove_file(&path).unwrap();
    fs::rename(folder.path().join("away"), &path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    (bytes[8], bytes[4096 + 8]) = (9, 9);
    let whole = std::mem::replace(&mut bytes, fs::read(&path).unwrap());
    fs::write(&path, whole).unwrap();
    says(&right, "Mismatch::Wipe");
    fs::write(&path, &bytes).unwrap();
    let held = open(&right);
    let at_once = DiskOptions { lock_wait: Duration::ZERO, ..right.clone() };
    says(&at_once, "another folder");
    drop(held);
    let below = folder.path().join("away");
    fs::write(&below, b"").unwrap();
    says(&DiskOptions { folders: vec![below.join("folder")], ..right }, "opening the file failed");
    let small = DiskTier::open(&DiskOptions::new("x", 8192, RECORD_BYTES, b"")).map(drop);
    assert!(format!("{:?}", small.unwrap_err()).contains("at least 20480"));
}
