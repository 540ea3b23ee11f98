//! The policies on the public conversation trace of the Mooncake project, against published figures, and samples of
//! other formats as they are published.
//!
//! The files are not part of the project. The trace is read from the file that `KV_TRACE` names, or else
//! from a folder beside the workspace, and so are the samples. If neither exists, these trials are listed as ignored. A
//! file that `KV_TRACE` names must exist.

use std::path::{Path, PathBuf};

use kv_replay::policies::{hit_rates, parse_capacities};
use kv_replay::trace::Trace;
use libtest_mimic::{Arguments, Failed, Trial};

/// Hit rates to four decimals: capacity, `lru`, `belady`, `lru_block`.
const RECENCY_AND_OPTIMUM: [(&str, [f64; 3]); 6] = [
    ("1000", [0.0445, 0.1906, 0.0445]),
    ("3000", [0.0652, 0.2944, 0.0650]),
    ("10000", [0.2115, 0.3664, 0.2112]),
    ("30000", [0.3257, 0.3664, 0.3257]),
    ("50000", [0.3546, 0.3664, 0.3546]),
    ("100000", [0.3637, 0.3664, 0.3637]),
];

/// Hit rates to four decimals: capacity, `s3fifo`, `arc`, `slru`.
const PUBLISHED_POLICIES: [(&str, [f64; 3]); 4] = [
    ("1000", [0.0573, 0.0529, 0.0488]),
    ("3000", [0.0940, 0.0871, 0.0820]),
    ("10000", [0.1982, 0.2251, 0.2182]),
    ("30000", [0.3061, 0.3108, 0.3289]),
];

fn main() {
    let args = Arguments::from_args();
    let path = trace_path();
    let absent = path.is_none();
    // Read only when a trial runs, so that a missing or broken file fails a trial instead of the
    // listing.
    let path = path.unwrap_or_default();
    let (figures, recency, published) = (path.clone(), path.clone(), path);
    let trials = vec![
        Trial::test("the_trace_has_its_published_size", move || sizes(&figures)),
        Trial::test("lru_and_belady_equal_the_oracle", move || {
            compare(&recency, &["lru", "belady", "lru_block"], &RECENCY_AND_OPTIMUM)
        }),
        Trial::test("slru_s3fifo_and_arc_equal_the_oracle", move || {
            compare(&published, &["s3fifo", "arc", "slru"], &PUBLISHED_POLICIES)
        }),
    ];
    let samples = [("azure_conv_sample.csv", AZURE), ("weka_session.json.gz", WEKA)];
    let samples = samples.map(|(name, expected)| {
        let path = beside(name);
        let trial = Trial::test(format!("{name}_is_read_whole"), move || sample(&path, expected));
        trial.with_ignored_flag(!beside(name).is_file())
    });
    // A listing shows the kind beside the name. It says why a trial is ignored.
    let trials = trials.into_iter().map(|trial| {
        let trial = trial.with_ignored_flag(absent);
        if absent {
            trial.with_kind("no conversation trace here; name one by KV_TRACE")
        } else {
            trial
        }
    });
    libtest_mimic::run(&args, trials.chain(samples).collect()).exit();
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

fn compare(path: &Path, names: &[&str; 3], expected: &[(&str, [f64; 3])]) -> Result<(), Failed> {
    let trace = Trace::read(path)?;
    for (capacity, rates) in expected {
        let report = hit_rates(&trace, &parse_capacities(capacity)?);
        for (name, rate) in names.iter().zip(rates) {
            let found = report.capacities[0].hit_rate(name).map(|rate| format!("{rate:.4}"));
            same(&format!("{name} at {capacity}"), found, Some(format!("{rate:.4}")))?;
        }
    }
    Ok(())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), Failed> {
    if found == expected {
        Ok(())
    } else {
        Err(format!("{what}: found {found:?}, expected {expected:?}").into())
    }
}
