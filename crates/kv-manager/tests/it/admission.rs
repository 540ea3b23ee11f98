//! Who is admitted, who waits for what, and who never is: a request that is not admitted takes nothing.

mod bounds;
mod queue;

use crate::common::sampled;
use crate::prelude::*;

const FULL: GroupId = GroupId(0);
const SECOND: GroupId = GroupId(1);

/// Managers with so many device blocks: one group that keeps all, and two.
fn one_and_two(device: u64) -> [Manager; 2] {
    let further = [group(GroupKind::Full, device)];
    let two = with_groups(options(device, 0), further);
    [manager(device, 0), Manager::new(two).unwrap()]
}

fn bounded(manager: &mut Manager, held_max: u64) -> TenantId {
    let tenant = manager.add_tenant().unwrap();
    manager.bound(GroupId(0), tenant, held_max);
    tenant
}

fn claimable(manager: &Manager) -> Vec<usize> {
    let groups = (0..).map_while(|group| manager.pool(GroupId(group)));
    groups.map(|pool| pool.claimable()).collect()
}

fn cached(manager: &Manager, ids: Range<u32>) -> usize {
    let there = cached_names(manager);
    names(ids).iter().filter(|&name| there.contains(name)).count()
}

#[test]
fn a_request_that_waits_for_another_of_its_call_evicts_nothing() {
    for mut manager in one_and_two(8) {
        cache_prompt(&mut manager, 100..117);
        let mut requests = [0..16, 0..16].map(|ids| Request::new(ids.collect()));
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert!(matches!(answers[0], Answer::Admitted(_)), "{answers:?}");
        let Answer::Waiting(Waiting::Prefix { tokens: 0 }) = answers[1] else {
            panic!("{answers:?}")
        };
        assert_eq!(cached(&manager, 100..116), 4, "the four empty blocks suffice");
    }
}

#[test]
fn a_request_that_waits_for_another_of_its_call_uses_no_budget() {
    for mut manager in one_and_two(64) {
        let mut requests = [0..16, 0..16, 100..108].map(|ids| Request::new(ids.collect()));
        // Five blocks: one more than the first needs.
        let answers = manager.ask_all(&mut requests, 20);
        assert!(matches!(answers[1], Answer::Waiting(_)), "{answers:?}");
        assert!(matches!(answers.get(2), Some(Answer::Admitted(_))), "{answers:?}");
    }
}

#[test]
fn a_prompt_beyond_what_its_tenant_may_ever_hold_is_refused_with_the_numbers() {
    for mut manager in one_and_two(16) {
        let tenant = bounded(&mut manager, 2);
        let refusal = |manager: &mut Manager, request| match ask(manager, request) {
            Answer::Refused(error) => error,
            other => panic!("{other:?}"),
        };
        let error = refusal(&mut manager, of(tenant, 0..9));
        assert_eq!(error, AdmitError::NeverFitsTenant { group: FULL, blocks: 3, most: 2 });
        assert_eq!(
            error.to_string(),
            "a sequence of 3 blocks never fits: its tenant may hold 2 of group 0"
        );
        // What is kept for others is never there either.
        let kept = TenantQuota { reserved: 14, ..TenantQuota::NONE };
        let other = manager.add_tenant().unwrap();
        manager.set_quota(GroupId(0), other, Tier::Primary, kept).unwrap();
        let error = refusal(&mut manager, of(TenantId::NOBODY, 0..9));
        assert_eq!(error, AdmitError::NeverFitsTenant { group: FULL, blocks: 3, most: 2 });
        let mut requests = [of(tenant, 0..9), of(other, 100..120)];
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert!(matches!(answers[1], Answer::Admitted(_)), "behind it: {answers:?}");
    }
}

#[test]
fn a_bound_of_any_group_is_looked_at() {
    let [_, mut manager] = one_and_two(16);
    let tenant = manager.add_tenant().unwrap();
    manager.bound(SECOND, tenant, 1);
    let Answer::Refused(error) = ask(&mut manager, of(tenant, 0..5)) else { panic!() };
    assert_eq!(error, AdmitError::NeverFitsTenant { group: SECOND, blocks: 2, most: 1 });
}

