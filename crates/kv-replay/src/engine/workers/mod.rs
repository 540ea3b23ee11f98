//! A run whose devices belong to worker processes: one manager decides, and each worker carries out its plans
//! on one device: a run over the library's [worker processes](kv_plane::processes).
//!
//! With each plan goes what an engine tells its workers itself: the keys
//! of the tokens, slots, lengths, how many drafts are right, and whether to read. Checksums come back, and are compared by the
//! process of the run.

mod codec;
mod drill;
mod fleet;
mod serve;
mod setup;
mod start;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kv_pool::clock::ManualClock;

use super::recorder::Recorder;
use super::scheduler::Scheduler;
use super::{RunError, memory, passing, state_of};
use crate::config::{ConfigError, Progress, RunConfig};
use crate::device::DeviceSpec;
use crate::place;
use crate::report::{RunReport, WayReport};
use crate::trace::Trace;
pub use drill::WorkerDrill;
use fleet::Fleet;
pub use serve::{ServeError, serve};
use start::start;

pub const WORKERS_MAX: u16 = 64;

/// How worker processes are started: a program that calls `serve`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkerCommand {
    pub program: PathBuf,
    pub args: Vec<String>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkersConfig {
    /// Number of workers, from 1 to [`WORKERS_MAX`].
    pub workers: u16,
    pub command: WorkerCommand,
    /// Their devices: simulated ones, each process having one of its own; or GPUs, of which worker `i` takes
    /// number `i`, and the first again behind the last.
    pub device: DeviceSpec,
    pub profile: Option<String>,
    /// After how long without progress a worker is given up; more than 0.
    pub timeout: Duration,
    pub drills: Vec<WorkerDrill>,
}

/// Replays `trace` with worker processes, and returns the results. Corrupt blocks are not an error: the report
/// contains them.
pub fn run(
    config: &RunConfig,
    workers: &WorkersConfig,
    trace: &Trace,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    let begun = Instant::now();
    check(config, workers, trace)?;
    let clock = ManualClock::new();
    let started = start(config, workers, trace, &clock)?;
    let mut report = RunReport::new(config, &started.description)?;
    report.requests_skipped = trace.skipped;
    memory::begin(&mut report, config, started.fleet.manager())?;
    report.requests = trace.requests.len() as u64;
    report.placement = started.placement.as_ref().map(|made| place::report(config.place, made));
    report.setup_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let mut scheduler = Scheduler::new(started.fleet, config, trace, clock)?;
    scheduler.real = passing::is_real(config, false).then(Instant::now);
    if config.series {
        scheduler.recorder = Recorder::on(None, "workers", config.block_bytes()?);
    }
    let mut played = Ok(());
    while played.is_ok() && scheduler.has_work() {
        played = scheduler.iterate(&mut report);
        progress.update(&state_of(&report, &scheduler));
    }
    let played = played.and_then(|()| scheduler.end_transfers());
    super::tiers::note(&mut report, config, scheduler.manager());
    report.series = std::mem::take(&mut scheduler.recorder).finish().map(Box::new);
    let ended = played.and_then(|()| finish(config, scheduler.into_cache(), &mut report));
    report.wall_s = begun.elapsed().as_secs_f64();
    match ended {
        Ok(()) => Ok(report),
        Err(error) if report.corrupt_blocks == 0 => Err(error),
        Err(source) => {
            Err(RunError::Corrupted { report: Box::new(report), source: Box::new(source) })
        }
    }
}

fn check(config: &RunConfig, workers: &WorkersConfig, trace: &Trace) -> Result<(), RunError> {
    let number = workers.workers;
    for (option, zero) in
        [("--workers", number == 0), ("--worker-timeout", workers.timeout.is_zero())]
    {
        if zero {
            return Err(ConfigError::Zero { option }.into());
        }
    }
    if number > WORKERS_MAX {
        let (option, value, limit) = ("--workers", number.into(), WORKERS_MAX.into());
        return Err(ConfigError::TooLarge { option, value, limit }.into());
    }
    super::check_run(config, number.into(), trace)?;
    config.check_untimed()?;
    match workers.drills.iter().find(|drill| drill.worker >= number) {
        Some(drill) => Err(RunError::DrillWorker { drill: drill.to_string(), workers: number }),
        None => Ok(()),
    }
}

fn finish(config: &RunConfig, fleet: Fleet, report: &mut RunReport) -> Result<(), RunError> {
    super::note_decisions(report, fleet.manager());
    let unused = fleet.drills.unused();
    let steps = fleet.manager().completed_step();
    let saved = super::tiers::saved_tokens(config, fleet.manager());
    let (accounts, workers) = fleet.close()?;
    let account = fleet::sum(accounts);
    if let Some(mut disk) = account.disk {
        disk.disk_saved_tokens = saved;
        report.disk = Some(disk);
    }
    report.bytes_transferred += account.copied_bytes;
    report.driver_calls = account.driver_calls;
    report.pinned_bytes_allocated_after_warmup = account.pinned_after_warmup;
    let names = kv_plane::TransportStats::default().by_name().map(|(name, _)| name);
    for (name, (batches, blocks)) in names.into_iter().zip(account.transports) {
        if blocks > 0 {
            report.transports.insert(name, WayReport { batches, blocks });
        }
    }
    report.workers = Some(workers);
    if let Some(drill) = unused {
        return Err(RunError::DrillUnused { drill, steps });
    }
    match account.findings {
        Some((count, first)) => Err(RunError::Findings { count, first }),
        None => Ok(()),
    }
}
