//! What random schedules of calls have found wrong, each by itself.

use crate::common::sampled;
use crate::prelude::*;
use kv_pool::{Classed as _, ErrorClass};

#[test]
fn a_row_holds_nothing_of_its_last_sequence() {
    let mut manager = manager(16, 0);
    let long = computed(&mut manager, 0..20);
    let row = long.row().unwrap();
    drop(long);
    let short = admit(&mut manager, 100..103);
    assert_eq!(short.row(), Some(row));
    let table = manager.snapshot();
    let entries = &table.tables[0].ids[row.index() * table.tables[0].width as usize..][..5];
    assert_eq!(entries[0].block(), short.block(GroupId(0), 0));
    assert_eq!(entries[1..], [TableEntry::NONE; 4]);
    let open = manager.begin_step().unwrap();
    let plan = manager.stage(&open, &mut []).unwrap();
    assert_eq!((plan.edits.len(), &plan.edit_ids[..]), (1, entries), "the workers are told");
}

#[test]
fn a_sequence_without_a_next_id_is_not_staged() {
    let mut manager = manager(16, 0);
    let mut sequence = computed(&mut manager, 0..10);
    manager.truncate(&mut sequence, 6).unwrap();
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    let open = manager.begin_step().unwrap();
    let refused = manager.stage(&open, &mut [&mut sequence]).unwrap_err();
    assert_eq!(refused, StageError::NothingKnown { index: 0, known: 6 });
    manager.extend(&mut sequence, &[7]).unwrap();
    let plan = manager.stage(&open, &mut [&mut sequence]).unwrap();
    assert_eq!((plan.batch[0].start, plan.batch[0].tokens), (Start::At(6), 1));
}

#[test]
fn a_failed_step_leaves_a_token_whose_output_is_wanted() {
    let mut manager = manager(16, 0);
    let mut sequence = admit(&mut manager, 0..10);
    staged(&mut manager, &mut [&mut sequence]);
    // The next step computes a token whose id is not known yet, and fails.
    go_on_staged(&mut manager, &mut sequence, 1);
    complete(&mut manager, 2, Outcome::Failed);
    assert_eq!(manager.commit(&mut sequence, 1, &[7]), Ok(Committed::Redo { from: 9 }));
    assert_eq!((sequence.known(), sequence.resolved()), (10, 9));
    let plan = go_on(&mut manager, &mut sequence, 1);
    assert_eq!(plan.batch[0].start, Start::At(9));
    assert_eq!(manager.commit(&mut sequence, plan.step, &[7]), Ok(Committed::Taken));
}

#[test]
fn what_a_worker_says_again_of_an_earlier_step_voids_none_that_came_later() {
    let mut manager = manager(16, 0);
    let mut sequence = admit(&mut manager, 0..10);
    step(&mut manager, &mut [&mut sequence]);
    assert_eq!(manager.commit(&mut sequence, 1, &[7]), Ok(Committed::Taken));
    go_on_staged(&mut manager, &mut sequence, 1);
    complete(&mut manager, 1, Outcome::Failed);
    done(&mut manager, 2);
    assert_eq!(manager.commit(&mut sequence, 2, &[8]), Ok(Committed::Taken));
}

#[test]
fn a_prompt_that_was_extended_adopts_beyond_its_blocks() {
    let mut manager = manager(32, 0);
    let mut long = Request::new((0..30).collect());
    let mut short = Request::new((0..9).collect());
    (long.waits, short.waits) = (false, false);
    let mut requests = [long, short];
    let mut answers = manager.ask_all(&mut requests, 100);
    let mut short = admitted(answers.pop().unwrap());
    let mut long = admitted(answers.pop().unwrap());
    step(&mut manager, &mut [&mut long]);
    manager.extend(&mut short, &(9..40).collect::<Vec<u32>>()).unwrap();
    let reserved = manager.reserve(&mut short, 2).unwrap().given().unwrap();
    assert_eq!((reserved.adopted_tokens, reserved.blocks), (28, 1));
    assert_eq!(short.block_count(GroupId(0)), 8);
}

