//! The pool: blocks of any size, growth by whole pages, and shrinking that waits for users.

use std::sync::Barrier;

use crate::common::{DEVICE_PAGES, PAGE, close, machine, machine_with, pattern, recorded};
use cuda_driver::DeviceBuffer;
use cuda_sim::{Pace, RaceCheck};
use cuda_vmm::worker::Health;
use cuda_vmm::{
    ElasticPool, ElasticPoolOptions, GrowError, SpaceError, Worker,
    elastic::{BlockNotReady, Shrink},
    gate::Unrest,
};

/// Four blocks on three pages: most blocks straddle two.
const STRADDLING: u64 = PAGE / 4 * 3;

#[test]
fn grows_page_by_page_with_blocks_that_straddle_pages() {
    for block_bytes in [STRADDLING, PAGE, 3 * PAGE, 5 * PAGE / 2, 1000, PAGE - 1] {
        let machine = machine();
        let capacity = 40 * PAGE / block_bytes;
        let pool = machine.pool(block_bytes, capacity, 0);
        let stream = machine.stream();
        assert_eq!(pool.ready_blocks(), 0);
        let mut written = 0;
        while written < capacity {
            let mapped = pool.stats().mapped_bytes / PAGE;
            let ready = pool.grow_to(written + 1).unwrap();
            let pages = pool.stats().mapped_bytes / PAGE;
            assert_eq!(pages, ((written + 1) * block_bytes).div_ceil(PAGE));
            assert!(pages > mapped, "a growth mapped nothing");
            assert_eq!(ready, (pages * PAGE / block_bytes).min(capacity));
            for block in written..ready {
                let bytes = pattern(block, block_bytes);
                stream.upload(pool.block_span(block).unwrap(), &bytes).unwrap();
            }
            written = ready;
        }
        let mut seen = vec![0; block_bytes as usize];
        for block in 0..capacity {
            let span = pool.block_span(block).unwrap();
            assert_eq!(span.address(), pool.span().address() + block * block_bytes);
            stream.download(&mut seen, span).unwrap();
            assert!(seen == pattern(block, block_bytes), "block {block} of {block_bytes} bytes");
        }
        assert_eq!(machine.calls("cuMemMap"), (capacity * block_bytes).div_ceil(PAGE));
        close(pool);
        drop(stream);
        machine.assert_clean();
    }
}

#[test]
fn only_ready_blocks_have_a_span() {
    let machine = machine();
    let pool = machine.pool(STRADDLING, 20, 3);
    assert_eq!((pool.ready_blocks(), pool.stats().mapped_bytes), (4, 3 * PAGE));
    assert_eq!(pool.block_span(3).unwrap().bytes(), STRADDLING);
    for block in [4, 19, 20, u64::MAX] {
        assert_eq!(pool.block_span(block), Err(BlockNotReady { block, ready_blocks: 4 }));
    }
    let asked_blocks = 21;
    let refused = GrowError::OverCapacity { asked_blocks, capacity_blocks: 20 };
    assert_eq!(pool.grow_to(asked_blocks), Err(refused));
    assert_eq!(pool.span().bytes(), 15 * PAGE);
    close(pool);
    machine.assert_clean();
}

#[test]
fn sizes_that_overflow_are_named() {
    let machine = machine();
    let pool = |block_bytes, capacity_blocks, initial_blocks| {
        let page_bytes = None;
        let options =
            ElasticPoolOptions { block_bytes, capacity_blocks, page_bytes, initial_blocks };
        ElasticPool::new(&machine.device, options).map(drop)
    };
    for (block_bytes, capacity_blocks) in [(1 << 40, 1 << 30), (u64::MAX, 1), (3, u64::MAX / 3)] {
        let page_bytes = PAGE;
        let overflow = SpaceError::PoolOverflow { block_bytes, capacity_blocks, page_bytes };
        assert_eq!(pool(block_bytes, capacity_blocks, 0), Err(overflow));
    }
    for (block_bytes, capacity_blocks) in [(0, 5), (5, 0)] {
        let empty = SpaceError::EmptyPool { block_bytes, capacity_blocks };
        assert_eq!(pool(block_bytes, capacity_blocks, 0), Err(empty));
    }
    let over = GrowError::OverCapacity { asked_blocks: 6, capacity_blocks: 5 };
    assert_eq!(pool(PAGE, 5, 6), Err(SpaceError::Grow(over)));
    machine.assert_clean();
}

