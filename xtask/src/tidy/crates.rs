//! Every crate needs the files that make it usable alone: a README, a changelog and both licences.

use super::{Files, Problem};

const NEEDED: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// Checks each published crate.
pub(super) fn check(files: &Files) -> Vec<Problem> {
    let is_published = |name: &&str| {
        let manifest = files.text(&format!("crates/{name}/Cargo.toml"));
        manifest.is_none_or(|text| !text.lines().any(|line| line == "publish = false"))
    };
    names(files).filter(is_published).flat_map(|name| check_crate(files, name)).collect()
}

/// Names of the folders under `crates/` that have a manifest.
pub(super) fn names(files: &Files) -> impl Iterator<Item = &str> {
    files.paths().filter_map(|path| {
        let name = path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml")?;
        (!name.contains('/')).then_some(name)
    })
}

fn check_crate(files: &Files, name: &str) -> Vec<Problem> {
    let folder = format!("crates/{name}");
    let mut problems: Vec<Problem> = NEEDED
        .iter()
        .filter(|file| !files.contains(&format!("{folder}/{file}")))
        .map(|file| {
            let manifest = format!("{folder}/Cargo.toml");
            Problem::new(&manifest, 1, format!("the crate has no {file}"))
        })
        .collect();
    for licence in NEEDED.iter().filter(|file| file.starts_with("LICENSE")) {
        let path = format!("{folder}/{licence}");
        let (own, whole) = (files.text(&path), files.text(licence));
        if own.is_some_and(|own| Some(own) != whole) {
            problems.push(Problem::new(&path, 1, format!("the text is not that of {licence}")));
        }
    }
    let changelog = format!("{folder}/CHANGELOG.md");
    if files.text(&changelog).is_some_and(|text| !has_unreleased(text)) {
        problems.push(Problem::new(&changelog, 1, "there is no heading `## Unreleased`"));
    }
    problems
}

fn has_unreleased(text: &str) -> bool {
    text.lines().any(|line| line.trim_end() == "## Unreleased")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [&str; 0] = [];

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        check(&Files::of(files)).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_whole_crate_passes() {
        let files = [
            ("crates/a/Cargo.toml", ""),
            ("crates/a/CHANGELOG.md", "# Changelog\n\n## Unreleased\n"),
            ("crates/a/LICENSE-APACHE", "A\n"),
            ("crates/a/LICENSE-MIT", "M\n"),
            ("crates/a/README.md", ""),
            ("LICENSE-APACHE", "A\n"),
            ("LICENSE-MIT", "M\n"),
            // Not one of our crates: data of a test.
            ("crates/a/tests/data/Cargo.toml", ""),
        ];
        assert_eq!(messages(&files), NONE);
    }

    #[test]
    fn what_is_missing_is_named() {
        let files = [
            ("crates/a/Cargo.toml", ""),
            ("crates/a/CHANGELOG.md", "# Changelog\n\nUnreleased\n"),
            ("crates/a/README.md", ""),
            ("crates/a/LICENSE-MIT", "../../LICENSE-MIT"),
            ("LICENSE-MIT", "M\n"),
        ];
        assert_eq!(
            messages(&files),
            [
                "crates/a/Cargo.toml:1: the crate has no LICENSE-APACHE",
                "crates/a/LICENSE-MIT:1: the text is not that of LICENSE-MIT",
                "crates/a/CHANGELOG.md:1: there is no heading `## Unreleased`",
            ]
        );
    }
}