#[test]
fn a_fork_shares_no_block_that_a_reservation_is_about_to_write() {
    let mut manager = manager(16, 0);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    let twin = manager.fork(&mut sequence).unwrap();
    assert_eq!(sequence.next(), 0);
    let open = manager.begin_step().unwrap();
    let refused = manager.stage(&open, &mut [&mut sequence]).unwrap_err();
    assert_eq!(refused, StageError::NothingReserved { index: 0 });
    assert!(manager.reserve(&mut sequence, 1).unwrap().given().unwrap().copied);
    assert_ne!(sequence.block(GroupId(0), 2), twin.block(GroupId(0), 2));
}

#[test]
fn no_more_is_reserved_behind_what_was_adopted_than_is_left_of_the_prompt() {
    let mut manager = manager(64, 0);
    let [mut long, mut short] = [40, 30].map(|tokens| {
        let mut request = Request::new((0..tokens).collect());
        request.waits = false;
        admitted(ask(&mut manager, request))
    });
    // Each has begun before the other could be found.
    go_on(&mut manager, &mut long, 4);
    step(&mut manager, &mut [&mut short]);
    let reserved = manager.reserve(&mut long, 100).unwrap().given().unwrap();
    assert_eq!((long.resolved(), reserved.adopted_tokens, long.next()), (28, 24, 12));
}

#[test]
fn a_reservation_needs_a_block_for_what_it_writes_beyond_its_own() {
    let mut manager = manager(16, 0);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    manager.set_budget(GroupId(0), Tier::Primary, 3).unwrap();
    let needs = |manager: &mut Manager, sequence: &mut Sequence| {
        [0, 2, 3, 7].map(|tokens| {
            let mut memory = |_, blocks| Err(blocks);
            let reserved = manager.growing(Some(&mut memory)).reserve(sequence, tokens);
            reserved
                .map_or_else(|blocks| blocks, |reserved| reserved.unwrap().given().unwrap().blocks)
        })
    };
    assert_eq!(needs(&mut manager, &mut sequence), [0, 0, 1, 2]);
    let mut twin = manager.fork(&mut sequence).unwrap();
    // The partly filled block is copied first.
    assert_eq!(needs(&mut manager, &mut twin), [0, 1, 2, 3]);
}

#[test]
fn no_memory_is_asked_for_where_all_that_there_is_makes_no_room() {
    // 16 blocks of 4 tokens, of which 6 have memory and 3 are used, and rows of more.
    let mut manager = manager(16, 0);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    manager.set_budget(GroupId(0), Tier::Primary, 6).unwrap();
    let width = manager.options().groups[0].blocks_per_sequence_max;
    assert!(width > 16, "{width}");
    let mut asked = Vec::new();
    let mut reserve = |tokens| {
        let mut memory = |_, blocks| {
            asked.push(blocks);
            Ok::<_, ()>(16)
        };
        manager.growing(Some(&mut memory)).reserve(&mut sequence, tokens).unwrap().unwrap()
    };
    assert!(matches!(reserve(16 * 4 - 9), Room::Lacks(_)));
    assert!(matches!(reserve(16 * 4 - 10), Room::Given(_)));
    assert_eq!(asked, [13], "what fits is mapped, and nothing for what does not");
}

#[test]
fn a_worker_that_joins_has_no_share_of_what_was_computed_without_it() {
    let mut manager = made(ManagerOptions { workers: 2, ..options(16, 0) });
    manager.lose_worker(WorkerId(1)).unwrap();
    let mut sequence = admit(&mut manager, 0..10);
    manager.fence_worker(WorkerId(1)).unwrap();
    staged(&mut manager, &mut [&mut sequence]);
    done(&mut manager, 1);
    manager.join_worker(WorkerId(1)).unwrap();
    let lost = manager.commit(&mut sequence, 1, &[7]).unwrap_err();
    assert_eq!(lost, SequenceError::Lost { worker: WorkerId(1) }.into());
    let again = admit(&mut manager, 0..10);
    assert_eq!(again.cached_tokens(), 0);
}

