//! The lists of removals, checked against the code.

use std::fmt;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use crate::tidy::Files;

/// One protection, the text change that removes it, and the tests that must then fail.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Removal {
    /// The crate.
    pub(crate) package: String,
    /// What the protection does.
    pub(crate) what: String,
    /// The defect whose fix it reverts, as named in `docs/DEFECTS.md`.
    pub(crate) defect: Option<DefectId>,
    /// The test binary: the name of an integration test, `lib` or `bin`.
    pub(crate) test: String,
    /// Full names of the tests.
    pub(crate) names: Vec<String>,
    /// The unchanged file.
    pub(crate) text: String,
    /// The file without the protection.
    pub(crate) text_without: String,
    /// The file, relative to the crate's folder.
    file: String,
}

/// The first cell of a row of `docs/DEFECTS.md`: a number, or a letter and a number such as `A1`.
#[derive(Debug, Deserialize, Eq, PartialEq)]
#[serde(untagged)]
pub(crate) enum DefectId {
    Number(u32),
    Name(String),
}

impl fmt::Display for DefectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    removal: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    what: String,
    file: String,
    find: String,
    #[serde(default)]
    replace: String,
    test: String,
    names: Vec<String>,
    defect: Option<DefectId>,
}

impl Removal {
    /// The file, relative to the workspace's root.
    pub(crate) fn path(&self) -> String {
        format!("crates/{}/{}", self.package, self.file)
    }

    fn new(package: &str, entry: Entry, files: &Files) -> anyhow::Result<Self> {
        let Entry { what, file, find, replace, test, names, defect } = entry;
        let path = format!("crates/{package}/{file}");
        let text = files.text(&path).with_context(|| format!("{what}: {path} is not there"))?;
        ensure!(!names.is_empty(), "{what}: names no test");
        ensure!(find != replace, "{what}: replaces text by itself");
        match text.matches(&find).count() {
            1 => {}
            0 => bail!("{what}: the text to remove is not in {path}"),
            times => bail!("{what}: the text to remove is in {path} {times} times"),
        }
        Ok(Self {
            text: text.to_owned(),
            text_without: text.replacen(&find, &replace, 1),
            package: package.to_owned(),
            what,
            defect,
            test,
            names,
            file,
        })
    }
}

impl fmt::Display for Removal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.package, self.what)?;
        match &self.defect {
            Some(defect) => write!(f, " (defect {defect})"),
            None => Ok(()),
        }
    }
}

/// Every removal of the tree, in order of crate.
///
/// # Errors
/// Reports the first removal that does not match the code, with the reason.
pub(crate) fn read(files: &Files) -> anyhow::Result<Vec<Removal>> {
    let mut removals = Vec::new();
    for (path, text) in files.texts() {
        let Some(package) = package_of(path) else { continue };
        let list: List = toml::from_str(text).with_context(|| format!("cannot read {path}"))?;
        for entry in list.removal {
            removals.push(Removal::new(package, entry, files).context(path.to_owned())?);
        }
    }
    Ok(removals)
}

/// The crate of a list: `kv-pool` for `crates/kv-pool/tests/removals.toml`.
fn package_of(path: &str) -> Option<&str> {
    let (package, rest) = path.strip_prefix("crates/")?.split_once('/')?;
    let name = rest.strip_prefix("tests/")?;
    (name.starts_with("removals") && name.ends_with(".toml")).then_some(package)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "crates/a/tests/removals.toml";
    const CODE: (&str, &str) = ("crates/a/src/x.rs", "fn f() {\n    wait();\n    go();\n}\n");

    fn list(find: &str, names: &str) -> String {
        format!(
            "[[removal]]\nwhat = \"f waits\"\nfile = \"src/x.rs\"\nfind = '''\n{find}'''\n\
             test = \"lib\"\nnames = [{names}]\n"
        )
    }

    fn of(list: &str) -> anyhow::Result<Vec<Removal>> {
        read(&Files::of(&[(LIST, list), CODE]))
    }

    #[test]
    fn a_removal_takes_its_text_out() {
        let removals = of(&list("    wait();\n", "\"tests::f\"")).unwrap();
        assert_eq!(removals[0].text_without, "fn f() {\n    go();\n}\n");
        assert_eq!(removals[0].path(), CODE.0);
        assert_eq!(removals[0].to_string(), "a: f waits");
    }

    #[test]
    fn a_removal_that_no_longer_fits_is_refused() {
        for (find, names, why) in [
            ("    gone();\n", "\"tests::f\"", "is not in crates/a/src/x.rs"),
            ("();\n", "\"tests::f\"", "is in crates/a/src/x.rs 2 times"),
            ("    wait();\n", "", "names no test"),
        ] {
            let error = format!("{:#}", of(&list(find, names)).unwrap_err());
            assert!(error.contains(why) && error.contains(LIST), "{error}");
        }
    }

    #[test]
    fn only_lists_below_tests_are_read() {
        assert_eq!(package_of("crates/kv-pool/tests/removals-tiers.toml"), Some("kv-pool"));
        assert_eq!(package_of("crates/kv-pool/removals.toml"), None);
        assert_eq!(package_of("crates/kv-pool/tests/other.toml"), None);
    }
}
