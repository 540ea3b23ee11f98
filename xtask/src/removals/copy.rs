//! A copy of the tree, to be changed and built without harm.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cargo;
use crate::tidy::Files;

/// A copy of the tree with a target folder of its own.
pub(crate) struct Copy {
    root: PathBuf,
}

impl Copy {
    /// Brings the copy to what the tree is: files that are alike keep their time, so that little is built again.
    ///
    /// It lies in `folder` below the target folder.
    pub(crate) fn of(files: &Files, folder: &str) -> anyhow::Result<Self> {
        let copy = Self { root: cargo::target_folder().join(folder).join("tree") };
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
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that Cargo builds it in.
    pub(crate) fn target(&self) -> PathBuf {
        self.root.with_file_name("build")
    }

    /// Writes `text` to a file, unless that is what it holds.
    pub(crate) fn write(&self, path: &str, text: &str) -> anyhow::Result<()> {
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