#[test]
fn a_resume_of_a_running_sequence_hides_no_failure() {
    let mut manager = manager(16, 4);
    let mut sequence = admit(&mut manager, 0..10);
    staged(&mut manager, &mut [&mut sequence]);
    complete(&mut manager, 1, Outcome::Failed);
    assert_eq!(manager.resume(&mut sequence), Err(SuspendError::NotSuspended));
    assert_eq!(manager.commit(&mut sequence, 1, &[7]), Ok(Committed::Redo { from: 0 }));
}

#[test]
fn content_has_other_names_after_a_reset() {
    let given: Vec<_> = names_of_two_blocks();
    let requests = [Request::new((0..9).collect()), Request::named(9, given)];
    for request in requests {
        let mut manager = manager(16, 0);
        let mut before = Vec::new();
        for generation in 0..3 {
            let mut asked = [request.clone()];
            let mut sequence = admitted(manager.ask_all(&mut asked, 100).pop().unwrap());
            assert_eq!(sequence.cached_tokens(), 0);
            step(&mut manager, &mut [&mut sequence]);
            let now = cached_names(&manager);
            assert_eq!(now.len(), 2, "generation {generation}");
            assert!(now.iter().all(|name| !before.contains(name)), "generation {generation}");
            before.extend(now);
            manager.reset();
            assert_eq!(cached_names(&manager), []);
        }
    }
}

fn names_of_two_blocks() -> Vec<BlockHash> {
    let first = BlockHash::chain(BlockHash::ROOT, &[0, 1, 2, 3]);
    vec![first, BlockHash::chain(first, &[4, 5, 6, 7])]
}

#[test]
fn a_request_that_waited_over_a_reset_is_cached_in_its_new_generation() {
    for request in [Request::new((0..9).collect()), Request::named(9, names_of_two_blocks())] {
        let mut manager = manager(3, 0);
        let other = computed(&mut manager, 50..60);
        let mut asked = [request.clone()];
        assert!(matches!(manager.ask_all(&mut asked, 100).pop(), Some(Answer::NoRoom(_))));
        manager.reset();
        drop(other);
        let mut sequence = admitted(manager.ask_all(&mut asked, 100).pop().unwrap());
        step(&mut manager, &mut [&mut sequence]);
        drop(sequence);
        let mut again = [request];
        let again = admitted(manager.ask_all(&mut again, 100).pop().unwrap());
        assert_eq!(again.cached_tokens(), 8);
    }
}

#[test]
fn the_last_twin_writes_its_block_without_a_copy() {
    let mut manager = manager(16, 0);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    let before = sequence.block(GroupId(0), 2);
    drop(manager.fork(&mut sequence).unwrap());
    let reserved = manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    assert_eq!(
        (reserved.copied, reserved.blocks, sequence.block(GroupId(0), 2)),
        (false, 0, before)
    );
}

/// Stages the next token of a sequence; the step.
fn stage_one(manager: &mut Manager, sequence: &mut Sequence) -> u64 {
    manager.reserve(sequence, 1).unwrap().given().unwrap();
    staged(manager, &mut [sequence]).step
}

#[test]
fn names_that_a_commit_gives_are_withdrawn_with_their_step() {
    let mut manager = made(ManagerOptions { steps_in_flight_max: 3, ..options(16, 0) });
    let mut sequence = computed(&mut manager, 0..6);
    for step in [2, 3] {
        assert_eq!(stage_one(&mut manager, &mut sequence), step);
    }
    for (step, id) in [(1, 6), (2, 7), (3, 8)] {
        manager.commit(&mut sequence, step, &[id]).unwrap();
    }
    assert_eq!(
        (sequence.resolved(), cached_names(&manager).len()),
        (8, 2),
        "the last commit names a block"
    );
    complete(&mut manager, 3, Outcome::Failed);
    assert_eq!(cached_names(&manager).len(), 1);
    assert_eq!(admit(&mut manager, 0..20).cached_tokens(), 4);
}

