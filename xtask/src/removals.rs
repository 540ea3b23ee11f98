//! `cargo xtask removals`: removes the protections listed in `crates/*/tests/removals*.toml`, one
//! at a time, and checks that the tests named in the list fail without it.
//!
//! It works on a copy of the tree below the target folder, so an interrupted run leaves no changes
//! behind.

mod copy;
mod list;
mod trial;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::bail;

pub(crate) use copy::Copy;
pub(crate) use list::{Removal, read};
use trial::{Outcome, Tests};

use crate::tidy::Files;
use crate::{cargo, services};

/// Options of `cargo xtask removals`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Tests only the removals of these crates [default: all].
    #[arg(long, value_name = "CRATE")]
    package: Vec<String>,
    /// Tests only removals whose description contains this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Starts with the removal of this number, as counted in the output.
    #[arg(long, default_value_t = 1)]
    from: usize,
    /// Seconds after which a test counts as hanging. A hanging test is a failure of this task: a
    /// test must fail.
    #[arg(long, default_value_t = 120)]
    timeout_s: u64,
}

/// Removes every protection selected by `args`, and fails if a removal goes unnoticed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    services::provide();
    let files = Files::read(&cargo::workspace_root())?;
    let removals: Vec<Removal> =
        read(&files)?.into_iter().filter(|one| args.selects(one)).collect();
    if removals.is_empty() {
        let (packages, text) = (args.package.join(", "), args.only.as_deref().unwrap_or_default());
        bail!("no removal of the crates [{packages}] (all, if empty) has the text {text:?}");
    }
    let copy = Copy::of(&files, "removals")?;
    let mut tests = Tests::new(&copy, Duration::from_secs(args.timeout_s));
    let (mut unnoticed, count) = (Vec::new(), removals.len());
    for (index, removal) in removals.iter().enumerate().skip(args.from.saturating_sub(1)) {
        let start = Instant::now();
        let outcome = take_out(removal, &copy, &mut tests);
        let seconds = start.elapsed().as_secs_f64();
        println!("[{}/{count}] {removal}: {outcome}, {seconds:.0} s", index + 1);
        if !outcome.is_noticed() {
            unnoticed.push(format!("{removal}: {outcome}"));
        }
    }
    match unnoticed.len() {
        0 => println!("every one of them was noticed"),
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

/// Runs the removal's tests with the protection, where they must pass, and without it.
fn take_out(removal: &Removal, copy: &Copy, tests: &mut Tests<'_>) -> Outcome {
    let whole = tests.with_protection(removal);
    if !matches!(whole, Outcome::Unnoticed) {
        return Outcome::NotTried(format!("with the protection in: {whole}"));
    }
    let outcome = copy.write(&removal.path(), &removal.text_without).map(|()| tests.run(removal));
    let outcome = outcome.unwrap_or_else(|error| Outcome::NotTried(format!("{error:#}")));
    match copy.write(&removal.path(), &removal.text) {
        Ok(()) => outcome,
        Err(error) => Outcome::NotTried(format!("{error:#}")),
    }
}

impl Args {
    fn selects(&self, removal: &Removal) -> bool {
        let is_of = self.package.is_empty() || self.package.contains(&removal.package);
        is_of && self.only.as_ref().is_none_or(|text| removal.what.contains(text.as_str()))
    }
}
