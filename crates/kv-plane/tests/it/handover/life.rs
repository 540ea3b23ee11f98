//! What becomes of a hand-over: early parts, both orders of steps and copies, cancels, deaths and
//! failures.

use super::*;

#[test]
fn blocks_are_filled_while_the_rest_of_the_prompt_is_computed() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    assert!(here.side.fills(), "it waits for the rest");
    there.finish(ID, live);
    let (live, end) = here.ready(&prompt);
    assert_eq!(end, 33, "the last token of the prompt is computed here");
    assert!(matches!(here.came[..], [(ID, Came::Whole(_))]));
    here.go_on(live);
    let stats = here.side.stats();
    assert_eq!((stats.whole, stats.blocks, stats.bytes), (1, 9, 9 << 10));
    assert_eq!((stats.failed, stats.cancelled, stats.blocks_wrong), (0, 0, 0));
    assert!(matches!(there.ended(), Ended::Taken));
    let stats = there.side.stats();
    assert_eq!((stats.taken, stats.blocks, stats.bytes), (1, 9, 9 << 10));
    assert_eq!(there.side.open(), 0);
    assert!(!here.side.waits());
    close(there, here);
}

#[test]
fn a_prompt_that_has_come_before_there_was_room_is_filled_at_once() {
    let (mut there, mut here, prompt) = wanted();
    assert!(matches!(here.adopt(ID, &prompt), Adopted::Later), "it is not offered yet");
    there.compute_all(ID, &prompt);
    here.until_coming(ID, Coming::Whole);
    here.fill(ID, &prompt);
    let (live, end) = here.ready(&prompt);
    assert_eq!((end, here.early_blocks()), (33, 0));
    here.go_on(live);
    assert!(matches!(there.ended(), Ended::Taken));
    // What is cached here is not taken a second time.
    let (again, prompt) = (HandoverId(78), Prompt::new(1, 32));
    let live = there.begin(again, &prompt);
    here.want(again, &prompt);
    here.until_coming(again, Coming::Offered);
    let adopted = here.adopt(again, &prompt.then(2, 1));
    let Adopted::Cached(sequence) = adopted else { panic!("all is cached: {adopted:?}") };
    assert_eq!(sequence.cached_tokens(), 32);
    assert!(!here.side.waits());
    drop((sequence, live));
    assert!(matches!(there.ended(), Ended::Cancelled), "nothing of it was there to be taken");
    close(there, here);
}

#[test]
fn a_longer_request_computes_what_is_behind_the_prompt_that_has_come() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    drop(here.side.give_way(&mut here.engine.cache).unwrap());
    there.finish(ID, live);
    here.until_coming(ID, Coming::Whole);
    let longer = prompt.then(3, 2);
    here.fill(ID, &longer);
    let (live, end) = here.ready(&longer);
    assert_eq!((end, here.side.stats().blocks_wrong), (34, 0));
    here.go_on(live);
    close(there, here);
}

#[test]
fn blocks_of_a_step_leave_while_the_next_one_runs() {
    let mut there = Computes::new(1 << 20);
    let prompt = Prompt::new(1, 34);
    let mut live = there.begin(ID, &prompt);
    there.engine.run(&mut [&mut live]).unwrap();
    there.engine.drain().unwrap();
    there.machine.hold(&there.engine);
    there.engine.run(&mut [&mut live]).unwrap();
    there.give(ID, &mut live);
    assert_eq!(there.side.stats().blocks, 4, "what the next step writes does not leave");
    there.machine.let_go(&there.engine);
    there.finish(ID, live);
    assert_eq!(there.side.stats().blocks, 9);
    there.close();
}

#[test]
fn blocks_are_filled_while_a_step_runs() {
    let (mut there, mut live, mut here, prompt) = half_a_prompt();
    let mut other = here.engine.computed(&Prompt::new(2, 20));
    here.engine.drain().unwrap();
    here.machine.hold(&here.engine);
    here.engine.run(&mut [&mut other]).unwrap();
    there.compute(&mut live);
    there.give(ID, &mut live);
    here.until("blocks are not filled", |of| of.early_blocks() == 8);
    here.machine.let_go(&here.engine);
    there.finish(ID, live);
    here.goes_on(&prompt, 33);
    drop(other);
    close(there, here);
}

