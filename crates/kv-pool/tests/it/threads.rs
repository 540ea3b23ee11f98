//! Many threads on one pool: no block id has two owners, and what is pinned is neither moved nor
//! overwritten.

use std::sync::Barrier;
use std::thread;

use crate::common::worker::{Shape, play};
use crate::common::{Moved, One, OneMove};
use crate::common::{cache, cache_secondary, checked, claim, find, name, pool, write};
use kv_pool::{BlockPool, Claimed, Priority, Tier};

/// Claims in steps of `count` until the pool is empty, from `threads` threads at once.
fn claim_all(pool: &BlockPool, threads: usize, count: usize) -> Vec<Claimed> {
    let start = Barrier::new(threads);
    let claim_until_empty = || {
        start.wait();
        let mut blocks = Vec::new();
        while let Ok(more) = pool.claim(count) {
            assert_eq!(more.len(), count, "all or none");
            blocks.extend(more);
        }
        blocks
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(claim_until_empty)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn threads_that_claim_until_empty_get_each_block_id_once() {
    for (round, count) in [1, 1, 3, 7, 1, 2].into_iter().cycle().take(60).enumerate() {
        let pool = pool(257, 0);
        for content in 0..(round as u32 % 50) {
            cache(&pool, content, Priority::DEFAULT);
        }
        let blocks = claim_all(&pool, 4, count);
        let mut block_ids: Vec<_> = blocks.iter().map(|block| block.block_id().index()).collect();
        block_ids.sort_unstable();
        block_ids.dedup();
        assert_eq!(block_ids.len(), blocks.len());
        assert_eq!(pool.claimable(), 257 - blocks.len());
        assert!(pool.claimable() < count);
        checked(&pool);
    }
}

#[test]
fn a_block_is_pinned_by_a_reader_or_taken_for_an_offload_but_never_both() {
    for _ in 0..400 {
        let pool = pool(1, 1);
        cache_secondary(&pool, 1);
        cache(&pool, 2, Priority::DEFAULT);
        let start = Barrier::new(2);
        let (offload, pin) = thread::scope(|scope| {
            let evictor = scope.spawn(|| {
                start.wait();
                claim(&pool).take_offload()
            });
            let reader = scope.spawn(|| {
                start.wait();
                pool.find_and_pin(name(1), Tier::Secondary)
            });
            (evictor.join().unwrap(), reader.join().unwrap())
        });
        assert!(offload.is_some() != pin.is_some(), "{offload:?} and {pin:?}");
        checked(&pool);
    }
}

#[test]
fn a_reader_that_comes_during_an_onboarding_keeps_its_block_id() {
    for _ in 0..400 {
        let pool = pool(2, 1);
        cache_secondary_beside(&pool, 1);
        let onboard = pool.begin_onboard(find(&pool, 1).unwrap(), claim(&pool)).unwrap();
        let start = Barrier::new(2);
        let (onboarded, reader) = thread::scope(|scope| {
            let onboarder = scope.spawn(|| {
                start.wait();
                onboard.commit_one()
            });
            let reader = scope.spawn(|| {
                start.wait();
                pool.find_and_pin(name(1), Tier::Secondary)
            });
            (onboarder.join().unwrap(), reader.join().unwrap())
        });
        let moved = matches!(onboarded, Moved::Moved(_));
        assert!(moved != reader.is_some(), "{onboarded:?} and {reader:?}");
        checked(&pool);
    }
}

/// Like `cache_secondary`, in a pool with another primary block.
fn cache_secondary_beside(pool: &BlockPool, content: u32) {
    let other = claim(pool);
    cache_secondary(pool, content);
    drop(other);
}

const WORKERS: usize = 4;

#[test]
fn mixed_work_of_many_threads_never_meets_a_foreign_block_id() {
    let shape = Shape { primary: 24, secondary: 8, threads: WORKERS as u32, steps: 4_000 };
    for seed in 1..=25 {
        let counters = play(seed, shape);
        let met = [counters.offloaded, counters.onboarded, counters.hits];
        assert!(met.iter().all(|&times| times > 0), "seed {seed}: {counters:?}");
    }
}

#[test]
fn pins_taken_and_given_back_by_many_threads_hold_the_block() {
    let pool = pool(2, 0);
    let block_id = write(&pool, 1).block_id();
    let barrier = Barrier::new(WORKERS);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..5_000 {
                    // The block is off the queue as long as anybody has it, and back at zero.
                    let Some(pin) = find(&pool, 1) else {
                        panic!("evicted while a block was free")
                    };
                    assert_eq!(pin.block_id(), block_id);
                    if let Ok(other) = pool.claim(1) {
                        assert_ne!(other.ids().next().unwrap(), block_id);
                    }
                    drop(pin.clone());
                }
            });
        }
    });
    assert_eq!(pool.claimable(), 2);
    checked(&pool);
}
