//! Random schedules of whole caches, at the level of bytes: of one to four groups with all kinds of layers, tiers, tenants, drafts,
//! forks and failures together, in this process on one device and two, and with one to three workers that are told by bytes.
//! Every byte that a sequence attends to is what its tokens say, after every step that completes; at the end nothing is left.
//!
//! `KV_SCHEDULES=2000` plays so many schedules, and `KV_SEED` is the first seed; a failure prints the seed that it replays from.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a campaign says what it has seen")]

mod play;
mod run;
mod setup;
mod steps;
mod transfer;
mod turns;
mod work;
mod workers;

use crate::prelude::*;
use play::Play;
use workers::Here;

const SCHEDULES: u64 = 300;
const TURNS: u32 = 40;

/// What the schedules of the gate are to come to, so that none of it is missed unseen.
const EXPECTED: [&str; 40] = [
    "a block that was compared",
    "a budget",
    "a commit",
    "a copy on write",
    "a cut",
    "a draft model that computes",
    "a draft that was rejected",
    "a driver call that failed",
    "a dropped step",
    "a fork",
    "a hit",
    "a hit in host memory",
    "a lost sequence",
    "a name that was forgotten",
    "a next turn",
    "a prefetch",
    "a redo",
    "a request beyond its tenant's bound",
    "a request that waits",
    "a request that waits for a load",
    "a reservation with ids to come",
    "a reset",
    "a resumption",
    "a state that is read",
    "a step",
    "a suspension",
    "a suspension that waits for ids",
    "a tenant at its bound",
    "a worker that failed",
    "an admission",
    "an admission before its load had ended",
    "an arrival",
    "an end of a draft model",
    "an offloaded block",
    "a block loaded from below",
    "a window that has moved",
    "no room for a request",
    "no room for a token",
    "no row",
    "stale ids",
];

/// Names the schedule when a check in it fails.
struct Schedule {
    seed: u64,
}

impl Drop for Schedule {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with KV_SCHEDULES=1 KV_SEED={}", self.seed);
        }
    }
}

type Counts = BTreeMap<&'static str, u64>;

fn play(seed: u64) -> Counts {
    let mut random = Random::new(mix(seed));
    let clock = ManualClock::new();
    let options = setup::options(&clock, &mut random);
    let pace = random.pick(&[Pace::default(), Pace::Slowest, Pace::Fastest, Pace::OneBehind]);
    if random.chance(15) {
        let workers = random.from(1, 3) as u16;
        let config = SimConfig { seed, ..config() };
        let (cache, hands) = workers::There::start(&options, workers, (config, pace));
        let mut play = Play::new(cache, hands, clock, random);
        play.crew = workers;
        return play.through(TURNS, None);
    }
    let devices = 1 + u32::from(options.shared.is_none() && random.chance(40));
    let machine = Machine::with(SimConfig { seed, devices, ..config() }, small());
    machine.sim.set_pace(pace);
    let cache = machine.rig.cache(options);
    let hands = Here::new(&cache);
    let seen = Play::new(cache, hands, clock, random).through(TURNS, Some(&machine.sim));
    machine.assert_clean();
    seen
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

#[test]
fn every_byte_is_right_in_random_schedules_of_everything() {
    let (schedules, first) = (variable("KV_SCHEDULES", SCHEDULES), variable("KV_SEED", 1));
    let mut seen = Counts::new();
    for seed in first..first + schedules {
        let _schedule = Schedule { seed };
        for (what, count) in play(seed) {
            *seen.entry(what).or_default() += count;
        }
    }
    println!("{schedules} schedules from seed {first} on: {seen:#?}");
    let missing: Vec<_> = EXPECTED.iter().filter(|&what| !seen.contains_key(what)).collect();
    assert!(schedules < SCHEDULES || missing.is_empty(), "never met: {missing:?}");
}
