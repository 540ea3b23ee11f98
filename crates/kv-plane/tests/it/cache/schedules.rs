//! Random schedules of the whole API, at the level of bytes: requests of all kinds under pressure, on one
//! device and two, by every way of the blocks and under every policy, with steps that overlap and driver calls
//! that fail. After every step that completes, every byte that it read is what it should be; at the end
//! nothing is left.
//!
//! `KV_CACHE_SCHEDULES=2000` plays so many schedules.

use std::sync::Arc;

use cuda_driver::ErrorCode;
use cuda_sim::{Pace, SimConfig};
use kv_plane::{HostStore, KvCacheOptions, PoolRules, TransportChoice};
use kv_pool::clock::ManualClock;
use kv_pool::policy::PolicyKind;
use kv_pool::store::StoreKind;

use crate::common::engine::{by, options};
use crate::common::random::{Play, Random};
use crate::machine::{Machine, config, refusal, small};

const SCHEDULES: u64 = 100;
const OPERATIONS: u32 = 60;

/// Calls that a running cache makes, which may fail in passing.
const CALLS: [&str; 10] = [
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyBatchAsync",
    "cuMemsetD8Async",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventCreate",
    "cuStreamWaitEvent",
    "cuMemMap",
];

/// What the schedules have come to, so that none of it is missed unseen.
#[derive(Debug, Default)]
struct Seen {
    failures: u64,
    redone: u64,
    offloaded: u64,
    onboarded: u64,
    copied_on_write: u64,
    suspended: u64,
}

fn play(seed: u64, seen: &mut Seen) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let devices = 1 + random.below(2) as u32;
    let machine = Machine::with(SimConfig { seed, devices, ..config() }, small());
    let paces = [Pace::default(), Pace::Slowest, Pace::Fastest, Pace::OneBehind];
    machine.sim.set_pace(paces[random.below(4) as usize]);
    let choice = TransportChoice::ALL[random.below(TransportChoice::ALL.len() as u64) as usize];
    let blocks =
        options(small(), 12 + random.below(30) as u32, [0, 12, 40][random.below(3) as usize]);
    let kinds: [PolicyKind; 2] = std::array::from_fn(|_| {
        PolicyKind::ALL[random.below(PolicyKind::ALL.len() as u64) as usize]
    });
    let stores = [HostStore::All, HostStore::from(StoreKind::Evidence)];
    let pool = PoolRules {
        eviction: kinds[0].into(),
        host_eviction: kinds[1].into(),
        store: stores[usize::from(random.below(4) == 0)],
        clock: Some(Arc::new(ManualClock::new())),
        ..PoolRules::default()
    };
    let options = KvCacheOptions {
        pool,
        overlap_depth: 1 + random.below(2) as u32,
        watermark_blocks: random.below(4) as u32,
        ..by(choice, blocks)
    };
    let what = format!("seed {seed}: {devices} devices, {choice}, {options:?}");
    let mut play = Play::new(machine.rig.engine_with(options), seed);
    let mut failures = 0;
    for operation in 0..OPERATIONS {
        if random.below(12) == 0 {
            let call = CALLS[random.below(CALLS.len() as u64) as usize];
            let code = match call {
                "cuMemMap" => ErrorCode::OUT_OF_MEMORY,
                call => refusal(call),
            };
            machine.sim.fail_nth(call, 1 + random.below(6), code);
        }
        if let Err(error) = play.one(operation) {
            failures += 1;
            assert!(!error.to_string().contains('\n'), "{what}: {error}");
        }
        if operation % 8 == 0 {
            play.engine.cache.manager().pool().check_integrity().unwrap();
        }
    }
    // A call that was to fail and was not made yet fails now.
    for _ in 0..12 {
        failures += u64::from(play.step().is_err());
        failures += u64::from(play.engine.drain().is_err());
    }
    assert_eq!(play.engine.corrupt, 0, "{what}");
    let decided = play.engine.decided();
    seen.failures += failures;
    seen.redone += play.engine.redone;
    seen.offloaded += decided.offloaded_blocks;
    seen.onboarded += decided.onboarded_blocks;
    seen.copied_on_write += decided.copied_on_write;
    seen.suspended += decided.suspended_blocks;
    let Play { engine, lives, suspended, .. } = play;
    drop((lives, suspended));
    let stats = engine.cache.manager().pool().stats().primary;
    assert_eq!((stats.pinned, stats.claimed), (0, 0), "{what}");
    let closed = engine.try_close();
    assert!(closed.is_ok(), "{what}: {closed:?}");
    assert_eq!(machine.sim.findings(), [], "{what}");
    let Machine { sim, rig } = machine;
    drop(rig);
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{what}: {leaks}");
}

#[test]
fn every_byte_is_right_in_random_schedules_with_failures() {
    let schedules = match std::env::var("KV_CACHE_SCHEDULES") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => SCHEDULES,
    };
    let mut seen = Seen::default();
    for seed in 0..schedules {
        play(seed, &mut seen);
    }
    let Seen { failures, redone, offloaded, onboarded, copied_on_write, suspended } = seen;
    let least = [failures, redone, offloaded, onboarded, copied_on_write, suspended];
    assert!(least.iter().all(|&count| count > schedules / 8), "{seen:?}");
}
