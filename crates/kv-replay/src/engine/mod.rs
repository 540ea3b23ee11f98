//! The engine: plays an overlap scheduler over the whole stack.
//!
//! The host prepares one iteration while the device works on the one before. In each iteration
//!
//! 1. the checksums of the iteration before the last have arrived and are compared;
//! 2. requests whose last token was compared are released;
//! 3. waiting requests are admitted, in the order of the trace, those that the budget has room for in one
//!    batch, while the batch and the pool have room: arrival times are not waited for, but they are what the
//!    pool's clock shows;
//! 4. every running request writes its next tokens: one if it is generating, a piece of its prompt
//!    otherwise, within the iteration's budget;
//! 5. block tables, lengths, slots and keys are staged; the tokens are written by the transfer kernel;
//!    and all of every running request's KV is read through the staged table.
//!
//! A request that finds no block for its next token makes room by preempting the one admitted last,
//! which is computed again later.

mod batch;
mod content;
mod expected;
mod live;
mod scheduler;
mod verify;
mod work;

use std::sync::Arc;
use std::time::Instant;

use cuda_driver::{CopyError, DeviceError, Driver as _, ModuleError, Stream};
use kv_cache::{
    AdmitError, BuildError, CloseError, Growth, KvCache, KvCacheOptions, PoolRules, SealError,
    SlotError, StepError, TransportChoice, TransportRules, Worker, WorkerOptions,
};
use kv_kernels::{
    KernelError, KvKernels, KvShape, KvShapeOptions,
    link::{MeasureOptions, TransportError, TransportProfile},
};

use crate::config::{ConfigError, Progress, ProgressState, RunConfig};
use crate::device::OpenDevices;
use crate::place::{self, PlaceError, place};
use crate::report::RunReport;
use crate::shape::{KV_COUNT, ShapeError};
use crate::trace::{LineProblem, Trace};
use scheduler::Scheduler;

/// How many iterations the host is ahead of the device.
const OVERLAP_DEPTH: u32 = 1;

/// Iterations after which no pinned memory may be allocated any more.
const WARMUP_ITERATIONS: u64 = 4;

