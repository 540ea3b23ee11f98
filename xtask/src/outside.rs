//! `cargo xtask outside`: projects outside the workspace, as users would write them.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;

/// The project that depends on `cuda-sim` alone, and races unless it is told to wait.
const RACE: &str = "tests/outside/race";

/// Applications that have chosen cudarc's version, bindings and linking, and use our crates beside.
const ADOPTING: [&str; 7] =
    ["default", "cuda-12000", "cuda-12060", "cuda-13000", "cuda-13040", "kvbm", "candle"];

/// The bindings of `candle`, which has cudarc ask nvcc otherwise; the others name theirs as a feature.
const CANDLE_VERSION: (&str, &str) = ("CUDARC_CUDA_VERSION", "12060");

/// Where outside projects are built, below the target folder.
const TARGET: &str = "outside";

/// Checks that applications with a cudarc of their own compile, that the race is reported with its
/// missing order, and that the program with that order has no report.
pub(crate) fn run() -> anyhow::Result<()> {
    for name in ADOPTING {
        check(name)?;
    }
    let racing = output(&[])?;
    let reported =
        ["race (H23)", "src/main.rs:11", "src/main.rs:17", "missing: an event recorded on stream"];
    for text in reported {
        if !racing.contains(text) {
            bail!("the report of the race has no {text:?}:\n{racing}");
        }
    }
    let mended = output(&["--mended"])?;
    if !mended.is_empty() {
        bail!("a program that waits is said to race:\n{mended}");
    }
    Ok(())
}

/// Type-checks an application; nothing is linked, so no toolkit is needed.
fn check(name: &str) -> anyhow::Result<()> {
    let mut command = in_project(&format!("tests/outside/{name}"), "check")?;
    command.env_remove(CANDLE_VERSION.0);
    if name == "candle" {
        command.env(CANDLE_VERSION.0, CANDLE_VERSION.1);
    }
    let status = command.stdin(Stdio::null()).status().context("cannot start Cargo")?;
    if !status.success() {
        bail!("tests/outside/{name} does not compile ({status})");
    }
    Ok(())
}

/// What the project that races prints.
fn output(args: &[&str]) -> anyhow::Result<String> {
    let mut command = in_project(RACE, "run")?;
    command.arg("--").args(args).env_remove("CUDA_SIM_RACES");
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start Cargo")?;
    if !output.status.success() {
        bail!("{RACE} failed ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Cargo's `subcommand` for the project, with the target folder that all of them share.
fn in_project(path: &str, subcommand: &str) -> anyhow::Result<Command> {
    let root = cargo::workspace_root();
    let project: PathBuf = root.join(path);
    // The versions that the workspace is tested with; what is downloaded is then here already.
    std::fs::copy(root.join("Cargo.lock"), project.join("Cargo.lock"))
        .with_context(|| format!("cannot write the lock file of {path}"))?;
    let mut command = Command::new(cargo::program());
    command.args([subcommand, "--quiet", "--target-dir"]).arg(cargo::target_folder().join(TARGET));
    command.current_dir(&project);
    Ok(command)
}
