//! Several groups of layers: what each keeps, and what all can serve.

mod checkpoints;

use crate::common::{ask_now, computed_in_chunks, sampled};
use crate::prelude::*;

const WINDOW: GroupKind = GroupKind::Window { tokens: 6, sinks: 0 };
const STATE: GroupKind = GroupKind::State { checkpoint_tokens: 8, drafts: 0 };

/// A group of full attention with 64 blocks, and others.
fn manager(further: impl IntoIterator<Item = GroupOptions>) -> Manager {
    made(with_groups(options(64, 0), further))
}

fn hit(manager: &mut Manager, tokens: u32) -> u64 {
    admit_now(manager, 0..tokens).cached_tokens()
}

/// Steps without sequences, so that what was released can be claimed.
fn settle(manager: &mut Manager) {
    step(manager, &mut []);
}

fn row(manager: &Manager, group: u16, sequence: &Sequence, places: usize) -> Vec<bool> {
    let ids = manager.block_ids(GroupId(group), sequence);
    ids[..places].iter().map(|id| id.block().is_some()).collect()
}

#[test]
fn h26_a_group_that_lags_shortens_the_hit_of_all() {
    // Of 22 tokens, states are kept behind 8, 16 and 20: the last block size that the prompt is longer than.
    let mut manager = manager([group(STATE, 4)]);
    drop(computed_in_chunks(&mut manager, 0..22));
    settle(&mut manager);
    assert_eq!(hit(&mut manager, 22), 20);
    assert_eq!(hit(&mut manager, 20), 16, "the last token is computed");
    assert_eq!(hit(&mut manager, 100), 20);
    settle(&mut manager);
    // Others take all states but that of the longest prefix, which was used last.
    let _others = [admit(&mut manager, 500..503), admit(&mut manager, 600..603)];
    assert_eq!(hit(&mut manager, 22), 20);
    assert_eq!(
        hit(&mut manager, 20),
        0,
        "the blocks of 16 tokens are there, and no state behind any"
    );
    assert_eq!(manager.first_pool().match_prefix(&[]).len(), 0);
}

#[test]
fn h26_a_shortened_hit_is_judged_anew_in_every_group() {
    // States behind 8 and 16 tokens; the window of 16 needs the blocks from token 11 on, that of 8 the first ones.
    let mut manager = manager([group(WINDOW, 64), group(STATE, 64)]);
    let mut sequence = computed_in_chunks(&mut manager, 0..18);
    // The last step began behind 16 tokens, whose window begins with token 11.
    assert_eq!(row(&manager, 1, &sequence, 5), [false, false, true, true, true]);
    manager.commit(&mut sequence, 3, &[18]).unwrap();
    let names = manager.pool(GroupId(1)).unwrap().snapshot().blocks;
    let named = names.iter().filter(|block| block.hash.is_some()).count();
    assert_eq!(named, 4, "what has left the window stays cached as long as there is room");
    drop(sequence);
    settle(&mut manager);
    assert_eq!(hit(&mut manager, 18), 16);
    assert_eq!(hit(&mut manager, 16), 8);
    let held = admit_now(&mut manager, 0..14);
    assert_eq!(held.cached_tokens(), 8);
    // Token 8 reads from token 3 on, and the first chunk ends at the checkpoint behind 12 tokens.
    assert_eq!((held.next(), row(&manager, 1, &held, 4)), (4, vec![true, true, true, false]));
    assert_eq!(manager.block_ids(GroupId(2), &held).len(), 1);
}

#[test]
fn a_checkpoint_is_copied_before_it_is_gone_on_from() {
    let mut manager = manager([group(STATE, 8)]);
    drop(computed_in_chunks(&mut manager, 0..9));
    settle(&mut manager);
    let step = manager.begin_step().unwrap();
    let mut sequence = admit_now(&mut manager, 0..9);
    assert_eq!(sequence.cached_tokens(), 8);
    let state = sequence.block(GroupId(1), 0).unwrap();
    let plan = manager.stage(&step, &mut [&mut sequence]).unwrap();
    let [copy] = plan.copies[..] else { panic!("{:?}", plan.copies) };
    assert_eq!((copy.group, copy.to.id, copy.tokens), (GroupId(1), state, BLOCK));
    assert_ne!(copy.from.id, state);
    assert_eq!(plan.batch[0].start, Start::At(8));
}

