//! Reads from device to device between processes, of nodes that die and for readers that do, and sequences that are handed over so.
//!
//! Without a device or without NIXL's library (`KV_NIXL_LIBRARY`) every trial is listed as ignored. With `KV_REQUIRE_GPU=1` it fails
//! without a device, and with `KV_REQUIRE_NIXL=1` without the library. The nodes are on the first device, and the readers on the last one, which may be the same. Each trial is a process of its own, and has
//! its nodes in others. `KV_NIXL_GPU_TLS` says which transports UCX uses, and `KV_NIXL_HANDOVERS` how many sequences are handed over.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(clippy::print_stdout, reason = "a node answers so, and a trial says what it has seen")]

#[path = "it/alone.rs"]
mod alone;
#[path = "it/common.rs"]
mod common;
mod device;

use std::time::{Duration, Instant};

use common::{Block, block, far, random, until};
use cuda_driver::{Device, Event};
use device::{Pool, Process, Role, content, last, open};
use kv_nixl::{Library, NixlDeviceTransfer, NixlTransfer};
use kv_pool::BlockId;
use kv_remote::PeerError;
use kv_remote::handover::{HandoverId, Pull};
use kv_remote::message::Found;
use libtest_mimic::{Arguments, Failed, Trial};

const SECOND: Duration = Duration::from_secs(1);

const TRIALS: &[(&str, fn())] = &[
    ("records_are_read_from_device_to_device", records_are_read),
    ("a_landing_is_not_written_before_it_was_used", a_landing_is_used),
    ("a_device_that_lags_costs_its_reader_no_more_than_its_time", a_device_lags),
    ("a_host_reads_records_of_a_device", a_host_reads_records),
    ("readers_that_are_killed_cost_the_node_nothing", readers_are_killed),
    ("a_node_that_dies_costs_a_miss_and_another_is_met", a_node_dies),
    ("sequences_are_handed_over_from_device_to_device", sequences_are_handed_over),
];

