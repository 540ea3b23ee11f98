//! The public conversation trace of the Mooncake project.
//!
//! The file is not part of the project. The trace is read from the file that `KV_TRACE` names, or else from a folder beside
//! the workspace. If neither exists, this trial is listed as ignored. A file that `KV_TRACE` names must exist.

use std::path::{Path, PathBuf};

use kv_replay::trace::Trace;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let path = trace_path();
    let absent = path.is_none();
    // Read only when the trial runs, so that a missing or broken file fails it instead of the listing.
    let path = path.unwrap_or_default();
    let trial = Trial::test("the_trace_has_its_published_size", move || sizes(&path));
    let trial = trial.with_ignored_flag(absent);
    // A listing shows the kind beside the name. It says why a trial is ignored.
    let trial = match absent {
        true => trial.with_kind("no conversation trace here; name one by KV_TRACE"),
        false => trial,
    };
    vec![trial]
}

/// The path of the trace, if one is expected to exist.
fn trace_path() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KV_TRACE") {
        return Some(PathBuf::from(named));
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let beside = folder.join("conversation_trace.jsonl");
    beside.is_file().then_some(beside)
}

fn sizes(path: &Path) -> Result<(), Failed> {
    let trace = Trace::read(path)?;
    let longest = trace.requests.iter().map(|request| request.hash_ids.len()).max();
    let found = (trace.requests.len(), trace.block_lookups(), longest);
    same("requests, lookups and blocks of the longest request", found, (12_031, 288_500, Some(247)))
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), Failed> {
    if found == expected {
        Ok(())
    } else {
        Err(format!("{what}: found {found:?}, expected {expected:?}").into())
    }
}
