//! Every crate with `unsafe` has a section in `docs/UNSAFE.md` that begins with the number of its
//! blocks. A section of a crate without `unsafe` says so.

use super::code::blank_out;
use super::{Files, Problem, crates};

const PAGE: &str = "docs/UNSAFE.md";

/// Compares the sections of `docs/UNSAFE.md` with the sources of the crates.
pub(super) fn check(files: &Files) -> Vec<Problem> {
    let sections = sections(files.text(PAGE).unwrap_or_default());
    let mut problems = Vec::new();
    let mut reasons = Vec::new();
    for name in crates::names(files) {
        let Some((path, line)) = first_unsafe(files, name) else {
            continue;
        };
        reasons.push(name);
        let Some(section) = sections.iter().find(|section| section.name == name) else {
            let message = format!("`unsafe` in a crate without a section `## {name}` in {PAGE}");
            problems.push(Problem::new(path, line, message));
            continue;
        };
        let blocks = format!("{} blocks", blocks(files, name));
        if !section.body.starts_with(&blocks) {
            let message =
                format!("{name} has {blocks} of `unsafe`: the section begins with another number");
            problems.push(Problem::new(PAGE, section.line, message));
        }
    }
    for Section { name, line, body } in sections {
        let is_crate = crates::names(files).any(|other| other == name);
        if is_crate && !reasons.contains(&name) && !body.starts_with("None") {
            let message =
                format!("{name} has no `unsafe`: remove the section or begin it with `None`");
            problems.push(Problem::new(PAGE, line, message));
        }
    }
    problems
}

/// The text under a heading of the second level.
struct Section<'a> {
    name: &'a str,
    /// Line of the heading.
    line: usize,
    /// The first line that is not blank.
    body: &'a str,
}

fn sections(text: &str) -> Vec<Section<'_>> {
    let mut sections: Vec<Section<'_>> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if let Some(name) = line.strip_prefix("## ") {
            sections.push(Section { name: name.trim(), line: index + 1, body: "" });
        } else if let Some(section) = sections.last_mut()
            && section.body.is_empty()
        {
            section.body = line.trim();
        }
    }
    sections
}

/// The first place in a crate's sources with the keyword `unsafe`.
fn first_unsafe<'a>(files: &'a Files, name: &str) -> Option<(&'a str, usize)> {
    let sources = format!("crates/{name}/src/");
    files
        .texts()
        .filter(|(path, _)| path.starts_with(&sources) && path.ends_with(".rs"))
        .find_map(|(path, text)| Some((path, line_of_unsafe(text)?)))
}

/// Number of `unsafe` blocks in the sources of a crate, without unit tests at the end of a file.
fn blocks(files: &Files, name: &str) -> usize {
    let sources = format!("crates/{name}/src/");
    files
        .texts()
        .filter(|(path, _)| path.starts_with(&sources) && path.ends_with(".rs"))
        .map(|(_, text)| blocks_in(text))
        .sum()
}

fn blocks_in(text: &str) -> usize {
    let code = blank_out(text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text));
    let words: Vec<&str> = code.split_whitespace().collect();
    let opens = |pair: &&[&str]| {
        let before = pair[0].trim_start_matches(|c: char| !c.is_alphanumeric() && c != '_');
        before.rsplit(['(', '|']).next() == Some("unsafe") && pair[1].starts_with('{')
    };
    words.windows(2).filter(opens).count()
}

/// The line of the first keyword `unsafe`: not in a comment, not in a literal, and not part of a
/// longer word.
fn line_of_unsafe(text: &str) -> Option<usize> {
    let code = blank_out(text);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.lines()
        .position(|line| line.split(|c: char| !is_word(c)).any(|word| word == "unsafe"))
        .map(|index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [&str; 0] = [];

    fn messages(page: &str, source: &str) -> Vec<String> {
        let files = [("crates/a/Cargo.toml", ""), ("crates/a/src/lib.rs", source), (PAGE, page)];
        check(&Files::of(&files)).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn unsafe_needs_a_section() {
        let source = "//! A.\nfn f() {\n    unsafe { g() }\n}\n";
        let message =
            "crates/a/src/lib.rs:3: `unsafe` in a crate without a section `## a` in docs/UNSAFE.md";
        assert_eq!(messages("# Unsafe\n\n## b\n", source), [message]);
        assert_eq!(messages("# Unsafe\n\n## a\n\n1 blocks.\n", source), NONE);
    }

    #[test]
    fn a_section_begins_with_the_number_of_blocks() {
        let source = "//! A.\nfn f() {\n    g(unsafe { h() });\n    run(|x| unsafe {\n x() });\n}\n\
                      unsafe fn k() {}\n#[cfg(test)]\nmod tests { fn t() { unsafe { h() } } }\n";
        let message =
            "docs/UNSAFE.md:3: a has 2 blocks of `unsafe`: the section begins with another number";
        assert_eq!(messages("# Unsafe\n\n## a\n\n3 blocks: why.\n", source), [message]);
        assert_eq!(messages("# Unsafe\n\n## a\n\n2 blocks: why.\n", source), NONE);
    }

    #[test]
    fn a_section_needs_unsafe_or_says_that_there_is_none() {
        let source = "//! A, with no unsafe code.\n#![forbid(unsafe_code)]\n";
        let message =
            "docs/UNSAFE.md:3: a has no `unsafe`: remove the section or begin it with `None`";
        assert_eq!(messages("# Unsafe\n\n## a\n", source), [message]);
        assert_eq!(messages("# Unsafe\n\n## a\n\nNone: forbidden.\n\n## b\n", source), NONE);
        // A heading that does not name a crate is ordinary text.
        assert_eq!(messages("# Unsafe\n\n## Rules\n", source), NONE);
    }

    #[test]
    fn the_keyword_is_told_from_its_mention() {
        let cases = [
            ("unsafe fn f() {}", Some(1)),
            ("\n\nunsafe impl Send for A {}", Some(3)),
            ("let c = '\"'; unsafe { f() }", Some(1)),
            ("let c = '\\''; unsafe { f() } // '", Some(1)),
            ("fn f<'a>(x: &'a str) { unsafe { g(x) } }", Some(1)),
            ("/* one /* two */ */ unsafe {}", Some(1)),
            ("let s = \"a\\\"\"; unsafe {}", Some(1)),
            ("// unsafe\n/* unsafe\nunsafe */", None),
            ("/* a /* b */ unsafe */", None),
            ("let s = \"unsafe\"; let r = r#\"\"unsafe\"\"#;", None),
            ("let b = b\"\\\\ unsafe\"; let b = br#\"\"unsafe\"#;", None),
            ("#![forbid(unsafe_code)] fn not_unsafe() {}", None),
        ];
        for (text, line) in cases {
            assert_eq!(line_of_unsafe(text), line, "{text}");
        }
    }
}
