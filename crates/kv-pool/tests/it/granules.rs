//! Tiers that are given their memory granule by granule, in any order.

use crate::common::{checked, name};
use kv_pool::{
    BlockHash, BlockPool, BudgetError, Claimed, ConfigError, Epoch, GranuleUse, Naming, Pinned,
    PoolConfig, Priority, Tier, clock::ManualClock, tenants::TenantQuota,
};

const NEAR: Tier = Tier::Primary;
const FAR: Tier = Tier::Secondary;

/// A pool of `blocks` primary blocks in granules of four, none of which it has.
fn divided(blocks: u64, far: u64) -> BlockPool {
    let config = PoolConfig { secondary_blocks: far, ..PoolConfig::primary_only(blocks) };
    BlockPool::builder(&config).granules(NEAR, 4).build().unwrap()
}

fn write(pool: &BlockPool, contents: std::ops::Range<u32>) -> Pinned {
    let names: Vec<BlockHash> = contents.map(name).collect();
    pool.claim(names.len()).unwrap().register(&names, Naming::default()).unwrap()
}

fn ids(claimed: &Claimed) -> Vec<usize> {
    let mut ids: Vec<_> = claimed.ids().map(|id| id.index()).collect();
    ids.sort_unstable();
    ids
}

fn granule(granted: bool, empty: u32, cached: u32, in_use: u32) -> GranuleUse {
    let cached_at = if cached > 0 { Some(Priority::DEFAULT) } else { None };
    GranuleUse { granted, empty, cached, in_use, priority: cached_at, unused_ms: 0 }
}

#[test]
fn blocks_in_use_leave_their_granule_when_the_epoch_of_their_release_is_complete() {
    let pool = divided(8, 0);
    pool.grant(NEAR, 0).unwrap();
    pool.grant(NEAR, 1).unwrap();
    let held = pool.claim(8).unwrap();
    let withdrawn = pool.withdraw(NEAR, 0).unwrap();
    assert_eq!((withdrawn.leaving.len(), withdrawn.in_use), (0, 4));
    assert_eq!(pool.withdraw(NEAR, 0).unwrap().in_use, 4, "it has been withdrawn before");
    let epoch = pool.begin_epoch();
    drop(held);
    assert_eq!((pool.granules(NEAR)[0].in_use, pool.claimable()), (4, 0));
    pool.complete_epoch(epoch).unwrap();
    assert_eq!((pool.granules(NEAR)[0].in_use, pool.claimable()), (0, 4));
    assert_eq!(ids(&pool.claim(4).unwrap()), [4, 5, 6, 7]);
    checked(&pool);
}

#[test]
fn granules_that_nobody_uses_leave_at_once_and_come_back() {
    let pool = divided(12, 4);
    (0..3).for_each(|granule| pool.grant(NEAR, granule).unwrap());
    let all = write(&pool, 0..12);
    let held = all.pin(0).unwrap();
    let at = held.locations().next().unwrap().id.index() as u64 / 4;
    drop(all);
    let epoch = pool.begin_epoch();
    let others: Vec<u64> = (0..3).filter(|&granule| granule != at).collect();
    let in_use = BudgetError::InUse { tier: NEAR, granule: at, in_use: 1 };
    assert_eq!(pool.vacate(NEAR, &[others[0], at]).unwrap_err(), in_use);
    assert_eq!(
        in_use.to_string(),
        format!("1 blocks of granule {at} of the Primary tier are in use")
    );
    assert_eq!(pool.claimable(), 11, "all or none");
    // One that is named twice leaves once.
    pool.vacate(NEAR, &[others[0], others[1], others[0]]).unwrap();
    assert_eq!((pool.claimable(), pool.stats().primary.blocks), (3, 4));
    assert_eq!(pool.granules(NEAR)[others[0] as usize], granule(false, 0, 0, 0));
    checked(&pool);
    let counters = pool.counters();
    assert_eq!((counters.dropped, counters.evicted), (8, 8), "its content is evicted");
    // What followed the content there is found no more, and the epoch is not waited for.
    let names: Vec<_> = (0..12).map(name).collect();
    assert!(pool.prefix_len(&names) <= 4);
    pool.vacate(NEAR, &[others[0]]).unwrap();
    pool.grant(NEAR, others[0]).unwrap();
    assert_eq!((pool.claimable(), pool.empty()), (7, 4));
    checked(&pool);
    pool.complete_epoch(epoch).unwrap();
    assert_eq!(
        pool.vacate(NEAR, &[3]).unwrap_err(),
        BudgetError::NoGranule { tier: NEAR, granule: 3, granules: 3 }
    );
    assert_eq!(pool.vacate(FAR, &[0]).unwrap_err(), BudgetError::Undivided { tier: FAR });
}

