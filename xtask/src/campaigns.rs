//! `cargo xtask campaign`: random programs, schedules, faults and kills, far more of them than a test of the gate
//! tries.
//!
//! Each is a test that takes its numbers from environment variables. A variable that is set already stays.

use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use crate::{cargo, services};

/// Options of `cargo xtask campaign`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs only these campaigns [default: all].
    name: Vec<String>,
    /// Runs the long setting: hours instead of minutes.
    #[arg(long)]
    long: bool,
    /// The first seed. A failure names the seed to pass here.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Lists the campaigns, with the variables that they take.
    #[arg(long)]
    list: bool,
}

/// A variable, with its values for the short and the long setting.
type Variable = (&'static str, &'static str, &'static str);

/// Tests that are run with more than the gate gives them.
struct Campaign {
    name: &'static str,
    what: &'static str,
    package: &'static str,
    /// The test program, and the modules of it that are run.
    program: &'static str,
    modules: &'static [&'static str],
    /// The `--cfg` of a model checker, which replaces all synchronisation types of the crate.
    checker: Option<&'static str>,
    seed: Option<&'static str>,
    variables: &'static [Variable],
}

const CAMPAIGNS: &[Campaign] = &[
    Campaign {
        name: "loom",
        what: "all orders of small programs on the pool",
        package: "kv-pool",
        program: "loom",
        modules: &[],
        checker: Some("loom"),
        seed: None,
        variables: &[("KV_MODEL_DEEP", "0", "1")],
    },
    Campaign {
        name: "threads",
        what: "all orders of a device's thread and those who use it",
        package: "kv-multigpu",
        program: "loom",
        modules: &[],
        checker: Some("loom"),
        seed: None,
        variables: &[("KV_MODEL_DEEP", "0", "1")],
    },
    Campaign {
        name: "shuttle",
        what: "random orders of larger programs on the pool",
        package: "kv-pool",
        program: "shuttle",
        modules: &[],
        checker: Some("shuttle"),
        seed: Some("KV_MODEL_SEED"),
        variables: &[("KV_MODEL_DEEP", "0", "1")],
    },
    Campaign {
        name: "pool",
        what: "random operations of the pool against a naive reference",
        package: "kv-pool",
        program: "it",
        modules: &["model::"],
        checker: None,
        seed: Some("KV_MODEL_SEED"),
        variables: &[("KV_MODEL_DEEP", "0", "1")],
    },
    Campaign {
        name: "manager",
        what: "random lives of sequences, with workers that lag, against what each step should read",
        package: "kv-manager",
        program: "it",
        modules: &["model::"],
        checker: None,
        seed: Some("KV_MODEL_SEED"),
        variables: &[("KV_MODEL_DEEP", "0", "1")],
    },
    Campaign {
        name: "cache",
        what: "random schedules of whole caches, of one to four groups, to the byte",
        package: "kv-plane",
        program: "it",
        modules: &["cache::schedules::"],
        checker: None,
        seed: Some("KV_SEED"),
        variables: &[("KV_SCHEDULES", "2000", "100000")],
    },
    Campaign {
        name: "races",
        what: "random programs against the race detector",
        package: "cuda-sim",
        program: "it",
        modules: &["race_programs::"],
        checker: None,
        seed: Some("KV_SEED"),
        variables: &[("KV_PROGRAMS", "20000", "1000000")],
    },
    Campaign {
        name: "staging",
        what: "random schedules of staging",
        package: "kv-stage",
        program: "it",
        modules: &["schedules::"],
        checker: None,
        seed: Some("KV_SEED"),
        variables: &[("KV_SCHEDULES", "10000", "100000")],
    },
    Campaign {
        name: "disk",
        what: "random faults, kills and noise against the tier of files",
        package: "kv-disk",
        program: "it",
        modules: &["faults::", "seal::", "kills::", "fuzz::"],
        checker: None,
        seed: Some("KV_DISK_SEED"),
        variables: &[
            ("KV_DISK_SEEDS", "1000", "10000"),
            ("KV_DISK_KILLS", "100", "1000"),
            ("KV_DISK_FUZZ_SECONDS", "20", "60"),
        ],
    },
    Campaign {
        name: "remote",
        what: "races, dying members and noise against nodes that serve each other",
        package: "kv-remote",
        program: "it",
        modules: &["node::", "tier::", "fuzz::"],
        checker: None,
        seed: Some("KV_REMOTE_SEED"),
        variables: &[
            ("KV_REMOTE_SEEDS", "1000", "10000"),
            ("KV_REMOTE_RACE_SECONDS", "60", "600"),
            ("KV_REMOTE_FUZZ_SECONDS", "20", "60"),
            ("KV_REMOTE_NOISE", "1000", "10000"),
            ("KV_REMOTE_CHAOS", "100", "1000"),
        ],
    },
];

/// Runs the campaigns that `args` select, and prints the time of each.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    services::provide();
    let names: Vec<&str> = CAMPAIGNS.iter().map(|campaign| campaign.name).collect();
    if let Some(other) = args.name.iter().find(|other| !names.contains(&other.as_str())) {
        bail!("{other} is none of the campaigns, which are {}", names.join(", "));
    }
    let is_wanted = |name| args.name.is_empty() || args.name.iter().any(|other| other == name);
    let mut failed = Vec::new();
    for campaign in CAMPAIGNS.iter().filter(|campaign| is_wanted(campaign.name)) {
        if args.list {
            let variables: Vec<String> = campaign
                .variables
                .iter()
                .map(|(name, short, long)| format!("{name} {short} ({long})"))
                .collect();
            println!("{:>8}  {}: {}", campaign.name, campaign.what, variables.join(", "));
            continue;
        }
        campaign.cargo(args, &["--no-run"])?;
        let start = Instant::now();
        let passed = campaign.cargo(args, &[&["--"], campaign.modules, &["--nocapture"]].concat());
        println!("{}: {:.1} s", campaign.what, start.elapsed().as_secs_f64());
        if let Err(error) = passed {
            println!("{error:#}");
            failed.push(campaign.name);
        }
    }
    ensure!(failed.is_empty(), "failed: {}; a failure names its seed", failed.join(", "));
    Ok(())
}

impl Campaign {
    fn cargo(&self, args: &Args, rest: &[&str]) -> anyhow::Result<()> {
        let mut command = cargo::command();
        command
            .args(["test", "--quiet", "--profile", "campaign", "--all-features"])
            .args(["--package", self.package, "--test", self.program])
            .args(rest)
            .stdin(Stdio::null());
        let seed = args.seed.to_string();
        let seed = self.seed.map(|name| (name, seed.as_str()));
        let variables = self.variables.iter();
        let values =
            variables.map(|&(name, short, long)| (name, if args.long { long } else { short }));
        let unset = |&(name, _): &(&str, &str)| std::env::var_os(name).is_none();
        command.envs(values.chain(seed).filter(unset));
        if let Some(checker) = self.checker {
            // In separate folders; otherwise each build would discard the previous one.
            command.env("RUSTFLAGS", format!("--cfg {checker}"));
            command.env("CARGO_TARGET_DIR", cargo::target_folder().join(checker));
        }
        let status = command.status().context("cannot start Cargo")?;
        ensure!(status.success(), "{} of {} failed ({status})", self.program, self.package);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn campaigns_are_tests_of_their_crates() {
        let packages = cargo::packages().unwrap();
        for Campaign { package: name, program, .. } in CAMPAIGNS {
            let package = packages.iter().find(|package| package.name == *name).unwrap();
            let is_there = package.targets_of("test").any(|other| other == *program);
            assert!(is_there, "{program} of {name}");
        }
    }
}
