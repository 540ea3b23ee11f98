//! Loading or computing: what a load is expected to take decides, and no wait is longer than computing.

use crate::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// A manager of an engine that computes a block in so many milliseconds.
fn rig(compute: ComputeRate) -> Rig {
    let lower = LowerOptions { compute, wait_max: 1000 * MS, ..lower() };
    Rig::with(ManagerOptions { lower, ..options(16, 16) })
}

/// An engine that computes a block in 10 ms.
fn ten_ms() -> ComputeRate {
    ComputeRate::PerSecond(100 * u64::from(BLOCK))
}

/// Stores prompts of four blocks each, and has all leave the device and the host.
fn stored(rig: &mut Rig, prompts: u32) {
    for prompt in 0..prompts {
        assert_eq!(rig.store(ids(prompt)).len(), 4);
    }
    rig.push_out();
}

fn ids(prompt: u32) -> Range<u32> {
    prompt * 100..prompt * 100 + 4 * BLOCK
}

/// Loads a prompt's four blocks in so many milliseconds.
fn load_in(rig: &mut Rig, prompt: u32, ms: u32) {
    let mut request = request(ids(prompt).start..ids(prompt).end + 1);
    let load = rig.load(&mut request);
    rig.wait(ms * MS);
    rig.settle(0, load.ticket, &[]);
    rig.transfers.clear();
    let mut sequence = admitted(rig.again(&mut request));
    rig.step(&mut [&mut sequence]);
}

fn ask(rig: &mut Rig, prompt: u32) -> Answer {
    rig.again(&mut request(ids(prompt).start..ids(prompt).end + 1))
}

fn waits(answer: &Answer) -> Option<u64> {
    match answer {
        Answer::Waiting(Waiting::Load { blocks, .. }) => Some(*blocks),
        _ => None,
    }
}

#[test]
fn what_is_computed_faster_is_not_loaded() {
    let mut rig = rig(ten_ms());
    stored(&mut rig, 3);
    // The first load is tried: a block in 10 ms, which is no faster than computing.
    load_in(&mut rig, 0, 40);
    let sequence = admitted(ask(&mut rig, 1));
    assert_eq!(sequence.cached_tokens(), 0);
    let stats = rig.manager.lower_stats();
    assert_eq!((stats.declined_blocks, stats.open_tickets, stats.late), (4, 0, 0));
}

#[test]
fn what_is_declined_is_not_asked_for_again() {
    let mut rig = rig(ten_ms());
    stored(&mut rig, 3);
    load_in(&mut rig, 0, 40);
    // No room for the prompt, so that the same request is asked about in every step.
    let other = admitted(rig.ask(5000..5000 + 14 * BLOCK).1);
    let mut request = request(ids(1).start..ids(1).end + 1);
    for _ in 0..70 {
        let answer = rig.again(&mut request);
        assert!(matches!(answer, Answer::NoRoom(_)), "{answer:?}");
        rig.step(&mut []);
    }
    drop(other);
    assert_eq!(rig.manager.lower_stats().declined_blocks, 4);
}

#[test]
fn what_is_loaded_faster_is_waited_for() {
    let mut rig = rig(ten_ms());
    stored(&mut rig, 3);
    load_in(&mut rig, 0, 20);
    assert_eq!(waits(&ask(&mut rig, 1)), Some(4));
    assert_eq!(rig.manager.lower_stats().declined_blocks, 0);
    // Behind those four blocks, another four come no sooner than they are computed.
    let sequence = admitted(ask(&mut rig, 2));
    assert_eq!(sequence.cached_tokens(), 0);
    assert_eq!(rig.manager.lower_stats().declined_blocks, 4);
}

