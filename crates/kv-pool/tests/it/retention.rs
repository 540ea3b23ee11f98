//! How long content is worth something, whose it is, who may read it for how long, and who is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{CountedClock, Order, checked, claim, name, pool, priority};
use kv_pool::{
    BlockPool, Naming, Pinned, PoolConfig, Priority, Tier, clock::Clock, events::BlockUse,
    retention::Retention, stats::EvictionAges,
};

const MS: Duration = Duration::from_millis(1);

fn timed(blocks: u64) -> (BlockPool, CountedClock) {
    let clock = CountedClock::default();
    let config = PoolConfig::primary_only(blocks);
    (BlockPool::builder(&config).clock(clock.clone()).build().unwrap(), clock)
}

fn one(pool: &BlockPool, content: u32, naming: impl Into<Naming>) -> Pinned {
    pool.claim(1).unwrap().register(&[name(content)], naming).unwrap()
}

fn keep(value: u8, ms: u32) -> Retention {
    Retention { priority: priority(value), duration: Some(MS * ms) }
}

#[test]
fn a_priority_ends_when_its_duration_is_over() {
    let (pool, clock) = timed(2);
    drop(one(&pool, 1, keep(80, 1)));
    let reads = clock.reads();
    assert_eq!(reads, 1, "once for the release that arms it");
    assert_eq!(pool.snapshot().blocks[0].expiry, Some(MS));
    assert_eq!((pool.refresh(), clock.reads()), (0, reads + 1));
    assert_eq!(pool.snapshot().blocks[0].priority, priority(80));
    clock.advance(2 * MS);
    assert_eq!((pool.refresh(), clock.reads()), (1, reads + 2));
    assert_eq!(pool.snapshot().blocks[0].priority, Priority::DEFAULT);
    assert_eq!((pool.refresh(), clock.reads()), (0, reads + 2), "nothing left to look at");
    // And it is evicted as what it is worth now.
    drop(one(&pool, 2, priority(40)));
    drop(claim(&pool));
    assert!(pool.match_prefix(&[name(1)]).is_empty());
    checked(&pool);
}

#[test]
fn a_use_ends_the_duration_and_keeps_the_priority() {
    let (pool, clock) = timed(2);
    drop(one(&pool, 1, keep(80, 1)));
    let pins = pool.match_prefix(&[name(1)]);
    clock.advance(5 * MS);
    assert_eq!(pool.refresh(), 0);
    drop(pins);
    clock.advance(5 * MS);
    assert_eq!((pool.refresh(), pool.snapshot().blocks[0].priority), (0, priority(80)));
    // Said again, it runs again; said otherwise, it does not.
    let pins = pool.match_prefix(&[name(1)]);
    pool.retain(&pins, keep(50, 1));
    drop(pins);
    clock.advance(MS);
    assert_eq!((pool.refresh(), pool.snapshot().blocks[0].priority), (1, Priority::DEFAULT));
    checked(&pool);
}

#[test]
fn the_age_of_evicted_content_is_counted_from_its_release() {
    let (pool, clock) = timed(1);
    for (content, ms) in [(1, 5), (2, 7), (3, 0)] {
        let pins = one(&pool, content, Naming::default());
        clock.advance(3 * MS);
        assert_eq!(pool.tick(), clock.now());
        drop(pins);
        clock.advance(MS * ms);
        pool.tick();
    }
    let ages = pool.eviction_ages();
    assert_eq!(ages, EvictionAges { evicted: 2, total_ms: 12, max_ms: 7 });
}

/// A clock that goes back, which it must not.
#[derive(Clone, Debug, Default)]
struct Wild(Arc<AtomicU64>);

impl Wild {
    fn set(&self, nanos: u64) {
        self.0.store(nanos, Ordering::Relaxed);
    }
}

impl Clock for Wild {
    fn now(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            u64::MAX => Duration::MAX,
            nanos => Duration::from_nanos(nanos),
        }
    }
}

#[test]
fn a_clock_that_goes_back_makes_nothing_older_and_ends_nothing_early() {
    const NANOS: u64 = 1_000_000;
    let clock = Wild::default();
    let config = PoolConfig::primary_only(1);
    let pool = BlockPool::builder(&config).clock(clock.clone()).build().unwrap();
    clock.set(50 * NANOS);
    pool.tick();
    drop(one(&pool, 1, keep(80, 5)));
    clock.set(40 * NANOS);
    assert_eq!(pool.tick(), 50 * MS, "it stands still");
    drop(one(&pool, 2, keep(80, 5)));
    assert_eq!(pool.eviction_ages(), EvictionAges { evicted: 1, total_ms: 0, max_ms: 0 });
    assert_eq!(pool.snapshot().blocks[0].expiry, Some(55 * MS));
    clock.set(54 * NANOS);
    assert_eq!(pool.refresh(), 0);
    clock.set(55 * NANOS);
    assert_eq!(pool.refresh(), 1);

    // To the end of time and back.
    drop(one(&pool, 3, keep(80, 5)));
    clock.set(u64::MAX);
    let end = pool.tick();
    assert_eq!(pool.refresh(), 1);
    clock.set(0);
    assert_eq!(pool.tick(), end);
    drop(one(&pool, 4, Naming::default()));
    assert_eq!(pool.eviction_ages().evicted, 3);
    checked(&pool);
}

#[test]
fn a_snapshot_is_of_one_moment() {
    let pool = pool(4, 0);
    let pins = one(&pool, 1, Naming::default());
    let next = pool.claim(1).unwrap().register(&[name(2)], Naming::after(name(1))).unwrap();
    let again = pool.match_prefix(&[name(1)]);
    let claimed = claim(&pool);
    drop(next);
    let snapshot = pool.snapshot();
    let uses: Vec<_> = snapshot.blocks.iter().map(|block| block.usage).collect();
    assert_eq!(uses, [BlockUse::Pinned(2), BlockUse::Unused, BlockUse::Claimed]);
    assert_eq!((snapshot.blocks[0].children, snapshot.blocks[1].depth), (1, 1));
    assert_eq!(snapshot.blocks[1].parent, Some(snapshot.blocks[0].block));
    assert_eq!(snapshot.stats, pool.stats());
    drop((pins, again, claimed));
}

#[test]
fn a_policy_gives_a_head_up_when_nothing_else_is_left() {
    let policy = Box::new(Order::default());
    let config = PoolConfig::primary_only(2);
    let pool = BlockPool::builder(&config).policy(Tier::Primary, policy).build().unwrap();
    drop(one(&pool, 1, priority(0)));
    let tail = one(&pool, 2, Naming::after(name(1)));
    let block = claim(&pool);
    assert!(block.evicted(0));
    checked(&pool);
    drop((block, tail));
    drop(one(&pool, 1, priority(0)));
    assert_eq!(pool.match_prefix(&[name(1), name(2)]).len(), 2);
    drop(claim(&pool));
    assert_eq!(pool.match_prefix(&[name(1), name(2)]).len(), 1);
    checked(&pool);
}
