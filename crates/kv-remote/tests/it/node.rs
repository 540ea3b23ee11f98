//! A node in one process: leases that end once, slots that are not reused under their readers, and random programs
//! against a plain model, by a clock that stands still.

use std::sync::{OnceLock, Weak};

use crate::common::{RECORD_BYTES, block, manual_node, random};
use crate::prelude::*;

const SECOND: Duration = Duration::from_secs(1);
const ONE: ReaderId = ReaderId(1);
const TWO: ReaderId = ReaderId(2);

/// Reads a block as a one-sided reader does: without asking.
fn look(node: &Node, found: &Found, at: usize, number: u64) -> Result<Vec<u8>, Unfit> {
    let located = &found.blocks[at];
    let mut bytes = vec![0; located.span.bytes as usize];
    assert!(node.memory().read(located.span.address, &mut bytes));
    located.record(&bytes, block(number)).map(std::borrow::Cow::into_owned)
}

fn open(node: &Node) -> LeaseCounts {
    let counts = node.stats().leases;
    assert_eq!(counts.granted, counts.returned + counts.cancelled + counts.expired + counts.open);
    assert_eq!(counts.open, node.pool().loans() as u64);
    counts
}

#[test]
fn the_longest_run_is_found_and_what_is_not_there_ends_it() {
    let (node, _) = manual_node(8);
    for number in [1, 2, 3, 5] {
        node.put(block(number), &record(number)).unwrap();
    }
    let found = node.find_and_pin(ONE, &blocks(1..=5), SECOND).unwrap();
    assert_eq!(found.blocks.len(), 3);
    assert_eq!(node.stats().used_slots, 4, "three of them under a lease");
    for (at, number) in (0..).zip(1..=3) {
        assert_eq!(look(&node, &found, at, number), Ok(record(number)));
    }
    assert_eq!(node.find_and_pin(ONE, &blocks([4, 5]), SECOND), Ok(Found::default()));
    assert_eq!(node.find_and_pin(ONE, &[], SECOND), Ok(Found::default()));
    // A name of one group is none of the other.
    let one = block(1);
    let others = [
        RecordKey { group: kv_pool::GroupId(one.group.0 + 1), ..one },
        RecordKey { format: one.format + 1, ..one },
    ];
    for other in others {
        assert_eq!(node.find_and_pin(ONE, &[other], SECOND), Ok(Found::default()));
    }
    assert_eq!(open(&node).open, 1);
}

#[test]
fn a_lease_ends_once_whoever_ends_it() {
    let (node, clock) = manual_node(4);
    node.put(block(1), &record(1)).unwrap();
    let lease = |reader| node.find_and_pin(reader, &blocks([1]), SECOND).unwrap().lease.unwrap();
    let (first, second, third, fourth) = (lease(ONE), lease(ONE), lease(TWO), lease(TWO));
    assert_eq!(node.end(TWO, first), Err(Refusal::NoLease));
    assert_eq!(node.end(ONE, first), Ok(()));
    assert_eq!(node.end(ONE, first), Err(Refusal::NoLease), "a lease that was returned");
    node.end_reader(ONE);
    assert_eq!(node.end(ONE, second), Err(Refusal::NoLease), "a lease whose reader has gone");
    clock.advance(SECOND);
    node.end_overdue();
    assert_eq!(node.end(TWO, third), Err(Refusal::NoLease), "a lease whose time has come");
    node.end_reader(TWO);
    assert_eq!(node.end(TWO, fourth), Err(Refusal::NoLease));
    assert_eq!(node.end(TWO, LeaseId(u64::MAX)), Err(Refusal::NoLease));
    let counts = LeaseCounts { granted: 4, returned: 1, cancelled: 1, expired: 2, open: 0 };
    assert_eq!(open(&node), counts);
    assert_eq!(node.pool().claimable(), 4);
}

