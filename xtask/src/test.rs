//! `cargo xtask test`: everything that continuous integration runs, step by step. It continues
//! after a failure.

use std::ffi::OsString;
use std::fs;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::cargo::{self, Package};
use crate::{api, chat, deny, kernels, minimal, model, outside, paces, services, spelling, tidy};

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Skips the slow steps: tests at other paces, rustdoc, the kernel check, crates built alone,
    /// model checkers, the release build with its runs.
    #[arg(long)]
    quick: bool,
}

/// The folder for output of [`SMOKE`] runs, below the target folder.
const SMOKE_FOLDER: &str = "smoke";

/// Time without output after which a running step is named again, with its time so far, to show
/// that it is still running.
const SILENCE: Duration = Duration::from_secs(10);

/// Arguments of short runs of the release build of `kv-replay`, each of which must exit with 0.
/// Tests use a build with debug assertions, unlike users. `SMOKE` is replaced by the folder. Pools
/// are small enough for blocks to be evicted, offloaded and onboarded.
const SMOKE: &[&str] = &[
    "generate --requests 200 --seed 1 --output SMOKE/trace.jsonl",
    "policies --trace SMOKE/trace.jsonl --capacities 100,1000 --json SMOKE/policies.json",
    "run --trace SMOKE/trace.jsonl --requests 80 --device sim:2 --layers 3 --block-tokens 64 \
     --device-blocks 2500 --host-blocks 2500 --json SMOKE/run.json",
    "run --trace SMOKE/trace.jsonl --requests 20 --workers 4 --block-tokens 64 --device-blocks 2500 \
     --host-blocks 2500 --stop-worker 1@100:100 --kill-worker 2@200 --json SMOKE/workers.json",
    "run --contiguous --trace SMOKE/trace.jsonl --requests 40 --head-size 64 --cancel 10 \
     --json SMOKE/contiguous.json",
];

/// Examples with this ending are measurements: slow, and meaningless in a debug build.
const TIMING: &str = "_timing";

/// One step, and the line that announces it.
struct Step {
    line: String,
    work: Work,
}

enum Work {
    /// A run of Cargo with these arguments and environment variables.
    Cargo(Vec<String>, &'static [(&'static str, &'static str)]),
    /// A task of this program.
    Own(fn() -> anyhow::Result<()>),
}

/// The result of a step.
struct Outcome {
    line: String,
    elapsed: Duration,
    failure: Option<String>,
    /// Why it could not be run, on a machine that may lack what it needs.
    not_run: Option<String>,
}

/// Runs every step and reports all failures at the end.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    services::provide();
    let steps = steps(args, &cargo::packages()?, cargo::has_nextest());
    let count = steps.len();
    let folder = cargo::target_folder().join(SMOKE_FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut outcomes = Vec::new();
    for (index, step) in steps.into_iter().enumerate() {
        println!("[{}/{count}] {}", index + 1, step.line);
        let start = Instant::now();
        let error = watched(&step.line, || step.work.run()).err();
        let elapsed = start.elapsed();
        let is_not_run = error.as_ref().is_some_and(|error| error.is::<chat::NotRun>());
        let text = error.map(|error| format!("{error:#}"));
        let (failure, not_run) = if is_not_run { (None, text) } else { (text, None) };
        let verdict = failure.as_deref().or(not_run.as_deref()).unwrap_or("ok");
        println!("[{}/{count}] {verdict}, {:.1} s\n", index + 1, elapsed.as_secs_f64());
        outcomes.push(Outcome { line: step.line, elapsed, failure, not_run });
    }
    print!("{}", summary(&outcomes));
    match outcomes.iter().filter(|outcome| outcome.failure.is_some()).count() {
        0 => Ok(()),
        1 => bail!("1 of {count} steps failed"),
        failed => bail!("{failed} of {count} steps failed"),
    }
}

/// Runs a step, and prints its time so far every [`SILENCE`].
fn watched<T>(line: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let (done, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            // The channel closes when the work ends.
            while ended.recv_timeout(SILENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                println!("    … {:.0} s in {line}", start.elapsed().as_secs_f64());
            }
        });
        let outcome = work();
        drop(done);
        outcome
    })
}

impl Step {
    fn cargo(args: &str) -> Self {
        Self::cargo_with(args, &[])
    }

