//! What a pool promises of retention, tenants and chains, with every policy that a configuration names.

use std::time::Duration;

use crate::common::{checked, name, priority, with_policy};
use kv_pool::clock::ManualClock;
use kv_pool::policy::PolicyKind;
use kv_pool::retention::Retention;
use kv_pool::tenants::{TenantId, TenantQuota};
use kv_pool::{BlockHash, BlockPool, Naming, PoolConfig, Priority, Tier};

const MS: Duration = Duration::from_millis(1);

fn pool(kind: PolicyKind, blocks: u64) -> (BlockPool, ManualClock) {
    let clock = ManualClock::new();
    let builder = BlockPool::builder(&PoolConfig::primary_only(blocks)).clock(clock.clone());
    (with_policy(builder, Tier::Primary, kind, blocks).build().unwrap(), clock)
}

fn cache(pool: &BlockPool, tenant: TenantId, content: u32, naming: impl Into<Naming>) {
    let mut block = pool.claim_for(tenant, 1).unwrap();
    drop(block.register(&[name(content)], naming).unwrap());
}

fn cached(pool: &BlockPool, contents: std::ops::Range<u32>) -> Vec<u32> {
    let blocks = pool.snapshot().blocks;
    let is_cached = |content: &u32| blocks.iter().any(|block| block.hash == Some(name(*content)));
    contents.filter(is_cached).collect()
}

#[test]
fn what_is_retained_goes_last_until_its_time_is_over() {
    for kind in PolicyKind::ALL {
        let (pool, clock) = pool(kind, 8);
        let keep = Retention { priority: priority(80), duration: Some(9 * MS) };
        let rest = TenantId::NOBODY;
        (0..4).for_each(|content| cache(&pool, rest, content, keep));
        (4..8).for_each(|content| cache(&pool, rest, content, Priority::DEFAULT));
        // Others come and go, many times as many as there are blocks.
        (100..160).for_each(|content| cache(&pool, rest, content, Priority::DEFAULT));
        assert_eq!(cached(&pool, 0..8), [0, 1, 2, 3], "{kind}");
        clock.advance(10 * MS);
        assert_eq!(pool.refresh(), 4, "{kind}");
        // Of a higher priority, so that no policy prefers one of what is left to these.
        (200..208).for_each(|content| cache(&pool, rest, content, priority(60)));
        assert_eq!(cached(&pool, 0..8), [], "{kind}");
        checked(&pool);
    }
}

#[test]
fn a_tenant_beyond_its_share_loses_its_own_content() {
    for kind in PolicyKind::ALL {
        let (pool, _) = pool(kind, 8);
        let [first, second] = [0; 2].map(|_| pool.add_tenant().unwrap());
        let keeps = TenantQuota { reserved: 4, ..TenantQuota::NONE };
        pool.set_quota(first, Tier::Primary, keeps).unwrap();
        (0..4).for_each(|content| cache(&pool, first, content, Priority::MIN));
        (100..200).for_each(|content| cache(&pool, second, content, priority(90)));
        assert_eq!(cached(&pool, 0..4), [0, 1, 2, 3], "{kind}");
        checked(&pool);
    }
}

#[test]
fn tails_go_before_heads() {
    for kind in PolicyKind::ALL {
        let (pool, _) = pool(kind, 12);
        let chain: Vec<BlockHash> = (0..8).map(name).collect();
        let mut blocks = pool.claim(8).unwrap();
        drop(blocks.register(&chain, Naming::default()).unwrap());
        for content in 100..110 {
            // Heads are found more often, and lately.
            drop(pool.match_prefix(&chain[..4]));
            let claimed = pool.claim(5).unwrap();
            let left = cached(&pool, 0..8);
            assert_eq!(left, (0..left.len() as u32).collect::<Vec<_>>(), "{kind}: a hole");
            drop(claimed);
            cache(&pool, TenantId::NOBODY, content, Priority::DEFAULT);
        }
        assert!(cached(&pool, 0..8).len() < 8, "{kind}");
        checked(&pool);
    }
}
