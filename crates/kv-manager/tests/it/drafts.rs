//! Drafts of sequences with recurrent states, and draft models whose KV has an end of its own.

use crate::common::sampled;
use crate::prelude::*;

const STATE: GroupKind = GroupKind::State { checkpoint_tokens: 8, drafts: 3 };
const FURTHER: GroupId = GroupId(1);

fn group(kind: GroupKind, draft_model: bool) -> GroupOptions {
    let pool = PoolConfig { secondary_blocks: 32, ..PoolConfig::primary_only(32) };
    GroupOptions { pool, draft_model, ..common::group(kind, 0) }
}

/// Full attention, and a group of states or of a draft model.
fn manager(further: GroupOptions) -> Manager {
    made(ManagerOptions { steps_in_flight_max: 8, ..with_groups(options(64, 64), [further]) })
}

/// A sequence with states whose prompt of 5 tokens is computed, with the token behind it.
fn with_states() -> (Manager, Sequence) {
    let mut manager = manager(group(STATE, false));
    let sequence = sampled(&mut manager, 0..5, 5);
    (manager, sequence)
}

/// Stages so many tokens of the sequence, and leaves the step in flight; its row of the batch.
fn stage(manager: &mut Manager, sequence: &mut Sequence, tokens: u32) -> (u64, BatchRow) {
    let plan = go_on_staged(manager, sequence, tokens);
    (plan.step, plan.batch[0])
}

fn states(manager: &Manager, sequence: &Sequence) -> Vec<TableEntry> {
    manager.block_ids(FURTHER, sequence).to_vec()
}

#[test]
fn a_step_leaves_a_state_behind_each_draft_and_the_next_begins_with_the_accepted_one() {
    let (mut manager, mut sequence) = with_states();
    assert_eq!(sequence.block_count(FURTHER), 1);
    let (first, row) = stage(&mut manager, &mut sequence, 3);
    assert_eq!(sequence.block_count(FURTHER), 3, "one for the token, and for each draft");
    assert_eq!((row.tokens, row.drafts, row.input), (3, 2, 0));
    // Behind an open outcome, the device counts from the tokens before the drafts.
    let (second, row) = stage(&mut manager, &mut sequence, 1);
    assert_eq!(row.start, Start::Open { resolved: 6, upper: 8 });
    assert_eq!((row.tokens, row.drafts, row.input), (1, 0, 1));
    assert_eq!(manager.commit(&mut sequence, first, &[6]).unwrap(), Committed::Taken);
    assert_eq!(manager.commit(&mut sequence, second, &[7]).unwrap(), Committed::Taken);
    assert_eq!(sequence.resolved(), 7);
    // Both outcomes are known: a single token leaves its state in place.
    let (third, row) = stage(&mut manager, &mut sequence, 1);
    assert_eq!((row.start, row.input), (Start::At(7), 0));
    manager.commit(&mut sequence, third, &[8]).unwrap();
    let (fourth, row) = stage(&mut manager, &mut sequence, 4);
    assert_eq!((row.tokens, row.drafts), (4, 3));
    manager.commit(&mut sequence, fourth, &[9, 10, 11]).unwrap();
    let (_, row) = stage(&mut manager, &mut sequence, 1);
    assert_eq!((row.start, row.input), (Start::At(11), 2), "behind two drafts");
}

#[test]
fn a_checkpoint_behind_drafts_is_named_only_where_the_step_resolves_exactly_there() {
    for (ids, named) in [(&[6, 7, 8][..], true), (&[6, 7], false)] {
        let (mut manager, mut sequence) = with_states();
        let (first, row) = stage(&mut manager, &mut sequence, 3);
        let before = states(&manager, &sequence);
        assert_eq!((row.tokens, row.drafts), (3, 2), "up to the checkpoint behind 8 tokens");
        manager.commit(&mut sequence, first, ids).unwrap();
        let pool = manager.pool(FURTHER).unwrap();
        let views = pool.snapshot().blocks;
        // One is behind the prompt's 4 tokens.
        assert_eq!(views.iter().filter(|view| view.hash.is_some()).count(), 1 + usize::from(named));
        if named {
            // The state behind both drafts is the first entry now, and is copied before it is written.
            let now = states(&manager, &sequence);
            assert_eq!(now[..3], [before[2], before[0], before[1]]);
            assert!(manager.reserve(&mut sequence, 1).unwrap().given().unwrap().copied);
        }
    }
}

