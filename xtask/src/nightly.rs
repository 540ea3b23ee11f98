//! `cargo xtask nightly`: every check that takes longer than a change can wait for, in parts.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::Parser;

use crate::steps::{self, Step};
use crate::{campaigns, cargo, chat, minimal, outside, paces, removals, services};

/// Options of `cargo xtask nightly`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs only these parts [default: all].
    #[arg(long, value_name = "PART")]
    part: Vec<String>,
    /// Runs the K-th of N shares of the parts.
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Lists the parts, with their commands.
    #[arg(long)]
    list: bool,
}

/// One of several shares of a task, counted from 1.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Shard {
    index: usize,
    count: usize,
}

impl Default for Shard {
    fn default() -> Self {
        Self { index: 1, count: 1 }
    }
}

impl FromStr for Shard {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (index, count) = text.split_once('/').context("not of the form K/N")?;
        let (index, count) = (index.parse()?, count.parse()?);
        ensure!((1..=count).contains(&index), "{index} is not between 1 and {count}");
        Ok(Self { index, count })
    }
}

impl Shard {
    /// Its share of `all`: every `count`-th, so that neighbours of equal cost are divided.
    pub(crate) fn of<T>(self, all: Vec<T>) -> Vec<T> {
        all.into_iter().skip(self.index - 1).step_by(self.count).collect()
    }
}

/// A part: its name and its steps.
type Part = (&'static str, Vec<Step>);

/// Runs the parts that `args` select.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    services::provide();
    let mut parts = parts(&cargo::packages()?);
    if let Some(other) = args.part.iter().find(|name| parts.iter().all(|part| part.0 != **name)) {
        let names: Vec<&str> = parts.iter().map(|part| part.0).collect();
        bail!("{other} is none of the parts, which are {}", names.join(", "));
    }
    parts.retain(|part| args.part.is_empty() || args.part.iter().any(|name| name == part.0));
    let parts = args.shard.unwrap_or_default().of(parts);
    if args.list {
        for (name, steps) in parts {
            for step in steps {
                println!("{name:>10}  {}", step.line);
            }
        }
        return Ok(());
    }
    steps::run(parts.into_iter().flat_map(|part| part.1).collect())
}

/// The default options of a task.
fn defaults<A: clap::Args>() -> A {
    #[derive(Parser)]
    struct Alone<A: clap::Args> {
        #[command(flatten)]
        args: A,
    }
    Alone::parse_from(["xtask"]).args
}

fn parts(packages: &[cargo::Package]) -> Vec<Part> {
    // Users choose single crates: a crate must not rely on features that another crate enables.
    let alone = packages.iter().filter(|package| package.is_published_library()).map(|package| {
        Step::cargo(&format!("check --package {} --lib --no-default-features", package.name))
    });
    vec![
        ("removals", vec![Step::own("removals", || removals::run(&defaults()))]),
        ("paces", vec![Step::own("paces", || paces::run(&defaults()))]),
        ("campaign", vec![Step::own("campaign", || campaigns::run(&defaults()))]),
        (
            "docs",
            vec![Step::cargo_with(
                "doc --workspace --no-deps --all-features",
                &[("RUSTDOCFLAGS", "-D warnings")],
            )],
        ),
        ("examples", examples(packages)),
        ("alone", alone.collect()),
        ("minimal", vec![Step::own("minimal", minimal::run)]),
        ("outside", vec![Step::own("outside", outside::run)]),
        ("chat", vec![Step::own("chat --check", chat::check)]),
        ("tools", vec![Step::cargo("test --locked --manifest-path tools/Cargo.toml")]),
    ]
}

/// Builds all examples optimised, and runs each but those that measure.
fn examples(packages: &[cargo::Package]) -> Vec<Step> {
    let mut steps =
        vec![Step::cargo("build --profile campaign --workspace --all-features --examples")];
    for package in packages {
        for example in package.targets_of("example").filter(|name| !name.ends_with("_timing")) {
            let name = &package.name;
            steps.push(Step::cargo(&format!(
                "run --profile campaign --quiet --all-features --package {name} --example {example}"
            )));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_everything_and_overlap_nowhere() {
        let all: Vec<u32> = (0..10).collect();
        let mut found: Vec<u32> =
            (1..=3).flat_map(|index| Shard { index, count: 3 }.of(all.clone())).collect();
        found.sort_unstable();
        assert_eq!(found, all);
        assert_eq!(Shard::default().of(all.clone()), all);
    }

    #[test]
    fn a_shard_is_one_of_its_count() {
        assert_eq!("2/3".parse::<Shard>().unwrap(), Shard { index: 2, count: 3 });
        for text in ["0/3", "4/3", "1/0", "3", "a/b"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_part_has_a_name_of_its_own_and_steps() {
        let parts = parts(&cargo::packages().unwrap());
        let names: std::collections::BTreeSet<&str> = parts.iter().map(|part| part.0).collect();
        assert_eq!(names.len(), parts.len());
        assert!(parts.iter().all(|part| !part.1.is_empty()));
    }
}
