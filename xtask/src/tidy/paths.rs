//! Absolute paths of one machine, which do not exist on others.

use super::Problem;

/// Folders at the root of a file system that belong to one person or one machine.
///
/// Written without their slashes, so that this file does not find itself.
const FOLDERS: [&str; 5] = ["home", "work", "root", "Users", "tmp/bash_jobs"];

/// Reports each line that names a path below one of `FOLDERS`.
pub(super) fn check(path: &str, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for folder in FOLDERS {
            if names(line, folder) {
                let message = format!("`/{folder}` is a path of one machine");
                problems.push(Problem::new(path, index + 1, message));
            }
        }
    }
    problems
}

/// Whether `line` names a path below `/folder`; `./folder` and `x/folder` are different.
fn names(line: &str, folder: &str) -> bool {
    let needle = format!("/{folder}");
    line.match_indices(&needle).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + needle.len()..].chars().next();
        let starts =
            before.is_none_or(|c| !(c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | '}')));
        starts && after.is_some_and(|c| c == '/' || (c == '.' && folder.contains('/')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_of_a_machine_are_reported() {
        // `~` stands for a slash, because this file is checked too.
        let cases = [
            ("~home/someone/x", "home", true),
            ("let path = \"~work/main\";", "work", true),
            ("file://~root/.cargo", "root", true),
            ("see `~Users/a`", "Users", true),
            ("~tmp/bash_jobs.0/1/stdout", "tmp/bash_jobs", true),
            ("at the root/ of", "root", false),
            (".~home/x ..~work/y src~work/z", "work", false),
            ("${dir}~home/x", "home", false),
            ("https://example.org~home/page", "home", false),
            ("~homestead/x and ~home", "home", false),
        ];
        for (line, folder, named) in cases {
            assert_eq!(names(&line.replace('~', "/"), folder), named, "{line}");
        }
    }

    #[test]
    fn the_line_is_named() {
        let text = format!("fine\nsee /{}/me\n", "home");
        let expected = Problem::new("a.md", 2, format!("`/{}` is a path of one machine", "home"));
        assert_eq!(check("a.md", &text), [expected]);
    }
}
