//! `cargo xtask model`: checks the block pool with model checkers and against a naive reference,
//! and device threads with a model checker.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, bail};

use crate::cargo;

/// Options of `cargo xtask model`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs the long setting: more preemptions, larger pools, more schedules, more operations.
    #[arg(long)]
    deep: bool,
    /// Seed of the random schedules and operations. A failure names the seed to pass here.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Default for Args {
    fn default() -> Self {
        Self { deep: false, seed: 1 }
    }
}

/// One program of the campaign.
struct Campaign {
    package: &'static str,
    what: &'static str,
    test: &'static str,
    /// The `--cfg` of a model checker, which replaces all synchronisation types of the crate.
    checker: Option<&'static str>,
}

const CAMPAIGNS: &[Campaign] = &[
    Campaign {
        package: "kv-pool",
        what: "all orders of small programs",
        test: "loom",
        checker: Some("loom"),
    },
    Campaign {
        package: "kv-pool",
        what: "random orders of larger programs",
        test: "shuttle",
        checker: Some("shuttle"),
    },
    Campaign {
        package: "kv-pool",
        what: "random operations against the reference",
        test: "model",
        checker: None,
    },
    Campaign {
        package: "kv-multigpu",
        what: "all orders of a device's thread and those who use it",
        test: "loom",
        checker: Some("loom"),
    },
];

/// Runs every campaign in the release profile, and prints the time of each.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for campaign in CAMPAIGNS {
        campaign.cargo(args, &["--no-run"])?;
        let start = Instant::now();
        let outcome = campaign.cargo(args, &["--", "--nocapture"]);
        println!("{}: {:.1} s", campaign.what, start.elapsed().as_secs_f64());
        if let Err(error) = outcome {
            println!("{error:#}");
            failed.push(format!("{} of {}", campaign.test, campaign.package));
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

impl Campaign {
    fn arguments(&self) -> Vec<&'static str> {
        let mut arguments = vec!["test", "--quiet", "--release", "--package", self.package];
        arguments.extend(["--test", self.test]);
        arguments
    }

    fn cargo(&self, args: &Args, rest: &[&str]) -> anyhow::Result<()> {
        let mut command = cargo::command();
        command.args(self.arguments()).args(rest).stdin(Stdio::null());
        command.env("KV_MODEL_SEED", args.seed.to_string());
        command.env("KV_MODEL_DEEP", if args.deep { "1" } else { "0" });
        // Whole-program optimisation would cost more time than it saves.
        command.env("CARGO_PROFILE_RELEASE_LTO", "off");
        command.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
        if let Some(checker) = self.checker {
            // In separate folders; otherwise each build would discard the previous one.
            command.env("RUSTFLAGS", format!("--cfg {checker}"));
            command.env("CARGO_TARGET_DIR", target_folder(checker));
        }
        let status = command.status().context("cannot start Cargo")?;
        if !status.success() {
            bail!("`cargo {}` failed ({status})", self.arguments().join(" "));
        }
        Ok(())
    }
}

/// The folder for programs of model checkers, beside the usual output.
fn target_folder(checker: &str) -> PathBuf {
    cargo::target_folder().join(checker)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn campaigns_are_tests_of_their_crates() {
        let packages = cargo::packages().unwrap();
        for Campaign { package: name, test, .. } in CAMPAIGNS {
            let package = packages.iter().find(|package| package.name == *name).unwrap();
            assert!(package.targets_of("test").any(|other| other == *test), "{test} of {name}");
        }
    }
}
