//! Tasks of the workspace: `cargo xtask <task>`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program reports here"
)]

mod kernels;

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
    /// Builds the PTX of every kernel with the pinned compiler, or checks what is committed.
    Kernels(kernels::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().task {
        Task::Kernels(args) => kernels::run(&args),
    }
}
