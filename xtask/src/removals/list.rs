//! The lists of removals, and the names in the sources.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::tidy::Files;

/// A protection, and the tests that must fail without it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Removal {
    /// The crate of the tests.
    pub(crate) package: String,
    /// The name that `guard!` gives it.
    pub(crate) name: String,
    /// The test program: the name of an integration test, `lib` or `bin`.
    pub(crate) program: String,
    /// Full names of the tests, each of which notices it alone.
    pub(crate) tests: Vec<String>,
}

impl fmt::Display for Removal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.package)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Tests {
    One(String),
    Several(Vec<String>),
}

/// All removals of the tree, by crate and program.
pub(crate) fn read(files: &Files) -> anyhow::Result<Vec<Removal>> {
    let mut removals = Vec::new();
    for (path, text) in files.texts() {
        let package = path
            .strip_prefix("crates/")
            .and_then(|rest| rest.strip_suffix("/tests/removals.toml"))
            .filter(|name| !name.contains('/'));
        let Some(package) = package else { continue };
        let programs: BTreeMap<String, BTreeMap<String, Tests>> =
            toml::from_str(text).with_context(|| path.to_owned())?;
        for (program, entries) in programs {
            for (name, tests) in entries {
                let tests = match tests {
                    Tests::One(test) => vec![test],
                    Tests::Several(tests) => tests,
                };
                ensure!(!tests.is_empty(), "{path}: {name} names no test");
                let (package, program) = (package.to_owned(), program.clone());
                removals.push(Removal { package, name, program, tests });
            }
        }
    }
    Ok(removals)
}

/// The names in the sources of the crates, each with its file and line.
pub(crate) fn guards(files: &Files) -> Vec<(String, &str, usize)> {
    let mut found = Vec::new();
    for (path, text) in files.texts() {
        let is_source =
            path.starts_with("crates/") && path.contains("/src/") && path.ends_with(".rs");
        if !is_source {
            continue;
        }
        for (at, _) in text.match_indices("guard!(") {
            let before = &text[..at];
            let is_comment = before.rsplit('\n').next().is_some_and(|line| line.contains("//"));
            let name = text[at..]
                .split_once('(')
                .and_then(|(_, rest)| rest.trim_start().strip_prefix('"')?.split('"').next());
            if let Some(name) = name.filter(|_| !is_comment) {
                found.push((name.to_owned(), path, before.matches('\n').count() + 1));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_the_tests_of_each_program() {
        let list = "[it]\n\"pool.a\" = \"x::one\"\n\"pool.b\" = [\"y::two\", \"three\"]\n[lib]\n\"pool.c\" = \"z\"\n";
        let files = Files::of(&[
            ("crates/kv-pool/tests/removals.toml", list),
            ("crates/kv-pool/tests/it/removals.toml", "no list"),
        ]);
        let removal = |name: &str, program: &str, tests: &[&str]| Removal {
            package: "kv-pool".to_owned(),
            name: name.to_owned(),
            program: program.to_owned(),
            tests: tests.iter().map(|&test| test.to_owned()).collect(),
        };
        let expected = [
            removal("pool.a", "it", &["x::one"]),
            removal("pool.b", "it", &["y::two", "three"]),
            removal("pool.c", "lib", &["z"]),
        ];
        assert_eq!(read(&files).unwrap(), expected);
        let empty = Files::of(&[("crates/a/tests/removals.toml", "[it]\n\"a.b\" = []\n")]);
        let error = read(&empty).unwrap_err().to_string();
        assert_eq!(error, "crates/a/tests/removals.toml: a.b names no test");
    }

    #[test]
    fn names_are_found_in_sources_but_not_in_comments() {
        let text = "//! `guard!(\"no\", x)`\nfn f() {\n    guard!(\"a.b\", g());\n    if guard!(\n        \"c.d\", h()) {}\n}\n";
        let files = Files::of(&[("crates/a/src/x.rs", text), ("crates/a/tests/x.rs", text)]);
        let expected = [
            ("a.b".to_owned(), "crates/a/src/x.rs", 3),
            ("c.d".to_owned(), "crates/a/src/x.rs", 4),
        ];
        assert_eq!(guards(&files), expected);
    }
}
