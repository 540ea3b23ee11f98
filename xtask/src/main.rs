//! Tasks of the workspace: `cargo xtask <task>`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program reports here"
)]

mod api;
mod bench;
mod campaigns;
mod cargo;
mod chat;
mod copy;
mod deny;
mod figures;
mod gpu_bundle;
mod kernels;
mod minimal;
mod nightly;
mod outside;
mod paces;
mod peers;
mod removals;
mod services;
mod spelling;
mod steps;
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
    /// Runs the checks and tests that every change must pass, as continuous integration does.
    Test,
    /// Runs every check that takes longer than a change can wait for.
    Nightly(nightly::Args),
    /// Runs random programs, schedules, faults and kills at length.
    Campaign(campaigns::Args),
    /// Runs the tests with the simulated device at each pace.
    Paces(paces::Args),
    /// Runs every benchmark that needs no GPU.
    Bench,
    /// Compares the public API of each published crate with what is recorded of it.
    Api(api::Args),
    /// Runs projects outside the workspace that depend on one of its crates.
    Outside,
    /// Runs NVIDIA Dynamo's router over instances of the cache; see `examples/router`.
    Router(outside::RouterArgs),
    /// Looks for misspelt words.
    Spelling,
    /// Checks licences and sources of all dependencies.
    Deny,
    /// Checks with the oldest dependencies that the manifests allow.
    Minimal,
    /// Counts lines, types and dependencies of each crate.
    Figures(figures::Args),
    /// Checks rules of the tree that the compiler does not check.
    Tidy,
    /// Packs GPU tests, GPU benchmarks and `kv-replay` for a machine with a GPU.
    GpuBundle,
    /// Builds the PTX of every kernel with the pinned compiler, or checks what is committed.
    Kernels(kernels::Args),
    /// Chats with a small model, whose engine is built on `kv-plane`.
    Chat(chat::Args),
    /// Runs kv-pool beside kvbm-logical on the same operations.
    Peers(peers::Args),
    /// Takes protections out one at a time, and sees that a test fails without each.
    Removals(removals::Args),
}

fn main() -> ExitCode {
    if let Some(code) = api::as_rustdoc() {
        return code;
    }
    // A returned error would print a backtrace, which does not help here.
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
        Task::Test => test::run(),
        Task::Nightly(args) => nightly::run(&args),
        Task::Campaign(args) => campaigns::run(&args),
        Task::Paces(args) => paces::run(&args),
        Task::Bench => bench::run(),
        Task::Api(args) => api::run(&args),
        Task::Outside => outside::run(),
        Task::Router(args) => outside::route(&args),
        Task::Spelling => spelling::run(),
        Task::Deny => deny::run(),
        Task::Minimal => minimal::run(),
        Task::Figures(args) => figures::run(&args),
        Task::Tidy => tidy::run(),
        Task::GpuBundle => gpu_bundle::run(),
        Task::Kernels(args) => kernels::run(&args),
        Task::Chat(args) => chat::run(&args),
        Task::Peers(args) => peers::run(&args),
        Task::Removals(args) => removals::run(&args),
    }
}
