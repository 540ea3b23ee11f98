//! Every crate with `unsafe` in it has a section in `docs/UNSAFE.md`, and a section of a crate without says so.

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
        if !sections.iter().any(|section| section.name == name) {
            let message = format!("`unsafe` in a crate without a section `## {name}` in {PAGE}");
            problems.push(Problem::new(path, line, message));
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

/// What stands under a heading of the second level.
struct Section<'a> {
    name: &'a str,
    /// Where the heading is.
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

/// Where the sources of a crate first say `unsafe`.
fn first_unsafe<'a>(files: &'a Files, name: &str) -> Option<(&'a str, usize)> {
    let sources = format!("crates/{name}/src/");
    files
        .texts()
        .filter(|(path, _)| path.starts_with(&sources) && path.ends_with(".rs"))
        .find_map(|(path, text)| Some((path, line_of_unsafe(text)?)))
}

/// The line of the first keyword `unsafe`: not in a comment, nor in a literal, nor part of a longer word.
fn line_of_unsafe(text: &str) -> Option<usize> {
    let code = blank_out(text);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.lines()
        .position(|line| line.split(|c: char| !is_word(c)).any(|word| word == "unsafe"))
        .map(|index| index + 1)
}

/// The text with comments and literals blanked out, line by line as long as before.
fn blank_out(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = length_of_blank(rest);
        if length == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            let (blank, after) = rest.split_at(length);
            code.extend(blank.chars().map(|c| if c == '\n' { c } else { ' ' }));
            rest = after;
        }
    }
    code
}

/// Bytes of the comment or literal that `rest` starts with; 0 when it starts with code.
fn length_of_blank(rest: &str) -> usize {
    if rest.starts_with("//") {
        rest.find('\n').unwrap_or(rest.len())
    } else if rest.starts_with("/*") {
        length_of_block_comment(rest)
    } else if rest.starts_with('"') {
        length_of_quoted(rest, '"')
    } else if rest.starts_with('r') {
        length_of_raw_string(rest)
    } else if rest.starts_with('\'') {
        length_of_character(rest)
    } else {
        0
    }
}

fn length_of_block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let tail = &rest.as_bytes()[at..];
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// A literal in `quote`s, with escapes.
fn length_of_quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if !escaped && c == quote {
            return at + 1;
        }
        escaped = !escaped && c == '\\';
    }
    rest.len()
}

/// `r"…"` or `r#"…"#` with any number of hashes, also after a `b` or `c`; 0 for any other `r`.
fn length_of_raw_string(rest: &str) -> usize {
    let hashes = rest[1..].bytes().take_while(|&byte| byte == b'#').count();
    let start = 1 + hashes;
    if !rest[start..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    rest[start + 1..].find(&end).map_or(rest.len(), |at| start + 1 + at + end.len())
}

/// A character literal; 0 for a lifetime.
fn length_of_character(rest: &str) -> usize {
    let mut inside = rest.chars().skip(1);
    match (inside.next(), inside.next()) {
        (Some('\\'), _) => length_of_quoted(rest, '\''),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 0,
    }
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
        assert_eq!(messages("# Unsafe\n\n## a\n", source), NONE);
    }

    #[test]
    fn a_section_needs_unsafe_or_says_that_there_is_none() {
        let source = "//! A, with no unsafe code.\n#![forbid(unsafe_code)]\n";
        let message =
            "docs/UNSAFE.md:3: a has no `unsafe`: remove the section or begin it with `None`";
        assert_eq!(messages("# Unsafe\n\n## a\n", source), [message]);
        assert_eq!(messages("# Unsafe\n\n## a\n\nNone: forbidden.\n\n## b\n", source), NONE);
        // A heading that names no crate is prose.
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
