//! The engine: an overlap scheduler over the whole stack.
//!
//! The host prepares one iteration while the device works on the previous one. In each iteration:
//!
//! 1. the checksums of the iteration before the previous one have arrived and are compared;
//! 2. requests whose last token was compared are released;
//! 3. waiting requests are admitted in the order of the trace, as many in one batch as the budget
//!    allows, while the batch and the pool have room; the engine does not wait for arrival times,
//!    but the pool's clock shows them. With [`open_loop`](RunConfig::open_loop) a request waits only
//!    once it has arrived, by the virtual time of simulated devices or else by the host's;
//! 4. every running request writes its next tokens within the iteration's budget: one token if it
//!    is generating, otherwise a piece of its prompt;
//! 5. block tables, lengths, slots and keys are staged; the transfer kernel writes the tokens; and
//!    a kernel reads the whole KV of every running request through the staged table.
//!
//! If there is no block for a request's next token, the request that was admitted last is preempted
//! and computed again later.

mod arrivals;
mod batch;
mod cache;
mod chance;
mod content;
mod drafts;
mod error;
mod expected;
mod groups;
mod handover;
mod live;
mod memory;
mod model;
mod passing;
mod recorder;
mod scheduler;
mod stores;
mod tiers;
mod verify;
mod work;
pub mod workers;

use std::sync::Arc;
use std::time::Instant;

use cuda_driver::guard;
use cuda_driver::{Driver as _, Stream};
use cuda_sim::Pace;
use kv_kernels::{
    KvKernels,
    link::{MeasureOptions, TransportProfile},
};
use kv_multigpu::place::Placement;
use kv_plane::manager::{GroupId, Manager};
use kv_plane::{
    CloseError, CloseErrors, Growth, HostPinning, KvCache, KvCacheOptions, PoolRules,
    TransportChoice, TransportRules, Worker, WorkerOptions,
};
use kv_pool::clock::Clock;

use crate::config::{ConfigError, Progress, ProgressState, RunConfig};
use crate::device::OpenDevices;
use crate::place::{self, Division, place};
use crate::report::RunReport;
use crate::trace::Trace;
use arrivals::Arrivals;
use cache::{Compute, Local};
pub use error::{AdmitError, MeasureError, RunError};
use handover::Handover;
use model::Model;
use recorder::Recorder;
pub use scheduler::GRID_TOKENS;
use scheduler::Scheduler;

/// Number of iterations that the host is ahead of the device.
const OVERLAP_DEPTH: u32 = 1;

/// Number of iterations after which no more pinned memory may be allocated.
const WARMUP_ITERATIONS: u64 = 4;

/// Replays `trace` on `devices`, and returns the results. Corrupt blocks are not an error: the
/// report contains them.
pub fn run(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    run_with(config, trace, devices, progress, |_| ())
}

/// The same over a cache that `prepare` may change first.
pub fn run_with(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
    prepare: impl FnOnce(&KvCache),
) -> Result<RunReport, RunError> {
    let begun = Instant::now();
    let cache = build_cache(config, trace, devices)?;
    prepare(&cache);
    let setup_s = begun.elapsed().as_secs_f64();
    Ok(RunReport { setup_s, ..run_on(cache, config, trace, devices, progress)? })
}

pub fn build_cache(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
) -> Result<KvCache, RunError> {
    check_run(config, devices.devices.len(), trace)?;
    let blocks = blocks_of_longest(config, trace);
    let placement = match devices.devices.as_slice() {
        [_] => None,
        // The heads of one group only can be divided over the devices of one process.
        several if config.has_groups() && config.place == Division::Heads => {
            let (place, devices) = (config.place, several.len());
            return Err(ConfigError::PlacedGroups { place, devices }.into());
        }
        // Groups are divided over the devices one by one.
        _ if config.has_groups() => None,
        several => Some(place(config, several)?),
    };
    let shared = groups::shared(config, devices.devices.len())?;
    let growth = match shared {
        Some(_) => Growth::OnDemand,
        None => growth(config, blocks, devices)?,
    };
    let options = options(config, blocks, devices, placement, 0)?;
    let options = groups::sharing(options, shared);
    let streams = devices.devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
    let mut cache = KvCache::new(&streams, KvCacheOptions { growth, ..options })?;
    // A replay measures steps, not the start.
    cache.wait_for_host().map_err(kv_plane::BuildError::from)?;
    Ok(cache)
}

