//! Tiers that get fewer blocks while they are in use, and more again.

use std::time::Duration;

use crate::common::{checked, name, pool};
use kv_pool::policy::{PolicyKind, PriorityLru, RecordId};
use kv_pool::{
    BlockHash, BlockPool, BudgetError, Claimed, Naming, Pinned, PoolConfig, Priority, Tier,
    clock::ManualClock, tenants::TenantQuota,
};

const NEAR: Tier = Tier::Primary;
const FAR: Tier = Tier::Secondary;

/// Consecutive content in the blocks that are claimed next, pinned.
fn write(pool: &BlockPool, contents: std::ops::Range<u32>) -> Pinned {
    let names: Vec<BlockHash> = contents.map(name).collect();
    pool.claim(names.len()).unwrap().register(&names, Naming::default()).unwrap()
}

fn ids(claimed: &Claimed) -> Vec<usize> {
    claimed.ids().map(|id| id.index()).collect()
}

fn is_cached(pool: &BlockPool, content: u32) -> bool {
    !pool.match_prefix(&[name(content)]).is_empty()
}

#[test]
fn blocks_that_nobody_uses_leave_at_once_and_are_not_handed_out() {
    let pool = pool(8, 0);
    let all = pool.claim(8).unwrap();
    drop(all);
    let withdrawn = pool.set_budget(NEAR, 3).unwrap();
    assert_eq!((ids(&withdrawn.leaving), withdrawn.in_use), (vec![3, 4, 5, 6, 7], 0));
    assert_eq!((pool.claimable(), pool.blocks_end(NEAR)), (3, 8));
    drop(withdrawn);
    assert_eq!((pool.claimable(), pool.blocks_end(NEAR)), (3, 3));
    let held = pool.claim(3).unwrap();
    assert!(ids(&held).iter().all(|&id| id < 3) && pool.claim(1).is_err());
    checked(&pool);
}

#[test]
fn a_block_in_use_leaves_when_the_epoch_of_its_release_is_complete() {
    let pool = pool(4, 0);
    let (low, high) = (write(&pool, 0..2), write(&pool, 2..4));
    let epoch = pool.begin_epoch();
    assert_eq!(pool.set_budget(NEAR, 2).unwrap().in_use, 2);
    assert_eq!(pool.stats().primary.beyond, 2);
    drop(high);
    // The device may still read it.
    assert_eq!((pool.blocks_end(NEAR), pool.claimable()), (4, 0));
    pool.complete_epoch(epoch).unwrap();
    assert_eq!((pool.blocks_end(NEAR), pool.claimable()), (2, 0));
    assert!(!is_cached(&pool, 2) && is_cached(&pool, 0));
    assert_eq!(pool.stats().primary.blocks, 2);
    drop(low);
    assert_eq!(pool.claimable(), 2);
    checked(&pool);
}

#[test]
fn content_in_use_beyond_the_budget_is_found_until_its_last_user_lets_go() {
    let pool = pool(2, 0);
    let first = write(&pool, 0..2);
    pool.set_budget(NEAR, 0).unwrap();
    let second = pool.match_prefix(&[name(0), name(1)]);
    assert_eq!(second.len(), 2);
    drop(first);
    assert_eq!(pool.stats().primary.pinned, 2);
    drop(second);
    assert_eq!((pool.stats().primary.blocks, pool.blocks_end(NEAR)), (0, 0));
    assert!(!is_cached(&pool, 0));
    checked(&pool);
}

