//! Sequences that leave for another process, and such that come from one.

use crate::prelude::*;
use kv_tier::GroupFormat;

const FIRST: GroupId = GroupId(0);

/// A sequence that is adopted with all that is to arrive of so many tokens.
fn adopted(manager: &mut Manager, ids: Range<u32>, tokens: u64) -> (Sequence, Adoption) {
    let (answer, adoption) = adopt(manager, &mut Request::new(ids.collect()), tokens);
    (admitted(answer), adoption.unwrap())
}

/// The places that a transfer fills.
fn places(adoption: &Adoption) -> Range<usize> {
    let places: Vec<_> = adoption.blocks(FIRST).map(|(place, _)| place).collect();
    let (first, end) = (places[0], places[places.len() - 1] + 1);
    assert_eq!((first..end).collect::<Vec<_>>(), places);
    first..end
}

#[test]
fn a_sequence_leaves_when_all_that_writes_it_is_complete() {
    let mut manager = manager(8, 0);
    let mut sequence = admit(&mut manager, 0..10);
    staged(&mut manager, &mut [&mut sequence]);
    let refused = manager.export(sequence).unwrap_err();
    assert_eq!(refused.reason, ChangeError::Writing { step: 1 });
    let mut sequence = refused.sequence;
    done(&mut manager, 1);
    let refused = manager.export(sequence).unwrap_err();
    assert_eq!(refused.reason, ChangeError::Writing { step: 1 }, "its id is to come");
    sequence = refused.sequence;
    manager.commit(&mut sequence, 1, &[7]).unwrap();
    let blocks: Vec<_> = (0..3).map(|at| (at, sequence.block(GroupId(0), at).unwrap())).collect();
    let export = manager.export(sequence).unwrap();
    assert_eq!((export.tokens(), export.blocks(FIRST)), (10, &blocks[..]));
    assert_eq!(export.ids().unwrap().len(), 11);
    assert_eq!(manager.free_rows(), 256);
    // Nobody gets the blocks while a transfer reads them.
    step(&mut manager, &mut []);
    step(&mut manager, &mut []);
    assert_eq!(manager.first_pool().claimable(), 5);
    drop(export);
    check_empty(&mut manager);
}

#[test]
fn a_reader_of_pending_blocks_does_not_leave() {
    let mut manager = manager(16, 0);
    let mut first = admit(&mut manager, 0..9);
    staged(&mut manager, &mut [&mut first]);
    let second = admit(&mut manager, 0..9);
    assert_eq!(second.cached_tokens(), 8);
    let refused = manager.export(second).unwrap_err();
    assert_eq!(refused.reason, ChangeError::Writing { step: 1 });
    done(&mut manager, 1);
    assert_eq!(manager.export(refused.sequence).unwrap().tokens(), 8);
}

#[test]
fn a_part_of_a_sequence_may_leave_when_it_is_written_and_has_not_failed() {
    let mut manager = manager(16, 0);
    let mut first = admit(&mut manager, 0..12);
    go_on_staged(&mut manager, &mut first, 4);
    let mut second = admit_now(&mut manager, 0..12);
    assert_eq!(second.cached_tokens(), 4);
    let written = |manager: &Manager, sequence: &mut Sequence| manager.written(sequence);
    assert_eq!((first.resolved(), written(&manager, &mut first)), (4, 0));
    assert_eq!(written(&manager, &mut second), 0, "another one computes it");
    done(&mut manager, 1);
    assert_eq!([written(&manager, &mut first), written(&manager, &mut second)], [4, 4]);
    go_on_staged(&mut manager, &mut first, 4);
    assert_eq!(written(&manager, &mut first), 4);
    complete(&mut manager, 2, Outcome::Failed);
    assert_eq!(written(&manager, &mut first), 0, "it is to be told first");
    let told = manager.reserve(&mut first, 4).unwrap_err();
    assert!(matches!(told, ReserveError::Sequence(SequenceError::Redo { from: 4 })), "{told}");
    assert_eq!(written(&manager, &mut first), 4);
    // Of another manager, or while others fill its blocks, it is told nothing.
    assert_eq!(written(&common::manager(4, 0), &mut first), 0);
    let (answer, adoption) = adopt(&mut manager, &mut Request::new((50..61).collect()), 10);
    let mut third = admitted(answer);
    assert_eq!(written(&manager, &mut third), 0);
    manager.adopted(&mut third, adoption.unwrap(), 1).unwrap();
    assert_eq!(written(&manager, &mut third), 4);
}

