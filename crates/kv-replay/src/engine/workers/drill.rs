//! Fault drills: worker processes that are stopped for a while, or killed, in a given step.

use std::fmt;
use std::time::Duration;

/// A worker that is stopped before it gets the plan of a step, and continued once the manager has waited for
/// it for so long.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StopWorker {
    pub worker: u16,
    /// The step, or the first one staged after it.
    pub step: u64,
    pub wait: Duration,
}

/// A worker that is killed when it has been sent the plan of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KillWorker {
    pub worker: u16,
    /// The step, or the first one staged after it.
    pub step: u64,
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
