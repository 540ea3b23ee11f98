//! A run whose devices belong to worker processes: one manager decides, and each worker carries out its plans
//! on one device.
//!
//! The process of the run schedules, and has a [`Manager`] and no driver. It starts a process for each
//! worker, a program that calls [`serve`]. Plans, snapshots and completions pass as the bytes of
//! `kv-manager`, over the pipes of the process. With each plan goes what an engine tells its workers itself: the keys
//! of the tokens, slots, lengths, how many drafts are right, and whether to read. Checksums come back, and are compared by the
//! process of the run.
//!
//! A step counts when all workers have completed it. A worker that ends, says what cannot be read, or is
//! silent for too long is killed, and a new process takes its place. It begins with the block table and no
//! content: every request is computed again.

mod drill;
mod error;
mod fleet;
mod frame;
mod member;
mod serve;
mod setup;

use std::time::{Duration, Instant};

use kv_cache::kv_manager::{GroupId, Manager, ManagerOptions};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_place::Placement;
use kv_pool::clock::ManualClock;
use kv_pool::{PoolConfig, Tier};
use std::sync::Arc;

use super::cache::Cache as _;
use super::scheduler::Scheduler;
use super::{OVERLAP_DEPTH, RunError, blocks_of_longest, counted, state_of};
use crate::config::{ConfigError, Progress, RunConfig};
use crate::device::{DeviceSpec, SimSizes};
use crate::place::{self, Division, place_apart};
use crate::report::{RunReport, WayReport};
use crate::shape::KV_COUNT;
use crate::trace::Trace;
pub use drill::{KillWorker, StopWorker, UnknownDrill};
#[cfg(all(feature = "sabotage", debug_assertions))]
pub use drill::{Misbehave, Wrong};
pub use error::{FrameError, WorkerFault};
use fleet::{Fleet, Place};
pub use member::WorkerCommand;
use member::{Deadline, Member};
pub use serve::{ServeError, ServeOptions, serve};
use setup::{Memory, Open, Opened, Share};

/// Most worker processes.
pub const WORKERS_MAX: u16 = 64;

/// The worker processes of a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkersConfig {
    /// Number of workers, from 1 to [`WORKERS_MAX`].
    pub workers: u16,
    /// How their processes are started.
    pub command: WorkerCommand,
    /// Their devices: simulated ones, each process having one of its own; or GPUs, of which worker `i` takes
    /// number `i`, and the first again behind the last.
    pub device: DeviceSpec,
    /// The timing profile of simulated devices.
    pub profile: Option<String>,
    /// After how long without progress a worker is given up; more than 0.
    pub timeout: Duration,
    /// Workers to be stopped for a while.
    pub stops: Vec<StopWorker>,
    /// Workers to be killed.
    pub kills: Vec<KillWorker>,
}

/// Replays `trace` with worker processes, and returns the results. `prepare` may change the manager before the
/// first step. Corrupt blocks are not an error: the report contains them.
///
/// # Errors
///
/// [`RunError`].
pub fn run(
    config: &RunConfig,
    workers: &WorkersConfig,
    trace: &Trace,
    progress: &mut dyn Progress,
    prepare: impl FnOnce(&Manager),
) -> Result<RunReport, RunError> {
    let begun = Instant::now();
    check(config, workers, trace)?;
    let clock = ManualClock::new();
    let started = start(config, workers, trace, &clock)?;
    prepare(started.fleet.manager());
    let mut report = RunReport::new(config, &started.description)?;
    report.requests = trace.requests.len() as u64;
    report.placement = started.placement.as_ref().map(|made| place::report(config.place, made));
    report.setup_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let mut scheduler = Scheduler::new(started.fleet, config, trace, clock)?;
    let mut played = Ok(());
    while played.is_ok() && scheduler.has_work() {
        played = scheduler.iterate(&mut report);
        progress.update(&state_of(&report, &scheduler));
    }
    let ended = played.and_then(|()| finish(scheduler.into_cache(), &mut report));
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
    let stops = workers.stops.iter().map(|drill| (drill.worker, drill.to_string()));
    let kills = workers.kills.iter().map(|drill| (drill.worker, drill.to_string()));
    match stops.chain(kills).find(|(worker, _)| *worker >= number) {
        Some((_, drill)) => Err(RunError::DrillWorker { drill, workers: number }),
        None => Ok(()),
    }
}