#[test]
fn an_adopted_sequence_goes_on_behind_what_arrived_right() {
    for (right, end) in [(0, 0), (1, 4), (2, 8), (3, 10), (9, 10)] {
        let mut manager = manager(8, 0);
        let (mut sequence, adoption) = adopted(&mut manager, 0..11, 10);
        assert_eq!((places(&adoption), adoption.tokens()), (0..3, 10));
        let early = manager.reserve(&mut sequence, 1).unwrap_err();
        assert!(matches!(early, ReserveError::Sequence(SequenceError::Arriving)));
        assert_eq!(manager.adopted(&mut sequence, adoption, right).unwrap(), end);
        let left = 11 - end as u32;
        go_on(&mut manager, &mut sequence, left);
        // What arrived is found by others.
        assert_eq!(admit(&mut manager, 0..11).cached_tokens(), 8);
        drop(sequence);
        check_empty(&mut manager);
    }
}

#[test]
fn a_transfer_whose_adoption_is_dropped_has_ended_and_its_sequence_computes_everything() {
    for several_groups in [false, true] {
        let mut manager = if several_groups { several() } else { manager(8, 0) };
        let mut request = Request::new((0..11).collect());
        let (answer, adoption) = adopt(&mut manager, &mut request, 10);
        let mut sequence = admitted(answer);
        let arriving = ReserveError::Sequence(SequenceError::Arriving);
        assert_eq!(manager.reserve(&mut sequence, 1), Err(arriving));
        drop(adoption);
        let plan = go_on(&mut manager, &mut sequence, 4);
        assert_eq!((plan.batch[0].start, plan.batch[0].tokens), (Start::At(0), 4));
        assert!(plan.copies.is_empty(), "it writes its own blocks");
        while sequence.to_compute() > 0 {
            let left = sequence.to_compute() as u32;
            go_on(&mut manager, &mut sequence, left);
        }
        assert_eq!(admit(&mut manager, 0..11).cached_tokens(), 8);
        drop(sequence);
        check_empty(&mut manager);
    }
}

#[test]
fn what_is_cached_is_not_transferred() {
    let mut manager = manager(16, 0);
    drop(computed(&mut manager, 0..8));
    let (mut sequence, adoption) = adopted(&mut manager, 0..12, 11);
    assert_eq!(places(&adoption), 2..3);
    assert_eq!(manager.adopted(&mut sequence, adoption, 1).unwrap(), 11);
    let mut request = Request::new((0..9).collect());
    let (answer, adoption) = adopt(&mut manager, &mut request, 8);
    assert!(adoption.is_none());
    assert_eq!(admitted(answer).cached_tokens(), 8);
    let mut request = Request::new((100..200).collect());
    let (answer, adoption) = adopt(&mut manager, &mut request, 50);
    assert!(matches!(answer, Answer::Refused(_)) && adoption.is_none());
}

#[test]
fn blocks_that_a_transfer_fills_are_nobody_elses() {
    let mut manager = manager(4, 0);
    let mut request = Request::new((0..11).collect());
    let (answer, adoption) = adopt(&mut manager, &mut request, 10);
    let sequence = admitted(answer);
    drop(sequence);
    step(&mut manager, &mut []);
    step(&mut manager, &mut []);
    assert_eq!(manager.first_pool().claimable(), 1, "the transfer has three");
    drop(adoption);
    check_empty(&mut manager);
}

