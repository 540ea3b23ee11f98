//! With a protection disabled, a replay finds wrong bytes, names them, and exits with status 3.

use std::io::{Seek as _, Write as _};
use std::path::Path;
use std::process::Command;

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

fn command(more: &[&str], report: &Path) -> Command {
    let mut stdin = tempfile::tempfile().unwrap();
    stdin.write_all(trace().to_jsonl().as_bytes()).unwrap();
    stdin.rewind().unwrap();
    let mut command = program();
    command.args(["run", "--trace", "/dev/stdin", "--seed", "3", "--block-tokens", "64"]);
    command.args(["--device-blocks", &BLOCKS.to_string(), "--max-batch", "16", "--json"]);
    // Without a host tier. With one, a block with two owners would be offloaded while one owner
    // uses it, which is a different defect.
    command.arg(report).args(["--host-blocks", "0"]).args(more).stdin(stdin);
    command
}

const SABOTAGE: [&str; 2] = ["--drill", "sabotage"];

#[test]
fn a_block_handed_to_two_callers_is_caught_and_its_owner_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = command(&[], &path).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "with every protection in place: {output:?}");
    let report: serde_json::Value = read_json(&path);
    assert_eq!((&report["finished"], &report["corrupt_blocks"]), (&24.into(), &0.into()));
    let mut command = command(&SABOTAGE, &path);
    let output = command.env("CUDA_SIM_RACES", "report").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.contains("CORRUPT") && stdout.contains("device block"), "{stdout}");
    let report: serde_json::Value = read_json(&path);
    assert!(report["corrupt_blocks"].as_u64().unwrap() > 0);
    let corruptions = report["corruptions"].as_array().unwrap();
    let names_owner = |corrupt: &serde_json::Value| {
        corrupt["message"].as_str().unwrap().contains("holds the content of request")
    };
    assert!(corruptions.iter().any(names_owner), "{corruptions:?}");
}

/// A file that cannot be written to, like one on a full disk.
fn full() -> std::fs::File {
    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn corrupt_bytes_are_the_verdict_though_nobody_can_be_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = command(&SABOTAGE, &path).stdout(full()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
    let report: serde_json::Value = read_json(&path);
    assert!(report["corrupt_blocks"].as_u64().unwrap() > 0);
    // A report that cannot be written does not change the status either, but the error is printed.
    let output = command(&SABOTAGE, Path::new("/dev/full")).output().unwrap();
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
