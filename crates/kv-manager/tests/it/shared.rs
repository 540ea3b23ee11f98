//! Groups that share device memory by granules: who gets one, who gives one, and when.

use crate::common::sampled;
use crate::prelude::*;

const FULL: GroupId = GroupId(0);
const OTHER: GroupId = GroupId(1);
const WINDOW: GroupKind = GroupKind::Window { tokens: 4, sinks: 0 };

/// Granules of four blocks of the first group, which keeps all, or two of the second.
fn shared(granules: u32) -> SharedMemory {
    SharedMemory { granules, granule_blocks: vec![4, 2] }
}

fn shared_options(kind: GroupKind, granules: u32, host: u64) -> ManagerOptions {
    let pool =
        |blocks: u64| PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(blocks) };
    let second = GroupOptions { pool: pool(2 * u64::from(granules)), ..group(kind, 0) };
    let first = ManagerOptions::new(BLOCK, pool(4 * u64::from(granules)));
    ManagerOptions { shared: Some(shared(granules)), ..with_groups(first, [second]) }
}

fn manager(kind: GroupKind, granules: u32) -> Manager {
    Manager::new(shared_options(kind, granules, 0)).unwrap()
}

/// Granules of each group, and of nobody.
fn owned(manager: &Manager) -> [usize; 3] {
    let count = |owner| manager.granules().iter().filter(|&&one| one == owner).count();
    [count(Some(FULL)), count(Some(OTHER)), count(None)]
}

/// Asks for a prompt that computes what others compute, too.
fn ask(manager: &mut Manager, ids: Range<u32>) -> Answer {
    common::ask_now(manager, ids)
}

fn exhausted(group: GroupId, requested: usize, claimable: usize) -> Missing {
    Missing { group, reason: ClaimError::Exhausted { requested, claimable, retiring: 0 } }
}

/// There is no room for a prompt, and this is what is missing.
#[track_caller]
fn assert_lacks(manager: &mut Manager, ids: Range<u32>, expected: Missing) {
    let Answer::NoRoom(missing) = ask(manager, ids) else { panic!("room") };
    assert_eq!(missing, expected);
}

fn moves(plan: &StepPlan) -> Vec<(u32, Option<u16>, Option<u16>)> {
    let number = |group: Option<GroupId>| group.map(|group| group.0);
    plan.moves.iter().map(|one| (one.granule, number(one.from), number(one.to))).collect()
}

#[test]
fn granules_are_given_when_they_are_needed_and_before_what_is_cached_is_evicted() {
    let mut manager = manager(GroupKind::Full, 8);
    assert_eq!((owned(&manager), manager.first_pool().claimable()), ([0, 0, 8], 0));
    // Three blocks of each group.
    let mut first = admit(&mut manager, 0..12);
    assert_eq!(owned(&manager), [1, 2, 5]);
    let plan = step(&mut manager, &mut [&mut first]);
    assert_eq!(moves(&plan), [(0, None, Some(0)), (1, None, Some(1)), (2, None, Some(1))]);
    assert!(plan.edits.iter().all(|edit| edit.row == first.row().unwrap()));
    // The fourth block of each lies in granules that are partly used.
    manager.commit(&mut first, 1, &[12]).unwrap();
    manager.reserve(&mut first, 1).unwrap().given().unwrap();
    assert_eq!(moves(&step(&mut manager, &mut [&mut first])), []);
    drop(first);
    step(&mut manager, &mut []);
    // Three blocks are cached of each, which stay.
    let second = admit(&mut manager, 100..116);
    assert_eq!(owned(&manager), [2, 4, 2]);
    let hit = |manager: &Manager, group| manager.pool(group).unwrap().stats().primary.cached;
    assert_eq!((hit(&manager, FULL), hit(&manager, OTHER)), (3, 3));
    drop(second);
    check_all_free(&mut manager);
}

