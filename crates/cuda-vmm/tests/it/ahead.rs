//! Growth ahead of need, shrinking and adopting: what the step path gets, and its cost.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{DEVICE_PAGES, Machine, PAGE, close, machine, pattern, recorded, refusals};
use cuda_driver::{CountingDriver, Device, Driver, ErrorCode};
use cuda_sim::RaceCheck;
use cuda_vmm::worker::{Fault, Health};
use cuda_vmm::{
    ElasticPool, ElasticPoolOptions, EpochGate, GrowError, MemoryLimit, MemoryRules, Worker,
    WorkerOptions,
};

/// Four blocks on three pages: most blocks straddle two.
const STRADDLING: u64 = PAGE / 4 * 3;

fn pool_under(
    device: &Device,
    worker: &Worker,
    limit: Option<&MemoryLimit>,
    capacity_blocks: u64,
) -> ElasticPool {
    let options = ElasticPoolOptions {
        block_bytes: STRADDLING,
        capacity_blocks,
        page_bytes: None,
        initial_blocks: 0,
    };
    let rules = MemoryRules { limit: limit.cloned(), admission: None };
    let mut pool = ElasticPool::with_rules(device, options, EpochGate::new(), rules).unwrap();
    pool.work_on(worker);
    pool
}

/// Polls until nothing can be done at once.
fn poll(worker: &Worker) {
    while worker.poll() {}
}

#[test]
fn a_step_that_is_looked_ahead_for_makes_no_driver_call() {
    let machine = machine();
    let counting = Arc::new(CountingDriver::new(Arc::new(machine.sim.clone())));
    let device = Device::open(counting.clone() as Arc<dyn Driver>, 0).unwrap();
    let worker = Worker::manual();
    let pool = pool_under(&device, &worker, None, 60);
    pool.set_ahead(8);
    poll(&worker);
    assert!(pool.ready_blocks() >= 8);
    for used in 1..=60 {
        let before = counting.calls();
        let ready = pool.demand(used).unwrap();
        assert_eq!(counting.calls(), before, "a driver call with {used} blocks used");
        assert!(ready >= used);
        poll(&worker);
        let target = (used + 8).min(60);
        assert!(pool.ready_blocks() >= target, "{used}: {}", pool.ready_blocks());
        // Not more than the look-ahead, except the rest of a page.
        assert!(pool.ready_blocks() <= target + 1, "{used}: {}", pool.ready_blocks());
    }
    let stats = pool.ahead_stats();
    assert_eq!((stats.stalls, stats.ahead_pages, stats.inline_pages), (0, 45, 0));
    assert_eq!((stats.demand_blocks, stats.ahead_blocks), (60, 8));
    assert_eq!(stats.health, Health::Healthy);
    close(pool);
    drop(device);
    machine.assert_clean();
}

#[test]
fn running_out_is_counted_and_the_caller_may_grow_by_itself() {
    let machine = machine();
    let worker = Worker::manual();
    let pool = pool_under(&machine.device, &worker, None, 60);
    assert_eq!(pool.demand(5), Ok(0));
    assert_eq!(pool.ahead_stats().stalls, 1);
    assert!(pool.grow_to(5).unwrap() >= 5);
    assert_eq!(pool.ahead_stats().inline_pages, 4);
    assert!(pool.demand(5).unwrap() >= 5);
    poll(&worker);
    assert_eq!((pool.ahead_stats().stalls, pool.ahead_stats().ahead_pages), (1, 0));
    close(pool);
    machine.assert_clean();
}

