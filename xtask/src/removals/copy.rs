//! The copy of the tree that protections are taken out of.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cargo;
use crate::tidy::Files;

/// Where the copy lies, below the workspace's root.
const FOLDER: &str = "target/removals";

/// A copy of the tree with a target folder of its own.
pub(super) struct Copy {
    root: PathBuf,
}

impl Copy {
    /// Brings the copy to what the tree is: files that are alike keep their time, so that little is built again.
    pub(super) fn of(files: &Files) -> anyhow::Result<Self> {
        let copy = Self { root: cargo::workspace_root().join(FOLDER).join("tree") };
        for path in files.paths() {
            match files.text(path) {
                Some(text) => copy.write(path, text)?,
                None => copy.write_bytes(path, &fs::read(cargo::workspace_root().join(path))?)?,
            }
        }
        copy.remove_others(&copy.root, files)?;
        Ok(copy)
    }

    /// The folder of its manifest.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that Cargo builds it in.
    pub(super) fn target(&self) -> PathBuf {
        self.root.with_file_name("build")
    }

    /// Writes `text` to a file, unless that is what it holds.
    pub(super) fn write(&self, path: &str, text: &str) -> anyhow::Result<()> {
        self.write_bytes(path, text.as_bytes())
    }

    fn write_bytes(&self, path: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let full = self.root.join(path);
        if fs::read(&full).is_ok_and(|found| found == bytes) {
            return Ok(());
        }
        if let Some(folder) = full.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        fs::write(&full, bytes).with_context(|| format!("cannot write {}", full.display()))
    }

    /// Removes what an earlier tree had and this one has not.
    fn remove_others(&self, folder: &Path, files: &Files) -> anyhow::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                self.remove_others(&path, files)?;
                continue;
            }
            let below = path.strip_prefix(&self.root).unwrap_or(&path);
            if below.to_str().is_none_or(|name| !files.contains(name)) {
                fs::remove_file(&path)
                    .with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }
}
