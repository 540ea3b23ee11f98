//! Fault drills: worker processes that are stopped for a while, or killed, in a given step.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A worker that is stopped before it gets the plan of a step, and continued once the manager has waited for
/// it for so long.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StopWorker {
    /// The worker, counted from 0.
    pub worker: u16,
    /// The step, or the first one staged after it.
    pub step: u64,
    /// How long the manager waits before the worker goes on.
    pub wait: Duration,
}

/// A worker that is killed when it has been sent the plan of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KillWorker {
    /// The worker, counted from 0.
    pub worker: u16,
    /// The step, or the first one staged after it.
    pub step: u64,
}

/// A text that is no fault drill.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("{found:?} is no drill; expected {expected}")]
pub struct UnknownDrill {
    /// The text.
    pub found: String,
    /// The form.
    pub expected: &'static str,
}

cuda_driver::messages::one_line_debug!(UnknownDrill);

impl FromStr for StopWorker {
    type Err = UnknownDrill;

    fn from_str(text: &str) -> Result<Self, UnknownDrill> {
        let read = || {
            let (kill, wait_ms) = text.split_once(':')?;
            let (worker, step) = at(kill)?;
            Some(Self { worker, step, wait: Duration::from_millis(wait_ms.parse().ok()?) })
        };
        let expected = "WORKER@STEP:MILLISECONDS, such as 1@20:500";
        read().ok_or_else(|| UnknownDrill { found: text.to_owned(), expected })
    }
}

impl FromStr for KillWorker {
    type Err = UnknownDrill;

    fn from_str(text: &str) -> Result<Self, UnknownDrill> {
        let read = at(text).map(|(worker, step)| Self { worker, step });
        let expected = "WORKER@STEP, such as 1@20";
        read.ok_or_else(|| UnknownDrill { found: text.to_owned(), expected })
    }
}

impl fmt::Display for StopWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}", self.worker, self.step, self.wait.as_millis())
    }
}

impl fmt::Display for KillWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.worker, self.step)
    }
}

/// `WORKER@STEP`. Steps are counted from 1.
pub(super) fn at(text: &str) -> Option<(u16, u64)> {
    let (worker, step) = text.split_once('@')?;
    Some((worker.parse().ok()?, step.parse().ok().filter(|&step| step > 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drills_are_read_and_written_alike() {
        let stop: StopWorker = "1@20:500".parse().unwrap();
        assert_eq!((stop.worker, stop.step, stop.wait.as_millis()), (1, 20, 500));
        let kill: KillWorker = "3@1".parse().unwrap();
        assert_eq!((stop.to_string(), kill.to_string()), ("1@20:500".into(), "3@1".into()));
    }

    #[test]
    fn what_is_no_drill_is_named() {
        for text in ["", "1", "1@", "1@0", "@2", "1@2:", "x@2:3", "1@2:3:4", "-1@2:3"] {
            assert!(text.parse::<StopWorker>().is_err(), "{text:?}");
        }
        let error = "1@0".parse::<KillWorker>().unwrap_err();
        let expected = "\"1@0\" is no drill; expected WORKER@STEP, such as 1@20";
        assert_eq!(error.to_string(), expected);
    }
}
