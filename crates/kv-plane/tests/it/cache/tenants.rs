//! Tenants: reserved blocks are for their tenant alone, also while memory grows.

use kv_plane::manager::Missing;
use kv_pool::tenants::TenantError;

use crate::prelude::*;

fn admit(engine: &mut Engine, prompt: &Prompt, tenant: TenantId) -> Result<Live, Refused> {
    engine.admit_as(prompt, tenant)
}

fn reserved(reserved: u64) -> TenantQuota {
    TenantQuota { reserved, ..TenantQuota::NONE }
}

#[test]
fn what_is_kept_has_memory_at_once_and_is_refused_to_others() {
    let (machine, mut engine) = Machine::one(16, 0);
    let [one, other] = [1, 2].map(|_| engine.cache.add_tenant().unwrap());
    assert_eq!(engine.cache.stats().ready_blocks, 0);
    engine.cache.set_quota(GroupId(0), one, Tier::Primary, reserved(6)).unwrap();
    assert!(engine.cache.stats().ready_blocks >= 6);
    // Ten blocks are for all tenants, and memory is mapped beside the reserved blocks.
    let mut theirs = admit(&mut engine, &Prompt::new(1, 40), other).unwrap();
    assert_eq!(theirs.sequence.tenant(), other);
    let refused = admit(&mut engine, &Prompt::new(2, 1), TenantId::NOBODY).unwrap_err();
    let kept = TenantError::KeptForOthers {
        tenant: TenantId::NOBODY,
        tier: Tier::Primary,
        requested: 1,
        unheld: 6,
        kept: 6,
    };
    let Refused::NoRoom(Missing { reason: ClaimError::Tenant(error), .. }) = &refused else {
        panic!("{refused}")
    };
    assert_eq!(*error, kept);
    assert!(refused.is_retryable());
    engine.extend(&mut theirs, 1, 1).unwrap();
    let Room::Lacks(NoRoom::Blocks(missing)) = engine.reserve(&mut theirs).unwrap() else {
        panic!("what is kept for another is no room")
    };
    assert!(matches!(missing.reason, ClaimError::Tenant(_)), "{missing}");
    engine.truncate(&mut theirs, 39).unwrap();
    let mut mine = admit(&mut engine, &Prompt::new(3, 24), one).unwrap();
    engine.run(&mut [&mut mine, &mut theirs]).unwrap();
    drop((mine, theirs));
    machine.close(engine);
}

#[test]
fn quotas_that_cannot_be_kept_are_refused() {
    let (machine, mut engine) = Machine::one(8, 4);
    let tenant = engine.cache.add_tenant().unwrap();
    let too_much =
        engine.cache.set_quota(GroupId(0), tenant, Tier::Primary, reserved(9)).unwrap_err();
    assert!(
        matches!(
            too_much,
            QuotaError::Refused(BudgetError::Tenant(TenantError::OverReserved { reserved: 9, .. }))
        ),
        "{too_much:?}"
    );
    assert_eq!(engine.cache.stats().ready_blocks, 0, "nothing was mapped for nothing");
    engine.cache.set_quota(GroupId(0), tenant, Tier::Secondary, reserved(4)).unwrap();
    let unknown = admit(&mut engine, &Prompt::new(1, 1), {
        let mut machine_of_more = machine.rig.engine(1, 0);
        machine_of_more.cache.add_tenant().unwrap();
        machine_of_more.cache.add_tenant().unwrap()
    });
    let refused = unknown.unwrap_err();
    assert!(!refused.is_retryable(), "{refused}");
    engine.try_close().unwrap();
}

#[test]
fn no_memory_is_mapped_for_whom_a_bound_refuses() {
    let (machine, mut engine) = Machine::one(32, 8);
    let tenant = engine.cache.add_tenant().unwrap();
    // Four blocks of each, which is a page; all but the last of the second stay cached.
    let mut live = admit(&mut engine, &Prompt::new(1, 16), tenant).unwrap();
    let mut asleep = admit(&mut engine, &Prompt::new(2, 14), tenant).unwrap();
    engine.run(&mut [&mut live, &mut asleep]).unwrap();
    engine.suspend(&mut asleep).unwrap();
    engine.idle().unwrap();
    let mut others = admit(&mut engine, &Prompt::new(3, 4), TenantId::NOBODY).unwrap();
    engine.run(&mut [&mut others]).unwrap();
    let bound = TenantQuota { held_max: 4, ..TenantQuota::NONE };
    engine.cache.set_quota(GroupId(0), tenant, Tier::Primary, bound).unwrap();
    let before = (machine.calls("cuMemCreate"), engine.cache.stats().ready_blocks);
    assert_eq!((before.1, engine.pool().empty()), (8, 0), "all in use or cached");

    engine.extend(&mut live, 4, 1).unwrap();
    let reserved = engine.reserve(&mut live).unwrap();
    assert!(matches!(reserved, Room::Lacks(NoRoom::Bound(_))), "{reserved:?}");
    let resumed = engine.resume(&mut asleep).unwrap();
    assert!(matches!(resumed, Room::Lacks(NoRoom::Bound(_))), "{resumed:?}");
    let refused = admit(&mut engine, &Prompt::new(5, 4), tenant).unwrap_err();
    assert!(matches!(&refused, Refused::NoRoom(missing) if is_bound(missing)), "{refused}");
    let formats = engine.cache.manager().formats();
    let mut request = engine.request(&Prompt::new(6, 4));
    request.tenant = tenant;
    let (answer, _) = engine.cache.adopt(&mut request, 4, &formats).unwrap();
    assert!(matches!(&answer, Answer::NoRoom(missing) if is_bound(missing)), "{answer:?}");
    let after = (machine.calls("cuMemCreate"), engine.cache.stats().ready_blocks);
    assert_eq!(after, before, "nothing was mapped for nothing");
    drop((live, asleep, others));
    machine.close(engine);
}

fn is_bound(missing: &Missing) -> bool {
    matches!(missing.reason, ClaimError::Tenant(TenantError::HeldMax { .. }))
}