fn blocks_of_longest(config: &RunConfig, trace: &Trace) -> u64 {
    let tokens =
        trace.requests.iter().map(|entry| entry.input_length.saturating_add(entry.output_length));
    tokens.max().unwrap_or(1).div_ceil(config.block_tokens.into())
}

/// The options of a cache for a model on `devices`, whose requests have up to `blocks` blocks. Memory is
/// mapped on demand.
fn options(
    config: &RunConfig,
    blocks: u64,
    devices: &OpenDevices,
    placement: Option<Placement>,
    worker: u64,
) -> Result<KvCacheOptions, RunError> {
    let transport = transport(config, devices)?;
    let clock = passing::pool_clock(config, devices.sim.is_some(), &devices.clock);
    let common = common_options(config, blocks, &transport.profiles, clock)?;
    Ok(KvCacheOptions {
        placement,
        transport,
        // Simulated runs are the same each time.
        pinning: match devices.driver.name() {
            "cuda" => HostPinning::BACKGROUND,
            _ => HostPinning::AT_ONCE,
        },
        tiers: tiers::tiers(config, worker)?,
        step_arrays: work::arrays(config),
        ..common
    })
}

/// What the options of all caches of a run have in common, whose requests have up to `blocks` blocks. `links` to host memory
/// are those that were measured.
fn common_options(
    config: &RunConfig,
    blocks: u64,
    links: &[TransportProfile],
    clock: Arc<dyn Clock>,
) -> Result<KvCacheOptions, RunError> {
    Ok(KvCacheOptions {
        sequences_max: config.max_batch,
        overlap_depth: OVERLAP_DEPTH,
        step_tokens_max: config.step_tokens,
        pool: PoolRules {
            eviction: config.policy.into(),
            host_eviction: config.policy.into(),
            store: stores::host_store(config, links)?,
            events: tiers::events(config),
            clock: Some(clock),
            ..PoolRules::default()
        },
        ..KvCacheOptions::of(groups::all(config, blocks)?)
    })
}

pub fn run_on(
    cache: KvCache,
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    check_run(config, devices.devices.len(), trace)?;
    // One thread drives all devices. The other devices' contexts are made current for whole runs of
    // calls.
    match devices.devices.first() {
        Some(first) => first.while_current(|| play(cache, config, trace, devices, progress))?,
        None => play(cache, config, trace, devices, progress),
    }
}