/// Ends everything; nothing is in use, and all that has an owner can be claimed by it.
fn check_all_free(manager: &mut Manager) {
    step(manager, &mut []);
    step(manager, &mut []);
    for (group, blocks) in [(FULL, 4), (OTHER, 2)] {
        let pool = manager.pool(group).unwrap();
        pool.check_integrity().unwrap();
        let granules = manager.granules().iter().filter(|&&one| one == Some(group)).count();
        assert_eq!(pool.claimable(), granules * blocks);
    }
    assert_eq!(manager.free_rows(), manager.options().sequences_max as usize);
}

#[test]
fn a_group_takes_the_coldest_granules_that_nobody_uses_only_if_it_must() {
    let clock = ManualClock::new();
    let options = shared_options(WINDOW, 6, 0);
    let build = |builder: PoolBuilder| builder.clock(clock.clone());
    let mut manager = Manager::with_pool(options, build).unwrap();
    let of_window = |manager: &Manager| -> Vec<u32> {
        let owners = manager.granules().iter().zip(0..);
        owners.filter(|&(&owner, _)| owner == Some(OTHER)).map(|(_, granule)| granule).collect()
    };
    drop(computed_in_chunks(&mut manager, 0..16));
    step(&mut manager, &mut []);
    let cold = of_window(&manager);
    clock.advance(std::time::Duration::from_secs(1));
    drop(computed_in_chunks(&mut manager, 100..116));
    step(&mut manager, &mut []);
    clock.advance(std::time::Duration::from_secs(1));
    assert_eq!((owned(&manager), cold.len()), ([2, 4, 0], 2));
    // What is cached in the own group goes first, as long as that suffices.
    let third = computed_in_chunks(&mut manager, 200..216);
    assert_eq!((owned(&manager), manager.stats().taken_granules), ([2, 4, 0], 0));
    drop(third);
    step(&mut manager, &mut []);
    // What it left lies where the first window was. One of the other two granules is in use then, and the content of
    // the other one was just computed again.
    clock.advance(std::time::Duration::from_secs(1));
    let whole = computed(&mut manager, 100..104);
    let warm = of_window(&manager);
    // The first group lacks a granule for this prompt. The window's first chunk is shorter then.
    let fourth = admitted(ask(&mut manager, 300..340));
    assert_eq!((owned(&manager), manager.stats().taken_granules), ([3, 3, 0], 1));
    let given: Vec<u32> =
        warm.iter().copied().filter(|&at| !of_window(&manager).contains(&at)).collect();
    let live = |sequence: &Sequence| sequence.block(OTHER, 0).unwrap().index() as u32 / 2;
    assert_eq!(given.len(), 1);
    assert!(given[0] != live(&whole) && cold.contains(&given[0]), "{given:?} of {cold:?}");
    drop((whole, fourth));
    check_all_free(&mut manager);
}

fn computed_in_chunks(manager: &mut Manager, ids: Range<u32>) -> Sequence {
    let mut sequence = admitted(ask(manager, ids));
    loop {
        step(manager, &mut [&mut sequence]);
        match sequence.to_compute() as u32 {
            0 => return sequence,
            left => drop(manager.reserve(&mut sequence, left.min(BLOCK)).unwrap().given().unwrap()),
        }
    }
}

