//! `cargo xtask disk`: long campaigns against the tier of files.

use std::time::Instant;

use anyhow::bail;

use crate::cargo;

/// Options of `cargo xtask disk`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of random programs on random disks.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// Number of processes that are killed.
    #[arg(long, default_value_t = 1_000)]
    kills: u64,
    /// Seconds that the readers of headings and entries are fed with noise.
    #[arg(long, default_value_t = 60)]
    fuzz_seconds: u64,
    /// First seed of each.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Tests of `kv-disk`, which take their numbers from the environment.
const CAMPAIGNS: &[&str] = &["faults", "seal", "kills", "fuzz"];

/// Runs every campaign in the release profile, and prints the time of each.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for test in CAMPAIGNS {
        cargo_test(test, &["--no-run"], args)?;
        let start = Instant::now();
        let passed = cargo_test(test, &["--", "--nocapture"], args);
        println!("kv-disk {test}: {:.1} s", start.elapsed().as_secs_f64());
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
        ("KV_DISK_SEEDS", args.seeds.to_string()),
        ("KV_DISK_KILLS", args.kills.to_string()),
        ("KV_DISK_FUZZ_SECONDS", args.fuzz_seconds.to_string()),
        ("KV_DISK_SEED", args.seed.to_string()),
    ];
    cargo::test("kv-disk", test, &[&["--all-features"], rest].concat(), &variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn campaigns_are_tests_of_the_workspace() {
        let packages = cargo::packages().unwrap();
        let found = packages.iter().find(|package| package.name == "kv-disk").unwrap();
        for test in CAMPAIGNS {
            assert!(found.targets_of("test").any(|target| target == *test), "{test}");
        }
    }
}
