//! `cargo xtask outside`: projects beside the workspace, as somebody else would write them.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;

/// The project that depends on `cuda-sim` alone, and races unless it is told to wait.
const RACE: &str = "tests/outside/race";

/// Where outside projects are built, below the workspace's root.
const TARGET: &str = "target/outside";

/// Sees that the race is reported, with what would mend it, and that nothing is when it is mended.
pub(crate) fn run() -> anyhow::Result<()> {
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

/// What the project prints.
fn output(args: &[&str]) -> anyhow::Result<String> {
    let root = cargo::workspace_root();
    let project: PathBuf = root.join(RACE);
    // The versions that the workspace is tested with; what is downloaded is then here already.
    std::fs::copy(root.join("Cargo.lock"), project.join("Cargo.lock"))
        .with_context(|| format!("cannot write the lock file of {RACE}"))?;
    let mut command = Command::new(cargo::program());
    command.args(["run", "--quiet", "--target-dir"]).arg(root.join(TARGET)).arg("--");
    command.args(args).current_dir(&project).env_remove("CUDA_SIM_RACES");
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