#[test]
fn a_refusal_counts_the_granules_that_can_be_had_and_changes_nothing() {
    let mut manager = manager(GroupKind::Full, 6);
    // One granule of the first group and two of the second, cached; two and more in use.
    cache_prompt(&mut manager, 0..16);
    let mut held = computed(&mut manager, 100..108);
    assert_eq!(owned(&manager), [2, 3, 1]);
    let before = (manager.granules().to_vec(), manager.stats().taken_granules);
    let cached = |manager: &Manager| {
        [FULL, OTHER].map(|group| manager.pool(group).unwrap().stats().primary.cached)
    };
    let content = cached(&manager);
    // Of the first group, 2 blocks are empty and 4 cached; a free granule has 4 more. The second has 4 cached, whose
    // granules could be given if it needed none itself.
    assert_lacks(&mut manager, 200..228, exhausted(OTHER, 7, 4));
    let missing = common::lacking(manager.reserve(&mut held, 4 * 20));
    assert!(matches!(missing.reason, ClaimError::Exhausted { requested: 20, .. }), "{missing:?}");
    assert_eq!((manager.granules().to_vec(), manager.stats().taken_granules), before);
    assert_eq!((cached(&manager), manager.has_decided()), (content, false));
    // What there is room for is admitted: the first group gets the free granule, the second evicts.
    let second = admitted(ask(&mut manager, 200..216));
    assert_eq!(second.block_count(OTHER), 4);
    drop((held, second));
    check_all_free(&mut manager);
}

#[test]
fn a_prompt_is_judged_by_what_it_needs_of_all_groups_together() {
    let mut manager = manager(GroupKind::Full, 6);
    // 16 tokens need one granule and two; 32 tokens two and four; 36 tokens three and five.
    let refused = ask(&mut manager, 0..36);
    let Answer::Refused(AdmitError::NeverFitsShared { granules: 8, capacity: 6 }) = refused else {
        panic!("{refused:?}")
    };
    let half = admitted(ask(&mut manager, 0..16));
    assert_lacks(&mut manager, 100..132, exhausted(OTHER, 8, 2));
    assert_eq!(owned(&manager), [1, 2, 3]);
    drop(half);
    step(&mut manager, &mut []);
    let whole = admitted(ask(&mut manager, 100..132));
    assert_eq!(owned(&manager), [2, 4, 0]);
    drop(whole);
    check_all_free(&mut manager);
}

#[test]
fn a_window_gets_as_long_a_chunk_as_there_are_granules() {
    let mut manager = manager(WINDOW, 6);
    let long = admitted(ask(&mut manager, 0..64));
    // Four granules for the whole prompt, and two for the first four blocks of the window.
    assert_eq!((long.next(), owned(&manager)), (16, [4, 2, 0]));
    drop(long);
    check_all_free(&mut manager);
}

#[test]
fn the_watermark_is_left_by_granules() {
    let mut options = shared_options(GroupKind::Full, 4, 0);
    (options.groups[0].watermark_blocks, options.groups[1].watermark_blocks) = (2, 1);
    let mut manager = made(options);
    let first = admitted(ask(&mut manager, 0..4));
    // One granule each, of which 3 blocks and 1 are left; two granules are free.
    assert_eq!(owned(&manager), [1, 1, 2]);
    assert_lacks(&mut manager, 100..112, exhausted(OTHER, 3, 2));
    let second = admitted(ask(&mut manager, 100..108));
    let left = |group| manager.pool(group).unwrap().claimable();
    assert!(left(FULL) >= 2 && left(OTHER) >= 1);
    drop((first, second));
    check_all_free(&mut manager);
}

#[test]
fn no_granule_goes_to_and_fro_while_there_is_room() {
    let mut manager = manager(WINDOW, 12);
    for round in 0..40_u32 {
        let ids = round * 1000..round * 1000 + 24;
        let one = computed_in_chunks(&mut manager, ids.clone());
        let other = computed_in_chunks(&mut manager, ids.start + 500..ids.end + 500);
        drop((one, other));
        step(&mut manager, &mut []);
    }
    assert_eq!(manager.stats().taken_granules, 0, "each group evicts what is its own");
    check_all_free(&mut manager);
}

