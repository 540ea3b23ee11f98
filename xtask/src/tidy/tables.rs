//! Names in tables and lists must exist: tests of `docs/DEFECTS.md`, protections of the removals, and
//! hazard numbers.

use std::collections::BTreeSet;

use super::{Files, Problem};
use crate::removals::{self, Removal};

/// The page with the table of defects, and the heading of the table.
const PAGE: &str = "docs/DEFECTS.md";
const HEADING: &str = "## Defects";

/// The page with the hazards, each under a heading of the third level.
const HAZARDS: &str = "docs/HAZARDS.md";

pub(super) fn check(files: &Files) -> Vec<Problem> {
    let mut problems = defects(files);
    problems.extend(hazards(files));
    match removals::read(files) {
        Ok(listed) => problems.extend(switches(files, &listed)),
        Err(error) => {
            let message = format!("{error:#}");
            let (path, why) = message.split_once(": ").unwrap_or(("crates", &message));
            problems.push(Problem::new(path, 1, why));
        }
    }
    problems
}

/// Every protection that `guard!` names must be in one list, and in one place of the sources.
fn switches(files: &Files, listed: &[Removal]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for (name, path, line) in removals::guards(files) {
        if !listed.iter().any(|removal| removal.name == name) {
            let message = format!("no `removals.toml` has a test for `{name}`");
            problems.push(Problem::new(path, line, message));
        }
        if !seen.insert(name.clone()) {
            problems.push(Problem::new(path, line, format!("`{name}` stands twice")));
        }
    }
    for Removal { package, name, .. } in listed.iter().filter(|one| !seen.contains(&one.name)) {
        let path = format!("crates/{package}/tests/removals.toml");
        problems.push(Problem::new(&path, 1, format!("no source has a protection `{name}`")));
    }
    problems
}

/// Every hazard that sources, tests and pages name by its number, such as `H7`, must have a heading
/// there.
fn hazards(files: &Files) -> Vec<Problem> {
    let page = files.text(HAZARDS).unwrap_or_default();
    if page.is_empty() {
        return Vec::new();
    }
    let mut problems = Vec::new();
    for (path, text) in files.texts() {
        if path == HAZARDS || !(path.ends_with(".rs") || path.ends_with(".md")) {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            for number in hazard_numbers(line) {
                let is_there = page.contains(&format!("### {number}: "));
                if !is_there {
                    let message = format!("{HAZARDS} has no hazard {number}");
                    problems.push(Problem::new(path, index + 1, message));
                }
            }
        }
    }
    problems
}

/// Words made of an `H` and one or two digits. Names of GPUs have more digits.
fn hazard_numbers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| {
        word.strip_prefix('H').is_some_and(|digits| {
            matches!(digits.len(), 1 | 2) && digits.bytes().all(|byte| byte.is_ascii_digit())
        })
    })
}

/// A row that begins with a number, or a letter and a number, may name tests, as `crate/tests/file.rs::name`. They must exist,
/// and a row `| number | what | test |` must name one.
fn defects(files: &Files) -> Vec<Problem> {
    let mut problems = Vec::new();
    let lines = files.text(PAGE).unwrap_or_default().lines().enumerate();
    let section = lines
        .skip_while(|(_, line)| *line != HEADING)
        .skip(1)
        .take_while(|(_, line)| !line.starts_with("## "));
    for (index, line) in section {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", number, .., ""] = cells[..] else { continue };
        let digits = number.strip_prefix(|letter: char| letter.is_ascii_uppercase());
        if digits.unwrap_or(number).parse::<u32>().is_err() {
            continue;
        }
        let mut problem = |message| problems.push(Problem::new(PAGE, index + 1, message));
        let is_between = |letter: char| letter.is_whitespace() || "|,`".contains(letter);
        let mut named = line.split(is_between).filter(|word| word.contains(".rs::")).peekable();
        if cells.len() == 5 && named.peek().is_none() {
            problem("the row names no test".to_owned());
        }
        for test in named.filter(|test| !is_there(files, test)) {
            problem(format!("there is no test `{test}`"));
        }
    }
    problems
}

/// Whether `file::name`, with the file relative to `crates/`, is a function or the name of a trial.
fn is_there(files: &Files, test: &str) -> bool {
    let Some((file, name)) = test.split_once("::") else { return false };
    let name = name.rsplit("::").next().unwrap_or(name);
    let path = file.strip_prefix("../").map_or_else(|| format!("crates/{file}"), str::to_owned);
    files.text(&path).is_some_and(|text| {
        [format!("fn {name}("), format!("\"{name}\"")].iter().any(|form| text.contains(form))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_names_a_test_that_is_not_there_is_a_problem() {
        let page = "# Testing\n| 1 | elsewhere | no/such.rs::test |\n## Defects\n\n| | what | test |\n\
                    | --- | --- | --- |\n| 1 | it breaks | `a/tests/x.rs::it_holds` |\n\
                    | 2 | it breaks | a/tests/x.rs::it_holds, a/tests/x.rs::gone |\n\
                    | 3 | it breaks | by hand |\n| 4 | a class | a place | what | `a/tests/x.rs::went` |\n\
                    | 5 | a class | a place | nothing | |\n\
                    | A6 | it breaks | by hand |\n## Next\n\
                    | 3 | elsewhere | a/tests/x.rs::gone |\n";
        let files =
            Files::of(&[(PAGE, page), ("crates/a/tests/x.rs", "#[test]\nfn it_holds() {}\n")]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        assert_eq!(
            lines,
            [
                "docs/DEFECTS.md:8: there is no test `a/tests/x.rs::gone`",
                "docs/DEFECTS.md:9: the row names no test",
                "docs/DEFECTS.md:10: there is no test `a/tests/x.rs::went`",
                "docs/DEFECTS.md:12: the row names no test",
            ]
        );
    }

    #[test]
    fn a_hazard_without_a_heading_is_a_problem() {
        let files = Files::of(&[
            (HAZARDS, "# Hazards\n### H7: a count\n"),
            ("crates/a/src/x.rs", "//! X.\n// As in H7 and \"H8\", on an H100, in H_9.\n"),
        ]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        assert_eq!(lines, ["crates/a/src/x.rs:2: docs/HAZARDS.md has no hazard H8"]);
    }

    #[test]
    fn a_protection_without_a_test_and_a_test_without_a_protection_are_problems() {
        let list = "[it]\n\"a.kept\" = \"x\"\n\"a.gone\" = \"y\"\n";
        let code = "guard!(\"a.kept\", f());\nguard!(\"a.new\", f());\nguard!(\"a.kept\", g());\n";
        let files =
            Files::of(&[("crates/a/tests/removals.toml", list), ("crates/a/src/x.rs", code)]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        assert_eq!(
            lines,
            [
                "crates/a/src/x.rs:2: no `removals.toml` has a test for `a.new`",
                "crates/a/src/x.rs:3: `a.kept` stands twice",
                "crates/a/tests/removals.toml:1: no source has a protection `a.gone`",
            ]
        );
        let files = Files::of(&[("crates/a/tests/removals.toml", "[it]\n\"a.b\" = []\n")]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        assert_eq!(lines, ["crates/a/tests/removals.toml:1: a.b names no test"]);
    }
}