#[test]
fn a_resumed_sequence_depends_on_the_step_whose_blocks_it_found() {
    let mut manager = manager(16, 4);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    manager.suspend(&mut sequence).unwrap();
    let cached = cached_names(&manager);
    assert_eq!(manager.forget(&cached), 2);
    let mut other = admit(&mut manager, 0..10);
    staged(&mut manager, &mut [&mut other]);
    assert_eq!(
        manager.resume(&mut sequence).unwrap().given().unwrap(),
        10,
        "it found what the step computes"
    );
    complete(&mut manager, 2, Outcome::Failed);
    let refused = manager.reserve(&mut sequence, 1).unwrap_err();
    assert!(matches!(refused, ReserveError::Sequence(SequenceError::Redo { from: 0 })));
    assert_eq!(sequence.known(), 11, "its ids are its own");
}

#[test]
fn a_failed_step_may_have_begun_where_its_plan_allows() {
    let mut manager = made(ManagerOptions { steps_in_flight_max: 4, ..options(16, 0) });
    let mut sequence = computed(&mut manager, 0..6);
    for step in [2, 3] {
        assert_eq!(stage_one(&mut manager, &mut sequence), step);
    }
    for (step, id) in [(1, 6), (2, 7)] {
        manager.commit(&mut sequence, step, &[id]).unwrap();
    }
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    let open = manager.begin_step().unwrap();
    let plan = manager.stage(&open, &mut [&mut sequence]).unwrap();
    assert_eq!(plan.batch[0].start, Start::Open { resolved: 7, upper: 8 });
    manager.finish_step(open).unwrap();
    manager.commit(&mut sequence, 3, &[8]).unwrap();
    assert_eq!((sequence.resolved(), cached_names(&manager).len()), (8, 2));
    complete(&mut manager, 4, Outcome::Failed);
    assert_eq!(
        cached_names(&manager).len(),
        1,
        "it may have written the last token of the second block"
    );
    assert!(matches!(
        manager.reserve(&mut sequence, 1),
        Err(ReserveError::Sequence(SequenceError::Redo { from: 7 }))
    ));
}

#[test]
fn a_step_without_a_plan_gives_back_what_was_released_in_it() {
    let mut manager = manager(3, 3);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    let open = manager.begin_step().unwrap();
    manager.suspend(&mut sequence).unwrap();
    // There is nothing to stage, so no plan says what was copied.
    manager.finish_step(open).unwrap();
    let open = manager.begin_step().unwrap();
    let mut other = admit(&mut manager, 50..60);
    let plan = manager.stage(&open, &mut [&mut other]).unwrap();
    assert!(!plan.copies.is_empty(), "the copies come first");
}

#[test]
fn a_sequence_from_before_a_reset_names_nothing_more() {
    let mut manager = manager(16, 0);
    let mut sequence = admit_within(&mut manager, 0..22, 8);
    step(&mut manager, &mut [&mut sequence]);
    assert_eq!(cached_names(&manager).len(), 2, "its first chunk");
    manager.reset();
    let last = go_on(&mut manager, &mut sequence, 14).step;
    decode(&mut manager, &mut sequence, last, 7);
    assert_eq!(cached_names(&manager), [], "what it computes is of older weights in part");
    drop(sequence);
    assert_eq!(cached_names(&manager), []);
}

#[test]
fn a_sequence_from_before_a_reset_finds_nothing_of_after_it() {
    let mut manager = manager(16, 4);
    let mut sequence = sampled(&mut manager, 0..10, 10);
    manager.reset();
    // None of its blocks is full now, so its names begin anew with what follows.
    manager.truncate(&mut sequence, 3).unwrap();
    manager.extend(&mut sequence, &[100, 101]).unwrap();
    let other = computed(&mut manager, [0, 1, 2, 100, 101]);
    manager.suspend(&mut sequence).unwrap();
    assert_eq!(
        manager.resume(&mut sequence).unwrap().given().unwrap(),
        0,
        "its KV is of other weights"
    );
    assert_ne!(sequence.block(GroupId(0), 0), other.block(GroupId(0), 0));
}

