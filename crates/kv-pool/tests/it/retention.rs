//! How long content is worth something, whose it is, who may read it for how long, and who is told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Moved, OneMove};
use crate::common::{checked, claim, name, named, pool, priority};
use kv_pool::policy::PriorityLru;
use kv_pool::{
    BlockPool, ClaimError, Naming, Pinned, PoolConfig, Priority, Tier,
    clock::{Clock, ManualClock},
    events::{BlockUse, PoolEvent, Reading},
    loan::{LoanError, LoanId},
    retention::Retention,
    stats::EvictionAges,
    tenants::{TenantError, TenantQuota},
};

const MS: Duration = Duration::from_millis(1);

fn timed(blocks: u64) -> (BlockPool, ManualClock) {
    let clock = ManualClock::new();
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
    assert_eq!(pool.next_expiry(), Some(MS));
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
fn expired_is_what_ends_now_and_all_that_end_together() {
    let (pool, clock) = timed(2);
    drop(one(&pool, 1, keep(80, 3)));
    drop(one(&pool, 2, keep(90, 3)));
    clock.advance(3 * MS);
    assert_eq!(pool.refresh(), 2);
    checked(&pool);
}

#[test]
fn the_default_priority_needs_no_clock() {
    let (pool, clock) = timed(1);
    drop(one(&pool, 1, keep(35, 1)));
    assert_eq!((clock.reads(), pool.next_expiry()), (0, None));
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
    assert_eq!(pool.next_expiry(), Some(55 * MS));
    let loan = pool.lend(&[name(2)], Tier::Primary, 5 * MS).unwrap();
    assert_eq!(loan.deadline, 55 * MS);
    clock.set(54 * NANOS);
    assert!(pool.end_overdue_loans().is_empty());
    clock.set(55 * NANOS);
    assert_eq!(pool.end_overdue_loans(), [loan.id]);

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
fn evicted_content_has_no_duration_left() {
    let (pool, clock) = timed(1);
    drop(one(&pool, 1, keep(80, 1)));
    drop(one(&pool, 2, priority(80)));
    clock.advance(5 * MS);
    assert_eq!((pool.refresh(), pool.snapshot().blocks[0].priority), (0, priority(80)));
    checked(&pool);
}

mod tenants {
    use super::*;

    #[test]
    fn a_tenant_holds_no_more_than_it_may() {
        let pool = pool(8, 0);
        let tenant = pool.add_tenant().unwrap();
        let quota = TenantQuota { held_max: 3, ..TenantQuota::NONE };
        pool.set_quota(tenant, Tier::Primary, quota).unwrap();
        let held = pool.claim_for(tenant, 3).unwrap();
        let refused = pool.claim_for(tenant, 1).unwrap_err();
        let tier = Tier::Primary;
        let own = TenantError::HeldMax { tenant, tier, held: 3, requested: 1, held_max: 3 };
        assert_eq!(refused, ClaimError::Tenant(own));
        drop(held);
        assert_eq!(pool.tenant_counts(tenant, tier).unwrap().held, 0);
        drop(pool.claim_for(tenant, 3).unwrap());
        assert_eq!(pool.quota(tenant, tier), Ok(quota));
    }

    #[test]
    fn what_is_kept_for_a_tenant_is_evicted_by_itself_alone() {
        let pool = pool(4, 0);
        let [ours, theirs] = [1, 2].map(|_| pool.add_tenant().unwrap());
        let quota = TenantQuota { reserved: 2, ..TenantQuota::NONE };
        pool.set_quota(ours, Tier::Primary, quota).unwrap();
        for (tenant, contents) in [(ours, [1, 2]), (theirs, [3, 4])] {
            for content in contents {
                let mut claimed = pool.claim_for(tenant, 1).unwrap();
                drop(claimed.register(&[name(content)], Naming::default()).unwrap());
            }
        }
        let claimed = pool.claim_for(theirs, 2).unwrap();
        assert_eq!(
            (pool.match_prefix(&[name(1)]).len(), pool.match_prefix(&[name(2)]).len()),
            (1, 1)
        );
        let refused = pool.claim_for(theirs, 1).unwrap_err();
        assert!(matches!(refused, ClaimError::Tenant(TenantError::KeptForOthers { .. })));
        assert_eq!(pool.claim_for(ours, 2).unwrap().len(), 2);
        drop(claimed);
        checked(&pool);
    }

    #[test]
    fn a_tenants_oldest_content_gives_way_to_its_newer() {
        let pool = pool(8, 0);
        let tenant = pool.add_tenant().unwrap();
        let quota = TenantQuota { cached_max: 2, ..TenantQuota::NONE };
        pool.set_quota(tenant, Tier::Primary, quota).unwrap();
        for content in 1..=4 {
            let mut claimed = pool.claim_for(tenant, 1).unwrap();
            drop(claimed.register(&[name(content)], Naming::default()).unwrap());
        }
        let left: Vec<_> =
            (1..=4).filter(|&at| !pool.match_prefix(&[name(at)]).is_empty()).collect();
        assert_eq!(left, [3, 4]);
        assert_eq!(pool.tenant_counts(tenant, Tier::Primary).unwrap().cached, 2);
        checked(&pool);
    }

    #[test]
    fn content_counts_for_whoever_claimed_it_in_the_tier_where_it_lies() {
        let pool = pool(1, 1);
        let held = claim(&pool);
        let tenant = pool.add_tenant().unwrap();
        drop(held);
        let mut claimed = pool.claim_for(tenant, 1).unwrap();
        let pins = claimed.register(&[name(1)], Naming::default()).unwrap();
        let counts = |tier| {
            let counts = pool.tenant_counts(tenant, tier).unwrap();
            (counts.held, counts.cached)
        };
        assert_eq!(counts(Tier::Primary), (1, 0));
        drop(pins);
        assert_eq!(counts(Tier::Primary), (0, 1));
        let mut block = claim(&pool);
        let offload = block.take_offload().unwrap();
        assert_eq!((counts(Tier::Primary), counts(Tier::Secondary)), ((0, 0), (1, 0)));
        offload.commit();
        assert_eq!(counts(Tier::Secondary), (0, 1));
        checked(&pool);
    }
}

mod loans {
    use super::*;

    #[test]
    fn a_reader_elsewhere_keeps_blocks_until_it_returns_them_or_is_overdue() {
        let (pool, clock) = timed(3);
        for content in 1..=3 {
            drop(one(&pool, content, Naming::default()));
        }
        let names = [1, 2].map(name);
        assert!(pool.lend(&names, Tier::Secondary, MS).is_none());
        let loan = pool.lend(&names, Tier::Primary, 5 * MS).unwrap();
        assert_eq!((loan.blocks.len(), loan.deadline), (2, 5 * MS));
        let other = pool.lend(&names[..1], Tier::Primary, 9 * MS).unwrap();
        assert_eq!((pool.loans(), pool.claimable()), (2, 1));
        clock.advance(4 * MS);
        assert_eq!(pool.end_overdue_loans(), []);
        clock.advance(MS);
        assert_eq!(pool.end_overdue_loans(), [loan.id]);
        assert_eq!((pool.loans(), pool.claimable()), (1, 2));
        assert_eq!(pool.end_loan(loan.id), Err(LoanError::Unknown { loan: loan.id }));
        let told = LoanId::from_number(other.id.number());
        assert_eq!(pool.end_loan(told), Ok(()));
        assert_eq!((pool.loans(), pool.claimable()), (0, 3));
        checked(&pool);
    }

    /// A clock that panics when it is told to.
    #[derive(Clone, Debug, Default)]
    struct Failing(Arc<AtomicU64>);

    impl Clock for Failing {
        fn now(&self) -> Duration {
            assert_eq!(self.0.load(Ordering::Relaxed), 0, "the clock fails");
            Duration::ZERO
        }
    }

    #[test]
    fn a_clock_that_panics_leaves_no_block_lent_without_a_loan() {
        let clock = Failing::default();
        let config = PoolConfig::primary_only(2);
        let pool = BlockPool::builder(&config).clock(clock.clone()).build().unwrap();
        let names = [1, 2].map(name);
        drop(pool.claim(2).unwrap().register(&names, Naming::default()).unwrap());
        clock.0.store(1, Ordering::Relaxed);
        let lend = || pool.lend(&names, Tier::Primary, MS);
        assert!(catch_unwind(AssertUnwindSafe(lend)).is_err());
        clock.0.store(0, Ordering::Relaxed);
        assert_eq!((pool.loans(), pool.claimable()), (0, 2));
        checked(&pool);
        assert_eq!(lend().unwrap().blocks.len(), 2);
    }

    #[test]
    fn victims_are_pinned_in_their_order_without_the_protected() {
        let pool = pool(4, 4);
        for content in 1..=3 {
            drop(one(&pool, content, Naming::default()));
        }
        let too_many = pool.pin_victims(Tier::Primary, 3, &[name(1)]).unwrap_err();
        assert_eq!(too_many, ClaimError::Exhausted { requested: 3, claimable: 2, retiring: 0 });
        let victims = pool.pin_victims(Tier::Primary, 2, &[name(1), name(9)]).unwrap();
        let found: Vec<_> = victims.clone().into_iter().map(|pin| pin.hash(0)).collect();
        assert_eq!(found, [Some(name(2)), Some(name(3))]);
        checked(&pool);
        // Moved to the tier below, they are found there.
        for pin in victims {
            let target = pool.claim_in(Tier::Secondary, 1).unwrap().take_first().unwrap();
            let moved = pool.begin_onboard(pin, target).unwrap().commit_one();
            assert!(matches!(moved, Moved::Moved(_)));
        }
        assert!(pool.find_and_pin(name(2), Tier::Secondary).is_some());
        assert_eq!((pool.counters().offloaded, pool.counters().onboarded), (2, 0));
        checked(&pool);
    }
}

#[test]
fn readers_are_told_what_happens_in_order() {
    let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(1) };
    let pool = BlockPool::builder(&config).events(8).build().unwrap();
    let mut reader = pool.events().unwrap();
    drop(named(claim(&pool), 1, Priority::DEFAULT));
    let mut block = claim(&pool);
    block.take_offload().unwrap().commit();
    drop(block);
    pool.remove(name(1));
    let mut readings = Vec::new();
    assert_eq!(reader.read(9, &mut readings), 3);
    let happened: Vec<_> = readings
        .iter()
        .map(|reading| match reading {
            Reading::Event { sequence, event: PoolEvent::Stored { hash, .. } } => {
                (*sequence, "stored", *hash)
            }
            Reading::Event { sequence, event: PoolEvent::Moved { hash, from, to, .. } } => {
                assert_eq!((from.tier, to.tier), (Tier::Primary, Tier::Secondary));
                (*sequence, "moved", *hash)
            }
            Reading::Event { sequence, event: PoolEvent::Removed { hash, .. } } => {
                (*sequence, "removed", *hash)
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(happened, [(0, "stored", name(1)), (1, "moved", name(1)), (2, "removed", name(1))]);
    assert_eq!(pool.snapshot().next_event, 3);
    // One who is too slow is told so.
    for content in 0..10 {
        drop(named(claim(&pool), content, Priority::MIN));
    }
    readings.clear();
    reader.read(1, &mut readings);
    assert!(matches!(readings[..], [Reading::Lost { first: 3, .. }]), "{readings:?}");
    assert!(BlockPool::new(&config).unwrap().events().is_none());
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
    let policy = Box::new(PriorityLru::new(2).unwrap());
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
