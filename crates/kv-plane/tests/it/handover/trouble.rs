//! What fails on the way, refuses for a moment or is cancelled while it waits: the other side always hears
//! of it, and nothing is lost by what passes.

use kv_plane::remote::message::{LeaseId, Span};
use kv_plane::remote::{Peer, PeerError, ReaderId, Refusal, Transfer};

use super::*;

const OTHER: HandoverId = HandoverId(78);

/// One that reads nothing.
#[derive(Debug)]
struct Broken {
    panics: bool,
}

impl Transfer for Broken {
    fn read(
        &mut self,
        _: &mut Peer,
        _: LeaseId,
        _: &[Span],
        _: Instant,
        _: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        assert!(!self.panics, "a transfer of a test panics");
        let error = std::io::Error::other("nothing is read");
        Err(PeerError::Io { operation: "reading in a test", error })
    }
}

/// Both read right what they compute.
fn close(mut there: Computes, mut here: GoesOn) {
    here.engine.serve(&Prompt::new(99, 34));
    here.close();
    there.engine.serve(&Prompt::new(99, 34));
    there.close();
}

impl Computes {
    /// Waits until a hand-over has ended, whatever else has.
    fn until_ended(&mut self, id: HandoverId) -> Ended {
        let mut found = None;
        until("it has not ended", || {
            let ended = self.side.poll(&self.engine.cache);
            found = ended.into_iter().find(|(of, _)| *of == id);
            found.is_some()
        });
        found.unwrap().1
    }

    fn until_refused(&self, refusal: Refusal) {
        until("nothing is refused", || self.server.stats().refused.contains_key(&refusal));
    }
}

#[test]
fn who_computes_hears_of_what_fails_on_the_way() {
    for panics in [false, true] {
        let (mut there, mut here) = pair(64);
        here.source = here.side.add(there.member.clone(), Box::new(Broken { panics })).unwrap();
        // One behind the other: the thread goes on.
        for id in [ID, OTHER] {
            let prompt = Prompt::new(1, 34);
            here.want(id, &prompt);
            there.compute_all(id, &prompt);
            let failed = here.failed();
            assert!(matches!(failed, OfferError::Peer(_)), "{failed:?}");
            assert!(matches!(there.until_ended(id), Ended::Cancelled));
        }
        assert!(!here.side.waits());
        close(there, here);
    }
}

#[test]
fn a_node_without_a_lease_is_asked_again() {
    let (mut there, mut here) = pair(64);
    let (prompt, reader) = (Prompt::new(1, 34), ReaderId(1));
    there.compute_all(ID, &prompt);
    let (node, group, name) = (there.server.node(), GroupId(0), BlockHash::from_u128(5));
    let other = RecordKey { format: 0, group, name };
    node.put(other, b"another record").unwrap();
    while node.find_and_pin(reader, &[other], LONG).is_ok() {}
    here.want(ID, &prompt);
    there.until_refused(Refusal::Busy);
    there.server.node().end_reader(reader);
    here.until_coming(ID, Coming::Whole);
    assert!(matches!(there.ended(), Ended::Taken));
    close(there, here);
}

#[test]
fn a_node_without_a_connection_is_asked_again() {
    let (mut there, mut here) = pair(64);
    let prompt = Prompt::new(1, 34);
    there.compute_all(ID, &prompt);
    let connect = || Peer::connect(&there.member, &key(), Instant::now() + LONG).ok();
    let others: Vec<_> = std::iter::from_fn(connect).collect();
    here.want(ID, &prompt);
    let refused = there.server.stats().too_many;
    until("it is refused", || there.server.stats().too_many > refused);
    drop(others);
    here.until_coming(ID, Coming::Whole);
    assert!(matches!(there.ended(), Ended::Taken));
    close(there, here);
}

#[test]
fn what_has_come_is_whole_though_its_node_has_no_room_to_hear_so() {
    let (mut there, mut here) = pair(64);
    let prompt = Prompt::new(1, 34);
    there.compute_all(ID, &prompt);
    let pool = there.server.node().pool().clone();
    let all = pool.claim(pool.claimable()).unwrap();
    here.want(ID, &prompt);
    there.until_refused(Refusal::NoRoom);
    here.until_coming(ID, Coming::Whole);
    drop(all);
    // It is told again.
    assert!(matches!(there.ended(), Ended::Taken));
    close(there, here);
}

#[test]
fn of_another_prompt_under_the_same_number_nothing_is_taken() {
    let (mut there, mut here) = pair(64);
    let (theirs, own) = (Prompt::new(1, 34), Prompt::new(2, 34));
    // As many tokens, and others: what the one computes has the other one's names here.
    there.compute_all(ID, &theirs);
    here.want(ID, &own);
    here.until_coming(ID, Coming::Whole);
    here.fill(ID, &own);
    let (live, end) = here.ready(&own);
    assert_eq!((end, here.side.stats().failed), (0, 1));
    here.go_on(live);
    assert!(here.engine.request(&own).tokens() == 34 && !here.side.waits());
    close(there, here);
}

#[test]
fn who_waits_hears_of_what_will_not_be_offered() {
    let (mut there, mut here, _prompt) = wanted();
    there.side.cancel(ID);
    assert!(matches!(here.failed(), OfferError::Withdrawn));
    assert_eq!(there.side.stats().cancelled, 0, "it was not begun");
    close(there, here);
}

