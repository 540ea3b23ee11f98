//! What happens to requests beside prefill and decoding, alone and together: every byte is right.

use crate::common::{devices, generated, leave, request};
use cuda_sim::Pace;
use kv_replay::config::{Life, RunConfig};
use kv_replay::engine;
use kv_replay::report::RunReport;
use kv_replay::trace::{Request, Trace};

/// Replays a few requests in memory for about two of them at once, on one device or two.
fn replay(device: &str, life: Life, seed: u64) -> RunReport {
    replay_over(device, life, seed, None)
}

/// The same over a tier with faults.
fn replay_over(device: &str, life: Life, seed: u64, tier_faults: Option<u64>) -> RunReport {
    let config = RunConfig {
        tier_faults,
        block_tokens: 64,
        device_blocks: 1024,
        host_blocks: if tier_faults.is_some() { 192 } else { 2048 },
        max_batch: 8,
        step_tokens: 4096,
        life,
        seed,
        shape: kv_replay::shape::KvModelShape { layers: 2, ..RunConfig::default().shape },
        ..RunConfig::default()
    };
    // Short enough for about two of them at once.
    let mut trace = generated(12, seed, (30_000, 40));
    if tier_faults.is_some() {
        // What came first comes again, when it has left the host.
        trace.requests.extend_from_within(..);
    }
    config.check().unwrap();
    config.check_trace(&trace).unwrap();
    let devices = devices(device, &config);
    devices.sim.as_ref().unwrap().set_pace(Pace::Slowest);
    let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
    assert_eq!(report.corrupt_blocks, 0, "{life:?}: {:?}", report.corruptions);
    assert_eq!(report.finished + report.cancelled, report.requests, "{life:?}");
    assert!(report.verified_blocks > 0);
    leave(devices);
    report
}

#[test]
fn drafts_are_staged_before_it_is_known_which_of_the_last_ones_stand() {
    let plain = replay("sim", Life::default(), 2);
    let life = Life { drafts: 4, accept: 60, ..Life::default() };
    for device in ["sim", "sim:2"] {
        let report = replay(device, life, 2);
        assert!(report.staged_behind_open_ids > 0);
        assert!(report.iterations < plain.iterations, "drafts were accepted");
        assert_eq!(report.generated_tokens, plain.generated_tokens);
    }
    replay("sim", Life { drafts: 3, accept: 0, ..Life::default() }, 3);
    replay("sim", Life { drafts: 3, accept: 100, ..Life::default() }, 3);
}

#[test]
fn all_of_it_happens_at_once() {
    let life = Life {
        chunk: 512,
        drafts: 3,
        accept: 70,
        fork: 2,
        suspend: 5,
        cancel: 20,
        budget_swing: 30,
        hints: true,
    };
    for (device, seeds) in [("sim", 8..11), ("sim:2", 11..13)] {
        for seed in seeds {
            let report = replay(device, life, seed);
            assert!(report.forks > 0 && report.blocks_copied_on_write > 0, "{device}, {seed}");
            assert!(report.suspensions > 0 && report.blocks_suspended > 0, "{device}, {seed}");
            assert!(report.cancelled > 0 && report.finished > 0, "{device}, {seed}");
            assert!(report.budget_changes > 1, "{device}, {seed}");
            assert!(report.fewest_device_blocks < report.peak_device_blocks, "{device}, {seed}");
        }
    }
}

#[test]
fn a_tier_that_does_everything_wrong_lies_below() {
    let life = Life { chunk: 512, drafts: 3, accept: 70, fork: 2, suspend: 3, ..Life::default() };
    let life = Life { cancel: 20, budget_swing: 30, ..life };
    let (mut loaded, mut faults) = (0, std::collections::BTreeSet::new());
    for (device, seeds) in [("sim", 20..24), ("sim:2", 24..26)] {
        for seed in seeds {
            let lives = if seed % 2 == 0 { Life::default() } else { life };
            let report = replay_over(device, lives, seed, Some(seed));
            let tiers = report.tiers.unwrap();
            assert_eq!(tiers.quarantined_at_end, 0, "{device}, {seed}: {tiers:?}");
            assert!(tiers.blocks_stored > 0, "{tiers:?}");
            loaded += tiers.blocks_loaded;
            faults.extend(tiers.faults.into_keys());
        }
    }
    assert!(loaded > 0 && faults.len() >= 4, "{loaded} blocks came back; {faults:?}");
}

#[test]
fn sessions_that_are_over_make_room_for_one_that_comes_back() {
    let request = |timestamp_ms, ids: std::ops::Range<u64>| Request {
        timestamp_ms,
        ..request(512 * (ids.end - ids.start), 2, ids.start)
    };
    // A session, as many others as the device has room for, and the next turn of the first.
    let others = (1..8).map(|at| request(at, 100 * at..100 * at + 4));
    let all = std::iter::once(request(0, 0..4)).chain(others).chain([request(9, 0..5)]);
    let trace = Trace::new(all.collect());
    let reused = |hints| {
        let config = RunConfig {
            block_tokens: 64,
            device_blocks: 136,
            host_blocks: 0,
            max_batch: 1,
            life: Life { hints, ..Life::default() },
            shape: kv_replay::shape::KvModelShape { layers: 2, ..RunConfig::default().shape },
            ..RunConfig::default()
        };
        config.check_trace(&trace).unwrap();
        let devices = devices("sim", &config);
        let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
        assert_eq!((report.corrupt_blocks, report.finished), (0, 9), "{:?}", report.corruptions);
        assert_eq!(report.hints, hints);
        report.prefix_tokens_reused
    };
    assert_eq!((reused(false), reused(true)), (0, 4 * 512));
}
