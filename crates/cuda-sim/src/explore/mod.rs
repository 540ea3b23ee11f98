//! Running a small program under all orders that the device could take, or under many at random.

mod choices;
mod schedule;
mod script;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) use choices::Choices;
use choices::Record;
pub use script::{Script, ScriptError};

use crate::{SimConfig, SimConfigError, SimDriver};

/// How far an exploration goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ExploreLimits {
    /// Most schedules to run.
    pub schedules_max: u64,
    /// Most decisions of one schedule that are varied; later ones take the first option.
    pub choices_max: usize,
}

impl Default for ExploreLimits {
    /// A million schedules of up to ten thousand decisions.
    fn default() -> Self {
        Self { schedules_max: 1_000_000, choices_max: 10_000 }
    }
}

/// What an exploration found.
#[derive(Clone, Debug)]
pub struct Exploration {
    /// Schedules that were run.
    pub explored: u64,
    /// Whether those were all there are. Never so after a failure or of random schedules.
    pub complete: bool,
    /// Most decisions that one schedule took.
    pub choices_most: usize,
    /// The first schedule under which the program failed; exploration ends with it.
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

/// A schedule under which a program failed, and how to see it again.
///
/// Its `Display` is what to print: the reason, the script and everything that ran, in order.
#[derive(Clone, Debug)]
pub struct FailedSchedule {
    /// Its place among the schedules explored; 1 is the first.
    pub number: u64,
    /// The seed, of a random schedule.
    pub seed: Option<u64>,
    /// What [`replay`] takes.
    pub script: Script,
    /// What the program answered, or said when it panicked, or the first finding of the device.
    pub reason: String,
    /// What the host asked for and what the device ran, in order.
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

/// One schedule, run again.
#[derive(Clone, Debug)]
pub struct Replay {
    /// How the program ended.
    pub outcome: Result<(), String>,
    /// What the host asked for and what the device ran, in order.
    pub schedule: Vec<String>,
}

/// Runs `program` under every order in which the device could run its work, depth first.
///
/// Each run gets a new machine of `config`. Whenever the host has enqueued, waited or asked, the
/// device may fall behind or run any ready operation of any stream, and so on: orders in which the
/// host runs far ahead are explored, and those in which each operation runs at once. The device may
/// also advance just before the host asks, never between the question and the answer. A program that asks in
/// a loop whether work is done is told twice that it is not before something runs, so that it ends.
///
/// A schedule fails when the program answers an error, when it panics, or when the machine has a
/// [`Finding`](crate::Finding) at its end. The first failing one ends the exploration.
///
/// The program must do the same every time: one thread, no clock, no chance of its own. What it does
/// to pinned memory between two driver calls is one step here; [`SimDriver::host_step`] splits it.
///
/// # Errors
/// [`SimConfigError`] for a machine that cannot be simulated.
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

/// Runs `program` under one random order for each of `seeds`, until one fails.
///
/// As [`explore`], for programs with too many orders to take them all. How far the host tends to run
/// ahead of the device varies from seed to seed, from always to never.
///
/// # Errors
/// [`SimConfigError`] for a machine that cannot be simulated.
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

/// Runs `program` once more under the schedule of `script`, and tells what happened in which order.
///
/// # Errors
/// [`SimConfigError`] for a machine that cannot be simulated. A script of another program is an
/// error in the [`Replay`].
pub fn replay(
    config: &SimConfig,
    script: &Script,
    program: impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<Replay, SimConfigError> {
    let choices = Choices::scripted(script.0.clone(), usize::MAX).with_trace();
    let (outcome, record) = run(config, choices, &program)?;
    let outcome = match record.misfit {
        Some(misfit) => Err(format!(
            "the script is of another program: decision {} is {} of {} options",
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

/// One schedule of `program` on a new machine.
fn run(
    config: &SimConfig,
    choices: Choices,
    program: &impl Fn(&SimDriver) -> Result<(), String>,
) -> Result<(Result<(), String>, Record), SimConfigError> {
    let sim = SimDriver::new(config.clone())?;
    sim.state().choices = Some(Box::new(choices));
    // The program sees nothing of a run that panicked: the machine is new each time, and what it
    // borrows from its surroundings it shares.
    let ended = catch_unwind(AssertUnwindSafe(|| program(&sim)));
    let outcome = match ended {
        Ok(Ok(())) => match sim.findings().first() {
            Some(finding) => Err(finding.to_string()),
            None => Ok(()),
        },
        Ok(Err(reason)) => Err(reason),
        Err(payload) => Err(panic_message(payload.as_ref())),
    };
    let record = sim.state().take_choices();
    Ok((outcome, record))
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    format!("the program panicked: {}", text.as_deref().unwrap_or("without a message"))
}

/// Runs a failing schedule again, to tell what happened.
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
        reason.push_str(" (but not when run again: the program does not always do the same)");
    }
    Ok(Box::new(FailedSchedule { number, seed, script, reason, schedule: again.schedule }))
}
