//! The host tier of an engine, served by a node beside its own slots: found, pinned while the engine evicts, and told of.

use std::panic::{self, AssertUnwindSafe};

use crate::common::engine::{Ends, Engine, Host};
use crate::common::worker::{BLOCK_BYTES, RECORD_BYTES, bytes_of};
use crate::common::{block, random};
use crate::prelude::*;
use kv_manager::{CacheEvent, EventReader};
use kv_tier::HostShare;

const SECOND: Duration = Duration::from_secs(1);
const ONE: ReaderId = ReaderId(1);
const TWO: ReaderId = ReaderId(2);

/// An engine whose blocks are the even numbers, all of the first group.
fn engine(device: u64, host: u64) -> (Engine, Arc<HostShare>) {
    let mut engine = Engine::new(device, host);
    let memory: Vec<Arc<dyn HostBlocks>> = vec![engine.host.clone()];
    let share = engine.manager.share_host(FORMAT, memory).unwrap();
    (engine, share)
}

fn evens(range: std::ops::Range<u64>) -> Vec<u64> {
    range.map(|at| at * 2).collect()
}

/// A node with some slots, which shares a host tier.
fn sharing(mut options: NodeOptions, share: &Arc<HostShare>, clock: Arc<dyn Clock>) -> Node {
    options.host_bytes = share.bytes();
    let node = node_of(&options, 1 << 12, clock);
    node.share(Arc::clone(share)).unwrap();
    node
}

/// Options of a node that lends so many bytes of the host tier at most.
fn lending(host_lent_max: Option<u64>) -> NodeOptions {
    NodeOptions { host_lent_max, ..NodeOptions::new("a", RECORD_BYTES) }
}

fn node(share: &Arc<HostShare>, clock: Arc<dyn Clock>) -> Node {
    sharing(lending(Some(u64::MAX)), share, clock)
}

/// An engine of which the first eight blocks are in host memory, and a node that serves them.
fn rig() -> (Engine, Arc<HostShare>, Node, ManualClock) {
    let (mut engine, share) = engine(8, 8);
    engine.compute(&evens(0..8));
    engine.compute(&evens(100..108));
    let clock = ManualClock::new();
    let node = node(&share, Arc::new(clock.clone()));
    (engine, share, node, clock)
}

/// All blocks of the engine leave it.
fn churn(engine: &mut Engine, turns: std::ops::Range<u64>) {
    for turn in turns {
        engine.compute(&evens(turn * 8..turn * 8 + 8));
    }
}

fn wanted(numbers: &[u64]) -> Vec<RecordKey> {
    numbers.iter().map(|&number| block(number)).collect()
}

/// What a reader gets that asks the node for the bytes.
fn read(node: &Node, found: &Found, numbers: &[u64]) -> Vec<Result<Vec<u8>, Unfit>> {
    let each = found.blocks.iter().zip(numbers).map(|(at, &number)| {
        let mut bytes = Vec::new();
        node.read(ONE, found.lease.unwrap(), &[at.span], &mut bytes).unwrap();
        at.record(&bytes, block(number)).map(std::borrow::Cow::into_owned)
    });
    each.collect()
}