#[test]
fn shrinking_takes_blocks_away_at_once_and_pages_when_at_rest() {
    let machine = machine();
    let pool = machine.pool(STRADDLING, 20, 20);
    let stream = machine.stream();
    machine.sim.hold(stream.raw());
    stream.fill(pool.block_span(19).unwrap(), 5).unwrap();

    // Eight blocks cover six pages, which stay; nine are retired.
    let shrink = pool.shrink_to(8, &[recorded(&stream)]).unwrap();
    assert_eq!(shrink, Shrink { ready_blocks: 8, retiring_pages: 9 });
    assert_eq!(pool.ready_blocks(), 8);
    assert!(pool.block_span(8).is_err());
    assert_eq!(pool.poll_retired().unmapped_pages, 0);
    let stats = pool.stats();
    assert_eq!((stats.mapped_bytes, stats.retiring_bytes), (6 * PAGE, 9 * PAGE));
    assert_eq!(stats.waste_bytes, 0);

    // Growth returns at no cost to the pages that were kept, but not to those that still have a
    // user.
    let idle = machine.stream();
    assert_eq!(pool.shrink_to(4, &[recorded(&idle)]).unwrap().retiring_pages, 3);
    idle.synchronize().unwrap();
    assert_eq!(pool.grow_to(8), Ok(8));
    let refused = GrowError::Retiring { index: 6, ready_blocks: 8 };
    assert_eq!(pool.grow_to(10), Err(refused));
    assert!(refused.is_retryable());
    assert_eq!(pool.pages().stats().in_use, 15);

    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 9);
    assert_eq!(pool.stats().idle_bytes, 9 * PAGE);
    let created = machine.calls("cuMemCreate");
    assert_eq!(pool.grow_to(20), Ok(20));
    assert_eq!(machine.calls("cuMemCreate"), created);
    close(pool);
    drop((stream, idle));
    machine.assert_clean();
}

#[test]
fn growth_collects_what_has_come_to_rest_by_itself() {
    let machine = machine();
    let pool = machine.pool(PAGE, 10, 10);
    let batch = pool.gate().lease();
    pool.shrink_to(2, &[]).unwrap();
    assert_eq!(pool.grow_to(4), Err(GrowError::Retiring { index: 2, ready_blocks: 2 }));
    machine.end(batch);
    assert_eq!(pool.grow_to(4), Ok(4));
    assert_eq!((pool.trim(1), pool.stats().idle_bytes), (5, PAGE));
    assert_eq!(machine.sim.device_used_bytes(0), 5 * PAGE);
    let refused = pool.gate().lease();
    let error = pool.close(&[]).try_complete().unwrap_err();
    assert_eq!(error.reason, Unrest::Leases { open: 1 });
    machine.end(refused);
    let report = error.request.wait().unwrap();
    assert_eq!((report.unmapped, report.released), (4, 5));
    machine.assert_clean();
}

#[test]
fn running_out_of_memory_is_retryable_and_takes_none() {
    let machine = machine();
    let pool = machine.pool(PAGE, 2 * DEVICE_PAGES, 10);
    let others = machine.pages(DEVICE_PAGES);
    let theirs = others.take_many(40).unwrap();
    let error = pool.grow_to(30).unwrap_err();
    assert_eq!(error, GrowError::OutOfMemory { asked_blocks: 30, ready_blocks: 10 });
    assert!(error.is_retryable());
    assert_eq!(machine.sim.device_used_bytes(0), 50 * PAGE);
    assert_eq!(pool.stats().idle_bytes, 0);
    drop(theirs);
    assert_eq!(pool.grow_to(30), Ok(30));
    close(pool);
    drop(others);
    machine.assert_clean();
}

