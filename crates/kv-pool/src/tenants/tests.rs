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

/// A lookup that finds blocks of as many tenants as there are.
fn steps_of_a_lookup(count: u16) -> u64 {
    let mut tenants = tenants(1 << 20, &vec![reserved(2); usize::from(count)]);
    let (_, steps) = crate::steps::steps(|| {
        for number in 1..=count {
            assert!((0..4).all(|_| tenants.reuse(Tenant(number), TIER)));
        }
        tenants.end_lookup();
    });
    let whole = tenants.wholes[TIER.index()];
    assert!(tenants.reusers.is_empty(), "nothing is left of it");
    assert_eq!((whole.reused, whole.met), (0, 0));
    assert_eq!(whole.unmet, 2 * u64::from(count));
    steps
}

#[test]
fn a_lookup_asks_about_each_block_and_each_tenant_once() {
    let (few, many) = (steps_of_a_lookup(16), steps_of_a_lookup(4096));
    assert!(many <= 256 * (few + few / 8), "{few} steps for 16 tenants, {many} for 4,096");
}
