//! Tasks of the workspace: `cargo xtask <task>`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program reports here"
)]

mod cargo;
mod gpu_bundle;
mod kernels;
mod model;
mod outside;
mod paces;
mod peers;
mod races;
mod removals;
mod simulate;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, checks and packs the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs every check and test, as continuous integration does.
    Test(test::Args),
    /// Runs the tests with the simulated device at each pace.
    Paces(paces::Args),
    /// Runs long campaigns of random schedules on the simulated device.
    Simulate(simulate::Args),
    /// Holds the race detector against random programs.
    Races(races::Args),
    /// Checks the block pool with model checkers and against a naive reference.
    Model(model::Args),
    /// Runs projects outside the workspace that depend on one of its crates.
    Outside,
    /// Checks rules of the tree that no compiler knows.
    Tidy,
    /// Packs GPU tests, GPU benchmarks and `kv-replay` for a machine with a GPU.
    GpuBundle,
    /// Builds the PTX of every kernel with the pinned compiler, or checks what is committed.
    Kernels(kernels::Args),
    /// Runs kv-pool beside kvbm-logical on the same operations.
    Peers(peers::Args),
    /// Takes protections out one at a time, and sees that a test fails without each.
    Removals(removals::Args),
}

fn main() -> ExitCode {
    // Not by returning the error, which would show a backtrace for what is no fault of ours.
    match run(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<()> {
    match task {
        Task::Test(args) => test::run(&args),
        Task::Paces(args) => paces::run(&args),
        Task::Simulate(args) => simulate::run(&args),
        Task::Races(args) => races::run(&args),
        Task::Model(args) => model::run(&args),
        Task::Outside => outside::run(),
        Task::Tidy => tidy::run(),
        Task::GpuBundle => gpu_bundle::run(),
        Task::Kernels(args) => kernels::run(&args),
        Task::Peers(args) => peers::run(&args),
        Task::Removals(args) => removals::run(&args),
    }
}
