//! Runs over several nodes: every byte is right, blocks of other nodes are used, and a node that dies or sleeps holds nobody up.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use kv_replay::generate::{GenerateOptions, generate};
use serde_json::Value;

/// A trace of few short requests, each of which comes several times: it meets another node each time.
fn write_trace(path: &Path, turns: usize) {
    let mut trace = generate(&GenerateOptions { requests: 8, seed: 3 }).unwrap();
    for request in &mut trace.requests {
        request.input_length = request.input_length.min(12_000);
        request.hash_ids.truncate(request.input_length.div_ceil(512) as usize);
        request.output_length = request.output_length.min(12);
    }
    let mut text = String::new();
    for turn in 0..turns {
        // In another order each time, so that a request does not come to the same node again.
        for at in 0..trace.requests.len() {
            let of = &trace.requests[(at + turn) % trace.requests.len()];
            let line = serde_json::json!({
                "timestamp": 0,
                "input_length": of.input_length,
                "output_length": of.output_length,
                "hash_ids": of.hash_ids,
            });
            writeln!(text, "{line}").unwrap();
        }
    }
    std::fs::write(path, text).unwrap();
}

fn run(folder: &Path, turns: usize, more: &[&str]) -> (Output, Option<Value>) {
    let (trace, json) = (folder.join("trace.jsonl"), folder.join("report.json"));
    write_trace(&trace, turns);
    let output = Command::new(env!("CARGO_BIN_EXE_kv-replay"))
        .args(["run", "--block-tokens", "64", "--device-blocks", "768"])
        .args(["--max-batch", "2", "--step-tokens", "4096", "--verify", "full"])
        .args(["--node-bytes", "16MiB", "--node-timeout", "240", "--trace"])
        .arg(&trace)
        .arg("--json")
        .arg(&json)
        .args(if more.contains(&"--host-blocks") { &[][..] } else { &["--host-blocks", "192"] })
        .args(more)
        .output()
        .unwrap();
    let report = std::fs::read(&json).ok().map(|text| serde_json::from_slice(&text).unwrap());
    (output, report)
}

/// A run whose nodes that were not killed have finished all that they had, with every byte right and no lease left.
fn good(turns: usize, more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = run(folder.path(), turns, more);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    let report = report.unwrap();
    assert_eq!(report["corrupt_blocks"], 0, "{report}");
    assert_eq!(report["finished"], report["requests"]);
    assert!(report["verified_blocks"].as_u64().unwrap() > 0);
    let leases = &report["leases"];
    let of = |name: &str| leases[name].as_u64().unwrap();
    assert_eq!(of("open"), 0);
    assert_eq!(of("granted"), of("returned") + of("cancelled") + of("expired"));
    report
}

#[test]
fn nodes_use_each_others_blocks_and_every_byte_is_right() {
    let report = good(4, &["--nodes", "3"]);
    assert_eq!(report["requests"], 32);
    assert!(report["remote_hits"].as_u64().unwrap() > 0, "{report}");
    assert!(report["remote_blocks_read"].as_u64() >= report["remote_hits"].as_u64());
    assert_eq!(report["reports"].as_array().unwrap().len(), 3);
    assert!(report["remote_misses_stale"].is_u64());
}

#[test]
fn a_node_that_is_killed_costs_its_own_requests_only() {
    let report = good(6, &["--nodes", "3", "--kill-node", "1@150"]);
    let killed = report["killed"].as_array().unwrap().len();
    assert_eq!(report["reports"].as_array().unwrap().len(), 3 - killed);
    assert_eq!(report["requests"], if killed == 1 { 32 } else { 48 });
}

#[test]
fn a_node_that_sleeps_past_its_leases_goes_on_and_so_do_the_others() {
    let report = good(6, &["--nodes", "3", "--stop-node", "2@100:600", "--stop-node", "0@900:400"]);
    assert_eq!(report["requests"], 48, "no request is lost");
}

#[test]
fn options_that_nodes_have_no_meaning_for_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (more, text) in [
        (&["--nodes", "2", "--host-blocks", "0"][..], "--host-blocks"),
        (&["--nodes", "2", "--kill-node", "2@0"], "node 2 of a drill is not one of 2"),
        (&["--nodes", "2", "--workers", "2"], "cannot be used with"),
        (&["--kill-node", "0@0"], "--nodes"),
    ] {
        let (output, report) = run(folder.path(), 1, more);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {errors}");
        assert!(errors.contains(text), "{more:?}: {errors}");
        assert!(report.is_none());
    }
}
