//! `cargo xtask simulate`: long campaigns of random schedules on the simulated device.

use std::time::Instant;

use anyhow::bail;

use crate::cargo;

/// Options of `cargo xtask simulate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of random schedules of each program. At most four times as many orders of each small
    /// program are tried.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    schedules: u64,
    /// Seed of the first schedule.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Tests that take the number of schedules from `KV_SCHEDULES` and the first seed from `KV_SEED`.
const CAMPAIGNS: &[(&str, &str)] = &[("kv-stage", "schedules")];

/// Runs every campaign in the release profile, and prints the time of each.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for (package, test) in CAMPAIGNS {
        cargo_test(package, test, &["--no-run"], args)?;
        let start = Instant::now();
        let passed = cargo_test(package, test, &["--", "--nocapture"], args);
        let seconds = start.elapsed().as_secs_f64();
        println!("{package} {test}: {} schedules, {seconds:.1} s", args.schedules);
        if let Err(error) = passed {
            println!("{error:#}");
            failed.push(format!("{package} {test}"));
        }
    }
    if !failed.is_empty() {
        bail!(
            "failed: {}; a failure names the seed and the script that it replays from",
            failed.join(", ")
        );
    }
    Ok(())
}

fn cargo_test(package: &str, test: &str, rest: &[&str], args: &Args) -> anyhow::Result<()> {
    let variables =
        [("KV_SCHEDULES", args.schedules.to_string()), ("KV_SEED", args.seed.to_string())];
    cargo::test(package, test, &[&["--quiet"], rest].concat(), &variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn campaigns_are_tests_of_the_workspace() {
        let packages = cargo::packages().unwrap();
        for (package, test) in CAMPAIGNS {
            let found = packages.iter().find(|other| other.name == *package).unwrap();
            assert!(found.targets_of("test").any(|target| target == *test), "{package} {test}");
        }
    }
}
