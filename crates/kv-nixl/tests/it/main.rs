//! Reads by NIXL between processes, over TCP and over shared memory, of peers that stop, die and start
//! anew; and within one process, of a simulated device, whose bytes come over the connection.
//!
//! The library is that of `KV_NIXL_LIBRARY`, or the one that the dynamic linker finds. Without it every trial is listed as ignored;
//! with `KV_REQUIRE_NIXL=1` it fails. Each trial of several processes is one of its own, since UCX reads its variables once, and
//! has its node in another one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(clippy::print_stdout, reason = "a node answers so")]

mod alone;
mod common;
mod long;
mod process;
mod sizes;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{block, blocks, far, key, number_of, random, record, until};
use kv_nixl::{Library, NixlError, NixlTransfer};
use kv_remote::message::Span;
use kv_remote::{Member, Peer, PeerError, Read, Refusal, Transfer, Unfit};
use libtest_mimic::{Arguments, Trial};
use process::{NodeProcess, host_tier, run_alone, run_as_told};

const SECOND: Duration = Duration::from_secs(1);

/// A trial, and whether it is run with reads of another process's memory by the kernel, too.
type Scenario = (&'static str, fn(), bool);

const SCENARIOS: &[Scenario] = &[
    ("blocks_are_read_as_they_were_stored", blocks_are_read_as_they_were_stored, true),
    (
        "blocks_of_several_pieces_are_read_as_they_were_stored",
        blocks_of_several_pieces_are_read_as_they_were_stored,
        true,
    ),
    ("a_block_written_behind_its_lease_is_stale", a_block_written_behind_its_lease_is_stale, true),
    ("a_peer_that_starts_anew_is_met_anew", a_peer_that_starts_anew_is_met_anew, true),
    ("a_peer_that_dies_costs_a_miss", a_peer_that_dies_costs_a_miss, false),
    ("a_late_read_keeps_its_memory_until_it_has_ended", a_late_read_keeps_its_memory, false),
    ("a_reader_goes_while_its_reads_are_late", a_reader_goes_while_its_reads_are_late, false),
    (
        "readers_that_are_killed_cost_the_node_nothing",
        readers_that_are_killed_cost_the_node_nothing,
        true,
    ),
    (
        "without_a_native_way_bytes_come_over_the_connection",
        without_a_native_way_bytes_come_over_the_connection,
        false,
    ),
    ("memory_that_is_not_registered_comes_over_the_connection", not_registered, false),
    ("descriptions_that_are_none_are_refused", descriptions_that_are_none_are_refused, false),
    ("spans_outside_the_memory_are_refused", spans_outside_the_memory_are_refused, true),
    ("the_pin_race", the_pin_race, true),
    ("the_host_tier_is_read_without_the_node", the_host_tier_is_read, true),
    ("a_host_block_read_behind_its_lease_is_told_from_others", a_host_block_is_told, true),
    ("a_tier_that_was_not_registered_comes_over_the_connection", not_registered_tier, false),
    ("what_is_looked_at_does_not_change", long::what_is_looked_at_does_not_change, true),
    ("a_panic_of_the_caller_ends_a_long_read", long::a_panic_ends_the_read, true),
    (
        "a_long_read_that_is_late_keeps_its_memory",
        long::a_long_read_that_is_late_keeps_its_memory,
        false,
    ),
    (
        "a_caller_that_is_slow_is_late_with_nothing_on_its_way",
        long::a_caller_that_is_slow_is_late_with_nothing_on_its_way,
        true,
    ),
];

fn main() {
    if run_as_told(SCENARIOS) {
        return;
    }
    let required = std::env::var_os("KV_REQUIRE_NIXL").is_some_and(|value| value == "1");
    let missing = Library::open().is_err();
    let trials = SCENARIOS.iter().flat_map(|&(name, _, shared)| {
        let ways = [Some("tcp"), shared.then_some("tcp,cma")];
        ways.into_iter().flatten().map(move |way| {
            let trial = Trial::test(format!("{name}::{way}"), move || {
                run_alone(name, way).map_err(libtest_mimic::Failed::from)
            });
            trial.with_ignored_flag(missing && !required)
        })
    });
    let here = sizes::TRIALS.iter().map(|&(name, run)| {
        let trial = Trial::test(format!("sizes::{name}"), move || {
            run();
            Ok(())
        });
        trial.with_ignored_flag(missing && !required)
    });
    let missing_library = Trial::test("a_library_that_is_missing_is_named", || {
        a_library_that_is_missing_is_named();
        Ok(())
    });
    let mut arguments = Arguments::from_args();
    // Readers look without a pause, and time out.
    arguments.test_threads.get_or_insert(1);
    let trials = trials.chain(here).chain([missing_library]).collect();
    libtest_mimic::run(&arguments, trials).exit();
}

fn a_library_that_is_missing_is_named() {
    let path = std::path::Path::new("/nowhere/libnixl_capi.so");
    let Err(error) = Library::open_at(path) else { panic!("there is no such file") };
    let NixlError::Library { path: named, reason } = &error else { panic!("{error:?}") };
    assert_eq!(named, path);
    assert!(reason.contains("nowhere"), "{reason}");
    assert!(error.to_string().contains("KV_NIXL_LIBRARY"), "{error}");
    // A library that is another one.
    let Err(error) = Library::open_at(std::path::Path::new("libc.so.6")) else {
        panic!("it has none of the functions")
    };
    assert!(error.to_string().contains("nixl_capi"), "{error}");
}

/// Over TCP alone, one whose reads are emulated.
fn transfer() -> NixlTransfer {
    match std::env::var("KV_NIXL_EMULATED").as_deref() {
        Ok("1") => native().emulated(),
        _ => native(),
    }
}

/// One that reads only what can be read without the peer.
fn native() -> NixlTransfer {
    NixlTransfer::new(Library::open().unwrap())
}

fn put(peer: &mut Peer, numbers: impl IntoIterator<Item = u64>) {
    numbers.into_iter().for_each(|of| peer.put(block(of), record(of), far()).unwrap());
}

/// Finds blocks and reads them by a transfer, which may take so long.
fn read_within(
    peer: &mut Peer,
    transfer: &mut dyn Transfer,
    numbers: &[u64],
    within: Duration,
) -> Result<Vec<Read>, PeerError> {
    let wanted = blocks(numbers.iter().copied());
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far())?;
    assert_eq!(found.blocks.len(), numbers.len());
    let read = peer.read(transfer, &found, &wanted, Instant::now() + within);
    peer.end(found.lease.unwrap(), far())?;
    read
}

