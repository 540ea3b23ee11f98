//! `cargo xtask api`: the public API of each published crate, compared with a file next to its
//! manifest.
//!
//! A change of the surface is then a change of a file, visible in review. Names and kinds are
//! compared, signatures are not: a changed signature breaks the build of its callers.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::cargo::{self, Package};

/// The recorded file of a crate, beside its manifest.
const FILE: &str = "public-api.txt";

/// The version of rustdoc's JSON format.
const FORMAT: u64 = 57;

/// The variable with the path of the real rustdoc, set when Cargo runs this program instead of
/// rustdoc.
const IN_PLACE_OF: &str = "XTASK_RUSTDOC";

/// Options of `cargo xtask api`.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Args {
    /// Write the files instead of comparing with them.
    #[arg(long)]
    write: bool,
}

impl Args {
    /// Compares, and writes nothing.
    pub(crate) const CHECK: Self = Self { write: false };
}

/// Compares the public API of every published crate with its file, or writes the files.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut differing = Vec::new();
    let (mut root, mut all) = (0, 0);
    // The library of a program is for the program alone.
    let is_recorded = |package: &&Package| {
        package.is_published_library() && package.targets_of("bin").next().is_none()
    };
    for package in cargo::packages()?.iter().filter(is_recorded) {
        let surface = Surface::of(&cargo::workspace_root(), package)?;
        println!(
            "{:>14}: {:>3} at the root, {:>4} in all",
            package.name,
            surface.root,
            surface.items.len()
        );
        root += surface.root;
        all += surface.items.len();
        let path = cargo::workspace_root().join("crates").join(&package.name).join(FILE);
        if args.write {
            fs::write(&path, surface.text())
                .with_context(|| format!("cannot write {}", path.display()))?;
        } else {
            let recorded = fs::read_to_string(&path).unwrap_or_default();
            differing.extend(
                surface.differences(&recorded).map(|line| format!("{}: {line}", package.name)),
            );
        }
    }
    println!("{:>14}: {root:>3} at the root, {all:>4} in all", "all");
    if !differing.is_empty() {
        bail!(
            "the public API is not what is recorded; `cargo xtask api --write` records it\n{}",
            differing.join("\n")
        );
    }
    Ok(())
}

/// The public names of a crate, each item at its shortest path alone: what a prelude, or another module,
/// re-exports is no further name.
#[derive(Debug, Default)]
pub(crate) struct Surface {
    /// Kind and path of each item, function and constant; no variants.
    pub(crate) items: BTreeSet<String>,
    /// Number of names at the root.
    pub(crate) root: usize,
    /// The items that have a path.
    seen: BTreeSet<String>,
    /// Modules whose names are still to be added.
    modules: VecDeque<Module>,
}

/// A module of a crate.
#[derive(Debug)]
struct Module {
    id: String,
    /// What goes before its names.
    path: String,
    depth: usize,
}

impl Surface {
    /// The surface of a crate of the workspace at `root`.
    pub(crate) fn of(root: &Path, package: &Package) -> anyhow::Result<Self> {
        let document = document(root, package)?;
        let crate_id = id(&document["root"]).context("rustdoc names no root")?;
        Ok(Self::from_root(&Index { items: &document["index"] }, crate_id))
    }

    fn from_root(index: &Index<'_>, crate_id: String) -> Self {
        /// Modules may re-export each other.
        const DEPTH_MAX: usize = 8;
        let mut surface = Self::default();
        surface.modules.push_back(Module { id: crate_id, path: String::new(), depth: 0 });
        while let Some(module) = surface.modules.pop_front() {
            if module.depth <= DEPTH_MAX {
                surface.module(index, &module);
            }
        }
        surface
    }

