//! The results of a run, as a record for programs and as a summary for people.

mod latency;
mod summary;
pub(crate) mod tenants;

use std::collections::BTreeMap;

use kv_plane::TransportStats;
use serde::Serialize;

pub use latency::queue_growth;
pub use latency::{LatencyReport, OVERLOADED, OpenLoopReport};
pub use summary::{bytes, grouped};

use crate::config::{RunConfig, Verify};
use crate::disk::DiskReport;
use crate::memory::MemoryReport;
use crate::nodes::{HandoverReport, NodeReport};
use crate::place::PlaceReport;
use crate::series::Series;
use crate::shape::{Dtype, ShapeError};
pub use tenants::TenantReport;

/// Maximum number of corrupt blocks kept with all details. Further ones are only counted.
pub const CORRUPTIONS_KEPT_MAX: usize = 32;

/// The results of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunReport {
    pub requests: u64,
    /// Number of requests that the trace's file has besides, and that could not be used; absent if it has none.
    #[serde(skip_serializing_if = "is_zero")]
    pub requests_skipped: u64,
    /// Number of requests that finished.
    pub finished: u64,
    /// Number of blocks looked up in the prefix index.
    pub block_lookups: u64,
    /// Number of lookups that hit, in device or host memory.
    pub block_hits: u64,
    /// Share of lookups that hit, from 0 to 1.
    pub hit_rate: f64,
    /// Number of blocks whose device memory was reused for other content.
    pub blocks_evicted: u64,
    /// Number of blocks copied from device to host memory.
    pub blocks_offloaded: u64,
    /// What of the evicted blocks was not stored.
    #[serde(flatten)]
    pub stores: StoresReport,
    /// Number of blocks copied from host back to device memory.
    pub blocks_onboarded: u64,
    /// The requested transport between device and host memory.
    pub transport: &'static str,
    /// Batches and blocks of each transport, by its name. Unused transports are omitted.
    pub transports: BTreeMap<&'static str, WayReport>,
    /// Bytes transferred between host and device, or moved within a device.
    pub bytes_transferred: u64,
    pub iterations: u64,
    /// Number of prompt tokens of the finished requests.
    pub prompt_tokens: u64,
    /// Number of tokens generated for them.
    pub generated_tokens: u64,
    /// Number of prompt tokens that were not written because the cache held them.
    pub prefix_tokens_reused: u64,
    /// Number of batches in which requests were admitted.
    pub admissions: u64,
    /// The largest number of requests admitted in one batch.
    pub most_admitted_at_once: u64,
    /// Number of times that a request was preempted to make room for others.
    pub preemptions: u64,
    /// Number of times that tokens of a request were staged before the ids of its last step were known.
    pub staged_behind_open_ids: u64,
    /// Number of tokens that a draft model has computed.
    pub draft_model_tokens: u64,
    pub cancelled: u64,
    /// Number of branches that forks made.
    pub forks: u64,
    /// Number of times that the budget of device blocks was changed.
    pub budget_changes: u64,
    /// The fewest device blocks with memory after the first budget. Where groups share memory, see
    /// [`fewest_granules`](crate::memory::SharedReport::fewest_granules) instead.
    pub fewest_device_blocks: u64,
    /// Number of times that a request was suspended to host memory.
    pub suspensions: u64,
    /// Number of blocks copied within the device because a fork shared them.
    pub blocks_copied_on_write: u64,
    /// Number of blocks of suspended requests copied to host memory.
    pub blocks_suspended: u64,
    /// Number of blocks that were read back and compared.
    pub verified_blocks: u64,
    /// Number of these that held a byte which does not belong to their request.
    pub corrupt_blocks: u64,
    /// The first [`CORRUPTIONS_KEPT_MAX`] corrupt blocks.
    pub corruptions: Vec<CorruptBlock>,
    /// Pinned host memory allocated after the first four iterations, in bytes; 0 in a steady state.
    /// `None` for a run with fewer iterations, which has no steady state.
    pub pinned_bytes_allocated_after_warmup: Option<u64>,
    /// Number of pages of device memory mapped ahead of need.
    pub pages_mapped_ahead: u64,
    /// Number of pages of device memory mapped by the call that needed them.
    pub pages_mapped_inline: u64,
    /// Number of calls that found too few ready blocks and mapped pages themselves.
    pub growth_stalls: u64,
    /// The device memory that blocks in use took.
    pub memory: Option<MemoryReport>,
    /// The tier below host memory; `None` without one.
    pub tiers: Option<TiersReport>,
    /// The files below host memory; absent without any.
    #[serde(flatten)]
    pub disk: Option<DiskReport>,
    /// What each tenant's requests had, by its name; absent if the trace has none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tenants: BTreeMap<String, TenantReport>,
    /// Latencies; `None` unless requests waited for their arrival.
    pub open_loop: Option<OpenLoopReport>,
    /// The blocks that nodes keep for each other; absent in a run of one process.
    #[serde(flatten)]
    pub remote: Option<NodeReport>,
    /// The sequences that nodes hand over; absent in a run without.
    #[serde(flatten)]
    pub handover: Option<HandoverReport>,
    /// Number of driver calls, by name.
    pub driver_calls: BTreeMap<String, u64>,
    /// The worker processes; `None` in a run whose devices are this process's.
    pub workers: Option<WorkersReport>,
    /// What the run did over time; absent unless that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub series: Option<Box<Series>>,
    pub device: String,
    /// The division of the model over several devices; `None` on one device.
    pub placement: Option<PlaceReport>,
    pub shape: ReportShape,
    /// Maximum number of blocks in device memory; where groups share it, of the first group if it had all.
    pub device_blocks: u64,
    /// Maximum number of blocks in host memory.
    pub host_blocks: u64,
    /// Largest number of device blocks in use at once.
    pub peak_device_blocks: u64,
    pub max_batch: u32,
    /// Maximum number of tokens that one iteration writes.
    pub step_tokens: u32,
    pub policy: &'static str,
    /// Whether requests said what becomes of their sessions.
    pub hints: bool,
    /// How many of the read blocks were compared.
    pub verify: Verify,
    pub seed: u64,
    /// Seconds to build the cache: reserving addresses, pinning the host tier, loading the kernels.
    pub setup_s: f64,
    /// Seconds from the first iteration until everything was compared and released.
    pub wall_s: f64,
    /// On simulated devices: virtual seconds for the same period, that is the time of driver calls
    /// and devices on the machine of the profile. It does not include the engine's own work between
    /// calls.
    pub predicted_s: Option<f64>,
}