#[test]
fn a_transfer_belongs_to_one_sequence() {
    let mut manager = manager(16, 0);
    let mut requests = [Request::new((0..11).collect()), Request::new((50..61).collect())];
    let [first, second] = &mut requests;
    let (one, adoption) = adopt(&mut manager, first, 10);
    let (other, _kept) = adopt(&mut manager, second, 10);
    let (mut one, mut other) = (admitted(one), admitted(other));
    let foreign = manager.adopted(&mut other, adoption.unwrap(), 3).unwrap_err();
    assert_eq!(foreign, SequenceError::Foreign);
    // Its own transfer has ended, and nothing of it is right.
    manager.reserve(&mut one, 11).unwrap().given().unwrap();
    assert_eq!(step(&mut manager, &mut [&mut one]).batch[0].start, Start::At(0));
    assert!(manager.reserve(&mut other, 1).is_err(), "the other one's goes on");
}

#[test]
fn content_comes_back_before_it_is_asked_for() {
    let mut manager = manager(4, 8);
    cache_prompt(&mut manager, 0..16);
    cache_prompt(&mut manager, 100..116);
    let first = names(0..16);
    assert_eq!(manager.prefetch(&first), 0, "no block is without content");
    assert_eq!(manager.forget(&names(100..116)[2..]), 2);
    step(&mut manager, &mut []);
    assert_eq!(manager.prefetch(&first), 2);
    let plan = step(&mut manager, &mut []);
    assert_eq!(plan.copies.len(), 2);
    let pinned = manager.first_pool().match_prefix(&first);
    let near = pinned.locations().filter(|at| at.tier == Tier::Primary);
    assert_eq!((pinned.len(), near.count()), (4, 2));
}

#[test]
fn a_sequence_leaves_when_its_copies_are_made() {
    let mut manager = manager(4, 4);
    drop(computed(&mut manager, 0..9));
    drop(computed(&mut manager, 50..66));
    let back = admit(&mut manager, 0..9);
    assert_eq!((back.cached_tokens(), back.onboarded_blocks()), (8, 2));
    let refused = manager.export(back).unwrap_err();
    assert_eq!(refused.reason, ChangeError::Writing { step: 3 }, "no plan has brought it back yet");
    staged(&mut manager, &mut []);
    // Its second block evicts nothing.
    let blocks = manager.first_pool().snapshot().blocks;
    let unused = blocks.iter().filter(|block| block.usage == BlockUse::Unused);
    let unused: Vec<_> = unused.filter_map(|block| block.hash).collect();
    assert_ne!(manager.forget(&unused), 0);
    let again = admit(&mut manager, 0..5);
    let refused = manager.export(refused.sequence).unwrap_err();
    assert_eq!(refused.reason, ChangeError::Writing { step: 3 }, "the plan is not carried out");
    let other = manager.export(again).unwrap_err();
    assert_eq!(other.reason, ChangeError::Writing { step: 3 }, "it found what is on its way");
    done(&mut manager, 3);
    assert_eq!(manager.export(refused.sequence).unwrap().tokens(), 8);
}

/// A sequence that arrives behind a prefix of two blocks, of whose step nothing is known.
fn arriving(manager: &mut Manager) -> (Sequence, Adoption) {
    let mut first = admit(manager, 0..9);
    staged(manager, &mut [&mut first]);
    let (sequence, adoption) = adopted(manager, 0..17, 16);
    assert_eq!(places(&adoption), 2..4);
    (sequence, adoption)
}

#[test]
fn what_arrives_behind_a_failed_prefix_is_not_used() {
    for told in [false, true] {
        let mut manager = manager(16, 0);
        let (mut sequence, adoption) = arriving(&mut manager);
        complete(&mut manager, 1, Outcome::Failed);
        if told {
            let ids: &[u32] = &[];
            let set_back = manager.commit(&mut sequence, 1, &ids.to_vec());
            assert_eq!(set_back, Ok(Committed::Redo { from: 0 }));
        }
        let end = manager.adopted(&mut sequence, adoption, 2);
        assert_eq!(end, if told { Ok(0) } else { Err(SequenceError::Redo { from: 0 }) });
        assert_eq!((sequence.resolved(), manager.first_pool().stats().primary.cached), (0, 0));
    }
}