fn play(
    cache: KvCache,
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    if config.open_loop {
        arrivals::check(trace)?;
    }
    let (begun, begun_simulated) = (Instant::now(), devices.driver.virtual_now());
    let mut report = RunReport::new(config, &devices.description)?;
    report.requests_skipped = trace.skipped;
    report.requests = trace.requests.len() as u64;
    let placement = cache.options().placement.as_ref();
    report.placement = placement.map(|placement| place::report(config.place, placement));
    let worker = cache.options().growth.worker().cloned();
    let mut local = Local::new(cache)?;
    if let Some(node) = &config.node {
        node.share(&mut local.cache)?;
    }
    memory::begin(&mut report, config, local.cache.manager())?;
    let sim = devices.sim.as_ref();
    let model = Model::new(config, sim, local.cache.parts())?;
    let streams: Vec<_> = local.cache.parts().iter().map(|part| part.compute().raw()).collect();
    let mut scheduler = Scheduler::new(local, config, trace, devices.clock.clone())?;
    if config.series {
        let sim = sim.map(|sim| (Arc::clone(sim), streams));
        scheduler.recorder = Recorder::on(sim, "device", config.block_bytes()?);
    }
    if let Some(sim) = sim.filter(|_| config.is_timed()) {
        // The host sees steps and copies complete when they would on the machine of the profile.
        sim.set_pace(Pace::Timed);
    }
    scheduler.real = passing::is_real(config, sim.is_some()).then(Instant::now);
    scheduler.model = model;
    scheduler.handover = Handover::start(config, &scheduler.cache.cache)?;
    // Time begins when all is there.
    scheduler.arrivals = config.open_loop.then(|| Arrivals::new(sim.cloned()));
    let played = iterate(&mut scheduler, worker.as_ref(), devices, &mut report, progress)
        .and_then(|()| scheduler.end_transfers());
    tiers::note(&mut report, config, scheduler.manager());
    scheduler.handover.note(&mut report);
    let generated = report.generated_tokens;
    report.series = std::mem::take(&mut scheduler.recorder).finish().map(Box::new);
    let arrivals = scheduler.arrivals.as_ref();
    report.open_loop = arrivals.map(|arrivals| arrivals.report(config, generated));
    arrivals.into_iter().for_each(|arrivals| arrivals.tell_tenants(trace, &mut report.tenants));
    let cache = scheduler.into_cache().cache;
    note_moves(&mut report, &cache);
    // Also after a failure: closing waits for enqueued work, and releases the memory.
    let ended = guard!(
        "replay.failure-closes",
        played.and(close(cache)),
        else played.and_then(|()| close(cache))
    );
    if let Some(worker) = worker {
        worker.close();
    }
    if let Err(error) = ended.and_then(|()| check_findings(devices)) {
        return Err(match report.corrupt_blocks {
            0 => error,
            _ => guard!(
                "replay.corrupt-outweighs-failure",
                RunError::Corrupted { report: Box::new(report), source: Box::new(error) },
                else error
            ),
        });
    }
    let calls = devices.driver.calls().into_iter();
    report.driver_calls = calls.map(|(name, count)| (name.to_owned(), count)).collect();
    let simulated = begun_simulated.zip(devices.driver.virtual_now());
    report.predicted_s = simulated.map(|(begun, ended)| ended.saturating_sub(begun).as_secs_f64());
    report.wall_s = begun.elapsed().as_secs_f64();
    Ok(report)
}

fn iterate(
    scheduler: &mut Scheduler<'_, impl Compute>,
    worker: Option<&Worker>,
    devices: &OpenDevices,
    report: &mut RunReport,
    progress: &mut dyn Progress,
) -> Result<(), RunError> {
    let mut pinned_before = None;
    while scheduler.has_work() {
        // A worker without a thread works between iterations, so that every run is the same.
        if let Some(worker) = worker.filter(|_| devices.sim.is_some()) {
            while worker.poll() {}
        }
        scheduler.iterate(report)?;
        if report.iterations >= WARMUP_ITERATIONS {
            let pinned_bytes = devices.driver.pinned_bytes_allocated();
            let before = *pinned_before.get_or_insert(pinned_bytes);
            report.pinned_bytes_allocated_after_warmup = Some(pinned_bytes - before);
        }
        progress.update(&state_of(report, scheduler));
    }
    Ok(())
}

fn note_moves(report: &mut RunReport, cache: &KvCache) {
    note_decisions(report, cache.manager());
    let moved = cache.stats();
    report.bytes_transferred += moved.copied_bytes;
    report.add_transports(&cache.stats().transports);
    report.pages_mapped_ahead = moved.pages_ahead;
    report.pages_mapped_inline = moved.pages_inline;
    report.growth_stalls = moved.growth_stalls;
}

