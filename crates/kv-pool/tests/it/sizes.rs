//! Every size and number that a caller can give, at its ends: an answer or an error, no panic, no
//! abort, no hang, and memory in bounds. An allocator that gives a thread a gibibyte sees to the last.

use std::time::Duration;

use crate::common::{OneClaimed, checked, name, with_policy};
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyKind, PolicyTime, ReuseHint};
use kv_pool::{
    BLOCKS_MAX, BlockHash, BlockPool, ClaimError, ConfigError, LoanId, Naming, Pinned, PoolConfig,
    Priority, Tier,
    clock::ManualClock,
    policy::RecordId,
    retention::{Retention, RetentionPolicy, TokenRange},
    tenants::{TenantError, TenantId, TenantQuota},
};

/// Numbers of blocks that a pool can have here, and some that it cannot.
const SIZES: [u64; 15] = [
    0,
    1,
    2,
    7,
    1 << 12,
    1 << 20,
    1 << 28,
    BLOCKS_MAX - 1,
    BLOCKS_MAX,
    BLOCKS_MAX + 1,
    1 << 32,
    1 << 40,
    u64::MAX / 2 + 1,
    u64::MAX - 1,
    u64::MAX,
];

const COUNTS: [usize; 10] =
    [0, 1, 7, 8, 9, 1 << 31, 1 << 40, usize::MAX / 2 + 1, usize::MAX - 1, usize::MAX];