#[test]
fn a_smaller_budget_takes_what_nobody_uses_and_waits_for_the_rest() {
    let mut manager = Manager::new(shared_options(GroupKind::Full, 6, 16)).unwrap();
    let held = computed(&mut manager, 0..8);
    cache_prompt(&mut manager, 100..116);
    assert_eq!(owned(&manager), [2, 3, 1]);
    let budgeted = manager.set_granules(2).unwrap();
    // Content goes to host memory first, and the granule stays until that is complete.
    assert!(budgeted.leaving >= 6 && budgeted.in_use == 0, "{budgeted:?}");
    assert_eq!(owned(&manager), [2, 3, 1]);
    let plan = staged(&mut manager, &mut []);
    assert_eq!((plan.copies.len(), moves(&plan)), (6, vec![]));
    let opened = manager.begin_step().unwrap();
    assert!(moves(manager.stage(&opened, &mut []).unwrap()).is_empty(), "copies are not complete");
    manager.finish_step(opened).unwrap();
    done(&mut manager, plan.step + 1);
    let plan = step(&mut manager, &mut []);
    let all_left = plan.moves.iter().all(|one| one.to.is_none());
    assert!(all_left && !plan.moves.is_empty(), "{:?}", plan.moves);
    assert_eq!(owned(&manager), [1, 1, 4]);
    // What is in use leaves when it is released, and its step is complete.
    let budgeted = manager.set_granules(1).unwrap();
    assert_eq!(budgeted.in_use, 2);
    let Answer::NoRoom(_) = ask(&mut manager, 200..204) else { panic!("room") };
    drop(held);
    step(&mut manager, &mut []);
    step(&mut manager, &mut []);
    assert_eq!(owned(&manager).iter().take(2).sum::<usize>(), 1);
    assert_eq!(
        manager.set_granules(7).unwrap_err(),
        BudgetError::OverGranules { granules: 7, most: 6 }
    );
    manager.set_granules(6).unwrap();
    let whole = admitted(ask(&mut manager, 100..132));
    assert_eq!(owned(&manager), [2, 4, 0]);
    drop(whole);
    check_all_free(&mut manager);
    let mut plain = common::manager(8, 0);
    assert_eq!(plain.set_granules(1).unwrap_err(), BudgetError::NotShared);
    assert!(plain.granules().is_empty());
    check_empty(&mut plain);
}

#[test]
fn a_larger_budget_keeps_what_was_to_leave() {
    let mut manager = manager(GroupKind::Full, 3);
    let held = computed(&mut manager, 0..8);
    assert_eq!(owned(&manager), [1, 1, 1]);
    assert_eq!(manager.set_granules(0).unwrap().in_use, 4);
    assert_eq!(manager.first_pool().claimable(), 0);
    manager.set_granules(2).unwrap();
    assert_eq!((manager.first_pool().claimable(), owned(&manager)), (2, [1, 1, 1]));
    assert_lacks(&mut manager, 100..104, exhausted(OTHER, 1, 0));
    drop(held);
    check_all_free(&mut manager);
}

fn replica(granules: u32) -> Replica {
    let groups = [(GroupKind::Full, 2048), (GroupKind::Full, 64)];
    Replica::new(256, groups).unwrap().sharing(&shared(granules)).unwrap()
}

/// A plan of step 1 with these moves.
fn moving(moves: &[(u32, Option<u16>, Option<u16>)]) -> StepPlan {
    let group = |number: Option<u16>| number.map(GroupId);
    let one = |&(granule, from, to)| GranuleMove { granule, from: group(from), to: group(to) };
    StepPlan { step: 1, moves: moves.iter().map(one).collect(), ..StepPlan::default() }
}

