//! Every public function that takes a number or a configuration must be tested with extreme values,
//! in `tests/sizes.rs` of its crate, or in files beside it whose names begin with `sizes`.
//!
//! The rule reads text: a function counts as tested if the file names it. `unsafe` functions are
//! exempt, because extreme numbers may violate their callers' promises.

use std::collections::BTreeSet;

use super::{Files, Problem};

/// Number types of arguments, which can be too small or too large.
const NUMBERS: &[&str] = &["u8", "u16", "u32", "u64", "usize", "i32", "i64", "isize"];

/// Name endings of types that contain such numbers.
const BUNDLES: &[&str] = &["Config", "Options", "Limits", "Shape", "Strides", "Rules"];

pub(super) fn check(files: &Files) -> Vec<Problem> {
    let mut problems = Vec::new();
    for folder in crates(files) {
        let sweep = sweep(files, &folder);
        let exported = exported(files, &folder);
        for (path, text) in files.texts().filter(|(path, _)| is_source(path, &folder)) {
            for function in sized_functions(text) {
                let is_public = exported.contains(function.owner.as_str());
                if is_public && !function.is_named_in(&sweep) {
                    let Function { owner, name, line, .. } = function;
                    let message = format!("{folder}/tests/sizes.rs does not try `{owner}::{name}`");
                    problems.push(Problem::new(path, line, message));
                }
            }
        }
    }
    problems
}

/// The texts of a crate's size tests, concatenated.
fn sweep(files: &Files, folder: &str) -> String {
    let start = format!("{folder}/tests/sizes");
    files.texts().filter(|(path, _)| path.starts_with(&start)).map(|(_, text)| text).collect()
}

/// Folders of the crates that have a library.
fn crates(files: &Files) -> BTreeSet<String> {
    let of = |path: &str| path.strip_suffix("/src/lib.rs").map(str::to_owned);
    files.paths().filter(|path| path.starts_with("crates/")).filter_map(of).collect()
}

fn is_source(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with("/src/") && rest.ends_with(".rs"))
}

/// Names of types that `lib.rs` exports, directly or through a public module.
fn exported(files: &Files, folder: &str) -> BTreeSet<String> {
    let root = files.text(&format!("{folder}/src/lib.rs")).unwrap_or_default();
    let mut names = BTreeSet::new();
    for item in root.split("pub use ").skip(1) {
        let item = item.split(';').next().unwrap_or_default();
        names.extend(words(item).filter(|word| word.starts_with(char::is_uppercase)));
    }
    for module in root.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')) {
        let (file, inside) =
            (format!("{folder}/src/{module}.rs"), format!("{folder}/src/{module}/"));
        let of_module = |path: &str| path == file || path.starts_with(&inside);
        for (_, text) in files.texts().filter(|(path, _)| of_module(path)) {
            for kind in ["pub struct ", "pub enum "] {
                names.extend(text.split(kind).skip(1).filter_map(|rest| words(rest).next()));
            }
        }
    }
    names
}

/// A public function of a type, with a number among its arguments.
struct Function {
    owner: String,
    name: String,
    line: usize,
    is_method: bool,
}

impl Function {
    fn is_named_in(&self, sweep: &str) -> bool {
        let Self { owner, name, is_method, .. } = self;
        let path = sweep.contains(&format!("{owner}::{name}"));
        path || *is_method && sweep.contains(&format!(".{name}("))
    }
}

/// The functions of a file, which must be formatted by `rustfmt`.
fn sized_functions(text: &str) -> Vec<Function> {
    let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines: Vec<&str> = code.lines().collect();
    let (mut functions, mut owner) = (Vec::new(), None);
    for (index, line) in lines.iter().enumerate() {
        if line.starts_with("impl") {
            owner = owner_of(line);
        }
        let Some(rest) = line.strip_prefix("    pub ") else { continue };
        let rest = rest.strip_prefix("const ").unwrap_or(rest);
        let (Some(rest), Some(owner)) = (rest.strip_prefix("fn "), &owner) else { continue };
        let name = words(rest).next().unwrap_or_default();
        let signature: Vec<&str> = lines[index..]
            .iter()
            .scan(false, |ended, line| {
                let before = *ended;
                *ended |= line.ends_with('{') || line.ends_with(';');
                (!before).then_some(*line)
            })
            .collect();
        let signature = signature.join(" ");
        let arguments = signature.split_once("->").map_or(&*signature, |(before, _)| before);
        let arguments = arguments.split_once('(').map_or("", |(_, after)| after);
        if words(arguments).any(|word| is_sized(&word)) {
            let is_method = arguments.contains("self");
            let owner = owner.clone();
            functions.push(Function { owner, name, line: index + 1, is_method });
        }
    }
    functions
}

fn is_sized(word: &str) -> bool {
    NUMBERS.contains(&word) || BUNDLES.iter().any(|end| word.ends_with(end))
}

/// The type of an `impl` line: the last name before its generic parameters.
fn owner_of(line: &str) -> Option<String> {
    let line = line.split(" for ").last()?;
    let line = line.strip_prefix("impl").map_or(line, |rest| {
        if !rest.starts_with('<') {
            return rest;
        }
        let mut depth = 0;
        let end = rest.find(|letter| {
            depth += i32::from(letter == '<') - i32::from(letter == '>');
            depth == 0
        });
        end.map_or(rest, |end| &rest[end + 1..])
    });
    words(line).next()
}

/// Maximal runs of letters, digits and underscores.
fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.split(move |letter| !is_part(letter)).filter(|word| !word.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: (&str, &str) =
        ("crates/a/src/lib.rs", "//! A.\nmod pool;\npub mod open;\npub use pool::{Pool};\n");
    const POOL: (&str, &str) = (
        "crates/a/src/pool.rs",
        "//! P.\nimpl<'a> Pool<'a> {\n    pub fn new(\n        blocks: usize,\n    ) -> Self {\n    }\n\
         \n    pub fn grow_to(&self, blocks: u64) {}\n\n    pub fn len(&self) -> usize {\n    }\n}\n\
         impl Inner {\n    pub fn with(blocks: usize) {}\n}\n",
    );
    const OPEN: (&str, &str) = (
        "crates/a/src/open.rs",
        "//! O.\npub struct Door;\nimpl Door {\n    pub const fn wide(shape: &DoorShape) -> Self {\n    }\n}\n",
    );

    fn lines(sweep: &str) -> Vec<String> {
        let files = Files::of(&[LIB, POOL, OPEN, ("crates/a/tests/sizes.rs", sweep)]);
        check(&files).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn what_the_sweep_does_not_name_is_a_problem() {
        assert_eq!(
            lines(""),
            [
                "crates/a/src/open.rs:4: crates/a/tests/sizes.rs does not try `Door::wide`",
                "crates/a/src/pool.rs:3: crates/a/tests/sizes.rs does not try `Pool::new`",
                "crates/a/src/pool.rs:8: crates/a/tests/sizes.rs does not try `Pool::grow_to`",
            ]
        );
    }

    #[test]
    fn what_the_sweep_names_is_none() {
        assert!(lines("Pool::new(0); pool.grow_to(1); Door::wide(&shape);").is_empty());
    }
}
