//! Links between the Markdown pages of the tree, each of which must lead to a file or folder in it.

use super::Problem;

/// Reports each relative link of the page at `path` that leads to nothing that `exists`.
pub(super) fn check(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Problem> {
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
            }
        }
    }
    problems
}

/// The line less what stands between backticks.
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
    // What is left of `#heading` is the page itself.
    is_elsewhere || file.is_empty() || resolve(page, file).is_some_and(|path| exists(&path))
}

/// The path from the root that `target` has when seen from `page`; nothing when it leaves the tree.
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
        check(page, text, &exists).iter().map(|problem| problem.line).collect()
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
        let text = "[w](https://example.org/x) [m](mailto:a@b) [h](#heading)\n\
                    `[code](nowhere.md)` and `a[i](j)`\n\
                    ```rust\nlet x = y[i](z);\n[b](nowhere.md)\n```\n\
                    [real](nowhere.md)\n";
        assert_eq!(broken("README.md", text), [7]);
    }
}