fn check(read: &[Read], numbers: &[u64]) {
    assert_eq!(read.len(), numbers.len());
    for (read, &number) in read.iter().zip(numbers) {
        assert_eq!(*read, Ok(record(number)), "{number}");
    }
}

fn blocks_are_read_as_they_were_stored() {
    let node = NodeProcess::start("a", 64);
    let (mut peer, mut transfer) = (node.connect(), transfer());
    put(&mut peer, 0..40);
    for numbers in [&[7_u64][..], &[3, 2, 1], &[39, 0, 20, 21, 22]] {
        let read = read_within(&mut peer, &mut transfer, numbers, 20 * SECOND).unwrap();
        check(&read, numbers);
    }
    // More than the first memory for reads holds is read into a larger one: 40 times over.
    let all: Vec<u64> = (0..40).collect();
    for _ in 0..40 {
        check(&read_within(&mut peer, &mut transfer, &all, 20 * SECOND).unwrap(), &all);
    }
    // The node has copied nothing: its memory was read.
    assert_eq!(node.ask("read_bytes"), "0");
    assert_eq!(node.ask("leases"), "0");
}

/// Of 200 KiB each, so that some are read together, and several pieces are on their way.
fn blocks_of_several_pieces_are_read_as_they_were_stored() {
    const BYTES: usize = 200 << 10;
    let node = NodeProcess::start_with("a", 48, BYTES as u64);
    let (mut peer, mut transfer) = (node.connect(), transfer());
    let long = |number: u64| -> Vec<u8> {
        let mut state = number;
        let words = (0..BYTES / 8).flat_map(|_| random(&mut state).to_le_bytes());
        words.take(BYTES - number as usize).collect()
    };
    (0..40).for_each(|of| peer.put(block(of), long(of), far()).unwrap());
    let mut state = 3;
    for _ in 0..20 {
        let numbers: Vec<u64> = (0..1 + random(&mut state) % 40).map(|of| (of * 7) % 40).collect();
        let wanted = blocks(numbers.iter().copied());
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        let read = peer.read(&mut transfer, &found, &wanted, far()).unwrap();
        peer.end(found.lease.unwrap(), far()).unwrap();
        assert_eq!(read.len(), numbers.len());
        for (read, &number) in read.iter().zip(&numbers) {
            assert!(*read == Ok(long(number)), "block {number}: {:?}", read.as_ref().map(Vec::len));
        }
    }
    assert_eq!(node.ask("read_bytes"), "0");
}

