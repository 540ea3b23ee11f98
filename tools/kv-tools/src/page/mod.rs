//! `kv-tools page`: the reports of runs as one HTML page that needs nothing else, and as a trace file.

mod findings;
mod html;
mod run_file;
mod trace_events;

use std::io;
use std::path::{Path, PathBuf};

use findings::{Summary, summarise};
use html::page;
pub(crate) use html::{document, escaped};
pub(crate) use run_file::RunFile;

use kv_replay::json_file::{WriteError, check_files, write_atomically, write_json};

/// Most runs on a page.
pub const RUNS_MAX: usize = 8;

/// The reason why a page was not written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// More runs than a page has room for, or none.
    #[error("{count} runs; a page has room for 1 to {RUNS_MAX}")]
    Runs {
        /// Their number.
        count: usize,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file is something else.
    #[error("{} is not the report of a run; write one with `kv-replay run --series --json FILE`", path.display())]
    NoReport {
        /// The file.
        path: PathBuf,
        /// What was expected.
        source: serde_json::Error,
    },
    /// The columns of a file do not fit each other.
    #[error("{} was changed: its series has columns of different lengths; write it again", path.display())]
    Torn {
        /// The file.
        path: PathBuf,
    },
    /// A result cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

cuda_driver::messages::one_line_debug!(ReportError);

/// What is to be made of which runs.
#[derive(Clone, Copy, Debug)]
pub struct ReportOptions<'a> {
    /// JSON reports of runs.
    pub runs: &'a [PathBuf],
    /// The page to be written.
    pub out: &'a Path,
    /// The trace file to be written.
    pub trace_events: Option<&'a Path>,
    /// The summaries as JSON.
    pub json: Option<&'a Path>,
}

/// Writes the page and what else is asked for, each completely or not at all, and returns what to print.
///
/// # Errors
///
/// [`ReportError`]. Nothing was written if an input is wrong.
pub fn run(options: &ReportOptions<'_>) -> Result<String, ReportError> {
    let ReportOptions { runs, out, trace_events: trace, json } = *options;
    if !(1..=RUNS_MAX).contains(&runs.len()) {
        return Err(ReportError::Runs { count: runs.len() });
    }
    let writes = std::iter::once(out).chain(trace).chain(json);
    check_files(runs.iter().map(PathBuf::as_path), writes)?;
    let runs = runs.iter().map(|path| RunFile::read(path)).collect::<Result<Vec<_>, _>>()?;
    let summaries: Vec<_> = runs.iter().map(summarise).collect();
    write_atomically(out, page(&runs, &summaries).as_bytes())?;
    if let Some(path) = trace {
        write_atomically(path, trace_events::trace_events(&runs).to_string().as_bytes())?;
    }
    if let Some(path) = json {
        write_json(path, &summaries)?;
    }
    let mut text = String::new();
    for (run, summary) in runs.iter().zip(&summaries) {
        text.push_str(&format!("{}: {} {}\n", run.name, summary.limited_by, summary.helps));
    }
    text.push_str(&format!("{} is written.\n", out.display()));
    Ok(text)
}
