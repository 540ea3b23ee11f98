//! `cargo xtask chat`: the engine of `examples/chat`, with the weights of a small model.
//!
//! The example is a workspace of its own, so that candle stays out of the dependencies of the crates.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;
use crate::kernels::toolchain;

const MANIFEST: &str = "examples/chat/Cargo.toml";

/// Threads of the dense layers by default on a machine of few cores: candle's threads spin while they wait, which costs more
/// than they save where cores are few or shared.
const FEW_CORES: usize = 4;

/// Options of `cargo xtask chat`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Options of the program, which are named where one is not understood. Without `--model`, SmolLM2-135M is fetched.
    /// `--check` alone runs what continuous integration runs.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<OsString>,
}

/// The weights could not be had, so that nothing was run.
#[derive(Debug)]
pub(crate) struct NotRun(String);

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not run: {}", self.0)
    }
}

impl std::error::Error for NotRun {}

/// Builds the program and runs it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.rest.iter().eq(["--check"]) {
        return check();
    }
    let names_model = args.rest.iter().any(|argument| argument == "--model");
    let model = if names_model { None } else { Some(weights()?) };
    let mut command = Command::new(build(proves(&args.rest))?);
    if let Some(model) = model {
        command.arg("--model").arg(model);
    }
    command.args(&args.rest);
    succeed(threaded(&mut command), "the chat")
}

/// What continuous integration runs: the example's format and tests, a script, and the proof in its short form.
pub(crate) fn check() -> anyhow::Result<()> {
    // Where tests are to run, weights that cannot be had are a failure.
    let model = match weights() {
        Err(error) if std::env::var_os("CI").is_none() => bail!(NotRun(format!("{error:#}"))),
        model => model?,
    };
    let mut format = cargo::command();
    format.args(["fmt", "--check", "--manifest-path", MANIFEST]);
    succeed(&mut format, "`cargo fmt --check` of examples/chat")?;
    succeed(in_example("test").arg("--features").arg("sabotage"), "a test of examples/chat")?;
    let program = build(true)?;
    let run = |rest: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("--model").arg(&model).args(rest).current_dir(cargo::workspace_root());
        succeed(threaded(&mut command), &format!("chat {}", rest.join(" ")))
    };
    run(&["--script", "examples/chat/conversations.txt", "--tokens", "16"])?;
    run(&["--prove", "short"])
}

/// The weights of SmolLM2-135M.
fn weights() -> anyhow::Result<PathBuf> {
    toolchain::smollm2(&cargo::target_folder().join("toolchain"))
}

/// The proof breaks protections on purpose, which takes a build that can.
fn proves(rest: &[OsString]) -> bool {
    rest.iter().any(|argument| argument == "--prove")
}

/// Builds the program if anything has changed, and returns its path.
fn build(proves: bool) -> anyhow::Result<PathBuf> {
    let mut command = in_example("build");
    if proves {
        command.args(["--features", "sabotage"]);
    }
    succeed(&mut command, "`cargo build --release` of examples/chat")?;
    Ok(target_folder().join("release").join("chat"))
}

fn in_example(subcommand: &str) -> Command {
    let mut command = cargo::command();
    command
        .args([subcommand, "--release", "--quiet", "--locked", "--manifest-path", MANIFEST])
        .arg("--target-dir")
        .arg(target_folder());
    if has_wide_vectors() {
        // Rust contracts no operations, so results are the same bits with and without.
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        command.env("RUSTFLAGS", format!("{flags} -Ctarget-cpu=x86-64-v3"));
    }
    command
}

fn target_folder() -> PathBuf {
    cargo::target_folder().join("chat")
}

/// Whether this machine has what `x86-64-v3` stands for.
fn has_wide_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let has = std::arch::is_x86_feature_detected!("avx2");
        has && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("bmi2")
            && std::arch::is_x86_feature_detected!("f16c")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Says how many threads candle takes, unless that was said.
fn threaded(command: &mut Command) -> &mut Command {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for name in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
        if cores <= FEW_CORES && std::env::var_os(name).is_none() {
            command.env(name, "1");
        }
    }
    command
}

fn succeed(command: &mut Command, what: &str) -> anyhow::Result<()> {
    let program = Path::new(command.get_program()).display().to_string();
    let status = command.stdin(Stdio::inherit()).status();
    let status = status.with_context(|| format!("cannot start {program}"))?;
    if !status.success() {
        bail!("{what} failed ({status})");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_no_dependency_of_the_workspace() {
        let lock = std::fs::read_to_string(cargo::workspace_root().join("Cargo.lock")).unwrap();
        assert!(!lock.contains("candle-core"));
        let own = cargo::workspace_root().join("examples/chat/Cargo.lock");
        let lock = std::fs::read_to_string(own).unwrap();
        assert!(lock.contains("name = \"candle-core\"\nversion = \"0.11.1\"\n"));
    }

    #[test]
    fn only_the_proof_is_built_with_its_switches() {
        let args = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(proves(&args("--device sim --prove short")));
        assert!(!proves(&args("--script file")));
    }
}