#[test]
fn a_transfer_of_another_manager_is_refused() {
    let (mut manager, mut other) = (manager(16, 0), manager(16, 0));
    let (mut sequence, _adoption) = arriving(&mut manager);
    let (_sequence, foreign) = arriving(&mut other);
    assert_eq!(manager.adopted(&mut sequence, foreign, 2), Err(SequenceError::Foreign));
    assert_eq!(sequence.resolved(), 8);
}

const WINDOW: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);

/// Full attention, windows of 6 tokens behind one of 2 sinks, and states behind every 8 tokens.
fn several() -> Manager {
    let kinds = [
        GroupKind::Window { tokens: 6, sinks: 2 },
        GroupKind::State { checkpoint_tokens: 8, drafts: 0 },
    ];
    let further = kinds.map(|kind| common::group(kind, 16));
    Manager::new(with_groups(options(16, 0), further)).unwrap()
}

/// A sequence whose first `tokens` tokens have KV, and the id behind them.
fn computed_by_several(manager: &mut Manager, tokens: u32) -> Sequence {
    common::sampled(manager, 0..tokens, tokens)
}

fn in_group(adoption: &Adoption, group: GroupId) -> Vec<usize> {
    adoption.blocks(group).map(|(place, _)| place).collect()
}

#[test]
fn a_sequence_of_several_groups_takes_along_what_a_step_reads() {
    let mut manager = several();
    let sequence = computed_by_several(&mut manager, 22);
    let state = sequence.block(STATE, 0).unwrap();
    let export = manager.export(sequence).unwrap();
    assert_eq!((export.tokens(), export.blocks(FIRST).len()), (22, 6));
    // Token 22 reads from token 17 on, and the first two.
    let places = |group| export.blocks(group).iter().map(|&(place, _)| place).collect::<Vec<_>>();
    assert_eq!(places(WINDOW), [0, 4, 5]);
    assert_eq!(export.blocks(STATE), [(0, state)]);
    assert_eq!(places(GroupId(3)), []);
    assert_eq!(export.formats(), manager.formats());
    drop(export);
    step(&mut manager, &mut []);
    assert_eq!(manager.pool(STATE).unwrap().claimable(), 16);
}

#[test]
fn a_sequence_of_several_groups_goes_on_where_the_other_has_left() {
    let mut manager = several();
    let (mut sequence, adoption) = adopted(&mut manager, 0..23, 22);
    assert_eq!(in_group(&adoption, FIRST), [0, 1, 2, 3, 4, 5]);
    assert_eq!((in_group(&adoption, WINDOW), in_group(&adoption, STATE)), (vec![0, 4, 5], vec![0]));
    assert_eq!(
        manager.block_ids(WINDOW, &sequence)[..6].iter().filter(|id| id.block().is_none()).count(),
        3
    );
    let all = adoption.block_count();
    assert_eq!(manager.adopted(&mut sequence, adoption, all).unwrap(), 22);
    let plan = go_on(&mut manager, &mut sequence, 1);
    assert_eq!((plan.batch[0].start, plan.copies.len()), (Start::At(22), 0));
    drop(sequence);
    step(&mut manager, &mut []);
    // Full blocks have names, and no state is behind any of them.
    let cached = |group| manager.named(group);
    assert_eq!([FIRST, WINDOW, STATE].map(cached), [5, 2, 0]);
}