#[test]
fn a_pinned_slot_is_kept_and_a_late_reader_is_told_that_it_is_another_write() {
    let (node, clock) = manual_node(4);
    (1..=4).for_each(|number| node.put(block(number), &record(number)).unwrap());
    let found = node.find_and_pin(ONE, &blocks([1, 2]), SECOND).unwrap();
    (5..40).for_each(|number| node.put(block(number), &record(number)).unwrap());
    // Forgotten and stored anew, the bytes under a lease stay.
    node.forget(&blocks([1, 2]));
    node.put(block(1), &record(1)).unwrap();
    node.clear();
    for (at, number) in [(0, 1), (1, 2)] {
        assert_eq!(look(&node, &found, at, number), Ok(record(number)));
    }
    clock.advance(SECOND);
    let spans: Vec<Span> = found.blocks.iter().map(|block| block.span).collect();
    let read = node.read(ONE, found.lease.unwrap(), &spans, &mut Vec::new());
    assert_eq!(read, Err(Refusal::NoLease), "its time has come, though nobody has looked yet");
    node.end_overdue();
    (50..60).for_each(|number| node.put(block(number), &record(number)).unwrap());
    assert_eq!(look(&node, &found, 0, 1), Err(Unfit::Stale));
    assert_eq!(look(&node, &found, 1, 2), Err(Unfit::Stale));
    assert_eq!(open(&node).expired, 1);
}

#[test]
fn a_node_whose_slots_are_all_pinned_takes_nothing_and_says_so() {
    let (node, clock) = manual_node(2);
    (1..=2).for_each(|number| node.put(block(number), &record(number)).unwrap());
    let lease = node.find_and_pin(ONE, &blocks([1, 2]), SECOND).unwrap().lease;
    assert_eq!(node.put(block(3), &record(3)), Err(Refusal::NoRoom));
    assert!(node.pool().claim(1).is_err());
    clock.advance(2 * SECOND);
    assert_eq!(node.put(block(3), &record(3)), Err(Refusal::NoRoom), "nobody has looked");
    node.end_overdue();
    assert_eq!(node.put(block(3), &record(3)), Ok(()));
    assert_eq!(node.end(ONE, lease.unwrap()), Err(Refusal::NoLease));
    assert_eq!(node.put(block(4), &[]), Err(Refusal::Length));
    assert_eq!(node.put(block(4), &[0; 301]), Err(Refusal::Length));
}

#[test]
fn only_bytes_under_the_readers_own_lease_are_copied_for_it() {
    let (node, _) = manual_node(4);
    (1..=4).for_each(|number| node.put(block(number), &record(number)).unwrap());
    let found = node.find_and_pin(ONE, &blocks([1]), SECOND).unwrap();
    let (lease, span) = (found.lease.unwrap(), found.blocks[0].span);
    let read = |reader, lease, spans: &[Span]| {
        let mut bytes = vec![7];
        let read = node.read(reader, lease, spans, &mut bytes).map(|()| bytes.len());
        assert!(read.is_ok() || bytes == [7]);
        read
    };
    assert_eq!(read(ONE, lease, &[span]), Ok(1 + span.bytes as usize));
    assert_eq!(read(TWO, lease, &[span]), Err(Refusal::NoLease));
    assert_eq!(read(ONE, LeaseId(0), &[span]), Err(Refusal::NoLease));
    let slot = node.slot_bytes();
    for (address, bytes) in [
        (span.address + slot, 1),
        (span.address, slot as u32 + 1),
        (span.address ^ slot, 8),
        (u64::MAX, 1),
        (u64::MAX - 8, 8),
        (4 * slot, 0),
    ] {
        let outside = Span { address, bytes };
        assert_eq!(read(ONE, lease, &[span, outside]), Err(Refusal::OutsideLease), "{outside:?}");
    }
    let much = vec![Span { address: span.address, bytes: u32::MAX }; 2];
    assert_eq!(read(ONE, lease, &much), Err(Refusal::Length));
}

#[test]
fn two_blocks_that_the_pool_takes_for_one_are_told_apart() {
    let (node, _) = manual_node(4);
    // What `pool_name` adds for the second group.
    const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    let key = |group, name| RecordKey {
        format: 0,
        group: kv_pool::GroupId(group),
        name: kv_pool::BlockHash::from_u128(name),
    };
    let (one, two) = (key(0, 77), key(1, 77 ^ SPREAD));
    node.put(one, &record(1)).unwrap();
    assert_eq!(node.find_and_pin(ONE, &[two], SECOND), Ok(Found::default()));
    assert_eq!(open(&node).open, 0, "nothing is pinned for a block that is not there");
    node.put(two, &record(2)).unwrap();
    assert_eq!(node.find_and_pin(ONE, &[one], SECOND), Ok(Found::default()));
    assert_eq!(node.find_and_pin(ONE, &[two], SECOND).unwrap().blocks.len(), 1);
}

