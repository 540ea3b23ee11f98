//! `cargo xtask minimal`: checks the oldest versions that the manifests allow, and the compiler
//! version that they state.
//!
//! It works on a copy of the tree below the target folder, so the lock file does not change.

use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::cargo;
use crate::copy::Copy;
use crate::tidy::Files;

/// Checks all libraries and programs with the oldest direct dependencies that the manifests allow.
pub(crate) fn run() -> anyhow::Result<()> {
    let files = Files::read(&cargo::workspace_root())?;
    say_compiler(files.text("Cargo.toml").unwrap_or_default())?;
    let copy = Copy::of(&files, "minimal")?;
    // Choosing minimal versions is not stable yet, hence the variable. The build itself runs
    // without it.
    cargo_in(&copy, &["update", "-Z", "direct-minimal-versions"], Some("1"))?;
    cargo_in(
        &copy,
        &["check", "--workspace", "--lib", "--bins", "--all-features", "--locked"],
        None,
    )
}

/// Prints whether this run also checks the stated compiler version.
fn say_compiler(manifest: &str) -> anyhow::Result<()> {
    let stated = stated(manifest).context("the workspace's manifest states no `rust-version`")?;
    let output = Command::new(cargo::program())
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .context("cannot start Cargo")?;
    let version = String::from_utf8_lossy(&output.stdout);
    let version = version.split_whitespace().nth(1).unwrap_or_default();
    if is_of(version, stated) {
        println!("by Cargo {version}: the stated version, {stated}, is checked too");
    } else {
        println!("by Cargo {version}: the stated version, {stated}, is not checked");
    }
    Ok(())
}

fn stated(manifest: &str) -> Option<&str> {
    let line = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \""))?;
    line.strip_suffix('"')
}

/// Whether `version` is `stated` or a patch release of it.
fn is_of(version: &str, stated: &str) -> bool {
    version.strip_prefix(stated).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn cargo_in(copy: &Copy, args: &[&str], unstable: Option<&str>) -> anyhow::Result<()> {
    let mut command = Command::new(cargo::program());
    command.args(args).current_dir(copy.root()).env("CARGO_TARGET_DIR", copy.target());
    command.env_remove("RUSTC_BOOTSTRAP").stdin(Stdio::null());
    if let Some(value) = unstable {
        command.env("RUSTC_BOOTSTRAP", value);
    }
    let status = command.status().context("cannot start Cargo")?;
    if !status.success() {
        bail!("`cargo {}` of the oldest versions failed ({status})", args.join(" "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stated_version_covers_its_patches_only() {
        let manifest = "[workspace.package]\nedition = \"2024\"\nrust-version = \"1.95\"\n";
        assert_eq!(stated(manifest), Some("1.95"));
        assert_eq!(stated("[package]\n"), None);
        for (version, expected) in
            [("1.95.0", true), ("1.95", true), ("1.950.0", false), ("1.96.0", false)]
        {
            assert_eq!(is_of(version, "1.95"), expected, "{version}");
        }
    }
}
