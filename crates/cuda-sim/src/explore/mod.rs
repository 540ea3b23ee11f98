//! Runs a small program under all orders that the device could take, or under many random orders.

mod choices;
mod schedule;
mod script;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) use choices::{Choices, Record};
pub use script::Script;

use crate::{SimConfig, SimConfigError, SimDriver};

/// The limits of an exploration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ExploreLimits {
    /// Maximum number of schedules to run.
    pub schedules_max: u64,
    /// Maximum number of varied decisions of one schedule. Later decisions take the first option.
    pub choices_max: usize,
}

impl Default for ExploreLimits {
    /// A million schedules of up to ten thousand decisions.
    fn default() -> Self {
        Self { schedules_max: 1_000_000, choices_max: 10_000 }
    }
}

/// The result of an exploration.
#[derive(Clone, Debug)]
pub struct Exploration {
    /// Number of schedules that were run.
    pub explored: u64,
    /// Whether these were all possible schedules. Always false after a failure, and for random
    /// schedules.
    pub complete: bool,
    /// The largest number of decisions in one schedule.
    pub choices_most: usize,
    /// The first schedule under which the program failed. The exploration ends there.
    pub failure: Option<Box<FailedSchedule>>,
}

impl Exploration {
    /// Panics with the failing schedule, if there is one. For tests.
    ///
    /// # Panics
    /// When the program failed under one schedule.
    #[track_caller]
    pub fn assert_passed(&self) {
        if let Some(failure) = &self.failure {
            panic!("{failure}");
        }
    }
}

/// A schedule under which a program failed, and how to reproduce it.
///
/// Its `Display` prints the reason, the script and all that ran, in order.
#[derive(Clone, Debug)]
pub struct FailedSchedule {
    /// The number of the schedule in the exploration, from 1.
    pub number: u64,
    /// The seed, if the schedule was random.
    pub seed: Option<u64>,
    /// The script for [`replay`].
    pub script: Script,
    /// The program's error, its panic message, or the first finding of the device.
    pub reason: String,
    /// The host's calls and the device's operations, in order.
    pub schedule: Vec<String>,
}

impl fmt::Display for FailedSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "schedule {} failed: {}", self.number, self.reason)?;
        if let Some(seed) = self.seed {
            writeln!(f, "seed {seed}")?;
        }
        write!(f, "script {}", self.script)?;
        for (index, line) in self.schedule.iter().enumerate() {
            write!(f, "\n{:>4}  {line}", index + 1)?;
        }
        Ok(())
    }
}

/// The result of replaying one schedule.
#[derive(Clone, Debug)]
pub struct Replay {
    /// How the program ended.
    pub outcome: Result<(), String>,
    /// The host's calls and the device's operations, in order.
    pub schedule: Vec<String>,
}

