//! `cargo xtask removals`: takes out the protections that `guard!` names in the sources, one at a time,
//! and checks that the test that `crates/*/tests/removals.toml` gives for each then fails.
//!
//! All are tried with one build, which has every protection and the switches that take them out.

mod list;
mod trial;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::nightly::Shard;
use crate::tidy::Files;
use crate::{cargo, services};
pub(crate) use list::{Removal, guards, read};
use trial::{Outcome, Programs};

/// Options of `cargo xtask removals`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Tests only the removals that the tests of these crates notice [default: all].
    #[arg(long, value_name = "CRATE")]
    package: Vec<String>,
    /// Tests only removals whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Tests the K-th of N equal parts.
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Seconds after which a test counts as hanging. A hanging test is a failure of this task: a
    /// test must fail.
    #[arg(long, default_value_t = 120)]
    timeout_s: u64,
}

/// Removes every protection that `args` selects, and fails if a removal goes unnoticed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    services::provide();
    let mut removals = read(&Files::read(&cargo::workspace_root())?)?;
    removals.retain(|one| {
        let is_of = args.package.is_empty() || args.package.contains(&one.package);
        is_of && args.only.as_ref().is_none_or(|text| one.name.contains(text.as_str()))
    });
    let removals = args.shard.unwrap_or_default().of(removals);
    if removals.is_empty() {
        let (packages, text) = (args.package.join(", "), args.only.as_deref().unwrap_or_default());
        bail!("no removal of the crates [{packages}] (all, if empty) has the text {text:?}");
    }
    let programs = Programs::build(&removals, Duration::from_secs(args.timeout_s))?;
    let (next, unnoticed, count) = (AtomicUsize::new(0), Mutex::new(Vec::new()), removals.len());
    let work = || {
        while let Some(removal) = removals.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let outcome = programs.take_out(removal);
            println!("{removal}: {outcome}, {:.0} s", start.elapsed().as_secs_f64());
            if outcome != Outcome::Noticed {
                let mut unnoticed = unnoticed.lock().unwrap_or_else(PoisonError::into_inner);
                unnoticed.push(format!("{removal}: {outcome}"));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let unnoticed = unnoticed.into_inner().unwrap_or_else(PoisonError::into_inner);
    match unnoticed.len() {
        0 => println!("all {count} were noticed"),
        missed => {
            let mut text = format!("{missed} of {count} went unnoticed, or could not be tried:");
            for line in unnoticed {
                let _ = write!(text, "\n    {line}");
            }
            bail!(text);
        }
    }
    Ok(())
}
