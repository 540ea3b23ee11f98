//! With a protection disabled, a replay finds wrong bytes, names them, and exits with status 3.

use std::io::{Seek as _, Write as _};
use std::path::Path;
use std::process::{Command, Output};

use crate::common::{devices, generated, program, read_json};
use cuda_driver::ErrorCode;
use cuda_sim::SimDriver;
use kv_plane::GroupId;
use kv_replay::config::{Progress, ProgressState, RunConfig};
use kv_replay::engine::{self, RunError};
use kv_replay::trace::Trace;

/// A workload of chats and documents.
fn trace() -> Trace {
    generated(24, 3, (20_000, 40))
}

/// Device blocks so few that blocks are evicted and come back.
const BLOCKS: u64 = 640;

fn replay(more: &[&str], report: &Path) -> Output {
    command(more, report).output().unwrap()
}

fn command(more: &[&str], report: &Path) -> Command {
    let mut stdin = tempfile::tempfile().unwrap();
    stdin.write_all(trace().to_jsonl().as_bytes()).unwrap();
    stdin.rewind().unwrap();
    let mut command = program();
    command.args(["run", "--trace", "/dev/stdin", "--seed", "3", "--block-tokens", "64"]);
    command.args(["--json"]).arg(report).args(more).stdin(stdin);
    if !more.contains(&"--contiguous") {
        command.args(["--device-blocks", &BLOCKS.to_string(), "--max-batch", "16"]);
    }
    command
}

/// The report of a run that found corrupt blocks and printed so.
#[track_caller]
fn corrupt_report(sabotage: &str, host_blocks: &str) -> serde_json::Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let drill = format!("sabotage={sabotage}");
    let mut command = command(&["--drill", &drill, "--host-blocks", host_blocks], &path);
    // On a device that is never late, a missing wait is harmless.
    let command = command.env("CUDA_SIM_PACE", "random").env("CUDA_SIM_RACES", "report");
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
    assert_eq!(output.status.code(), Some(3), "{sabotage}: {stdout:?} {stderr:?}");
    let stdout = stdout.unwrap();
    assert!(stdout.contains("CORRUPT"), "{stdout}");
    assert!(stdout.contains("device block"), "{stdout}");
    let report: serde_json::Value = read_json(&path);
    assert!(report["corrupt_blocks"].as_u64().unwrap() > 0);
    report
}

#[test]
fn the_same_replay_is_clean_with_every_protection_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = replay(&[], &path);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = read_json(&path);
    assert_eq!(report["finished"], 24);
    assert_eq!(report["corrupt_blocks"], 0);
    assert!(report["verified_blocks"].as_u64().unwrap() > 5_000);
    assert!(report["blocks_offloaded"].as_u64().unwrap() > 0);
}

#[test]
fn a_staging_buffer_reused_before_its_event_is_caught() {
    corrupt_report("staging", "2048");
}

#[test]
fn a_block_handed_to_two_callers_is_caught_and_its_owner_named() {
    // Without a host tier. With one, a block with two owners would be offloaded while one owner
    // uses it, which is a different defect.
    let report = corrupt_report("claim-unseen", "0");
    let corruptions = report["corruptions"].as_array().unwrap();
    let names_owner = |corrupt: &serde_json::Value| {
        corrupt["message"].as_str().unwrap().contains("holds the content of request")
    };
    assert!(corruptions.iter().any(names_owner), "{corruptions:?}");
}

/// Detected before a byte is written, if both callers store in one iteration.
#[test]
fn a_block_handed_to_two_callers_is_refused_by_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let args = "run --requests 24 --seed 3 --block-tokens 64 --device-blocks 2304 --max-batch 16 --host-blocks 0";
    let mut command = program();
    command.args(args.split(' ')).args(["--drill", "sabotage=claim", "--json"]).arg(&path);
    // One that is never behind shows the wrong content of the iteration before first.
    command.env("CUDA_SIM_PACE", "slowest");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("are both stored to slot"), "{stderr}");
    assert!(!path.exists());
}