/// Runs `program` under every order in which the device could run its work, depth first.
///
/// Each run gets a new machine of `config`. After each enqueue, wait or query of the host, the
/// device may fall behind, or run one or more ready operations of any stream. So the orders include
/// a host that runs far ahead, and a device that runs each operation at once. The device may also
/// advance just before a query, but not between the query and its answer. If a program polls in a
/// loop, two polls are answered "not ready" before an operation runs, so that the loop ends.
///
/// A schedule fails if the program returns an error, if it panics, or if the machine has a
/// [`Finding`](crate::Finding) at the end. The exploration ends at the first failure.
///
/// The program must be deterministic: one thread, no clock and no randomness of its own. Its
/// accesses to pinned memory between two driver calls count as one step; [`SimDriver::host_step`]
/// splits them.
///
/// # Errors
/// [`SimConfigError`] if the configuration cannot be simulated.
///
/// # Example
/// ```
/// use std::sync::Arc;
/// use cuda_driver::{Device, DeviceBuffer, HostAllocFlags, PinnedBuffer, Stream};
/// use cuda_sim::{ExploreLimits, SimConfig, SimDriver, explore};
///
/// /// Overwrites a buffer that a copy may still have to read.
/// fn reuse(sim: &SimDriver) -> Result<(), String> {
///     let copied = || -> Result<[u8; 1], Box<dyn std::error::Error>> {
///         let device = Device::open(Arc::new(sim.clone()), 0)?;
///         let stream = Stream::new(&device)?;
///         let memory = DeviceBuffer::alloc(&device, 1)?;
///         let mut host = PinnedBuffer::alloc(&device, 1, HostAllocFlags::CACHED)?;
///         host.write_at(0, &[1])?;
///         stream.copy_to_device(memory.span(), &host, 0)?;
///         host.write_at(0, &[2])?;
///         let mut arrived = [0];
///         stream.download(&mut arrived, memory.span())?;
///         Ok(arrived)
///     };
///     match copied().map_err(|error| error.to_string())? {
///         [1] => Ok(()),
///         other => Err(format!("{other:?} arrived")),
///     }
/// }
///
/// let found = explore(&SimConfig::default(), ExploreLimits::default(), reuse)?;
/// assert_eq!(found.failure.map(|failure| failure.reason), Some("[2] arrived".to_owned()));
/// # Ok::<(), cuda_sim::SimConfigError>(())
/// ```
pub fn explore(
    config: &SimConfig,
    limits: ExploreLimits,
    program: impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<Exploration, SimConfigError> {
    let mut found = Exploration { explored: 0, complete: false, choices_most: 0, failure: None };
    let mut cut = false;
    let mut next = Some(Vec::new());
    while let Some(script) = next {
        if found.explored == limits.schedules_max {
            return Ok(found);
        }
        let choices = Choices::scripted(script, limits.choices_max);
        let (outcome, record) = run(config, choices, &program)?;
        found.add(&record);
        if let Err(reason) = outcome {
            found.failure = Some(failed(config, &record, reason, found.explored, None, &program)?);
            return Ok(found);
        }
        cut |= record.cut;
        next = record.next_script();
    }
    found.complete = !cut;
    Ok(found)
}

/// Runs `program` under one random order for each of `seeds`, until one run fails.
///
/// Like [`explore`], for programs with too many possible orders. The seed also decides how often
/// the host runs ahead of the device, from always to never.
///
/// # Errors
/// [`SimConfigError`] if the configuration cannot be simulated.
pub fn explore_random(
    config: &SimConfig,
    seeds: Range<u64>,
    program: impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<Exploration, SimConfigError> {
    let mut found = Exploration { explored: 0, complete: false, choices_most: 0, failure: None };
    for seed in seeds {
        let (outcome, record) = run(config, Choices::random(seed), &program)?;
        found.add(&record);
        if let Err(reason) = outcome {
            let number = found.explored;
            found.failure = Some(failed(config, &record, reason, number, Some(seed), &program)?);
            break;
        }
    }
    Ok(found)
}

/// Runs `program` once more under the schedule of `script`, and records what happened in which
/// order.
///
/// # Errors
/// [`SimConfigError`] if the configuration cannot be simulated. The script of another program gives
/// an error in the [`Replay`].
pub fn replay(
    config: &SimConfig,
    script: &Script,
    program: impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<Replay, SimConfigError> {
    let choices = Choices::scripted(script.0.clone(), usize::MAX).with_trace();
    let (outcome, record) = run(config, choices, &program)?;
    let outcome = match record.misfit {
        Some(misfit) => Err(format!(
            "the script belongs to another program: decision {} is {} of {} options",
            misfit.position + 1,
            misfit.chosen,
            misfit.options
        )),
        None => outcome,
    };
    Ok(Replay { outcome, schedule: record.trace })
}

impl Exploration {
    fn add(&mut self, record: &Record) {
        self.explored += 1;
        self.choices_most = self.choices_most.max(record.taken.len());
    }
}

/// Runs one schedule of `program` on a new machine.
fn run(
    config: &SimConfig,
    choices: Choices,
    program: &impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<(Result<(), String>, Record), SimConfigError> {
    let sim = SimDriver::new(config.clone())?;
    sim.state().scheduler.explore(choices);
    // Unwind safety: each run has a new machine, so later runs see no state of a run that panicked,
    // except what the program itself shares with its surroundings.
    let ended = catch_unwind(AssertUnwindSafe(|| program(&sim)));
    let outcome = match ended {
        Ok(Ok(())) => match sim.findings().first() {
            Some(finding) => Err(finding.to_string()),
            None => Ok(()),
        },
        Ok(Err(reason)) => Err(reason),
        Err(payload) => Err(panic_message(payload.as_ref())),
    };
    let record = sim.state().scheduler.take_record();
    Ok((outcome, record))
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    format!("the program panicked: {}", text.as_deref().unwrap_or("without a message"))
}

/// Runs a failing schedule again, to record what happened.
fn failed(
    config: &SimConfig,
    record: &Record,
    mut reason: String,
    number: u64,
    seed: Option<u64>,
    program: &impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<Box<FailedSchedule>, SimConfigError> {
    let script = Script(record.taken.iter().map(|taken| taken.chosen).collect());
    let again = replay(config, &script, program)?;
    if again.outcome.is_ok() {
        reason.push_str(" (but not when run again: the program is not deterministic)");
    }
    Ok(Box::new(FailedSchedule { number, seed, script, reason, schedule: again.schedule }))
}
