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
                _ if tenants.check((by, TIER), 1, &[], 0) == Ok(()) => {
                    take_one(&mut tenants, by, CAPACITY)
                }
                _ => {}
            }
            for (number, quota) in (1..).zip(quotas) {
                let tenant = Tenant(number);
                let held = tenants.counts(tenant, TIER).held;
                let more = quota.reserved.saturating_sub(held);
                assert_eq!(tenants.check((tenant, TIER), more, &[], 0), Ok(()), "{tenants:?}");
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