#[test]
fn a_worker_believes_no_plan_that_gives_a_granule_to_two_groups() {
    let mut replica = replica(4);
    let refused = [
        (
            moving(&[(0, None, Some(0)), (0, None, Some(1))]),
            "plan 1 takes granule 0 from None, and Some(GroupId(0)) has it",
        ),
        (
            moving(&[(1, Some(0), Some(1))]),
            "plan 1 takes granule 1 from Some(GroupId(0)), and None has it",
        ),
        (
            moving(&[(2, None, Some(1)), (4, None, Some(0))]),
            "plan 1 moves granule 4, where there are 4",
        ),
        (moving(&[(u32::MAX, None, None)]), "plan 1 moves granule 4294967295, where there are 4"),
        (moving(&[(3, None, Some(2))]), "plan 1 names group 2, where there are 2"),
    ];
    for (plan, message) in refused {
        assert_eq!(replica.check(&plan, &[]).unwrap_err().to_string(), message);
        assert_eq!((replica.step(), replica.granules()), (0, &[None; 4][..]), "{message}");
    }
    let mut plain = Replica::new(1, [(GroupKind::Full, 1)]).unwrap();
    let none = PlanError::NoGranule { step: 1, granule: 0, granules: 0 };
    assert_eq!(plain.check(&moving(&[(0, None, None)]), &[]).map(drop), Err(none));
    // A copy to a granule of another group, or of nobody.
    let copy = |group: u16, block: u32| {
        let at = |tier| Location { tier, id: BlockId::new(block).unwrap() };
        let (from, to) = (at(Tier::Secondary), at(Tier::Primary));
        BlockCopy { group: GroupId(group), from, to, tokens: 1, written_by: 0 }
    };
    let memory = [(BLOCK, u64::MAX); 2];
    for (group, block) in [(0, 0), (0, 8), (1, 2), (1, u32::MAX >> 1)] {
        let mut plan = moving(&[(0, None, Some(1)), (1, None, Some(0))]);
        plan.copies.push(copy(group, block));
        let expected = PlanError::NotOwned { step: 1, group: GroupId(group), id: block.into() };
        assert_eq!(replica.check(&plan, &memory).map(drop), Err(expected));
        assert_eq!(replica.granules(), [None; 4], "nothing has changed");
    }
    let mut plan = moving(&[(0, None, Some(1)), (1, None, Some(0)), (0, Some(1), None)]);
    plan.copies.push(copy(0, 4));
    replica.check(&plan, &memory).unwrap();
    assert_eq!(replica.granules(), [None, Some(FULL), None, None]);
}

#[test]
fn a_batch_without_its_granule_is_refused() {
    let mut manager = manager(GroupKind::Full, 4);
    let mut sequence = admit(&mut manager, 0..4);
    let plan = step(&mut manager, &mut [&mut sequence]);
    let memory = [(BLOCK, u64::MAX); 2];
    let mut other = plan.clone();
    other.moves[0].granule = 3;
    let row = sequence.row().unwrap();
    let expected = PlanError::NoBlocks { step: 1, row, end: 4 };
    assert_eq!(replica(4).check(&other, &memory).map(drop), Err(expected));
    let mut replica = replica(4);
    replica.check(&plan, &memory).unwrap();
    assert_eq!(replica.granules(), manager.granules());
}

#[test]
fn a_snapshot_says_whose_granules_are_by_the_last_plan() {
    let mut manager = manager(GroupKind::Full, 4);
    let mut sequence = admit(&mut manager, 0..4);
    assert_eq!(manager.snapshot().granules, [None; 4]);
    let mut replica = replica(4);
    replica.restore(&manager.snapshot(), &[u64::MAX; 8]).unwrap();
    let plan = step(&mut manager, &mut [&mut sequence]);
    replica.check(&plan, &[(BLOCK, u64::MAX); 2]).unwrap();
    let snapshot = manager.snapshot();
    assert_eq!(snapshot.granules, replica.granules());
    let mut bytes = Vec::new();
    plan.to_bytes(&mut bytes);
    assert_eq!(Message::from_bytes(&bytes), Ok(Message::Plan(plan)));
    bytes.clear();
    snapshot.to_bytes(&mut bytes);
    assert_eq!(Message::from_bytes(&bytes), Ok(Message::Snapshot(snapshot.clone())));
    let fewer = Snapshot { granules: vec![None; 3], ..snapshot.clone() };
    let expected = PlanError::SnapshotGranules { granules: 3, expected: 4 };
    assert_eq!(replica.restore(&fewer, &[u64::MAX; 8]), Err(expected));
    let foreign = Snapshot { granules: vec![Some(GroupId(2)); 4], ..snapshot };
    let expected = PlanError::Group { step: 1, group: GroupId(2), groups: 2 };
    assert_eq!(replica.restore(&foreign, &[u64::MAX; 8]), Err(expected));
}

