//! Files, types and functions that a page names between backticks must exist in the tree.

use std::collections::HashSet;

use super::code::without_comments;
use super::{Files, Problem};

/// Endings of file names that pages mention.
const ENDINGS: [&str; 7] = [".rs", ".cu", ".cuh", ".ptx", ".toml", ".md", ".sh"];

/// Checks every page except the changelogs and the records of measurements, which also name removed items.
pub(super) fn check(files: &Files) -> Vec<Problem> {
    let known = known(files);
    let mut problems = Vec::new();
    for (path, text) in files.texts() {
        let is_record = path.ends_with("CHANGELOG.md") || path.starts_with("docs/measurements/");
        if !path.ends_with(".md") || is_record {
            continue;
        }
        let mut fenced = false;
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            }
            if fenced {
                continue;
            }
            // `# Safety` is a heading of a documentation comment.
            for span in line.split('`').skip(1).step_by(2).filter(|span| !span.starts_with('#')) {
                let messages = span.split_whitespace().filter_map(|part| {
                    missing_place(files, part)
                        .or_else(|| missing_name(&known, part))
                        .map(|message| Problem::new(path, index + 1, message))
                });
                problems.extend(messages);
            }
        }
    }
    problems
}

/// All file names, and all names in sources without comments: a name that only comments use is
/// obsolete.
fn known(files: &Files) -> HashSet<String> {
    let mut known = HashSet::new();
    for (path, text) in files.texts() {
        known.extend(path.rsplit('/').flat_map(names).map(str::to_owned));
        if path.ends_with(".rs") {
            known.extend(names(&without_comments(text)).map(str::to_owned));
        } else if [".cu", ".cuh", ".toml", ".lock", ".sh", ".yml"]
            .iter()
            .any(|ending| path.ends_with(ending))
        {
            known.extend(names(text).map(str::to_owned));
        }
    }
    known
}

/// Identifiers of a text, without surrounding underscores.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .map(|name| name.trim_matches('_'))
        .filter(|name| !name.is_empty())
}

/// The problem with a path, or with `path::function`, that a page names.
fn missing_place(files: &Files, part: &str) -> Option<String> {
    let (file, function) = part.split_once("::").map_or((part, None), |(f, n)| (f, Some(n)));
    let is_path = file.trim_end_matches('/').contains('/') && files.contains(first_folder(file));
    let is_file = ENDINGS.iter().any(|ending| file.ends_with(ending) && file != *ending);
    if file.contains(['*', '<', '{', '…', '$']) || !(is_file || is_path) {
        return None;
    }
    let file = file.trim_start_matches("../").trim_end_matches('/');
    let ends = format!("/{file}");
    let found: Vec<&str> =
        files.paths().filter(|path| *path == file || path.ends_with(&ends)).collect();
    let is_folder = || files.contains(file) || files.contains(&format!("crates/{file}"));
    match function {
        _ if found.is_empty() && !is_folder() => Some(format!("there is no file `{file}`")),
        Some(function) if !function.contains('…') && !has_function(files, &found, function) => {
            Some(format!("there is no test or function `{part}`"))
        }
        _ => None,
    }
}

/// The first folder of a path, if it exists in the tree.
fn first_folder(path: &str) -> &str {
    path.split('/').next().filter(|folder| !folder.is_empty()).unwrap_or("none")
}

/// Whether one of the files has a function or a trial of that name.
fn has_function(files: &Files, paths: &[&str], function: &str) -> bool {
    let name = function.rsplit("::").next().unwrap_or(function);
    let forms = [format!("fn {name}("), format!("fn {name}<"), format!("\"{name}\"")];
    paths
        .iter()
        .filter_map(|path| files.text(path))
        .any(|text| forms.iter().any(|form| text.contains(form)))
}

/// The first name in `part` that no source has: a type, or a name of several words.
fn missing_name(known: &HashSet<String>, part: &str) -> Option<String> {
    if part.contains(['/', '*', '…']) || ENDINGS.iter().any(|ending| part.contains(ending)) {
        return None;
    }
    let is_name = |name: &&str| {
        let is_type = name.starts_with(|first: char| first.is_ascii_uppercase())
            && name.contains(|letter: char| letter.is_ascii_lowercase());
        let of_words = name.contains('_') && !name.starts_with(|first: char| first.is_numeric());
        is_type || of_words
    };
    let name = names(part).filter(is_name).find(|name| !known.contains(*name))?;
    Some(format!("no source has the name `{name}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(page: &str) -> Vec<String> {
        let source = "//! `Gone`.\npub struct Block;\nfn it_holds() {}\n";
        let files = Files::of(&[
            ("docs/A.md", page),
            ("crates/a/src/x.rs", source),
            ("crates/a/CHANGELOG.md", "`Gone`"),
            ("kernels/k.cu", "__launch_bounds__(2) void copy_rows() {}"),
        ]);
        check(&files)
            .iter()
            .map(|problem| format!("{}: {}", problem.line, problem.message))
            .collect()
    }

    #[test]
    fn a_name_that_no_code_has_is_a_problem() {
        assert_eq!(
            messages("`Block::it_holds`, Gone\n`Gone` and `a_gone(1)`\n```\n`Gone`\n```\n"),
            ["2: no source has the name `Gone`", "2: no source has the name `a_gone`"]
        );
    }

    #[test]
    fn a_file_or_function_that_is_not_there_is_a_problem() {
        assert_eq!(
            messages(
                "`a/src/x.rs`, `x.rs::it_holds`, `crates/a/src/`, `a/src`, `../kernels/k.cu`\n\
                 `a/src/y.rs` and `x.rs::it_went` and `crates/b/src`"
            ),
            [
                "2: there is no file `a/src/y.rs`",
                "2: there is no test or function `x.rs::it_went`",
                "2: there is no file `crates/b/src`",
            ]
        );
    }

    #[test]
    fn patterns_numbers_and_names_of_hardware_are_left_alone() {
        let page = "`# Errors` `crates/*/y.rs` `copy_…` `0xBAD_F00D` `launch_bounds` `cuMemMap` `LRU` `x.rs::it_…` `a/b`";
        assert_eq!(messages(page), Vec::<String>::new());
    }
}
