//! Counts: each thing that happens is counted once, where it belongs.

use crate::common::sampled;
use crate::prelude::*;

fn ask(manager: &mut Manager, ids: Range<u32>) -> Answer {
    manager.ask_all(&mut [Request::new(ids.collect())], u64::MAX).pop().unwrap()
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
fn blocks_are_counted_by_what_they_do() {
    let mut manager = manager(8, 4);
    let states = |manager: &Manager| manager.stats().blocks[0];
    let free = BlockStates { free: 8, ..BlockStates::default() };
    assert_eq!(states(&manager), free);
    assert_eq!(manager.stats().blocks[1].free, 4);
    let mut sequence = computed(&mut manager, 0..10);
    assert_eq!(states(&manager), BlockStates { free: 5, in_use: 3, ..BlockStates::default() });
    manager.commit(&mut sequence, 1, &[10]).unwrap();
    go_on_staged(&mut manager, &mut sequence, 1);
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
    let mut manager = made(options);
    let mut sequence = admit(&mut manager, 0..9);
    assert!(matches!(ask(&mut manager, 0..12), Answer::Waiting(Waiting::Prefix { .. })));
    assert_eq!(manager.stats().stalls.prefix, 1);
    assert!(matches!(ask(&mut manager, 100..108), Answer::NoRoom(_)));
    assert_eq!(manager.stats().stalls.room, 1);
    let other = admit(&mut manager, 100..104);
    assert!(matches!(ask(&mut manager, 200..204), Answer::NoRow));
    assert_eq!(manager.stats().stalls.row, 1);
    assert!(common::gets_nothing(&manager.reserve(&mut sequence, 17)));
    assert_eq!(manager.stats().stalls.room, 2);
    go_on_staged(&mut manager, &mut sequence, 9);
    assert!(matches!(manager.begin_step(), Err(StepError::Busy { .. })));
    let stalls = manager.stats().stalls;
    assert_eq!((stalls.busy, stalls.load), (1, 0));
    drop((sequence, other));
}

/// Two groups that keep all: blocks of eight tokens, and of four.
fn unequal(device: u64, host: u64) -> Manager {
    let mut options = with_groups(options(device, host), options(2 * device, 2 * host).groups);
    options.groups[0].block_tokens = 2 * BLOCK;
    made(options)
}

#[test]
fn tokens_that_lay_in_host_memory_are_counted_once_for_all_groups() {
    let mut manager = unequal(3, 8);
    cache_prompt(&mut manager, 0..17);
    cache_prompt(&mut manager, 100..124);
    let again = computed(&mut manager, 0..17);
    assert_eq!((again.cached_tokens(), again.onboarded_blocks()), (16, 2 + 4));
    let stats = manager.stats();
    assert_eq!((stats.cached_tokens, stats.host_tokens), (16, 16));
    // What one group alone has on the device lies in host memory for the others.
    assert_eq!(stats.prompt_tokens, 17 + 24 + 17);
}

#[test]
fn tokens_that_two_sequences_compute_are_counted_once_however_often_one_comes_back() {
    let mut manager = manager(16, 8);
    let [mut first, mut twin] = twins(&mut manager, 0..9);
    let mut last = step(&mut manager, &mut [&mut first, &mut twin]).step;
    for id in 9..12 {
        manager.commit(&mut twin, last, &[id]).unwrap();
        manager.suspend(&mut twin).unwrap();
        step(&mut manager, &mut []);
        manager.resume(&mut twin).unwrap().given().unwrap();
        manager.reserve(&mut twin, 1).unwrap().given().unwrap();
        last = step(&mut manager, &mut [&mut twin]).step;
    }
    assert_eq!(manager.stats().twice_tokens, 8);
    // What it computes again is computed twice once more.
    manager.commit(&mut twin, last, &[12]).unwrap();
    manager.truncate(&mut twin, 4).unwrap();
    manager.extend(&mut twin, &[4, 5, 6, 7, 8]).unwrap();
    go_on(&mut manager, &mut twin, 5);
    assert_eq!(manager.stats().twice_tokens, 8 + 4);
    drop((first, twin));
}

#[test]
fn a_hint_brings_the_blocks_of_all_groups_back_whatever_their_sizes() {
    let mut manager = unequal(4, 8);
    cache_prompt(&mut manager, 0..17);
    cache_prompt(&mut manager, 100..132);
    let near = |manager: &Manager| {
        [GroupId(0), GroupId(1)].map(|group| {
            let blocks = manager.pool(group).unwrap().snapshot().blocks;
            let near = blocks.iter().filter(|block| block.location.tier == Tier::Primary);
            near.filter(|block| block.hash.is_some()).count()
        })
    };
    assert_eq!(manager.forget(&names(100..132)), 8);
    step(&mut manager, &mut []);
    assert_eq!(near(&manager), [0, 0]);
    assert_eq!(manager.prefetch(&names(0..16)), 2 + 4);
    let plan = step(&mut manager, &mut []);
    assert_eq!((plan.copies.len(), near(&manager)), (2 + 4, [2, 4]));
    assert_eq!(manager.prefetch(&names(0..16)), 0, "all is there");
    let hit = admit(&mut manager, 0..17);
    assert_eq!((hit.cached_tokens(), hit.onboarded_blocks()), (16, 0));
}

#[test]
fn a_hint_for_what_is_there_keeps_no_block_from_running_sequences() {
    let mut manager = manager(4, 4);
    cache_prompt(&mut manager, 100..109);
    let mut running = sampled(&mut manager, 0..7, 7);
    let open = manager.begin_step().unwrap();
    assert_eq!(manager.prefetch(&names(100..108)), 0);
    manager.reserve(&mut running, 2).unwrap().given().unwrap();
    drop(open);
}
