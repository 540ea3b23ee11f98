//! Runs with worker processes: one manager decides, and what happens to a process is an answer, not a hang.

use std::path::PathBuf;
use std::process::Output;

use crate::common::{program, read_json, request};
use kv_replay::trace::Trace;
use serde_json::Value;
use tempfile::TempDir;

/// Every kind of life that does not change memory.
const LIFE: &[&str] = &[
    "--chunk",
    "512",
    "--draft",
    "3",
    "--accept",
    "70",
    "--fork",
    "2",
    "--suspend",
    "5",
    "--cancel",
    "20",
];

/// Two layers with full attention, three with a window of less than five blocks, and two with a state.
const GROUPS: &[&str] =
    &["--layers", "5", "--full-layers", "2", "--window", "300", "--state-layers", "2"];

/// Every kind of life that models with states have.
const LIFE_OF_STATES: &[&str] = &["--fork", "2", "--suspend", "5", "--cancel", "20"];

/// Five conversations of four turns, one turn after the other: what a turn has computed has left the device
/// when the next one asks for it.
fn trace() -> Trace {
    let turn = |turn: u64, talk: u64| request((turn + 1) * 1500, 12 + talk, talk * 100);
    let turns = (0..4).flat_map(|at| (0..5).map(move |talk| (at, talk)));
    Trace::new(turns.map(|(at, talk)| turn(at, talk)).collect())
}

/// A folder with the trace, and room for reports.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        trace().write(&folder.path().join("trace.jsonl")).unwrap();
        Self { folder }
    }

    fn report(&self) -> PathBuf {
        self.folder.path().join("report.json")
    }

    fn output(&self, args: &[&str]) -> Output {
        let trace = self.folder.path().join("trace.jsonl");
        let mut command = program();
        command
            .args(["run", "--block-tokens", "64"])
            .args(if args.contains(&"--device-memory") {
                &[][..]
            } else {
                &["--device-blocks", "320"]
            })
            .args(["--max-batch", "6", "--step-tokens", "2048", "--seed", "5", "--trace"])
            .arg(trace)
            .arg("--json")
            .arg(self.report())
            .args(args)
            .args(if args.contains(&"--host-blocks") { &[][..] } else { &["--host-blocks", "512"] })
            // A device completes what is waited for, and no more, as worker processes are asked.
            .env("CUDA_SIM_PACE", "slowest");
        command.output().unwrap()
    }

    /// The report of a run in which every byte was right.
    #[track_caller]
    fn clean(&self, args: &[&str]) -> Value {
        let output = self.output(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
        let report = read_json(&self.report());
        assert_eq!(report["corrupt_blocks"], 0, "{args:?}");
        assert_eq!(count(&report, "finished") + count(&report, "cancelled"), 20, "{args:?}");
        assert!(count(&report, "verified_blocks") > 1000, "{args:?}");
        report
    }

    /// What a run says that fails with this exit status.
    #[track_caller]
    fn fails(&self, args: &[&str], status: i32) -> String {
        let output = self.output(args);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{args:?}: {message}");
        message
    }
}

