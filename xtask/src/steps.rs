//! Steps of a long task: each is announced, timed and reported, and the rest goes on after a failure.

use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::{cargo, chat};

/// Time without output after which a running step is named again, with its time so far, to show
/// that it is still running.
const SILENCE: Duration = Duration::from_secs(10);

/// One step, and the line that announces it.
pub(crate) struct Step {
    pub(crate) line: String,
    work: Work,
}

enum Work {
    /// A run of Cargo with these arguments and environment variables.
    Cargo(Vec<String>, &'static [(&'static str, &'static str)]),
    /// A task of this program.
    Own(Box<dyn Fn() -> anyhow::Result<()>>),
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
pub(crate) fn run(steps: Vec<Step>) -> anyhow::Result<()> {
    let count = steps.len();
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
    pub(crate) fn cargo(args: &str) -> Self {
        Self::cargo_with(args, &[])
    }

    pub(crate) fn cargo_with(
        args: &str,
        variables: &'static [(&'static str, &'static str)],
    ) -> Self {
        let mut line = String::new();
        for (name, value) in variables {
            line.push_str(&format!("{name}=\"{value}\" "));
        }
        line.push_str("cargo ");
        line.push_str(args);
        let args = args.split_whitespace().map(str::to_owned).collect();
        Self { line, work: Work::Cargo(args, variables) }
    }

    pub(crate) fn own(args: &str, task: impl Fn() -> anyhow::Result<()> + 'static) -> Self {
        Self { line: format!("cargo xtask {args}"), work: Work::Own(Box::new(task)) }
    }
}

impl Work {
    fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Own(task) => task(),
            Self::Cargo(args, variables) => {
                let mut command = cargo::command();
                command.args(args).envs(variables.iter().copied()).stdin(Stdio::null());
                let status = command.status().context("cannot start Cargo")?;
                if !status.success() {
                    bail!("failed ({status})");
                }
                Ok(())
            }
        }
    }
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
    use super::*;

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