#[test]
fn a_transfer_that_ignores_the_skip_is_caught() {
    corrupt_report("skip", "2048");
}

#[test]
fn a_range_given_away_while_it_is_read_is_caught() {
    // Requests follow each other in one range.
    corrupt_ranges("recycle", "1");
}

#[test]
fn a_staging_buffer_of_contiguous_ranges_reused_before_its_event_is_caught() {
    corrupt_ranges("staging", "16");
}

/// Runs over contiguous ranges, which must find corrupt blocks and print so.
#[track_caller]
fn corrupt_ranges(sabotage: &str, max_batch: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let drill = format!("sabotage={sabotage}");
    let args = ["--contiguous", "--max-batch", max_batch, "--drill", &drill];
    let mut command = command(&args, &path);
    command.env("CUDA_SIM_PACE", "random").env("CUDA_SIM_RACES", "off");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.contains("CORRUPT") && stdout.contains("device block"), "{stdout}");
    let report: serde_json::Value = read_json(&path);
    assert!(report["corrupt_blocks"].as_u64().unwrap() > 0);
    assert!(report["contiguous"]["pages_mapped"].as_u64().unwrap() > 0);
}

#[test]
fn a_sabotage_of_another_kind_of_run_is_refused() {
    for (args, expected) in [
        (&["--drill", "sabotage=recycle"][..], "has no protection that --drill sabotage="),
        (&["--drill", "sabotage=skip", "--contiguous"], "has no protection that --drill sabotage="),
        (
            &["--drill", "sabotage=luck"],
            "unknown sabotage \"luck\"; expected staging, claim, claim-unseen, skip or recycle",
        ),
    ] {
        let output = replay(args, Path::new("unused.json"));
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(expected), "{message}");
    }
}

/// A file that cannot be written to, like one on a full disk.
fn full() -> std::fs::File {
    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn corrupt_bytes_are_the_verdict_though_nobody_can_be_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let args = ["--drill", "sabotage=claim-unseen", "--host-blocks", "0"];
    let output = command(&args, &path).stdout(full()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
    let report: serde_json::Value = read_json(&path);
    assert!(report["corrupt_blocks"].as_u64().unwrap() > 0);
    // A report that cannot be written does not change the status either, but the error is printed.
    let output = command(&args, Path::new("/dev/full")).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("cannot write /dev/full"), "{stderr}");
}

/// Makes a driver call fail once a corrupt block was found.
struct FailsThen(std::sync::Arc<SimDriver>);

impl Progress for FailsThen {
    fn update(&mut self, state: &ProgressState) {
        if state.corrupt_blocks > 0 {
            self.0.fail_nth("cuEventRecord", 1, ErrorCode::UNKNOWN);
        }
    }
}

#[test]
fn a_run_that_fails_after_a_corrupt_byte_tells_of_both() {
    let trace = trace();
    let config = RunConfig {
        block_tokens: 64,
        device_blocks: BLOCKS,
        host_blocks: 0,
        max_batch: 16,
        ..RunConfig::default()
    };
    let devices = devices("sim", &config);
    let cache = engine::build_cache(&config, &trace, &devices).unwrap();
    cache.manager().pool(GroupId(0)).unwrap().sabotage_peek_then_claim();
    cache.parts()[0].kernels().sabotage_allow_stored_twice(true);
    let mut progress = FailsThen(devices.sim.clone().unwrap());
    let failed = engine::run_on(cache, &config, &trace, &devices, &mut progress).unwrap_err();
    let RunError::Corrupted { report, source } = failed else { panic!("{failed:?}") };
    assert!(report.corrupt_blocks > 0 && report.finished < 24, "{report:?}");
    assert!(matches!(*source, RunError::Step(_) | RunError::Device(_)), "{source:?}");
}