    fn cargo_with(args: &str, variables: &'static [(&'static str, &'static str)]) -> Self {
        let mut line = String::new();
        for (name, value) in variables {
            line.push_str(&format!("{name}=\"{value}\" "));
        }
        line.push_str("cargo ");
        line.push_str(args);
        let args = args.split_whitespace().map(str::to_owned).collect();
        Self { line, work: Work::Cargo(args, variables) }
    }

    fn own(args: &str, task: fn() -> anyhow::Result<()>) -> Self {
        Self { line: format!("cargo xtask {args}"), work: Work::Own(task) }
    }
}

impl Work {
    fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Own(task) => task(),
            Self::Cargo(args, variables) => {
                let mut command = cargo::command();
                command
                    .args(args.iter().map(|argument| placed(argument)))
                    .envs(variables.iter().copied())
                    .stdin(Stdio::null());
                let status = command.status().context("cannot start Cargo")?;
                if !status.success() {
                    bail!("failed ({status})");
                }
                Ok(())
            }
        }
    }
}

/// Replaces `SMOKE` in an argument by the folder of the [`SMOKE`] runs.
fn placed(argument: &str) -> OsString {
    match argument.strip_prefix("SMOKE/") {
        Some(file) => cargo::target_folder().join(SMOKE_FOLDER).join(file).into_os_string(),
        None => argument.into(),
    }
}

/// The steps in order. The fastest to fail come first. All use the same features, so that little is
/// built twice.
///
/// `--all-features` includes the features `sabotage`, whose code exists only in builds with debug
/// assertions.
fn steps(args: &Args, packages: &[Package], nextest: bool) -> Vec<Step> {
    let tests = if nextest {
        "nextest run --workspace --all-features --no-fail-fast"
    } else {
        "test --workspace --all-features --no-fail-fast --lib --bins --tests"
    };
    let mut steps = vec![
        Step::cargo("fmt --all --check"),
        Step::own("tidy", tidy::run),
        Step::own("spelling", spelling::run),
        Step::own("deny", deny::run),
        Step::cargo("clippy --workspace --all-targets --all-features -- -D warnings"),
        // A race ends its test, unless the test plants the race.
        Step::cargo_with(tests, &[("CUDA_SIM_RACES", "abort")]),
        Step::cargo("test --doc --workspace --all-features --no-fail-fast"),
    ];
    if args.quick {
        return steps;
    }
    let short = format!("paces{}", paces::Args::short().line());
    steps.push(Step::own(&short, || paces::run(&paces::Args::short())));
    steps.push(Step::cargo_with(
        "doc --workspace --no-deps --all-features",
        &[("RUSTDOCFLAGS", "-D warnings")],
    ));
    // Examples are the first programs that users run.
    for package in packages {
        for example in package.targets_of("example").filter(|name| !name.ends_with(TIMING)) {
            let name = &package.name;
            steps.push(Step::cargo(&format!(
                "run --quiet --all-features --package {name} --example {example}"
            )));
        }
    }
    steps.push(Step::own("api", || api::run(&api::Args::CHECK)));
    steps.push(Step::own("kernels --check", || kernels::run(&kernels::Args { check: true })));
    // Users choose single crates: a crate must not rely on features that another crate enables.
    for package in packages.iter().filter(|package| package.is_published_library()) {
        let name = &package.name;
        steps.push(Step::cargo(&format!("check --package {name} --lib --no-default-features")));
    }
    steps.push(Step::own("minimal", minimal::run));
    steps.push(Step::own("outside", outside::run));
    steps.push(Step::own("chat --check", chat::check));
    steps.push(Step::own("model", || model::run(&model::Args::default())));
    steps.push(Step::cargo("build --release --package kv-replay"));
    for arguments in SMOKE {
        steps.push(Step::cargo(&format!(
            "run --release --quiet --package kv-replay -- {arguments}"
        )));
    }
    steps
}

