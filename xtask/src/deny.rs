//! `cargo xtask deny`: licences and sources of all dependencies, by a pinned program and `deny.toml`.

use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;
use crate::kernels::toolchain;

/// Checks every dependency in the lock file. Advisories are not checked: their list comes from a
/// repository that changes every day, so the same tree would pass on one day and fail on the next.
pub(crate) fn run() -> anyhow::Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        println!("left out: the pinned checker exists for Linux on x86_64 only");
        return Ok(());
    }
    let program = toolchain::cargo_deny(&cargo::target_folder().join("toolchain"))?;
    let status = Command::new(&program)
        .args(["--locked", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"])
        .current_dir(cargo::workspace_root())
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("a dependency violates `deny.toml` ({status})");
    }
    Ok(())
}