#[test]
fn blocks_of_the_host_tier_are_found_behind_those_of_the_node() {
    let (_engine, share, node, _) = rig();
    assert_eq!(node.memory_bytes(), host_tier_address(1 << 12) + share.bytes());
    let own = vec![9; 40];
    node.put(block(300), &own).unwrap();
    let numbers = [300, 0, 2, 4, 6, 999];
    let found = node.find_and_pin(ONE, &wanted(&numbers), SECOND).unwrap();
    let records = read(&node, &found, &numbers);
    assert_eq!(records.len(), 5);
    assert_eq!(records[0], Ok(own));
    for (record, &number) in records[1..].iter().zip(&numbers[1..]) {
        let record = record.as_ref().unwrap();
        assert_eq!(record.len() as u64, RECORD_BYTES);
        assert!(record.ends_with(&bytes_of(number)), "{number}");
    }
    // The head is that of this block, and of this content.
    for at in &found.blocks[1..] {
        assert!(at.record(&bytes_of(0), block(999)).is_err());
        let torn = vec![1; BLOCK_BYTES];
        let all: Vec<_> = numbers.iter().map(|&of| at.record(&torn, block(of))).collect();
        assert!(all.contains(&Err(Unfit::Torn)) && all.iter().all(Result::is_err), "{all:?}");
        assert_eq!(at.record_span(), at.span);
    }
    let stats = node.stats();
    assert_eq!((stats.found, stats.hosted, stats.absent), (5, 4, 1));
    assert_eq!((stats.leases.open, stats.leases.granted), (1, 1));
    node.end(ONE, found.lease.unwrap()).unwrap();
    // Of the host tier alone, and of neither.
    let found = node.find_and_pin(ONE, &wanted(&[0]), SECOND).unwrap();
    assert!(read(&node, &found, &[0])[0].is_ok());
    assert_eq!(node.find_and_pin(ONE, &wanted(&[999]), SECOND).unwrap(), Found::default());
    // The engine's blocks are of one format: no other rank's readers find them.
    let other = RecordKey { format: FORMAT + 1, ..block(2) };
    for keys in [vec![other], vec![other, block(2)]] {
        assert_eq!(node.find_and_pin(ONE, &keys, SECOND).unwrap(), Found::default());
    }
    let found = node.find_and_pin(ONE, &[block(2), other], SECOND).unwrap();
    assert_eq!(found.blocks.len(), 1);
    node.end(ONE, found.lease.unwrap()).unwrap();
    assert_eq!(node.stats().leases.open, 1);
}

#[test]
fn a_run_goes_through_slots_and_the_host_tier_in_any_order() {
    let (_engine, _, node, _) = rig();
    for number in [300, 302, 304] {
        node.put(block(number), &[number as u8; 40]).unwrap();
    }
    let numbers = [0, 300, 302, 2, 4, 304, 6, 999];
    let found = node.find_and_pin(ONE, &wanted(&numbers), SECOND).unwrap();
    let records = read(&node, &found, &numbers);
    assert_eq!(records.len(), 7);
    for (record, &number) in records.iter().zip(&numbers) {
        let end = if number < 300 { bytes_of(number) } else { vec![number as u8; 40] };
        assert!(record.as_ref().unwrap().ends_with(&end), "{number}");
    }
    // All of it, as one who joins what lies side by side does.
    let joined = Joined::of(&found, 512 << 10);
    let mut bytes = Vec::new();
    node.read(ONE, found.lease.unwrap(), joined.spans(), &mut bytes).unwrap();
    node.end(ONE, found.lease.unwrap()).unwrap();
    assert_eq!((node.stats().leases.open, node.pool().loans()), (0, 0));
}

#[test]
fn the_last_slot_and_the_first_block_of_the_tier_are_not_read_as_one() {
    let (_engine, share, ..) = rig();
    let slot_bytes = (64 + RECORD_BYTES).next_multiple_of(64);
    let mut options = NodeOptions::new("a", slot_bytes - 64);
    (options.host_bytes, options.host_lent_max) = (share.bytes(), Some(u64::MAX));
    let node = node_of(&options, 4 * slot_bytes, Arc::new(ManualClock::new()));
    node.share(share).unwrap();
    let own = [300, 302, 304, 306];
    for number in own {
        node.put(block(number), &vec![number as u8; slot_bytes as usize - 64]).unwrap();
    }
    let numbers = [&own[..], &evens(0..8)].concat();
    let found = node.find_and_pin(ONE, &wanted(&numbers), SECOND).unwrap();
    assert_eq!(found.blocks.len(), 12);
    let joined = Joined::of(&found, 512 << 10);
    assert_eq!(joined.spans().len(), 2);
    node.read(ONE, found.lease.unwrap(), joined.spans(), &mut Vec::new()).unwrap();
}

