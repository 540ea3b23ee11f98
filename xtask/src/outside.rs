//! `cargo xtask outside`: projects outside the workspace, as users would write them; and `cargo xtask router`.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;

/// The project that depends only on `cuda-sim`, and races unless it is told to wait.
const RACE: &str = "tests/outside/race";

/// NVIDIA Dynamo's router over instances of the cache, whose events it hears. Its lock file is its own: the workspace
/// has few of its dependencies.
const ROUTER: &str = "examples/router";

/// Its requests in continuous integration: enough for a reset, and for the end of every tier.
const ROUTED: [&str; 2] = ["--requests", "1200"];

/// Applications that choose cudarc's version, bindings and linking, and use our crates too.
const ADOPTING: [&str; 7] =
    ["default", "cuda-12000", "cuda-12060", "cuda-13000", "cuda-13040", "kvbm", "candle"];

/// The bindings version for `candle`, without which cudarc would ask nvcc. The other applications
/// name it as a feature.
const CANDLE_VERSION: (&str, &str) = ("CUDARC_CUDA_VERSION", "12060");

/// The build folder of outside projects, below the target folder.
const TARGET: &str = "outside";

/// Checks that applications with their own cudarc compile, that a router's scores are what the caches find, that the race is reported with the
/// missing order, and that the fixed program gives no report.
pub(crate) fn run() -> anyhow::Result<()> {
    for name in ADOPTING {
        check(name)?;
    }
    println!("{}", output(ROUTER, &ROUTED)?.trim_end());
    let racing = output(RACE, &[])?;
    let reported =
        ["race (H23)", "src/main.rs:11", "src/main.rs:17", "missing: an event recorded on stream"];
    for text in reported {
        if !racing.contains(text) {
            bail!("the report of the race has no {text:?}:\n{racing}");
        }
    }
    let mended = output(RACE, &["--mended"])?;
    if !mended.is_empty() {
        bail!("a program that waits is reported as racing:\n{mended}");
    }
    Ok(())
}

/// Options of `cargo xtask router`.
#[derive(clap::Args)]
pub(crate) struct RouterArgs {
    /// Options of the program, such as `--requests 1000`; `--help` after `--` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs NVIDIA Dynamo's router over instances of the cache.
pub(crate) fn route(args: &RouterArgs) -> anyhow::Result<()> {
    let mut command = in_project(ROUTER, "run")?;
    let status = command.arg("--").args(&args.args).status().context("cannot start Cargo")?;
    if !status.success() {
        bail!("{ROUTER} failed ({status})");
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

/// The output of a project's program.
fn output(project: &str, args: &[&str]) -> anyhow::Result<String> {
    let mut command = in_project(project, "run")?;
    command.arg("--").args(args).env_remove("CUDA_SIM_RACES");
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start Cargo")?;
    if !output.status.success() {
        bail!("{project} failed ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Cargo's `subcommand` for the project, with a target folder shared by all projects.
fn in_project(path: &str, subcommand: &str) -> anyhow::Result<Command> {
    let root = cargo::workspace_root();
    let project: PathBuf = root.join(path);
    let mut command = Command::new(cargo::program());
    command.args([subcommand, "--quiet", "--target-dir"]).arg(cargo::target_folder().join(TARGET));
    if path == ROUTER {
        command.arg("--locked");
    } else {
        // Uses the versions that the workspace is tested with, which are already downloaded.
        std::fs::copy(root.join("Cargo.lock"), project.join("Cargo.lock"))
            .with_context(|| format!("cannot write the lock file of {path}"))?;
    }
    command.current_dir(&project);
    Ok(command)
}