#[test]
fn h27_blocks_behind_a_window_leave_when_no_step_reads_them() {
    let mut manager = manager([group(WINDOW, 64)]);
    let group = GroupId(1);
    let mut sequence = admit(&mut manager, 0..12);
    let open = manager.begin_step().unwrap();
    assert!(manager.stage(&open, &mut [&mut sequence]).unwrap().edits.len() >= 2);
    manager.finish_step(open).unwrap();
    let all: Vec<BlockId> = (0..3).map(|at| sequence.block(group, at).unwrap()).collect();
    // The next step begins behind 12 tokens, but the first one is in flight, and could fail.
    manager.commit(&mut sequence, 1, &[12]).unwrap();
    go_on_staged(&mut manager, &mut sequence, 1);
    assert_eq!(row(&manager, 1, &sequence, 4), [true; 4]);
    complete(&mut manager, 1, Outcome::Done);
    manager.commit(&mut sequence, 2, &[13]).unwrap();
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    // Token 12, of the step in flight, reads from token 7 on.
    let plan = staged(&mut manager, &mut [&mut sequence]);
    assert_eq!(row(&manager, 1, &sequence, 4), [false, true, true, true]);
    assert_eq!(sequence.block(group, 0), None);
    assert_eq!(sequence.block(group, 1), Some(all[1]));
    let edit = plan.edits.iter().find(|edit| edit.group == group).unwrap();
    assert_eq!((edit.first, edit.count), (0, 1));
    // A worker's table has them no more, and needs them no more.
    let mut replica = Replica::new(256, [(GroupKind::Full, 2048), (WINDOW, 64)]).unwrap();
    let mut snapshot = manager.snapshot();
    snapshot.step = plan.after;
    replica.restore(&snapshot, &[u64::MAX; 8]).unwrap();
    replica.check(&plan, &[(BLOCK, 64), (BLOCK, 64)]).unwrap();
    assert_eq!(replica.row(group, sequence.row().unwrap()).unwrap()[0], TableEntry::NONE);
    let mut bytes = Vec::new();
    snapshot.to_bytes(&mut bytes);
    assert_eq!(Message::from_bytes(&bytes).unwrap(), Message::Snapshot(snapshot));
    // Nobody is given the block before the step in whose plan it left is complete.
    let free = |manager: &Manager| manager.pool(group).unwrap().claimable();
    let before = free(&manager);
    complete(&mut manager, 2, Outcome::Done);
    assert_eq!(free(&manager), before);
    complete(&mut manager, 3, Outcome::Done);
    assert_eq!(free(&manager), before + 1);
}

#[test]
fn a_long_prompt_needs_a_window_and_a_chunk() {
    // 6 tokens of window and a chunk of 8, twice: the blocks of the first are free when its step is complete.
    let mut manager = manager([group(WINDOW, 6)]);
    let mut sequence = {
        let mut requests = [Request::new((0..160).collect())];
        admitted(manager.ask_all(&mut requests, 8).pop().unwrap())
    };
    assert_eq!((sequence.next(), sequence.block_count(GroupId(1))), (8, 2));
    let mut steps = 0;
    loop {
        step(&mut manager, &mut [&mut sequence]);
        steps += 1;
        if sequence.to_compute() == 0 {
            break;
        }
        manager.reserve(&mut sequence, 8).unwrap().given().unwrap();
    }
    assert_eq!((steps, sequence.resolved()), (20, 160));
    // A chunk is as long as there is room for.
    drop(sequence);
    settle(&mut manager);
    let sequence = admit(&mut manager, 1000..1160);
    assert_eq!(sequence.next(), 24);
}

