//! Models whose layers are not all of one kind: every byte that a layer reads is right.

use crate::common::{devices, generated, leave};
use cuda_sim::Pace;
use kv_pool::store::StoreKind;
use kv_replay::config::{Life, RunConfig};
use kv_replay::engine::{self, RunError};
use kv_replay::memory::SharedReport;
use kv_replay::report::RunReport;
use kv_replay::shape::KvModelShape;
use kv_replay::trace::Trace;

/// Layers: with full attention, with a window of so many tokens, with a state, of a draft model.
#[derive(Clone, Copy, Debug)]
struct Model {
    full: u32,
    window: Option<(u32, u32)>,
    states: u32,
    drafts: u32,
}

const GEMMA: Model = Model { full: 1, window: Some((5, 1024)), states: 0, drafts: 0 };
const GPT_OSS: Model = Model { full: 2, window: Some((2, 128)), states: 0, drafts: 0 };
const JAMBA: Model = Model { full: 1, window: None, states: 7, drafts: 0 };
const ALL: Model = Model { full: 1, window: Some((1, 300)), states: 2, drafts: 0 };

const LIFE: Life = Life {
    chunk: 700,
    drafts: 0,
    accept: 0,
    fork: 2,
    suspend: 6,
    cancel: 10,
    budget_swing: 30,
    hints: true,
};

fn config(model: Model, life: Life) -> RunConfig {
    let (windows, window) = model.window.map_or((0, None), |(layers, of)| (layers, Some(of)));
    let shape = KvModelShape { layers: model.full + windows, ..RunConfig::default().shape };
    RunConfig {
        shape,
        window,
        full_layers: if window.is_some() { model.full } else { 0 },
        state_layers: model.states,
        draft_layers: model.drafts,
        block_tokens: 64,
        device_blocks: 700,
        host_blocks: 1400,
        max_batch: 6,
        step_tokens: 4096,
        life,
        seed: 3,
        ..RunConfig::default()
    }
}

fn trace(requests: u64) -> Trace {
    generated(requests, 3, (8_000, 100))
}

fn replay(device: &str, config: &RunConfig, requests: u64) -> RunReport {
    replay_trace(device, config, &trace(requests))
}

fn replay_trace(device: &str, config: &RunConfig, trace: &Trace) -> RunReport {
    config.check_trace(trace).unwrap();
    let devices = devices(device, config);
    devices.sim.as_ref().unwrap().set_pace(Pace::Slowest);
    let report = engine::run(config, trace, &devices, &mut ()).unwrap();
    assert_eq!(report.corrupt_blocks, 0, "{:?}", report.corruptions);
    assert_eq!(report.finished + report.cancelled, report.requests);
    leave(devices);
    report
}

#[test]
fn every_byte_is_right_whatever_happens_to_requests() {
    for model in [GEMMA, JAMBA, ALL] {
        let report = replay("sim", &config(model, LIFE), 8);
        assert!(report.forks > 0 && report.suspensions > 0, "{model:?}: {report:?}");
        assert!(report.budget_changes > 1, "{model:?}: {report:?}");
    }
}

#[test]
fn a_tier_that_does_everything_wrong_lies_below_groups_of_every_kind() {
    for (seed, model) in [(1, GEMMA), (2, GPT_OSS), (3, JAMBA), (4, ALL)] {
        let (mut loaded, mut wrong) = (0, 0);
        for (life, requests) in [(Life::default(), 12), (LIFE, 6)] {
            // All come twice: the second time, most have left the device and the host.
            let trace = twice(requests);
            let store = StoreKind::All;
            let large = RunConfig { tier_faults: Some(seed), store, ..config(model, life) };
            let config = match life == LIFE {
                // Suspended requests have to have room in host memory.
                true => large,
                false => RunConfig { device_blocks: 300, host_blocks: 150, max_batch: 2, ..large },
            };
            let tiers = replay_trace("sim", &config, &trace).tiers.unwrap();
            assert_eq!(tiers.quarantined_at_end, 0, "{model:?}: {tiers:?}");
            loaded += tiers.blocks_loaded;
            wrong += tiers.faults.values().sum::<u64>();
        }
        assert!(loaded > 0 && wrong > 0, "{model:?}: {loaded} came back, {wrong} were wrong");
    }
}

/// Drafts, whatever else happens.
const DRAFTS: Life = Life { drafts: 3, accept: 60, ..LIFE };

