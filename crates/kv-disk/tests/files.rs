//! Tiers over real files: what survives, what is refused, and whose a folder is.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{BLOCK_BYTES, RECORD_BYTES, Seen, Worker, counted, random};
use kv_disk::io::Backend;
use kv_disk::{
    BackendChoice, DiskOptions, DiskStats, DiskTier, DiskWatch, Hostility, Keep, Mismatch, Miss,
    OpenError, Unstored,
};
use kv_manager::tiers::BlockFault;

fn options(folder: &Path, slots: u64) -> DiskOptions {
    let mut options = DiskOptions::new(folder, 0, RECORD_BYTES, b"a model");
    options.bytes = slots * 8192 + 3 * 4096;
    options.reserve_bytes = 0;
    assert_eq!(options.geometry().unwrap().slots, slots);
    options
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

#[test]
fn what_was_stored_survives_the_process_with_every_backend() {
    for (backend, punches) in [
        (BackendChoice::Best, false),
        (BackendChoice::Threads, false),
        (BackendChoice::Best, true),
        (BackendChoice::Threads, true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(folder.path(), 20);
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
        one.worker.store(1, &[1, 2]);
        one.worker.settle();
        one.worker.forget(0, &[2, 4]);
        one.worker.store(0, &[4]);
        one.worker.settle();
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
        two.worker.store(0, &[7]);
        two.worker.settle();
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
        one.worker.store(0, &[name]);
        one.worker.settle();
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
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), 4);
    let one = open(&options);
    assert!(matches!(DiskTier::open(&options), Err(OpenError::Locked { .. })));
    drop(one);
    drop(open(&options));
}

#[test]
fn another_model_size_or_version_is_refused_or_wiped_by_choice() {
    let folder = tempfile::tempdir().unwrap();
    let right = options(folder.path(), 6);
    let fill = || {
        let mut one = open(&right);
        one.worker.store(0, &[1, 2]);
        one.worker.settle();
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
        wiped.worker.store(0, &[3]);
        wiped.worker.settle();
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
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), 4);
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
        one.worker.store(0, &[1]);
        one.worker.settle();
        one.worker.store(0, &[2]);
        one.worker.settle();
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
        two.worker.store(0, &[1, 3, 4]);
        two.worker.settle();
        assert_eq!(counted(&two.watch, |stats| stats.used_slots == 4).used_slots, 4, "{what}");
    }
    let cut = fs::read(file_in(folder.path())).unwrap();
    fs::write(file_in(folder.path()), &cut[..cut.len() - 1]).unwrap();
    assert!(matches!(DiskTier::open(&options), Err(OpenError::Geometry { .. })));
}

#[test]
fn a_record_of_another_format_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), 4);
    let mut one = open(&options);
    one.worker.store(0, &[1]);
    one.worker.settle();
    drop(one);
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
    let folder = tempfile::tempdir().unwrap();
    let mut limited = options(folder.path(), 8);
    limited.rules.write_bytes_per_day = Some(3 * 8192);
    limited.rules.write_bytes_per_second = Some(1 << 20);
    limited.rules.read_bytes_per_second = Some(1 << 20);
    let mut one = open(&limited);
    one.worker.store(0, &[1, 2, 3, 4, 5]);
    one.worker.settle();
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
    short.worker.store(0, &[1]);
    short.worker.settle();
    let long = |stats: &DiskStats| stats.unstored_as(Unstored::TooLong) == 1;
    assert!(long(&counted(&short.watch, long)));
}

#[test]
fn options_that_cannot_be_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let right = options(folder.path(), 4);
    let none = DiskOptions { folders: Vec::new(), ..right.clone() };
    assert!(matches!(DiskTier::open(&none), Err(OpenError::NoFolder)));
    let small = DiskOptions { bytes: 8192, ..right.clone() };
    assert!(matches!(DiskTier::open(&small), Err(OpenError::TooSmall { bytes: 8192, .. })));
    let reserve = DiskOptions { reserve_bytes: u64::MAX, ..right.clone() };
    assert!(matches!(DiskTier::open(&reserve), Err(OpenError::NoRoom { .. })));
    let mut depth = right.clone();
    depth.rules.read_depth = 0;
    assert!(matches!(DiskTier::open(&depth), Err(OpenError::Depth { reads: 0, .. })));
    let under_file = DiskOptions::new("/dev/null/folder", 1 << 20, RECORD_BYTES, b"");
    assert!(matches!(DiskTier::open(&under_file), Err(OpenError::System { .. })));
}

#[test]
fn a_tier_that_is_dropped_with_stores_open_has_let_go_of_its_files() {
    for backend in [BackendChoice::Best, BackendChoice::Threads] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(folder.path(), 20);
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