#[test]
fn blocks_are_filled_behind_the_copies_that_still_read_them() {
    let mut there = Computes::new(1 << 20);
    let mut here = GoesOn::new(&there.member, 10, 16);
    let (old, prompt) = (Prompt::new(2, 34), Prompt::new(1, 34));
    here.engine.serve(&old);
    here.want(ID, &prompt);
    there.compute_all(ID, &prompt);
    here.until_coming(ID, Coming::Whole);
    // What was there moves to the host by the next plan, so nothing is written before it.
    assert!(matches!(here.adopt(ID, &prompt), Adopted::Filling));
    for _ in 0..10 {
        here.poll();
    }
    assert!(here.side.fills(), "its blocks hold what is yet to be copied");
    here.engine.idle().unwrap();
    here.goes_on(&prompt, 33);
    here.engine.drain().unwrap();
    let (cached, onboarded) = here.engine.serve(&old);
    assert!(cached == 32 && onboarded > 0, "{onboarded} of {cached} tokens come from the host");
    close(there, here);
}

#[test]
fn what_has_come_of_a_node_that_dies_is_used_and_the_rest_is_computed() {
    let (there, live, mut here, prompt) = half_a_prompt();
    drop(live);
    there.close();
    let (live, end) = here.ready(&prompt);
    assert_eq!(end, 16);
    assert!(matches!(here.came[..], [(ID, Came::Failed(_))]));
    let stats = here.side.stats();
    assert_eq!((stats.whole, stats.failed), (0, 1));
    here.go_on(live);
    here.close();
}

#[test]
fn who_computes_hears_that_a_request_was_cancelled_whose_blocks_were_filled() {
    let (mut there, live, mut here, _) = half_a_prompt();
    here.side.cancel(ID);
    assert!(!here.side.fills() && !here.side.waits());
    assert_eq!(here.side.stats().cancelled, 1);
    assert!(matches!(there.ended(), Ended::Cancelled));
    assert_eq!(there.side.open(), 1, "it is computed still");
    drop(live);
    there.side.cancel(ID);
    assert_eq!(there.side.open(), 0);
    assert_eq!(there.side.stats().cancelled, 1);
    // Its blocks are those of others.
    here.engine.idle().unwrap();
    assert_eq!(here.engine.cache.manager().free_rows(), 8);
    assert_eq!(here.engine.pool().stats().primary.pinned, 0);
    here.engine.serve(&Prompt::new(3, 64));
    here.close();
    there.engine.serve(&Prompt::new(3, 4));
    there.close();
}

#[test]
fn a_request_that_is_cancelled_before_it_is_offered_is_declined() {
    let (mut there, mut here, prompt) = wanted();
    here.side.cancel(ID);
    let server = &there.server;
    until("nobody declines it", || server.node().stats().stored > 0);
    let live = there.begin(ID, &prompt);
    assert!(matches!(there.ended(), Ended::Cancelled));
    there.finish(ID, live);
    assert_eq!(there.side.stats().blocks, 0);
    here.engine.serve(&prompt);
    close(there, here);
}

#[test]
fn who_goes_on_computes_what_was_withdrawn() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    drop(live);
    there.side.cancel(ID);
    assert!(matches!(here.failed(), OfferError::Withdrawn));
    here.goes_on(&prompt, 16);
    assert_eq!(there.side.stats().cancelled, 1);
    there.engine.serve(&prompt);
    close(there, here);
}

#[test]
fn a_request_gives_its_blocks_back_once_and_has_them_again_when_all_has_come() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    let (id, sequence) = here.side.give_way(&mut here.engine.cache).unwrap();
    assert_eq!((id, sequence.resolved()), (ID, 16), "what has come stays cached");
    drop(sequence);
    assert_eq!(here.side.coming(ID), Some(Coming::Far));
    assert!(matches!(here.adopt(ID, &prompt), Adopted::Later), "not before all has come");
    assert!(here.side.give_way(&mut here.engine.cache).is_none());
    there.finish(ID, live);
    here.until_coming(ID, Coming::Whole);
    here.fill(ID, &prompt);
    let (live, end) = here.ready(&prompt);
    assert_eq!((end, live.sequence.cached_tokens()), (33, 16));
    here.go_on(live);
    assert_eq!(here.side.stats().blocks_wrong, 0);
    close(there, here);
}