fn made(config: &PoolConfig) -> Option<BlockPool> {
    match BlockPool::new(config) {
        Ok(pool) => Some(pool),
        Err(ConfigError::NoBlocks) => {
            assert_eq!(config.primary_blocks, 0);
            None
        }
        Err(ConfigError::TooManyBlocks { primary, secondary, further }) => {
            let all = [primary, secondary, further[0], further[1]];
            assert!(all.map(u128::from).iter().sum::<u128>() > BLOCKS_MAX.into());
            None
        }
        Err(ConfigError::OutOfMemory { blocks }) => {
            assert!(blocks >= 1 << 23, "{blocks} blocks fit");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Uses a pool a little, in every tier.
fn work(pool: &BlockPool) {
    for tier in Tier::ALL {
        let block_ids = {
            let stats = pool.stats();
            [stats.primary, stats.secondary, stats.further[0], stats.further[1]][tier.index()]
                .blocks
        };
        let claimed = pool.claim_in(tier, 1);
        assert_eq!(claimed.is_ok(), block_ids > 0);
        drop(claimed.map(|mut claimed| claimed.register(&[name(9)], Naming::default()).unwrap()));
    }
}

fn small() -> BlockPool {
    BlockPool::new(&PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(8) }).unwrap()
}

fn full() -> BlockPool {
    let pool = small();
    drop(pool.claim(8).unwrap().register(&names(8), Naming::default()).unwrap());
    pool
}

fn names(count: u32) -> Vec<BlockHash> {
    (0..count).map(name).collect()
}

#[test]
fn granules() {
    for blocks in [0, 1, 2, 7, 8, 9, u32::MAX] {
        for tier in Tier::ALL {
            let config = PoolConfig {
                further_blocks: [8, 8],
                secondary_blocks: 8,
                ..PoolConfig::primary_only(8)
            };
            let pool = BlockPool::builder(&config).granules(tier, blocks).build();
            let Ok(pool) = pool else {
                assert_eq!(blocks, 0);
                continue;
            };
            let count = 8_u64.div_ceil(blocks.into());
            for granule in [0, 1, count - 1, count, u64::from(u32::MAX) + 1, u64::MAX] {
                assert_eq!(pool.grant(tier, granule).is_ok(), granule < count);
                checked(&pool);
                assert_eq!(BlockPool::granule(&pool, tier, granule).is_ok(), granule < count);
                assert_eq!(pool.withdraw(tier, granule).is_ok(), granule < count);
                checked(&pool);
                drop(pool.grant(tier, granule));
                assert_eq!(pool.vacate(tier, &[granule, granule]).is_ok(), granule < count);
                checked(&pool);
            }
            (0..count).for_each(|granule| pool.grant(tier, granule).unwrap());
            assert_eq!(pool.blocks_end(tier), 8);
        }
    }
}

#[test]
fn configurations() {
    let mut pools = 0;
    for one in SIZES {
        for other in SIZES {
            let first = PoolConfig::primary_only(one);
            let all = [
                PoolConfig { secondary_blocks: other, ..first.clone() },
                PoolConfig { further_blocks: [other, 0], ..first.clone() },
                PoolConfig { further_blocks: [0, other], ..first.clone() },
                PoolConfig { secondary_blocks: one, further_blocks: [other, one], ..first },
            ];
            for config in all {
                let Some(pool) = made(&config) else { continue };
                pools += 1;
                work(&pool);
                let [third, fourth] = config.further_blocks;
                let sizes = [config.primary_blocks, config.secondary_blocks, third, fourth];
                for (tier, size) in Tier::ALL.into_iter().zip(sizes) {
                    for blocks in SIZES {
                        assert_eq!(pool.set_budget(tier, blocks).is_ok(), blocks <= size);
                    }
                    pool.set_budget(tier, size).unwrap();
                    assert_eq!(pool.blocks_end(tier), size);
                }
                assert_eq!(pool.stats().primary.blocks, config.primary_blocks);
                drop(pool.claim(1).unwrap());
            }
        }
    }
    assert!(pools > 100, "{pools}");
}

#[test]
fn a_builder_s_numbers() {
    let config = PoolConfig::primary_only(2);
    for events in COUNTS {
        match BlockPool::builder(&config).events(events).build() {
            Ok(pool) => {
                let mut reader = pool.events().unwrap();
                work(&pool);
                let mut read = Vec::new();
                let count = COUNTS.map(|max| reader.read(max, &mut read)).iter().sum::<usize>();
                assert_eq!(count, 1);
                assert_eq!(reader.read(usize::MAX, &mut read), 0);
            }
            Err(error) => {
                assert!(matches!(error, ConfigError::OutOfMemory { blocks: 2 }), "{error}");
                assert!(events > 1 << 20);
            }
        }
    }
    for blocks in [0, 1, 2, 1 << 16] {
        for tier in Tier::ALL {
            let builder = BlockPool::builder(&config);
            let pool = with_policy(builder, tier, PolicyKind::HitDensity, blocks).build().unwrap();
            for _ in 0..4 {
                work(&pool);
            }
            assert_eq!(pool.claim(2).unwrap().len(), 2);
        }
    }
    // The notes for a policy are memory, too.
    for blocks in SIZES {
        let builder = BlockPool::builder(&PoolConfig::primary_only(blocks));
        let builder = with_policy(builder, Tier::Primary, PolicyKind::HitDensity, 2);
        drop(builder.build().map(|pool| work(&pool)));
    }
}

#[test]
fn counts_of_blocks() {
    let pool = full();
    let owner = pool.add_tenant().unwrap();
    for count in COUNTS {
        let fits = count <= 8;
        for way in 0..3 {
            let answer = pool.check_claim(Tier::Primary, owner, count);
            for resized in [0, 1, -1, i64::MAX, i64::MIN] {
                let names = names(2);
                let pins = [&names[..], &names[..1]];
                let checked = pool.check_quota(owner, &pins, count, resized);
                assert!(checked.is_ok() || count > 5 || resized < 0, "{checked:?}");
            }
            let claimed = match way {
                0 => pool.claim(count),
                1 => pool.claim_for(owner, count),
                _ => pool.claim_in(Tier::Primary, count),
            };
            assert_eq!(claimed.as_ref().err(), answer.as_ref().err());
            match claimed {
                Ok(claimed) => assert!(fits && claimed.len() == count),
                Err(ClaimError::Exhausted { requested, .. }) => {
                    assert!(!fits && requested == count);
                }
                Err(error) => panic!("{error}"),
            }
        }
        for tier in Tier::ALL {
            drop(pool.claim_in(tier, count));
        }
        drop(pool.claim(8).unwrap().register(&names(8), Naming::default()).unwrap());
        checked(&pool);
    }
}

#[test]
fn lists() {
    let pool = full();
    for at in COUNTS {
        let mut pins = pool.match_prefix(&names(8));
        assert_eq!(pins.pin(at).is_some(), at < 8);
        pins.truncate(at);
        assert_eq!(pins.len(), at.min(8));
        drop(pins);
        let mut claimed = pool.claim(3).unwrap();
        assert!(!claimed.evicted(at) || at < 3);
        assert_eq!(claimed.split_off(at).len(), 3_usize.saturating_sub(at));
        assert!(claimed.register(&names(4), Naming::default()).is_err());
        assert!(claimed.register(&[], Naming::default()).unwrap().is_empty());
        drop(claimed);
        drop(pool.claim(8).unwrap().register(&names(8), Naming::default()).unwrap());
    }
    assert!(pool.match_prefix(&[]).is_empty());
    assert!(pool.lend(&[], Tier::Primary).is_none());
    let mut none = pool.claim(0).unwrap();
    assert!(none.take_first().is_none() && none.take_offload().is_none());
    pool.release(Vec::new());
    checked(&pool);
}

#[test]
fn quotas() {
    for tier in Tier::ALL {
        let pool = full();
        let tenants = [pool.add_tenant().unwrap(), pool.add_tenant().unwrap(), TenantId::NOBODY];
        for tenant in tenants {
            for held_max in SIZES {
                for (cached_max, reserved) in SIZES.iter().flat_map(|c| SIZES.map(|r| (*c, r))) {
                    let quota = TenantQuota { held_max, cached_max, reserved };
                    match pool.set_quota(tenant, tier, quota) {
                        Ok(()) => assert_eq!(pool.quota(tenant, tier), Ok(quota)),
                        Err(TenantError::ReservedOverHeldMax { .. }) => {
                            assert!(reserved > held_max)
                        }
                        Err(TenantError::OverReserved { reserved, capacity, .. }) => {
                            assert!(reserved > capacity);
                        }
                        Err(error) => panic!("{error}"),
                    }
                    for count in [1, 8, usize::MAX] {
                        drop((pool.claim_for(tenant, count), pool.claim(count)));
                    }
                    drop(pool.match_prefix(&names(8)));
                }
            }
            checked(&pool);
            pool.set_quota(tenant, tier, TenantQuota::NONE).unwrap();
        }
        assert_eq!(pool.claim(8).unwrap().len(), 8);
    }
    // The tables of a large pool's tenants are memory, too.
    for blocks in SIZES {
        let Some(pool) = made(&PoolConfig::primary_only(blocks)) else { continue };
        match pool.add_tenant() {
            Ok(tenant) => assert_eq!(tenant.number(), 1),
            Err(error) => assert!(matches!(error, TenantError::OutOfMemory { .. }), "{error}"),
        }
        work(&pool);
    }
    let pool = made(&PoolConfig::primary_only(13 << 20)).unwrap();
    let refused = pool.add_tenant().unwrap_err();
    assert_eq!(refused, TenantError::OutOfMemory { blocks: 13 << 20 });
    work(&pool);
}

#[test]
fn tenants_are_as_many_as_there_are_numbers() {
    let pool = small();
    for number in 1..=u16::MAX {
        assert_eq!(pool.add_tenant().unwrap().number(), number);
    }
    assert_eq!(pool.add_tenant(), Err(TenantError::TooMany { count: 65_536 }));
    work(&pool);
}

#[test]
fn times() {
    let durations =
        [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 40), Duration::MAX];
    for first in durations {
        for second in durations {
            let clock = ManualClock::new();
            let config = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(8) };
            let builder = BlockPool::builder(&config).clock(clock.clone());
            let builder = with_policy(builder, Tier::Primary, PolicyKind::HitDensity, 12);
            let pool = builder.build().unwrap();
            let retention = Retention { priority: Priority::MAX, duration: Some(second) };
            for round in 0..3 {
                clock.advance(first);
                pool.tick();
                let block = pool.claim_one().unwrap();
                drop(block.register_one(name(round), Naming::from(retention)));
                let pins = pool.match_prefix(&[name(round)]);
                pool.retain(&pins, retention);
                drop(pins);
                pool.refresh();
            }
            drop(pool.claim(8).unwrap());
            let ages = pool.eviction_ages();
            assert!(ages.max_ms <= u32::MAX.into() && ages.evicted == 3);
            checked(&pool);
        }
    }
    let pool = full();
    assert!(SIZES.into_iter().all(|number| !pool.end_loan(LoanId(number))));
}