/// Why a run ended early.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The run cannot be as it was asked for.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A request breaks what every line of a trace promises.
    #[error("request {request}, counted from 0: {problem}")]
    Request {
        /// The request.
        request: usize,
        /// What is wrong with it.
        problem: LineProblem,
    },
    /// The shape cannot be laid out.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The kernels cannot work with the shape.
    #[error("the kernels cannot work with the shape")]
    KernelShape(#[from] kv_kernels::error::ShapeError),
    /// A number is larger than the cache can count.
    #[error("{what} is {value}, more than the cache can count")]
    TooLarge {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The tokens of an iteration have more bytes than 64 bits can count.
    #[error("an iteration of {tokens} tokens has more bytes than 64 bits can count")]
    ChunkOverflow {
        /// Tokens of an iteration.
        tokens: u64,
    },
    /// The engine's own buffers could not be allocated.
    #[error("no {bytes} bytes for {what}")]
    Buffers {
        /// What they were to hold, and the option that sizes it.
        what: &'static str,
        /// Their size.
        bytes: u64,
        /// What the device answered.
        source: DeviceError,
    },
    /// The cache could not be built.
    #[error("the KV cache could not be built")]
    Build(#[from] BuildError),
    /// The model could not be placed on the devices.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The ways between a device and host memory could not be measured.
    #[error("the link between {device} and host memory could not be measured")]
    Measure {
        /// The device.
        device: String,
        /// Why.
        source: Box<MeasureError>,
    },
    /// The thread that maps memory ahead of need could not be started.
    #[error("growth ahead of need could not begin")]
    Worker(#[from] kv_cache::SpawnError),
    /// A request could not be admitted or extended, and waiting would not help.
    #[error("request {request} could not be given blocks")]
    Admit {
        /// The request, counted from 0.
        request: usize,
        /// Why.
        source: AdmitError,
    },
    /// A step failed.
    #[error("an iteration failed")]
    Step(#[from] StepError),
    /// A kernel was not launched.
    #[error("a kernel was not launched")]
    Kernel(#[from] KernelError),
    /// A copy was not enqueued.
    #[error("a copy was not enqueued")]
    Copy(#[from] CopyError),
    /// Slots could not be named.
    #[error("a slot mapping was refused")]
    Slots(#[from] SlotError),
    /// Blocks could not be shared.
    #[error("blocks could not be made findable")]
    Seal(#[from] SealError),
    /// The device refused.
    #[error("the device refused")]
    Device(#[from] DeviceError),
    /// The cache could not be closed.
    #[error("the KV cache could not be closed in full ({count} refusals)")]
    Close {
        /// How many refusals there were.
        count: usize,
        /// The first.
        source: Box<CloseError>,
    },
    /// Bytes were found that do not belong to their request, and then the run failed.
    #[error("{} corrupt blocks were found before the run failed", report.corrupt_blocks)]
    Corrupted {
        /// What was found until then.
        report: Box<RunReport>,
        /// Why the run failed.
        source: Box<RunError>,
    },
    /// The simulated device saw work that a real one might not survive.
    #[error("the simulated device has {count} findings, the first: {first}")]
    Findings {
        /// How many.
        count: usize,
        /// The first of them.
        first: String,
    },
}

cuda_driver::messages::one_line_debug!(RunError);

/// Why a link could not be measured.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The kernels could not be loaded.
    #[error("the kernels could not be loaded")]
    Kernels(#[from] ModuleError),
    /// A transfer or an allocation was refused.
    #[error("a transfer was refused")]
    Transfer(#[from] TransportError),
}

cuda_driver::messages::one_line_debug!(MeasureError);

/// Replays `trace` on `devices`, and says what was found. Corrupt blocks are no error: they are in the
/// report.
///
/// # Errors
///
/// [`RunError`].
///
/// # Examples
///
/// ```
/// use kv_replay::config::RunConfig;
/// use kv_replay::device::{SimSizes, open};
/// use kv_replay::engine;
/// use kv_replay::generate::{GenerateOptions, generate};
///
/// let trace = generate(&GenerateOptions { requests: 4, seed: 1 })?;
/// let config = RunConfig::default();
/// let devices = open(&"sim".parse()?, SimSizes::for_config(&config))?;
/// let report = engine::run(&config, &trace, &devices, &mut ())?;
/// assert_eq!((report.finished, report.corrupt_blocks), (4, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn run(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    let begun = Instant::now();
    let cache = build_cache(config, trace, devices)?;
    let setup_s = begun.elapsed().as_secs_f64();
    Ok(RunReport { setup_s, ..run_on(cache, config, trace, devices, progress)? })
}

/// The cache that a run of `trace` needs.
///
/// # Errors
///
/// [`RunError`], when the devices refuse or have too little memory.
pub fn build_cache(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
) -> Result<KvCache, RunError> {
    check(config, trace, devices)?;
    let shape = KvShape::new(KvShapeOptions {
        layers: config.shape.layers,
        kv_count: KV_COUNT as u32,
        row_bytes: config.shape.row_bytes()?,
        block_tokens: config.block_tokens,
    })?;
    let tokens =
        trace.requests.iter().map(|entry| entry.input_length.saturating_add(entry.output_length));
    let blocks = tokens.max().unwrap_or(1).div_ceil(config.block_tokens.into());
    let step_tokens = u64::from(config.step_tokens);
    let placement = match devices.devices.as_slice() {
        [_] => None,
        several => Some(place(config, several)?),
    };
    let options = KvCacheOptions {
        shape,
        placement,
        device_blocks: counted("--device-blocks", config.device_blocks)?,
        growth: growth(config, blocks, devices)?,
        host_blocks: counted("--host-blocks", config.host_blocks)?,
        transport: transport(config, devices)?,
        sequences_max: config.max_batch,
        blocks_per_sequence_max: counted("the longest request, in blocks,", blocks)?,
        overlap_depth: OVERLAP_DEPTH,
        // A length for each sequence, a slot and a key for each token, each array aligned.
        step_array_bytes: u64::from(config.max_batch) * 4 + step_tokens * 16 + 3 * 256,
        memory: Default::default(),
        pool: PoolRules {
            eviction: config.policy.into(),
            host_eviction: config.policy.into(),
            clock: Some(Arc::new(devices.clock.clone())),
            ..PoolRules::default()
        },
    };
    let streams = devices.devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
    Ok(KvCache::new(&streams, options)?)
}

/// As [`run`], with a cache from [`build_cache`].
///
/// # Errors
///
/// [`RunError`].
pub fn run_on(
    cache: KvCache,
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    check(config, trace, devices)?;
    // One thread drives all devices. The others' contexts are made current for whole stretches of calls.
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
    let begun = Instant::now();
    let begun_virtual = devices.driver.virtual_now();
    let mut report = RunReport::new(config, &devices.description)?;
    report.requests = trace.requests.len() as u64;
    let placement = cache.options().placement.as_ref();
    report.placement = placement.map(|placement| place::report(config.place, placement));
    let mut scheduler = Scheduler::new(cache, config, trace, devices.clock.clone())?;
    let worker = scheduler.cache().options().growth.worker().cloned();
    let played = iterate(&mut scheduler, worker.as_ref(), devices, &mut report, progress);
    let cache = scheduler.into_cache();
    note_moves(&mut report, &cache);
    // Also after a failure: closing waits for what was enqueued, and gives the memory back.
    let ended = played.and(close(cache));
    if let Some(worker) = worker {
        worker.close();
    }
    if let Err(error) = ended.and_then(|()| check_findings(devices)) {
        return Err(match report.corrupt_blocks {
            0 => error,
            _ => RunError::Corrupted { report: Box::new(report), source: Box::new(error) },
        });
    }
    report.driver_calls =
        devices.driver.calls().into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
    let ended_virtual = devices.driver.virtual_now();
    report.predicted_s = begun_virtual
        .zip(ended_virtual)
        .map(|(begun, ended)| ended.saturating_sub(begun).as_secs_f64());
    report.wall_s = begun.elapsed().as_secs_f64();
    Ok(report)
}

/// Plays iterations until no request is left.
fn iterate(
    scheduler: &mut Scheduler<'_>,
    worker: Option<&Worker>,
    devices: &OpenDevices,
    report: &mut RunReport,
    progress: &mut dyn Progress,
) -> Result<(), RunError> {
    let mut warm_pinned_bytes = None;
    while scheduler.has_work() {
        // A worker without a thread works between iterations, so that every run is the same.
        if let Some(worker) = worker.filter(|_| devices.sim.is_some()) {
            while worker.poll() {}
        }
        scheduler.iterate(report)?;
        let pinned_bytes = devices.driver.pinned_bytes_allocated();
        if report.iterations >= WARMUP_ITERATIONS {
            let warm_pinned_bytes = *warm_pinned_bytes.get_or_insert(pinned_bytes);
            report.pinned_bytes_allocated_after_warmup = Some(pinned_bytes - warm_pinned_bytes);
        }
        progress.update(&state_of(report, scheduler));
    }
    Ok(())
}

/// Takes down what the cache has moved and mapped.
fn note_moves(report: &mut RunReport, cache: &KvCache) {
    let counters = cache.pool().counters();
    let moved = cache.stats();
    report.blocks_evicted = counters.evicted;
    report.blocks_offloaded = moved.offloaded_blocks;
    report.blocks_onboarded = moved.onboarded_blocks;
    report.bytes_transferred += moved.copied_bytes;
    report.add_transports(&cache.transports());
    report.pages_mapped_ahead = moved.pages_ahead;
    report.pages_mapped_inline = moved.pages_inline;
    report.growth_stalls = moved.growth_stalls;
}

/// How blocks travel. What is the quickest way GPUs are asked; simulated ones are assumed to be as their
/// attributes say, for what is measured on them would be this machine's.
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

/// Growth ahead of need by what one iteration may claim: a request of the greatest length and a block
/// for each of the others. By a thread on GPUs; on simulated devices by [`run_on`], for a thread would
/// make every run another.
fn growth(config: &RunConfig, blocks: u64, devices: &OpenDevices) -> Result<Growth, RunError> {
    let blocks = blocks.saturating_add(config.max_batch.into()).min(config.device_blocks);
    let worker = match devices.sim {
        Some(_) => Worker::manual(),
        None => Worker::spawn(WorkerOptions::default())?,
    };
    Ok(Growth::Ahead { blocks: counted("--device-blocks", blocks)?, worker })
}

/// Refuses what a caller made by hand and never checked.
fn check(config: &RunConfig, trace: &Trace, devices: &OpenDevices) -> Result<(), RunError> {
    config.check()?;
    config.check_devices(devices.devices.len())?;
    for (request, entry) in trace.requests.iter().enumerate() {
        entry.check().map_err(|problem| RunError::Request { request, problem })?;
    }
    Ok(config.check_trace(trace)?)
}

fn counted(what: &'static str, value: u64) -> Result<u32, RunError> {
    u32::try_from(value).map_err(|_| RunError::TooLarge { what, value })
}

fn state_of(report: &RunReport, scheduler: &Scheduler<'_>) -> ProgressState {
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
    cache.close().map_err(|errors| {
        let count = errors.len();
        match errors.into_iter().next() {
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
