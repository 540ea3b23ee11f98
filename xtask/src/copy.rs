//! A copy of the tree, which may be changed and built.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cargo;
use crate::tidy::Files;

/// A copy of the tree with its own target folder.
pub(crate) struct Copy {
    root: PathBuf,
}

impl Copy {
    /// Updates the copy from the tree. Equal files keep their modification time, so that little is
    /// rebuilt.
    ///
    /// The copy is in `folder` below the target folder.
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

    /// The folder of its build output.
    pub(crate) fn target(&self) -> PathBuf {
        self.root.with_file_name("build")
    }

    /// Writes `text` to a file, unless the file already has this content.
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

    /// Removes files that the tree no longer has, and folders that are empty without them: Cargo takes a folder for a
    /// member of the workspace.
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
        if fs::read_dir(folder)?.next().is_none() {
            fs::remove_dir(folder)?;
        }
        Ok(())
    }
}
