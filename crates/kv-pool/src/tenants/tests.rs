//! Bounds and reserves of tenants, by themselves.

use super::*;

const TIER: Tier = Tier::Primary;
const MARK: PoolMark = PoolMark::ALL;

fn tenants(capacity: u64, quotas: &[TenantQuota]) -> Tenants {
    let mut tenants = Tenants::new(MARK, [capacity; TIERS]);
    for &quota in quotas {
        let tenant = tenants.add().unwrap();
        tenants.set_quota(tenant, TIER, quota).unwrap();
    }
    tenants
}

fn reserved(reserved: u64) -> TenantQuota {
    TenantQuota { reserved, ..TenantQuota::NONE }
}

fn hold(tenants: &mut Tenants, tenant: Tenant, count: u64) {
    (0..count).for_each(|_| tenants.hold(tenant, TIER, false));
}

#[test]
fn a_tenant_holds_as_many_as_it_may_and_the_refusal_says_why() {
    let mut tenants = tenants(10, &[TenantQuota { held_max: 3, ..TenantQuota::NONE }]);
    let tenant = Tenant(1);
    hold(&mut tenants, tenant, 2);
    assert_eq!(tenants.admit(tenant, TIER, 1), Ok(()));
    let error = tenants.admit(tenant, TIER, 2).unwrap_err();
    let expected = TenantError::HeldMax {
        tenant: tenants.id(tenant),
        tier: TIER,
        held: 2,
        requested: 2,
        held_max: 3,
    };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "tenant 1 holds 2 blocks of the Primary tier and asks for 2 more, but may hold 3"
    );
    tenants.unhold(tenant, TIER, false);
    assert_eq!(tenants.admit(tenant, TIER, 2), Ok(()));
    assert_eq!(tenants.admit(Tenant::NOBODY, TIER, 9), Ok(()));
}

#[test]
fn what_is_kept_for_one_tenant_is_refused_to_the_others() {
    let mut tenants = tenants(10, &[reserved(4), reserved(3)]);
    let (first, second) = (Tenant(1), Tenant(2));
    assert_eq!(tenants.admit(first, TIER, 7), Ok(()));
    assert_eq!(tenants.admit(Tenant::NOBODY, TIER, 3), Ok(()));
    hold(&mut tenants, first, 5);
    assert_eq!(tenants.admit(first, TIER, 2), Ok(()));
    let error = tenants.admit(first, TIER, 3).unwrap_err();
    let expected = TenantError::KeptForOthers {
        tenant: tenants.id(first),
        tier: TIER,
        requested: 3,
        unheld: 5,
        kept: 3,
    };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "3 blocks of the Primary tier were asked for by tenant 1, 5 are not in use and 3 of them \
         are kept for others"
    );
    assert_eq!(tenants.admit(second, TIER, 5), Ok(()));
    assert!(tenants.admit(second, TIER, 6).is_err());
}

#[test]
fn cached_blocks_within_the_reserve_are_evicted_by_their_owner_only() {
    let mut tenants = tenants(10, &[reserved(2), reserved(0)]);
    let (first, second) = (Tenant(1), Tenant(2));
    (0..3).for_each(|_| tenants.cache(first, TIER));
    tenants.cache(second, TIER);
    assert!(tenants.may_evict(second, first, TIER));
    tenants.uncache(first, TIER);
    assert!(!tenants.may_evict(second, first, TIER));
    assert!(!tenants.may_evict(Tenant::NOBODY, first, TIER));
    assert!(tenants.may_evict(first, first, TIER));
    assert!(tenants.may_evict(first, second, TIER));
}

#[test]
fn a_tenant_gives_up_its_own_cached_blocks_beyond_its_quota() {
    let mut tenants = tenants(10, &[TenantQuota { cached_max: 2, ..TenantQuota::NONE }]);
    let tenant = Tenant(1);
    (0..2).for_each(|_| tenants.cache(tenant, TIER));
    assert_eq!(tenants.cached_beyond(tenant, TIER), 0);
    tenants.cache(tenant, TIER);
    assert_eq!(tenants.cached_beyond(tenant, TIER), 1);
    assert_eq!(tenants.counts(tenant, TIER), TenantCounts { held: 0, cached: 3 });
    assert_eq!(tenants.counts(tenant, Tier::Secondary), TenantCounts::default());
}