#[test]
fn more_drafts_than_a_state_has_room_for_are_refused() {
    let (mut manager, mut sequence) = with_states();
    // Two tokens are left before the checkpoint; behind it, more drafts are asked for than there is room for.
    let (first, _) = stage(&mut manager, &mut sequence, 3);
    manager.commit(&mut sequence, first, &[6, 7, 8]).unwrap();
    let refused = manager.reserve(&mut sequence, 5).unwrap_err();
    assert_eq!(refused, ReserveError::Drafts { drafts: 4, max: 3 });
    manager.reserve(&mut sequence, 4).unwrap().given().unwrap();
}

#[test]
fn a_twin_begins_with_the_accepted_state() {
    let (mut manager, mut sequence) = with_states();
    let (first, _) = stage(&mut manager, &mut sequence, 3);
    let before = states(&manager, &sequence);
    manager.commit(&mut sequence, first, &[6, 7]).unwrap();
    let twin = manager.fork(&mut sequence).unwrap();
    assert_eq!(states(&manager, &twin)[0], before[1], "the one behind the accepted draft");
    assert_eq!(states(&manager, &sequence)[..3], [before[1], before[0], before[2]]);
}

#[test]
fn an_end_that_the_engine_ignores_behind_drafts_goes_back_to_a_checkpoint() {
    let (mut manager, mut sequence) = with_states();
    let (first, _) = stage(&mut manager, &mut sequence, 3);
    let (second, _) = stage(&mut manager, &mut sequence, 1);
    manager.commit(&mut sequence, first, &[6]).unwrap();
    // What the second step has computed is behind a token that is not the sequence's.
    let from = 4;
    let taken = manager.commit(&mut sequence, second, &[]).unwrap();
    assert_eq!(taken, Committed::Redo { from });
    let (_, row) = stage(&mut manager, &mut sequence, 1);
    assert_eq!((row.start, row.input), (Start::At(from), 0));
}

/// A draft model beside, and a sequence whose prompt of `tokens` tokens is computed by the model alone.
fn with_draft_model(tokens: u32) -> (Manager, Sequence) {
    let mut manager = manager(group(GroupKind::Full, true));
    let sequence = sampled(&mut manager, 0..tokens, tokens);
    (manager, sequence)
}

/// A step in which the model computes the next token and the draft model `drafts` tokens.
fn draft(manager: &mut Manager, sequence: &mut Sequence, drafts: u32) -> (u64, Vec<BatchRow>) {
    manager.reserve(sequence, 1).unwrap().given().unwrap();
    manager.reserve_draft(sequence, drafts).unwrap().given().unwrap();
    let plan = staged(manager, &mut [sequence]);
    (plan.step, plan.draft_batch)
}

/// The same step, complete, with the id that came out of it, and where the draft model's KV ends.
fn drafted(manager: &mut Manager, sequence: &mut Sequence, drafts: u32, id: u32, end: u64) -> u64 {
    let (at, _) = draft(manager, sequence, drafts);
    manager.commit(sequence, at, &[id]).unwrap();
    manager.commit_draft(sequence, at, end).unwrap();
    complete(manager, at, Outcome::Done);
    at
}

#[test]
fn h26_a_draft_models_blocks_are_named_up_to_its_own_end() {
    let (mut manager, mut sequence) = with_draft_model(18);
    assert_eq!((sequence.resolved(), sequence.draft_end()), (18, 0));
    assert_eq!((manager.named(GroupId(0)), manager.named(FURTHER)), (4, 0));
    // It catches up in part, from its own end on.
    let (first, rows) = draft(&mut manager, &mut sequence, 10);
    let row = BatchRow { row: Row::new(0), start: Start::At(0), tokens: 10, drafts: 0, input: 0 };
    assert_eq!(rows, [row]);
    complete(&mut manager, first, Outcome::Done);
    assert_eq!(manager.named(FURTHER), 0, "nobody has said that it has");
    assert_eq!(manager.commit_draft(&mut sequence, first, 10).unwrap(), Committed::Taken);
    assert_eq!((sequence.draft_end(), manager.named(FURTHER)), (10, 2));
    // A hit is what both can serve.
    let other = admit_now(&mut manager, 0..18);
    assert_eq!((other.cached_tokens(), other.draft_end()), (8, 8));
}