#[test]
fn readers_take_no_more_of_the_engine_than_they_may() {
    let (_engine, share, ..) = rig();
    let block_bytes = BLOCK_BYTES as u64;
    for (max, blocks) in [(None, 2), (Some(3 * block_bytes + 1), 3), (Some(0), 0)] {
        let node = sharing(lending(max), &share, Arc::new(ManualClock::new()));
        let find = || node.find_and_pin(ONE, &wanted(&evens(0..8)), SECOND).unwrap();
        let found = find();
        assert_eq!(found.blocks.len(), blocks, "{max:?}");
        assert_eq!(find(), Found::default(), "all that may be lent is");
        let Some(lease) = found.lease else { continue };
        node.end(ONE, lease).unwrap();
        assert_eq!(find().blocks.len(), blocks, "it is given back");
    }
}

/// Host memory in whose first read something else happens.
struct Between {
    bytes: Arc<Host>,
    happens: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    read: AtomicUsize,
}

impl std::fmt::Debug for Between {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Between").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl HostBlocks for Between {
    fn block_bytes(&self) -> usize {
        self.bytes.block_bytes()
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        self.read.fetch_add(1, Ordering::Relaxed);
        let happens = self.happens.lock().unwrap().take();
        if let Some(happens) = happens {
            happens();
        }
        self.bytes.read(block, offset, into)
    }

    fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
        unreachable!("a reader writes nothing")
    }
}

#[test]
fn what_is_lent_while_headers_are_summed_is_counted() {
    let mut engine = Engine::new(8, 8);
    let bytes = engine.host.clone();
    let memory = Arc::new(Between { bytes, happens: Mutex::default(), read: AtomicUsize::new(0) });
    let memories: Vec<Arc<dyn HostBlocks>> = vec![memory.clone()];
    let share = engine.manager.share_host(FORMAT, memories).unwrap();
    engine.compute(&evens(0..8));
    engine.compute(&evens(100..108));
    let options = NodeOptions { leases_max: 2, ..lending(Some(3 * BLOCK_BYTES as u64)) };
    let node = Arc::new(sharing(options, &share, Arc::new(ManualClock::new())));
    // Another reader comes while the first one's blocks are read, and is given all that may be lent.
    let (other, given) = (Arc::clone(&node), Arc::new(Mutex::new(None)));
    let told = Arc::clone(&given);
    *memory.happens.lock().unwrap() = Some(Box::new(move || {
        *told.lock().unwrap() = Some(other.find_and_pin(TWO, &wanted(&evens(4..7)), SECOND));
    }));
    let refused = node.find_and_pin(ONE, &wanted(&evens(0..2)), SECOND);
    let given = given.lock().unwrap().take().unwrap().unwrap();
    assert_eq!((given.blocks.len(), refused), (3, Err(Refusal::Busy)));
    node.end(TWO, given.lease.unwrap()).unwrap();
    // Who is refused for want of a lease has had nothing read.
    let one = |at: u64| node.find_and_pin(ONE, &wanted(&evens(at..at + 1)), SECOND).unwrap();
    assert!(one(0).lease.is_some() && one(1).lease.is_some());
    let read = memory.read.load(Ordering::Relaxed);
    assert_eq!(node.find_and_pin(TWO, &wanted(&evens(7..8)), SECOND), Err(Refusal::Busy));
    assert_eq!(memory.read.load(Ordering::Relaxed), read);
}

#[test]
fn what_was_lent_before_the_hosts_memory_panics_is_given_back() {
    let mut engine = Engine::new(8, 8);
    let bytes = engine.host.clone();
    let memory = Arc::new(Between { bytes, happens: Mutex::default(), read: AtomicUsize::new(0) });
    let memories: Vec<Arc<dyn HostBlocks>> = vec![memory.clone()];
    let share = engine.manager.share_host(FORMAT, memories).unwrap();
    engine.compute(&evens(0..8));
    engine.compute(&evens(100..108));
    let node = Arc::new(node(&share, Arc::new(ManualClock::new())));
    node.put(block(300), &[9; 40]).unwrap();
    *memory.happens.lock().unwrap() =
        Some(Box::new(|| panic::resume_unwind(Box::new("no memory"))));
    let find = || node.find_and_pin(ONE, &wanted(&[300, 0]), SECOND);
    assert!(panic::catch_unwind(AssertUnwindSafe(find)).is_err());
    assert_eq!((node.pool().loans(), node.stats().leases.open), (0, 0));
    let found = find().unwrap();
    assert_eq!(found.blocks.len(), 2);
    node.end(ONE, found.lease.unwrap()).unwrap();
    // And what a connection had before, whose thread it ends.
    let (_server, member) = serve_node(&node);
    let mut peer = connect(&member);
    assert!(peer.find_and_pin(&wanted(&[300]), SECOND, far()).unwrap().lease.is_some());
    *memory.happens.lock().unwrap() =
        Some(Box::new(|| panic::resume_unwind(Box::new("no memory"))));
    assert!(peer.find_and_pin(&wanted(&[2]), SECOND, far()).is_err());
    until("its lease is ended", || node.stats().leases.open == 0);
}

