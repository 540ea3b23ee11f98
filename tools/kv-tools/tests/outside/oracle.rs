//! The policies on the public conversation trace of the Mooncake project, against published figures.
//!
//! The trace is not part of the project. It is read from the file that `KV_TRACE` names, or else from a folder beside the
//! workspace. If neither exists, these trials are listed as ignored. A file that `KV_TRACE` names must exist.

use std::path::{Path, PathBuf};

use kv_replay::trace::Trace;
use kv_tools::policies::{hit_rates, parse_capacities};
use libtest_mimic::{Failed, Trial};

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

pub(crate) fn trials() -> Vec<Trial> {
    let path = trace_path();
    let absent = path.is_none();
    // Read only when a trial runs, so that a missing or broken file fails a trial instead of the
    // listing.
    let recency = path.unwrap_or_default();
    let published = recency.clone();
    let trials = [
        Trial::test("lru_and_belady_equal_the_oracle", move || {
            compare(&recency, &["lru", "belady", "lru_block"], &RECENCY_AND_OPTIMUM)
        }),
        Trial::test("slru_s3fifo_and_arc_equal_the_oracle", move || {
            compare(&published, &["s3fifo", "arc", "slru"], &PUBLISHED_POLICIES)
        }),
    ];
    // A listing shows the kind beside the name. It says why a trial is ignored.
    let trials = trials.map(|trial| {
        let trial = trial.with_ignored_flag(absent);
        if absent {
            trial.with_kind("no conversation trace here; name one by KV_TRACE")
        } else {
            trial
        }
    });
    trials.into()
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