fn a_block_written_behind_its_lease_is_stale() {
    let node = NodeProcess::start("a", 2);
    let (mut peer, mut other, mut transfer) = (node.connect(), node.connect(), transfer());
    put(&mut peer, [1, 2]);
    let wanted = blocks([1, 2]);
    let found = peer.find_and_pin(&wanted, Duration::from_millis(20), far()).unwrap();
    until("the lease has ended", || node.ask("leases") == "0");
    put(&mut other, [3]);
    let read = peer.read(&mut transfer, &found, &wanted, far()).unwrap();
    let stale = read.iter().filter(|read| **read == Err(Unfit::Stale)).count();
    assert_eq!(stale, 1, "one slot was written anew: {read:?}");
    assert_eq!(node.ask("read_bytes"), "0");
}

fn a_peer_that_starts_anew_is_met_anew() {
    let mut transfer = transfer();
    for turn in 0..3 {
        let node = NodeProcess::start("a", 8);
        let mut peer = node.connect();
        put(&mut peer, turn..turn + 4);
        let numbers: Vec<u64> = (turn..turn + 4).collect();
        check(&read_within(&mut peer, &mut transfer, &numbers, 20 * SECOND).unwrap(), &numbers);
        assert_eq!(node.ask("read_bytes"), "0");
    }
    assert_eq!(transfer.late(), 0);
}

fn a_peer_that_dies_costs_a_miss() {
    let node = NodeProcess::start("a", 8);
    let (mut peer, mut transfer) = (node.connect(), transfer());
    put(&mut peer, [1, 2]);
    check(&read_within(&mut peer, &mut transfer, &[1], 20 * SECOND).unwrap(), &[1]);
    let wanted = blocks([1, 2]);
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    drop(node);
    let began = Instant::now();
    let read = peer.read(&mut transfer, &found, &wanted, began + SECOND);
    assert!(matches!(read, Err(PeerError::Io { .. } | PeerError::Late)), "{read:?}");
    // Another node of the name is read by the same transfer.
    let node = NodeProcess::start("a", 8);
    let mut peer = node.connect();
    put(&mut peer, [5]);
    check(&read_within(&mut peer, &mut transfer, &[5], 20 * SECOND).unwrap(), &[5]);
}

fn a_late_read_keeps_its_memory() {
    let node = NodeProcess::start("a", 10);
    let (mut peer, mut transfer) = (node.connect(), transfer());
    put(&mut peer, 0..8);
    check(&read_within(&mut peer, &mut transfer, &[1], 20 * SECOND).unwrap(), &[1]);
    let wanted = blocks(0..8);
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    node.stop();
    let read = peer.read(&mut transfer, &found, &wanted, Instant::now() + SECOND / 20);
    assert!(matches!(read, Err(PeerError::Late)), "over TCP the peer has a part in it: {read:?}");
    assert_eq!(transfer.late(), 1);
    node.go_on();
    // The next read has an agent of its own, and the late one ends meanwhile.
    let numbers: Vec<u64> = (0..8).collect();
    until("the late read has ended", || {
        check(&read_within(&mut peer, &mut transfer, &numbers, 20 * SECOND).unwrap(), &numbers);
        transfer.late() == 0
    });
}