#[test]
fn all_groups_have_room_or_nothing_is_taken() {
    let mut manager = manager([group(GroupKind::Full, 3)]);
    let before = (manager.first_pool().claimable(), manager.free_rows());
    let mut requests = [Request::new((0..16).collect())];
    assert!(matches!(
        manager.ask_all(&mut requests, u64::MAX)[..],
        [Answer::Refused(AdmitError::NeverFits { blocks: 4, capacity: 3 })]
    ));
    let mut held = computed(&mut manager, 0..8);
    let mut requests = [Request::new((100..108).collect())];
    let answers = manager.ask_all(&mut requests, u64::MAX);
    let [Answer::NoRoom(missing)] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(missing.group, GroupId(1));
    let reason = ClaimError::Exhausted { requested: 2, claimable: 1, retiring: 0 };
    assert_eq!(missing.reason, reason);
    assert_eq!(
        (manager.first_pool().claimable(), manager.free_rows()),
        (before.0 - 2, before.1 - 1)
    );
    manager.commit(&mut held, 1, &[8]).unwrap();
    let missing = common::lacking(manager.reserve(&mut held, 5));
    assert_eq!(missing.group, GroupId(1));
    assert_eq!(manager.first_pool().claimable(), before.0 - 2);
    assert_eq!(manager.reserve(&mut held, 4).unwrap().given().unwrap().blocks, 2);
}

#[test]
fn a_state_does_not_take_ids_back() {
    let mut manager = manager([group(STATE, 16)]);
    let mut sequence = computed_in_chunks(&mut manager, 0..10);
    manager.commit(&mut sequence, 2, &[10]).unwrap();
    let drafts = manager.reserve(&mut sequence, 3).unwrap_err();
    assert_eq!(drafts, ReserveError::Drafts { drafts: 2, max: 0 });
    // The next step is staged before the id of the last is known, and the engine stops at that one.
    go_on(&mut manager, &mut sequence, 1);
    go_on(&mut manager, &mut sequence, 1);
    assert_eq!(manager.commit(&mut sequence, 3, &[11]).unwrap(), Committed::Taken);
    let redo = manager.commit(&mut sequence, 4, &[]).unwrap();
    assert_eq!(redo, Committed::Redo { from: 8 }, "behind the checkpoint");
    assert_eq!((sequence.known(), sequence.resolved()), (12, 8));
    assert_eq!(manager.truncate(&mut sequence, 7).unwrap(), 0, "no state is behind 4 tokens");
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |further: Vec<GroupOptions>| {
        Manager::new(with_groups(options(8, 0), further)).unwrap_err().to_string()
    };
    let odd = GroupOptions { block_tokens: 6, ..group(GroupKind::Full, 8) };
    assert_eq!(refused(vec![odd]), "6 tokens of group 1 are not a multiple of 4");
    let state = group(GroupKind::State { checkpoint_tokens: 6, drafts: 0 }, 8);
    assert_eq!(refused(vec![state]), "6 tokens of group 1 are not a multiple of 4");
    let none = group(GroupKind::Window { tokens: 0, sinks: 1 }, 8);
    assert_eq!(refused(vec![none]), "a window's tokens of group 1 is 0");
    let unnamed = group(GroupKind::State { checkpoint_tokens: 0, drafts: 0 }, 8);
    assert_eq!(refused(vec![unnamed]), "checkpoint_tokens of group 1 is 0");
    let many = vec![group(GroupKind::Full, 1); 64];
    assert_eq!(refused(many), "65 groups of layers, where 1 to 64 are possible");
    let none = Manager::new(ManagerOptions { groups: Vec::new(), ..options(8, 0) });
    assert_eq!(none.unwrap_err().to_string(), "0 groups of layers, where 1 to 64 are possible");
    // What a worker knows of the groups.
    let refused = |groups: &[(GroupKind, u32)]| {
        Replica::new(4, groups.iter().copied()).unwrap_err().to_string()
    };
    let none = GroupKind::Window { tokens: 0, sinks: 1 };
    assert_eq!(refused(&[(GroupKind::Full, 4), (none, 4)]), "a window's tokens of group 1 is 0");
    assert_eq!(
        refused(&[(GroupKind::Full, 4); 65]),
        "65 groups of layers, where 1 to 64 are possible"
    );
}

#[test]
fn a_claim_that_cannot_succeed_in_all_groups_evicts_nothing() {
    let further = [group(GroupKind::Full, 4)];
    let mut manager = made(with_groups(options(6, 0), further));
    let mut held = computed(&mut manager, 0..8);
    cache_prompt(&mut manager, 100..108);
    let _other = computed(&mut manager, 200..208);
    manager.commit(&mut held, 1, &[8]).unwrap();
    let missing = common::lacking(manager.reserve(&mut held, 5));
    assert_eq!(missing.group, GroupId(1));
    assert_eq!(manager.first_pool().counters().evicted, 0);
}