#[test]
fn what_was_wanted_before_a_reset_gets_no_names_of_behind_it() {
    let (mut there, mut here, prompt) = wanted();
    there.compute_all(ID, &prompt);
    here.until_coming(ID, Coming::Whole);
    // Its weights are others now.
    here.engine.cache.reset();
    assert!(matches!(here.adopt(ID, &prompt), Adopted::Here));
    assert!(matches!(here.failed(), OfferError::Withdrawn));
    assert_eq!((here.side.coming(ID), here.side.stats().failed), (None, 1));
    let live = here.engine.admit(&prompt).unwrap();
    assert_eq!(live.sequence.cached_tokens(), 0);
    here.go_on(live);
    close(there, here);
}

#[test]
fn a_sequence_from_before_a_reset_that_gives_way_does_not_come_back() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    here.engine.cache.reset();
    let (id, sequence) = here.side.give_way(&mut here.engine.cache).unwrap();
    drop(sequence);
    assert!(matches!(here.failed(), OfferError::Withdrawn));
    assert_eq!((id, here.side.coming(ID)), (ID, None));
    assert!(matches!(here.adopt(ID, &prompt), Adopted::Here));
    let again = here.engine.admit(&prompt).unwrap();
    assert_eq!(again.sequence.cached_tokens(), 0);
    here.go_on(again);
    there.finish(ID, live);
    close(there, here);
}

#[test]
fn what_lacks_tokens_is_withdrawn() {
    let (mut there, mut live, mut here, prompt) = half_a_prompt();
    there.engine.truncate(&mut live, 16).unwrap();
    there.side.finish(&mut there.engine.cache, ID, live.sequence).unwrap();
    assert!(matches!(there.ended(), Ended::Failed(OfferError::Withdrawn)));
    assert!(matches!(here.failed(), OfferError::Withdrawn));
    here.goes_on(&prompt, 16);
    close(there, here);
}

#[test]
fn a_node_without_room_says_so_on_both_sides() {
    // Records of the sheet and of two blocks, and no more.
    let mut there = Computes::new(10 * 5000);
    let mut here = GoesOn::new(&there.member, 64, 0);
    let prompt = Prompt::new(1, 34);
    there.compute_all(ID, &prompt);
    assert!(matches!(there.ended(), Ended::Failed(OfferError::Node(_))));
    assert_eq!((there.side.stats().failed, there.side.open()), (1, 0));
    here.want(ID, &prompt);
    assert!(matches!(here.failed(), OfferError::Withdrawn));
    assert!(!here.side.waits());
    here.engine.serve(&prompt);
    close(there, here);
}

#[test]
fn a_prompt_that_is_wanted_again_has_nothing_of_the_first_time() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    here.side.cancel(ID);
    here.want(ID, &prompt);
    // Until the thread has ended the first order, the second one is behind it.
    here.until_coming(ID, Coming::Offered);
    there.finish(ID, live);
    here.until_coming(ID, Coming::Whole);
    here.fill(ID, &prompt);
    here.goes_on(&prompt, 33);
    assert_eq!((here.side.stats().whole, here.side.stats().failed), (1, 0));
    close(there, here);
}

#[test]
fn a_connection_that_its_node_has_ended_is_made_anew_for_the_next_prompt() {
    let (_, server, member) = served(1 << 16, Some(Duration::ZERO));
    let (_machine, mut engine) = Machine::one(16, 0);
    let mut side = Decode::new(&engine.cache, key(), Duration::ZERO).unwrap();
    let source = side.add(member, Box::new(SocketTransfer)).unwrap();
    for number in 0..3 {
        let id = HandoverId(number.into());
        side.want(id, source, 8).unwrap();
        // Nobody offers it, which is heard over a connection.
        let mut came = Vec::new();
        until("nothing is heard", || {
            came.extend(side.poll(&mut engine.cache).unwrap());
            !came.is_empty()
        });
        let is_late = matches!(came[..], [(_, Came::Failed(OfferError::Late { left: 0 }))]);
        assert!(is_late, "{number}: {came:?}");
        until("the connection does not end", || server.stats().idle > number);
    }
    assert_eq!(side.stats().failed, 3);
    engine.try_close().unwrap();
}