#[test]
fn the_readers_of_another_host_take_half_of_what_the_engine_lends() {
    let (_engine, share, ..) = rig();
    let options = lending(Some(6 * BLOCK_BYTES as u64));
    let node = Arc::new(sharing(options, &share, Arc::new(SystemClock::new())));
    let (_server, member) = serve_node(&node);
    let mut peers = [(); 2].map(|()| connect(&member));
    let mut found = |at: usize, numbers: std::ops::Range<u64>| {
        peers[at].find_and_pin(&wanted(&evens(numbers)), 10 * SECOND, far()).unwrap().blocks.len()
    };
    assert_eq!((found(0, 0..2), found(1, 2..8), found(0, 3..8)), (2, 1, 0));
    let own = node.find_and_pin(ReaderId(1 << 40), &wanted(&evens(3..8)), SECOND).unwrap();
    assert_eq!(own.blocks.len(), 3, "what is left is others'");
}

#[test]
fn only_what_a_reader_has_leased_is_read_for_it() {
    let (_engine, share, node, clock) = rig();
    let found = node.find_and_pin(ONE, &wanted(&[0, 2]), SECOND).unwrap();
    let (lease, spans) = (found.lease.unwrap(), found.blocks.iter().map(|at| at.span));
    let spans: Vec<Span> = spans.collect();
    let read = |reader, spans: &[Span]| {
        let mut into = Vec::new();
        node.read(reader, lease, spans, &mut into).map(|()| into.len())
    };
    assert_eq!(read(ONE, &spans), Ok(2 * BLOCK_BYTES));
    assert_eq!(read(TWO, &spans), Err(Refusal::NoLease));
    let first = node.memory_bytes() - share.bytes();
    let is_leased = |address: u64| {
        spans
            .iter()
            .any(|span| (span.address..span.address + BLOCK_BYTES as u64).contains(&address))
    };
    for at in 0..8 {
        let address = first + at * BLOCK_BYTES as u64;
        let outside = read(ONE, &[Span { address, bytes: 1 }]);
        assert_eq!(outside.is_ok(), is_leased(address), "{at}: {outside:?}");
    }
    let end = node.memory_bytes();
    for (address, bytes) in [
        (end, 1),
        (end - 1, 2),
        (u64::MAX, 1),
        (u64::MAX - 3, 1 << 20),
        (first - 1, 2),
        (0, 1),
        (spans[0].address, 1 << 20),
    ] {
        assert_eq!(read(ONE, &[Span { address, bytes }]), Err(Refusal::OutsideLease), "{address}");
    }
    clock.advance(SECOND);
    assert_eq!(read(ONE, &spans), Err(Refusal::NoLease), "its time has come");
}

