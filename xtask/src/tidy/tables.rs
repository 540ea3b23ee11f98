//! Tests that pages and lists name exist: the table of defects in `docs/TESTING.md`, and the lists of removals.

use super::{Files, Problem};
use crate::removals;

/// The page with the table of defects, and the heading above that.
const PAGE: &str = "docs/TESTING.md";
const HEADING: &str = "## Defects";

pub(super) fn check(files: &Files) -> Vec<Problem> {
    let mut problems = defects(files);
    if let Err(error) = removals::read(files) {
        let message = format!("{error:#}");
        let (path, why) = message.split_once(": ").unwrap_or(("crates", &message));
        problems.push(Problem::new(path, 1, why));
    }
    problems
}

/// Every row `| number | what | crate/tests/file.rs::name |` must name a function that is there.
fn defects(files: &Files) -> Vec<Problem> {
    let mut problems = Vec::new();
    let lines = files.text(PAGE).unwrap_or_default().lines().enumerate();
    let section = lines
        .skip_while(|(_, line)| *line != HEADING)
        .skip(1)
        .take_while(|(_, line)| !line.starts_with("## "));
    for (index, line) in section {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", number, _, tests, ..] = cells[..] else { continue };
        if number.parse::<u32>().is_err() {
            continue;
        }
        for test in tests.split(", ") {
            if !is_there(files, test.trim_matches('`')) {
                problems.push(Problem::new(PAGE, index + 1, format!("there is no test `{test}`")));
            }
        }
    }
    problems
}

/// Whether `file::name`, the file below `crates/`, is a function, or the name of a trial.
fn is_there(files: &Files, test: &str) -> bool {
    let Some((file, name)) = test.split_once("::") else { return false };
    let name = name.rsplit("::").next().unwrap_or(name);
    files.text(&format!("crates/{file}")).is_some_and(|text| {
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
                    | 2 | it breaks | a/tests/x.rs::it_holds, a/tests/x.rs::gone |\n## Next\n\
                    | 3 | elsewhere | a/tests/x.rs::gone |\n";
        let files =
            Files::of(&[(PAGE, page), ("crates/a/tests/x.rs", "#[test]\nfn it_holds() {}\n")]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        assert_eq!(lines, ["docs/TESTING.md:8: there is no test `a/tests/x.rs::gone`"]);
    }

    #[test]
    fn a_list_of_removals_that_does_not_fit_is_a_problem() {
        let list = "[[removal]]\nwhat = \"w\"\nfile = \"src/x.rs\"\nfind = \"gone\"\ntest = \"lib\"\nnames = [\"t\"]\n";
        let files = Files::of(&[("crates/a/tests/removals.toml", list), ("crates/a/src/x.rs", "")]);
        let lines: Vec<String> = check(&files).iter().map(Problem::to_string).collect();
        let why = "w: the text to take out is not in crates/a/src/x.rs";
        assert_eq!(lines, [format!("crates/a/tests/removals.toml:1: {why}")]);
    }
}