#[test]
fn a_state_that_arrives_where_a_checkpoint_is_due_is_one() {
    let mut manager = several();
    let (mut sequence, adoption) = adopted(&mut manager, 0..20, 16);
    assert_eq!(manager.adopted(&mut sequence, adoption, 99).unwrap(), 16);
    let found = admit_now(&mut manager, 0..18);
    assert_eq!(found.cached_tokens(), 16);
    // The sequence writes a copy.
    let plan = go_on(&mut manager, &mut sequence, 3);
    assert!(plan.copies.iter().any(|copy| copy.group == STATE));
}

#[test]
fn a_part_of_several_groups_is_of_no_use() {
    let mut manager = several();
    drop(computed_by_several(&mut manager, 9));
    step(&mut manager, &mut []);
    let (mut sequence, adoption) = adopted(&mut manager, 0..23, 22);
    assert_eq!(in_group(&adoption, FIRST), [2, 3, 4, 5], "two blocks are cached here");
    assert_eq!((in_group(&adoption, WINDOW), in_group(&adoption, STATE)), (vec![0, 4, 5], vec![0]));
    let all = adoption.block_count();
    assert_eq!(manager.adopted(&mut sequence, adoption, all - 1).unwrap(), 0);
    let plan = go_on(&mut manager, &mut sequence, 23);
    assert_eq!((plan.batch[0].start, plan.batch[0].tokens), (Start::At(0), 8));
    drop(sequence);
    // The request finds what was cached before, and what was computed just now.
    assert_eq!(admit(&mut manager, 0..23).cached_tokens(), 8);
}

#[test]
fn what_is_being_computed_is_transferred_to_several_groups() {
    let mut manager = several();
    let mut first = admit(&mut manager, 0..9);
    staged(&mut manager, &mut [&mut first]);
    let (mut sequence, adoption) = adopted(&mut manager, 0..23, 22);
    assert_eq!(in_group(&adoption, FIRST), [0, 1, 2, 3, 4, 5]);
    complete(&mut manager, 1, Outcome::Failed);
    assert_eq!(manager.adopted(&mut sequence, adoption, 99).unwrap(), 22);
}

#[test]
fn managers_of_other_groups_exchange_nothing() {
    let mut manager = several();
    let refused = |manager: &mut Manager, tokens, there: &[GroupFormat]| match manager.adopt(
        &mut Request::new((0..23).collect()),
        tokens,
        there,
    ) {
        (Answer::Refused(error), None) => error,
        other => panic!("{other:?}"),
    };
    let formats = manager.formats();
    let mut others = formats.clone();
    others[1].kind = GroupKind::Window { tokens: 7, sinks: 2 };
    let error = refused(&mut manager, 22, &others);
    let (here, there) = (Some(formats[1]), Some(others[1]));
    assert_eq!(error, AdmitError::Format { group: 1, here, there });
    let error = refused(&mut manager, 22, &formats[..2]);
    assert_eq!(error, AdmitError::Format { group: 2, here: Some(formats[2]), there: None });
    let mut one = manager_of(16);
    let error = refused(&mut one, 22, &formats);
    assert_eq!(error, AdmitError::Format { group: 1, here: None, there: Some(formats[1]) });
    let mut others = one.formats();
    others[0].block_tokens = 8;
    assert!(matches!(refused(&mut one, 22, &others), AdmitError::Format { group: 0, .. }));
    // The last token is computed in any case, and a state does not go back.
    assert_eq!(refused(&mut manager, 23, &formats), AdmitError::Behind { tokens: 23, max: 22 });
    assert_eq!(manager.free_rows(), 256);
}

fn manager_of(blocks: u64) -> Manager {
    manager(blocks, 0)
}

#[test]
fn a_request_that_is_not_adopted_is_as_it_was() {
    let mut manager = manager(2, 0);
    let mut request = Request::new((0..20).collect());
    let (answer, adoption) = adopt(&mut manager, &mut request, 20);
    assert!(matches!(answer, Answer::Refused(_) | Answer::NoRoom(_)), "{answer:?}");
    assert!(adoption.is_none() && request.waits);
    assert_eq!(request.tokens(), 20);
}
