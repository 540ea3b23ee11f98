//! Blocks that a disk reads and writes in host memory itself: what is checked, and whose the memory is meanwhile.

use std::os::unix::fs::FileExt;

use crate::prelude::*;

const SLOTS: u64 = 4;
const HEADER_BYTES: usize = 64 + 3 * 8;

fn options(folder: &Path, backend: BackendChoice) -> DiskOptions {
    let bytes = SLOTS * 12_288 + 3 * 4096;
    let mut options = DiskOptions::new(folder, bytes, PAGED_RECORD_BYTES, b"a model");
    options.reserve_bytes = 0;
    options.backend = backend;
    options
}

fn open(folder: &Path, backend: BackendChoice) -> (Worker, DiskWatch, BTreeSet<(u16, u64)>) {
    let tier = DiskTier::open(&options(folder, backend)).unwrap();
    let watch = tier.watch();
    let tier = Arc::new(Mutex::new(tier));
    let worker = Worker::new(Seen(Arc::clone(&tier)), PAGED_BYTES);
    let found = worker.survivors(&tier);
    (worker, watch, found)
}

fn file_in(folder: &Path) -> PathBuf {
    folder.join("kv-disk-000.slots")
}

/// A disk in memory, with a fault at an operation: 0 and 1 are headings, 2 is a slot, 3 its page of the table.
fn over_memory(fault: Option<(u64, DiskFault)>) -> (Worker, Arc<Mutex<SlotFile>>, Image) {
    let slot_bytes = Geometry::slot_bytes_for(PAGED_RECORD_BYTES);
    let geometry = Geometry { slots: SLOTS, slot_bytes };
    let found_bytes = geometry.bytes();
    let place =
        Place { geometry, stripe: 0, stripes: 1, set: 11, file: 12, found_bytes, is_new: true };
    let image = Image::new(found_bytes as usize);
    let plan = FaultPlan { at: fault.into_iter().collect(), ..FaultPlan::default() };
    let file = MemoryFile::new(&image, plan, Crash::Nothing);
    let tier = SlotFile::open(Box::new(file), &place, &SlotRules::new(b"a model")).unwrap();
    let tier = Arc::new(Mutex::new(tier));
    (Worker::new(Seen(Arc::clone(&tier)), PAGED_BYTES), tier, image)
}

#[test]
fn blocks_of_whole_pages_come_and_go_without_a_copy_by_every_backend() {
    for backend in [BackendChoice::Best, BackendChoice::Threads] {
        let folder = tempfile::tempdir().unwrap();
        let (mut one, watch, _) = open(folder.path(), backend);
        one.store(0, &[1, 2, 3]);
        one.settle();
        // The worker compares the bytes.
        assert!((1..=3).all(|name| one.loads(0, name)));
        let uncopied = |stats: &DiskStats| stats.uncopied == 6;
        assert!(uncopied(&counted(&watch, uncopied)), "{backend:?}: {:?}", watch.stats());
        drop(one);
        // Each block lies in the file as it is, at a page of its own.
        let bytes = fs::read(file_in(folder.path())).unwrap();
        let block = bytes_of(0, 1, PAGED_BYTES);
        assert!(bytes.chunks(4096).any(|page| page == &block[..4096]));
        let (mut two, _, found) = open(folder.path(), backend);
        assert_eq!(found.len(), 3);
        assert!((1..=3).all(|name| two.loads(0, name)), "{backend:?}");
    }
}

#[test]
fn a_block_that_changed_in_the_file_has_landed_and_is_a_miss() {
    for (what, at) in [
        ("the first byte of the block", 4096),
        ("the last one", 4096 + PAGED_BYTES - 1),
        ("a sum of the header", ENTRY_BYTES + HEADER_BYTES - 1),
        ("the entry", 40),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (mut one, ..) = open(folder.path(), BackendChoice::Best);
        one.store(0, &[1, 2]);
        one.settle();
        drop(one);
        let file = fs::File::options().read(true).write(true).open(file_in(folder.path())).unwrap();
        let (place, mut byte) = (3 * 4096 + at as u64, [0]);
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 4], place).unwrap();
        let (mut two, watch, _) = open(folder.path(), BackendChoice::Best);
        assert!(!two.loads(0, 1), "{what}");
        assert_eq!(two.missed, [BlockFault::Checksum], "{what}");
        assert!(two.loads(0, 2), "{what}");
        let torn = |stats: &DiskStats| stats.missed_as(Miss::Torn) == 1 && stats.loaded == 1;
        assert!(torn(&counted(&watch, torn)), "{what}: {:?}", watch.stats());
        assert!(!two.loads(0, 1) && two.missed[1] == BlockFault::Missing, "{what}: it has gone");
    }
}

#[test]
fn an_older_record_of_the_same_block_behind_a_new_entry_is_a_miss() {
    let (mut worker, tier, image) = over_memory(None);
    worker.keep(0, &[1]);
    let slot = 3 * 4096;
    let old = image.bytes()[slot..slot + 12_288].to_vec();
    worker.forget(0, &[1]);
    // The same name with other content: a tier does not know that it cannot be.
    let host = Arc::clone(&worker.host);
    worker.store_as(0, 1, &|at| host.put(at, &[7; 100]));
    worker.settle();
    let bytes = image.bytes();
    let here = bytes.chunks(12_288).zip(0..).skip(1);
    let place = here.map(|(_, at)| at * 12_288).find(|&at| {
        bytes[at..].starts_with(b"KVSLOT01") && bytes[at + 4096..].starts_with(&[7; 100])
    });
    let place = place.unwrap();
    image.change(|bytes| {
        // Header and block are as they were, and right in themselves.
        bytes[place + ENTRY_BYTES..place + 12_288].copy_from_slice(&old[ENTRY_BYTES..]);
    });
    assert!(!worker.loads(0, 1));
    assert_eq!(tier.lock().unwrap().stats().missed_as(Miss::Torn), 1);
}