#[test]
fn a_part_is_loaded_that_comes_before_the_deadline() {
    let lower = LowerOptions { compute: ComputeRate::PerSecond(1), wait_max: 100 * MS, ..lower() };
    let mut rig = Rig::with(ManagerOptions { lower, ..options(16, 16) });
    stored(&mut rig, 2);
    // A block in 40 ms. Its own wait ends before.
    let mut first = request(ids(0).start..ids(0).end + 1);
    let load = rig.load(&mut first);
    rig.wait(160 * MS);
    rig.settle(0, load.ticket, &[]);
    let mut second = request(ids(1).start..ids(1).end + 1);
    assert_eq!(waits(&rig.again(&mut second)), Some(2));
    let plan = rig.step(&mut []);
    rig.wait(80 * MS);
    rig.settle(0, plan.transfers[0].ticket, &[]);
    let sequence = admitted(rig.again(&mut second));
    assert_eq!(sequence.cached_tokens(), u64::from(2 * BLOCK));
    assert_eq!(rig.manager.lower_stats().declined_blocks, 2 + 2);
}

#[test]
fn no_request_waits_longer_than_it_is_computed_and_a_late_load_keeps_its_blocks() {
    let mut rig = rig(ten_ms());
    stored(&mut rig, 2);
    let mut late = request(ids(0).start..ids(0).end + 1);
    let load = rig.load(&mut late);
    rig.wait(39 * MS);
    assert_eq!(waits(&rig.again(&mut late)), Some(4));
    rig.wait(MS);
    let mut sequence = admitted(rig.again(&mut late));
    assert_eq!(sequence.cached_tokens(), 0);
    let stats = rig.manager.lower_stats();
    // The tier may write its host blocks still.
    assert_eq!((stats.late, stats.ticket_blocks), (1, 4));
    rig.step(&mut [&mut sequence]);
    rig.settle(0, load.ticket, &[]);
    assert_eq!(rig.manager.lower_stats().ticket_blocks, 0);
}

#[test]
fn a_tier_that_was_too_slow_is_tried_again() {
    let mut rig = rig(ten_ms());
    stored(&mut rig, 2);
    load_in(&mut rig, 0, 400);
    // It is asked for the same again and again.
    let tried = (0..200).filter(|_| {
        let answer = ask(&mut rig, 1);
        rig.step(&mut []);
        waits(&answer).is_some()
    });
    let tried = tried.count();
    assert!(tried >= 1, "never in 200 times");
}

#[test]
fn a_rate_is_measured_from_steps() {
    let mut rig = rig(ComputeRate::Measured);
    stored(&mut rig, 3);
    // Nothing took any time yet, so nothing is known of the engine, and this is loaded.
    load_in(&mut rig, 0, 400);
    // Four blocks in 4 ms.
    let _sequence = rig.computed(5000..5000 + 4 * BLOCK);
    rig.wait(4 * MS);
    let sequence = admitted(ask(&mut rig, 2));
    assert_eq!(sequence.cached_tokens(), 0);
    assert_eq!(rig.manager.lower_stats().declined_blocks, 4);
}

#[test]
fn what_is_never_loaded_is_stored_only_where_everything_is() {
    let mut rig = rig(ten_ms());
    stored(&mut rig, 2);
    load_in(&mut rig, 0, 400);
    // Without a policy, everything is: it may be for another process.
    let before = rig.manager.lower_stats().refused_blocks[0];
    let policy = Box::new(StoreAll);
    rig.manager.set_store_policy(Tier::Third, policy).unwrap();
    assert!(rig.store(7000..7000 + 4 * BLOCK).is_empty());
    assert_eq!(rig.manager.lower_stats().refused_blocks[0], before + 4);
}

#[test]
fn rates_of_any_size_are_taken() {
    for compute in
        [ComputeRate::PerSecond(0), ComputeRate::PerSecond(1), ComputeRate::PerSecond(u64::MAX)]
    {
        let mut rig = rig(compute);
        stored(&mut rig, 2);
        load_in(&mut rig, 0, 0);
        let _ = ask(&mut rig, 1);
        rig.wait(Duration::MAX);
        let _ = ask(&mut rig, 1);
    }
}
