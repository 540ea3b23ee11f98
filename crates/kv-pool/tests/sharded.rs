//! Pools side by side: each block id of one, content where its key leads, and capacity lent.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering};

use common::OneClaimed;
use common::name;
use kv_pool::{
    BlockHash, BudgetError, ClaimError, Claimed, ConfigError, Naming, PoolConfig, ShardedPool,
    Tier, tenants::TenantQuota,
};

fn pool(blocks: u64, shards: usize) -> ShardedPool {
    let config = PoolConfig::primary_only(blocks);
    ShardedPool::new(&config, NonZeroUsize::new(shards).unwrap()).unwrap()
}

fn check(pool: &ShardedPool) {
    pool.shards().iter().for_each(|shard| shard.check_integrity().unwrap());
}

/// Blocks that other shards than the first have lent.
fn lent(claim: &[Claimed]) -> usize {
    claim[1..].iter().map(|list| list.len()).sum()
}

#[test]
fn every_block_id_is_of_one_shard() {
    for (blocks, shards) in [(64, 4), (7, 3), (5, 5), (9, 1)] {
        let config = PoolConfig { secondary_blocks: 3, ..PoolConfig::primary_only(blocks) };
        let pool = ShardedPool::new(&config, NonZeroUsize::new(shards).unwrap()).unwrap();
        for (tier, block_ids) in [(Tier::Primary, blocks), (Tier::Secondary, 3)] {
            let mut seen = HashSet::new();
            for (number, shard) in pool.shards().iter().enumerate() {
                let stats = shard.stats();
                let own = if tier == Tier::Primary { stats.primary } else { stats.secondary };
                let claimed = shard.claim_in(tier, own.blocks as usize).unwrap();
                assert!(claimed.ids().all(|block_id| block_id.index() % shards == number));
                seen.extend(claimed.ids());
            }
            let expected: HashSet<_> = (0..block_ids as usize).collect();
            assert_eq!(
                seen.iter().map(|block_id| block_id.index()).collect::<HashSet<_>>(),
                expected
            );
        }
        assert_eq!(pool.stats().primary.blocks, blocks);
        check(&pool);
    }
}

#[test]
fn content_is_found_by_its_key() {
    let pool = pool(256, 8);
    for key in (0..16).map(name) {
        let chain: Vec<BlockHash> = (0..4).map(|n| BlockHash::chain(key, &[n])).collect();
        let mut claimed = pool.shard(key).claim(4).unwrap();
        drop(claimed.register(&chain, Naming::default()).unwrap());
        assert_eq!(pool.shard(key).match_prefix(&chain).len(), 4);
    }
    let used = pool.shards().iter().filter(|shard| shard.counters().registered > 0).count();
    assert!(used >= 5, "16 keys lie in {used} of 8 shards");
    let counters = pool.stats().counters;
    assert_eq!((counters.registered, counters.hits), (64, 64));
    check(&pool);
}

#[test]
fn a_shard_that_has_too_few_is_lent_the_rest() {
    let pool = pool(10, 3);
    let key = name(1);
    let held = pool.claim(key, 2).unwrap();
    assert_eq!(lent(&held), 0);
    let rest = pool.claim(key, 8).unwrap();
    assert!(lent(&rest) >= 6);
    let block_ids: HashSet<_> = [&held, &rest]
        .into_iter()
        .flatten()
        .flat_map(|list| list.ids().collect::<Vec<_>>())
        .collect();
    assert_eq!(block_ids.len(), 10);
    let refused = pool.claim(key, 1).unwrap_err();
    assert_eq!(refused, ClaimError::Exhausted { requested: 1, claimable: 0, retiring: 0 });
    drop((held, rest));
    assert_eq!(pool.stats().primary.claimable(), 10);
    assert!(pool.claim(key, 11).is_err());
    // What was claimed on the way to a refusal is given back.
    assert_eq!(pool.stats().primary.claimable(), 10);
    check(&pool);
}

