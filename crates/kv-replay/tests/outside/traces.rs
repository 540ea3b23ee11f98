//! The public conversation trace of the Mooncake project, and samples of other formats as they are published.
//!
//! The files are not part of the project. The trace is read from the file that `KV_TRACE` names, or else
//! from a folder beside the workspace, and so are the samples. If neither exists, these trials are listed as ignored. A
//! file that `KV_TRACE` names must exist.

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
    let samples = [("azure_conv_sample.csv", AZURE), ("weka_session.json.gz", WEKA)];
    let samples = samples.map(|(name, expected)| {
        let path = beside(name);
        let trial = Trial::test(format!("{name}_is_read_whole"), move || sample(&path, expected));
        trial.with_ignored_flag(!beside(name).is_file())
    });
    [trial].into_iter().chain(samples).collect()
}

/// The path of the trace, if one is expected to exist.
fn trace_path() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KV_TRACE") {
        return Some(PathBuf::from(named));
    }
    let beside = beside("conversation_trace.jsonl");
    beside.is_file().then_some(beside)
}

/// A file in the folder beside the workspace.
fn beside(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(name)
}

/// Tokens of an id, requests, prompt tokens and the last arrival in milliseconds, counted with another program.
type Size = (u64, usize, u64, u64);

const AZURE: Size = (512, 199, 179_552, 61_145);
const WEKA: Size = (64, 53, 2_576_410, 1_002_533);

fn sample(path: &Path, expected: Size) -> Result<(), Failed> {
    let Trace { block_tokens, requests, .. } = Trace::read(path)?;
    let tokens = requests.iter().map(|request| request.input_length).sum();
    let last_ms = requests.last().map_or(0, |request| request.timestamp_ms);
    same("the size of the sample", (block_tokens, requests.len(), tokens, last_ms), expected)
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