#[test]
fn h26_a_state_of_a_failed_step_is_not_gone_on_from() {
    let groups = vec![group(STATE, 8)];
    let mut manager = made(ManagerOptions { groups, ..options(8, 0) });
    let mut first = admit(&mut manager, 0..9);
    staged(&mut manager, &mut [&mut first]);
    let mut second = admit_now(&mut manager, 0..9);
    assert_eq!(second.cached_tokens(), 8, "the step that writes it is in flight");
    complete(&mut manager, 1, Outcome::Failed);
    let redo = manager.reserve(&mut second, 1).unwrap_err();
    assert_eq!(redo, ReserveError::Sequence(SequenceError::Redo { from: 0 }));
}

#[test]
fn h26_a_suspended_state_of_a_failed_step_does_not_come_back() {
    let pool = PoolConfig { secondary_blocks: 8, ..PoolConfig::primary_only(8) };
    let further = [GroupOptions { pool, ..group(STATE, 8) }];
    let mut manager = made(with_groups(options(16, 8), further));
    let mut sequence = admit(&mut manager, 0..10);
    step(&mut manager, &mut [&mut sequence]);
    go_on_staged(&mut manager, &mut sequence, 2);
    manager.commit(&mut sequence, 2, &[10]).unwrap();
    manager.suspend(&mut sequence).unwrap();
    assert_eq!(sequence.resolved(), 10);
    complete(&mut manager, 2, Outcome::Failed);
    settle(&mut manager);
    assert_eq!(manager.resume(&mut sequence).unwrap().given().unwrap(), 8);
    let open = manager.begin_step().unwrap();
    let plan = manager.stage(&open, &mut []).unwrap();
    let copies = plan.copies.iter().filter(|copy| copy.group == GroupId(1));
    let from: Vec<_> = copies.map(|copy| copy.from.tier).collect();
    assert_eq!(from, [Tier::Primary], "the checkpoint is gone on from");
}

#[test]
fn h26_gone_places_stay_gone_in_host_memory() {
    // Nothing of the sequence has a name, since the weights changed before it was staged. Of 27 tokens it keeps
    // 5 sinks and a window of 6: blocks 0, 1, 5 and 6 of 7, which is all that there is in host memory.
    let kind = GroupKind::Window { tokens: 6, sinks: 5 };
    let pool = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(7) };
    let further = [GroupOptions { pool, ..group(kind, 7) }];
    let mut manager = made(with_groups(options(16, 16), further));
    let mut sequence = admit(&mut manager, 0..26);
    manager.reset();
    step(&mut manager, &mut [&mut sequence]);
    decode(&mut manager, &mut sequence, 1, 26);
    let kept = [true, true, false, false, false, true, true];
    assert_eq!(row(&manager, 1, &sequence, 7), kept);
    manager.commit(&mut sequence, 2, &[27]).unwrap();
    manager.suspend(&mut sequence).unwrap();
    settle(&mut manager);
    // Three of the window's seven blocks are another's.
    let _other = admit(&mut manager, 100..112);
    assert_eq!(manager.resume(&mut sequence).unwrap().given().unwrap(), 27);
    assert_eq!(row(&manager, 1, &sequence, 7), kept);
    let plan = step(&mut manager, &mut []);
    let back = plan.copies.iter().filter(|copy| copy.group == GroupId(1));
    let back: Vec<_> = back.map(|copy| copy.to.id).collect();
    let blocks = [0, 1, 5, 6].map(|place| sequence.block(GroupId(1), place).unwrap());
    assert_eq!(back, blocks, "each place has its own content");
    // Token 20 reads from token 15 on, which it has no more.
    assert_eq!(manager.truncate(&mut sequence, 20).unwrap(), 0);
}

