//! `cargo xtask paces`: the tests of every crate that uses the simulated device, with the device at each pace.
//!
//! A test that passes only at one pace, without choosing that pace, is wrong. So is such code.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::ValueEnum;

use crate::cargo::{self, Package};

/// The variable that sets the initial pace of simulated machines.
const VARIABLE: &str = "CUDA_SIM_PACE";

/// The crate of the simulated device.
const DEVICE: &str = "cuda-sim";

/// Options of `cargo xtask paces`.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Args {
    /// Runs only the tests of these crates [default: all that use the simulated device].
    #[arg(long, value_name = "CRATE")]
    package: Vec<String>,
    /// Runs only at these paces [default: all].
    #[arg(long, value_enum, value_name = "PACE")]
    pace: Vec<Pace>,
}

/// How far a simulated device advances on its own, like `cuda_sim::Pace`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Pace {
    Random,
    Slowest,
    Fastest,
    OneBehind,
}

/// The results of the tests at one pace.
struct Row {
    pace: &'static str,
    counts: Counts,
    seconds: f64,
    failed: bool,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Counts {
    passed: u64,
    failed: u64,
}

/// Runs the tests that `args` select, and fails if any fails at any pace.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let packages = args.packages(&cargo::packages()?)?;
    let paces = if args.pace.is_empty() { Pace::value_variants() } else { &args.pace };
    build()?;
    let mut rows = Vec::new();
    for pace in paces {
        println!("{VARIABLE}={}", pace.word());
        rows.push(row(pace.word(), &packages)?);
    }
    print!("{}", table(&rows));
    let failed: Vec<&str> = rows.iter().filter(|row| row.failed).map(|row| row.pace).collect();
    if !failed.is_empty() {
        bail!("tests fail at these paces: {}", failed.join(", "));
    }
    Ok(())
}

impl Args {
    /// Names of the crates to test.
    fn packages(&self, all: &[Package]) -> anyhow::Result<Vec<String>> {
        let users = all.iter().filter(|package| package.name == DEVICE || package.uses(DEVICE));
        let users: Vec<String> = users.map(|package| package.name.clone()).collect();
        if self.package.is_empty() {
            return Ok(users);
        }
        if let Some(other) = self.package.iter().find(|name| !users.contains(name)) {
            bail!("{other} is not a crate that uses {DEVICE}; these do: {}", users.join(", "));
        }
        Ok(self.package.clone())
    }
}

impl Pace {
    fn word(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Slowest => "slowest",
            Self::Fastest => "fastest",
            Self::OneBehind => "one-behind",
        }
    }
}

/// Builds all tests, with the features of `cargo xtask test`, so that the build does not count for
/// any pace.
fn build() -> anyhow::Result<()> {
    let status = cargo::command()
        .args(["test", "--no-run", "--quiet", "--workspace", "--all-features"])
        .args(["--lib", "--bins", "--tests"])
        .stdin(Stdio::null())
        .status()
        .context("cannot start Cargo")?;
    if !status.success() {
        bail!("the tests do not build ({status})");
    }
    Ok(())
}

/// Runs the tests of `packages` at one pace.
fn row(pace: &'static str, packages: &[String]) -> anyhow::Result<Row> {
    let nextest = cargo::has_nextest();
    let mut command = cargo::command();
    command.args(arguments(nextest, packages)).env(VARIABLE, pace).stdin(Stdio::null());
    // The counts are printed on one of the two streams.
    let start = Instant::now();
    let mut child =
        if nextest { command.stderr(Stdio::piped()) } else { command.stdout(Stdio::piped()) }
            .spawn()
            .context("cannot start Cargo")?;
    let mut counts = Counts::default();
    let told: Option<Box<dyn std::io::Read>> = match (child.stderr.take(), child.stdout.take()) {
        (Some(stderr), _) => Some(Box::new(stderr)),
        (None, Some(stdout)) => Some(Box::new(stdout)),
        (None, None) => None,
    };
    for line in told.into_iter().flat_map(|told| BufReader::new(told).split(b'\n')) {
        let line = line.context("cannot read what the tests say")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        counts.add(&line);
    }
    let status = child.wait().context("cannot wait for Cargo")?;
    let seconds = start.elapsed().as_secs_f64();
    if counts == Counts::default() {
        bail!("no test of {} ran ({status})", packages.join(", "));
    }
    Ok(Row { pace, counts, seconds, failed: counts.failed > 0 || !status.success() })
}

