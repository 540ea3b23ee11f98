//! Programs run under all orders, or many: what is explored, what is found, and how it replays.

use std::cell::RefCell;
use std::collections::BTreeSet;

use crate::common::*;
use cuda_driver::Driver;
use cuda_sim::{
    Exploration, ExploreLimits, Pace, RaceCheck, Script, SimConfig, SimDriver, explore,
    explore_random, replay,
};

/// A configuration for programs that race on purpose.
fn unordered() -> SimConfig {
    SimConfig { races: RaceCheck::Off, ..SimConfig::default() }
}

fn all(program: impl Fn(&SimDriver) -> Result<(), String>) -> Exploration {
    explore(&unordered(), ExploreLimits::default(), program).unwrap()
}

/// The results of `outcome` under all orders, and the number of orders.
fn outcomes<T: Ord>(outcome: impl Fn(&SimDriver) -> T) -> (BTreeSet<T>, u64) {
    let seen = RefCell::new(BTreeSet::new());
    let found = all(|sim| {
        bind(sim, 0);
        sim.register_kernels(REFERENCES);
        seen.borrow_mut().insert(outcome(sim));
        Ok(())
    });
    found.assert_passed();
    assert!(found.complete);
    (seen.into_inner(), found.explored)
}

#[test]
fn one_operation_runs_at_once_or_at_the_wait() {
    // The copy runs before the host's write, after it, or only in the wait.
    let (seen, explored) = outcomes(|sim| {
        let stream = sim.stream_create(false).unwrap();
        let host = pinned(sim, 1);
        let device = sim.mem_alloc(1).unwrap();
        host_write(host, b"a");
        upload_async(sim, device, host, 1, stream).unwrap();
        host_write(host, b"b");
        sim.host_step("writes c");
        host_write(host, b"c");
        download(sim, device, 1, stream).unwrap()
    });
    assert_eq!(seen, [b"a", b"b", b"c"].map(|byte| byte.to_vec()).into());
    assert_eq!(explored, 3);
}

#[test]
fn operations_of_one_stream_never_pass_each_other() {
    let (seen, explored) = outcomes(|sim| {
        let stream = sim.stream_create(false).unwrap();
        let device = sim.mem_alloc(1).unwrap();
        for value in 1..=3 {
            fill(sim, device, value, 1, stream).unwrap();
        }
        download(sim, device, 1, stream).unwrap()[0]
    });
    assert_eq!(seen, [3].into());
    // Number of fills that have run after each call: 0 <= a <= 1, a <= b <= 2, b <= c <= 3.
    assert_eq!(explored, 14);
}

/// The values that a byte can have after four streams each wrote their own.
fn last_writer(ordered: bool) -> (BTreeSet<u8>, u64) {
    outcomes(|sim| {
        let streams = [0; 3].map(|_| sim.stream_create(false).unwrap());
        let device = sim.mem_alloc(1).unwrap();
        let event = sim.event_create(false).unwrap();
        for (value, &stream) in (1..).zip(&streams) {
            if ordered && value > 1 {
                wait(sim, stream, event).unwrap();
            }
            fill(sim, device, value, 1, stream).unwrap();
            if ordered && value < 3 {
                record(sim, event, stream).unwrap();
            }
        }
        sim.ctx_synchronize().unwrap();
        download(sim, device, 1, streams[0]).unwrap()[0]
    })
}

#[test]
fn unordered_streams_end_in_every_order_and_ordered_ones_in_one() {
    assert_eq!(last_writer(false).0, [1, 2, 3].into());
    assert_eq!(last_writer(true).0, [3].into());
}

#[test]
fn the_legacy_default_stream_is_a_barrier_for_blocking_streams_only() {
    // One writer on the default stream, between two writers on other streams.
    let around = |blocking| {
        outcomes(move |sim| {
            let streams = [0; 2].map(|_| sim.stream_create(blocking).unwrap());
            let device = sim.mem_alloc(1).unwrap();
            fill(sim, device, 1, 1, streams[0]).unwrap();
            fill(sim, device, 2, 1, 0).unwrap();
            fill(sim, device, 3, 1, streams[1]).unwrap();
            sim.ctx_synchronize().unwrap();
            download(sim, device, 1, 0).unwrap()[0]
        })
        .0
    };
    assert_eq!(around(true), [3].into());
    assert_eq!(around(false), [1, 2, 3].into());
}

#[test]
fn queries_answer_both_and_a_loop_of_them_ends() {
    let (seen, _) = outcomes(|sim| {
        let streams = [0; 2].map(|_| sim.stream_create(false).unwrap());
        let events = [0; 2].map(|_| sim.event_create(false).unwrap());
        for (&event, &stream) in events.iter().zip(&streams) {
            record(sim, event, stream).unwrap();
        }
        let answers = events.map(|event| query(sim, event).unwrap());
        while !query(sim, events[0]).unwrap() {}
        answers
    });
    assert_eq!(seen, [[false, false], [false, true], [true, false], [true, true]].into());
}

#[test]
fn unmapping_is_seen_by_work_that_had_not_run() {
    let found = all(|sim| {
        bind(sim, 0);
        let base = reserve(sim, 1);
        let handle = map_page(sim, base);
        let stream = sim.stream_create(false).unwrap();
        fill(sim, base, 1, 1, stream).unwrap();
        // The mistake: the program does not wait for the fill.
        sim.mem_unmap(base, PAGE).unwrap();
        release(sim, handle).unwrap();
        sync(sim, stream).map_err(|error| error.to_string())
    });
    let failure = found.failure.unwrap();
    assert!(failure.reason.contains("ILLEGAL_ADDRESS"), "{failure}");
    assert_eq!(failure.number, 1, "the schedule with the host ahead comes first");
}