    /// Adds the public names of a module; those of the modules in it come later.
    fn module(&mut self, index: &Index<'_>, module: &Module) {
        let Module { path, depth, .. } = module;
        let children = &index.inner(&module.id, "module")["items"];
        for child in children.as_array().into_iter().flatten().filter_map(id) {
            let item = index.get(&child);
            if item["visibility"] != "public" {
                continue;
            }
            let used = &item["inner"]["use"];
            if used.is_null() {
                let name = item["name"].as_str().unwrap_or_default();
                self.item(index, child, &format!("{path}{name}"), *depth);
            } else if used["is_glob"] == true {
                if let Some(id) = id(&used["id"]) {
                    self.modules.push_back(Module { id, path: path.clone(), depth: depth + 1 });
                }
            } else {
                let name = format!("{path}{}", used["name"].as_str().unwrap_or_default());
                self.item(index, id(&used["id"]).unwrap_or(child), &name, *depth);
            }
        }
    }

    fn item(&mut self, index: &Index<'_>, id: String, path: &str, depth: usize) {
        if !self.seen.insert(id.clone()) {
            return;
        }
        if depth == 0 {
            self.root += 1;
        }
        let inner = &index.get(&id)["inner"];
        let Some((kind, body)) = inner.as_object().and_then(|inner| inner.iter().next()) else {
            // An item of another crate.
            self.items.insert(format!("use {path}"));
            return;
        };
        self.items.insert(format!("{kind} {path}"));
        match kind.as_str() {
            "module" => {
                self.modules.push_back(Module { id, path: format!("{path}::"), depth: depth + 1 });
            }
            "trait" => self.members(index, &body["items"], path, false),
            "struct" | "enum" | "union" => {
                for block in body["impls"].as_array().into_iter().flatten().filter_map(self::id) {
                    let block = index.inner(&block, "impl");
                    if block["trait"].is_null() && !block.is_null() {
                        self.members(index, &block["items"], path, true);
                    }
                }
            }
            _ => {}
        }
    }

    /// Adds functions and constants of a type or trait. Those of a trait are as public as the
    /// trait.
    fn members(&mut self, index: &Index<'_>, members: &Value, path: &str, by_visibility: bool) {
        for member in members.as_array().into_iter().flatten().filter_map(id) {
            let item = index.get(&member);
            if by_visibility && item["visibility"] != "public" {
                continue;
            }
            let kind = item["inner"].as_object().and_then(|inner| inner.keys().next());
            if let (Some(kind), Some(name)) = (kind, item["name"].as_str()) {
                self.items.insert(format!("{kind} {path}::{name}"));
            }
        }
    }

    fn text(&self) -> String {
        self.items.iter().map(|item| format!("{item}\n")).collect()
    }

    /// Lines that are new, and recorded lines that are gone.
    fn differences<'a>(&'a self, recorded: &'a str) -> impl Iterator<Item = String> + 'a {
        let recorded: BTreeSet<&str> = recorded.lines().collect();
        let new = self.items.iter().filter(|item| !recorded.contains(item.as_str()));
        let new: Vec<_> = new.map(|item| format!("+ {item}")).collect();
        let gone: Vec<_> = recorded
            .iter()
            .filter(|item| !self.items.contains(**item))
            .map(|item| format!("- {item}"))
            .collect();
        new.into_iter().chain(gone)
    }
}

/// Items of a crate by their number.
struct Index<'a> {
    items: &'a Value,
}

impl<'a> Index<'a> {
    /// The item, or null.
    fn get(&self, id: &str) -> &'a Value {
        &self.items[id]
    }

    /// The body of an item of a kind, or null.
    fn inner(&self, id: &str, kind: &str) -> &'a Value {
        &self.items[id]["inner"][kind]
    }
}

/// An item's number, as text. The index uses text keys.
fn id(value: &Value) -> Option<String> {
    value.as_u64().map(|number| number.to_string()).or_else(|| value.as_str().map(str::to_owned))
}

/// The feature that takes protections out for tests, which nobody may rely on.
const SABOTAGE: &str = "sabotage";