#[test]
fn block_ids_that_get_memory_later_are_spread_over_the_shards() {
    let config = PoolConfig::primary_only(12);
    let pool = ShardedPool::new(&config, NonZeroUsize::new(4).unwrap()).unwrap();
    pool.set_budget(Tier::Primary, 2).unwrap();
    let ready =
        || pool.shards().iter().map(|shard| shard.stats().primary.blocks).collect::<Vec<_>>();
    assert_eq!(ready(), [1, 1, 0, 0]);
    pool.set_budget(Tier::Primary, 7).unwrap();
    assert_eq!(ready(), [2, 2, 2, 1]);
    let refused = pool.set_budget(Tier::Primary, 13).unwrap_err();
    let tier = Tier::Primary;
    assert_eq!(refused, BudgetError::OverCapacity { tier, requested: 13, capacity: 12 });
    assert_eq!(ready(), [2, 2, 2, 1]);
}

#[test]
fn a_smaller_budget_takes_the_same_block_ids_from_all_shards() {
    let pool = ShardedPool::new(&PoolConfig::primary_only(12), NonZeroUsize::new(4).unwrap());
    let pool = pool.unwrap();
    let mut held: Vec<_> = pool.shards().iter().map(|shard| shard.claim(3).unwrap()).collect();
    let in_use = pool.set_budget(Tier::Primary, 5).unwrap();
    assert_eq!(in_use.iter().map(|own| own.in_use).collect::<Vec<_>>(), [1, 2, 2, 2]);
    let ends = || pool.shards().iter().map(|own| own.blocks_end(Tier::Primary)).collect::<Vec<_>>();
    assert_eq!(ends(), [9, 10, 11, 12]);
    // The last shard keeps only its first block id, 3, and the first shard 0 and 4.
    held.iter_mut().for_each(|own| drop(own.split_off(1)));
    assert_eq!(ends(), [5, 2, 3, 4]);
    // One shard cannot: then none has changed.
    let owner = pool.shards()[3].add_tenant().unwrap();
    let quota = TenantQuota { reserved: 1, ..TenantQuota::NONE };
    pool.shards()[3].set_quota(owner, Tier::Primary, quota).unwrap();
    let refused = pool.set_budget(Tier::Primary, 3).unwrap_err();
    let tier = Tier::Primary;
    assert_eq!(refused, BudgetError::BelowReserved { tier, requested: 0, reserved: 1 });
    assert_eq!(ends(), [5, 2, 3, 4]);
    check(&pool);
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let three = NonZeroUsize::new(3).unwrap();
    let refused = ShardedPool::new(&PoolConfig::primary_only(2), three).unwrap_err();
    assert_eq!(refused, ConfigError::FewerThanShards { primary_blocks: 2, shards: 3 });
}

#[test]
fn threads_that_claim_more_than_their_shards_have_never_share_a_block_id() {
    const BLOCKS: usize = 24;
    let pool = pool(BLOCKS as u64, 4);
    let owners: Vec<AtomicU32> = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 1..=4_u32 {
            let (pool, owners) = (&pool, &owners);
            scope.spawn(move || {
                for round in 0..2_000 {
                    let wanted = 1 + (round * thread as usize) % 9;
                    let Ok(claim) = pool.claim(name(round as u32 % 7), wanted) else { continue };
                    let lists = || claim.iter();
                    let block_ids: Vec<_> = lists().flat_map(|list| list.ids()).collect();
                    assert_eq!(block_ids.len(), wanted);
                    for block_id in &block_ids {
                        assert_eq!(owners[block_id.index()].swap(thread, Ordering::Relaxed), 0);
                    }
                    for block_id in &block_ids {
                        assert_eq!(owners[block_id.index()].swap(0, Ordering::Relaxed), thread);
                    }
                }
            });
        }
    });
    assert_eq!(pool.stats().primary.claimable(), BLOCKS as u64);
    check(&pool);
}

/// A pool of eight blocks in two shards, all cached; what is cached, and under which keys.
fn full() -> (ShardedPool, Vec<BlockHash>) {
    let pool = pool(8, 2);
    let mut contents = Vec::new();
    for shard in pool.shards() {
        for content in 0..4 {
            let hash = name(100 * contents.len() as u32 + content);
            assert!(shard.claim_one().unwrap().cache_one(hash, Naming::default()));
            contents.push(hash);
        }
    }
    (pool, contents)
}

