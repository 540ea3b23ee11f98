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