#[test]
fn hints() {
    let ends = [0, 1, 2, 3, usize::MAX];
    for kind in PolicyKind::ALL {
        let builder = BlockPool::builder(&PoolConfig::primary_only(8));
        let pool = with_policy(builder, Tier::Primary, kind, 8).build().unwrap();
        for (start, end) in ends.into_iter().flat_map(|start| ends.map(|end| (start, end))) {
            let mut claimed = pool.claim(3).unwrap();
            let pins = claimed.register(&[name(1), name(2), name(3)], Naming::default()).unwrap();
            for time in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
                let asked = end.min(3).saturating_sub(start);
                assert!(Pinned::hint([&pins], start..end, ReuseHint::BackIn(time)) <= asked);
                assert!(Pinned::hint([&pins], start..end, ReuseHint::SharedHead) <= asked);
            }
            assert!(Pinned::hint([&pins], start..end, ReuseHint::Over) <= 3);
            drop((pins, claimed));
            work(&pool);
        }
    }
}

#[test]
fn tokens() {
    let high = Retention::from(Priority::MAX);
    for start in SIZES {
        for end in SIZES {
            let range = TokenRange { start, end: Some(end), retention: high };
            let open = TokenRange { start: end, end: None, retention: high };
            assert_eq!(RetentionPolicy::new(vec![range], high).is_ok(), start < end);
            let both = RetentionPolicy::new(vec![open, range], high);
            assert_eq!(both.is_ok(), start < end);
            let Ok(policy) = both else { continue };
            for token in SIZES {
                assert_eq!(policy.at(token).is_some(), token >= start);
            }
        }
    }
    assert!((0..=u8::MAX).all(|value| Priority::new(value).is_some() == (value <= 100)));
}