#[test]
fn content_that_leaves_moves_down_the_most_valuable_last() {
    let config = PoolConfig { primary_blocks: 6, secondary_blocks: 2, ..PoolConfig::default() };
    let clock = ManualClock::new();
    let pool = BlockPool::builder(&config).clock(clock.clone()).build().unwrap();
    // Not worth a move; long unused; lately used; of high priority.
    for (content, priority) in [(0, 5), (1, 35), (2, 35), (3, 80)] {
        let naming = Naming::from(Priority::new(priority).unwrap());
        drop(pool.claim(1).unwrap().register(&[name(content)], naming).unwrap());
        clock.advance(Duration::from_millis(10));
        pool.tick();
    }
    let mut leaving = pool.set_budget(NEAR, 0).unwrap().leaving;
    let moves: Vec<_> = std::iter::from_fn(|| leaving.take_offload()).collect();
    // The secondary tier has two places: the first that was moved has made room.
    assert_eq!(leaving.len(), 4);
    let kept = |content| pool.find_and_pin(name(content), FAR).is_some();
    assert!((0..4).all(|content| !kept(content)), "before the copies are made");
    moves.into_iter().for_each(kv_pool::moves::Offload::commit);
    assert_eq!([0, 1, 2, 3].map(kept), [false, true, true, false]);
    drop(leaving);
    assert_eq!(pool.blocks_end(NEAR), 0);
    assert_eq!((pool.counters().evicted, pool.counters().offloaded), (4, 2));
    checked(&pool);
}

#[test]
fn a_block_that_a_copy_reads_leaves_after_it() {
    let pool = pool(1, 1);
    drop(write(&pool, 0..1));
    let mut leaving = pool.set_budget(NEAR, 0).unwrap().leaving;
    let offload = leaving.take_offload().unwrap();
    drop(leaving);
    assert_eq!(pool.blocks_end(NEAR), 1);
    offload.commit();
    assert_eq!(pool.blocks_end(NEAR), 0);
    assert_eq!(pool.match_prefix(&[name(0)]).locations().next().unwrap().tier, FAR);
    checked(&pool);
}

#[test]
fn content_is_lost_after_what_follows_it() {
    let pool = pool(4, 0);
    let blocks = write(&pool, 0..3);
    // By its priority the head goes first.
    pool.retain(&blocks.pin(0).unwrap(), Priority::MIN);
    drop(blocks);
    let leaving = pool.set_budget(NEAR, 0).unwrap().leaving;
    // One was never used. Of the others the last one of the chain is evicted first.
    assert_eq!(ids(&leaving), [2, 1, 0]);
    checked(&pool);
}

#[test]
fn a_larger_budget_brings_back_what_has_left_and_keeps_what_has_not() {
    let pool = pool(6, 0);
    let mut held = pool.claim(6).unwrap();
    let epoch = pool.begin_epoch();
    drop(held.split_off(5));
    drop(pool.set_budget(NEAR, 2).unwrap());
    assert_eq!(pool.blocks_end(NEAR), 6);
    pool.complete_epoch(epoch).unwrap();
    assert_eq!(pool.blocks_end(NEAR), 5);
    drop(held.split_off(4));
    assert_eq!(pool.blocks_end(NEAR), 4);
    // 2 and 3 have not left; 4 and 5 have.
    assert_eq!(pool.set_budget(NEAR, 5).unwrap().in_use, 0);
    assert_eq!((pool.claimable(), pool.stats().primary.blocks), (1, 5));
    let back = pool.claim(1).unwrap();
    assert_eq!(ids(&back), [4]);
    drop((held, back));
    drop(pool.set_budget(NEAR, 6).unwrap());
    let mut all = ids(&pool.claim(6).unwrap());
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3, 4, 5]);
    checked(&pool);
}

#[test]
fn blocks_of_the_host_tier_leave_the_same_way() {
    let pool = pool(2, 4);
    pool.set_budget(FAR, 0).unwrap();
    drop(write(&pool, 0..2));
    // There is no room below.
    let mut claimed = pool.claim(2).unwrap();
    assert!(claimed.take_offload().is_none());
    drop(claimed);
    pool.set_budget(FAR, 2).unwrap();
    drop(write(&pool, 0..2));
    let mut claimed = pool.claim(2).unwrap();
    while let Some(offload) = claimed.take_offload() {
        offload.commit();
    }
    let pinned = pool.match_prefix(&[name(0), name(1)]).pin(1).unwrap();
    assert!(pinned.locations().all(|at| at.tier == FAR));
    let withdrawn = pool.set_budget(FAR, 0).unwrap();
    assert_eq!((withdrawn.leaving.len(), withdrawn.in_use), (1, 1));
    assert!(!is_cached(&pool, 0) && is_cached(&pool, 1));
    drop((withdrawn, pinned));
    assert!(!is_cached(&pool, 1));
    assert_eq!(pool.blocks_end(FAR), 0);
    checked(&pool);
}