#[test]
fn h26_what_is_left_in_host_memory_is_enough_to_go_on() {
    // As above, but the last step failed after the sequence was suspended, and had moved the window.
    let kind = GroupKind::Window { tokens: 6, sinks: 5 };
    let pool = PoolConfig { secondary_blocks: 8, ..PoolConfig::primary_only(16) };
    let further = [GroupOptions { pool, ..group(kind, 16) }];
    let mut manager = made(with_groups(options(16, 16), further));
    let mut sequence = admit(&mut manager, 0..26);
    manager.reset();
    step(&mut manager, &mut [&mut sequence]);
    manager.commit(&mut sequence, 1, &[26]).unwrap();
    go_on_staged(&mut manager, &mut sequence, 1);
    manager.commit(&mut sequence, 2, &[27]).unwrap();
    manager.suspend(&mut sequence).unwrap();
    complete(&mut manager, 2, Outcome::Failed);
    settle(&mut manager);
    assert_eq!(manager.resume(&mut sequence).unwrap().given().unwrap(), 26);
    assert_eq!(row(&manager, 1, &sequence, 7), [true, true, false, false, false, true, true]);
}

#[test]
fn a_tenant_that_may_not_claim_in_all_groups_evicts_nothing() {
    let further = [group(GroupKind::Full, 64)];
    let mut manager = made(with_groups(options(6, 0), further));
    let tenant = manager.add_tenant().unwrap();
    manager.bound(GroupId(1), tenant, 2);
    // All blocks of the first group have content.
    drop(computed(&mut manager, 100..116));
    let asked = |ids: Range<u32>| {
        let mut request = Request::new(ids.collect());
        request.tenant = tenant;
        request
    };
    let mut held = admitted(ask(&mut manager, asked(0..8)));
    step(&mut manager, &mut [&mut held]);
    settle(&mut manager);
    let is_bound = |reason: &ClaimError| matches!(reason, ClaimError::Tenant(_));
    let answer = ask(&mut manager, asked(200..204));
    let Answer::NoRoom(missing) = answer else { panic!("{answer:?}") };
    assert!(missing.group == GroupId(1) && is_bound(&missing.reason), "{missing}");
    manager.commit(&mut held, 1 + 1, &[8]).unwrap();
    let missing = common::lacking(manager.reserve(&mut held, 1));
    assert!(missing.group == GroupId(1) && is_bound(&missing.reason), "{missing}");
    assert_eq!(manager.first_pool().counters().evicted, 0);
    assert_eq!(manager.first_pool().stats().primary.cached, 4);
}

#[test]
fn a_suspension_that_has_no_room_in_all_groups_evicts_nothing() {
    let further = [group(GroupKind::Full, 16)];
    let mut manager = made(with_groups(options(4, 2), further));
    // Two blocks of the first group are cached in host memory, which has none of the second.
    drop(computed(&mut manager, 100..108));
    cache_prompt(&mut manager, 200..216);
    let mut sequence = computed(&mut manager, 0..6);
    let cached = |manager: &Manager| manager.first_pool().stats().secondary.cached;
    assert_eq!(cached(&manager), 2);
    manager.commit(&mut sequence, 4, &[6]).unwrap();
    let refused = manager.suspend(&mut sequence).unwrap_err();
    let SuspendError::NoRoom(missing) = refused else { panic!("{refused:?}") };
    assert_eq!((missing.group, cached(&manager)), (GroupId(1), 2));
}

#[test]
fn a_budget_is_charged_with_what_a_step_computes() {
    // Each prompt's first chunk ends at the checkpoint behind 8 tokens.
    let mut manager = manager([group(STATE, 16)]);
    let mut requests = [0, 100, 200].map(|first| Request::new((first..first + 40).collect()));
    let answers = manager.ask_all(&mut requests, 20);
    let chunks = answers.into_iter().map(|answer| admitted(answer).next());
    assert_eq!(chunks.collect::<Vec<_>>(), [8, 8, 4]);
}

#[test]
fn a_twin_names_the_checkpoint_that_its_first_step_ends_at() {
    let mut manager = manager([group(STATE, 16)]);
    // Of a prompt of 20 tokens, 10 are computed. The next checkpoint is behind 16.
    let mut sequence = computed(&mut manager, 0..20);
    go_on(&mut manager, &mut sequence, 2);
    let mut twin = manager.fork(&mut sequence).unwrap();
    drop(sequence);
    manager.reserve(&mut twin, 10).unwrap().given().unwrap();
    assert_eq!((twin.resolved(), twin.next()), (10, 6));
    finish(&mut manager, twin);
    assert_eq!(hit(&mut manager, 17), 16);
}