#[test]
fn a_request_of_another_managers_tenant_is_refused() {
    for (mut manager, mut other) in one_and_two(8).into_iter().zip(one_and_two(8)) {
        let foreign = other.add_tenant().unwrap();
        let own = manager.add_tenant().unwrap();
        assert_ne!(own, foreign);
        let Answer::Refused(error) = ask(&mut manager, of(foreign, 0..4)) else { panic!() };
        assert_eq!(error, AdmitError::Tenant(TenantError::Foreign { tenant: foreign }));
        let mut requests = [of(foreign, 0..4), of(own, 0..4)];
        assert!(matches!(manager.ask_all(&mut requests, 64)[1], Answer::Admitted(_)));
    }
}

#[test]
fn a_window_gets_as_long_a_chunk_as_its_tenant_may_hold() {
    let window = group(GroupKind::Window { tokens: 4, sinks: 0 }, 32);
    let mut manager = made(with_groups(options(64, 0), [window]));
    let tenant = manager.add_tenant().unwrap();
    manager.bound(SECOND, tenant, 4);
    let sequence = admitted(ask(&mut manager, of(tenant, 0..60)));
    assert_eq!(sequence.next(), 16);
    let Answer::NoRoom(missing) = ask(&mut manager, of(tenant, 100..160)) else { panic!() };
    assert!(is_bound(&missing), "{missing}");
}

fn is_bound(missing: &Missing) -> bool {
    matches!(missing.reason, ClaimError::Tenant(TenantError::HeldMax { .. }))
}

#[test]
fn a_tenant_at_its_bound_stops_nobody_else() {
    for mut manager in one_and_two(32) {
        let (tenant, other) = (bounded(&mut manager, 3), bounded(&mut manager, 4));
        let first = admitted(ask(&mut manager, of(tenant, 0..9)));
        let mut requests = [
            of(tenant, 100..109),
            of(other, 200..209),
            // It would fit, but comes behind another of its tenant.
            of(tenant, 300..301),
            of(other, 400..409),
            of(TenantId::NOBODY, 500..509),
        ];
        // A bound of the second group as well as of the first.
        let before = claimable(&manager);
        let answers = manager.ask_all(&mut requests, u64::MAX);
        assert_eq!(answers.len(), 5, "{answers:?}");
        let of_tenant = [0, 2].map(|at: usize| match &answers[at] {
            Answer::NoRoom(missing) => missing.clone(),
            other => panic!("{other:?}"),
        });
        assert_eq!(of_tenant[0], of_tenant[1]);
        let Answer::NoRoom(of_other) = &answers[3] else { panic!("{answers:?}") };
        assert!(is_bound(&of_tenant[0]) && is_bound(of_other), "{of_other}");
        assert!(matches!(answers[1], Answer::Admitted(_)), "{answers:?}");
        assert!(matches!(answers[4], Answer::Admitted(_)), "{answers:?}");
        assert_eq!(claimable(&manager)[0], before[0] - 6, "what two of them have");
        drop((first, answers));
        step(&mut manager, &mut []);
        let answers = manager.ask_all(&mut requests[2..3], u64::MAX);
        assert!(matches!(answers[0], Answer::Admitted(_)), "{answers:?}");
        drop(answers);
        check_empty(&mut manager);
    }
}

/// A manager with an open step, in which a running sequence needs a block. The others are cached.
fn full(options: ManagerOptions) -> (Manager, Sequence, OpenStep) {
    let mut manager = made(options);
    let blocks = manager.first_pool().claimable() as u32 - 2;
    cache_prompt(&mut manager, 100..100 + blocks * BLOCK + 1);
    let running = sampled(&mut manager, 0..8, 7);
    step(&mut manager, &mut []);
    let open = manager.begin_step().unwrap();
    (manager, running, open)
}

/// Nobody else has taken what a running sequence needs in this step.
fn check_goes_on(manager: &mut Manager, running: &mut Sequence) {
    let reserved = manager.reserve(running, 1 + BLOCK);
    assert!(matches!(reserved, Ok(Room::Given(_))), "{reserved:?}");
}

#[test]
fn a_pin_that_is_refused_takes_no_room_from_running_sequences() {
    let (mut manager, mut running, _open) =
        full(ManagerOptions { pinned_blocks_max: 1, ..options(4, 0) });
    let all = names(100..108);
    let Err(BudgetError::Pins { more: 2, pinned: 0, max: 1 }) = manager.pin(&all) else { panic!() };
    check_goes_on(&mut manager, &mut running);
}

#[test]
fn a_prefetch_of_what_is_there_takes_no_room_from_running_sequences() {
    let (mut manager, mut running, _open) = full(options(4, 4));
    let all = names(100..108);
    assert_eq!(manager.prefetch(&all), 0);
    check_goes_on(&mut manager, &mut running);
}

