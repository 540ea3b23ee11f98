//! With a protection taken out, a replay finds bytes that do not belong, names them, and ends with status 3.

#![cfg(all(feature = "sabotage", debug_assertions))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

/// A workload of chats with pools so small that blocks are evicted and come back.
fn replay(more: &[&str], report: &std::path::Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-replay"));
    command
        .args(["run", "--requests", "24", "--seed", "3", "--block-tokens", "64"])
        .args(["--device-blocks", "2304", "--max-batch", "16"])
        .arg("--json")
        .arg(report)
        .args(more);
    command.output().unwrap()
}

/// The report of a run that found corrupt blocks, having said so in every way it has.
#[track_caller]
fn corrupt_report(sabotage: &str, host_blocks: &str) -> serde_json::Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = replay(&["--sabotage", sabotage, "--host-blocks", host_blocks], &path);
    let (stdout, stderr) = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
    assert_eq!(output.status.code(), Some(3), "{sabotage}: {stdout:?} {stderr:?}");
    let stdout = stdout.unwrap();
    assert!(stdout.contains("CORRUPT"), "{stdout}");
    assert!(stdout.contains("device block"), "{stdout}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(report["corrupt_blocks"].as_u64().unwrap() > 0);
    report
}

#[test]
fn the_same_replay_is_clean_with_every_protection_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = replay(&[], &path);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(report["finished"], 24);
    assert_eq!(report["corrupt_blocks"], 0);
    assert!(report["verified_blocks"].as_u64().unwrap() > 10_000);
    assert!(report["blocks_offloaded"].as_u64().unwrap() > 0);
}

#[test]
fn a_staging_buffer_reused_before_its_event_is_caught() {
    corrupt_report("staging", "2048");
}

#[test]
fn a_block_handed_to_two_callers_is_caught_and_its_owner_named() {
    // Without a host tier: a block with two owners would be moved under one of them, which is another defect.
    let report = corrupt_report("claim-unseen", "0");
    let corruptions = report["corruptions"].as_array().unwrap();
    let names_owner = |corrupt: &serde_json::Value| {
        corrupt["message"].as_str().unwrap().contains("belongs to request")
    };
    assert!(corruptions.iter().any(names_owner), "{corruptions:?}");
}

/// Before a byte is written, where both callers store in one iteration.
#[test]
fn a_block_handed_to_two_callers_is_refused_by_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = replay(&["--sabotage", "claim", "--host-blocks", "0"], &path);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("goes to slot"), "{stderr}");
    assert!(!path.exists());
}

#[test]
fn a_transfer_that_ignores_the_skip_is_caught() {
    corrupt_report("skip", "2048");
}

#[test]
fn an_unknown_sabotage_is_refused() {
    let output = replay(&["--sabotage", "luck"], std::path::Path::new("unused.json"));
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("unknown sabotage \"luck\""), "{message}");
}