/// Two workers that share a step both say that it has failed.
#[test]
fn a_step_fails_once_whoever_says_so() {
    let options = ManagerOptions { workers: 2, ..options(8, 0) };
    let mut manager = made(options);
    let mut sequence = admit(&mut manager, 0..5);
    staged(&mut manager, &mut [&mut sequence]);
    for worker in [0, 1].map(WorkerId) {
        manager.complete(Completion { worker, step: 1, outcome: Outcome::Failed }).unwrap();
        let told = manager.commit(&mut sequence, 1, &[7]).unwrap();
        let expected =
            if worker == WorkerId(0) { Committed::Redo { from: 0 } } else { Committed::Stale };
        assert_eq!(told, expected, "it is told once");
    }
    assert_eq!(manager.stats().failed_steps, 1);
}

/// Has everything evicted that nobody holds.
fn evict(manager: &mut Manager) {
    step(manager, &mut []);
    let blocks = manager.first_pool().claimable() as u32;
    let mut other = admit(manager, 1000..1000 + blocks * 4);
    step(manager, &mut [&mut other]);
    drop(other);
    let others = cached_names(manager);
    manager.first_pool().check_integrity().unwrap();
    assert!(others.len() as u32 >= blocks - 1);
}

/// A sequence whose two full blocks another one has named, and the other's names, which nobody holds any more.
fn twin(manager: &mut Manager) -> (Sequence, Vec<BlockHash>) {
    let mut request = Request::new((0..10).collect());
    (request.hit_max, request.waits) = (0, false);
    let mut requests = [request.clone(), request];
    let mut both: Vec<_> = manager.ask_all(&mut requests, 100).into_iter().map(admitted).collect();
    let [first, second] = &mut both[..] else { unreachable!("there were two") };
    step(manager, &mut [first, second]);
    let (second, first) = (both.pop().unwrap(), both.pop().unwrap());
    assert_eq!(cached_names(manager).len(), 2);
    drop(first);
    (second, cached_names(manager))
}

/// The same, when it has decoded a token.
fn decoded_twin(manager: &mut Manager) -> (Sequence, Vec<BlockHash>) {
    let (mut second, names) = twin(manager);
    decode(manager, &mut second, 1, 70);
    (second, names)
}

#[test]
fn a_twin_takes_over_the_name_of_a_block_that_has_gone() {
    let mut manager = manager(16, 0);
    let (second, gone) = decoded_twin(&mut manager);
    evict(&mut manager);
    assert!(cached_names(&manager).iter().all(|name| !gone.contains(name)));
    drop(second);
    assert_eq!(admit(&mut manager, 0..10).cached_tokens(), 8);
    check_empty(&mut manager);
}

#[test]
fn a_twin_that_is_dropped_beside_its_other_is_not_cached_twice() {
    let mut manager = manager(16, 0);
    let (second, there) = decoded_twin(&mut manager);
    drop(second);
    assert_eq!(cached_names(&manager).len(), there.len());
    assert_eq!(admit(&mut manager, 0..10).cached_tokens(), 8);
    check_empty(&mut manager);
}

#[test]
fn a_twin_in_a_step_in_flight_takes_over_nothing() {
    let mut manager = manager(16, 0);
    let mut request = Request::new((0..10).collect());
    (request.hit_max, request.waits) = (0, false);
    let mut requests = [request.clone(), request];
    let mut both: Vec<_> = manager.ask_all(&mut requests, 100).into_iter().map(admitted).collect();
    let [mut twin, mut first] = [both.pop().unwrap(), both.pop().unwrap()];
    for sequence in [&mut first, &mut twin] {
        staged(&mut manager, &mut [sequence]);
    }
    assert_eq!(cached_names(&manager).len(), 2);
    complete(&mut manager, 1, Outcome::Failed);
    assert_eq!(cached_names(&manager), []);
    // Its own step comes after the one that failed.
    drop(twin);
    assert_eq!(cached_names(&manager), []);
}