/// What of the evicted blocks was not stored in host memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct StoresReport {
    /// Name of the rule for what to store below the device.
    pub store: &'static str,
    /// Number of evicted blocks that the rule has refused: they were dropped.
    pub blocks_refused: u64,
    /// Number of refused blocks that were asked for while host memory would have had them still; of a large host
    /// tier estimated from a sample.
    pub blocks_regretted: u64,
}

/// What came of a tier below host memory, at all workers together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TiersReport {
    /// Blocks that every worker stored.
    pub blocks_stored: u64,
    /// Blocks that the rule for what to store has refused.
    pub blocks_refused: u64,
    /// Refused blocks that were computed again since, as far as the rule remembers them.
    pub blocks_regretted: u64,
    /// Blocks that some worker did not store.
    pub blocks_unstored: u64,
    /// Blocks that came back right at every worker: hits below host memory.
    pub blocks_loaded: u64,
    /// Blocks on their way that were forgotten, or whose worker was lost.
    pub blocks_void: u64,
    /// Names that the tier dropped by itself.
    pub names_dropped: u64,
    /// Blocks of loads that were wrong at some worker, by fault. Each was a miss.
    pub faults: BTreeMap<&'static str, u64>,
    /// Blocks that the tier had for a request, and that were computed because that was to be faster.
    pub blocks_declined: u64,
    /// Number of times that a request waited for a load.
    pub waits: u64,
    /// Number of these waits that a deadline ended.
    pub waits_late: u64,
    /// Host blocks that tickets held when the run had ended.
    pub quarantined_at_end: u64,
}