/// Models with a draft model beside: full attention alone, and every kind.
const DRAFTED: [Model; 2] = [
    Model { full: 2, window: None, states: 0, drafts: 1 },
    Model { full: 1, window: Some((1, 300)), states: 2, drafts: 1 },
];

/// Requests that all come twice: what the first has left is found.
fn twice(requests: u64) -> Trace {
    let mut trace = trace(requests);
    trace.requests.extend(trace.requests.clone());
    trace
}

#[test]
fn the_device_chooses_the_state_behind_accepted_drafts() {
    for life in [Life { drafts: 3, accept: 60, ..Life::default() }, DRAFTS] {
        for model in [JAMBA, ALL] {
            let report = replay_trace("sim", &config(model, life), &twice(4));
            assert!(report.staged_behind_open_ids > 0 && report.block_hits > 0, "{model:?}");
        }
    }
}

#[test]
fn a_draft_model_lags_behind_and_catches_up() {
    for life in [Life::default(), DRAFTS] {
        for model in DRAFTED {
            let report = replay_trace("sim", &config(model, life), &twice(4));
            assert!(report.draft_model_tokens > 0 && report.block_hits > 0, "{model:?}");
        }
    }
}

#[test]
fn a_tier_that_does_everything_wrong_lies_below_a_draft_model() {
    let life = Life { drafts: 3, accept: 60, ..Life::default() };
    let (mut loaded, mut wrong) = (0, 0);
    for (seed, model) in (1..).zip(DRAFTED) {
        let large = RunConfig { tier_faults: Some(seed), ..config(model, life) };
        let config = RunConfig { device_blocks: 300, host_blocks: 150, max_batch: 2, ..large };
        let tiers = replay_trace("sim", &config, &twice(10)).tiers.unwrap();
        loaded += tiers.blocks_loaded;
        wrong += tiers.faults.values().sum::<u64>();
    }
    assert!(loaded > 0 && wrong > 0, "{loaded} came back, {wrong} were wrong");
}

#[test]
fn states_and_a_draft_model_share_memory_with_all_other_groups() {
    let report = replay("sim", &shared(DRAFTED[1], DRAFTS, 60 << 20), 3);
    assert!(report.draft_model_tokens > 0 && report.staged_behind_open_ids > 0);
    account(&report);
}

#[test]
fn groups_are_divided_over_devices() {
    let model = Model { full: 2, window: Some((4, 200)), states: 3, drafts: 0 };
    let one = replay("sim", &config(model, LIFE), 6);
    let two = replay("sim:2", &config(model, LIFE), 6);
    assert_eq!(two.iterations, one.iterations, "nothing was decided otherwise");
    assert_eq!(two.verified_blocks, 2 * one.verified_blocks);
}

/// The same model with memory that all groups share, in granules that fill pages.
fn shared(model: Model, life: Life, bytes: u64) -> RunConfig {
    let config = config(model, life);
    let shape = KvModelShape { head_size: 256, ..config.shape };
    RunConfig { shape, device_memory: Some(bytes), state_tokens: 64, ..config }
}

/// Memory in which few of the requests run at once.
const TIGHT: [(Model, u64); 4] =
    [(GEMMA, 68 << 20), (GPT_OSS, 26 << 20), (JAMBA, 76 << 20), (ALL, 20 << 20)];

/// The account of shared memory in a report. Checks that blocks take no more than the granules that groups had.
fn account(report: &RunReport) -> SharedReport {
    let memory = report.memory.as_ref().unwrap();
    let shared = memory.shared.clone().unwrap();
    let granules = memory.groups.iter().zip(&shared.granule_blocks);
    let granules = granules.map(|(group, of)| group.blocks.div_ceil(u64::from(*of))).sum::<u64>();
    assert!(granules <= shared.peak_granules, "{memory:?}");
    assert!(shared.peak_granules <= u64::from(shared.granules), "{memory:?}");
    assert!(memory.bytes > 0 && memory.bytes <= memory.common_page_bytes, "{memory:?}");
    assert!(memory.common_page_bytes <= memory.padded_bytes, "{memory:?}");
    shared
}

#[test]
fn one_memory_is_shared_whatever_happens_to_requests() {
    let (mut forgotten, mut taken) = (0, 0);
    for (model, bytes) in TIGHT {
        let report = replay("sim", &shared(model, LIFE, bytes), 6);
        let granules = account(&report);
        assert!(granules.fewest_granules.unwrap() <= granules.granules.into());
        assert!(report.suspensions > 0 && report.budget_changes > 1, "{model:?}: {report:?}");
        let first = u64::from(granules.granules * granules.granule_blocks[0]);
        assert_eq!(report.device_blocks, first, "if the first group had all");
        forgotten += granules.forgotten;
        taken += granules.taken;
    }
    assert!(forgotten > 0, "some requests fit only when their blocks are not spread");
    assert!(taken > 0, "granules went from group to group");
}