fn cached(pool: &ShardedPool, contents: &[BlockHash]) -> usize {
    let found = |hash: &&BlockHash| {
        pool.shards().iter().any(|shard| !shard.match_prefix(&[**hash]).is_empty())
    };
    contents.iter().filter(found).count()
}

#[test]
fn a_claim_that_fails_evicts_nothing() {
    let (pool, contents) = full();
    let refused = pool.claim(name(1), 9).unwrap_err();
    assert_eq!(refused, ClaimError::Exhausted { requested: 9, claimable: 8, retiring: 0 });
    assert_eq!(cached(&pool, &contents), 8);
    // Here one shard has enough for itself, and all have too few together.
    let held = pool.claim(name(1), 3).unwrap();
    assert_eq!(cached(&pool, &contents), 5);
    assert!(pool.claim(name(1), 6).is_err());
    assert_eq!(cached(&pool, &contents), 5);
    drop(held);
    check(&pool);
}

#[test]
fn a_claim_that_fails_leaves_what_there_is_claimable_under_open_epochs() {
    let (pool, _) = full();
    for shard in pool.shards() {
        shard.begin_epoch();
    }
    assert!(pool.claim(name(1), 9).is_err());
    assert_eq!(pool.stats().primary.claimable(), 8);
    assert_eq!(lent(&pool.claim(name(1), 8).unwrap()), 4);
    check(&pool);
}

#[test]
fn what_is_kept_in_one_shard_is_lent_by_others() {
    let pool = pool(12, 3);
    for (at, reserved) in [(0, 4), (1, 3)] {
        let shard = &pool.shards()[at];
        let tenant = shard.add_tenant().unwrap();
        let quota = TenantQuota { reserved, ..TenantQuota::NONE };
        shard.set_quota(tenant, Tier::Primary, quota).unwrap();
    }
    for key in (0..16).map(name) {
        let claim = pool.claim(key, 5).unwrap();
        assert_eq!(claim[0].len() + lent(&claim), 5);
        assert!(claim[1..].iter().all(|list| !list.is_empty()));
        drop(claim);
        let refused = pool.claim(key, 6).unwrap_err();
        assert_eq!(refused, ClaimError::Exhausted { requested: 6, claimable: 5, retiring: 0 });
    }
    check(&pool);
}

#[test]
fn claims_that_fit_together_are_never_refused() {
    // Three threads hold at most 20 of 64 blocks each.
    const COUNT: usize = 20;
    let pool = pool(64, 8);
    std::thread::scope(|scope| {
        for thread in 0..3_u32 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..40_000_u32 {
                    let claim = pool.claim(name((round * 7 + thread * 3) % 11), COUNT).unwrap();
                    assert_eq!(claim[0].len() + lent(&claim), COUNT);
                }
            });
        }
    });
    assert_eq!(pool.stats().primary.claimable(), 64);
    check(&pool);
}

#[test]
fn names_made_of_one_hash_twice_and_of_its_halves_spread_over_the_shards() {
    const NAMES: usize = 4_096;
    let pool = pool(64, 16);
    let kinds: [fn(u64) -> u64; 5] =
        [|low| low, |low| low.rotate_left(32), |low| low.rotate_left(7), |low| !low, |_| 0];
    for (kind, high) in kinds.into_iter().enumerate() {
        let mut shards = vec![0; 16];
        for content in 0..NAMES as u32 {
            let low = name(content).to_u128() as u64;
            let key = BlockHash::from_u128(u128::from(low) | u128::from(high(low)) << 64);
            let own = pool.shard(key);
            let at = pool.shards().iter().position(|shard| std::ptr::eq(shard, own)).unwrap();
            shards[at] += 1;
        }
        let most = shards.iter().max();
        assert!(most < Some(&(2 * NAMES / 16)), "{kind}: {shards:?}");
    }
}
