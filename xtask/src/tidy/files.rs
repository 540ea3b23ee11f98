//! The files of the tree: those that Git tracks, or without Git, those that it would track.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

/// Path from the root, and content; `None` for a file that is not UTF-8 text.
pub(crate) struct Files(BTreeMap<String, Option<String>>);

impl Files {
    /// Reads the tree under `root`.
    ///
    /// Skips a path that Git tracks but that does not exist: its deletion is not committed yet.
    pub(crate) fn read(root: &Path) -> anyhow::Result<Self> {
        let paths = match tracked(root) {
            Some(paths) => paths,
            None => walk(root)?,
        };
        let mut files = BTreeMap::new();
        for path in paths {
            let full = root.join(&path);
            if !full.is_file() {
                continue;
            }
            let bytes = std::fs::read(&full).with_context(|| format!("cannot read {path}"))?;
            files.insert(path, String::from_utf8(bytes).ok());
        }
        Ok(Self(files))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether `path` is a file, or a folder with one.
    pub(crate) fn contains(&self, path: &str) -> bool {
        let folder = format!("{path}/");
        self.0.contains_key(path) || self.paths().any(|other| other.starts_with(&folder))
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.0.get(path)?.as_deref()
    }

    /// Every text file with its path, in order of path.
    pub(crate) fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|(path, text)| Some((path.as_str(), text.as_deref()?)))
    }

    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        Self(files.iter().map(|&(path, text)| (path.to_owned(), Some(text.to_owned()))).collect())
    }
}

/// The files that Git tracks; `None` without Git, or if the tree is not a checkout.
fn tracked(root: &Path) -> Option<Vec<String>> {
    // A checkout owned by another user, as in a container, may be read too.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .current_dir(root)
        .output()
        .ok()?;
    if !output.status.success() {
        return None;
    }
    let listing = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> =
        listing.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    (!paths.is_empty()).then_some(paths)
}

/// Every file under `root`, except `.git` and folders that a line `/name` of `.gitignore` excludes.
fn walk(root: &Path) -> anyhow::Result<Vec<String>> {
    let ignored = std::fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let ignored: Vec<&str> = ignored.lines().filter_map(|line| line.strip_prefix('/')).collect();
    let mut paths = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if path == ".git" || ignored.contains(&path.as_str()) {
                continue;
            }
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else {
                paths.push(path);
            }
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_contained_where_it_has_a_file() {
        let files = Files::of(&[("docs/a.md", ""), ("docsy", "")]);
        for (path, contained) in
            [("docs", true), ("docs/a.md", true), ("docsy", true), ("doc", false), ("docs/", false)]
        {
            assert_eq!(files.contains(path), contained, "{path}");
        }
    }

    #[test]
    fn without_git_the_tree_is_walked_less_what_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            (".gitignore", "/target\n"),
            ("a/b/c.rs", "//! C.\n"),
            ("target/x", ""),
            (".git/y", ""),
        ] {
            let full = root.path().join(path);
            std::fs::create_dir_all(full.parent().unwrap()).unwrap();
            std::fs::write(full, text).unwrap();
        }
        std::fs::write(root.path().join("picture"), [0xFF, 0xFE]).unwrap();
        let mut paths = walk(root.path()).unwrap();
        paths.sort();
        assert_eq!(paths, [".gitignore", "a/b/c.rs", "picture"]);
        let files = Files::read(root.path()).unwrap();
        assert_eq!(files.text("a/b/c.rs"), Some("//! C.\n"));
        assert_eq!(files.text("picture"), None);
    }
}
