//! Counts: each thing that happens is counted once, where it belongs.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::{admit, admitted, computed, manager, options, step};
use kv_manager::{
    Answer, BlockStates, Manager, ManagerOptions, Request, StepError, Waiting, WorkerId,
};

fn ask(manager: &mut Manager, ids: std::ops::Range<u32>) -> Answer {
    manager.admit(&mut [Request::new(ids.collect())], u64::MAX).pop().unwrap()
}

#[test]
fn hits_are_counted_by_tier() {
    let mut manager = manager(4, 8);
    drop(computed(&mut manager, 0..8));
    let stats = manager.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens, stats.host_tokens), (8, 0, 0));
    drop(computed(&mut manager, 0..9));
    let stats = manager.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens, stats.host_tokens), (17, 8, 0));
    // What was cached goes to host memory, and comes back.
    drop(computed(&mut manager, 100..116));
    assert!(manager.stats().offloaded_blocks >= 2);
    drop(computed(&mut manager, 0..9));
    let stats = manager.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens, stats.host_tokens), (42, 16, 8));
    assert_eq!(stats.twice_tokens, 0);
}

#[test]
fn tokens_that_two_sequences_compute_are_counted() {
    let mut manager = manager(16, 0);
    let mut requests = [Request::new((0..9).collect()), Request::new((0..9).collect())];
    requests[1].waits = false;
    let mut answers = manager.admit(&mut requests, u64::MAX);
    let (mut twin, mut first) =
        (admitted(answers.pop().unwrap()), admitted(answers.pop().unwrap()));
    step(&mut manager, &mut [&mut first, &mut twin]);
    assert_eq!(manager.stats().twice_tokens, 8);
    drop((first, twin));
    assert_eq!(manager.stats().twice_tokens, 8, "once");
}

#[test]
fn blocks_are_counted_by_what_they_do() {
    let mut manager = manager(8, 4);
    let states = |manager: &Manager| manager.stats().blocks[0];
    let free = BlockStates { free: 8, ..BlockStates::default() };
    assert_eq!(states(&manager), free);
    assert_eq!(manager.stats().blocks[1].free, 4);
    let mut sequence = computed(&mut manager, 0..10);
    assert_eq!(states(&manager), BlockStates { free: 5, in_use: 3, ..BlockStates::default() });
    manager.commit(&mut sequence, 1, &[10]).unwrap();
    manager.reserve(&mut sequence, 1).unwrap();
    let open = manager.begin_step().unwrap();
    manager.stage(&open, &mut [&mut sequence]).unwrap();
    manager.finish_step(open).unwrap();
    drop(sequence);
    let left = BlockStates { free: 5, retiring: 3, ..BlockStates::default() };
    assert_eq!(states(&manager), left);
    // A lost worker may still write them.
    manager.lose_worker(WorkerId(0)).unwrap();
    assert_eq!(states(&manager), BlockStates { quarantined: 3, ..left });
    manager.fence_worker(WorkerId(0)).unwrap();
    assert_eq!(states(&manager), free);
}

#[test]
fn what_is_waited_for_is_counted() {
    let options = ManagerOptions { steps_in_flight_max: 1, sequences_max: 2, ..options(4, 0) };
    let mut manager = Manager::new(options).unwrap();
    let mut sequence = admit(&mut manager, 0..9);
    assert!(matches!(ask(&mut manager, 0..12), Answer::Waiting(Waiting::Prefix { .. })));
    assert_eq!(manager.stats().stalls.prefix, 1);
    assert!(matches!(ask(&mut manager, 100..108), Answer::NoRoom(_)));
    assert_eq!(manager.stats().stalls.room, 1);
    let other = admit(&mut manager, 100..104);
    assert!(matches!(ask(&mut manager, 200..204), Answer::NoRow));
    assert_eq!(manager.stats().stalls.row, 1);
    assert!(manager.reserve(&mut sequence, 17).is_err());
    assert_eq!(manager.stats().stalls.room, 2);
    manager.reserve(&mut sequence, 9).unwrap();
    let open = manager.begin_step().unwrap();
    manager.stage(&open, &mut [&mut sequence]).unwrap();
    manager.finish_step(open).unwrap();
    assert!(matches!(manager.begin_step(), Err(StepError::Busy { .. })));
    let stalls = manager.stats().stalls;
    assert_eq!((stalls.busy, stalls.load), (1, 0));
    drop((sequence, other));
}
