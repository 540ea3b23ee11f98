//! What its tenant may hold is a request's own affair: it is said before anything else is looked at, asked for or pinned.

use super::queue::{cache, quota, set};
use super::*;

/// Has a tenant that holds two blocks of each group, and nobody, ask for a prompt of three blocks and one of one.
fn assert_stops_nobody(manager: &mut Manager, tenant: TenantId) {
    let mut queue: VecDeque<_> =
        [of(tenant, 100..112), of(TenantId::NOBODY, 200..204)].into_iter().collect();
    let admission = manager.admit(&mut queue, u64::MAX);
    assert!(matches!(admission.waiting[..], [(0, Waiting::Bound(_))]), "{admission:?}");
    assert_eq!((admission.admitted.len(), admission.no_room), (1, None));
}

#[test]
fn a_bound_is_said_where_shared_memory_is_missing_too() {
    let pool = PoolConfig::primary_only(8);
    let groups = vec![GroupOptions { pool, ..group(GroupKind::Full, 0) }; 2];
    let shared = SharedMemory { granules: 8, granule_blocks: vec![1, 1] };
    let options = ManagerOptions { groups, shared: Some(shared), ..options(0, 0) };
    let mut manager = made(options);
    let tenant = manager.add_tenant().unwrap();
    [FULL, SECOND].into_iter().for_each(|group| set(&mut manager, group, tenant, quota(4, 0)));
    let _running = admitted(ask(&mut manager, of(tenant, 0..8)));
    assert_stops_nobody(&mut manager, tenant);
}

#[test]
fn a_bound_is_said_before_what_another_group_keeps_for_others() {
    let [_, mut manager] = one_and_two(16);
    let [tenant, holder] = [0; 2].map(|_| manager.add_tenant().unwrap());
    set(&mut manager, FULL, holder, quota(16, 12));
    set(&mut manager, SECOND, tenant, quota(4, 0));
    let _running = admitted(ask(&mut manager, of(tenant, 0..8)));
    assert_stops_nobody(&mut manager, tenant);
}

#[test]
fn a_sequence_that_decodes_evicts_nothing_while_memory_can_be_mapped() {
    let mut manager = manager(16, 0);
    manager.set_budget(FULL, Tier::Primary, 4).unwrap();
    cache_prompt(&mut manager, 100..108);
    let mut live = sampled(&mut manager, 200..207, 7);
    let evicted = |manager: &Manager| manager.first_pool().counters().evicted;
    for (id, blocks) in [(8, 0), (9, 1)] {
        let mut asked = Vec::new();
        let mut memory = |group, blocks| {
            asked.push((group, blocks));
            Ok::<_, ()>(16)
        };
        let reserved = manager.growing(Some(&mut memory)).reserve(&mut live, 1).unwrap().unwrap();
        assert_eq!((reserved.given().unwrap().blocks, asked.len()), (blocks, blocks));
        let computed = step(&mut manager, &mut [&mut live]).step;
        manager.commit(&mut live, computed, &[id]).unwrap();
    }
    assert_eq!((evicted(&manager), cached(&manager, 100..108)), (0, 2));
}

#[test]
fn no_memory_is_asked_for_whom_a_bound_refuses() {
    let pool = PoolConfig { secondary_blocks: 8, ..PoolConfig::primary_only(16) };
    for count in [1, 2] {
        let mut options = options(16, 8);
        let pool = pool.clone();
        options.groups.resize(count, GroupOptions { pool, ..group(GroupKind::Full, 0) });
        let mut manager = made(options);
        let tenant = manager.add_tenant().unwrap();
        let mut asleep = admitted(ask(&mut manager, of(tenant, 200..207)));
        let computed = step(&mut manager, &mut [&mut asleep]).step;
        manager.commit(&mut asleep, computed, &[7]).unwrap();
        manager.suspend(&mut asleep).unwrap();
        step(&mut manager, &mut []);
        manager.set_budget(FULL, Tier::Primary, 4).unwrap();
        set(&mut manager, FULL, tenant, quota(2, 0));
        let mut running = admitted(ask(&mut manager, of(tenant, 0..8)));
        let before = claimable(&manager);
        let mut asked = Vec::new();
        let mut memory = |group, blocks| {
            asked.push((group, blocks));
            Ok::<_, ()>(16)
        };
        let mut queue: VecDeque<_> = [of(tenant, 100..108)].into_iter().collect();
        let waiting =
            manager.growing(Some(&mut memory)).admit(&mut queue, u64::MAX).unwrap().waiting;
        assert!(matches!(waiting[..], [(0, Waiting::Bound(_))]), "{waiting:?}");
        let reserved = manager.growing(Some(&mut memory)).reserve(&mut running, 24).unwrap();
        assert!(matches!(reserved, Ok(Room::Lacks(NoRoom::Bound(_)))), "{reserved:?}");
        let resumed = manager.growing(Some(&mut memory)).resume(&mut asleep).unwrap();
        // Of two groups, nothing is left that it could go on with, so it needs no block.
        let none = manager.pool(SECOND).is_some() && resumed == Ok(Room::Given(0));
        let bound = matches!(resumed, Ok(Room::Lacks(NoRoom::Bound(_))));
        assert!(none || bound, "{resumed:?}");
        let there = manager.formats();
        let mut request = of(tenant, 300..308);
        let adopted = manager.growing(Some(&mut memory)).adopt(&mut request, 7, &there).unwrap();
        assert!(matches!(&adopted.0, Answer::NoRoom(missing) if is_bound(missing)), "{adopted:?}");
        assert_eq!(asked, []);
        assert_eq!(claimable(&manager), before, "the budget is as it was");
    }
}

#[test]
fn memory_that_fails_takes_nothing_from_running_sequences() {
    for mut manager in one_and_two(32) {
        manager.set_budget(FULL, Tier::Primary, 16).unwrap();
        cache(&mut manager, TenantId::NOBODY, 0..64);
        let _open = manager.begin_step().unwrap();
        let before = claimable(&manager);
        let mut queue: VecDeque<_> = [of(TenantId::NOBODY, 0..13)].into_iter().collect();
        let mut memory = |_, _| Err("none");
        let refused = manager.growing(Some(&mut memory)).admit(&mut queue, u64::MAX);
        assert_eq!(refused.unwrap_err(), "none");
        assert_eq!((claimable(&manager), before[0]), (before.clone(), 16));
    }
}

#[test]
fn memory_is_asked_for_the_chunk_that_a_bound_allows() {
    let window = group(GroupKind::Window { tokens: 4, sinks: 0 }, 32);
    let options = with_groups(options(64, 0), [window]);
    let mut manager = made(options);
    let tenant = manager.add_tenant().unwrap();
    set(&mut manager, SECOND, tenant, quota(4, 0));
    manager.set_budget(SECOND, Tier::Primary, 0).unwrap();
    let (mut asked, mut queue) = (Vec::new(), VecDeque::from([of(tenant, 0..60)]));
    let mut memory = |group, blocks| {
        asked.push((group, blocks));
        Ok::<_, ()>(blocks as u64)
    };
    let admission = manager.growing(Some(&mut memory)).admit(&mut queue, u64::MAX);
    let admitted = admission.unwrap().admitted;
    assert_eq!((asked, admitted[0].1.next()), (vec![(SECOND, 4)], 16));
}