#[test]
fn shared_memory_that_cannot_be_is_refused() {
    let refused = |change: fn(&mut ManagerOptions)| {
        let mut options = shared_options(GroupKind::Full, 4, 0);
        change(&mut options);
        Manager::new(options).unwrap_err().to_string()
    };
    let message = refused(|options| options.groups.truncate(1));
    assert_eq!(message, "shared memory of 2 groups' blocks for 1 groups, where two or more share");
    let message = refused(|options| options.groups[0].pool.primary_blocks = 15);
    assert_eq!(message, "group 0 has 15 device blocks, where shared memory holds 16");
    let zero = |blocks| SharedMemory { granules: 4, granule_blocks: vec![4, blocks] };
    let message =
        refused(|options| options.shared = Some(SharedMemory { granules: 0, ..shared(4) }));
    assert_eq!(message, "granules is 0");
    let replica = || Replica::new(4, [(GroupKind::Full, 4); 2]).unwrap();
    let error = replica().sharing(&zero(0)).unwrap_err();
    assert!(matches!(error, OptionsError::Zero { field: "granule_blocks" }), "{error}");
    let error = Replica::new(4, [(GroupKind::Full, 4)]).unwrap().sharing(&shared(4)).unwrap_err();
    assert!(matches!(error, OptionsError::SharedGroups { given: 2, groups: 1 }), "{error}");
}

/// What a refused resume finds can be claimed as before.
fn check_refused(manager: &mut Manager, asleep: &mut Sequence) {
    let _open = manager.begin_step().unwrap();
    let claimable =
        |manager: &Manager| [FULL, OTHER].map(|group| manager.pool(group).unwrap().claimable());
    let before = (claimable(manager), owned(manager));
    common::lacking(manager.resume(asleep));
    assert_eq!((claimable(manager), owned(manager)), before);
}

#[test]
fn a_resume_that_is_refused_takes_nothing_of_shared_memory() {
    let options = shared_options(GroupKind::Full, 3, 4);
    let mut manager = made(options);
    let mut asleep = sampled(&mut manager, 0..10, 10);
    manager.suspend(&mut asleep).unwrap();
    step(&mut manager, &mut []);
    let _running = computed(&mut manager, 100..108);
    step(&mut manager, &mut []);
    check_refused(&mut manager, &mut asleep);
}

/// Memory that is all used, of which the second group could give some that is cached; and a sequence whose tenant may hold
/// no more of the second group.
fn bound() -> (Manager, TenantId, [Sequence; 3]) {
    let mut manager = manager(WINDOW, 12);
    let tenant = manager.add_tenant().unwrap();
    let mut held = admitted(common::ask(&mut manager, of(tenant, 0..6)));
    let plan = step(&mut manager, &mut [&mut held]);
    manager.commit(&mut held, plan.step, &[6]).unwrap();
    // What has left their windows is cached.
    let others = [300..332_u32, 100..124].map(|ids| {
        let mut requests = [Request::new(ids.collect())];
        let mut sequence = admitted(manager.ask_all(&mut requests, 4).pop().unwrap());
        step(&mut manager, &mut [&mut sequence]);
        while sequence.to_compute() > 0 {
            go_on(&mut manager, &mut sequence, 4);
        }
        sequence
    });
    step(&mut manager, &mut []);
    step(&mut manager, &mut []);
    manager.bound(OTHER, tenant, 2);
    assert_eq!((owned(&manager), manager.first_pool().claimable()), ([4, 8, 0], 0));
    let [one, other] = others;
    (manager, tenant, [held, one, other])
}