/// Memory that has its node cleared while a record is written to it, or takes nothing.
#[derive(Debug)]
struct Spoilt {
    memory: HostMemory,
    node: OnceLock<Weak<Node>>,
    is_full: bool,
}

impl Memory for Spoilt {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.memory.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        if let Some(node) = self.node.get().and_then(Weak::upgrade) {
            node.clear();
        }
        !self.is_full && self.memory.write(address, from)
    }
}

fn spoilt(is_full: bool) -> (Arc<Node>, Arc<Spoilt>) {
    let memory = HostMemory::new(4096).unwrap();
    let memory = Arc::new(Spoilt { memory, node: OnceLock::new(), is_full });
    let options = NodeOptions::new("a", common::RECORD_BYTES);
    let node = Node::new(&options, Arc::clone(&memory) as _, Arc::new(SystemClock::new()));
    (Arc::new(node.unwrap()), memory)
}

#[test]
fn what_is_cleared_while_it_is_written_is_not_found() {
    let (node, memory) = spoilt(false);
    node.put(block(1), &record(1)).unwrap();
    memory.node.set(Arc::downgrade(&node)).unwrap();
    node.put(block(2), &record(2)).unwrap();
    for number in [1, 2] {
        assert_eq!(node.find_and_pin(ONE, &[block(number)], SECOND), Ok(Found::default()));
    }
    assert_eq!(node.stats().stored, 1);
    assert_eq!(node.pool().claimable() as u64, node.stats().slots);
}

#[test]
fn a_record_that_was_not_written_is_not_found_and_costs_no_slot() {
    let (node, _) = spoilt(true);
    for _ in 0..100 {
        assert_eq!(node.put(block(1), &record(1)), Err(Refusal::NoRoom));
    }
    assert_eq!(node.find_and_pin(ONE, &[block(1)], SECOND), Ok(Found::default()));
    assert_eq!(node.pool().claimable() as u64, node.stats().slots);
}

/// All that can be seen of a node: its counts, what it has told, its slots and its bytes.
fn whole(node: &Node) -> (String, Vec<u8>) {
    let mut bytes = vec![0; node.memory().bytes() as usize];
    assert!(node.memory().read(0, &mut bytes));
    let told = node.changes(Cursor::default(), (true, FORMAT));
    (format!("{:?} {told:?} {:?}", node.stats(), node.pool().stats()), bytes)
}

#[test]
fn a_call_that_is_refused_changes_nothing() {
    let clock = ManualClock::new();
    let mut options = NodeOptions::new("a", RECORD_BYTES);
    options.leases_max = 1;
    let memory = HostMemory::new(4 * (64 + RECORD_BYTES).next_multiple_of(64)).unwrap();
    let node = Node::new(&options, Arc::new(memory), Arc::new(clock)).unwrap();
    let node = Arc::new(node);
    (1..=4).for_each(|number| node.put(block(number), &record(number)).unwrap());
    let found = node.find_and_pin(ONE, &blocks(1..=3), SECOND).unwrap();
    let (lease, first) = (found.lease.unwrap(), found.blocks[0].span);
    let (long, last) = (RECORD_BYTES as u32 + 1, found.blocks[2].span);
    let behind = Span { address: last.address + node.slot_bytes(), bytes: 1 };
    let many = vec![first; (64 << 20) / first.bytes as usize + 1];
    let room = |records: &[_]| node.reserve(records).map(drop);
    let read = |reader, lease, spans: &[Span]| node.read(reader, lease, spans, &mut Vec::new());
    let refused = |what: &str, expected: Refusal, call: &dyn Fn() -> Result<(), Refusal>| {
        let before = whole(&node);
        assert_eq!(call(), Err(expected), "{what}");
        assert!(whole(&node) == before, "{what}");
    };
    refused("no byte", Refusal::Length, &|| node.put(block(4), &[]));
    refused("a long record", Refusal::Length, &|| node.put(block(4), &vec![1; long as usize]));
    refused("no byte, last", Refusal::Length, &|| room(&[(block(4), 8), (block(5), 0)]));
    refused("a long one, last", Refusal::Length, &|| room(&[(block(4), 8), (block(5), long)]));
    refused("more than slots", Refusal::NoRoom, &|| room(&[(block(4), 8), (block(5), 8)]));
    refused("a lease too many", Refusal::Busy, &|| {
        node.find_and_pin(TWO, &blocks([4]), SECOND).map(drop)
    });
    refused("another's lease", Refusal::NoLease, &|| read(TWO, lease, &[first]));
    refused("no lease", Refusal::NoLease, &|| read(ONE, LeaseId(u64::MAX), &[first]));
    refused("behind the lease", Refusal::OutsideLease, &|| read(ONE, lease, &[first, behind]));
    refused("a longer frame", Refusal::Length, &|| read(ONE, lease, &many));
    refused("to end another's lease", Refusal::NoLease, &|| node.end(TWO, lease));
    refused("to end no lease", Refusal::NoLease, &|| node.end(ONE, LeaseId(u64::MAX)));
    let reserved = node.reserve(&[(block(6), 8)]).unwrap();
    refused("no slot left", Refusal::NoRoom, &|| node.put(block(5), &record(5)));
    refused("no slot to write", Refusal::NoRoom, &|| room(&[(block(5), 8)]));
    assert_eq!(reserved.keep(&[1, 2]), Err(Refusal::Length));
    assert_eq!(node.pool().claimable(), 1, "what was reserved is free");
}