#[test]
fn a_state_that_is_its_own_takes_no_drafts() {
    let mut manager = manager([group(STATE, 8)]);
    let mut sequence = computed_in_chunks(&mut manager, 0..5);
    manager.commit(&mut sequence, 2, &[5]).unwrap();
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    // The blocks of the full group reach to token 8, and so does the state's next checkpoint.
    let drafts = manager.reserve(&mut sequence, 3);
    assert_eq!(drafts, Err(ReserveError::Drafts { drafts: 2, max: 0 }));
    assert_eq!(manager.reserve(&mut sequence, 1).unwrap().given().unwrap().blocks, 0);
}

#[test]
fn a_block_is_named_when_its_own_group_has_filled_it() {
    let mut manager = manager([GroupOptions { block_tokens: 2 * BLOCK, ..group(WINDOW, 8) }]);
    let _sequence = computed_in_chunks(&mut manager, 0..BLOCK + 1);
    assert_eq!([0, 1].map(|group| manager.named(GroupId(group))), [1, 0]);
}

/// Two prompts of seven full blocks are cached, and all 16 blocks but two.
fn two_cached_prompts() -> Manager {
    let further = [group(WINDOW, 64)];
    let mut manager = made(with_groups(options(16, 0), further));
    for first in [0, 1000] {
        drop(computed_in_chunks(&mut manager, first..first + 30));
        settle(&mut manager);
    }
    manager
}

#[test]
fn what_others_have_found_takes_no_room_from_the_first() {
    let mut manager = two_cached_prompts();
    let open = manager.begin_step().unwrap();
    let mut requests: Vec<_> =
        [2000..2040, 0..31, 1000..1031].map(|ids| Request::new(ids.collect())).into();
    let mut answers = manager.ask_all(&mut requests, u64::MAX).into_iter();
    // Ten blocks, of which eight are evicted from what the others would find.
    let mut first = admitted(answers.next().unwrap());
    assert_eq!((first.cached_tokens(), first.block_count(GroupId(0))), (0, 10));
    assert!(
        matches!(answers.next(), Some(Answer::NoRoom(_))),
        "the second has too few blocks left"
    );
    manager.stage(&open, &mut [&mut first]).unwrap();
    manager.finish_step(open).unwrap();
}

#[test]
fn the_first_evicts_what_nobody_has_found() {
    let mut manager = two_cached_prompts();
    // Six blocks: two are empty. The prompt that was used longest ago is what the second request finds.
    let mut requests: Vec<_> = [2000..2024, 0..31].map(|ids| Request::new(ids.collect())).into();
    let sequences: Vec<_> =
        manager.ask_all(&mut requests, u64::MAX).into_iter().map(admitted).collect();
    assert_eq!(sequences.iter().map(Sequence::cached_tokens).collect::<Vec<_>>(), [0, 28]);
}

#[test]
fn a_longer_prefix_that_one_group_cannot_serve_takes_no_room() {
    // The only checkpoint is behind the last block, so a shorter prompt finds nothing that it can use.
    let further = [group(STATE, 2)];
    let mut manager = made(with_groups(options(8, 0), further));
    drop(computed_in_chunks(&mut manager, 0..30));
    settle(&mut manager);
    let _open = manager.begin_step().unwrap();
    assert_eq!(manager.named(GroupId(0)), 7, "they are cached");
    let sequence = admit_now(&mut manager, 0..28);
    assert_eq!(sequence.cached_tokens(), 0);
}

#[test]
fn a_resumption_takes_no_room_that_it_cannot_use() {
    let further = [group(WINDOW, 12)];
    let mut manager = made(with_groups(options(8, 0), further));
    let mut sequence = sampled(&mut manager, 0..32, 32);
    manager.suspend(&mut sequence).unwrap();
    settle(&mut manager);
    // The window is lost, so that none of the eight blocks of the other group is of use.
    for blocks in [0, 12] {
        manager.set_budget(GroupId(1), Tier::Primary, blocks).unwrap();
        settle(&mut manager);
    }
    assert_eq!(manager.named(GroupId(0)), 8, "they are cached");
    let _open = manager.begin_step().unwrap();
    assert_eq!(manager.resume(&mut sequence).unwrap().given().unwrap(), 0);
    assert_eq!(
        manager.reserve(&mut sequence, 32).unwrap().given().unwrap().blocks,
        16,
        "all eight of both groups"
    );
}