fn a_reader_goes_while_its_reads_are_late() {
    let node = NodeProcess::start("a", 10);
    let (mut peer, mut transfer) = (node.connect(), transfer());
    put(&mut peer, 0..8);
    let wanted = blocks(0..8);
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    peer.describe(far()).unwrap();
    // Time that goes while the agent is made is no read that is late: the agent is there for the next one.
    let read = peer.read(&mut transfer, &found, &wanted, Instant::now());
    assert!(matches!(read, Err(PeerError::Late)), "{read:?}");
    assert_eq!(transfer.late(), 0);
    check(&peer.read(&mut transfer, &found, &wanted, far()).unwrap(), &[0, 1, 2, 3, 4, 5, 6, 7]);
    node.stop();
    for late in 1..=4 {
        let read = peer.read(&mut transfer, &found, &wanted, Instant::now() + SECOND / 2);
        assert!(matches!(read, Err(PeerError::Late)), "{read:?}");
        assert_eq!(transfer.late(), late);
    }
    // Beyond four, nothing is begun.
    let read = peer.read(&mut transfer, &found, &wanted, Instant::now() + SECOND);
    let Err(PeerError::Io { error, .. }) = read else { panic!("{read:?}") };
    let reason = error.get_ref().unwrap().downcast_ref::<NixlError>();
    assert_eq!(reason, Some(&NixlError::Open { open: 4 }));
    // The agents go with their reads open, while the peer still sleeps, and nobody is waited for: the trial has a limit. What becomes
    // of the peer, whose answers nobody takes, is why reads are not emulated unless one says so.
    drop(transfer);
}

fn without_a_native_way_bytes_come_over_the_connection() {
    let node = NodeProcess::start("a", 8);
    let (mut peer, mut transfer) = (node.connect(), native());
    put(&mut peer, 0..8);
    for numbers in [&[1_u64, 2][..], &[7, 0, 3]] {
        let before: u64 = node.ask("read_bytes").parse().unwrap();
        check(&read_within(&mut peer, &mut transfer, numbers, 20 * SECOND).unwrap(), numbers);
        assert!(node.ask("read_bytes").parse::<u64>().unwrap() > before, "the node has sent it");
    }
}

/// What a reader that is killed in the middle does until then.
fn read_for_ever(member: &Member) {
    let mut peer = Peer::connect(member, &key(), far()).unwrap();
    let (mut transfer, wanted) = (native(), blocks(0..40));
    let mut says = true;
    loop {
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        peer.read_each(&mut transfer, &found, &wanted, far(), |_, record| assert!(record.is_ok()))
            .unwrap();
        peer.end(found.lease.unwrap(), far()).unwrap();
        if std::mem::take(&mut says) {
            println!("reading");
        }
    }
}

fn readers_that_are_killed_cost_the_node_nothing() {
    const BYTES: u64 = 200 << 10;
    let node = NodeProcess::start_with("a", 48, BYTES);
    let mut peer = node.connect();
    (0..40).for_each(|of| peer.put(block(of), vec![of as u8; BYTES as usize], far()).unwrap());
    let mut state = 5;
    for kill in 0..number_of("KV_NIXL_KILLS", 8) {
        let mut reader = node.reader();
        let until = Instant::now() + Duration::from_micros(random(&mut state) % 20_000);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        // Also one whose answers would be on their way.
        let is_stopped = kill % 2 == 0;
        if is_stopped {
            node.stop();
        }
        reader.kill().unwrap();
        reader.wait().unwrap();
        if is_stopped {
            node.go_on();
        }
    }
    until("their leases have ended", || node.ask("leases") == "0");
    let wanted = blocks([3, 39]);
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    let read = peer.read(&mut native(), &found, &wanted, far()).unwrap();
    assert!(read == [Ok(vec![3; BYTES as usize]), Ok(vec![39; BYTES as usize])]);
}

fn not_registered() {
    let (server, member) = common::serve("a", 8);
    let mut peer = Peer::connect(&member, &key(), far()).unwrap();
    let mut transfer = transfer();
    put(&mut peer, [1, 2]);
    check(&read_within(&mut peer, &mut transfer, &[1, 2], 20 * SECOND).unwrap(), &[1, 2]);
    assert!(server.node().stats().read_bytes > 0, "the node has sent it");
}