#[test]
fn requests_that_grow_shrink_and_use_blocks_at_once_never_fault() {
    const THREADS: u64 = 6;
    const ROUNDS: u64 = 120;
    for seed in 0..4 {
        let machine = machine_with(1, seed);
        // The threads fill the same blocks. The test checks only that memory is mapped there.
        machine.sim.set_race_check(RaceCheck::Off);
        let pool = machine.pool(STRADDLING, 60, 4);
        let start = Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (pool, machine, start) = (&pool, &machine, &start);
                scope.spawn(move || {
                    let stream = machine.stream();
                    start.wait();
                    for round in 0..ROUNDS {
                        let size = (thread * 37 + round * 23) % 61;
                        match (thread + round) % 3 {
                            0 => drop(pool.shrink_to(size, &[]).unwrap()),
                            1 => match pool.grow_to(size) {
                                Ok(ready) => assert!(ready >= size),
                                Err(error) => assert!(error.is_retryable(), "{error:?}"),
                            },
                            _ => drop(pool.poll_retired()),
                        }
                        // A batch reads addresses under a lease and uses them afterwards.
                        let lease = pool.gate().lease();
                        if let Ok(span) = pool.block_span(size.saturating_sub(1)) {
                            stream.fill(span, thread as u8).unwrap();
                        }
                        lease.submitted(&[recorded(&stream)]).unwrap();
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
        machine.device.synchronize().unwrap();
        let (stats, pages) = (pool.stats(), pool.pages().stats());
        assert_eq!(pages.in_use * PAGE, stats.mapped_bytes + stats.retiring_bytes);
        assert_eq!(stats.quarantined_bytes, 0);
        let calls = |call| machine.calls(call);
        assert_eq!(calls("cuMemMap") - calls("cuMemUnmap"), pages.in_use);
        close(pool);
        machine.assert_clean();
    }
}

/// Eight blocks on two pages.
const SMALL: u64 = PAGE / 4;

#[test]
fn blocks_that_shrinking_leaves_mapped_come_back_when_their_users_are_done() {
    for by_lease in [false, true] {
        let machine = machine();
        machine.sim.set_pace(Pace::Slowest);
        let pool = machine.pool(SMALL, 8, 8);
        let (reads, writes) = (machine.stream(), machine.stream());
        let bytes = pattern(1, SMALL);
        reads.upload(pool.block_span(6).unwrap(), &bytes).unwrap();

        // Request 1 reads block 6. Its page stays mapped because block 5 lies on it too.
        let lease = by_lease.then(|| pool.gate().lease());
        let copy = DeviceBuffer::alloc(&machine.device, SMALL).unwrap();
        reads.copy_on_device(copy.span(), pool.block_span(6).unwrap()).unwrap();
        let fence = recorded(&reads);
        let fences = if by_lease { vec![] } else { vec![fence.clone()] };
        let shrink = pool.shrink_to(6, &fences).unwrap();
        assert_eq!(shrink, Shrink { ready_blocks: 6, retiring_pages: 0 });

        // Request 2 gets the block when request 1 is done. Before that, neither growth nor demand
        // provides it.
        let refused = GrowError::Retiring { index: 2, ready_blocks: 6 };
        for users in ["a batch on the CPU", "work on the device"] {
            assert_eq!(pool.grow_to(7), Err(refused), "{users}");
            assert_eq!(pool.demand(7), Ok(6), "{users}");
        }
        if let Some(lease) = lease {
            lease.submitted(std::slice::from_ref(&fence)).unwrap();
            assert_eq!(pool.grow_to(7), Err(refused));
        }
        drop(fence);
        reads.synchronize().unwrap();
        assert_eq!(pool.grow_to(7), Ok(7));
        writes.fill(pool.block_span(6).unwrap(), 9).unwrap();
        writes.synchronize().unwrap();
        let mut seen = vec![0; SMALL as usize];
        reads.download(&mut seen, copy.span()).unwrap();
        assert!(seen == bytes, "request 2 overwrote the bytes that request 1 read");
        assert_eq!((machine.calls("cuMemMap"), pool.demand(8)), (2, Ok(8)));
        close(pool);
        drop((reads, writes, copy, fences));
        machine.device.free_retired().unwrap();
        machine.assert_clean();
    }
}

#[test]
fn shrinking_twice_forgets_no_user() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let pool = machine.pool(SMALL, 8, 8);
    let (first, second) = (machine.stream(), machine.stream());
    first.fill(pool.block_span(7).unwrap(), 1).unwrap();
    pool.shrink_to(7, &[recorded(&first)]).unwrap();
    second.fill(pool.block_span(6).unwrap(), 1).unwrap();
    pool.shrink_to(6, &[recorded(&second)]).unwrap();
    second.synchronize().unwrap();
    assert_eq!(pool.grow_to(7), Err(GrowError::Retiring { index: 2, ready_blocks: 6 }));
    assert_eq!(pool.trim(0), 0);
    first.synchronize().unwrap();
    assert_eq!(pool.grow_to(8), Ok(8));
    close(pool);
    drop((first, second));
    machine.assert_clean();
}

#[test]
fn a_page_that_is_retired_is_retired_once() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    // Four blocks on a page: three are parked on the page that is kept.
    let pool = machine.pool(PAGE / 4, 32, 32);
    let stream = machine.stream();
    stream.fill(pool.block_span(31).unwrap(), 1).unwrap();
    let shrink = pool.shrink_to(1, &[recorded(&stream)]).unwrap();
    assert_eq!(shrink, Shrink { ready_blocks: 1, retiring_pages: 7 });
    for _ in 0..3 {
        assert_eq!(pool.trim(0), 0);
    }
    stream.synchronize().unwrap();
    let polled = pool.poll_retired();
    assert_eq!((polled.unmapped_pages, polled.failed.len()), (7, 0));
    assert_eq!(pool.grow_to(32), Ok(32));
    for block in 0..32 {
        stream.fill(pool.block_span(block).unwrap(), 7).unwrap();
    }
    stream.synchronize().unwrap();
    close(pool);
    drop(stream);
    machine.assert_clean();
}

#[test]
fn users_of_a_block_that_straddles_pages_are_waited_for_by_every_later_shrink() {
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    // The second block lies on the second page and the third.
    let pool = machine.pool(PAGE / 2 * 3, 2, 2);
    let (slow, done) = (machine.stream(), machine.stream());
    slow.fill(pool.block_span(1).unwrap(), 1).unwrap();
    assert_eq!(pool.shrink_to(1, &[recorded(&slow)]).unwrap().retiring_pages, 1);
    let quick = recorded(&done);
    done.synchronize().unwrap();
    assert_eq!(pool.shrink_to(0, &[quick]).unwrap().retiring_pages, 2);
    assert_eq!(pool.poll_retired().unmapped_pages, 0, "the first half of the block is written");
    slow.synchronize().unwrap();
    assert_eq!(pool.poll_retired().unmapped_pages, 3);
    close(pool);
    drop((slow, done));
    machine.assert_clean();
}

#[test]
fn a_pool_that_was_refused_memory_grows_when_there_is_some_again() {
    let machine = machine();
    let worker = Worker::manual();
    let others = machine.pages(DEVICE_PAGES);
    let theirs = others.take_many(DEVICE_PAGES - 4).unwrap();
    let mut pool = machine.pool(PAGE, DEVICE_PAGES, 0);
    pool.work_on(&worker);
    assert_eq!(pool.grow_to(4), Ok(4));
    for _ in 0..3 {
        let short = GrowError::OutOfMemory { asked_blocks: 8, ready_blocks: 4 };
        assert_eq!(pool.grow_to(8), Err(short));
        assert!(short.is_retryable());
        let _ = pool.demand(8);
        while worker.poll() {}
        assert!(pool.demand(8).unwrap_err().is_retryable());
    }
    // The refusals have no lasting effect: the same calls find the memory.
    drop(theirs);
    assert_eq!(pool.grow_to(8), Ok(8));
    let _ = pool.demand(DEVICE_PAGES);
    while worker.poll() {}
    assert_eq!(pool.demand(DEVICE_PAGES), Ok(DEVICE_PAGES));
    assert!(pool.ahead_stats().health == Health::Healthy);
    close(pool);
    drop(others);
    machine.assert_clean();
}
