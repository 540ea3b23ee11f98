//! `cargo xtask tidy`: rules of the tree that no compiler checks. Each violation prints `path:line:
//! message`.

mod code;
mod crates;
mod files;
mod links;
mod names;
mod paths;
mod sources;
mod tables;
mod unsafety;

use std::fmt;

use anyhow::bail;

pub(crate) use files::Files;

/// A violation, at a line counted from one.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Problem {
    path: String,
    line: usize,
    message: String,
}

impl Problem {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// Checks every tracked file.
pub(crate) fn run() -> anyhow::Result<()> {
    let files = Files::read(&crate::cargo::workspace_root())?;
    let problems = check(&files);
    for problem in &problems {
        println!("{problem}");
    }
    match problems.len() {
        0 => println!("tidy: {} files, nothing to say", files.len()),
        1 => bail!("tidy: 1 problem"),
        count => bail!("tidy: {count} problems"),
    }
    Ok(())
}

fn check(files: &Files) -> Vec<Problem> {
    let mut problems =
        [crates::check(files), unsafety::check(files), tables::check(files), names::check(files)]
            .concat();
    for (path, text) in files.texts() {
        problems.extend(paths::check(path, text));
        if path.ends_with(".rs") {
            problems.extend(sources::check(path, text));
        }
        if path.ends_with(".md") {
            problems.extend(links::check(path, text, &|target| files.contains(target), &|page| {
                files.text(page).filter(|_| page.ends_with(".md"))
            }));
        }
    }
    problems.sort();
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_of_every_rule_are_reported_in_order() {
        let files = Files::of(&[
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/lib.rs", "pub fn f() {}\n"),
            ("docs/X.md", "[gone](NO.md)\n"),
        ]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        assert_eq!(
            lines,
            [
                "crates/a/Cargo.toml:1: the crate has no CHANGELOG.md",
                "crates/a/Cargo.toml:1: the crate has no LICENSE-APACHE",
                "crates/a/Cargo.toml:1: the crate has no LICENSE-MIT",
                "crates/a/Cargo.toml:1: the crate has no README.md",
                "crates/a/src/lib.rs:1: the first line is no `//!` line saying why the file exists",
                "docs/X.md:1: the link to `NO.md` leads nowhere",
            ]
        );
    }
}