fn descriptions_that_are_none_are_refused() {
    let node = NodeProcess::start("a", 8);
    let whole = node.connect().describe(far()).unwrap().to_vec();
    let lying = process::Liar::start(8);
    // Another magic, version and kind, and more memory than the peer has said before.
    for (at, change) in [(0, 1_u8), (4, 7), (5, 9), (38, 1)] {
        let mut said = whole.clone();
        said[at] ^= change;
        lying.say(said);
        let (mut peer, mut transfer) = (lying.connect(), transfer());
        put(&mut peer, [1]);
        let read = read_within(&mut peer, &mut transfer, &[1], 20 * SECOND);
        let Err(PeerError::Io { error, .. }) = read else { panic!("{read:?}") };
        let reason = error.get_ref().unwrap().downcast_ref::<NixlError>();
        assert!(matches!(reason, Some(NixlError::Descriptor { .. })), "{reason:?}");
    }
    // The right memory of another node: other bytes than the peer has promised.
    lying.say(whole.clone());
    let (mut peer, mut transfer) = (lying.connect(), transfer());
    put(&mut peer, [1]);
    let read = read_within(&mut peer, &mut transfer, &[1], 20 * SECOND).unwrap();
    assert!(matches!(read[..], [Err(_)]), "{read:?}");
    // Metadata that is cut off, and such that is none.
    for said in [&whole[..whole.len() / 2], &[&whole[..42], &[0x5a; 200][..]].concat()] {
        lying.say(said.to_vec());
        let (mut peer, mut transfer) = (lying.connect(), self::transfer());
        let read = read_within(&mut peer, &mut transfer, &[1], 20 * SECOND);
        assert!(matches!(read, Err(PeerError::Io { .. })), "{read:?}");
    }
}

fn spans_outside_the_memory_are_refused() {
    let node = NodeProcess::start("a", 8);
    let (mut peer, mut transfer) = (node.connect(), transfer());
    put(&mut peer, [1]);
    let found = peer.find_and_pin(&blocks([1]), 10 * SECOND, far()).unwrap();
    let bytes = peer.memory_bytes();
    for (address, length) in [(bytes, 1), (bytes - 1, 2), (u64::MAX, 1)] {
        let span = Span { address, bytes: length };
        let lease = found.lease.unwrap();
        let read = transfer.read(&mut peer, lease, &[span], far(), &mut |_, _| unreachable!());
        // Bytes that are not registered come over the connection, and these are nobody's.
        let refused = matches!(read, Err(PeerError::Refused(Refusal::OutsideLease)));
        assert!(refused, "{address}: {read:?}");
    }
    let long = Span { address: 0, bytes: (64 << 20) + 1 };
    let lease = found.lease.unwrap();
    let read = transfer.read(&mut peer, lease, &[long], far(), &mut |_, _| unreachable!());
    assert!(matches!(read, Err(PeerError::Refused(Refusal::Length))), "{read:?}");
    let last = Span { address: bytes - 1, bytes: 1 };
    let (mut read, lease) = (Vec::new(), found.lease.unwrap());
    let mut each = |place: usize, bytes: &[u8]| read.push((place, bytes.len()));
    transfer.read(&mut peer, lease, &[last], far(), &mut each).unwrap();
    assert_eq!(read, [(0, 1)]);
}