#[test]
fn a_tier_that_does_everything_wrong_lies_below_memory_that_groups_share() {
    let (model, bytes) = TIGHT[3];
    let large = shared(model, Life::default(), bytes);
    let config = RunConfig { tier_faults: Some(5), host_blocks: 150, max_batch: 2, ..large };
    let report = replay_trace("sim", &config, &twice(6));
    account(&report);
    let tiers = report.tiers.unwrap();
    let wrong = tiers.faults.values().sum::<u64>();
    assert!(tiers.blocks_loaded > 0 && wrong > 0, "{tiers:?}");
}

#[test]
fn groups_share_the_memory_of_each_device() {
    let model = Model { full: 2, window: Some((4, 200)), states: 4, drafts: 0 };
    let report = replay("sim:2", &shared(model, LIFE, 48 << 20), 2);
    let granules = account(&report);
    // Of two layers on a device, and of one.
    assert_eq!(granules.granule_blocks, [64, 32, 32]);
    assert_eq!(granules.granule_bytes, 2 * (2 << 20), "over both devices");
}

#[test]
fn memory_that_groups_cannot_share_is_refused_by_name() {
    let run = |bytes| {
        let config = shared(GEMMA, Life::default(), bytes);
        let devices = devices("sim", &config);
        engine::run(&config, &trace(2), &devices, &mut ()).unwrap_err()
    };
    let error = run(20 << 20);
    let RunError::Build(kv_plane::BuildError::Options(error)) = error else { panic!("{error}") };
    assert!(matches!(error, kv_plane::OptionsError::Granule { .. }), "{error}");
    // One granule for two groups.
    let error = run(36 << 20);
    let RunError::Admit { source, .. } = error else { panic!("{error}") };
    assert_eq!(source.to_string(), "a sequence of 2 granules never fits: the shared memory has 1");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let of = |layers, change: &dyn Fn(&mut RunConfig)| {
        let shape = KvModelShape { layers, ..RunConfig::default().shape };
        let mut config = RunConfig { shape, ..RunConfig::default() };
        change(&mut config);
        config.check().unwrap_err().to_string()
    };
    for (found, expected) in [
        (
            of(1, &|of| of.window = Some(64)),
            "--layers 1 and --full-layers 0 leave no layer with a window, or only such",
        ),
        (
            of(2, &|of| (of.window, of.full_layers) = (Some(64), 2)),
            "--layers 2 and --full-layers 2 leave no layer with a window, or only such",
        ),
        (of(2, &|of| of.window = Some(0)), "--window is 0, expected at least 1"),
        (of(1, &|of| of.state_layers = u32::MAX), "--state-layers is 4294967295, more than"),
        (of(1, &|of| of.draft_layers = u32::MAX), "--draft-layers is 4294967295, more than"),
        (
            of(1, &|of| of.device_memory = Some(1 << 30)),
            "--device-memory 1073741824 is shared by groups of layers, but there is one group without --window, \
             --state-layers and --draft-layers",
        ),
        (
            of(1, &|of| (of.device_memory, of.state_layers) = (Some(0), 1)),
            "--device-memory is 0, expected at least 1",
        ),
        (
            of(1, &|of| (of.device_memory, of.state_layers) = (Some(u64::MAX), 1)),
            "--device-memory is 18446744073709551615, more than",
        ),
        (of(1, &|of| of.state_tokens = 0), "--state-tokens is 0, expected at least 1"),
        (of(1, &|of| of.state_tokens = u32::MAX), "--state-tokens is 4294967295, more than"),
    ] {
        assert!(found.starts_with(expected), "{found}, expected {expected}");
    }
}

#[test]
fn more_devices_than_layers_of_a_group_are_refused() {
    let config = config(GEMMA, Life::default());
    let devices = devices("sim:2", &config);
    let error = engine::run(&config, &trace(2), &devices, &mut ()).unwrap_err();
    let RunError::Build(kv_plane::BuildError::Options(error)) = error else { panic!("{error}") };
    let group = kv_plane::GroupId(0);
    assert_eq!(error, kv_plane::OptionsError::DevicesOverLayers { group, devices: 2, layers: 1 });
}