#[test]
fn granules_tell_how_cold_their_content_is() {
    let clock = ManualClock::new();
    let builder = BlockPool::builder(&PoolConfig::primary_only(8)).clock(clock.clone());
    let pool = builder.granules(NEAR, 4).build().unwrap();
    pool.grant(NEAR, 0).unwrap();
    drop(write(&pool, 0..4));
    clock.advance(std::time::Duration::from_millis(50));
    pool.tick();
    pool.grant(NEAR, 1).unwrap();
    let naming = Naming { retention: Priority::new(90).unwrap().into(), ..Naming::default() };
    drop(pool.claim(4).unwrap().register(&[name(4), name(5), name(6), name(7)], naming).unwrap());
    clock.advance(std::time::Duration::from_millis(7));
    pool.tick();
    let uses = pool.granules(NEAR);
    assert_eq!((uses[0].priority, uses[0].unused_ms), (Some(Priority::DEFAULT), 57));
    assert_eq!((uses[1].priority, uses[1].unused_ms), (Priority::new(90), 7));
    // The one that was used last counts.
    drop(pool.match_prefix(&[name(0)]));
    assert_eq!(pool.granules(NEAR)[0].unused_ms, 0);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let pool = divided(8, 2);
    let message = |error: BudgetError| error.to_string();
    assert_eq!(
        message(pool.grant(NEAR, 2).unwrap_err()),
        "granule 2 of the Primary tier, which has 2"
    );
    assert_eq!(
        pool.withdraw(NEAR, u64::MAX).unwrap_err(),
        BudgetError::NoGranule { tier: NEAR, granule: u64::MAX, granules: 2 }
    );
    assert_eq!(
        message(pool.grant(FAR, 0).unwrap_err()),
        "the Secondary tier was not divided into granules"
    );
    assert_eq!(pool.withdraw(FAR, 0).unwrap_err(), BudgetError::Undivided { tier: FAR });
    assert_eq!(
        message(pool.set_budget(NEAR, 4).unwrap_err()),
        "the Primary tier is given granules, not a number of blocks"
    );
    assert!(pool.granules(FAR).is_empty());
    let none = BlockPool::builder(&PoolConfig::primary_only(8)).granules(NEAR, 0).build();
    assert_eq!(none.unwrap_err(), ConfigError::EmptyGranules { tier: NEAR });
    // One granule larger than the tier.
    let one =
        BlockPool::builder(&PoolConfig::primary_only(8)).granules(NEAR, u32::MAX).build().unwrap();
    one.grant(NEAR, 0).unwrap();
    assert_eq!((one.claimable(), one.granules(NEAR).len()), (8, 1));
}

#[test]
fn what_is_kept_for_tenants_stays() {
    let pool = divided(8, 0);
    (0..2).for_each(|granule| pool.grant(NEAR, granule).unwrap());
    let owner = pool.add_tenant().unwrap();
    pool.set_quota(owner, NEAR, TenantQuota { reserved: 5, ..TenantQuota::NONE }).unwrap();
    let refused = pool.withdraw(NEAR, 1).unwrap_err();
    assert_eq!(refused, BudgetError::BelowReserved { tier: NEAR, requested: 4, reserved: 5 });
    assert_eq!(pool.vacate(NEAR, &[1]).unwrap_err(), refused);
    assert!(pool.granules(NEAR)[1].granted);
    pool.set_quota(owner, NEAR, TenantQuota { reserved: 3, ..TenantQuota::NONE }).unwrap();
    drop(pool.withdraw(NEAR, 1).unwrap());
    assert!(pool.claim(2).is_err(), "three of four are kept");
    assert_eq!(pool.claim_for(owner, 3).unwrap().len(), 3);
    checked(&pool);
}

#[test]
fn what_tenants_may_have_follows_the_granules_that_come_and_go() {
    let pool = divided(12, 0);
    (0..2).for_each(|granule| pool.grant(NEAR, granule).unwrap());
    let [owner, other] = [0; 2].map(|_| pool.add_tenant().unwrap());
    pool.set_quota(owner, NEAR, TenantQuota { reserved: 3, ..TenantQuota::NONE }).unwrap();
    let held = pool.claim_for(other, 5).unwrap();
    let may_have = |more: usize| {
        assert!(pool.check_claim(NEAR, other, more + 1).is_err(), "{more} and one");
        assert!(more == 0 || pool.check_claim(NEAR, other, more).is_ok(), "{more}");
    };
    // Eight, of which three are kept and five are in use.
    may_have(0);
    pool.grant(NEAR, 2).unwrap();
    may_have(4);
    pool.vacate(NEAR, &[2]).unwrap();
    may_have(0);
    // One that comes back before its blocks have left counts them as in use again.
    let full = pool.granules(NEAR).iter().position(|of| of.in_use == 4).unwrap() as u64;
    assert_eq!(pool.withdraw(NEAR, full).unwrap().in_use, 4);
    may_have(0);
    pool.grant(NEAR, full).unwrap();
    may_have(0);
    pool.grant(NEAR, 2).unwrap();
    may_have(4);
    drop(held);
    may_have(9);
    checked(&pool);
}