/// What was started for a run.
struct Started {
    fleet: Fleet,
    placement: Option<Placement>,
    description: String,
}

/// Starts the processes, and divides the model over their devices.
fn start(
    config: &RunConfig,
    workers: &WorkersConfig,
    trace: &Trace,
    clock: &ManualClock,
) -> Result<Started, RunError> {
    let failed = |worker: usize| {
        move |source| RunError::Worker { worker: worker as u16, source: Box::new(source) }
    };
    let sizes = SimSizes::for_config(config);
    let open = |worker| Open {
        device: workers.device.to_string(),
        worker,
        profile: workers.profile.clone(),
        device_bytes: sizes.device_bytes,
        pinned_bytes: sizes.pinned_bytes,
        seed: config.seed,
    };
    let opens: Vec<_> = (0..workers.workers).map(open).collect();
    // All start at once.
    let started = opens.iter().enumerate();
    let started =
        started.map(|(worker, _)| Member::start(&workers.command).map_err(failed(worker)));
    let mut members = started.collect::<Result<Vec<_>, _>>()?;
    let mut opened = Vec::new();
    for (worker, (member, open)) in members.iter_mut().zip(&opens).enumerate() {
        let deadline = Deadline::after(workers.timeout);
        opened.push(fleet::open(member, open, deadline).map_err(failed(worker))?);
    }
    let (placement, shares) = shares(config, &opened, blocks_of_longest(config, trace))?;
    for (member, share) in members.iter().zip(&shares) {
        member.send(frame::of_value(frame::Kind::Share, share).into());
    }
    let mut memory = Memory { device_blocks: u64::MAX, host_blocks: u64::MAX };
    for (worker, member) in members.iter_mut().enumerate() {
        let deadline = Deadline::after(workers.timeout);
        let ready = fleet::ready(member, deadline).map_err(failed(worker))?;
        memory.device_blocks = memory.device_blocks.min(ready.device_blocks);
        memory.host_blocks = memory.host_blocks.min(ready.host_blocks);
    }
    let places = members.into_iter().zip(opens).zip(shares).map(|((member, open), share)| {
        let shape = shape(&share)?;
        Ok(Place::new(member, open, share, shape))
    });
    let plan = fleet::Plan {
        manager: manager(config, workers.workers, trace, clock, memory)?,
        workers: places.collect::<Result<Vec<_>, RunError>>()?,
        memory,
        command: workers.command.clone(),
        timeout: workers.timeout,
        eager: opened.iter().any(|opened| !opened.simulated),
        stops: workers.stops.clone(),
        kills: workers.kills.clone(),
    };
    let fleet = Fleet::new(plan);
    Ok(Started { fleet, placement, description: description(workers, &opened) })
}

fn description(workers: &WorkersConfig, opened: &[Opened]) -> String {
    let names: Vec<_> = opened.iter().map(|opened| opened.name.as_str()).collect();
    let groups = names.chunk_by(|a, b| a == b).map(|group| match group {
        [one] => (*one).to_owned(),
        many => format!("{} x {}", many.len(), many[0]),
    });
    let groups: Vec<_> = groups.collect();
    let processes = if names.len() == 1 { "worker process" } else { "worker processes" };
    format!("{} {processes}, {} ({})", names.len(), workers.device, groups.join(", "))
}