#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct WorkersReport {
    pub workers: u64,
    /// Processes that were replaced by new ones, in order.
    pub restarts: Vec<RestartReport>,
    /// Number of steps that were in flight when a process was replaced: they count for nothing.
    pub steps_voided: u64,
    /// Processes that were stopped for a while by a drill, in order.
    pub stops: Vec<StopReport>,
}

/// A worker process that was replaced by a new one.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct RestartReport {
    pub worker: u64,
    /// The latest step that was staged by then.
    pub step: u64,
    /// What was wrong with the process.
    pub reason: String,
}

/// A worker process that was stopped for a while. The numbers are 0 if it did not go on.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct StopReport {
    pub worker: u64,
    /// The step whose plan it did not get before it went on.
    pub step: u64,
    /// The latest step that was staged while it was stopped.
    pub staged: u64,
    /// The latest step that all workers had completed when it went on.
    pub completed: u64,
}

/// The use of one transport between device and host memory, over all devices.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct WayReport {
    pub batches: u64,
    /// Number of blocks, or of parts of blocks if several devices hold a part each.
    pub blocks: u64,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct ReportShape {
    pub layers: u32,
    pub kv_heads: u32,
    pub head_size: u32,
    pub dtype: Dtype,
    pub block_tokens: u32,
    /// Bytes of a block in all layers, K and V.
    pub block_bytes: u64,
    /// Tokens of the sliding window of layers that have one.
    pub window: Option<u32>,
    /// Layers that have one.
    pub window_layers: u32,
    /// Layers with a recurrent state, beside those.
    pub state_layers: u32,
    /// Layers of a draft model, beside those.
    pub draft_layers: u32,
}

/// A block that held a byte which does not belong to its request.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct CorruptBlock {
    /// The request, counted from 0 in the order of the trace.
    pub request: u64,
    /// The iteration that read the block.
    pub iteration: u64,
    /// Index of the block in the request, from 0.
    pub block: u64,
    /// Id of the device block in its block table.
    pub physical_block: u64,
    /// Index of the device among those that hold a part of the cache.
    pub device: u32,
    /// The found and the expected content.
    pub message: String,
}

impl ReportShape {
    fn of(config: &RunConfig) -> Result<Self, ShapeError> {
        let shape = config.shape;
        Ok(Self {
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_size: shape.head_size,
            dtype: shape.dtype,
            block_tokens: config.block_tokens,
            block_bytes: config.block_bytes()?,
            window: config.window,
            window_layers: config.window_layers(),
            state_layers: config.state_layers,
            draft_layers: config.draft_layers,
        })
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl RunReport {
    /// The report of a run before it starts: the options of `config`, and zeros.
    pub fn new(config: &RunConfig, device: &str) -> Result<Self, ShapeError> {
        Ok(Self {
            stores: StoresReport { store: config.store.name(), ..StoresReport::default() },
            transport: config.transport.name(),
            device: device.to_owned(),
            shape: ReportShape::of(config)?,
            device_blocks: config.device_blocks,
            host_blocks: config.host_blocks,
            max_batch: config.max_batch,
            step_tokens: config.step_tokens,
            policy: config.policy.name(),
            hints: config.life.hints,
            verify: config.verify,
            seed: config.seed,
            ..Self::default()
        })
    }

    pub(crate) fn add_transports(&mut self, stats: &TransportStats) {
        for (name, carried) in stats.by_name().into_iter().filter(|(_, way)| way.blocks > 0) {
            let way = self.transports.entry(name).or_default();
            way.batches += carried.batches;
            way.blocks += carried.blocks;
        }
    }

    /// Counts a corrupt block, and keeps it if it is one of the first.
    pub fn add_corruption(&mut self, corrupt: CorruptBlock) {
        self.corrupt_blocks += 1;
        if self.corruptions.len() < CORRUPTIONS_KEPT_MAX {
            self.corruptions.push(corrupt);
        }
    }
}