#[test]
fn a_step_without_drafts_leaves_the_draft_model_where_it_was() {
    let (mut manager, mut sequence) = with_draft_model(6);
    drafted(&mut manager, &mut sequence, 6, 7, 6);
    let plan = go_on(&mut manager, &mut sequence, 1);
    assert!(plan.draft_batch.is_empty());
    manager.commit(&mut sequence, plan.step, &[8]).unwrap();
    assert_eq!((sequence.resolved(), sequence.draft_end()), (8, 6));
    // It may write ahead of the model, for drafts of the next step.
    let (_, rows) = draft(&mut manager, &mut sequence, 12);
    assert_eq!((rows[0].start, rows[0].tokens), (Start::At(6), 12));
    assert_eq!(sequence.block_count(FURTHER), 5);
    assert_eq!(sequence.block_count(GroupId(0)), 3);
}

#[test]
fn what_a_failed_step_has_drafted_is_taken_back() {
    let (mut manager, mut sequence) = with_draft_model(10);
    let (first, _) = draft(&mut manager, &mut sequence, 6);
    manager.commit(&mut sequence, first, &[11]).unwrap();
    manager.commit_draft(&mut sequence, first, 6).unwrap();
    assert_eq!((sequence.draft_end(), manager.named(FURTHER)), (6, 1));
    complete(&mut manager, first, Outcome::Failed);
    assert_eq!(manager.named(FURTHER), 0);
    let refused = manager.reserve(&mut sequence, 1).unwrap_err();
    assert_eq!(refused, ReserveError::Sequence(SequenceError::Redo { from: 10 }));
    assert_eq!(sequence.draft_end(), 0);
    // What was drafted in the void step is no more than stale.
    assert_eq!(manager.commit_draft(&mut sequence, first, 6).unwrap(), Committed::Stale);
    let (second, rows) = draft(&mut manager, &mut sequence, 8);
    assert_eq!(rows[0].start, Start::At(0));
    manager.commit_draft(&mut sequence, second, 8).unwrap();
    complete(&mut manager, second, Outcome::Done);
    assert_eq!(manager.named(FURTHER), 2);
}

#[test]
fn a_step_that_fails_behind_a_suspension_takes_its_drafts_back() {
    let (mut manager, mut sequence) = with_draft_model(100);
    let (first, _) = draft(&mut manager, &mut sequence, 50);
    manager.commit_draft(&mut sequence, first, 50).unwrap();
    manager.commit(&mut sequence, first, &[101]).unwrap();
    manager.suspend(&mut sequence).unwrap();
    complete(&mut manager, first, Outcome::Failed);
    assert_eq!(manager.resume(&mut sequence).unwrap().given().unwrap(), 100);
    assert_eq!((sequence.draft_end(), manager.named(FURTHER)), (0, 0));
    let copies = step(&mut manager, &mut []).copies;
    let mut back = copies.iter().filter(|copy| copy.to.tier == Tier::Primary);
    assert!(back.all(|copy| copy.group != FURTHER), "the host's copy of its 13th block is void");
    let (second, rows) = draft(&mut manager, &mut sequence, 60);
    assert_eq!((rows[0].start, rows[0].tokens), (Start::At(0), 60));
    manager.commit(&mut sequence, second, &[101]).unwrap();
    manager.commit_draft(&mut sequence, second, 60).unwrap();
    complete(&mut manager, second, Outcome::Done);
    assert_eq!((sequence.resolved(), manager.named(FURTHER)), (101, 15));
}

#[test]
fn a_later_step_that_begins_before_the_end_can_spoil_it() {
    let (mut manager, mut sequence) = with_draft_model(10);
    let (first, _) = draft(&mut manager, &mut sequence, 6);
    let (second, rows) = draft(&mut manager, &mut sequence, 8);
    assert_eq!(rows[0].start, Start::At(0), "the first is not committed");
    manager.commit(&mut sequence, first, &[11]).unwrap();
    manager.commit_draft(&mut sequence, first, 6).unwrap();
    complete(&mut manager, first, Outcome::Done);
    assert_eq!(manager.named(FURTHER), 1);
    complete(&mut manager, second, Outcome::Failed);
    assert_eq!(manager.named(FURTHER), 0, "it has written the same blocks");
}