fn policy(blocks: u64) -> Result<Box<dyn EvictionPolicy>, ConfigError> {
    PolicyKind::HitDensity.make(blocks).map(Option::unwrap)
}

#[test]
fn policies() {
    for blocks in SIZES {
        match policy(blocks) {
            Ok(mut policy) => {
                tell(policy.as_mut(), RecordId::from_index(0), PolicyTime::default());
            }
            Err(ConfigError::PolicyBlocks { blocks }) => assert!(blocks > BLOCKS_MAX),
            Err(ConfigError::PolicyMemory { .. }) => assert!(blocks > 1 << 20),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Tells a policy the whole life of a block.
fn tell(policy: &mut dyn EvictionPolicy, block: RecordId, now: PolicyTime) {
    for value in [0, 1, u32::MAX] {
        let facts = BlockFacts {
            depth: value,
            tokens: value,
            found: value,
            tenant: value.into(),
            parent: Some(RecordId::from_index(value)),
            used: now,
            full: value != 1,
            ..BlockFacts::new(name(value))
        };
        policy.missed(name(value), now);
        policy.stored(block, &facts);
        policy.found(block, now);
        policy.evictable(block, &facts);
        policy.children(block, true);
        policy.children(block, false);
        policy.held(block);
        policy.evictable(block, &facts);
        let evictable = policy.len();
        assert_eq!(policy.victim(now).is_some(), evictable > 0);
        policy.evicted(block, name(value));
        policy.removed(block);
        assert!(policy.len() == 0 && policy.overdue() == 0);
    }
}

#[test]
fn what_policies_are_told() {
    let times = [0, 1, 1 << 32, u64::MAX - 1, u64::MAX];
    let mut policy = policy(4).unwrap();
    for block in [0, 3, 4, u32::MAX - 1, u32::MAX].map(RecordId::from_index) {
        for (lookups, ms) in times.into_iter().flat_map(|l| times.map(|ms| (l, ms))) {
            tell(policy.as_mut(), block, PolicyTime { lookups, ms });
        }
    }
}