#[test]
fn a_prefetch_brings_what_is_in_host_memory_and_leaves_the_rest_alone() {
    let mut manager = manager(8, 8);
    cache_prompt(&mut manager, 0..17);
    // The last two blocks of four leave for host memory.
    cache_prompt(&mut manager, 100..125);
    manager.set_budget(FULL, Tier::Primary, 8).unwrap();
    let names = names(0..16);
    let far = |manager: &Manager| {
        let blocks = manager.first_pool().snapshot().blocks;
        let far = blocks.iter().filter(|block| block.location.tier == Tier::Secondary);
        far.filter(|block| block.hash.is_some_and(|name| names.contains(&name))).count()
    };
    let before = far(&manager);
    assert!(before > 0 && before < 4, "{before}");
    let gone = admit(&mut manager, 500..501);
    drop(gone);
    let near = manager.first_pool().claimable();
    let room = manager.first_pool().empty();
    let brought = manager.prefetch(&names);
    assert_eq!((brought, far(&manager)), (room.min(before), before - brought));
    assert_eq!(
        manager.first_pool().claimable(),
        near,
        "no step is open, so all that came is unused"
    );
}

#[test]
fn an_adoption_without_room_takes_none_from_running_sequences() {
    let [_, mut manager] = one_and_two(8);
    cache_prompt(&mut manager, 100..117);
    let _running = computed(&mut manager, 0..8);
    step(&mut manager, &mut []);
    let _open = manager.begin_step().unwrap();
    let before = claimable(&manager);
    let mut request = Request::new((100..131).collect());
    let (answer, adoption) = adopt(&mut manager, &mut request, 30);
    assert!(matches!(answer, Answer::NoRoom(_)) && adoption.is_none(), "{answer:?}");
    assert_eq!(claimable(&manager), before);
}

#[test]
fn a_tenant_beyond_its_quota_takes_no_room_from_running_sequences() {
    let [_, mut manager] = one_and_two(16);
    let tenant = manager.add_tenant().unwrap();
    let first = admitted(ask(&mut manager, of(tenant, 0..9)));
    finish(&mut manager, first);
    let held = admitted(ask(&mut manager, of(tenant, 50..58)));
    manager.bound(SECOND, tenant, 4);
    let _open = manager.begin_step().unwrap();
    let before = claimable(&manager);
    // Two blocks of it are cached, and count as held when they are pinned.
    let Answer::NoRoom(missing) = ask(&mut manager, of(tenant, 0..12)) else { panic!() };
    assert!(missing.group == SECOND && is_bound(&missing), "{missing}");
    assert_eq!(claimable(&manager), before);
    drop(held);
}

#[test]
fn a_resumption_beyond_what_its_tenant_may_hold_takes_no_room_from_running_sequences() {
    let mut manager = manager(16, 0);
    let tenant = manager.add_tenant().unwrap();
    let mut asleep = admitted(ask(&mut manager, of(tenant, 0..8)));
    let plan = step(&mut manager, &mut [&mut asleep]);
    manager.commit(&mut asleep, plan.step, &[8]).unwrap();
    manager.suspend(&mut asleep).unwrap();
    step(&mut manager, &mut []);
    let _held = admitted(ask(&mut manager, of(tenant, 50..54)));
    manager.bound(GroupId(0), tenant, 2);
    let _open = manager.begin_step().unwrap();
    let before = claimable(&manager);
    // It may hold each of its two cached blocks, and not both.
    let missing = common::lacking(manager.resume(&mut asleep));
    assert!(is_bound(&missing), "{missing}");
    assert_eq!(claimable(&manager), before);
}

#[test]
fn a_reservation_without_room_behind_what_others_have_computed_pins_nothing() {
    let mut manager = manager(12, 0);
    let mut requests = [0..17, 0..17].map(|ids| Request::new(ids.collect()));
    requests.iter_mut().for_each(|request| request.waits = false);
    let mut answers = manager.ask_all(&mut requests, 100);
    let mut second = admitted(answers.pop().unwrap());
    let first = admitted(answers.pop().unwrap());
    finish(&mut manager, first);
    manager.extend(&mut second, &[1; 20]).unwrap();
    let open = manager.begin_step().unwrap();
    let before = claimable(&manager);
    assert_eq!(before, [7]);
    // Four of the seven are what it would go over to.
    common::lacking(manager.reserve(&mut second, 21));
    assert_eq!(claimable(&manager), before);
    drop(open);
}