/// Writes what a device would: words, whose sum is theirs.
fn written(node: &Node, span: Span, number: u64) -> u64 {
    let words: Vec<u64> = (0..u64::from(span.bytes) / 8).map(|at| number << 32 | at).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    assert!(node.memory().write(span.address, &bytes));
    words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

#[test]
fn what_something_else_writes_is_found_with_its_sum_once_it_is_whole() {
    let (node, _) = manual_node(4);
    let node = Arc::new(node);
    node.put(block(1), &record(1)).unwrap();
    for turn in 0..3 {
        let room = node.reserve(&[(block(1), 64), (block(2), 128)]).unwrap();
        let spans: Vec<_> = room.spans().collect();
        assert_eq!(spans.iter().map(|span| span.bytes).collect::<Vec<_>>(), [64, 128]);
        assert!(spans.iter().all(|span| span.address % 64 == 0));
        let sums: Vec<_> =
            spans.iter().zip([1, 2]).map(|(&span, of)| written(&node, span, of + turn)).collect();
        // What was there before is there until then.
        let before = node.find_and_pin(ONE, &blocks([1, 2]), SECOND).unwrap();
        assert_eq!(before.blocks.len(), if turn == 0 { 1 } else { 2 });
        node.end(ONE, before.lease.unwrap()).unwrap();
        assert!(before.blocks.iter().all(|at| !spans.contains(&at.record_span())));
        room.keep(&sums).unwrap();
        let found = node.find_and_pin(ONE, &blocks([1, 2]), SECOND).unwrap();
        assert_eq!(found.blocks.iter().map(|at| at.record_span()).collect::<Vec<_>>(), spans);
        assert_eq!(found.blocks.iter().map(|at| at.sum).collect::<Vec<_>>(), sums);
        // A reader that does not know how it is summed takes it for nothing.
        for (at, number) in [1, 2].into_iter().enumerate() {
            assert!(look(&node, &found, at, number).is_err());
        }
        node.end(ONE, found.lease.unwrap()).unwrap();
    }
    assert_eq!(open(&node).open, 0);
    assert_eq!(node.pool().claimable(), 4);
}

#[test]
fn room_that_is_being_written_is_nobody_elses_and_comes_back() {
    let (node, _) = manual_node(4);
    let node = Arc::new(node);
    let room = node.reserve(&[(block(1), 64), (block(2), 64)]).unwrap();
    let spans: Vec<_> = room.spans().collect();
    for number in 10..50 {
        node.put(block(number), &record(number)).unwrap();
        let found = node.find_and_pin(ONE, &[block(number)], SECOND).unwrap();
        assert!(!spans.contains(&found.blocks[0].record_span()));
        node.end(ONE, found.lease.unwrap()).unwrap();
    }
    // No room for a third and a fourth and a fifth: all that was claimed for them comes back.
    let three: Vec<_> = (3..6).map(|number| (block(number), 64)).collect();
    assert_eq!(node.reserve(&three).map(drop), Err(Refusal::NoRoom));
    assert_eq!(node.pool().claimable(), 2);
    drop(room);
    assert_eq!(node.pool().claimable(), 4);
    assert_eq!(node.find_and_pin(ONE, &[block(1)], SECOND), Ok(Found::default()));
    // What cannot be costs no record that is there.
    (8..10).for_each(|number| node.put(block(number), &record(number)).unwrap());
    let wrong = [(block(2), 64), (block(3), 64), (block(4), 64), (block(5), 0)];
    assert_eq!(node.reserve(&wrong).map(drop), Err(Refusal::Length));
    let five: Vec<_> = (2..7).map(|number| (block(number), 64)).collect();
    assert_eq!(node.reserve(&five).map(drop), Err(Refusal::NoRoom));
    let pinned = node.find_and_pin(ONE, &blocks([8]), SECOND).unwrap().lease.unwrap();
    assert_eq!(node.reserve(&five[..4]).map(drop), Err(Refusal::NoRoom), "three can be had");
    node.end(ONE, pinned).unwrap();
    let found = node.find_and_pin(ONE, &blocks([8, 9]), SECOND).unwrap();
    assert_eq!(found.blocks.len(), 2);
    node.end(ONE, found.lease.unwrap()).unwrap();
    let four = &five[..4];
    drop(node.reserve(four).unwrap());
    for number in 8..10 {
        assert_eq!(node.find_and_pin(ONE, &[block(number)], SECOND), Ok(Found::default()));
    }
    let room = node.reserve(&[(block(1), 64)]).unwrap();
    for sums in [&[][..], &[1, 2]] {
        let other = node.reserve(&[(block(2), 64)]).unwrap();
        assert_eq!(other.keep(sums), Err(Refusal::Length));
    }
    assert_eq!(node.pool().claimable(), 3);
    // All was cleared while it was written.
    node.clear();
    room.keep(&[7]).unwrap();
    assert_eq!(node.find_and_pin(ONE, &[block(1)], SECOND), Ok(Found::default()));
    assert_eq!(node.pool().claimable(), 4);
    assert!(node.reserve(&[]).unwrap().keep(&[]).is_ok());
}

/// What a reader has of one answer.
struct Held {
    reader: ReaderId,
    found: Found,
    numbers: Vec<u64>,
    deadline: Duration,
}

/// Random programs of two readers and a writer.
fn run_model(seed: u64) {
    let slots = 6;
    let (node, clock) = manual_node(slots);
    let mut state = seed;
    let mut held: Vec<Held> = Vec::new();
    let mut there: BTreeMap<u64, ()> = BTreeMap::new();
    let (mut returned, mut late) = (0, 0);
    for turn in 0..300 {
        let number = random(&mut state) % 12;
        let reader = [ONE, TWO][(random(&mut state) % 2) as usize];
        match random(&mut state) % 10 {
            0..=3 => {
                if node.put(block(number), &record(number)).is_ok() {
                    there.insert(number, ());
                }
            }
            4 | 5 => {
                let numbers: Vec<u64> = (number..number + 3).collect();
                let lease = Duration::from_millis(1 + random(&mut state) % 40);
                let found = node.find_and_pin(reader, &blocks(numbers.clone()), lease).unwrap();
                // What was never stored, or was forgotten, is not found.
                let known = numbers.iter().take_while(|number| there.contains_key(number)).count();
                assert!(found.blocks.len() <= known, "turn {turn}: found what is not there");
                if found.lease.is_some() {
                    held.push(Held { reader, found, numbers, deadline: clock.now() + lease });
                }
            }
            6 if !held.is_empty() => {
                let held = held.swap_remove(number as usize % held.len());
                let in_time = held.deadline > clock.now();
                let ended = node.end(held.reader, held.found.lease.unwrap());
                assert!(ended.is_ok() || !in_time, "turn {turn}: a lease in force has ended");
                returned += u64::from(ended.is_ok());
            }
            7 => {
                node.forget(&[block(number)]);
                there.remove(&number);
            }
            8 => clock.advance(Duration::from_millis(random(&mut state) % 30)),
            _ => node.end_overdue(),
        }
        for held in &held {
            for (at, &number) in held.numbers.iter().take(held.found.blocks.len()).enumerate() {
                match look(&node, &held.found, at, number) {
                    Ok(bytes) => assert_eq!(bytes, record(number), "turn {turn}: wrong bytes"),
                    Err(unfit) => {
                        assert!(
                            held.deadline <= clock.now(),
                            "turn {turn}: {unfit:?} under a lease"
                        );
                        late += 1;
                    }
                }
            }
        }
        let counts = open(&node);
        assert_eq!(counts.returned, returned);
        let stats = node.stats();
        assert!(stats.used_slots <= slots && counts.open <= held.len() as u64);
    }
    clock.advance(Duration::from_secs(100));
    node.end_overdue();
    assert_eq!(open(&node).open, 0, "seed {seed}");
    assert_eq!(node.pool().claimable() as u64, slots, "seed {seed}: a slot is lost");
    node.pool().check_integrity().unwrap();
    LATE.fetch_add(late, Ordering::Relaxed);
}

/// Reads that were found out to be late, in all programs of the process.
static LATE: AtomicU64 = AtomicU64::new(0);

#[test]
fn random_programs_give_right_bytes_under_a_lease_and_lose_no_pin() {
    let (seeds, first) = (number_of("KV_REMOTE_SEEDS", 60), number_of("KV_REMOTE_SEED", 1));
    for seed in first..first + seeds {
        let ran = std::panic::catch_unwind(|| run_model(seed));
        assert!(ran.is_ok(), "seed {seed}");
    }
    assert!(LATE.load(Ordering::Relaxed) > 0, "readers are late at times");
}

/// Readers pin and read at full speed while others store, forget and claim slots of the same pool (H8, H9, H10).
#[test]
fn the_pin_race() {
    let node = node_with("a", 12, Arc::new(SystemClock::new()));
    let until = Instant::now() + Duration::from_secs(number_of("KV_REMOTE_RACE_SECONDS", 0));
    let least = 3_000;
    let (stop, read) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    let claimed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut state = 1;
            while !stop.load(Ordering::Acquire) {
                let number = random(&mut state) % 20;
                match random(&mut state) % 16 {
                    0 => node.forget(&[block(number)]),
                    _ => drop(node.put(block(number), &record(number))),
                }
            }
        });
        // A scheduler that takes slots for itself, and writes to them.
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let Ok(mine) = node.pool().claim(2) else { continue };
                for id in mine.ids() {
                    let address = id.index() as u64 * node.slot_bytes();
                    assert!(node.memory().write(address, &[0xcc; 364]));
                }
                claimed.fetch_add(1, Ordering::Relaxed);
            }
        });
        let readers: Vec<_> = [ONE, TWO]
            .into_iter()
            .zip(&read)
            .map(|(reader, read)| {
                let (node, claimed) = (&node, &claimed);
                scope.spawn(move || {
                    let mut state = reader.0 << 32;
                    while read.load(Ordering::Relaxed) < least || Instant::now() < until {
                        let first = random(&mut state) % 20;
                        let numbers: Vec<u64> = (first..first + 3).collect();
                        let wanted = blocks(numbers.iter().copied());
                        let found = node.find_and_pin(reader, &wanted, 10 * SECOND).unwrap();
                        let Some(lease) = found.lease else { continue };
                        // At times it is slow, and all slots that are not pinned change hands.
                        if random(&mut state).is_multiple_of(64) {
                            let before = claimed.load(Ordering::Relaxed);
                            let others = || claimed.load(Ordering::Relaxed) - before;
                            (0..100_000)
                                .take_while(|_| others() < 12)
                                .for_each(|_| std::thread::yield_now());
                        }
                        for (at, &number) in (0..found.blocks.len()).zip(&numbers) {
                            assert_eq!(look(node, &found, at, number), Ok(record(number)));
                        }
                        node.end(reader, lease).unwrap();
                        read.fetch_add(found.blocks.len() as u64, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let ended: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Release);
        assert!(ended.iter().all(Result::is_ok), "a block under a lease has changed");
    });
    let [one, two] = read.map(AtomicU64::into_inner);
    println!("{one} and {two} blocks read, {} claims", claimed.into_inner());
    let counts = open(&node);
    assert_eq!((counts.open, counts.expired), (0, 0));
    assert_eq!(node.pool().claimable(), 12);
    node.pool().check_integrity().unwrap();
}