#[test]
fn a_load_that_is_given_up_keeps_its_memory_until_the_disk_has_done() {
    let (mut worker, _, _) = over_memory(Some((4, DiskFault::Late)));
    worker.keep(0, &[1]);
    worker.load(0, &[1]);
    assert_eq!(worker.poll(), 1, "it is being read");
    worker.transfers.give_up(TicketId(2));
    // What the engine is told at once, and what the manager is told when nobody writes the memory any more.
    assert_eq!(worker.poll(), 1, "the disk has the memory");
    worker.settle();
    assert_eq!((worker.loaded, &worker.missed[..]), (0, &[BlockFault::Late][..]));
}

#[test]
fn memory_that_is_taken_back_is_waited_for() {
    let (mut worker, _, _) = over_memory(Some((4, DiskFault::Late)));
    worker.keep(0, &[1]);
    worker.load(0, &[1]);
    worker.poll();
    worker.fence();
    assert!(!worker.transfers.await_lent(Duration::ZERO), "the disk has it");
    assert!(worker.transfers.await_lent(Duration::from_secs(60)));
    assert!(worker.transfers.await_lent(Duration::ZERO));
}

#[test]
fn a_store_whose_memory_was_taken_back_is_not_found() {
    let (mut worker, tier, _) = over_memory(Some((2, DiskFault::Late)));
    worker.store(0, &[1]);
    worker.poll();
    worker.fence();
    // The worker has the memory back for other blocks, as soon as the disk is no longer waited for.
    worker.host.put(crate::common::place_of(0, 1) * PAGED_BYTES, &[9; PAGED_BYTES]);
    assert!(worker.transfers.await_lent(Duration::from_secs(60)));
    assert!(!worker.loads(0, 1));
    let stats = tier.lock().unwrap().stats();
    assert_eq!((stats.unstored_as(Unstored::Refused), stats.missed_as(Miss::Absent)), (1, 1));
}

#[test]
fn memory_that_the_system_refuses_is_copied_instead() {
    // The write of a slot, and the read of one.
    for position in [2, 4] {
        let (mut worker, tier, _) = over_memory(Some((position, DiskFault::Memory)));
        worker.keep(0, &[1]);
        assert!(worker.loads(0, 1), "{position}");
        let tier = tier.lock().unwrap();
        let stats = tier.stats();
        assert_eq!((stats.failed_operations, stats.missed()), (0, 0), "{position}");
        assert!(stats.uncopied < 2 && tier.off().is_none(), "{position}: {stats:?}");
    }
}

#[test]
fn a_block_that_was_written_where_it_is_is_loaded_by_a_copy_and_the_other_way_round() {
    for lends in [true, false] {
        let (mut worker, tier, _) = over_memory(None);
        worker.host.lends.store(lends, Relaxed);
        worker.keep(0, &[1]);
        worker.host.lends.store(!lends, Relaxed);
        assert!(worker.loads(0, 1), "the worker compares the bytes");
        assert_eq!(tier.lock().unwrap().stats().uncopied, 1);
    }
}

#[test]
fn a_slot_holds_nothing_of_the_block_that_its_buffer_had_before() {
    let (mut paged, tier, image) = over_memory(None);
    let mut other = Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES);
    // Its block begins right behind its header, and ends in the middle of a page.
    other.store(0, &[3]);
    other.settle();
    paged.keep(0, &[1]);
    paged.host.lends.store(false, Relaxed);
    paged.keep(0, &[2]);
    let bytes = image.bytes();
    let slots = bytes[3 * 4096..].chunks(12_288).filter(|slot| slot.starts_with(b"KVSLOT01"));
    let mut seen = 0;
    for slot in slots {
        let end = ENTRY_BYTES + HEADER_BYTES;
        let paged = slot[end..4096].iter().all(|byte| *byte == 0);
        let copied = slot[end + BLOCK_BYTES..].iter().all(|byte| *byte == 0);
        assert!(paged || copied, "{slot:?}");
        seen += 1;
    }
    assert_eq!(seen, 3);
}

#[test]
fn a_slot_holds_nothing_of_a_longer_block_behind_a_shorter_one() {
    let (mut paged, tier, image) = over_memory(None);
    paged.host.lends.store(false, Relaxed);
    paged.keep(0, &[1]);
    let mut shorter = Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES);
    shorter.store(0, &[3]);
    shorter.settle();
    let bytes = image.bytes();
    let behind = ENTRY_BYTES + HEADER_BYTES + BLOCK_BYTES;
    let slots: Vec<_> = bytes[3 * 4096..].chunks(12_288).collect();
    let short = slots
        .iter()
        .find(|slot| slot[ENTRY_BYTES + HEADER_BYTES..behind] == bytes_of(0, 3, BLOCK_BYTES));
    assert!(short.unwrap()[behind..8192].iter().all(|byte| *byte == 0));
}