#[test]
fn a_leased_block_stays_until_its_lease_ends_and_is_told_from_others_then() {
    let (mut engine, share, node, clock) = rig();
    let by_time = node.find_and_pin(ONE, &wanted(&[0, 2]), SECOND).unwrap();
    churn(&mut engine, 20..40);
    assert!(read(&node, &by_time, &[0, 2]).iter().all(Result::is_ok));
    let first = node.memory_bytes() - share.bytes();
    let at = &by_time.blocks[0];
    let mut bytes = vec![0; BLOCK_BYTES];
    for (turn, ends) in (40..).step_by(20).zip(["time", "reader", "return"]) {
        let numbers = evens(turn * 8 - 16..turn * 8 - 8);
        let here = |node: &Node| {
            let each =
                numbers.iter().map(|&number| node.find_and_pin(TWO, &wanted(&[number]), SECOND));
            each.map(Result::unwrap).find(|found| found.lease.is_some())
        };
        let other = here(&node);
        match ends {
            "time" => {
                clock.advance(SECOND);
                node.end_overdue();
            }
            "reader" => node.end_reader(TWO),
            _ => {
                let lease = other.as_ref().and_then(|found| found.lease);
                lease.into_iter().for_each(|lease| node.end(TWO, lease).unwrap());
            }
        }
        assert_eq!(node.stats().leases.open, 0, "{ends}");
        churn(&mut engine, turn..turn + 20);
        assert!(share.read(at.span.address - first, &mut bytes));
        assert!(at.record(&bytes, block(0)).is_err(), "{ends}: it is another block's by now");
    }
    let counts = node.stats().leases;
    assert!(counts.expired > 0 && counts.cancelled > 0 && counts.returned > 0, "{counts:?}");
}

#[test]
fn another_tier_than_the_node_was_made_for_is_refused() {
    let (_, share) = engine(8, 8);
    let node = |record_bytes, host_bytes| {
        let mut options = NodeOptions::new("a", record_bytes);
        options.host_bytes = host_bytes;
        node_of(&options, 1 << 12, Arc::new(ManualClock::new()))
    };
    let (bytes, max) = (BLOCK_BYTES as u64, BLOCK_BYTES as u64 - 1);
    let small = node(max, share.bytes());
    assert_eq!(small.share(share.clone()), Err(NodeError::Record { bytes, max }));
    let bytes = share.bytes();
    let none = node(RECORD_BYTES, bytes - 1);
    assert_eq!(none.share(share.clone()), Err(NodeError::Host { bytes, max: bytes - 1 }));
    assert_eq!(none.find_and_pin(ONE, &wanted(&[0]), SECOND), Ok(Found::default()));
    let once = node(RECORD_BYTES, bytes);
    assert_eq!(once.share(share.clone()), Ok(()));
    assert_eq!(once.share(share), Err(NodeError::Host { bytes, max: bytes }));
}

/// Takes in what has happened, and what the node says of it.
fn follow(
    node: &Node,
    events: &mut EventReader,
    (cursor, known): (&mut Cursor, &mut BTreeSet<RecordKey>),
) {
    let mut read = Vec::new();
    events.read(&mut read).unwrap();
    node.note_changes(read.iter().filter_map(CacheEvent::in_host));
    loop {
        let Changes { next, changes } = node.changes(*cursor, (true, FORMAT));
        if next.log != cursor.log {
            known.clear();
        }
        *cursor = next;
        for change in &changes {
            let block = RecordKey { format: FORMAT, group: change.group, name: change.name };
            // Nothing comes twice, and nothing goes that is not there.
            let changes = if change.is_there { known.insert(block) } else { known.remove(&block) };
            assert!(changes, "{change:?}");
        }
        if changes.is_empty() {
            return;
        }
    }
}

#[test]
fn peers_are_told_of_what_comes_to_the_host_tier_and_goes() {
    let (mut engine, share) = engine(8, 8);
    let node = node(&share, Arc::new(ManualClock::new()));
    let mut events = engine.manager.events().unwrap();
    let (mut cursor, mut known) = (Cursor::default(), BTreeSet::new());
    for turn in 0..60 {
        churn(&mut engine, turn % 5..turn % 5 + 1);
        // Some of them are in the node, too.
        if turn % 3 == 0 {
            node.put(block(turn % 16 * 2), &[1; 30]).unwrap();
        }
        if turn % 7 == 0 {
            node.forget(&wanted(&[turn % 16 * 2, 4]));
        }
        follow(&node, &mut events, (&mut cursor, &mut known));
        for number in evens(0..64) {
            let wanted = wanted(&[number]);
            let found = node.find_and_pin(ONE, &wanted, SECOND).unwrap();
            let is_there = found.lease.inspect(|&lease| node.end(ONE, lease).unwrap()).is_some();
            assert_eq!(known.contains(&wanted[0]), is_there, "turn {turn}, {number}");
        }
    }
    // Of the slots alone, others are told.
    node.put(block(2), &[1; 30]).unwrap();
    let own = node.changes(Cursor::default(), (false, FORMAT)).changes;
    let own: BTreeSet<_> = own.iter().filter(|of| of.is_there).map(|of| of.name).collect();
    let evens = wanted(&evens(0..16)).into_iter().map(|key| key.name).collect();
    assert!(own.is_subset(&evens) && own.contains(&block(2).name), "{own:?}");
    engine.manager.reset();
    node.clear();
    follow(&node, &mut events, (&mut cursor, &mut known));
    assert_eq!(known, BTreeSet::new());
}

