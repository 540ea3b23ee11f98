//! Every driver call of a run fails once, with the devices as late as is legal. The run ends with a
//! typed error, or continues with every byte right. No device is lost, and nothing is left behind.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::request;
use cuda_driver::ErrorCode;
use cuda_sim::{Finding, FindingKind, Pace, SimDriver};
use kv_kernels::link::Transport;
use kv_plane::TransportChoice;
use kv_replay::config::{Progress, RunConfig};
use kv_replay::device::{OpenDevices, SimSizes, open};
use kv_replay::engine::{self, RunError};
use kv_replay::report::RunReport;
use kv_replay::shape::KvModelShape;
use kv_replay::trace::Trace;

type Calls = BTreeMap<&'static str, u64>;

/// Requests that share a prefix and evict each other's blocks to the host, with short answers.
fn trace() -> Trace {
    Trace::new([0, 1, 0].map(|first_id| request(330, 1, first_id)).into())
}

fn config(devices: u32, transport: TransportChoice) -> RunConfig {
    RunConfig {
        shape: KvModelShape { layers: devices, ..RunConfig::default().shape },
        block_tokens: 64,
        device_blocks: 9,
        host_blocks: 16,
        max_batch: 2,
        step_tokens: 512,
        transport,
        ..RunConfig::default()
    }
}

/// A machine whose devices run only work that the host waits for.
fn machine(devices: u32, config: &RunConfig, pace: Pace) -> (OpenDevices, Arc<SimDriver>) {
    let spec = format!("sim:{devices}").parse().unwrap();
    let opened = open(&spec, SimSizes::for_config(config)).unwrap();
    let sim = opened.sim.clone().unwrap();
    sim.set_pace(pace);
    (opened, sim)
}

fn since(before: &Calls, after: &Calls) -> Calls {
    let made = |(&name, &count)| (name, count - before.get(name).copied().unwrap_or(0));
    after.iter().map(made).filter(|&(_, count)| count > 0).collect()
}

/// The error codes with which `call` may be refused: one for any call, and another for calls that
/// allocate.
fn codes(call: &str) -> Vec<ErrorCode> {
    let allocates = ["cuMemAlloc", "cuMemHostAlloc", "cuMemCreate", "cuModuleLoadDataEx"];
    match allocates.contains(&call) {
        true => vec![ErrorCode::UNKNOWN, ErrorCode::OUT_OF_MEMORY],
        false => vec![ErrorCode::UNKNOWN],
    }
}

/// Calls whose refusal leaks an object; the driver is responsible for the leak.
fn destroys(call: &str) -> bool {
    ["Destroy", "Free", "Unload", "Unmap", "Release", "Unregister"]
        .iter()
        .any(|what| call.contains(what))
}

type Run = fn(&RunConfig, &Trace, &OpenDevices, &mut dyn Progress) -> Result<RunReport, RunError>;

/// Refuses every call of a run on so many devices, once each. Returns how many runs ended with an
/// error.
fn every_call_fails_once(devices: u32, transport: TransportChoice, pace: Pace) -> (u64, u64) {
    let moves = |report: &RunReport| report.blocks_offloaded > 0 && report.blocks_onboarded > 0;
    sweep(&config(devices, transport), devices, pace, engine::run, moves)
}

/// The same for a run whose report, if no call fails, is as `expected`.
fn sweep(
    config: &RunConfig,
    devices: u32,
    pace: Pace,
    run: Run,
    expected: fn(&RunReport) -> bool,
) -> (u64, u64) {
    let trace = trace();
    let (healthy, sim) = machine(devices, config, pace);
    let before = sim.calls();
    let report = run(config, &trace, &healthy, &mut ()).unwrap();
    assert!(expected(&report), "{report:?}");
    let calls = since(&before, &sim.calls());
    drop(healthy);

    let (mut faults, mut failed) = (0, 0);
    for (&call, &count) in &calls {
        for (nth, code) in
            (1..=count).flat_map(|nth| codes(call).into_iter().map(move |code| (nth, code)))
        {
            let (opened, sim) = machine(devices, config, pace);
            sim.fail_nth(call, nth, code);
            let outcome = run(config, &trace, &opened, &mut ());
            faults += 1;
            failed += u64::from(outcome.is_err());
            check(&format!("{call} {nth} on {devices}"), call, &outcome, opened, &sim);
        }
    }
    (faults, failed)
}

#[track_caller]
fn check(
    what: &str,
    call: &str,
    outcome: &Result<RunReport, RunError>,
    opened: OpenDevices,
    sim: &SimDriver,
) {
    let lost = opened.devices.iter().find_map(|device| device.poison());
    drop(opened);
    sim.run_all();
    // An object that the driver did not destroy ends with its context, and closing reports it.
    let refused = destroys(call) || matches!(outcome, Err(RunError::Close { .. }));
    let counts = |finding: &Finding| {
        let told = refused || (call.starts_with("cuCtx") && !loses_memory(finding));
        !(told && finding.kind == FindingKind::LostObjects)
    };
    let findings: Vec<_> = sim.findings().into_iter().filter(counts).collect();
    assert!(findings.is_empty(), "{what}: {findings:?} after {outcome:?}");
    assert!(lost.is_none(), "{what}: {lost:?} after {outcome:?}");
    match outcome {
        Ok(report) => {
            assert_eq!((report.finished, report.corrupt_blocks), (3, 0), "{what}: {report:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty(), "{what}"),
    }
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean() || refused, "{what}: {leaks} after {outcome:?}");
}

/// Whether a context ended with memory in it, not only with handles whose drop found no context.
fn loses_memory(finding: &Finding) -> bool {
    let nothing = "alive before: 0 allocations (0 bytes), 0 pinned regions (0 bytes), 0 reservations, \
                   0 mappings, 0 physical handles";
    !finding.detail.starts_with(nothing)
}

fn assert_swept((faults, failed): (u64, u64)) {
    // Few faults may leave the run successful: those of growth ahead of need, and of calls that
    // restore a context.
    assert!(faults > 80 && failed * 2 > faults, "{failed} of {faults} faults ended the run");
}

#[test]
fn every_call_of_a_run_on_one_device_fails_once() {
    assert_swept(every_call_fails_once(1, TransportChoice::Quickest, Pace::Slowest));
}

#[test]
fn every_call_of_a_run_on_two_devices_fails_once() {
    assert_swept(every_call_fails_once(2, TransportChoice::Quickest, Pace::Slowest));
}

#[test]
fn every_call_of_a_run_fails_once_whatever_the_devices_have_done_and_whichever_way_blocks_travel() {
    for (way, pace) in [(Transport::TwoHop, Pace::Random), (Transport::CopyEngine, Pace::Fastest)] {
        assert_swept(every_call_fails_once(1, TransportChoice::Only(way), pace));
    }
}