#[test]
fn a_twin_of_before_a_loss_or_a_reset_takes_over_nothing() {
    for reset in [false, true] {
        let mut manager = manager(16, 0);
        let (second, _) = decoded_twin(&mut manager);
        if reset {
            manager.reset();
        } else {
            manager.lose_worker(WorkerId(0)).unwrap();
            manager.fence_worker(WorkerId(0)).unwrap();
            manager.join_worker(WorkerId(0)).unwrap();
        }
        drop(second);
        assert_eq!(cached_names(&manager), [], "reset: {reset}");
    }
}

#[test]
fn a_twin_of_before_a_forgetting_takes_over_nothing() {
    let mut manager = manager(16, 0);
    let (second, gone) = decoded_twin(&mut manager);
    assert_eq!(manager.forget(&gone), 2);
    drop(second);
    assert_eq!(cached_names(&manager), []);
    assert_eq!(admit(&mut manager, 0..10).cached_tokens(), 0);
    check_empty(&mut manager);
}

/// A prompt of seven tokens, and a step that begins with the token that its step samples.
fn overlapped(manager: &mut Manager) -> Sequence {
    let mut sequence = admit(manager, 0..7);
    staged(manager, &mut [&mut sequence]);
    stage_one(manager, &mut sequence);
    sequence
}

#[test]
fn what_is_computed_behind_an_ignored_id_is_stale() {
    for is_complete in [false, true] {
        let mut manager = manager(16, 0);
        let mut sequence = overlapped(&mut manager);
        if is_complete {
            done(&mut manager, 2);
        }
        // An end that the engine ignores, and with it what comes behind.
        assert_eq!(manager.commit(&mut sequence, 1, &[]), Ok(Committed::Taken));
        assert_eq!(manager.commit(&mut sequence, 2, &[77]), Ok(Committed::Stale));
        assert_eq!((sequence.known(), sequence.resolved(), sequence.upper()), (7, 7, 7));
        assert_eq!(cached_names(&manager).len(), 1, "the KV at position 7 is the ignored id's");
        // It goes on with an id of the engine's.
        manager.extend(&mut sequence, &[77]).unwrap();
        done(&mut manager, 2);
        let last = stage_one(&mut manager, &mut sequence);
        assert_eq!(manager.commit(&mut sequence, last, &[78]), Ok(Committed::Taken));
        assert_eq!(
            (sequence.ids().unwrap()[7..].to_vec(), cached_names(&manager).len()),
            (vec![77, 78], 2)
        );
        done(&mut manager, last);
        drop(sequence);
        check_empty(&mut manager);
    }
}

#[test]
fn what_is_computed_behind_an_ignored_id_in_the_middle_is_stale() {
    let mut manager = made(ManagerOptions { steps_in_flight_max: 3, ..options(16, 0) });
    let mut sequence = overlapped(&mut manager);
    stage_one(&mut manager, &mut sequence);
    assert_eq!(manager.commit(&mut sequence, 1, &[7]), Ok(Committed::Taken));
    assert_eq!(manager.commit(&mut sequence, 2, &[]), Ok(Committed::Taken));
    assert_eq!(manager.commit(&mut sequence, 3, &[77]), Ok(Committed::Stale));
    assert_eq!((sequence.known(), sequence.to_compute()), (8, 1), "id 7 is the engine's");
    assert!(matches!(manager.extend(&mut sequence, &[8]), Ok(())), "no id is to come");
}

/// What is forgotten, by a sequence that has the content without the names; a part of the names.
fn forgotten(manager: &mut Manager) -> (Sequence, Vec<BlockHash>) {
    let (second, gone) = twin(manager);
    assert_eq!(manager.forget(&gone), 2);
    (second, gone)
}