/// A running sequence of two blocks, and a suspended one that needs three: two are cached, and two are to be had in
/// the second group.
fn crowded() -> (Manager, Sequence, Sequence) {
    let pool = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(4) };
    let further = [GroupOptions { pool, ..group(GroupKind::Full, 4) }];
    let mut manager = made(with_groups(options(8, 4), further));
    let mut asleep = sampled(&mut manager, 0..10, 10);
    manager.suspend(&mut asleep).unwrap();
    settle(&mut manager);
    let running = computed(&mut manager, 100..108);
    settle(&mut manager);
    (manager, running, asleep)
}

fn claimable(manager: &Manager) -> [usize; 2] {
    [GroupId(0), GroupId(1)].map(|group| manager.pool(group).unwrap().claimable())
}

#[test]
fn a_resume_that_is_refused_takes_no_room_from_running_sequences() {
    let (mut manager, mut running, mut asleep) = crowded();
    let open = manager.begin_step().unwrap();
    assert_eq!(claimable(&manager), [6, 2]);
    assert_eq!(common::lacking(manager.resume(&mut asleep)).group, GroupId(1));
    assert_eq!(claimable(&manager), [6, 2], "what it found can be claimed in this step");
    manager.commit(&mut running, 3, &[1]).unwrap();
    manager.reserve(&mut running, 8).unwrap().given().unwrap();
    manager.stage(&open, &mut [&mut running]).unwrap();
    manager.finish_step(open).unwrap();
}

#[test]
fn an_admission_that_is_refused_takes_no_room_from_running_sequences() {
    let (mut manager, _running, asleep) = crowded();
    drop(asleep);
    let _open = manager.begin_step().unwrap();
    let answer = ask_now(&mut manager, 0..12);
    let Answer::NoRoom(missing) = answer else { panic!("{answer:?}") };
    assert_eq!(missing.group, GroupId(1));
    assert_eq!(claimable(&manager), [6, 2]);
}

#[test]
fn what_a_sequence_finds_again_does_not_leave_before_it_is_copied() {
    let pool = PoolConfig { secondary_blocks: 16, ..PoolConfig::primary_only(8) };
    let further = [GroupOptions { pool, ..group(WINDOW, 8) }];
    let mut manager = made(with_groups(options(64, 0), further));
    let mut sequence = computed_in_chunks(&mut manager, 0..16);
    let last = manager.completed_step();
    let last = decode(&mut manager, &mut sequence, last, 16).step;
    manager.commit(&mut sequence, last, &[17]).unwrap();
    // The window of the first eight tokens goes to host memory, from where another request has it brought.
    cache_prompt(&mut manager, 100..120);
    assert_eq!(manager.pool(GroupId(1)).unwrap().counters().offloaded, 2);
    let other = admit_now(&mut manager, 0..9);
    assert_eq!((other.cached_tokens(), other.onboarded_blocks()), (8, 2));
    assert_eq!(manager.truncate(&mut sequence, 8).unwrap(), 8);
    let refused = manager.export(sequence).unwrap_err();
    assert_eq!(refused.reason, ChangeError::Writing { step: manager.completed_step() + 1 });
    settle(&mut manager);
    assert_eq!(manager.export(refused.sequence).unwrap().blocks(GroupId(1)).len(), 2);
}

#[test]
fn a_tenant_of_another_manager_is_none_of_this_one() {
    let mut both = [0, 1].map(|_| manager([group(GroupKind::Full, 64)]));
    let [foreign, own] = both.each_mut().map(|manager| manager.add_tenant().unwrap());
    let [_, manager] = &mut both;
    let quota = TenantQuota { held_max: 1, ..TenantQuota::default() };
    for group in [GroupId(0), GroupId(1)] {
        let refused = manager.set_quota(group, foreign, Tier::Primary, quota).unwrap_err();
        let expected = BudgetError::Tenant(TenantError::Foreign { tenant: foreign });
        assert_eq!(refused, expected, "{group:?}");
        manager.set_quota(group, own, Tier::Primary, TenantQuota::default()).unwrap();
    }
    let answer = ask(manager, of(foreign, 0..4));
    assert!(!matches!(answer, Answer::Admitted(_)), "{answer:?}");
}