#[test]
fn parked_blocks_are_adopted_without_a_call_once_they_are_at_rest() {
    let machine = machine();
    let worker = Worker::manual();
    let mut pool = machine.pool(PAGE / 8, 16, 16);
    pool.work_on(&worker);
    let stream = machine.stream();
    let bytes = pattern(7, PAGE / 8);
    stream.upload(pool.block_span(5).unwrap(), &bytes).unwrap();
    machine.sim.hold(stream.raw());
    stream.fill(pool.block_span(7).unwrap(), 5).unwrap();
    let lease = pool.gate().lease();
    assert_eq!(pool.shrink_to(2, &[]).unwrap().retiring_pages, 1);
    assert!(pool.block_span(2).is_err());

    // A batch on the CPU, then work on the device. Neither may find its blocks with a new owner.
    for users in ["a lease", "an event"] {
        poll(&worker);
        assert_eq!(pool.demand(6), Ok(2), "{users}");
        let refused = GrowError::Retiring { index: 1, ready_blocks: 2 };
        assert_eq!(pool.grow_to(6), Err(refused), "{users}");
        if users == "a lease" {
            lease_to_event(&pool, &stream);
        }
    }
    machine.end(lease);
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(pool.demand(6), Ok(2));
    poll(&worker);
    assert_eq!((pool.ready_blocks(), pool.ahead_stats().adopted_blocks), (6, 4));
    let before = machine.sim.calls();
    assert_eq!(pool.demand(8), Ok(8));
    assert_eq!(machine.sim.calls(), before);
    assert_eq!(pool.ahead_stats().adopted_blocks, 6);
    let mut seen = vec![0; bytes.len()];
    stream.download(&mut seen, pool.block_span(5).unwrap()).unwrap();
    assert!(seen == bytes, "parked blocks were unmapped");
    assert_eq!((machine.calls("cuMemMap"), machine.calls("cuMemUnmap")), (2, 1));
    close(pool);
    drop(stream);
    machine.assert_clean();
}

/// A second batch, closed with a fence. Its lease was taken after the shrinking, so nothing waits for
/// it.
fn lease_to_event(pool: &ElasticPool, stream: &cuda_driver::Stream) {
    pool.gate().lease().submitted(&[recorded(stream)]).unwrap();
}

#[test]
fn what_was_given_up_first_still_counts_when_more_is() {
    let machine = machine();
    let worker = Worker::manual();
    let pool = pool_under(&machine.device, &worker, None, 20);
    let stream = machine.stream();
    pool.grow_to(20).unwrap();
    machine.sim.hold(stream.raw());
    stream.fill(pool.block_span(19).unwrap(), 5).unwrap();
    pool.shrink_to(15, &[recorded(&stream)]).unwrap();
    let idle = machine.stream();
    pool.shrink_to(3, &[recorded(&idle)]).unwrap();
    poll(&worker);
    assert_eq!(pool.demand(20), Ok(3));
    assert_eq!(pool.stats().retiring_bytes, 12 * PAGE);
    assert_eq!(pool.poll_retired().unmapped_pages, 0);
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    idle.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 12);
    assert_eq!(pool.grow_to(20), Ok(20));
    close(pool);
    drop((stream, idle));
    machine.assert_clean();
}

#[test]
fn a_lowered_limit_takes_idle_pages_and_a_raised_one_lets_the_pool_grow_on() {
    let machine = machine();
    let worker = Worker::manual();
    let limit = MemoryLimit::new(u64::MAX);
    let pool = pool_under(&machine.device, &worker, Some(&limit), 40);
    pool.set_ahead(20);
    poll(&worker);
    assert_eq!(pool.stats().mapped_bytes, 15 * PAGE);
    pool.pages().prepare(3).unwrap();
    pool.set_ahead(0);
    pool.shrink_to(4, &[]).unwrap();
    poll(&worker);
    for (pages, idle) in [(16, 13), (10, 7)] {
        limit.set(pages * PAGE);
        poll(&worker);
        assert_eq!((pool.stats().idle_bytes, limit.stats().over_by()), (idle * PAGE, 0));
    }
    assert_eq!(pool.demand(13), Ok(4));
    poll(&worker);
    assert_eq!((pool.demand(13), pool.stats().idle_bytes), (Ok(13), 0));

    // The limit is the obstacle, so waiting does not help until the limit is raised.
    assert_eq!(pool.demand(20), Ok(13));
    poll(&worker);
    let error = pool.demand(20).unwrap_err();
    assert_eq!((&error.cause, error.ready_blocks), (&Fault::Limit { bytes: PAGE }, 13));
    assert!(error.is_retryable());
    assert_eq!(pool.demand(13), Ok(13));
    pool.demand(20).unwrap_err();
    limit.set(15 * PAGE);
    poll(&worker);
    assert_eq!((pool.demand(20), pool.ahead_stats().health), (Ok(20), Health::Healthy));
    // Memory in use stays.
    limit.set(0);
    poll(&worker);
    assert_eq!((pool.ready_blocks(), limit.stats().over_by()), (20, 15 * PAGE));
    close(pool);
    assert_eq!(limit.stats().used_bytes, 0);
    machine.assert_clean();
}

