//! Random schedules of whole lives of sequences, with workers that lag behind: every cell of KV that a
//! step reads is the one that its ids decide.
//!
//! `KV_MODEL_SEED` is the first seed, and `KV_MODEL_EPISODES=1` tries no other; a failure prints the seed
//! that it replays from. `KV_MODEL_DEEP=1` tries 40,000.

#![allow(unreachable_pub, reason = "its parts see each other's")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a campaign says what it has seen")]

mod admission;
mod budget;
mod changes;
mod engine;
mod foreign;
mod further;
mod hints;
mod mirror;
mod run;
mod tiers;
mod transfers;
mod truth;
mod turns;
mod worker;

use engine::Engine;

use crate::prelude::*;

const EPISODES: u64 = 4_000;
const EPISODES_DEEP: u64 = 40_000;
const TURNS: u64 = 800;

/// What every campaign is to meet: an engine that never gets into a corner shows nothing about it.
const EXPECTED: [&str; 119] = [
    "a call with another manager's",
    "a name that was forgotten",
    "a retention of a sequence",
    "a turn with an input",
    "an input that was cut",
    "a late end of a draft model",
    "an end that was ignored",
    "a lookup that a mirror foresees",
    "content behind what is nowhere",
    "a departure with a draft model behind",
    "a draft model that catches up",
    "a draft model that computes",
    "a fork of what a draft model has computed",
    "a state behind accepted drafts",
    "an end of a draft model",
    "an end of a draft model after its step",
    "drafts of a state",
    "a granule that was given",
    "a granule that was taken",
    "content of granules that leaves for host memory",
    "granules that leave",
    "granules that leave later",
    "a cut back to a checkpoint or window",
    "a cut that goes back further",
    "a fork of a state",
    "a hit at a checkpoint",
    "a hit in several groups",
    "a resumption in several groups",
    "a state that was copied",
    "a window that has moved",
    "a commit after the step was complete",
    "a commit that was refused",
    "a budget that blocks in use exceed",
    "a budget that took blocks",
    "a budget that took content to host memory",
    "a larger budget before all had left",
    "memory of the device that was taken away",
    "memory of the host that was taken away",
    "a commit with later ids to come",
    "a copy on write",
    "a cut",
    "a cut with ids to come",
    "a drop with ids to come",
    "a dropped step",
    "a failing step",
    "a failure that was told",
    "a departure",
    "a departure of several groups",
    "an arrival in several groups",
    "a fork",
    "a fork of a sequence with tokens reserved",
    "a hit",
    "a hit in host memory",
    "a lost sequence",
    "a lost worker",
    "a next turn",
    "a prefetch",
    "a prefetch of a prefix",
    "a pin",
    "a pin that was refused",
    "a hint of reuse",
    "a smaller budget of a further group",
    "a redo",
    "a redo at stage",
    "a request beyond its tenant's bound",
    "a request of a tenant at its bound",
    "a request that waits",
    "a reservation with ids to come",
    "a reset",
    "events that were lost",
    "events that were repaired",
    "events of cleared content",
    "events of moved content",
    "events of a lower tier",
    "content that was withheld",
    "content that was withdrawn before it was told",
    "a resumption",
    "a resumption that begins again",
    "a staged step",
    "a step without a plan",
    "a stop in the middle",
    "a suspension",
    "a suspension that is taken back",
    "a suspension that a failure takes back",
    "a suspension that waits for ids",
    "a suspension that was refused",
    "a block loaded from below",
    "a load of a state",
    "a load of a window",
    "a corrupt block below",
    "a failed load",
    "a foreign block below",
    "a missing block below",
    "a short block",
    "a block stored below",
    "a name that a tier has dropped",
    "a prefetch from below",
    "a request that waits for a load",
    "a ticket of a lost worker",
    "a void block of a ticket",
    "a wait that ended before its load",
    "an admission before its load had ended",
    "a load that was wrong after its admission",
    "a load that was given up",
    "a call that waits for a load to end",
    "a worker that joined",
    "a start that the worker works out",
    "an adoption",
    "an arrival",
    "an arrival of a dropped sequence",
    "busy",
    "copies from host memory",
    "copies to host memory",
    "garbage was committed",
    "no room for a request",
    "no room for a token",
    "no row",
    "scrubs",
    "stale ids",
];

/// Names the schedule when a check in it fails.
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

/// What is met about once or twice in 4,000 schedules, and at times in none: a deep campaign is to meet it. `group_tiers.rs`
/// has a test of each.
const EXPECTED_DEEP: [&str; 2] = ["a state loaded by layers", "a window loaded by layers"];

#[test]
fn no_step_reads_what_it_should_not() {
    let deep = variable("KV_MODEL_DEEP", 0) == 1;
    let episodes = variable("KV_MODEL_EPISODES", if deep { EPISODES_DEEP } else { EPISODES });
    let first = variable("KV_MODEL_SEED", 1);
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in first..first + episodes {
        let _episode = Episode { seed };
        let mut engine = Engine::new(seed);
        let times = if engine.size.swaps_much { 10 } else { 1 };
        for _ in 0..times * TURNS {
            engine.turn();
        }
        for (what, count) in engine.end() {
            *seen.entry(what).or_default() += count;
        }
    }
    println!("{episodes} schedules from seed {first} on: {seen:#?}");
    let rare = EXPECTED_DEEP.iter().filter(|_| episodes >= EPISODES_DEEP);
    let expected = EXPECTED.iter().chain(rare);
    let missing: Vec<_> = expected.filter(|&what| !seen.contains_key(what)).collect();
    assert!(episodes < EPISODES || missing.is_empty(), "never met: {missing:?}");
    let admitted = seen.get("an admission").copied().unwrap_or(0);
    assert!(episodes < EPISODES || admitted >= 10_000, "{admitted} requests");
}
