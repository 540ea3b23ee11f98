//! `cargo xtask races`: random programs, which check that the race detector of the simulated device
//! reports unordered accesses, and only these.

use std::process::Stdio;

use anyhow::{Context, bail};

use crate::cargo;

/// Options of `cargo xtask races`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of programs. Each runs at every pace, complete and with one edge removed.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    programs: u64,
    /// Seed of the first program. The others use the following seeds.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// The test that takes the number of programs from `KV_PROGRAMS` and the first seed from `KV_SEED`.
const CAMPAIGN: (&str, &str) = ("cuda-sim", "race_programs");

/// Runs the campaign in the release profile.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (package, test) = CAMPAIGN;
    let status = cargo::command()
        .args(["test", "--quiet", "--release", "--package", package, "--test", test])
        .args(["--", "--nocapture"])
        .env("KV_PROGRAMS", args.programs.to_string())
        .env("KV_SEED", args.seed.to_string())
        .stdin(Stdio::null())
        .status()
        .context("cannot start Cargo")?;
    if !status.success() {
        bail!("a program was misjudged ({status}); it is printed above, with its seed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_campaign_is_a_test_of_the_workspace() {
        let packages = cargo::packages().unwrap();
        let found = packages.iter().find(|other| other.name == CAMPAIGN.0).unwrap();
        assert!(found.targets_of("test").any(|target| target == CAMPAIGN.1));
    }
}
