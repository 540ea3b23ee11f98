//! Samples of other formats as they are published.
//!
//! The files are not part of the project. They are read from a folder beside the workspace; the trial of one that is not
//! there is listed as ignored.

use std::path::{Path, PathBuf};

use kv_replay::trace::Trace;
use kv_tools::convert::{self, ConvertOptions};
use libtest_mimic::{Failed, Trial};

/// Tokens of an id, requests, prompt tokens and the last arrival in milliseconds, counted with another program.
type Size = (u64, usize, u64, u64);

const SAMPLES: [(&str, Size); 2] = [
    ("azure_conv_sample.csv", (512, 199, 179_552, 61_145)),
    ("weka_session.json.gz", (64, 53, 2_576_410, 1_002_533)),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trials = SAMPLES.map(|(name, expected)| {
        let path = beside(name);
        let trial = Trial::test(format!("{name}_is_read_whole"), move || sample(&path, expected));
        trial.with_ignored_flag(!beside(name).is_file())
    });
    trials.into()
}

/// A file in the folder beside the workspace.
fn beside(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(name)
}

fn sample(path: &Path, expected: Size) -> Result<(), Failed> {
    let Trace { block_tokens, requests, .. } = convert::read(path, &ConvertOptions::default())?;
    let tokens = requests.iter().map(|request| request.input_length).sum();
    let last_ms = requests.last().map_or(0, |request| request.timestamp_ms);
    let found = (block_tokens, requests.len(), tokens, last_ms);
    if found == expected {
        Ok(())
    } else {
        Err(format!("the size of the sample: found {found:?}, expected {expected:?}").into())
    }
}
