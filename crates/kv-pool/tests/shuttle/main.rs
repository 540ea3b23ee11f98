//! Larger programs in random orders: several threads that do anything that an engine or a remote
//! reader does.
//!
//! Built for the model checker only:
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p kv-pool --test shuttle`. `cargo xtask model`
//! does that. Without `--cfg shuttle` this program has no tests.
//!
//! `KV_MODEL_SEED` is the first seed; with `KV_MODEL_SCHEDULES=1` no other is tried, which replays
//! a failure. `KV_MODEL_DEEP=1` tries more.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a campaign says what it has seen")]
#![cfg(shuttle)]

#[path = "../it/common/memory.rs"]
mod memory;
#[path = "../it/common/one.rs"]
mod one;
#[path = "../it/common/worker.rs"]
mod worker;

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use worker::{Shape, play};

/// Orders of each seed that the scheduler with priorities tries: it learns from the first how long
/// the program is.
const PCT_ORDERS: usize = 20;
/// Interruptions that a defect may need to show.
const PCT_DEPTH: usize = 4;

const SHAPES: [Shape; 3] = [
    Shape { primary: 2, secondary: 1, threads: 4, steps: 12 },
    Shape { primary: 4, secondary: 2, threads: 5, steps: 20 },
    Shape { primary: 12, secondary: 6, threads: 4, steps: 60 },
];

/// Names the seed when a check in its program fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with KV_MODEL_SCHEDULES=1 KV_MODEL_SEED={}", self.0);
        }
    }
}

fn config() -> Config {
    let mut config = Config::new();
    // That it knows one order of memory only: the other model checker is for that.
    config.silence_warnings = true;
    config
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

fn all<S: Scheduler + 'static>(what: &str, short: u64, scheduler: impl Fn(u64) -> S) {
    let deep = variable("KV_MODEL_DEEP", 0) == 1;
    let schedules = variable("KV_MODEL_SCHEDULES", if deep { short * 100 } else { short });
    let first = variable("KV_MODEL_SEED", 1);
    let mut orders = 0;
    for seed in first..first + schedules {
        let _named = Seed(seed);
        for shape in SHAPES {
            orders += Runner::new(scheduler(seed), config()).run(move || _ = play(seed, shape));
        }
    }
    println!("{what}: {schedules} seeds, {orders} orders");
}

#[test]
fn random_orders() {
    all("random", 300, |seed| RandomScheduler::new_from_seed(seed, 1));
}

#[test]
fn orders_with_few_interruptions() {
    all("few interruptions", 20, |seed| PctScheduler::new_from_seed(seed, PCT_DEPTH, PCT_ORDERS));
}
