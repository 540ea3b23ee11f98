//! Many sequences at once on the simulated device, with every byte read: under several seeds one
//! step at a time, and with real threads.
//!
//! `KV_STRESS_SEEDS` is the number of seeds (6 by default).

use std::sync::Arc;

use cuda_driver::Device;
use cuda_sim::{Pace, SimConfig, SimDriver};
use cuda_vmm::{Worker, WorkerOptions};

use crate::common::stress::{self, Outcome, Plan};

const PAGE: u64 = 4 << 10;

const SMALL: Plan = Plan {
    threads: 1,
    sequences: 6,
    steps: 150,
    planes: 2,
    token_bytes: 128,
    tokens_max: 80,
    look_ahead_tokens: 8,
    pages_percent: 75,
    check_every: 1,
    parts: 1,
    seed: 0,
};

fn machine(seed: u64) -> SimDriver {
    let config =
        SimConfig { device_bytes: 64 << 20, granularity: PAGE, seed, ..SimConfig::default() };
    SimDriver::new(config).unwrap()
}

/// Runs a plan and checks that nothing is left of it.
fn run(sim: SimDriver, worker: &Worker, plan: &Plan, turn: &(dyn Fn(u64) + Sync)) -> Outcome {
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let outcome = stress::run(&device, worker, plan, turn);
    drop(device);
    assert!(sim.findings().is_empty(), "seed {}: {:?}", plan.seed, sim.findings());
    let left = sim.check_leaks();
    assert!(left.is_clean(), "seed {}: left behind: {left}", plan.seed);
    assert_eq!(outcome.wrong, [""; 0], "seed {}", plan.seed);
    outcome
}

#[test]
fn every_byte_is_right_whatever_the_worker_has_done_between_two_steps() {
    let seeds = std::env::var("KV_STRESS_SEEDS").map_or(6, |text| text.parse().unwrap());
    let mut sum = Outcome::default();
    for seed in 1..=seeds {
        let worker = Worker::manual();
        // The worker takes up to three steps at each turn.
        let turn = |number: u64| (0..number % 4).for_each(|_| _ = worker.poll());
        // Too few pages for all, however soon the device is done with those that are given back.
        let plan = Plan { seed, pages_percent: 50, ..SMALL };
        let outcome = run(machine(seed), &worker, &plan, &turn);
        sum.finished += outcome.finished;
        sum.preempted += outcome.preempted;
        sum.stats.adopted += outcome.stats.adopted;
        sum.stats.stalls += outcome.stats.stalls;
    }
    // The seeds cover the intended cases.
    assert!(sum.finished > 20, "{sum:?}");
    assert!(sum.preempted > 0 && sum.stats.adopted > 0 && sum.stats.stalls > 0, "{sum:?}");
}

#[test]
fn sixty_four_sequences_decode_two_thousand_steps_on_four_threads() {
    let plan = Plan {
        threads: 4,
        sequences: 16,
        steps: 2_048,
        token_bytes: 16,
        tokens_max: 2_048,
        look_ahead_tokens: 256,
        check_every: 128,
        seed: 11,
        ..SMALL
    };
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    // The device runs only work that the host waits for, so work is pending whenever a sequence
    // ends.
    let sim = machine(11);
    sim.set_pace(Pace::Slowest);
    // The worker's thread works whenever it is scheduled. Sometimes a decoder makes it work right
    // after a step.
    let turn = |number: u64| {
        if number.is_multiple_of(8) {
            worker.poll();
        }
    };
    let outcome = run(sim, &worker, &plan, &turn);
    assert!(outcome.finished > 64 && outcome.stats.adopted > 0, "{outcome:?}");
    worker.close();
}