#[test]
fn a_resumed_twin_does_not_name_what_was_forgotten() {
    let mut manager = manager(16, 16);
    let (mut twin, gone) = forgotten(&mut manager);
    manager.commit(&mut twin, 1, &[70]).unwrap();
    manager.suspend(&mut twin).unwrap();
    step(&mut manager, &mut []);
    assert_eq!(manager.resume(&mut twin), Ok(Room::Given(10)));
    manager.extend(&mut twin, &[71, 72]).unwrap();
    go_on(&mut manager, &mut twin, 3);
    let named = cached_names(&manager);
    assert!(named.iter().all(|name| !gone.contains(name)), "{named:?} of {gone:?}");
    assert_eq!(named.len(), 1, "what comes behind is named as always");
    drop(twin);
    assert_eq!(cached_names(&manager), named);
    check_empty(&mut manager);
}

#[test]
fn a_prompt_of_before_does_not_name_what_was_forgotten() {
    let mut manager = manager(16, 0);
    let mut sequence = admit_within(&mut manager, 0..13, 4);
    let block = BlockHash::chain(BlockHash::ROOT, &[0, 1, 2, 3]);
    let next = BlockHash::chain(block, &[4, 5, 6, 7]);
    step(&mut manager, &mut [&mut sequence]);
    assert_eq!(cached_names(&manager), [block]);
    assert_eq!(manager.forget(&[block, next]), 1);
    go_on(&mut manager, &mut sequence, 9);
    let last = BlockHash::chain(next, &[8, 9, 10, 11]);
    assert_eq!(cached_names(&manager), [last], "the block between is forgotten");
    drop(sequence);
    assert_eq!(cached_names(&manager), [last]);
    // One that comes later may cache it again.
    let mut later = admit(&mut manager, 0..13);
    step(&mut manager, &mut [&mut later]);
    drop(later);
    assert_eq!(admit(&mut manager, 0..13).cached_tokens(), 12);
}

#[test]
fn a_forgotten_name_keeps_no_other_content_out_of_the_cache() {
    let mut manager = manager(16, 0);
    let (twin, gone) = decoded_twin(&mut manager);
    drop(computed(&mut manager, 100..105));
    let other = BlockHash::chain(BlockHash::ROOT, &[100, 101, 102, 103]);
    assert_eq!(manager.forget(&[other]), 1);
    evict(&mut manager);
    drop(twin);
    assert!(gone.iter().all(|name| cached_names(&manager).contains(name)), "it was not forgotten");
}

#[test]
fn a_fork_of_before_does_not_name_what_was_forgotten() {
    let mut manager = manager(16, 16);
    let (mut first, _) = forgotten(&mut manager);
    manager.commit(&mut first, 1, &[70]).unwrap();
    // It is made after the forgetting, of what was computed before.
    let mut second = manager.fork(&mut first).unwrap();
    drop(first);
    manager.suspend(&mut second).unwrap();
    step(&mut manager, &mut []);
    assert_eq!(manager.resume(&mut second), Ok(Room::Given(10)));
    go_on(&mut manager, &mut second, 1);
    assert_eq!(cached_names(&manager), []);
    drop(second);
    assert_eq!(cached_names(&manager), []);
}

#[test]
fn an_error_says_what_a_loop_does_about_it() {
    let mut manager = made(ManagerOptions { workers: 2, ..options(4, 0) });
    let mut sequence = admit(&mut manager, 0..12);
    staged(&mut manager, &mut [&mut sequence]);
    let later = manager.fork(&mut sequence).unwrap_err();
    assert_eq!((&later, later.class()), (&ChangeError::Later, ErrorClass::Retry));
    let budget = manager.set_budget(GroupId(1), Tier::Primary, 1).unwrap_err();
    assert_eq!(budget.class(), ErrorClass::Shed);
    manager.lose_worker(WorkerId(1)).unwrap();
    assert_eq!(manager.fork(&mut sequence).unwrap_err().class(), ErrorClass::Shed);
    let completion = Completion { worker: WorkerId(1), step: 1, outcome: Outcome::Done };
    assert_eq!(manager.complete(completion).unwrap_err().class(), ErrorClass::Restart);
    let (first, second) = (manager.begin_step(), manager.begin_step());
    assert_eq!(second.unwrap_err().class(), ErrorClass::Retry);
    drop((first, sequence));
}