fn main() {
    if let Some(role) = Role::of_this_process() {
        return role.play(TRIALS);
    }
    let is_set = |name| std::env::var_os(name).is_some_and(|value| value == "1");
    let missing = open(0).is_err() && !is_set("KV_REQUIRE_GPU")
        || Library::open().is_err() && !is_set("KV_REQUIRE_NIXL");
    let trials = TRIALS.iter().map(|&(name, _)| {
        let trial = Trial::test(name, move || device::run_alone(name).map_err(Failed::from));
        trial.with_ignored_flag(missing)
    });
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// A reader's memory: blocks of its device, and how records come to them.
fn reader(device: &Device) -> (Pool, NixlDeviceTransfer) {
    let pool = Pool::new(device);
    let transfer = NixlDeviceTransfer::new(Library::open().unwrap(), pool.stream());
    (pool, transfer)
}

/// Reads all records of an answer to the first blocks of the pool.
fn read(
    (pool, transfer): (&Pool, &mut NixlDeviceTransfer),
    peer: &mut kv_remote::Peer,
    found: &Found,
    within: Duration,
) -> Result<usize, PeerError> {
    let mut count = 0;
    transfer.read_each(peer, found, Instant::now() + within, &mut |place, span| {
        pool.stream().copy_on_device(pool.block(place as u64), span).unwrap();
        count += 1;
    })?;
    Ok(count)
}

fn records_are_read() {
    let node = Process::start(&Role::Node { records: 40 });
    let (mut peer, (pool, mut transfer)) = (node.connect(), reader(&last()));
    let mut state = 3;
    for _ in 0..50 {
        let numbers: Vec<u64> =
            (0..1 + random(&mut state) % 40).map(|of| (of * 7 + 3) % 40).collect();
        let wanted: Vec<_> = numbers.iter().map(|&number| block(number)).collect();
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        assert_eq!(found.blocks.len(), wanted.len());
        let count = read((&pool, &mut transfer), &mut peer, &found, 30 * SECOND).unwrap();
        assert_eq!(count, wanted.len());
        peer.end(found.lease.unwrap(), far()).unwrap();
        let sums = pool.sums(wanted.len());
        for ((at, located), (&number, sum)) in
            (0..).zip(&found.blocks).zip(numbers.iter().zip(sums))
        {
            assert_eq!(sum, located.sum, "block {number}");
            assert!(pool.download(at) == content(number, 0), "block {number}");
        }
    }
    // The node has copied nothing: its memory was read. Within one device UCX has no such way.
    let is_other = last().ordinal() != 0;
    assert_eq!(node.ask("read_bytes") == "0", is_other);
    assert_eq!(node.ask("leases"), "0");
}

/// More than there are landings for.
const RECORDS: u64 = 600;

/// A node with so many records, room for them, how they come, and their names.
fn many() -> (Process, Pool, NixlDeviceTransfer, Vec<Block>) {
    let node = Process::start(&Role::Node { records: RECORDS });
    let pool = Pool::with(&last(), RECORDS);
    let transfer = NixlDeviceTransfer::new(Library::open().unwrap(), pool.stream());
    (node, pool, transfer, (0..RECORDS).map(block).collect())
}

/// The device is busy with something else while more comes than there are landings.
fn a_landing_is_used() {
    let (node, pool, mut transfer, wanted) = many();
    let mut peer = node.connect();
    for turn in 0..3 {
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        pool.keep_busy(Duration::from_millis(50));
        let count = read((&pool, &mut transfer), &mut peer, &found, 30 * SECOND).unwrap();
        assert_eq!(count as u64, RECORDS);
        peer.end(found.lease.unwrap(), far()).unwrap();
        let sums = pool.sums(wanted.len());
        let right = sums.iter().zip(&found.blocks).filter(|(sum, at)| **sum == at.sum).count();
        assert_eq!(right as u64, RECORDS, "turn {turn}");
    }
}

/// More than two reads take.
const LAG: Duration = Duration::from_secs(4);

/// What has come before is not used yet when the time of the next read is over.
fn a_device_lags() {
    let (node, pool, mut transfer, wanted) = many();
    let mut peer = node.connect();
    let mut read_all = |within| {
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        let read = read((&pool, &mut transfer), &mut peer, &found, within);
        peer.end(found.lease.unwrap(), far()).unwrap();
        (read, found)
    };
    assert_eq!(read_all(30 * SECOND).0.unwrap() as u64, RECORDS);
    pool.stream().synchronize().unwrap();
    let idle = Event::new(pool.stream().device()).unwrap();
    pool.keep_busy(LAG);
    idle.record(pool.stream()).unwrap();
    for turn in 0..2 {
        let begun = Instant::now();
        let (read, _) = read_all(Duration::from_millis(200));
        assert!(matches!(read, Err(PeerError::Late)), "turn {turn}: {read:?}");
        // Whatever time that took: the device was not waited for.
        assert!(!idle.is_complete().unwrap(), "turn {turn}: {:?}", begun.elapsed());
    }
    idle.synchronize().unwrap();
    let (read, found) = read_all(30 * SECOND);
    assert_eq!(read.unwrap() as u64, RECORDS);
    let sums = pool.sums(wanted.len());
    assert!(sums.iter().zip(&found.blocks).all(|(sum, at)| *sum == at.sum));
    assert_eq!(transfer.late(), 0);
}

fn a_host_reads_records() {
    let node = Process::start(&Role::Node { records: 8 });
    let (mut peer, mut transfer) = (node.connect(), NixlTransfer::new(Library::open().unwrap()));
    // What a peer has the node keep comes from the host, and goes back to one.
    let records: Vec<Vec<u8>> = (100..120).map(|number| content(number, 7)).collect();
    for (number, record) in (100..).zip(&records) {
        peer.put(block(number), record.clone(), far()).unwrap();
    }
    let wanted: Vec<_> = (100..120).map(block).collect();
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    let read = peer.read(&mut transfer, &found, &wanted, far()).unwrap();
    peer.end(found.lease.unwrap(), far()).unwrap();
    assert!(read.iter().zip(&records).all(|(read, record)| read.as_ref() == Ok(record)));
    // What the device has written is for who knows its sum.
    let written: Vec<_> = (0..8).map(block).collect();
    let found = peer.find_and_pin(&written, 10 * SECOND, far()).unwrap();
    let read = peer.read(&mut transfer, &found, &written, far()).unwrap();
    peer.end(found.lease.unwrap(), far()).unwrap();
    assert!(!read.is_empty() && read.iter().all(Result::is_err), "{}", read.len());
}

fn readers_are_killed() {
    let node = Process::start(&Role::Node { records: 40 });
    let (mut peer, (pool, mut transfer)) = (node.connect(), reader(&last()));
    let wanted: Vec<_> = (0..40).map(block).collect();
    for turn in 0..4 {
        // It says so once it has read, and reads on.
        let other = Process::start(&Role::Reader { of: node.address().clone() });
        drop(other);
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        read((&pool, &mut transfer), &mut peer, &found, 30 * SECOND).unwrap();
        peer.end(found.lease.unwrap(), far()).unwrap();
        let sums = pool.sums(wanted.len());
        let right = sums.iter().zip(&found.blocks).filter(|(sum, at)| **sum == at.sum).count();
        assert_eq!(right, wanted.len(), "turn {turn}");
    }
    until("no lease is open", || node.ask("leases") == "0");
}

fn a_node_dies() {
    let (pool, mut transfer) = reader(&last());
    let wanted: Vec<_> = (0..40).map(block).collect();
    for turn in 0..3 {
        let node = Process::start(&Role::Node { records: 40 });
        let mut peer = node.connect();
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        read((&pool, &mut transfer), &mut peer, &found, 30 * SECOND).unwrap();
        assert_eq!(pool.sums(40), found.blocks.iter().map(|at| at.sum).collect::<Vec<_>>());
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        drop(node);
        // Whatever comes of it, it ends, and what comes is told from what does not by its sum.
        let came = read((&pool, &mut transfer), &mut peer, &found, 2 * SECOND);
        println!("turn {turn}: {came:?}");
        pool.stream().synchronize().unwrap();
        assert!(
            peer.end(found.lease.unwrap(), Instant::now() + 2 * SECOND).is_err(),
            "turn {turn}"
        );
    }
}

fn sequences_are_handed_over() {
    let count = std::env::var("KV_NIXL_HANDOVERS").map_or(1000, |count| count.parse().unwrap());
    let node = Process::start(&Role::Prefill { sequences: count });
    let (mut peer, (pool, mut transfer)) = (node.connect(), reader(&last()));
    let began = Instant::now();
    let (mut blocks, mut cancelled, mut to_first) = (0, 0, Duration::ZERO);
    for number in 0..count {
        let id = HandoverId(number.into());
        let asked = Instant::now();
        let mut pull = loop {
            let mut socket = kv_remote::SocketTransfer;
            match Pull::open(&mut peer, &mut socket, (id, 0), 10 * SECOND, far()).unwrap() {
                Some(pull) => break pull,
                None => std::thread::park_timeout(Duration::from_micros(50)),
            }
        };
        let sheet = pull.sheet().clone();
        assert_eq!(sheet, device::sheet(number));
        if number % 50 == 49 {
            pull.cancel(&mut peer, far()).unwrap();
            cancelled += 1;
            continue;
        }
        let mut first = None;
        let waited = pull.wait_by(&mut peer, far(), |peer, parts, found| {
            let places: Vec<u64> = parts.iter().map(|part| part.place.into()).collect();
            let deadline = Instant::now() + 30 * SECOND;
            transfer.read_each(peer, found, deadline, &mut |at, span| {
                pool.stream().copy_on_device(pool.block(places[at]), span).unwrap();
            })?;
            let sums = pool.sums_of(
                &places.iter().filter_map(|&place| BlockId::new(place as u32)).collect::<Vec<_>>(),
            );
            first.get_or_insert_with(|| asked.elapsed());
            Ok(sums.iter().zip(&found.blocks).map(|(sum, at)| *sum == at.sum).collect())
        });
        waited.unwrap();
        pull.take(&mut peer, far()).unwrap();
        to_first += first.unwrap();
        for place in 0..device::blocks_of(number) {
            assert!(pool.download(place) == content(number, place), "{number}, block {place}");
            blocks += 1;
        }
    }
    let bytes = blocks * device::BLOCK_BYTES;
    println!(
        "{count} sequences, {cancelled} cancelled, {blocks} blocks ({bytes} bytes) right, {:.1} s, \
         {:.2} ms to the first blocks",
        began.elapsed().as_secs_f64(),
        to_first.as_secs_f64() * 1e3 / (count - cancelled) as f64,
    );
    assert_eq!(node.ask("done"), format!("{} {cancelled} 0", count - cancelled));
    assert_eq!(node.ask("leases"), "0");
    assert_eq!(transfer.late(), 0);
}
