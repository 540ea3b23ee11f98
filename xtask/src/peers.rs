//! `cargo xtask peers`: compares kv-pool with another block manager.
//!
//! The benchmark is a separate workspace in `bench/peers`, so that the peer's dependencies stay out
//! of ours.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};

use crate::cargo;

/// Options of `cargo xtask peers`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only builds, and prints the path of the program, so that it can be copied to another
    /// machine.
    #[arg(long)]
    no_run: bool,
    /// Arguments for the program; `--help` after `--` lists them.
    #[arg(last = true)]
    rest: Vec<OsString>,
}

/// Builds the program and runs it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let program = build()?;
    if args.no_run {
        println!("{}", program.display());
        return Ok(());
    }
    let status = Command::new(&program)
        .args(&args.rest)
        .status()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("{} failed ({status})", program.display());
    }
    Ok(())
}

/// Builds the program if anything has changed, and returns its path. The lock file is committed;
/// only new dependencies of our own crates are added to it.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    let target = target_folder();
    let status = cargo::command()
        .args(["build", "--release", "--manifest-path", "bench/peers/Cargo.toml"])
        .arg("--target-dir")
        .arg(&target)
        .status()
        .context("cannot start Cargo")?;
    if !status.success() {
        bail!("`cargo build --release` of bench/peers failed ({status})");
    }
    Ok(program_in(target))
}

/// The path of the program, if it was built before.
pub(crate) fn built() -> Option<PathBuf> {
    Some(program_in(target_folder())).filter(|program| program.exists())
}

fn target_folder() -> PathBuf {
    crate::cargo::target_folder().join("peers")
}

fn program_in(target: PathBuf) -> PathBuf {
    target.join("release").join("peers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_is_no_dependency_of_the_workspace() {
        let lock = std::fs::read_to_string(cargo::workspace_root().join("Cargo.lock")).unwrap();
        assert!(!lock.contains("kvbm-logical"));
        let lock = std::fs::read_to_string(cargo::workspace_root().join("bench/peers/Cargo.lock"))
            .unwrap();
        assert!(lock.contains("name = \"kvbm-logical\"\nversion = \"1.6.1\"\n"));
    }
}
