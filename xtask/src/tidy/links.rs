//! Links between the Markdown pages of the tree. Each must lead to an existing file or folder, and
//! to an existing heading if it names one.

use super::Problem;

/// Reports each relative link of the page at `path` that leads to nothing that `exists`, or to a
/// heading that the page returned by `read` does not have.
pub(super) fn check<'a>(
    path: &str,
    text: &str,
    exists: &dyn Fn(&str) -> bool,
    read: &dyn Fn(&str) -> Option<&'a str>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut fenced = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for target in targets(&without_code(line)) {
            if !leads_somewhere(path, target, exists) {
                let message = format!("the link to `{target}` leads nowhere");
                problems.push(Problem::new(path, index + 1, message));
            } else if let Some((file, heading)) = target.split_once('#')
                && !target.contains("://")
                && let Some(page) = if file.is_empty() {
                    Some(text)
                } else {
                    resolve(path, file).and_then(|at| read(&at))
                }
                && !headings(page).any(|known| known == heading)
            {
                let message = format!("`{target}` names a heading that does not exist");
                problems.push(Problem::new(path, index + 1, message));
            }
        }
    }
    problems
}

/// The line without text between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// Targets of `[text](target)` and of `[name]: target`.
fn targets(line: &str) -> Vec<&str> {
    let inline =
        line.match_indices("](").filter_map(|(at, _)| line[at + 2..].split([')', ' ']).next());
    let definition = line
        .trim_start()
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]: "))
        .and_then(|(_, target)| target.split_whitespace().next());
    inline.chain(definition).map(|target| target.trim_matches(['<', '>'])).collect()
}

fn leads_somewhere(page: &str, target: &str, exists: &dyn Fn(&str) -> bool) -> bool {
    let is_elsewhere = target.contains("://") || target.starts_with("mailto:");
    let file = target.split('#').next().unwrap_or(target);
    // If nothing is left of `#heading`, the link leads to the page itself.
    is_elsewhere || file.is_empty() || resolve(page, file).is_some_and(|path| exists(&path))
}

/// The headings of a page in the form of links: lower case, hyphens for spaces, without other
/// signs.
fn headings(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter(|line| line.starts_with('#')).map(|line| {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

/// The path of `target` from the root, as seen from `page`; `None` if it leaves the tree.
fn resolve(page: &str, target: &str) -> Option<String> {
    if target.starts_with('/') {
        return None;
    }
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(page: &str, text: &str) -> Vec<usize> {
        let files = ["README.md", "docs/A.md", "crates/x/README.md", "crates/x"];
        let exists = |path: &str| path.is_empty() || files.contains(&path);
        let read =
            |path: &str| (path == "docs/A.md").then_some("# A\n## Part\n## Two words: `x`\n");
        check(page, text, &exists, &read).iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn a_heading_that_is_named_must_be_there() {
        let text = "[a](docs/A.md#part)\n[b](docs/A.md#two-words-x)\n[c](docs/A.md#gone)\n[d](#own)\n# Own\n[e](#other)\n";
        assert_eq!(broken("README.md", text), [3, 6]);
    }

    #[test]
    fn links_are_resolved_from_the_page() {
        let text = "[a](docs/A.md) [b](./docs/A.md#part) [c](crates/x/)\n[d](A.md)\n";
        assert_eq!(broken("README.md", text), [2]);
        assert_eq!(
            broken("docs/B.md", "[a](A.md) [r](../README.md) [root](..)\n[x](docs/A.md)"),
            [2]
        );
        assert_eq!(broken("docs/B.md", "[out](../../README.md)\n[abs](/README.md)"), [1, 2]);
    }

    #[test]
    fn two_links_of_one_line_are_two_problems() {
        assert_eq!(broken("README.md", "[a](X.md) and [b](Y.md \"title\")"), [1, 1]);
    }

    #[test]
    fn definitions_count_too() {
        assert_eq!(
            broken("README.md", "[a]: docs/A.md\n[b]: docs/B.md \"B\"\n[c]: <docs/A.md>"),
            [2]
        );
    }

    #[test]
    fn the_web_the_page_itself_and_code_are_left_alone() {
        let text = "[w](https://example.org/x) [m](mailto:a@b)\n\
                    `[code](nowhere.md)` and `a[i](j)`\n\
                    ```rust\nlet x = y[i](z);\n[b](nowhere.md)\n```\n\
                    [real](nowhere.md)\n";
        assert_eq!(broken("README.md", text), [7]);
    }
}