/// Numbers of a fixed sequence.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Two pools over the same memory: each granule belongs to one of them, or to none while blocks that were
/// released there may still be read.
#[test]
#[allow(clippy::too_many_lines, reason = "one arm for each thing that may happen")]
fn granules_go_from_pool_to_pool_and_no_block_belongs_to_two() {
    const GRANULES: u64 = 6;
    for seed in 1..=40 {
        let mut numbers = Numbers(seed);
        // Blocks of the second are half as large.
        let sizes = [4_u32, 8];
        let pools = sizes.map(|blocks| {
            let config = PoolConfig {
                secondary_blocks: 6,
                ..PoolConfig::primary_only(GRANULES * u64::from(blocks))
            };
            BlockPool::builder(&config).granules(NEAR, blocks).build().unwrap()
        });
        let mut owner: Vec<Option<usize>> = vec![None; GRANULES as usize];
        let mut held: [Vec<Claimed>; 2] = Default::default();
        let mut pinned: [Vec<Pinned>; 2] = Default::default();
        let mut epochs: [Vec<Epoch>; 2] = Default::default();
        let mut moves = 0;
        for _ in 0..600 {
            let at = numbers.below(2) as usize;
            let pool = &pools[at];
            match numbers.below(12) {
                0 => held[at].extend(pool.claim(1 + numbers.below(5) as usize).ok()),
                1 | 2 if !held[at].is_empty() => {
                    let list = numbers.below(held[at].len() as u64) as usize;
                    drop(held[at].swap_remove(list));
                }
                3 => {
                    let first = numbers.below(30) as u32;
                    let names: Vec<_> = (first..first + 3).map(name).collect();
                    let Ok(mut claimed) = pool.claim(3) else { continue };
                    while let Some(offload) = claimed.take_offload() {
                        offload.commit();
                    }
                    if let Ok(new) = claimed.register(&names, Naming::default()) {
                        pinned[at].push(new);
                    }
                }
                4 | 5 if !pinned[at].is_empty() => {
                    let list = numbers.below(pinned[at].len() as u64) as usize;
                    drop(pinned[at].swap_remove(list));
                }
                6 if epochs[at].len() < 2 => epochs[at].push(pool.begin_epoch()),
                7 | 8 if !epochs[at].is_empty() => {
                    pool.complete_epoch(epochs[at].remove(0)).unwrap();
                }
                _ => {
                    let granule = numbers.below(GRANULES);
                    let place = &mut owner[granule as usize];
                    match *place {
                        None => {
                            pool.grant(NEAR, granule).unwrap();
                            *place = Some(at);
                        }
                        Some(now) => {
                            if pools[now].granules(NEAR)[granule as usize].in_use > 0 {
                                continue;
                            }
                            if numbers.below(2) == 0 {
                                pools[now].vacate(NEAR, &[granule]).unwrap();
                                moves += 1;
                                *place = None;
                                continue;
                            }
                            let mut withdrawn = pools[now].withdraw(NEAR, granule).unwrap();
                            assert_eq!(withdrawn.in_use, 0);
                            while let Some(offload) = withdrawn.leaving.take_offload() {
                                offload.commit();
                            }
                            drop(withdrawn);
                            moves += 1;
                            *place = None;
                        }
                    }
                }
            }
            for (at, pool) in pools.iter().enumerate() {
                checked(pool);
                let allowed = |id: usize| owner[id / sizes[at] as usize] == Some(at);
                assert!(held[at].iter().flat_map(ids).all(allowed), "seed {seed}");
                let near =
                    pinned[at].iter().flat_map(Pinned::locations).filter(|at| at.tier == NEAR);
                assert!(near.map(|at| at.id.index()).all(allowed), "seed {seed}");
            }
        }
        assert!(moves > 5, "seed {seed}: {moves}");
        drop((held, pinned));
        for (at, pool) in pools.iter().enumerate() {
            epochs[at].drain(..).for_each(|epoch| pool.complete_epoch(epoch).unwrap());
            let granted = owner.iter().filter(|owner| **owner == Some(at)).count();
            assert_eq!(pool.claimable(), granted * sizes[at] as usize, "nothing is lost");
        }
    }
}
