//! What belongs to one pool has no effect in another: tenants, epochs, loans, pins and blocks.

use crate::common::{cache, checked, claim, find, name, pool, write};
use kv_pool::{
    BlockPool, HandleError, Priority, Tier,
    retention::Retention,
    tenants::{TenantError, TenantId, TenantQuota},
};

/// A pool of eight blocks with a tenant or without, and a tenant of another pool with the same or a
/// higher number.
fn pools() -> Vec<(BlockPool, TenantId)> {
    let mut all = Vec::new();
    for (own, others) in [(0, 1), (1, 1), (1, 5), (3, 2)] {
        let (ours, other) = (pool(8, 0), pool(8, 0));
        for _ in 0..own {
            ours.add_tenant().unwrap();
        }
        let foreign: Vec<_> = (0..others).map(|_| other.add_tenant().unwrap()).collect();
        all.push((ours, foreign[others - 1]));
    }
    all
}

#[test]
fn a_tenant_of_another_pool_is_refused_and_changes_nothing() {
    for (pool, foreign) in pools() {
        assert!(pool.claim_for(foreign, 4).is_err());
        assert!(pool.claim_for(foreign, 0).is_err());
        assert!(pool.set_quota(foreign, Tier::Primary, TenantQuota::NONE).is_err());
        assert!(pool.quota(foreign, Tier::Primary).is_err());
        assert!(pool.tenant_counts(foreign, Tier::Primary).is_err());
        let refused = pool.tenant_room(foreign, Tier::Primary).unwrap_err();
        assert_eq!(refused, TenantError::Foreign { tenant: foreign });
        assert_eq!(pool.claimable(), 8);
        checked(&pool);
        // What panicked under the lock, and handed out too few blocks from then on.
        pool.add_tenant().unwrap();
        assert!(pool.tenant_counts(foreign, Tier::Primary).is_err());
        let claimed = pool.claim(8).unwrap();
        assert_eq!(claimed.len(), 8);
        assert!(pool.tenant_counts(TenantId::NOBODY, Tier::Primary).is_ok());
        drop(claimed);
        checked(&pool);
    }
}

#[test]
fn blocks_are_not_named_behind_those_of_another_pool() {
    let (ours, other) = (pool(2, 0), pool(2, 0));
    let mut held = write(&other, 1);
    let mut block = claim(&ours);
    let refused = block.register_onto(&[name(2)], Priority::DEFAULT, &mut held).unwrap_err();
    assert_eq!(refused, HandleError::OtherPool);
    assert_eq!((held.len(), block.len(), ours.match_prefix(&[name(2)]).len()), (1, 1, 0));
    // An empty list is of no pool.
    held.truncate(0);
    assert_eq!(block.register_onto(&[name(2)], Priority::DEFAULT, &mut held), Ok(1));
    assert_eq!(ours.match_prefix(&[name(2)]).len(), 1);
    drop((held, block));
    checked(&ours);
    checked(&other);
}

#[test]
fn a_tenant_is_no_other_pools_tenant_of_the_same_number() {
    let (ours, other) = (pool(4, 0), pool(4, 0));
    let [own, foreign] = [&ours, &other].map(|pool| pool.add_tenant().unwrap());
    assert_eq!(own.number(), foreign.number());
    assert_ne!(own, foreign);
    let quota = TenantQuota { held_max: 1, ..TenantQuota::NONE };
    assert!(ours.set_quota(foreign, Tier::Primary, quota).is_err());
    assert_eq!(ours.claim_for(own, 4).unwrap().len(), 4, "its quota is its own");
    // Nobody is nobody everywhere.
    assert_eq!(ours.claim_for(TenantId::default(), 1).unwrap().len(), 1);
    assert_eq!(other.claim_for(TenantId::NOBODY, 1).unwrap().len(), 1);
    assert_eq!(TenantId::NOBODY, TenantId::default());
}

#[test]
fn an_epoch_of_another_pool_frees_nothing() {
    let (ours, other) = (pool(1, 0), pool(1, 0));
    let own = ours.begin_epoch();
    let foreign = other.begin_epoch();
    assert_eq!(own.number(), foreign.number());
    drop(claim(&ours));
    assert!(ours.complete_epoch(foreign).is_err(), "the device still reads the block");
    assert_eq!(ours.claimable(), 0);
    // Neither does one of a pool that is no more.
    drop(other);
    assert!(ours.complete_epoch(foreign).is_err());
    assert_eq!(ours.claimable(), 0);
    ours.complete_epoch(own).unwrap();
    assert_eq!(ours.claimable(), 1);
}

#[test]
fn a_loan_of_another_pool_is_not_ended() {
    let pools = [pool(1, 0), pool(1, 0)];
    let [ours, other] = &pools;
    let [own, foreign] = [ours, other].map(|pool| {
        cache(pool, 1, Priority::DEFAULT);
        pool.lend(&[name(1)], Tier::Primary).unwrap()
    });
    assert!(!ours.end_loan(foreign.id), "a reader elsewhere still reads the block");
    assert_eq!((ours.claimable(), ours.loans()), (0, 1));
    assert!(ours.end_loan(own.id) && other.end_loan(foreign.id));
    assert!(!ours.end_loan(own.id), "it has ended");
    assert_eq!((ours.claimable(), other.claimable()), (1, 1));
}

#[test]
fn pins_blocks_and_lists_of_another_pool_are_left_alone_or_come_back() {
    let (ours, other) = (pool(4, 2), pool(4, 2));
    let (own, foreign) = (write(&ours, 1), write(&other, 1));
    let target = ours.claim_in(Tier::Secondary, 1).unwrap();
    let refused = ours.begin_onboard(foreign, target).unwrap_err();
    let (foreign, target) = (refused.pinned, refused.target);
    let refused = other.begin_onboard(own, target).unwrap_err();
    let own = refused.pinned;
    drop(refused.target);

    let mut blocks = ours.claim(2).unwrap();
    let blocks_of_other = other.claim(1).unwrap();
    let back = blocks.append(blocks_of_other).unwrap_err();
    assert_eq!((blocks.len(), back.len()), (2, 1));
    drop((blocks, back));

    let mut list = ours.match_prefix(&[name(1)]);
    let list_of_other = other.match_prefix(&[name(1)]);
    let back = list.append(list_of_other).unwrap_err();
    assert_eq!((list.len(), back.len()), (1, 1));
    ours.retain(&back, Retention::from(Priority::MIN));
    for pool in [&ours, &other] {
        assert_eq!(pool.snapshot().blocks[0].priority, Priority::DEFAULT);
    }

    let mut reader_pool = BlockPool::builder(&kv_pool::PoolConfig::primary_only(1));
    reader_pool = reader_pool.events(4);
    let quiet = reader_pool.build().unwrap();
    let mut reader = quiet.events().unwrap();
    drop(write(&ours, 2));
    assert_eq!(reader.read(8, &mut Vec::new()), 0);

    drop((own, foreign, list, back));
    assert!(find(&ours, 1).is_some() && find(&other, 1).is_some());
    assert_eq!((ours.claimable(), other.claimable()), (4, 4));
    checked(&ours);
    checked(&other);
}
