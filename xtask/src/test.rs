//! `cargo xtask test`: the gate, which continuous integration runs for every change. What takes longer than a
//! change can wait for is in `cargo xtask nightly`.

use crate::steps::{self, Step};
use crate::{api, cargo, deny, kernels, services, spelling, tidy};

/// Runs every step of the gate.
pub(crate) fn run() -> anyhow::Result<()> {
    services::provide();
    steps::run(steps(cargo::has_nextest()))
}

/// The arguments of Cargo that run all tests.
pub(crate) fn tests(nextest: bool) -> &'static str {
    if nextest {
        "nextest run --workspace --all-features --no-fail-fast"
    } else {
        "test --workspace --all-features --no-fail-fast --lib --bins --tests"
    }
}

/// The steps in order: what fails within seconds comes first. All use the same features, so that little is
/// built twice.
///
/// `--all-features` includes the features `sabotage`, whose code exists only in builds with debug assertions.
fn steps(nextest: bool) -> Vec<Step> {
    vec![
        Step::own("tidy", tidy::run),
        Step::own("spelling", spelling::run),
        Step::cargo("fmt --all --check"),
        Step::own("deny", deny::run),
        Step::own("kernels --check", || kernels::run(&kernels::Args { check: true })),
        // And links of the documentation.
        Step::own("api", || api::run(&api::Args::CHECK)),
        Step::cargo("clippy --workspace --all-targets --all-features -- -D warnings"),
        Step::cargo(
            "clippy --locked --manifest-path tools/Cargo.toml --all-targets -- -D warnings",
        ),
        // A race ends its test, unless the test plants the race.
        Step::cargo_with(tests(nextest), &[("CUDA_SIM_RACES", "abort")]),
        Step::cargo("test --doc --workspace --all-features --no-fail-fast"),
        // The release build, by the README's first command.
        Step::cargo("run --release --package kv-replay"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_nextest_runs_the_same_steps() {
        let lines =
            |nextest| -> Vec<String> { steps(nextest).into_iter().map(|step| step.line).collect() };
        let (with, without) = (lines(true), lines(false));
        assert_eq!(with.len(), without.len());
        let differing: Vec<_> = with.iter().zip(&without).filter(|(a, b)| a != b).collect();
        assert_eq!(differing.len(), 1, "{differing:?}");
    }
}