#[test]
fn one_pool_grows_into_what_another_has_given_up() {
    let machine = machine();
    let worker = Worker::manual();
    let limit = MemoryLimit::new(16 * PAGE);
    let first = pool_under(&machine.device, &worker, Some(&limit), 20);
    let second = pool_under(&machine.device, &worker, Some(&limit), 20);
    first.grow_to(20).unwrap();
    first.shrink_to(4, &[]).unwrap();
    assert_eq!(second.grow_to(16), Ok(16));
    assert_eq!((first.stats().mapped_bytes, second.stats().mapped_bytes), (3 * PAGE, 12 * PAGE));
    assert_eq!(limit.stats().used_bytes, 16 * PAGE);
    assert!(matches!(first.grow_to(6).unwrap_err(), GrowError::OverLimit { .. }));
    close(first);
    close(second);
    machine.assert_clean();
}

#[test]
fn a_full_device_is_used_to_its_last_page_and_told_by_the_next_call() {
    let machine = machine();
    let worker = Worker::manual();
    let pool = pool_under(&machine.device, &worker, None, 2 * DEVICE_PAGES);
    pool.demand(2 * DEVICE_PAGES).unwrap();
    poll(&worker);
    assert_eq!(pool.stats().mapped_bytes, DEVICE_PAGES * PAGE);
    let error = pool.demand(2 * DEVICE_PAGES).unwrap_err();
    assert_eq!(error.cause, Fault::OutOfMemory { bytes: PAGE });
    // With a smaller demand no block is missing.
    assert!(pool.demand(DEVICE_PAGES).is_ok());
    poll(&worker);
    assert_eq!(pool.ahead_stats().health, Health::Healthy);
    close(pool);
    machine.assert_clean();
}

#[test]
fn a_lost_device_is_told_by_the_next_call_though_enough_is_ready() {
    let machine = machine();
    let worker = Worker::manual();
    let pool = pool_under(&machine.device, &worker, None, 40);
    pool.grow_to(8).unwrap();
    pool.set_ahead(4);
    machine.sim.fail_nth("cuMemCreate", 1, ErrorCode::ILLEGAL_ADDRESS);
    assert!(pool.demand(8).unwrap() >= 8);
    poll(&worker);
    let error = pool.demand(2).unwrap_err();
    assert!(matches!(error.cause, Fault::Lost(_)), "{error:?}");
    assert!(!error.is_retryable());
    assert!(matches!(pool.ahead_stats().health, Health::Failed { .. }));
    assert!(pool.close(&[]).wait().unwrap().is_clean());
}

/// Grows, shrinks, and lowers the limit, all through the worker. Failures on the way
/// have been repaired at the end.
fn live_through(pool: &ElasticPool, worker: &Worker, limit: &MemoryLimit) {
    let settle = || {
        // The next round repeats what was refused.
        for _ in 0..4 {
            poll(worker);
        }
    };
    pool.set_ahead(2);
    let _ = pool.demand(10);
    settle();
    pool.shrink_to(4, &[]).unwrap();
    let _ = pool.demand(6);
    settle();
    pool.shrink_to(2, &[]).unwrap();
    pool.set_ahead(0);
    let _ = pool.demand(2);
    settle();
    limit.set(5 * PAGE);
    settle();
    let _ = pool.shrink_to(1, &[]);
    settle();
    limit.set(20 * PAGE);
    let _ = pool.demand(9);
    settle();
    pool.shrink_to(5, &[]).unwrap();
    pool.trim(0);
    let _ = pool.demand(7);
    settle();
}