#[test]
fn a_cut_a_twin_and_a_suspension_carry_the_draft_models_end() {
    let (mut manager, mut sequence) = with_draft_model(14);
    let first = drafted(&mut manager, &mut sequence, 9, 15, 7);
    let mut twin = manager.fork(&mut sequence).unwrap();
    assert_eq!((twin.draft_end(), twin.block_count(FURTHER)), (7, 2));
    // What lies behind the end in the block that both hold is not copied with it.
    assert_eq!(manager.commit_draft(&mut sequence, first, 9).unwrap(), Committed::Stale);
    manager.reserve_draft(&mut twin, 1).unwrap().given().unwrap();
    assert_ne!(twin.block(FURTHER, 1), sequence.block(FURTHER, 1), "copied before a write");
    manager.suspend(&mut twin).unwrap();
    step(&mut manager, &mut []);
    assert_eq!(manager.resume(&mut twin).unwrap().given().unwrap(), 15);
    assert_eq!(twin.draft_end(), 7);
    let copies = step(&mut manager, &mut []).copies;
    let back = copies.iter().filter(|copy| copy.group == FURTHER && copy.to.tier == Tier::Primary);
    assert_eq!(back.map(|copy| copy.tokens).collect::<Vec<_>>(), [3], "the tokens up to its end");
    assert_eq!(manager.truncate(&mut twin, 5).unwrap(), 5);
    assert_eq!((twin.draft_end(), twin.block_count(FURTHER)), (5, 2));
    // Only full blocks of it are copied out of a process whole, and the end goes along.
    let export = manager.export(twin).unwrap();
    assert_eq!((export.tokens(), export.draft_tokens()), (5, 5));
}

#[test]
fn ends_of_a_draft_model_that_cannot_be_are_refused() {
    let (mut manager, mut sequence) = with_draft_model(6);
    assert_eq!(
        manager.commit_draft(&mut sequence, 1, 4).unwrap_err(),
        DraftError::NotStaged { step: 1, last: 0 }
    );
    let (first, _) = draft(&mut manager, &mut sequence, 8);
    let refused = manager.commit_draft(&mut sequence, first, 8).unwrap_err();
    assert_eq!(refused, DraftError::Beyond { end: 8, certain: 7 }, "the next is a draft");
    manager.commit_draft(&mut sequence, first, 7).unwrap();
    let refused = manager.commit_draft(&mut sequence, first, 6).unwrap_err();
    assert_eq!(refused, DraftError::Back { end: 6, before: 7 });
    let refused = manager.reserve_draft(&mut sequence, u32::MAX).unwrap_err();
    assert!(matches!(refused, ReserveError::TooLong { max: 64, .. }), "{refused}");
    let mut plain = common::manager(8, 0);
    let mut other = admit(&mut plain, 0..3);
    assert_eq!(plain.commit_draft(&mut other, 1, 1).unwrap_err(), DraftError::NoDraftModel);
    let further = [group(GroupKind::Window { tokens: 4, sinks: 0 }, true)];
    let refused = Manager::new(with_groups(options(8, 0), further)).unwrap_err();
    assert!(matches!(refused, OptionsError::DraftKind { group: FURTHER, .. }), "{refused}");
}

#[test]
fn what_arrives_of_a_draft_model_is_what_was_said() {
    for (said, end) in [(None, 0), (Some(5), 5)] {
        let mut manager = manager(group(GroupKind::Full, true));
        let mut request = Request::new((0..12).collect());
        let (answer, adoption) = adopt(&mut manager, &mut request, 9);
        let (mut sequence, mut adoption) = (admitted(answer), adoption.unwrap());
        said.iter().for_each(|&tokens| adoption.set_draft_tokens(tokens));
        let all = adoption.block_count();
        step(&mut manager, &mut []);
        assert_eq!(manager.adopted(&mut sequence, adoption, all).unwrap(), 9);
        assert_eq!((sequence.draft_end(), manager.named(FURTHER)), (end, (end / 4) as usize));
    }
}

/// What the draft model has computed of a step is complete, and no call has looked at it yet. Then comes the cut.
fn cut_behind_a_draft(manager: &mut Manager, sequence: &mut Sequence) -> u64 {
    let (at, _) = draft(manager, sequence, 18);
    complete(manager, at, Outcome::Done);
    manager.commit(sequence, at, &[19]).unwrap();
    // A reservation that needs blocks looks at what is complete.
    manager.reserve(sequence, 8).unwrap().given().unwrap();
    assert_eq!(manager.truncate(sequence, 8).unwrap(), 8);
    assert_eq!((sequence.draft_end(), sequence.block_count(FURTHER)), (0, 0));
    at
}

