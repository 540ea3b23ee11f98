//! Runs of the program over several nodes.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

/// A trace of few short requests, each of which comes several times: it meets another node each time.
pub(crate) fn write_trace(path: &Path, (requests, turns): (u64, usize)) {
    let trace = super::generated(requests, 3, (12_000, 12));
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

pub(crate) fn run(folder: &Path, turns: usize, more: &[&str]) -> (Output, Option<Value>) {
    run_of(folder, (8, turns), more)
}

fn run_of(folder: &Path, of: (u64, usize), more: &[&str]) -> (Output, Option<Value>) {
    let (trace, json) = (folder.join("trace.jsonl"), folder.join("report.json"));
    write_trace(&trace, of);
    let output = super::program()
        .args(["run", "--block-tokens", "64", "--device-blocks", "768"])
        .args(["--max-batch", "2", "--step-tokens", "4096", "--verify", "full"])
        .args(if more.contains(&"--node-bytes") { &[][..] } else { &["--node-bytes", "16MiB"] })
        .args(["--node-timeout", "240", "--trace"])
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
pub(crate) fn good(turns: usize, more: &[&str]) -> Value {
    good_of((8, turns), more)
}

/// The same of more requests than the host memory of one node has room for, with hardly a slot: what others find lies in host memory.
pub(crate) fn good_hosted(more: &[&str]) -> Value {
    let hosted = ["--node-bytes", "64KiB", "--host-blocks", "1024", "--store", "all"];
    good_of((41, 4), &[&hosted[..], more].concat())
}

fn good_of(of: (u64, usize), more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = run_of(folder.path(), of, more);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    let report = report.unwrap();
    assert_eq!(report["corrupt_blocks"], 0, "{report}");
    let count = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(count("finished") + count("cancelled"), count("requests"));
    assert!(report["verified_blocks"].as_u64().unwrap() > 0);
    let leases = &report["leases"];
    let of = |name: &str| leases[name].as_u64().unwrap();
    assert_eq!(of("open"), 0);
    assert_eq!(of("granted"), of("returned") + of("cancelled") + of("expired"));
    report
}