/// Cargo's arguments. Nextest selects among all tests, which are built as for `cargo xtask test`.
fn arguments(nextest: bool, packages: &[String]) -> Vec<String> {
    let fixed = if nextest {
        "nextest run --workspace --all-features --no-fail-fast --status-level fail --color never -E"
    } else {
        "test --all-features --no-fail-fast --lib --bins --tests"
    };
    let mut arguments: Vec<String> = fixed.split_whitespace().map(str::to_owned).collect();
    if nextest {
        let filters: Vec<String> =
            packages.iter().map(|name| format!("package(={name})")).collect();
        arguments.push(filters.join("|"));
    } else {
        arguments.extend(packages.iter().flat_map(|name| ["--package".to_owned(), name.clone()]));
    }
    arguments
}

impl Counts {
    /// Adds the counts of a summary line of nextest or of a test program.
    fn add(&mut self, line: &str) {
        let before = |word: &str| -> Option<u64> {
            let words: Vec<&str> = line.split_whitespace().collect();
            let at = words.iter().position(|other| other.trim_end_matches([',', ';']) == word)?;
            words.get(at.checked_sub(1)?)?.parse().ok()
        };
        let line = line.trim_start();
        if line.starts_with("Summary [") {
            // A test that fails in any way, including by timeout, was run and has not passed.
            let run = line.split_once(" run:").and_then(|(head, _)| {
                let count = head.split_whitespace().rev().nth(1)?;
                count.split('/').next()?.parse::<u64>().ok()
            });
            let passed = before("passed").unwrap_or(0);
            self.passed += passed;
            self.failed += run.unwrap_or(passed).saturating_sub(passed);
        } else if line.starts_with("test result:") {
            self.passed += before("passed").unwrap_or(0);
            self.failed += before("failed").unwrap_or(0);
        }
    }
}

/// One line per pace.
fn table(rows: &[Row]) -> String {
    let mut text =
        format!("{:<12}{:>8}{:>8}{:>8}{:>10}\n", "pace", "tests", "passed", "failed", "seconds");
    for Row { pace, counts, seconds, .. } in rows {
        let Counts { passed, failed } = counts;
        let tests = passed + failed;
        text.push_str(&format!("{pace:<12}{tests:>8}{passed:>8}{failed:>8}{seconds:>10.1}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(lines: &[&str]) -> (u64, u64) {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.add(line));
        (counts.passed, counts.failed)
    }

    #[test]
    fn both_ways_to_run_tests_are_counted() {
        let passed = "     Summary [   2.194s] 232 tests run: 232 passed (1 slow), 11 skipped";
        let failed =
            "     Summary [  12.0s] 5/9 tests run: 2 passed, 2 failed, 1 timed out, 4 skipped";
        let other = "        FAIL [   0.116s] (133/232) cuda-sim::order 7 passed";
        assert_eq!(counts(&[passed]), (232, 0));
        assert_eq!(counts(&[failed, other]), (2, 3));
        assert_eq!(
            counts(&["     Summary [  1.0s] 1 test run: 0 passed, 1 failed, 0 skipped"]),
            (0, 1)
        );
        let program =
            "test result: FAILED. 16 passed; 2 failed; 0 ignored; 0 measured; 3 filtered out";
        assert_eq!(counts(&[program, "test a ... ok", program]), (32, 4));
    }

    #[test]
    fn all_users_of_the_simulated_device_are_run_unless_some_are_named() {
        let all = cargo::packages().unwrap();
        let users = Args::default().packages(&all).unwrap();
        for name in ["cuda-sim", "cuda-driver", "cuda-vmm", "kv-replay", "kv-plane"] {
            assert!(users.iter().any(|other| other == name), "{name} is not among {users:?}");
        }
        assert!(!users.iter().any(|name| name == "kv-pool"), "{users:?}");
        let wrong = Args { package: vec!["kv-pool".to_owned()], ..Args::default() };
        assert!(
            wrong.packages(&all).unwrap_err().to_string().starts_with("kv-pool is not a crate")
        );
    }

    #[test]
    fn tests_are_picked_by_package_and_the_line_can_be_copied() {
        let packages = ["cuda-sim", "kv-stage"].map(str::to_owned);
        let with = arguments(true, &packages);
        assert_eq!(with[with.len() - 2..], ["-E", "package(=cuda-sim)|package(=kv-stage)"]);
        let without = arguments(false, &packages);
        assert_eq!(
            without[without.len() - 4..],
            ["--package", "cuda-sim", "--package", "kv-stage"]
        );
    }

    #[test]
    fn words_are_those_that_the_command_line_takes() {
        for pace in Pace::value_variants() {
            assert_eq!(Pace::from_str(pace.word(), false), Ok(*pace));
        }
    }

    #[test]
    fn a_line_a_pace() {
        let counts = Counts { passed: 230, failed: 2 };
        let row = Row { pace: "one-behind", counts, seconds: 12.34, failed: true };
        let expected = "pace           tests  passed  failed   seconds\n\
                        one-behind       232     230       2      12.3\n";
        assert_eq!(table(&[row]), expected);
    }
}