#[test]
fn a_late_draft_result_of_a_cut_step_is_stale() {
    let (mut manager, mut sequence) = with_draft_model(18);
    let at = cut_behind_a_draft(&mut manager, &mut sequence);
    assert_eq!(manager.commit_draft(&mut sequence, at, 8), Ok(Committed::Stale));
    assert_eq!(sequence.draft_end(), 0);
    // A step that computes nothing by the draft model makes it no younger.
    manager.extend(&mut sequence, &[80, 81]).unwrap();
    go_on(&mut manager, &mut sequence, 2);
    assert_eq!(manager.commit_draft(&mut sequence, at, 8), Ok(Committed::Stale));
    // And one that does is taken.
    let last = sequence.awaits().unwrap();
    manager.commit(&mut sequence, last, &[82]).unwrap();
    let (next, _) = draft(&mut manager, &mut sequence, 10);
    assert_eq!(manager.commit_draft(&mut sequence, at, 8), Ok(Committed::Stale));
    assert_eq!(manager.commit_draft(&mut sequence, next, 10), Ok(Committed::Taken));
}

#[test]
fn draft_blocks_that_nobody_has_written_are_found_by_no_name() {
    let (mut manager, mut sequence) = with_draft_model(18);
    let at = cut_behind_a_draft(&mut manager, &mut sequence);
    let _ = manager.commit_draft(&mut sequence, at, 8).unwrap();
    manager.extend(&mut sequence, &[80, 81]).unwrap();
    manager.reserve(&mut sequence, 2).unwrap().given().unwrap();
    assert_eq!(sequence.block_count(FURTHER), 3, "blocks of others, perhaps");
    let next = step(&mut manager, &mut [&mut sequence]);
    assert!(next.draft_batch.is_empty(), "the draft model computes nothing in these blocks");
    drop(sequence);
    assert_eq!(manager.named(FURTHER), 0);
}

#[test]
fn a_late_draft_result_of_a_suspended_step_is_stale() {
    let (mut manager, mut sequence) = with_draft_model(18);
    let (at, _) = draft(&mut manager, &mut sequence, 18);
    complete(&mut manager, at, Outcome::Done);
    manager.commit(&mut sequence, at, &[19]).unwrap();
    manager.reserve(&mut sequence, 8).unwrap().given().unwrap();
    manager.suspend(&mut sequence).unwrap();
    step(&mut manager, &mut []);
    manager.resume(&mut sequence).unwrap().given().unwrap();
    assert_eq!(manager.commit_draft(&mut sequence, at, 18), Ok(Committed::Stale));
    assert_eq!(sequence.draft_end(), 0);
}

#[test]
fn a_worker_computes_drafts_only_in_blocks_that_the_draft_models_groups_have() {
    let (mut manager, mut sequence) = with_draft_model(6);
    let widths = manager.snapshot().tables.into_iter().map(|table| (GroupKind::Full, table.width));
    let mut replica = Replica::new(256, widths).unwrap();
    replica.restore(&manager.snapshot(), &[u64::MAX; 8]).unwrap();
    // It writes ahead of the model.
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    manager.reserve_draft(&mut sequence, 18).unwrap().given().unwrap();
    let plan = staged(&mut manager, &mut [&mut sequence]);
    let memory = [(BLOCK, 64), (BLOCK, 64)];
    let drafting = |groups: &[GroupId]| replica.clone().drafting(groups.iter().copied());
    replica.clone().check(&plan, &memory).unwrap();
    drafting(&[FURTHER]).check(&plan, &memory).unwrap();
    let row = sequence.row().unwrap();
    let lacks = |end| Err(PlanError::NoBlocks { step: plan.step, row, end });
    assert_eq!(drafting(&[GroupId(0)]).check(&plan, &memory).map(drop), lacks(18));
    assert_eq!(drafting(&[GroupId(0), FURTHER]).check(&plan, &memory).map(drop), lacks(18));
    assert_eq!(drafting(&[]).check(&plan, &memory).map(drop), lacks(18), "there is no draft model");
    assert_eq!(drafting(&[GroupId(9)]).check(&plan, &memory).map(drop), lacks(18));
    let mut far = plan.clone();
    far.draft_batch[0].start = Start::At(1 << 40);
    for mut replica in [replica.clone(), drafting(&[FURTHER])] {
        let before = format!("{replica:?}");
        assert_eq!(replica.check(&far, &memory).map(drop), lacks((1 << 40) + 18));
        assert_eq!(format!("{replica:?}"), before);
    }
}