#[test]
fn a_hint_for_another_managers_sequence_changes_nothing() {
    let mut other = manager([group(GroupKind::Full, 64)]);
    let foreign = computed(&mut other, 0..8);
    let mut one_group = common::manager(8, 0);
    let before = computed(&mut one_group, 0..8);
    one_group.retain(&foreign, kv_pool::retention::Retention::default());
    assert_eq!(one_group.block_ids(GroupId(0), &foreign), []);
    drop(before);
}

/// A sequence of 40 tokens whose window has moved on, and names that others have given to the same blocks since: those are
/// being computed.
fn cut_back_to_pending(manager: &mut Manager) -> (Sequence, Sequence) {
    let mut first = computed_in_chunks(manager, 0..40);
    let all = manager.pool(GroupId(1)).unwrap().snapshot().blocks;
    let names: Vec<_> = all.iter().filter_map(|view| view.hash).collect();
    assert_eq!(manager.forget(&names), 10);
    let mut request = Request::new((0..40).collect());
    (request.waits, request.hit_max) = (false, 0);
    let mut second = admitted(ask(manager, request));
    let at = manager.completed_step() + 1;
    let open = manager.begin_step().unwrap();
    assert_eq!(manager.stage(&open, &mut [&mut second]).unwrap().step, at);
    manager.finish_step(open).unwrap();
    manager.commit(&mut first, at - 1, &[40]).unwrap();
    manager.reserve(&mut first, 1).unwrap().given().unwrap();
    assert_eq!(row(manager, 1, &first, 10)[..8], [false; 8]);
    assert_eq!(manager.truncate(&mut first, 24).unwrap(), 24, "its window is found again");
    assert_eq!(row(manager, 1, &first, 6), [false, false, false, false, true, true]);
    (first, second)
}

#[test]
fn a_cut_sequence_depends_on_the_steps_whose_blocks_it_found() {
    let mut manager = manager([group(WINDOW, 64)]);
    let (mut first, _second) = cut_back_to_pending(&mut manager);
    let at = manager.completed_step() + 1;
    complete(&mut manager, at, Outcome::Failed);
    manager.extend(&mut first, &[24]).unwrap_err();
    let told = manager.reserve(&mut first, 1);
    assert!(told.is_ok(), "it was told once: {told:?}");
    assert_eq!(first.resolved(), 0, "what its window was is void");
}

#[test]
fn a_window_moves_on_behind_a_cut() {
    let mut manager = manager([group(WINDOW, 64)]);
    let (mut first, _second) = cut_back_to_pending(&mut manager);
    let at = manager.completed_step() + 1;
    complete(&mut manager, at, Outcome::Done);
    let ids: Vec<u32> = (100..116).collect();
    manager.extend(&mut first, &ids).unwrap();
    for _ in 0..4 {
        go_on(&mut manager, &mut first, 4);
    }
    settle(&mut manager);
    let last = manager.last_plan().step;
    assert!(first.awaits().is_some_and(|awaits| awaits < last));
    let open = first.awaits().unwrap();
    decode(&mut manager, &mut first, open, 116);
    let expected = [vec![false; 8], vec![true; 3]].concat();
    assert_eq!(row(&manager, 1, &first, 11), expected, "token 40 reads from token 35 on");
}

#[test]
fn what_a_tenant_may_not_hold_together_is_not_pinned_in_vain() {
    // A window of ten tokens takes three blocks, and their tenant may hold two.
    let mut manager = manager([group(GroupKind::Window { tokens: 10, sinks: 0 }, 16)]);
    let tenant = manager.add_tenant().unwrap();
    let ask = |manager: &mut Manager, tenant| {
        let mut request = Request::new((0..17).collect());
        (request.tenant, request.waits, request.content.shared_tokens) = (tenant, false, u64::MAX);
        admitted(ask(manager, request))
    };
    let sequence = ask(&mut manager, tenant);
    finish(&mut manager, sequence);
    manager.bound(GroupId(1), tenant, 2);
    let _open = manager.begin_step().unwrap();
    assert_eq!(claimable(&manager)[1], 16);
    let sequence = ask(&mut manager, TenantId::NOBODY);
    assert_eq!(sequence.cached_tokens(), 8);
    assert_eq!(claimable(&manager)[1], 16 - sequence.block_count(GroupId(1)));
}
