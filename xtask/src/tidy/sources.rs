//! Rules for a Rust file: it states its purpose, and is short enough to read at once.

use super::Problem;

const LINES_MAX: usize = 800;

/// Checks one Rust file; the rule is the same for libraries, tests, benchmarks and build scripts.
pub(super) fn check(path: &str, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    if !text.starts_with("//! ") {
        let message = "the first line is no `//!` line saying why the file exists";
        problems.push(Problem::new(path, 1, message));
    }
    let lines = text.lines().count();
    if lines > LINES_MAX {
        let message = format!("{lines} lines are more than {LINES_MAX}");
        problems.push(Problem::new(path, LINES_MAX + 1, message));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_must_say_why() {
        assert_eq!(check("a.rs", "//! Why.\nfn f() {}\n"), []);
        for text in ["fn f() {}\n", "", "//!\n", "\n//! Late.\n", "// Why.\n"] {
            assert_eq!(check("a.rs", text).len(), 1, "{text:?}");
        }
    }

    #[test]
    fn the_longest_file_has_800_lines() {
        let longest = format!("//! Long.\n{}", "\n".repeat(LINES_MAX - 1));
        assert_eq!(check("a.rs", &longest), []);
        let problems = check("a.rs", &format!("{longest}\n"));
        assert_eq!(problems, [Problem::new("a.rs", 801, "801 lines are more than 800")]);
    }
}