#[test]
fn who_computes_hears_of_each_order_when_nobody_goes_on_any_more() {
    let (mut there, live, mut here, _) = half_a_prompt();
    let prompt = Prompt::new(2, 34);
    here.want(OTHER, &prompt);
    let other = there.begin(OTHER, &prompt);
    here.side = Decode::new(&here.engine.cache, key(), LONG).unwrap();
    until("an order is not declined", || {
        drop(there.side.poll(&there.engine.cache));
        there.side.stats().cancelled == 2
    });
    drop((live, other));
    close(there, here);
}

#[test]
fn a_cancel_is_heard_while_another_prompt_of_its_node_is_taken() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    let behind = Prompt::new(2, 34);
    here.want(OTHER, &behind);
    let other = there.begin(OTHER, &behind);
    here.side.cancel(OTHER);
    assert!(matches!(there.until_ended(OTHER), Ended::Cancelled));
    drop(other);
    there.side.cancel(OTHER);
    assert_eq!(there.side.open(), 1, "the first one goes on");
    there.finish(ID, live);
    here.goes_on(&prompt, 33);
    close(there, here);
}

#[test]
fn no_more_is_begun_than_there_is_room_for() {
    // Two of 9 blocks are more than it has.
    let (mut there, mut here) = pair(16);
    let prompts: Vec<_> =
        (1..6).map(|seed| (HandoverId(seed.into()), Prompt::new(seed, 34))).collect();
    let [first, second, third, fourth, fifth] = &prompts[..] else { unreachable!() };
    for (id, prompt) in [first, second, third] {
        there.compute_all(*id, prompt);
        here.want(*id, prompt);
    }
    here.until_coming(first.0, Coming::Whole);
    here.until_coming(second.0, Coming::Whole);
    // While the thread waits with the third, it hears of those behind. So it has looked at the third
    // between two of these.
    for (id, prompt) in [fourth, fifth] {
        let live = there.begin(*id, prompt);
        here.want(*id, prompt);
        here.side.cancel(*id);
        assert!(matches!(there.until_ended(*id), Ended::Cancelled));
        drop(live);
        there.side.cancel(*id);
    }
    here.poll();
    assert_eq!(here.side.coming(third.0), Some(Coming::Far));
    assert_eq!(there.side.open(), 1);
    here.fill(first.0, &first.1);
    let (live, end) = here.ready(&first.1);
    assert_eq!(end, 33);
    drop(live);
    here.until_coming(third.0, Coming::Whole);
    assert!(matches!(there.until_ended(third.0), Ended::Taken));
    close(there, here);
}

#[test]
fn what_was_given_before_a_copy_fails_is_not_given_again() {
    let (mut there, mut here, prompt) = wanted();
    let mut live = there.begin(ID, &prompt);
    there.compute(&mut live);
    there.machine.sim.fail_nth("cuMemcpyDtoHAsync", 3, ErrorCode::UNKNOWN);
    let failed = there.side.give(&there.engine.cache, ID, &mut live.sequence);
    assert!(matches!(failed, Err(HandoverError::Copy(_))), "{failed:?}");
    assert_eq!(there.side.stats().blocks, 2);
    there.give(ID, &mut live);
    assert_eq!(there.side.stats().blocks, 4);
    there.finish(ID, live);
    assert!(matches!(there.ended(), Ended::Taken));
    here.until_coming(ID, Coming::Whole);
    close(there, here);
}

#[test]
fn a_prompt_that_cannot_be_written_holds_up_no_other() {
    let (mut there, mut here) = pair(64);
    let prompts = [ID, OTHER].map(|id| (id, Prompt::new(id.0 as u32, 34)));
    for (id, prompt) in &prompts {
        there.compute_all(*id, prompt);
        here.want(*id, prompt);
        here.until_coming(*id, Coming::Whole);
        assert!(matches!(here.adopt(*id, prompt), Adopted::Filling));
        assert!(matches!(here.adopt(*id, prompt), Adopted::Later), "it has blocks");
    }
    here.engine.idle().unwrap();
    here.came.clear();
    here.machine.sim.fail_nth("cuMemcpyHtoDAsync", 1, ErrorCode::UNKNOWN);
    let failed = here.side.poll(&mut here.engine.cache);
    assert!(matches!(failed, Err(HandoverError::Copy(_))), "{failed:?}");
    assert_eq!((here.side.coming(ID), here.side.coming(OTHER)), (Some(Coming::Whole), None));
    for (_, prompt) in prompts.iter().rev() {
        here.goes_on(prompt, 33);
    }
    assert_eq!(here.side.stats().blocks_wrong, 0);
    close(there, here);
}

#[test]
fn what_was_computed_before_a_reset_is_withdrawn() {
    let (mut there, live, mut here, prompt) = half_a_prompt();
    there.engine.cache.reset();
    assert!(matches!(there.ended(), Ended::Failed(OfferError::Withdrawn)));
    there.finish(ID, live);
    assert_eq!((there.side.stats().blocks, there.side.open()), (4, 0));
    let (live, end) = here.ready(&prompt);
    assert_eq!(end, 16);
    assert!(matches!(here.came[..], [(ID, Came::Failed(OfferError::Withdrawn))]));
    here.go_on(live);
    // What is computed behind it is handed over.
    there.compute_all(OTHER, &prompt);
    here.want(OTHER, &prompt);
    assert!(matches!(there.until_ended(OTHER), Ended::Taken));
    close(there, here);
}