fn count(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

fn restarts(report: &Value) -> &Vec<Value> {
    report["workers"]["restarts"].as_array().unwrap()
}

/// What the manager has decided in a run.
fn decisions(report: &Value) -> Vec<(&'static str, u64)> {
    let names = [
        "finished",
        "cancelled",
        "iterations",
        "block_lookups",
        "block_hits",
        "blocks_evicted",
        "blocks_offloaded",
        "blocks_onboarded",
        "blocks_copied_on_write",
        "blocks_suspended",
        "prompt_tokens",
        "generated_tokens",
        "preemptions",
        "forks",
        "suspensions",
        "staged_behind_open_ids",
        "peak_device_blocks",
    ];
    names.map(|name| (name, count(report, name))).to_vec()
}

#[test]
fn workers_carry_out_what_one_process_would_decide() {
    let case = Case::new();
    for life in [&[][..], LIFE] {
        let local = case.clean(&[&["--layers", "4"], life].concat());
        assert!(count(&local, "blocks_evicted") > 0 && count(&local, "blocks_onboarded") > 0);
        for workers in ["1", "2", "4"] {
            let args = [&["--layers", "4", "--workers", workers], life].concat();
            let report = case.clean(&args);
            assert_eq!(decisions(&report), decisions(&local), "{args:?}");
            let number: u64 = workers.parse().unwrap();
            // Each worker reads its share of every block.
            let verified = count(&report, "verified_blocks");
            assert_eq!(verified, number * count(&local, "verified_blocks"), "{args:?}");
            assert_eq!(report["workers"]["workers"], number);
            assert_eq!(report["bytes_transferred"], local["bytes_transferred"], "{args:?}");
        }
    }
}

#[test]
fn workers_have_layers_of_every_group() {
    let case = Case::new();
    let windows = &["--layers", "4", "--window", "200"][..];
    let heads =
        &["--layers", "1", "--kv-heads", "2", "--state-layers", "3", "--place", "heads"][..];
    for (model, life) in [
        (GROUPS, &["--chunk", "700"][..]),
        (GROUPS, LIFE_OF_STATES),
        (windows, LIFE),
        (heads, LIFE_OF_STATES),
    ] {
        let args = [model, life].concat();
        let here: Vec<_> =
            args.iter().copied().filter(|arg| !["--place", "heads"].contains(arg)).collect();
        let local = case.clean(&here);
        assert!(count(&local, "blocks_offloaded") > 0 && count(&local, "block_hits") > 0);
        for workers in [1, 2] {
            let number = workers.to_string();
            let args = [&["--workers", &number], &args[..]].concat();
            let report = case.clean(&args);
            assert_eq!(decisions(&report), decisions(&local), "{args:?}");
            let verified = count(&report, "verified_blocks");
            assert_eq!(verified, workers * count(&local, "verified_blocks"), "{args:?}");
            assert_eq!(report["bytes_transferred"], local["bytes_transferred"], "{args:?}");
        }
    }
}

#[test]
fn workers_have_a_state_behind_each_draft_and_layers_of_a_draft_model() {
    let case = Case::new();
    let drafts = ["--draft-layers", "2", "--draft", "3", "--accept", "60"];
    let args = [GROUPS, LIFE_OF_STATES, &drafts].concat();
    let local = case.clean(&args);
    let report = case.clean(&[&["--workers", "2"], &args[..]].concat());
    assert_eq!(decisions(&report), decisions(&local));
    assert_eq!(count(&report, "verified_blocks"), 2 * count(&local, "verified_blocks"));
    for what in ["draft_model_tokens", "staged_behind_open_ids", "suspensions"] {
        assert!(count(&report, what) > 0, "{what}");
        assert_eq!(report[what], local[what], "{what}");
    }
}

/// Memory that the groups of [`GROUPS`] share, for a request or two.
const SHARED: &[&str] =
    &["--head-size", "128", "--state-tokens", "64", "--device-memory", "41943040"];

#[test]
fn workers_share_their_memory_among_groups_alike() {
    let case = Case::new();
    let args = [&["--workers", "2"], GROUPS, SHARED, LIFE_OF_STATES].concat();
    let report = case.clean(&args);
    let shared = &report["memory"]["shared"];
    assert!(shared["granted"].as_u64() > Some(2), "{shared}");
    let lost = ["--drill", "kill-worker=1@30", "--budget-swing", "40"];
    let report = case.clean(&[&args[..], &lost].concat());
    assert_eq!(restarts(&report).len(), 1, "{report}");
    assert!(report["memory"]["shared"]["fewest_granules"].is_u64(), "{report}");
    let heads = ["--workers", "2", "--layers", "1", "--kv-heads", "2", "--state-layers", "4"];
    let heads = [&heads[..], SHARED, &["--place", "heads"]].concat();
    assert!(case.clean(&heads)["memory"]["shared"]["granules"].is_u64());
}

#[test]
fn workers_of_every_group_are_killed_and_stopped() {
    let case = Case::new();
    let drills =
        ["--workers", "2", "--drill", "kill-worker=1@30", "--drill", "stop-worker=0@60:20"];
    let swing = ["--chunk", "256", "--budget-swing", "50", "--drill", "kill-worker=0@70"];
    let report = case.clean(&[&drills, GROUPS, LIFE_OF_STATES, &swing].concat());
    assert_eq!(restarts(&report).len(), 2, "{report}");
    assert!(count(&report, "budget_changes") > 1 && count(&report, "suspensions") > 0, "{report}");
}

#[test]
fn heads_are_divided_over_workers() {
    let case = Case::new();
    let report =
        case.clean(&["--workers", "4", "--kv-heads", "4", "--layers", "2", "--place", "heads"]);
    assert!(report["placement"]["placement"].as_str().unwrap().contains("gpu"));
}

#[test]
fn every_kind_of_life_goes_on_while_workers_are_killed_and_stopped() {
    let case = Case::new();
    let drills = [
        "--workers",
        "4",
        "--drill",
        "kill-worker=2@30",
        "--drill",
        "kill-worker=0@31",
        "--drill",
        "stop-worker=1@60:20",
        "--drill",
        "kill-worker=2@90",
    ];
    let report = case.clean(&[&drills, LIFE].concat());
    assert_eq!(restarts(&report).len(), 3, "{report}");
    assert!(count(&report, "forks") > 0 && count(&report, "suspensions") > 0);
}

#[test]
fn the_memory_of_all_workers_falls_and_rises_with_the_budget() {
    let case = Case::new();
    let swing = ["--workers", "3", "--chunk", "256", "--budget-swing", "50"];
    for drills in [&[][..], &["--drill", "kill-worker=1@70", "--drill", "kill-worker=0@129"]] {
        let report = case.clean(&[&swing, drills].concat());
        assert!(count(&report, "budget_changes") > 1, "{report}");
        assert!(count(&report, "fewest_device_blocks") < 320, "{report}");
        assert!(count(&report, "peak_device_blocks") > 160, "{report}");
        assert_eq!(restarts(&report).len(), drills.len() / 2);
    }
    case.clean(&[&swing, LIFE.strip_prefix(&["--chunk", "512"]).unwrap()].concat());
}

#[test]
fn the_manager_goes_no_further_than_overlap_allows_while_a_worker_is_stopped() {
    let case = Case::new();
    let undisturbed = case.clean(&["--workers", "4"]);
    for worker in ["0", "3"] {
        let report =
            case.clean(&["--workers", "4", "--drill", &format!("stop-worker={worker}@40:50")]);
        let stop = &report["workers"]["stops"][0];
        let (staged, completed) = (count(stop, "staged"), count(stop, "completed"));
        // One step is staged ahead of the oldest that is not complete, and nothing counts that the stopped
        // worker has not computed.
        assert_eq!(staged, completed + 2, "{stop}");
        assert!(completed < 40, "{stop}");
        assert_eq!(decisions(&report), decisions(&undisturbed), "nothing was decided otherwise");
        assert!(restarts(&report).is_empty());
    }
}

#[test]
fn a_tier_that_does_everything_wrong_lies_below_each_worker() {
    let case = Case::new();
    let (mut loaded, mut wrong) = (0, 0);
    for seed in ["1", "2", "3"] {
        let faults = format!("tier-faults={seed}");
        let over = ["--workers", "2", "--layers", "2", "--drill", &faults, "--host-blocks", "100"];
        let killed = ["--drill", "kill-worker=1@40"];
        let args = if seed == "3" { [&over[..], &killed[..]].concat() } else { over.to_vec() };
        let report = case.clean(&args);
        let tiers = &report["tiers"];
        assert_eq!(count(tiers, "quarantined_at_end"), 0, "{tiers}");
        loaded += count(tiers, "blocks_loaded");
        let faults = tiers["faults"].as_object().unwrap();
        wrong += faults.values().map(|count| count.as_u64().unwrap()).sum::<u64>();
    }
    assert!(loaded > 0 && wrong > 0, "{loaded} blocks came back, and {wrong} were wrong");
    let refused = case.fails(&["--drill", "tier-faults=1", "--host-blocks", "0"], 2);
    assert!(refused.contains("--drill tier-faults puts a tier below host memory"), "{refused}");
}

#[test]
fn a_killed_worker_is_replaced_and_everything_is_computed_again() {
    let case = Case::new();
    let undisturbed = case.clean(&["--workers", "3"]);
    let last = count(&undisturbed, "iterations").to_string();
    for (step, worker) in [("1", "0"), ("40", "2"), (&last, "1")] {
        let report =
            case.clean(&["--workers", "3", "--drill", &format!("kill-worker={worker}@{step}")]);
        let [restart] = &restarts(&report)[..] else { panic!("{report}") };
        assert_eq!(restart["worker"].to_string(), worker);
        assert!(restart["reason"].as_str().unwrap().contains("SIGKILL"), "{restart}");
        let void = count(&report["workers"], "steps_voided");
        assert!((1..=2).contains(&void), "{void} steps were in flight");
        for name in ["finished", "prompt_tokens", "generated_tokens", "block_lookups"] {
            assert_eq!(report[name], undisturbed[name], "{name} after a kill at {step}");
        }
        assert!(count(&report, "iterations") > count(&undisturbed, "iterations"));
    }
}

#[test]
fn two_workers_that_are_killed_at_once_are_replaced() {
    let case = Case::new();
    let drills = ["--workers", "3", "--drill", "kill-worker=0@40", "--drill", "kill-worker=2@40"];
    let report = case.clean(&drills);
    let mut workers: Vec<_> = restarts(&report).iter().map(|one| count(one, "worker")).collect();
    workers.sort_unstable();
    assert_eq!(workers, [0, 2]);
}

#[test]
fn a_worker_that_makes_no_progress_is_killed_and_replaced() {
    let case = Case::new();
    let drill = ["--workers", "2", "--worker-timeout", "5", "--drill", "stop-worker=1@40:20000"];
    let report = case.clean(&drill);
    let [restart] = &restarts(&report)[..] else { panic!("{report}") };
    assert_eq!(restart["reason"], "the process was silent for 5 s");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let case = Case::new();
    for (args, status, expected) in [
        (&["--workers", "0", "--layers", "1"][..], 2, "--workers is 0, expected at least 1"),
        (&["--workers", "65"], 2, "--workers is 65, more than the largest allowed, 64"),
        (
            &["--workers", "1", "--worker-timeout", "0"],
            2,
            "--worker-timeout is 0, expected at least 1",
        ),
        (&["--workers", "2", "--device", "sim:2"], 2, "expected --device sim, not sim:2"),
        (&["--device", "cuda"], 2, "--device cuda is every GPU, for --workers"),
        (
            &["--workers", "2", "--drill", "kill-worker=2@9"],
            2,
            "the drill 2@9 is for a worker of a run with 2",
        ),
        (&["--workers", "2", "--drill", "stop-worker=1@9"], 2, "expected WORKER@STEP:MILLISECONDS"),
        (
            &["--workers", "2", "--drill", "kill-worker=0@999999"],
            1,
            "the drill 0@999999 never came",
        ),
        (
            &["--workers", "3", "--layers", "2"],
            2,
            "--layers is 2, expected at least one for each of the 3",
        ),
        (&["--drill", "kill-worker=0@1"], 2, "--workers"),
        (
            &["--workers", "2", "--layers", "3", "--window", "64"],
            2,
            "group 1 has 1 layers, too few to divide over 2 devices",
        ),
        (
            &["--workers", "2", "--window", "64", "--place", "layers:round-robin"],
            2,
            "--place layers:round-robin cannot be combined with --window, --state-layers or --draft-layers on 2 devices",
        ),
        (
            &["--device", "sim:2", "--kv-heads", "2", "--window", "64", "--place", "heads"],
            2,
            "--place heads cannot be combined with --window, --state-layers or --draft-layers on 2 devices",
        ),
    ] {
        let message = case.fails(args, status);
        assert!(message.contains(expected), "{args:?}: {message}");
    }
}

#[test]
fn each_worker_has_files_of_its_own_which_are_found_again() {
    let case = Case::new();
    let files = case.folder.path().join("files");
    let over = ["--workers", "2", "--layers", "2", "--host-blocks", "100", "--store", "all"];
    // Whatever the machine measures, what is stored is loaded.
    let disk = ["--compute-rate", "0", "--disk-bytes", "64MiB", "--disk"];
    let over = [&over[..], &disk, &[files.to_str().unwrap()]].concat();
    let first = case.clean(&over);
    assert_eq!(count(&first, "disk_survivors"), 0, "{first}");
    assert!(count(&first, "disk_stored") > 0, "{first}");
    for worker in 0..2 {
        assert!(files.join(format!("worker-{worker}/kv-disk-000.slots")).is_file());
    }
    let second = case.clean(&over);
    assert!(count(&second, "disk_survivors") > 0, "{second}");
    let saved = [&first, &second].map(|report| count(report, "disk_saved_tokens"));
    assert!(saved[1] > saved[0], "{saved:?}: prompts begin with what was there before");
    // A process that is killed or stopped, and the one in its place, which begins with empty files.
    let drills = [
        "--drill",
        "kill-worker=1@20",
        "--drill",
        "stop-worker=0@40:20",
        "--drill",
        "kill-worker=0@60",
    ];
    let drilled = case.clean(&[&over[..], &drills].concat());
    assert_eq!(restarts(&drilled).len(), 2, "{drilled}");
    assert!(count(&drilled, "disk_stored") > 0, "{drilled}");
    assert_eq!(count(&drilled, "disk_survivors"), 0, "{drilled}");
    assert_eq!(count(&drilled["tiers"], "quarantined_at_end"), 0);
    // Another division of the model has use for none of it, and gives it up only when it is told to.
    let heads = ["--kv-heads", "2", "--place", "heads", "--disk-fresh"];
    let divided = case.clean(&[&over[..], &heads].concat());
    assert_eq!(count(&divided, "disk_survivors"), 0, "{divided}");
}
