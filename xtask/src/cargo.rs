//! The workspace as Cargo sees it: its folder, and its crates and targets.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::services;

/// A crate of the workspace.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct Package {
    /// Its name, as `-p` takes it.
    pub(crate) name: String,
    /// The targets that Cargo builds.
    pub(crate) targets: Vec<Target>,
    /// An empty list for a crate that is never published.
    pub(crate) publish: Option<Vec<String>>,
    /// Features, with what each turns on.
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
    /// The crates that it depends on, including those of its tests.
    #[serde(default)]
    pub(crate) dependencies: Vec<Dependency>,
}

/// A dependency of a crate.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct Dependency {
    name: String,
}

/// A library, program, test or benchmark.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct Target {
    /// Its name, as `--test` or `--bench` takes it.
    pub(crate) name: String,
    /// One of `lib`, `bin`, `test`, `bench`, …
    pub(crate) kind: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

impl Package {
    /// Names of the targets of `kind`.
    pub(crate) fn targets_of(&self, kind: &str) -> impl Iterator<Item = &str> {
        self.targets
            .iter()
            .filter(move |target| target.kind.iter().any(|other| other == kind))
            .map(|target| target.name.as_str())
    }

    /// Whether it or its tests depend on the crate `name`.
    pub(crate) fn uses(&self, name: &str) -> bool {
        self.dependencies.iter().any(|dependency| dependency.name == name)
    }

    /// Whether other crates can depend on it: it has a library and may be published.
    pub(crate) fn is_published_library(&self) -> bool {
        self.publish.is_none() && self.targets_of("lib").next().is_some()
    }
}

/// The folder of the workspace's manifest.
pub(crate) fn workspace_root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// The folder for build output: `CARGO_TARGET_DIR`, relative to the workspace's root, or `target`
/// there.
pub(crate) fn target_folder() -> PathBuf {
    target_folder_of(&workspace_root())
}

/// The same folder for the workspace at `root`.
pub(crate) fn target_folder_of(root: &Path) -> PathBuf {
    root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The Cargo that runs this program, so that a toolchain chosen on the command line stays chosen.
pub(crate) fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// That Cargo, started at the workspace's root.
pub(crate) fn command() -> Command {
    command_in(&workspace_root())
}

/// That Cargo, started in `root`.
pub(crate) fn command_in(root: &Path) -> Command {
    let mut command = Command::new(program());
    command.current_dir(root).envs(services::variables());
    command
}

/// The path of this program, so that another program can start it.
pub(crate) fn own_program() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe().context("cannot tell where this program lies")?;
    // A step that built the workspace may have replaced the file. Linux then marks the path of the
    // old one.
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or_else(|| path.clone(), PathBuf::from))
}

/// Whether nextest, which is installed separately, can run the tests.
pub(crate) fn has_nextest() -> bool {
    Command::new(program())
        .args(["nextest", "--version"])
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success())
}

/// The crates of the workspace, by name.
pub(crate) fn packages() -> anyhow::Result<Vec<Package>> {
    packages_of(&workspace_root())
}

/// The crates of the workspace at `root`, by name.
pub(crate) fn packages_of(root: &Path) -> anyhow::Result<Vec<Package>> {
    let output = command_in(root)
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .output()
        .context("cannot start `cargo metadata`")?;
    if !output.status.success() {
        bail!("`cargo metadata` failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("cannot read `cargo metadata`")?;
    let mut packages = metadata.packages;
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_found_and_read() {
        assert!(workspace_root().join("Cargo.lock").exists());
        let packages = packages().unwrap();
        let own = packages.iter().find(|package| package.name == "xtask").unwrap();
        assert_eq!(own.targets_of("bin").collect::<Vec<_>>(), ["xtask"]);
        assert!(!own.is_published_library());
        let driver = packages.iter().find(|package| package.name == "cuda-driver").unwrap();
        assert!(driver.is_published_library());
    }
}
