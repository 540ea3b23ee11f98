//! `cargo xtask spelling`: finds misspelt words in all committed files, with a pinned program.

use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;
use crate::kernels::toolchain;

/// Checks every file that `_typos.toml` does not exclude.
pub(crate) fn run() -> anyhow::Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        println!("left out: the pinned checker exists for Linux on x86_64 only");
        return Ok(());
    }
    let program = toolchain::typos(&cargo::target_folder().join("toolchain"))?;
    let status = Command::new(&program)
        .args(["--format", "brief"])
        .current_dir(cargo::workspace_root())
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("words are misspelt, or are missing in `_typos.toml` ({status})");
    }
    Ok(())
}
