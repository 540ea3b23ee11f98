//! Blocks that are given back together go from last to first, whatever way they are held: of one
//! request's blocks the tail is evicted before the head.
//!
//! The contents here do not name what they follow, so nothing but the order of release decides.

use std::time::Duration;

use crate::common::{Order, checked, claim, name, priority};
use kv_pool::{BlockHash, BlockPool, Naming, Pinned, PoolConfig, Tier, retention::Retention};

const BLOCKS: u32 = 6;

fn names() -> Vec<BlockHash> {
    (0..BLOCKS).map(name).collect()
}

/// The pools: as they come, with a log, with a tenant, with a policy.
fn pools() -> Vec<BlockPool> {
    let config = PoolConfig::primary_only(BLOCKS.into());
    let with_tenant = BlockPool::new(&config).unwrap();
    with_tenant.add_tenant().unwrap();
    let policy = Box::new(Order::default());
    vec![
        BlockPool::new(&config).unwrap(),
        BlockPool::builder(&config).events(8).build().unwrap(),
        with_tenant,
        BlockPool::builder(&config).policy(Tier::Primary, policy).build().unwrap(),
    ]
}

/// Content in all blocks, pinned; none follows another.
fn hold(pool: &BlockPool, naming: Naming) -> Pinned {
    let mut all = Pinned::default();
    for content in 0..BLOCKS {
        let mut block = pool.claim(1).unwrap();
        all.append(block.register(&[name(content)], naming).unwrap()).unwrap();
    }
    assert_eq!(pool.claimable(), 0);
    all
}

/// The contents, in the order in which claims evict them.
fn evicted(pool: &BlockPool) -> Vec<u32> {
    checked(pool);
    let mut left: Vec<u32> = (0..BLOCKS).collect();
    let mut order = Vec::new();
    let mut held = Vec::new();
    let cached =
        |content: u32| pool.snapshot().blocks.iter().any(|block| block.hash == Some(name(content)));
    while held.len() < BLOCKS as usize {
        held.push(claim(pool));
        let gone = left.iter().copied().find(|&content| !cached(content)).unwrap();
        left.retain(|&content| content != gone);
        order.push(gone);
    }
    order
}

/// What is given back in `release` leaves its blocks from last to first.
fn check(what: &str, naming: Naming, release: impl Fn(&BlockPool, Pinned)) {
    for pool in pools() {
        let held = hold(&pool, naming);
        release(&pool, held);
        assert_eq!(evicted(&pool), [5, 4, 3, 2, 1, 0], "{what}");
    }
}

#[test]
fn a_list_of_pins() {
    check("dropped", Naming::default(), |_, held| drop(held));
    check("a clone dropped last", Naming::default(), |_, held| {
        let clone = held.clone();
        drop(held);
        drop(clone);
    });
    check(
        "with a duration",
        Naming::from(Retention { priority: priority(80), duration: Some(Duration::from_secs(9)) }),
        |_, held| drop(held),
    );
    check("held twice", Naming::default(), |pool, held| {
        let again = pool.match_prefix(&names());
        drop(held);
        drop(again);
    });
    check("in an epoch", Naming::default(), |pool, held| {
        let epoch = pool.begin_epoch();
        drop(held);
        assert_eq!(pool.claimable(), 0);
        pool.complete_epoch(epoch).unwrap();
    });
    check("in an epoch, in which they were found again", Naming::default(), |pool, held| {
        let epoch = pool.begin_epoch();
        drop(held);
        let again = pool.match_prefix(&names());
        assert_eq!(again.len(), BLOCKS as usize);
        checked(pool);
        drop(again);
        assert_eq!(pool.claimable(), 0);
        checked(pool);
        pool.complete_epoch(epoch).unwrap();
    });
}

#[test]
fn single_pins_that_are_released_together() {
    check("released", Naming::default(), |pool, held| pool.release(held.into_iter().collect()));
    check("with clones", Naming::default(), |pool, held| {
        let pins: Vec<_> = held.into_iter().collect();
        let clones = pins.clone();
        pool.release(pins);
        assert_eq!(pool.claimable(), 0);
        pool.release(clones);
    });
    // Those of another pool are dropped in this order, too.
    check("by another pool", Naming::default(), |_, held| {
        crate::common::pool(1, 0).release(held.into_iter().collect());
    });
}

#[test]
fn a_loan() {
    check("lent", Naming::default(), |pool, held| {
        let loan = pool.lend(&names(), Tier::Primary).unwrap();
        drop(held);
        assert_eq!(pool.claimable(), 0);
        assert!(pool.end_loan(loan.id));
    });
}

#[test]
fn claimed_blocks_are_claimed_again_in_their_order() {
    for pool in pools() {
        let claimed = pool.claim(4).unwrap();
        let block_ids: Vec<_> = claimed.ids().collect();
        drop(claimed);
        let again = pool.claim(4).unwrap();
        assert_eq!(again.ids().collect::<Vec<_>>(), block_ids);
    }
}