/// A batch of as many sequences as there are tenants, each of which claims and finds.
fn steps_of_a_batch(count: u16) -> u64 {
    let mut tenants = tenants(1 << 20, &vec![reserved(2); usize::from(count)]);
    let (slack, steps) = crate::steps::steps(|| {
        let mut slack = 0;
        for number in 1..=count {
            tenants.begin_sequence();
            assert!((0..4).all(|_| tenants.reuse(Tenant(number), TIER)));
            tenants.want(Tenant(number), 3);
            slack = tenants.admit_batch(true).unwrap();
        }
        tenants.begin_sequence();
        assert!(tenants.reuse(Tenant(1), TIER));
        tenants.want(Tenant(1), u64::MAX);
        assert!(tenants.admit_batch(true).is_err());
        tenants.take_back();
        assert_eq!(tenants.admit_batch(false), Ok(slack));
        tenants.all_reused_are_held();
        tenants.end_batch();
        slack
    });
    assert_eq!(slack, (1 << 20) - 7 * u64::from(count));
    // Nothing is left of it.
    let batch = &tenants.batch;
    assert!(batch.touched.is_empty() && batch.claimants.is_empty());
    let whole = tenants.wholes[TIER.index()];
    assert_eq!((whole.claimed, whole.reused, whole.met), (0, 0, 0));
    assert_eq!(whole.unmet, 2 * u64::from(count));
    steps
}

#[test]
fn a_batch_asks_about_each_block_and_each_tenant_once() {
    let (few, many) = (steps_of_a_batch(16), steps_of_a_batch(4096));
    assert!(many <= 256 * (few + few / 8), "{few} steps for 16 tenants, {many} for 4,096");
}

#[test]
fn quotas_that_cannot_be_kept_are_refused() {
    let mut tenants = tenants(10, &[reserved(6), reserved(4)]);
    let tenant = Tenant(2);
    assert_eq!(
        tenants.set_quota(tenant, TIER, reserved(5)),
        Err(TenantError::OverReserved { tier: TIER, reserved: 11, capacity: 10 })
    );
    let low = TenantQuota { held_max: 1, ..reserved(2) };
    assert_eq!(
        tenants.set_quota(tenant, TIER, low),
        Err(TenantError::ReservedOverHeldMax { reserved: 2, held_max: 1 })
    );
    assert_eq!(tenants.quota(tenant, TIER), reserved(4));
    tenants.set_capacity(TIER, 11, 0);
    assert_eq!(tenants.set_quota(tenant, TIER, reserved(5)), Ok(()));
}

#[test]
fn there_are_no_more_tenants_than_numbers() {
    let mut tenants = Tenants::new(MARK, [1; TIERS]);
    let last = (1..=u16::MAX).map(|_| tenants.add().unwrap()).last();
    assert_eq!(last, Some(Tenant(u16::MAX)));
    assert_eq!(tenants.add(), Err(TenantError::TooMany { count: 65_536 }));
}

/// Plays claims, releases and evictions that the verdicts allow: what is kept can always be
/// had, and an admitted claim always finds blocks.
#[test]
fn whoever_is_admitted_finds_blocks_and_the_reserve_is_always_there() {
    const CAPACITY: u64 = 12;
    let mut random = 3_u64;
    let mut below = |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    for _ in 0..200 {
        let quotas = [reserved(below(5)), reserved(below(5)), reserved(0)];
        let mut tenants = tenants(CAPACITY, &quotas);
        for _ in 0..200 {
            let by = Tenant(below(4) as u16);
            let counts = tenants.counts(by, TIER);
            match below(3) {
                0 if counts.held > 0 => {
                    tenants.unhold(by, TIER, false);
                    tenants.cache(by, TIER);
                }
                _ if tenants.admit(by, TIER, 1) == Ok(()) => take_one(&mut tenants, by, CAPACITY),
                _ => {}
            }
            for (number, quota) in (1..).zip(quotas) {
                let tenant = Tenant(number);
                let held = tenants.counts(tenant, TIER).held;
                let more = quota.reserved.saturating_sub(held);
                assert_eq!(tenants.admit(tenant, TIER, more), Ok(()), "{tenants:?}");
            }
        }
    }
}

fn take_one(tenants: &mut Tenants, by: Tenant, capacity: u64) {
    let all = (0..4).map(Tenant);
    let counts = |tenant| tenants.counts(tenant, TIER);
    let used: u64 = all.clone().map(|t| counts(t).held + counts(t).cached).sum();
    if used == capacity {
        let victim = all
            .clone()
            .find(|&owner| counts(owner).cached > 0 && tenants.may_evict(by, owner, TIER));
        let victim = victim.unwrap_or_else(|| panic!("nothing to evict: {tenants:?}"));
        tenants.uncache(victim, TIER);
    }
    tenants.hold(by, TIER, false);
}