fn note_decisions(report: &mut RunReport, manager: &Manager) {
    let decided = manager.stats();
    report.blocks_offloaded = decided.offloaded_blocks;
    let pool = manager.pool(GroupId(0));
    let counters = pool.map(|pool| pool.counters()).unwrap_or_default();
    report.blocks_evicted = counters.evicted;
    report.stores.blocks_refused = counters.refused;
    report.stores.blocks_regretted = counters.regretted;
    report.blocks_onboarded = decided.onboarded_blocks;
    report.blocks_copied_on_write = decided.copied_on_write;
    report.blocks_suspended = decided.suspended_blocks;
}

/// The transport of blocks. On GPUs the fastest one is measured. On simulated devices it follows
/// from the device attributes, because a measurement would time this machine.
fn transport(config: &RunConfig, devices: &OpenDevices) -> Result<TransportRules, RunError> {
    let choice = config.transport;
    let measures = choice == TransportChoice::Quickest && config.host_blocks > 0;
    let mut profiles: Vec<TransportProfile> = Vec::new();
    for device in devices.devices.iter().filter(|_| measures && devices.sim.is_none()) {
        let measured = KvKernels::load(device).map_err(MeasureError::from).and_then(|kernels| {
            Ok(TransportProfile::measure(&Arc::new(kernels), &MeasureOptions::default())?)
        });
        let name = || device.info().name.clone();
        let unmeasured = |source| RunError::Measure { device: name(), source: Box::new(source) };
        profiles.push(measured.map_err(unmeasured)?);
    }
    Ok(TransportRules { choice, profiles, ..TransportRules::default() })
}

/// The options of growth ahead of need: as many blocks as one iteration may claim, that is one
/// request of the maximum length, and a block for each of the others. On GPUs a thread maps them;
/// on simulated devices [`run_on`] does, because a thread would make runs differ.
fn growth(config: &RunConfig, blocks: u64, devices: &OpenDevices) -> Result<Growth, RunError> {
    let blocks = blocks.saturating_add(config.max_batch.into()).min(config.device_blocks);
    let worker = match devices.sim {
        Some(_) => Worker::manual(),
        None => Worker::spawn(WorkerOptions::default())?,
    };
    Ok(Growth::Ahead { blocks: counted("--device-blocks", blocks)?, worker })
}

/// Checks a trace and options that a caller may have built by hand.
fn check_run(config: &RunConfig, devices: usize, trace: &Trace) -> Result<(), RunError> {
    config.check()?;
    config.check_devices(devices)?;
    for (request, entry) in trace.requests.iter().enumerate() {
        entry
            .check(trace.block_tokens)
            .map_err(|problem| RunError::Request { request, problem })?;
    }
    Ok(config.check_trace(trace)?)
}

fn counted(what: &'static str, value: u64) -> Result<u32, RunError> {
    u32::try_from(value).map_err(|_| RunError::TooLarge { what, value })
}

fn state_of(report: &RunReport, scheduler: &Scheduler<'_, impl Compute>) -> ProgressState {
    ProgressState {
        requests: report.requests,
        finished: report.finished,
        running: scheduler.running() as u64,
        iterations: report.iterations,
        corrupt_blocks: report.corrupt_blocks,
        verified_blocks: report.verified_blocks,
        device_blocks_in_use: scheduler.blocks_in_use(),
        hit_rate: report.hit_rate,
    }
}

fn close(cache: KvCache) -> Result<(), RunError> {
    closed(cache.close())
}

fn closed<T>(closed: Result<T, CloseErrors>) -> Result<T, RunError> {
    closed.map_err(|errors| {
        let count = errors.len();
        match errors.into_iter().next() {
            Some(CloseError::Worker(failed)) => failed.into(),
            Some(first) => RunError::Close { count, source: Box::new(first) },
            None => {
                RunError::Close { count, source: Box::new(CloseError::NotAtRest { ordinal: -1 }) }
            }
        }
    })
}

fn check_findings(devices: &OpenDevices) -> Result<(), RunError> {
    let findings = devices.sim.as_ref().map(|sim| sim.findings()).unwrap_or_default();
    match findings.first() {
        Some(first) => Err(RunError::Findings { count: findings.len(), first: first.to_string() }),
        None => Ok(()),
    }
}