fn check_bound(missing: &Missing) {
    assert_eq!(missing.group, OTHER, "{missing}");
    assert!(matches!(missing.reason, ClaimError::Tenant(TenantError::HeldMax { .. })), "{missing}");
}

#[test]
fn a_request_that_its_tenants_bound_forbids_takes_no_granule() {
    let (mut manager, tenant, _held) = bound();
    let answer = common::ask(&mut manager, of(tenant, 200..204));
    let Answer::NoRoom(missing) = answer else { panic!("{answer:?}") };
    check_bound(&missing);
    assert_eq!((owned(&manager), manager.stats().taken_granules), ([4, 8, 0], 0));
}

#[test]
fn a_reservation_that_its_tenants_bound_forbids_takes_no_granule() {
    let (mut manager, _, [mut held, _one, _other]) = bound();
    manager.extend(&mut held, &[1; 3]).unwrap();
    let missing = common::lacking(manager.reserve(&mut held, 4));
    check_bound(&missing);
    assert_eq!((owned(&manager), manager.stats().taken_granules), ([4, 8, 0], 0));
}

#[test]
fn granules_that_are_kept_for_a_tenant_are_not_taken() {
    let (mut manager, tenant, _held) = bound();
    let kept = TenantQuota { reserved: 16, ..TenantQuota::NONE };
    manager.set_quota(OTHER, tenant, Tier::Primary, kept).unwrap();
    let answer = ask(&mut manager, 200..204);
    assert!(!matches!(answer, Answer::Admitted(_)), "{answer:?}");
    assert_eq!((owned(&manager), manager.stats().taken_granules), ([4, 8, 0], 0));
}

#[test]
fn a_free_granule_makes_room_beside_what_is_kept_for_a_tenant() {
    for kind in [GroupKind::Full, WINDOW] {
        let mut manager = manager(kind, 8);
        let tenant = manager.add_tenant().unwrap();
        let own = admitted(common::ask(&mut manager, of(tenant, 0..4)));
        finish(&mut manager, own);
        let kept = TenantQuota { reserved: 2, ..TenantQuota::NONE };
        manager.set_quota(OTHER, tenant, Tier::Primary, kept).unwrap();
        assert_eq!(owned(&manager), [1, 1, 6]);
        // Both blocks of the second group's granule are kept, though one of them is empty.
        let mut one = admitted(ask(&mut manager, 200..204));
        assert_eq!(owned(&manager), [1, 2, 5]);
        let plan = step(&mut manager, &mut [&mut one]);
        manager.commit(&mut one, plan.step, &[1]).unwrap();
        manager.extend(&mut one, &[1; 3]).unwrap();
        manager.reserve(&mut one, 4).unwrap().given().unwrap();
        drop(one);
        check_all_free(&mut manager);
    }
}

#[test]
fn a_prompt_for_which_others_leave_too_few_granules_is_refused_for_good() {
    let mut manager = manager(GroupKind::Full, 6);
    let tenant = manager.add_tenant().unwrap();
    drop(admitted(common::ask(&mut manager, of(tenant, 0..16))));
    step(&mut manager, &mut []);
    let kept = TenantQuota { reserved: 3, ..TenantQuota::NONE };
    manager.set_quota(OTHER, tenant, Tier::Primary, kept).unwrap();
    // 32 tokens need two granules and four, beside two that hold what is kept.
    let Answer::Refused(error) = ask(&mut manager, 100..132) else { panic!() };
    assert_eq!(error, AdmitError::NeverFitsShared { granules: 8, capacity: 6 });
    let own = of(tenant, 100..132);
    assert!(matches!(manager.ask_all(&mut [own], u64::MAX)[0], Answer::Admitted(_)));
}
