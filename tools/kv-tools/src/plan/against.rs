//! A plan beside what a run has measured.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Choice, ChoiceReport};
use crate::page::{ReportError, RunFile};

/// The reason why a plan cannot be compared with a run.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AgainstError {
    /// The file is not the report of a run.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The run has not measured latencies.
    #[error("{} has no latencies; write it with `kv-replay run --open-loop --json FILE`", path.display())]
    NoLatencies {
        /// The file.
        path: PathBuf,
    },
    /// There are several choices.
    #[error("{count} choices, of which a run can be one; give one of each list")]
    Choices {
        /// Their number.
        count: usize,
    },
    /// One of the two has files, and the other has none.
    #[error(
        "{} was run with {found} blocks in files, and the plan has {expected}; give --disk as much as --disk-bytes of the run",
        path.display()
    )]
    Files {
        /// The file.
        path: PathBuf,
        /// Blocks of the run.
        found: u64,
        /// Blocks of the plan.
        expected: u64,
    },
    /// The run had another size of cache.
    #[error(
        "{} was run with {found} blocks in device and host memory, and the plan has {expected}; give --device-blocks and --host-blocks of the run",
        path.display()
    )]
    Blocks {
        /// The file.
        path: PathBuf,
        /// Blocks of the run.
        found: u64,
        /// Blocks of the plan.
        expected: u64,
    },
}

cuda_driver::messages::one_line_debug!(AgainstError);

/// What a run has measured.
pub(super) struct Measured {
    name: String,
    hit_rate: f64,
    generated_tokens_per_s: f64,
    p50_ms: f64,
}

/// A figure by a plan and by a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Pair {
    /// By the plan.
    pub planned: f64,
    /// By the run.
    pub measured: f64,
}

/// A plan beside a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Against {
    /// The run.
    pub run: String,
    /// Share of the blocks that were found.
    pub hit_rate: Pair,
    /// Tokens generated in a second.
    pub generated_tokens_per_s: Pair,
    /// Half of the requests had their first token within this many milliseconds.
    pub time_to_first_token_p50_ms: Pair,
}

impl Measured {
    pub(super) fn read(path: &Path, choices: &[Choice]) -> Result<Self, AgainstError> {
        let [choice] = choices else {
            return Err(AgainstError::Choices { count: choices.len() });
        };
        let run = RunFile::read(path)?;
        let found = run.device_blocks.saturating_add(run.host_blocks);
        let expected = choice.device_blocks.saturating_add(choice.host_blocks);
        if found != expected {
            return Err(AgainstError::Blocks { path: path.to_owned(), found, expected });
        }
        let (found, expected) = (run.disk_slots, choice.disk_blocks);
        // A record in a file has more than its block.
        if (found > 0) != (expected > 0) {
            return Err(AgainstError::Files { path: path.to_owned(), found, expected });
        }
        let number = |field: &str, of: Option<&str>| {
            let value = run.open_loop.as_ref()?.get(field)?;
            of.map_or(Some(value), |of| value.get(of))?.as_f64()
        };
        let rate = number("generated_tokens_per_s", None);
        let p50 = number("time_to_first_token_ms", Some("p50"));
        let (Some(generated_tokens_per_s), Some(p50_ms)) = (rate, p50) else {
            return Err(AgainstError::NoLatencies { path: path.to_owned() });
        };
        let hit_rate = run.hit_rate();
        Ok(Self { name: run.name, hit_rate, generated_tokens_per_s, p50_ms })
    }

    pub(super) fn compare(&self, planned: &ChoiceReport) -> Against {
        let pair = |planned, measured| Pair { planned, measured };
        Against {
            run: self.name.clone(),
            hit_rate: pair(planned.hit_rate, self.hit_rate),
            generated_tokens_per_s: pair(
                planned.generated_tokens_per_s,
                self.generated_tokens_per_s,
            ),
            time_to_first_token_p50_ms: pair(planned.time_to_first_token_ms.p50, self.p50_ms),
        }
    }
}

impl Pair {
    /// By how much the plan is above the run, in percent of the run.
    fn percent(self) -> f64 {
        if self.measured == 0.0 { 0.0 } else { 100.0 * (self.planned / self.measured - 1.0) }
    }
}

impl fmt::Display for Against {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, hit_rate, generated_tokens_per_s: rate, time_to_first_token_p50_ms: first } =
            self;
        writeln!(f, "Against {run}:          planned    measured  difference")?;
        let (planned, measured) = (100.0 * hit_rate.planned, 100.0 * hit_rate.measured);
        writeln!(
            f,
            "  hit rate          {planned:>9.2} %{measured:>10.2} %{:>+8.2} points",
            planned - measured
        )?;
        for (name, pair) in [("tokens/s", rate), ("TTFT p50, ms", first)] {
            writeln!(
                f,
                "  {name:<18}{:>11.1}{:>12.1}{:>+8.1} %",
                pair.planned,
                pair.measured,
                pair.percent()
            )?;
        }
        Ok(())
    }
}
