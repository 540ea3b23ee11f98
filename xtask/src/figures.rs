//! `cargo xtask figures`: the size of each crate, to compare two trees.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::api::Surface;
use crate::cargo::{self, Package};
use crate::tidy::Files;

/// Options of `cargo xtask figures`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Root folder of another tree of the workspace [default: this tree].
    #[arg(long, value_name = "FOLDER")]
    tree: Option<PathBuf>,
    /// Also builds: prints the public names of each crate, and the time to compile the crate alone
    /// with its dependencies, from an empty folder.
    #[arg(long)]
    compile: bool,
}

/// Number of lines of a crate, by kind.
#[derive(Debug, Default, PartialEq)]
struct Lines {
    sources: usize,
    tests: usize,
    ptx: usize,
}

/// Prints lines and dependencies of each crate, and the names that several types share.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let root = args.tree.clone().unwrap_or_else(cargo::workspace_root);
    let files = Files::read(&root)?;
    println!("{:<14} {:>7} {:>7} {:>7}  {:>5} {:>5}", "", "src", "tests", "ptx", "deps", "least");
    for (name, lines) in lines(&files) {
        let Lines { sources, tests, ptx } = lines;
        let (all, least) = (tree_size(&root, &name, &[])?, tree_size(&root, &name, &LEAST)?);
        println!("{name:<14} {sources:>7} {tests:>7} {ptx:>7}  {all:>5} {least:>5}");
    }
    println!("kernels: {} lines of CUDA C++", kernel_lines(&files));
    println!("names of several types:");
    for (name, places) in repeated(&files) {
        println!("  {name}: {}", places.len());
    }
    if args.compile { compiled(&root) } else { Ok(()) }
}

/// Prints the public names of each crate and its compile time.
fn compiled(root: &Path) -> anyhow::Result<()> {
    println!("{:<14} {:>5} {:>7} {:>8}", "", "root", "public", "build");
    for package in cargo::packages_of(root)?.iter().filter(|package| package.is_published_library())
    {
        let surface = Surface::of(root, package)?;
        let seconds = compile_time(root, package)?.as_secs_f64();
        let (name, at_root, all) = (&package.name, surface.root, surface.items.len());
        println!("{name:<14} {at_root:>5} {all:>7} {seconds:>6.1} s");
    }
    Ok(())
}

/// The time of `cargo build` of one crate into an empty folder, which is removed again.
fn compile_time(root: &Path, package: &Package) -> anyhow::Result<Duration> {
    let folder = cargo::target_folder_of(root).join("figures");
    let clear = || match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    let clear = || clear().with_context(|| format!("cannot remove {}", folder.display()));
    clear()?;
    let start = Instant::now();
    let status = cargo::command_in(root)
        .args(["build", "--quiet", "--package", &package.name, "--target-dir"])
        .arg(&folder)
        .stdin(Stdio::null())
        .status()
        .context("cannot start Cargo")?;
    let elapsed = start.elapsed();
    clear()?;
    if !status.success() {
        bail!("the build of {} failed ({status})", package.name);
    }
    Ok(elapsed)
}

const LEAST: [&str; 1] = ["--no-default-features"];

/// Lines of each folder below `crates/`.
fn lines(files: &Files) -> BTreeMap<String, Lines> {
    let mut crates: BTreeMap<String, Lines> = BTreeMap::new();
    for (path, text) in files.texts() {
        let Some((name, rest)) = path.strip_prefix("crates/").and_then(|path| path.split_once('/'))
        else {
            continue;
        };
        let lines = crates.entry(name.to_owned()).or_default();
        let count = text.lines().count();
        if rest.ends_with(".ptx") {
            lines.ptx += count;
        } else if rest.ends_with(".rs") && rest.starts_with("src/") {
            lines.sources += count;
        } else if rest.starts_with("tests/") {
            lines.tests += count;
        }
    }
    crates
}

fn kernel_lines(files: &Files) -> usize {
    let is_kernel = |path: &str| path.ends_with(".cu") || path.ends_with(".cuh");
    files.texts().filter(|(path, _)| is_kernel(path)).map(|(_, text)| text.lines().count()).sum()
}

/// Names that several types, traits or aliases in the crates' sources share, with the files. Unit
/// tests at the end of a file are not counted.
fn repeated(files: &Files) -> Vec<(String, Vec<&str>)> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (path, text) in files.texts() {
        if !path.starts_with("crates/") || !path.contains("/src/") || !path.ends_with(".rs") {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
        for name in code.lines().filter_map(defined) {
            places.entry(name.to_owned()).or_default().push(path);
        }
    }
    let mut repeated: Vec<_> = places.into_iter().filter(|(_, places)| places.len() > 1).collect();
    repeated.sort_by(|a, b| b.1.len().cmp(&a.1.len()).then_with(|| a.0.cmp(&b.0)));
    repeated
}

/// The name of the type that a line defines outside any block.
fn defined(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.strip_prefix(' ')?,
        None => line,
    };
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    let rest = ["struct ", "enum ", "union ", "trait ", "type "]
        .iter()
        .find_map(|kind| line.strip_prefix(kind))?;
    rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()
}

/// Number of crates that are compiled for `name`, including itself.
fn tree_size(root: &Path, name: &str, args: &[&str]) -> anyhow::Result<usize> {
    let output = cargo::command_in(root)
        .args(["tree", "--package", name, "--edges", "normal,build", "--prefix", "none"])
        .args(["--format", "{p}"])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context("cannot start `cargo tree`")?;
    if !output.status.success() {
        bail!("`cargo tree` of {name} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let crates: BTreeSet<String> = text
        .lines()
        .map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
        .filter(|line| !line.is_empty())
        .collect();
    Ok(crates.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_one_name_are_found_and_those_of_tests_are_not() {
        let files = Files::of(&[
            ("crates/a/src/x.rs", "pub struct Place<T> {\n}\nstruct Own;\n"),
            (
                "crates/b/src/y.rs",
                "pub(crate) enum Place {\n}\n#[cfg(test)]\nmod tests {\nstruct Own;\n}\n",
            ),
            ("crates/b/tests/z.rs", "struct Own;\n"),
            ("crates/b/src/z.rs", "// struct Own\n    type Place = u32;\n"),
        ]);
        let expected = vec!["crates/a/src/x.rs", "crates/b/src/y.rs"];
        assert_eq!(repeated(&files), [("Place".to_owned(), expected)]);
    }

    #[test]
    fn lines_are_counted_by_what_they_are() {
        let files = Files::of(&[
            ("crates/a/src/x.rs", "1\n2\n"),
            ("crates/a/tests/x.toml", "1\n"),
            ("crates/a/ptx/x.ptx", "1\n2\n3\n"),
            ("kernels/x.cu", "1\n"),
            ("kernels/x.cuh", "1\n2\n"),
        ]);
        let crates = lines(&files);
        assert_eq!(crates["a"], Lines { sources: 2, tests: 1, ptx: 3 });
        assert_eq!(kernel_lines(&files), 3);
    }
}