#[test]
fn every_call_of_growing_shrinking_and_trimming_fails_once() {
    let run = |fault: Option<(&'static str, u64)>| -> BTreeMap<&'static str, u64> {
        let machine = machine();
        let worker = Worker::manual();
        let limit = MemoryLimit::new(20 * PAGE);
        let pool = pool_under(&machine.device, &worker, Some(&limit), 24);
        let before = machine.sim.calls();
        if let Some((call, nth)) = fault {
            machine.sim.fail_nth(call, nth, refusals(call)[0]);
        }
        live_through(&pool, &worker, &limit);
        let calls = machine.sim.calls();
        let made = |(name, count)| (name, count - before.get(name).copied().unwrap_or(0));
        assert!(pool.ready_blocks() >= 7, "{fault:?}: {}", pool.ready_blocks());
        assert_eq!(pool.ahead_stats().health, Health::Healthy, "{fault:?}");
        let (stats, pages) = (pool.stats(), pool.pages().stats());
        assert_eq!(stats.quarantined_bytes, 0, "{fault:?}");
        assert_eq!(pages.in_use * PAGE, stats.mapped_bytes + stats.retiring_bytes, "{fault:?}");
        assert_eq!(limit.stats().used_bytes, pages.live * PAGE, "{fault:?}");
        close(pool);
        assert_eq!(limit.stats().used_bytes, 0, "{fault:?}");
        assert!(machine.sim.findings().is_empty(), "{fault:?}: {:?}", machine.sim.findings());
        machine.assert_clean();
        calls.into_iter().map(made).filter(|(_, count)| *count > 0).collect()
    };
    let healthy = run(None);
    let mut faults = 0;
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"] {
        for nth in 1..=healthy[call] {
            run(Some((call, nth)));
            faults += 1;
        }
    }
    assert!(faults > 40, "{faults}");
}

#[test]
fn a_thread_keeps_up_while_requests_grow_shrink_and_use_blocks() {
    for seed in 0..6 {
        let machine = crate::common::machine_with(1, seed);
        // The threads fill the same blocks. The test checks only that memory is mapped there.
        machine.sim.set_race_check(RaceCheck::Off);
        let worker = Worker::spawn(WorkerOptions::default()).unwrap();
        let limit = MemoryLimit::new(30 * PAGE);
        let pool = pool_under(&machine.device, &worker, Some(&limit), 40);
        pool.set_ahead(6);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..200 {
                    limit.set((20 + round % 20) * PAGE);
                }
            });
            for thread in 0..3 {
                let (pool, machine) = (&pool, &machine);
                scope.spawn(move || use_blocks(machine, pool, thread));
            }
        });
        machine.device.synchronize().unwrap();
        // At rest, the thread reaches the last requested size.
        limit.set(60 * PAGE);
        let _ = pool.demand(30);
        while pool.ready_blocks() < 36 {
            std::thread::yield_now();
        }
        close(pool);
        assert_eq!(limit.stats().used_bytes, 0);
        worker.close();
        machine.assert_clean();
    }
}

fn use_blocks(machine: &Machine, pool: &ElasticPool, thread: u64) {
    let stream = machine.stream();
    for round in 0..150 {
        let size = (thread * 13 + round * 7) % 30;
        match (thread + round) % 3 {
            0 => drop(pool.shrink_to(size, &[]).unwrap()),
            1 => match pool.grow_to(size) {
                Ok(ready) => assert!(ready >= size),
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            },
            _ => match pool.demand(size) {
                Ok(_) => {}
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            },
        }
        let lease = pool.gate().lease();
        if let Ok(span) = pool.block_span(size) {
            stream.fill(span, thread as u8).unwrap();
        }
        lease.submitted(&[recorded(&stream)]).unwrap();
    }
    stream.synchronize().unwrap();
}