/// Reads a byte of pinned memory that the host writes only after the launch. That is harmless on a
/// late device and wrong on a fast one.
fn written_too_late(sim: &SimDriver) -> Result<(), String> {
    bind(sim, 0);
    let stream = sim.stream_create(false).unwrap();
    let (device, host) = (sim.mem_alloc(1).unwrap(), pinned(sim, 1));
    host_write(host, b"?");
    upload_async(sim, device, host, 1, stream).unwrap();
    sim.host_step("writes the source");
    host_write(host, b"!");
    match download(sim, device, 1, stream).unwrap()[..] {
        [b'!'] => Ok(()),
        _ => Err("the copy was early".to_owned()),
    }
}

#[test]
fn a_failing_schedule_is_told_and_replays() {
    let config = SimConfig::default();
    let found = all(written_too_late);
    assert!(!found.complete);
    let failure = found.failure.unwrap();
    assert_eq!((failure.number, failure.reason.as_str()), (2, "the copy was early"));
    // The host continues after the enqueue, but not at its step.
    assert_eq!(failure.script.to_string(), "0.1");
    let line = |word: &str| {
        let place = failure.schedule.iter().position(|line| line.contains(word));
        place.unwrap_or_else(|| panic!("no {word:?} in {failure}"))
    };
    let enqueued = line("host    enqueues #1 cuMemcpyHtoDAsync in stream 0x");
    let ran = line("device  runs     #1 cuMemcpyHtoDAsync");
    assert!(enqueued < ran && ran < line("host    writes the source"), "{failure}");
    assert!(failure.schedule[ran].contains(": 1 bytes from 0x"), "{failure}");
    let text = failure.to_string();
    assert!(text.starts_with("schedule 2 failed: the copy was early\nscript 0.1\n   1  host "));

    let again = replay(&config, &failure.script, written_too_late).unwrap();
    assert_eq!(again.outcome, Err("the copy was early".to_owned()));
    assert_eq!(again.schedule.len(), failure.schedule.len());
    let late: Script = "0.0".parse().unwrap();
    assert_eq!(replay(&config, &late, written_too_late).unwrap().outcome, Ok(()));
    let foreign: Script = "7".parse().unwrap();
    let outcome = replay(&config, &foreign, written_too_late).unwrap().outcome.unwrap_err();
    assert!(outcome.contains("decision 1 is 7 of 2 options"), "{outcome}");
}

#[test]
fn random_schedules_find_it_too_and_name_the_seed() {
    let config = SimConfig::default();
    let found = explore_random(&config, 100..200, written_too_late).unwrap();
    let failure = found.failure.unwrap();
    let seed = failure.seed.unwrap();
    assert_eq!((seed, found.explored), (99 + failure.number, failure.number));
    assert!(failure.to_string().contains(&format!("\nseed {seed}\nscript ")));
    let again = explore_random(&config, seed..seed + 1, written_too_late).unwrap();
    assert_eq!(again.failure.unwrap().script, failure.script);
    let again = replay(&config, &failure.script, written_too_late).unwrap();
    assert_eq!(again.outcome, Err(failure.reason));
}

#[test]
fn panics_and_findings_are_failures() {
    let panicked = all(|_| panic!("on purpose {}", 7)).failure.unwrap();
    assert_eq!(panicked.reason, "the program panicked: on purpose 7");
    assert_eq!(panicked.script, Script::default());
    let noticed = all(|sim| {
        bind(sim, 0);
        let memory = sim.mem_alloc(1).unwrap();
        fill(sim, memory, 0, 2, 0).unwrap_err();
        Ok(())
    });
    assert!(noticed.failure.unwrap().reason.starts_with("InvalidRange: cuMemsetD8Async"));
}

#[test]
fn limits_end_an_exploration_that_then_is_not_complete() {
    let program = |sim: &SimDriver| {
        bind(sim, 0);
        let streams = [0; 3].map(|_| sim.stream_create(false).unwrap());
        let memory = sim.mem_alloc(1).unwrap();
        for &stream in streams.iter().cycle().take(12) {
            fill(sim, memory, 0, 1, stream).unwrap();
        }
        sim.ctx_synchronize().map_err(|error| error.to_string())
    };
    let config = unordered();
    let few = ExploreLimits { schedules_max: 50, ..ExploreLimits::default() };
    let found = explore(&config, few, program).unwrap();
    assert_eq!((found.explored, found.complete), (50, false));
    let shallow = ExploreLimits { choices_max: 3, ..ExploreLimits::default() };
    let found = explore(&config, shallow, program).unwrap();
    assert!(found.failure.is_none() && !found.complete);
    assert_eq!(found.choices_most, 3);
    assert!((4..50).contains(&found.explored), "{}", found.explored);
    let devices = SimConfig { devices: 0, ..SimConfig::default() };
    assert!(explore(&devices, few, program).is_err());
}

#[test]
fn outside_an_exploration_a_host_step_is_nothing() {
    let sim = paced(Pace::Slowest, 0);
    let memory = sim.mem_alloc(1).unwrap();
    fill(&sim, memory, 0, 1, 0).unwrap();
    sim.host_step("writes");
    assert_eq!(sim.run_all(), 1);
}