/// Another host loads what this one's engine has in host memory, while the engine evicts at full speed.
#[test]
fn another_host_loads_from_the_host_tier_while_the_engine_goes_on() {
    let (mut engine, share) = engine(24, 32);
    let node = Arc::new(node(&share, Arc::new(SystemClock::new())));
    let (server, member) = serve_node(&node);
    let mut options = RemoteOptions::new(vec![member.clone()], key());
    options.retry_after = Duration::from_millis(2);
    options.follow_every = Duration::from_millis(1);
    let loads = number_of("KV_REMOTE_HOST_LOADS", 1_000);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ends = &ends;
        let reader = scope.spawn(move || {
            let ends_with_this = Ends(ends);
            let mut worker = Worker::new(RemoteTier::new(options).unwrap(), FORMAT);
            let (mut state, mut loaded, mut missed) = (1, 0, 0);
            while loaded < loads && !ends.load(Ordering::Relaxed) {
                let first = random(&mut state) % 14 * 4;
                // Every byte that comes is compared.
                loaded += worker.loads(evens(first..first + 4)).len() as u64;
                missed += std::mem::take(&mut worker.missed).len();
            }
            drop(ends_with_this);
            (loaded, missed, worker.gained.len())
        });
        let _ends_with_this = Ends(ends);
        let mut events = engine.manager.events().unwrap();
        let mut state = 2;
        while !ends.load(Ordering::Relaxed) {
            let first = random(&mut state) % 14 * 4;
            let numbers = evens(first..first + 4);
            let mut sequence = engine.admit(&numbers);
            engine.stage(&mut sequence, &numbers);
            drop(sequence);
            while engine.flight.len() > 1 + (random(&mut state) % 3) as usize {
                engine.carry_out();
            }
            let mut read = Vec::new();
            events.read(&mut read).unwrap();
            node.note_changes(read.iter().filter_map(CacheEvent::in_host));
        }
        let (loaded, missed, gained) = reader.join().unwrap();
        println!("{loaded} loaded, {missed} missed, {gained} names gained");
        assert!(loaded >= loads && gained > 0);
    });
    drop(server);
    let counts = node.stats().leases;
    assert_eq!(counts.open, 0);
    assert!(node.stats().hosted >= loads);
    while !engine.flight.is_empty() {
        engine.carry_out();
    }
    engine.manager.pool(GroupId(0)).unwrap().check_integrity().unwrap();
}

#[test]
fn a_host_does_not_take_its_own_memory_for_a_tier_below() {
    let (mut engine, share) = engine(8, 8);
    let node = Arc::new(node(&share, Arc::new(SystemClock::new())));
    let mut events = engine.manager.events().unwrap();
    churn(&mut engine, 0..4);
    let mut read = Vec::new();
    events.read(&mut read).unwrap();
    node.note_changes(read.iter().filter_map(CacheEvent::in_host));
    node.put(block(90), &[1; 30]).unwrap();
    let (_server, member) = serve_node(&node);
    for (own, gained) in [(None, 9), (Some("b"), 9), (Some("a"), 1)] {
        let mut options = RemoteOptions::new(vec![member.clone()], key());
        options.own = own.map(str::to_owned);
        let mut worker = Worker::new(RemoteTier::new(options).unwrap(), FORMAT);
        until("the names have come", || {
            worker.poll();
            worker.gained.len() >= gained
        });
        // What the slots hold is told behind all that is hosted.
        assert_eq!((worker.gained.len(), worker.gained.contains(&90)), (gained, true), "{own:?}");
    }
}
