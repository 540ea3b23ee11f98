//! A run that is ended by a signal, at any moment, leaves no process and no folder.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::nodes::write_trace;
use kv_replay::rng::SplitMix64;
use rustix::process::{Pid, Signal, kill_process};

/// How long processes may take to go.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long processes may be there when their run is not: less than they would take to end by themselves.
const GONE: Duration = Duration::from_secs(5);

/// How often each kind of run is ended: `KV_SIGNAL_TRIES`, or few.
fn tries() -> u64 {
    std::env::var("KV_SIGNAL_TRIES").ok().and_then(|tries| tries.parse().ok()).unwrap_or(2)
}

/// The processes that have this folder for temporary files and have not ended.
fn processes(folder: &Path) -> Vec<String> {
    let wanted = format!("TMPDIR={}", folder.display());
    let entries = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let lives = |path: &Path| {
        let environment = std::fs::read(path.join("environ")).ok()?;
        let mut variables = environment.split(|&byte| byte == 0);
        let status = std::fs::read_to_string(path.join("stat")).ok()?;
        let (_, status) = status.rsplit_once(") ")?;
        (variables.any(|variable| variable == wanted.as_bytes()) && !status.starts_with('Z'))
            .then(|| path.display().to_string())
    };
    entries.filter_map(|path| lives(&path)).collect()
}

fn start(folder: &Path, trace: &Path, more: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_kv-replay"))
        .args(["run", "--block-tokens", "64", "--device-blocks", "768", "--host-blocks", "192"])
        .args(["--max-batch", "2", "--step-tokens", "4096", "--verify", "full", "--trace"])
        .arg(trace)
        .args(more)
        .env("TMPDIR", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for a process, and fails if it does not end.
fn end_of(mut child: Child) -> std::process::ExitStatus {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(child.wait().unwrap()));
    told.recv_timeout(PATIENCE).unwrap()
}

fn ended_by(signal: Signal, kind: &str, more: &[&str]) {
    let traces = tempfile::tempdir().unwrap();
    let trace = traces.path().join("trace.jsonl");
    // More than any machine plays before the signal.
    write_trace(&trace, (8, 1000));
    let mut moments = SplitMix64::new(7);
    for turn in 0..tries() {
        let folder = tempfile::tempdir().unwrap();
        let child = start(folder.path(), &trace, more);
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        // The moment is what is tried: before, while and after the processes start.
        let until = Instant::now() + Duration::from_millis(moments.below(1200));
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            std::thread::park_timeout(left);
        }
        // One that has ended meanwhile is not sent anything.
        let _ = kill_process(pid, signal);
        let status = end_of(child);
        let is_told = status.code() == Some(128 + signal.as_raw())
            || status.signal() == Some(signal.as_raw());
        assert!(is_told, "{kind} {turn}: {status}");
        let since = Instant::now();
        while !processes(folder.path()).is_empty() {
            assert!(since.elapsed() < GONE, "{kind} {turn}: {:?}", processes(folder.path()));
            std::thread::yield_now();
        }
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert!(signal == Signal::KILL || left.is_empty(), "{kind} {turn}: {left:?}");
    }
}

#[test]
fn nodes_and_their_folder_go_with_the_run_that_is_told_to_end() {
    ended_by(Signal::TERM, "nodes", &["--nodes", "3", "--node-bytes", "16MiB"]);
    ended_by(Signal::INT, "nodes", &["--nodes", "2", "--node-bytes", "16MiB"]);
    // One that is stopped cannot hear.
    let asleep = ["--nodes", "2", "--node-bytes", "16MiB", "--drill", "stop-node=1@0:60000"];
    ended_by(Signal::TERM, "nodes, one stopped", &asleep);
}

#[test]
fn workers_go_with_the_run_that_is_told_to_end() {
    ended_by(Signal::TERM, "workers", &["--workers", "2", "--layers", "2"]);
    let asleep = ["--workers", "2", "--layers", "2", "--drill", "stop-worker=1@5:60000"];
    ended_by(Signal::TERM, "workers, one stopped", &asleep);
}

#[test]
fn a_run_whose_report_nobody_takes_ends_when_it_is_told_to() {
    let traces = tempfile::tempdir().unwrap();
    let (trace, pipe) = (traces.path().join("trace.jsonl"), traces.path().join("pipe"));
    write_trace(&trace, (2, 10));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let folder = tempfile::tempdir().unwrap();
    let more = ["--nodes", "2", "--node-bytes", "16MiB", "--json"];
    let child = start(folder.path(), &trace, &[&more[..], &[pipe.to_str().unwrap()]].concat());
    let since = Instant::now();
    let is_empty = || std::fs::read_dir(folder.path()).unwrap().next().is_none();
    // The nodes have come and gone, and the report is next.
    for empty in [false, true] {
        while is_empty() != empty {
            assert!(since.elapsed() < PATIENCE, "{empty}");
            std::thread::yield_now();
        }
    }
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    let status = end_of(child);
    let told = Signal::TERM.as_raw();
    assert!(status.code() == Some(128 + told) || status.signal() == Some(told), "{status}");
}

#[test]
fn no_process_outlives_a_run_that_is_killed() {
    ended_by(Signal::KILL, "nodes", &["--nodes", "2", "--node-bytes", "16MiB"]);
    ended_by(Signal::KILL, "workers", &["--workers", "2", "--layers", "2"]);
}