/// One line per step, and the failed ones once more at the end, where a reader looks first.
fn summary(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for Outcome { line, elapsed, failure, not_run } in outcomes {
        let verdict = match (failure, not_run) {
            (Some(_), _) => "FAIL",
            (None, Some(_)) => "left",
            (None, None) => "ok",
        };
        text.push_str(&format!("{verdict:>4} {:>7.1} s  {line}\n", elapsed.as_secs_f64()));
    }
    let total: Duration = outcomes.iter().map(|outcome| outcome.elapsed).sum();
    text.push_str(&format!("     {:>7.1} s  in all\n", total.as_secs_f64()));
    for Outcome { line, failure, not_run, .. } in outcomes {
        if let Some(reason) = failure.as_ref().or(not_run.as_ref()) {
            text.push_str(&format!("\n{line}\n    {reason}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cargo::Target;

    fn library(name: &str) -> Package {
        let target = Target { name: name.to_owned(), kind: vec!["lib".to_owned()] };
        Package {
            name: name.to_owned(),
            targets: vec![target],
            publish: None,
            features: BTreeMap::new(),
            dependencies: Vec::new(),
        }
    }

    fn lines(quick: bool, nextest: bool) -> Vec<String> {
        let mut unpublished = library("kv-tests");
        unpublished.publish = Some(Vec::new());
        let packages = [library("kv-pool"), unpublished];
        let steps = steps(&Args { quick }, &packages, nextest);
        steps.into_iter().map(|step| step.line).collect()
    }

    #[test]
    fn a_machine_without_nextest_runs_the_same_tests() {
        let (with, without) = (lines(true, true), lines(true, false));
        assert!(
            with.contains(
                &"CUDA_SIM_RACES=\"abort\" cargo nextest run --workspace --all-features --no-fail-fast"
                    .to_owned()
            )
        );
        let plain = "CUDA_SIM_RACES=\"abort\" cargo test --workspace --all-features --no-fail-fast --lib \
                     --bins --tests";
        assert!(without.contains(&plain.to_owned()));
        assert_eq!(with.len(), without.len());
    }

    #[test]
    fn warnings_are_denied_and_published_crates_built_alone() {
        let lines = lines(false, false);
        for line in [
            "cargo clippy --workspace --all-targets --all-features -- -D warnings",
            "RUSTDOCFLAGS=\"-D warnings\" cargo doc --workspace --no-deps --all-features",
            "cargo xtask tidy",
            "cargo xtask api",
            "cargo xtask deny",
            "cargo xtask minimal",
            "cargo xtask kernels --check",
            "cargo xtask model",
            "cargo check --package kv-pool --lib --no-default-features",
        ] {
            assert!(lines.iter().any(|other| other == line), "{line} is not among {lines:?}");
        }
        assert!(!lines.iter().any(|line| line.contains("kv-tests")));
    }

    #[test]
    fn the_release_build_is_run_as_well() {
        let lines = lines(false, false);
        for subcommand in ["generate", "policies", "run"] {
            let start = format!("cargo run --release --quiet --package kv-replay -- {subcommand} ");
            assert!(lines.iter().any(|line| line.starts_with(&start)), "{start}");
        }
        let written = |arguments: &&&str| arguments.contains(" SMOKE/");
        assert_eq!(SMOKE.iter().filter(written).count(), SMOKE.len());
    }

    #[test]
    fn quick_is_a_beginning_of_the_whole() {
        let (quick, whole) = (lines(true, false), lines(false, false));
        assert_eq!(whole[..quick.len()], quick);
        assert!(whole.len() > quick.len());
    }

    #[test]
    fn a_failed_command_is_a_failed_step() {
        let step = Step::cargo("no-such-subcommand-of-cargo");
        assert!(step.work.run().unwrap_err().to_string().starts_with("failed (exit status: 101"));
    }

    #[test]
    fn the_summary_repeats_failures_at_the_end() {
        let outcome = |line: &str, failure: Option<&str>| Outcome {
            line: line.to_owned(),
            elapsed: Duration::from_millis(1500),
            failure: failure.map(str::to_owned),
            not_run: None,
        };
        let left = Outcome { not_run: Some("not run: no".to_owned()), ..outcome("cargo c", None) };
        let text = summary(&[outcome("cargo a", Some("failed")), outcome("cargo b", None), left]);
        let expected = "FAIL     1.5 s  cargo a\n  ok     1.5 s  cargo b\nleft     1.5 s  cargo c\n         \
                        4.5 s  in all\n\ncargo a\n    failed\n\ncargo c\n    not run: no\n";
        assert_eq!(text, expected);
    }
}
