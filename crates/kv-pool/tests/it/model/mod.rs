//! Random operations against a naive reference: every answer, place, count and event is the same.
//!
//! `KV_MODEL_SEED` is the first seed, and `KV_MODEL_EPISODES=1` tries no other; a failure prints
//! the seed that it replays from. `KV_MODEL_DEEP=1` does more than a million operations.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a campaign says what it has seen")]

mod blocks;
mod budget;
mod driver;
mod operations;
mod reference;
mod world;

use driver::Driver;

const EPISODES: u64 = 400;
const EPISODES_DEEP: u64 = 4_000;
const OPERATIONS: u64 = 600;

/// Names the episode when a check in it fails.
struct Episode {
    seed: u64,
}

impl Drop for Episode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with KV_MODEL_EPISODES=1 KV_MODEL_SEED={}", self.seed);
        }
    }
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

#[test]
fn the_pool_does_what_the_reference_does() {
    let deep = variable("KV_MODEL_DEEP", 0) == 1;
    let episodes = variable("KV_MODEL_EPISODES", if deep { EPISODES_DEEP } else { EPISODES });
    let first = variable("KV_MODEL_SEED", 1);
    let mut seen = driver::Seen::default();
    for seed in first..first + episodes {
        let _episode = Episode { seed };
        let mut driver = Driver::new(seed);
        for _ in 0..OPERATIONS {
            driver.step();
        }
        seen.add(&driver.finish());
    }
    println!("{} operations from seed {first} on: {seen:?}", episodes * OPERATIONS);
    // A driver that never gets into a corner shows nothing about it.
    assert!(episodes < EPISODES || seen.missing().is_empty(), "never met: {:?}", seen.missing());
}