/// Divides the model over the workers' devices.
fn shares(
    config: &RunConfig,
    opened: &[Opened],
    blocks: u64,
) -> Result<(Option<Placement>, Vec<Share>), RunError> {
    let whole = (config.shape.layers, config.shape.kv_heads);
    if let [_] = opened {
        return Ok((None, vec![Share::new(config, whole.0, whole.1, blocks)]));
    }
    let free_bytes = |one: &Opened| {
        let here = |other: &&Opened| !one.simulated && other.ordinal == one.ordinal;
        one.free_bytes / (opened.iter().filter(here).count() as u64).max(1)
    };
    let free_bytes: Vec<_> = opened.iter().map(free_bytes).collect();
    let placement = place_apart(config, &free_bytes)?;
    if config.device_blocks > placement.kv_blocks_max() {
        let (blocks, fit) = (config.device_blocks, placement.kv_blocks_max());
        let options = kv_cache::OptionsError::PlacedTooMany { blocks, fit };
        return Err(RunError::Build(options.into()));
    }
    let share = |worker: usize| match (config.place, placement.shards()) {
        (Division::Heads, Some(shards)) => {
            let heads = shards.kv_heads_of(worker);
            Ok(Share::new(config, whole.0, (heads.end - heads.start) as u32, blocks))
        }
        _ => match placement.layers_on(worker).count() as u32 {
            0 => Err(RunError::WorkerWithoutLayers { worker: worker as u16 }),
            layers => Ok(Share::new(config, layers, whole.1, blocks)),
        },
    };
    let shares = (0..opened.len()).map(share).collect::<Result<_, _>>()?;
    Ok((Some(placement), shares))
}

/// The shape of a worker's share.
fn shape(share: &Share) -> Result<KvShape, RunError> {
    let config = share
        .config()
        .map_err(|error| RunError::Worker { worker: 0, source: Box::new(error.into()) })?;
    Ok(KvShape::new(KvShapeOptions {
        layers: share.layers,
        kv_count: KV_COUNT as u32,
        row_bytes: config.shape.row_bytes()?,
        block_tokens: config.block_tokens,
    })?)
}

/// The manager of a run, which hands out blocks that all workers have memory for.
fn manager(
    config: &RunConfig,
    workers: u16,
    trace: &Trace,
    clock: &ManualClock,
    memory: Memory,
) -> Result<Manager, RunError> {
    let (primary_blocks, secondary_blocks) = (config.device_blocks, config.host_blocks);
    let refused = |source| RunError::Build(kv_cache::BuildError::Manager(source));
    let options = ManagerOptions {
        block_tokens: config.block_tokens,
        pool: PoolConfig { primary_blocks, secondary_blocks, ..PoolConfig::default() },
        sequences_max: config.max_batch,
        blocks_per_sequence_max: counted(
            "the longest request, in blocks,",
            blocks_of_longest(config, trace),
        )?,
        workers,
        steps_in_flight_max: OVERLAP_DEPTH + 1,
        ..ManagerOptions::default()
    };
    let policy = || match config.policy {
        kv_pool::policy::PolicyKind::Lru => Ok(None),
        kind => kind.make(primary_blocks + secondary_blocks).map(Some),
    };
    let policy = || policy().map_err(|source| RunError::Build(source.into()));
    let policies = [(Tier::Primary, policy()?), (Tier::Secondary, policy()?)];
    let mut manager = Manager::with_pool(options, |builder| {
        let builder = builder.clock(Arc::new(clock.clone()));
        let made = policies.into_iter().filter_map(|(tier, made)| Some((tier, made?)));
        made.fold(builder, |builder, (tier, policy)| builder.policy(tier, policy))
    })
    .map_err(refused)?;
    let group = GroupId::default();
    manager.set_budget(group, Tier::Primary, memory.device_blocks.min(primary_blocks))?;
    if secondary_blocks > 0 {
        manager.set_budget(group, Tier::Secondary, memory.host_blocks.min(secondary_blocks))?;
    }
    Ok(manager)
}

/// Ends the processes, and records what they have done.
fn finish(fleet: Fleet, report: &mut RunReport) -> Result<(), RunError> {
    super::note_decisions(report, fleet.manager());
    let unused = fleet.unused_drill();
    let steps = fleet.manager().completed_step();
    let (accounts, workers) = fleet.close()?;
    let account = fleet::sum(accounts);
    report.bytes_transferred += account.copied_bytes;
    report.driver_calls = account.driver_calls;
    report.pinned_bytes_allocated_after_warmup = account.pinned_after_warmup;
    let names = kv_cache::TransportStats::default().by_name().map(|(name, _)| name);
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
