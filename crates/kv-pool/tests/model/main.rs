//! Random operations against a naive reference: every answer, place and count must be the same.
//!
//! `KV_POOL_SEED` replays one seed; a failure prints the one that it came from.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test fails by panicking")]

mod driver;
mod reference;

use driver::Driver;

const EPISODES: u64 = 400;
const OPERATIONS: u64 = 5_000;

/// Names the episode when a check in it fails.
struct Episode {
    seed: u64,
}

impl Drop for Episode {
    #[allow(clippy::print_stderr, reason = "a failure must say how it can be replayed")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with KV_POOL_SEED={}", self.seed);
        }
    }
}

#[test]
fn the_pool_does_what_the_reference_does() {
    let seeds = match std::env::var("KV_POOL_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..=EPISODES).collect(),
    };
    let mut seen = driver::Seen::default();
    let all = seeds.len() > 1;
    for seed in seeds {
        let _episode = Episode { seed };
        let mut driver = Driver::new(seed);
        for _ in 0..OPERATIONS {
            driver.step();
        }
        seen.add(&driver.finish());
    }
    // A driver that never gets into a corner shows nothing about it.
    assert!(!all || seen.everything(), "{seen:?}");
}