#[test]
fn content_that_arrives_beyond_the_budget_leaves() {
    let pool = pool(1, 1);
    drop(write(&pool, 0..1));
    let mut claimed = pool.claim(1).unwrap();
    let offload = claimed.take_offload().unwrap();
    assert_eq!(pool.set_budget(FAR, 0).unwrap().in_use, 1);
    offload.commit();
    assert!(!is_cached(&pool, 0));
    assert_eq!(pool.blocks_end(FAR), 0);
    checked(&pool);
}

#[test]
fn a_loan_keeps_its_block_beyond_the_budget() {
    let pool = pool(1, 0);
    drop(write(&pool, 0..1));
    let loan = pool.lend(&[name(0)], NEAR, Duration::MAX).unwrap();
    assert_eq!(pool.set_budget(NEAR, 0).unwrap().in_use, 1);
    assert_eq!(pool.blocks_end(NEAR), 1);
    pool.end_loan(loan.id).unwrap();
    assert_eq!(pool.blocks_end(NEAR), 0);
    checked(&pool);
}

#[test]
fn what_is_kept_for_tenants_can_be_had_within_every_budget() {
    let pool = pool(8, 0);
    let owner = pool.add_tenant().unwrap();
    let quota = TenantQuota { reserved: 3, ..TenantQuota::NONE };
    pool.set_quota(owner, NEAR, quota).unwrap();
    let refused = pool.set_budget(NEAR, 2).unwrap_err();
    assert_eq!(refused, BudgetError::BelowReserved { tier: NEAR, requested: 2, reserved: 3 });
    assert_eq!(
        refused.to_string(),
        "2 blocks of the Primary tier are fewer than the 3 that are kept for tenants"
    );
    let mut held = pool.claim(5).unwrap();
    let last = held.split_off(3);
    drop(held);
    drop(pool.set_budget(NEAR, 4).unwrap());
    // 3 and 4 are in use, 4 beyond the budget: three are left, and kept.
    assert_eq!((pool.claimable(), pool.stats().primary.beyond), (3, 1));
    assert!(pool.claim(1).is_err());
    assert_eq!(pool.claim_for(owner, 3).unwrap().len(), 3);
    drop(last);
    assert_eq!(pool.claim(1).unwrap().len(), 1);
    assert!(pool.claim(2).is_err());
    let counts = pool.tenant_counts(owner, NEAR).unwrap();
    assert_eq!((counts.held, counts.cached), (0, 0));
    checked(&pool);
}

#[test]
fn a_policy_is_told_of_what_leaves() {
    for kind in PolicyKind::ALL {
        let config = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(16) };
        let policy = kind.make(20).unwrap();
        let pool = BlockPool::builder(&config).policy(NEAR, policy).build().unwrap();
        for round in 0..40_u32 {
            let chain = 5 * (round % 7);
            drop(write(&pool, chain..chain + 5));
            let mut withdrawn = pool.set_budget(NEAR, u64::from(6 + round % 11)).unwrap();
            while let Some(offload) = withdrawn.leaving.take_offload() {
                offload.commit();
            }
            checked(&pool);
        }
        assert_eq!(pool.counters().policy_faults, 0, "{kind:?}");
        assert!(pool.counters().evicted > 20, "{kind:?}");
    }
}

#[test]
fn a_policy_of_the_caller_s_loses_no_block_by_a_budget() {
    let config = PoolConfig::primary_only(8);
    let policy = Box::new(PriorityLru::new(8).unwrap());
    let pool = BlockPool::builder(&config).policy(NEAR, policy).build().unwrap();
    drop(write(&pool, 0..8));
    let records: Vec<RecordId> = pool.set_budget(NEAR, 5).unwrap().leaving.records().collect();
    assert_eq!(records.len(), 3);
    let claimed = pool.claim(5).unwrap();
    assert!(claimed.records().all(|record| !records.contains(&record)));
    assert_eq!(pool.counters().policy_faults, 0);
    checked(&pool);
}