/// Rustdoc's JSON description of a crate with all its features but [`SABOTAGE`]. The format is not stable yet.
/// A link that leads nowhere is an error.
///
/// Rustdoc needs an environment variable with which Cargo would rebuild all dependencies. So Cargo
/// runs this program instead of rustdoc, and [`as_rustdoc`] sets the variable only for rustdoc.
fn document(root: &Path, package: &Package) -> anyhow::Result<Value> {
    let rustdoc = std::env::var_os("RUSTDOC").unwrap_or_else(|| "rustdoc".into());
    let features: Vec<&str> =
        package.features.keys().map(String::as_str).filter(|name| *name != SABOTAGE).collect();
    let status = cargo::command_in(root)
        .args(["rustdoc", "--quiet", "--lib", "--package", &package.name])
        .args(["--features", &features.join(",")])
        .args(["--", "-Z", "unstable-options", "--output-format", "json", "-D", "warnings"])
        .env("RUSTDOC", cargo::own_program()?)
        .env(IN_PLACE_OF, rustdoc)
        .env_remove("RUSTDOCFLAGS")
        .stdin(Stdio::null())
        .status()
        .context("cannot start Cargo")?;
    if !status.success() {
        bail!("rustdoc of {} failed ({status})", package.name);
    }
    let name = format!("{}.json", package.name.replace('-', "_"));
    let file = cargo::target_folder_of(root).join("doc").join(name);
    let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let document: Value =
        serde_json::from_slice(&text).with_context(|| format!("cannot read {}", file.display()))?;
    match document["format_version"].as_u64() {
        Some(FORMAT) => Ok(document),
        other => bail!("rustdoc writes format {other:?}, and format {FORMAT} is known here"),
    }
}

/// Runs rustdoc, if Cargo has started this program instead of it.
pub(crate) fn as_rustdoc() -> Option<ExitCode> {
    let rustdoc = std::env::var_os(IN_PLACE_OF)?;
    let status = Command::new(rustdoc)
        .args(std::env::args_os().skip(1))
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove(IN_PLACE_OF)
        .status();
    Some(if status.is_ok_and(|status| status.success()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_others_can_name_is_found_and_nothing_else() {
        let index = json!({
            "0": {"name": "a", "visibility": "public", "inner": {"module": {"items": [10, 1, 2, 3, 7]}}},
            "1": {"name": null, "visibility": "public", "inner": {"use": {"name": "T", "id": 4, "is_glob": false}}},
            "2": {"name": "hidden", "visibility": "crate", "inner": {"function": {}}},
            "3": {"name": "m", "visibility": "public", "inner": {"module": {"items": [2, 8]}}},
            "4": {"name": "T", "visibility": "public", "inner": {"struct": {"impls": [5, 9]}}},
            "5": {"name": null, "inner": {"impl": {"trait": null, "items": [6, 2]}}},
            "6": {"name": "new", "visibility": "public", "inner": {"function": {}}},
            "7": {"name": null, "visibility": "public", "inner": {"use": {"name": "Foreign", "id": 99, "is_glob": false}}},
            "8": {"name": "f", "visibility": "public", "inner": {"function": {}}},
            "9": {"name": null, "inner": {"impl": {"trait": {"path": "Clone"}, "items": [8]}}},
            // Names again what is at the root, and two things more.
            "10": {"name": "prelude", "visibility": "public", "inner": {"module": {"items": [1, 7, 11, 12]}}},
            "11": {"name": "own", "visibility": "public", "inner": {"function": {}}},
            "12": {"name": null, "visibility": "public", "inner": {"use": {"name": "Other", "id": 98, "is_glob": false}}},
        });
        let surface = Surface::from_root(&Index { items: &index }, "0".to_owned());
        let found: Vec<_> = surface.items.iter().map(String::as_str).collect();
        assert_eq!(
            found,
            [
                "function T::new",
                "function m::f",
                "function prelude::own",
                "module m",
                "module prelude",
                "struct T",
                "use Foreign",
                "use prelude::Other"
            ]
        );
        assert_eq!(surface.root, 4);
        let differences: Vec<_> = surface.differences("module m\nstruct Gone\n").collect();
        assert_eq!(differences.len(), 8);
        assert!(differences.contains(&"- struct Gone".to_owned()));
        assert!(differences.contains(&"+ struct T".to_owned()));
    }
}
