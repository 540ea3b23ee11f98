//! Tiers that get fewer blocks while they are in use, and more again.

use crate::common::{checked, name, pool, with_policy};
use kv_pool::policy::PolicyKind;
use kv_pool::{
    BlockHash, BlockPool, BudgetError, Claimed, Naming, Pinned, PoolConfig, Tier,
    tenants::TenantQuota,
};

const NEAR: Tier = Tier::Primary;

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
        let builder = BlockPool::builder(&config);
        let pool = with_policy(builder, NEAR, kind, 20).build().unwrap();
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