/// Blocks that are read under a lease are right, while others store at full speed; and what is not under a lease changes.
fn the_pin_race() {
    let node = NodeProcess::start("a", 12);
    let end = Instant::now() + Duration::from_secs(number_of("KV_NIXL_RACE_SECONDS", 1));
    let done = AtomicBool::new(false);
    let (mut read, mut stale) = (0_u64, 0_u64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut writer, mut state) = (node.connect(), 1);
            while !done.load(Ordering::Acquire) {
                let number = random(&mut state) % 20;
                drop(writer.put(block(number), record(number), far()));
            }
        });
        let read_all = || {
            let (mut peer, mut transfer, mut state) = (node.connect(), transfer(), 7);
            while Instant::now() < end || read < 200 {
                let first = random(&mut state) % 18;
                let numbers: Vec<u64> = (first..first + 3).collect();
                let wanted = blocks(numbers.iter().copied());
                let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
                let Some(lease) = found.lease else { continue };
                let under = peer.read(&mut transfer, &found, &wanted, far()).unwrap();
                for (read, &number) in under.iter().zip(&numbers) {
                    assert_eq!(*read, Ok(record(number)), "a block under a lease has changed");
                }
                read += under.len() as u64;
                peer.end(lease, far()).unwrap();
                let late = peer.read(&mut transfer, &found, &wanted, far()).unwrap();
                for (read, &number) in late.iter().zip(&numbers) {
                    match read {
                        Ok(bytes) => assert_eq!(*bytes, record(number)),
                        Err(_) => stale += 1,
                    }
                }
            }
        };
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read_all));
        done.store(true, Ordering::Release);
        if let Err(reason) = ended {
            std::panic::resume_unwind(reason);
        }
    });
    println!("{read} blocks read under leases, {stale} behind them were not to be used");
    assert_eq!(node.ask("leases"), "0");
    assert_eq!(node.ask("read_bytes"), "0");
}

/// A node with the host tier of an engine, whose first blocks are there.
fn with_host_tier() -> (NodeProcess, Vec<common::Block>) {
    let node = NodeProcess::start_with(process::HOST_TIER, 4, host_tier::BLOCK_BYTES as u64);
    (node, (1..=8).map(host_tier::block).collect())
}

/// Reads blocks of the tier, all of which are there and right.
fn read_host_tier(peer: &mut Peer, transfer: &mut NixlTransfer, wanted: &[common::Block]) {
    let found = peer.find_and_pin(wanted, 10 * SECOND, far()).unwrap();
    let records = peer.read(transfer, &found, wanted, far()).unwrap();
    peer.end(found.lease.unwrap(), far()).unwrap();
    assert_eq!(records.len(), wanted.len());
    for (record, number) in records.iter().zip(1..) {
        assert!(record.as_ref().unwrap().ends_with(&host_tier::bytes_of(number)), "{number}");
    }
}

fn the_host_tier_is_read() {
    let (node, wanted) = with_host_tier();
    let (mut peer, mut transfer) = (node.connect(), transfer());
    for _ in 0..3 {
        read_host_tier(&mut peer, &mut transfer, &wanted);
    }
    // Records of the node's own and of the tier, in one run.
    peer.put(block(1), record(1), far()).unwrap();
    let both = [block(1), wanted[0]];
    let found = peer.find_and_pin(&both, 10 * SECOND, far()).unwrap();
    let records = peer.read(&mut transfer, &found, &both, far()).unwrap();
    assert_eq!(records[0], Ok(record(1)));
    assert!(records[1].as_ref().unwrap().ends_with(&host_tier::bytes_of(1)));
    peer.end(found.lease.unwrap(), far()).unwrap();
    assert_eq!(node.ask("read_bytes"), "0", "the node has copied nothing");
    assert_eq!((node.ask("hosted").as_str(), node.ask("leases").as_str()), ("25", "0"));
}

fn a_host_block_is_told() {
    let (node, wanted) = with_host_tier();
    let (mut peer, mut transfer) = (node.connect(), transfer());
    let found = peer.find_and_pin(&wanted[..2], Duration::from_millis(1), far()).unwrap();
    until("the lease has ended", || node.ask("leases") == "0");
    node.ask("evict");
    let records = peer.read(&mut transfer, &found, &wanted[..2], far()).unwrap();
    assert_eq!(records, [Err(Unfit::Torn), Err(Unfit::Torn)]);
    // While it is leased, it stays.
    assert!(peer.find_and_pin(&wanted[..1], SECOND, far()).unwrap().lease.is_none(), "it is gone");
}

fn not_registered_tier() {
    let server = process::half_registered();
    let member = Member { name: process::HOST_TIER.to_owned(), address: server.address().clone() };
    let mut peer = Peer::connect(&member, &key(), far()).unwrap();
    let wanted: Vec<_> = (1..=8).map(host_tier::block).collect();
    read_host_tier(&mut peer, &mut native(), &wanted);
    assert_eq!(server.node().stats().read_bytes, 8 * host_tier::BLOCK_BYTES as u64);
}
