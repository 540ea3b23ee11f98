//! `cargo xtask remote`: long campaigns against nodes that serve each other.

use std::time::Instant;

use anyhow::bail;

use crate::{cargo, services};

/// Options of `cargo xtask remote`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of random programs of readers and writers.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// Seconds that readers pin blocks while others take slots at full speed.
    #[arg(long, default_value_t = 600)]
    race_seconds: u64,
    /// Seconds that the readers of messages are fed with noise.
    #[arg(long, default_value_t = 60)]
    fuzz_seconds: u64,
    /// Connections that say noise to a server.
    #[arg(long, default_value_t = 10_000)]
    noise: u64,
    /// Programs of two hosts whose members die and come back.
    #[arg(long, default_value_t = 1_000)]
    chaos: u64,
    /// First seed of each.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Tests of `kv-remote`, which take their numbers from the environment.
const CAMPAIGNS: &[&str] = &["node", "tier", "fuzz"];

/// Runs every campaign in the release profile, and prints the time of each.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    services::provide();
    let mut failed = Vec::new();
    for test in CAMPAIGNS {
        cargo_test(test, &["--no-run"], args)?;
        let start = Instant::now();
        let passed = cargo_test(test, &["--", "--nocapture"], args);
        println!("kv-remote {test}: {:.1} s", start.elapsed().as_secs_f64());
        if let Err(error) = passed {
            println!("{error:#}");
            failed.push(*test);
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}; a failure names its seed", failed.join(", "));
    }
    Ok(())
}

fn cargo_test(test: &str, rest: &[&str], args: &Args) -> anyhow::Result<()> {
    let variables = [
        ("KV_REMOTE_SEEDS", args.seeds.to_string()),
        ("KV_REMOTE_RACE_SECONDS", args.race_seconds.to_string()),
        ("KV_REMOTE_FUZZ_SECONDS", args.fuzz_seconds.to_string()),
        ("KV_REMOTE_CHAOS", args.chaos.to_string()),
        ("KV_REMOTE_NOISE", args.noise.to_string()),
        ("KV_REMOTE_SEED", args.seed.to_string()),
    ];
    cargo::test("kv-remote", test, rest, &variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn campaigns_are_tests_of_the_workspace() {
        let packages = cargo::packages().unwrap();
        let found = packages.iter().find(|package| package.name == "kv-remote").unwrap();
        for test in CAMPAIGNS {
            assert!(found.targets_of("test").any(|target| target == *test), "{test}");
        }
    }
}
