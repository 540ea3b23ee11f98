//! The options of a run, checked before anything is allocated, and the progress of a run.

use std::time::Duration;

use clap::Args;
use kv_multigpu::place::{PlacementError, Strategy};
use kv_plane::TransportChoice;
use kv_pool::policy::PolicyKind;
use kv_pool::store::StoreKind;
use serde::{Deserialize, Serialize};

use crate::command_line::{by_names, whole};
use crate::disk::{ByteSize, ByteSizeError, DiskConfig};
use crate::nodes::NodeConfig;
use crate::place::{Division, shards};
use crate::shape::{Dtype, KvModelShape, ShapeError};
use crate::trace::Trace;

/// A block table holds signed 32-bit ids.
const DEVICE_BLOCKS_MAX: u64 = i32::MAX as u64;
const HOST_BLOCKS_MAX: u64 = u32::MAX as u64;
/// Of device and host memory together: the pool takes their ids from one range.
const BLOCKS_MAX: u64 = i32::MAX as u64;
/// Every row is staged at full width in each iteration.
const BATCH_MAX: u64 = 1 << 16;
/// Slots and keys of an iteration's tokens are staged at full width.
const STEP_TOKENS_MAX: u64 = 1 << 24;
const BLOCK_TOKENS_MAX: u64 = 1 << 16;
/// Far beyond any model, and small enough to store an address for each.
const LAYERS_MAX: u64 = 1 << 16;
const STATE_TOKENS_MAX: u64 = 1 << 20;
const DRAFTS_MAX: u64 = 1024;
const FORKS_MAX: u64 = 1024;
/// Bytes of a pool. Half of the address space leaves room for rounding up to pages.
const POOL_BYTES_MAX: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    None,
    /// In each iteration a sample of the blocks, chosen by the seed.
    Sample,
    /// Every block of every live request in each iteration.
    #[default]
    Full,
}

impl Verify {
    const NAMES: [(Self, &'static str); 3] =
        [(Self::None, "none"), (Self::Sample, "sample"), (Self::Full, "full")];
}

by_names!(Verify, "verification");

/// What happens to requests beside prefill and decoding. Chances are in percent.
#[derive(Args, Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Life {
    /// Most tokens of a prompt that one iteration computes; 0 for as many as its budget allows.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    pub chunk: u32,
    /// Draft tokens that are computed behind each sampled one.
    #[arg(long = "draft", value_name = "K", default_value_t = 0, value_parser = whole::<u32>)]
    pub drafts: u32,
    /// Chance, in percent, that a draft is accepted if those before it are.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    pub accept: u32,
    /// Answers to each request: when its prompt is computed, it is forked into N.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    pub fork: u32,
    /// Chance, in percent, that a running request is suspended in an iteration, for up to 16 of
    /// them.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    pub suspend: u32,
    /// Chance, in percent, that a request is cancelled before its end.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    pub cancel: u32,
    /// By how much of the device blocks, in percent, the budget falls and rises again, every 64
    /// iterations.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    pub budget_swing: u32,
    /// Has each request say, when it ends, what becomes of its session: over, or back in the time until the
    /// request of the trace that continues it.
    #[arg(long)]
    pub hints: bool,
}

impl Life {
    pub fn chunk(&self) -> u64 {
        if self.chunk == 0 { u64::MAX } else { self.chunk.into() }
    }
}

/// What a model's computation costs on a device. By default nothing: a run moves KV and computes none.
#[derive(Args, Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ModelCost {
    /// Prompt tokens that the model computes in a second; 0 for no time. On a GPU a kernel waits so long.
    #[arg(long = "prefill-rate", value_name = "N", default_value_t = 0, value_parser = whole::<u64>, conflicts_with = "workers")]
    pub prefill_tokens_per_s: u64,
    /// Microseconds that an iteration takes which generates tokens; 0 for no time.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = whole::<u64>, conflicts_with = "workers")]
    pub decode_step_us: u64,
}

impl ModelCost {
    /// The time of an iteration that computes so many prompt tokens, and generates if `generates`: the two add up.
    pub fn of_iteration(&self, prompt_tokens: u64, generates: bool) -> Duration {
        let prefill = u128::from(prompt_tokens) * 1_000_000_000
            / u128::from(self.prefill_tokens_per_s.max(1));
        let prefill = if self.prefill_tokens_per_s == 0 { 0 } else { prefill };
        let prefill = Duration::from_nanos(u64::try_from(prefill).unwrap_or(u64::MAX));
        let decode = if generates { self.decode_step_us } else { 0 };
        prefill.saturating_add(Duration::from_micros(decode))
    }
}

/// The options of a run. What is skipped is nothing to a [worker process](crate::engine::workers).
#[derive(Args, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub struct RunConfig {
    #[arg(skip = Self::default().shape)]
    pub shape: KvModelShape,
    /// Has each request wait for its arrival, the first of which is at once, and reports the time to the first token. Time is the
    /// virtual time of simulated devices, and on GPUs that of this machine. Engines that keep up with their requests have free time
    /// between them; without this flag the next request comes as soon as there is room.
    #[arg(long, help_heading = "Workload", conflicts_with = "workers")]
    #[serde(skip)]
    pub open_loop: bool,
    /// Seed of all random choices.
    #[arg(long, help_heading = "Workload", value_name = "S", default_value_t = Self::default().seed, value_parser = whole::<u64>)]
    #[serde(skip)]
    pub seed: u64,
    /// Gives every second layer a sliding window of N tokens; those have a block table of their own.
    #[arg(long, help_heading = "Model", value_name = "N", value_parser = whole::<u32>)]
    pub window: Option<u32>,
    /// Keeps full attention in F layers, and gives all others the window [default: every second layer].
    #[arg(long, help_heading = "Model", value_name = "F", default_value_t = 0, value_parser = whole::<u32>, requires = "window")]
    pub full_layers: u32,
    /// Adds N layers with a recurrent state instead of keys and values.
    #[arg(long, help_heading = "Model", value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    pub state_layers: u32,
    /// Bytes of a layer's state: as many as keys and values of N tokens in a layer have.
    #[arg(long, help_heading = "Model", value_name = "N", default_value_t = Self::default().state_tokens, value_parser = whole::<u32>, requires = "state_layers")]
    pub state_tokens: u32,
    /// Adds N layers of a draft model, which computes nothing in some iterations and catches up in others: its KV ends
    /// elsewhere than the model's.
    #[arg(long, help_heading = "Model", value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    pub draft_layers: u32,
    #[command(flatten, next_help_heading = "Model")]
    #[serde(skip)]
    pub model: ModelCost,
    /// Division of the model over several devices: heads, layers, layers:round-robin,
    /// layers:contiguous, layers:free-memory or layers:least-cost.
    #[arg(long, help_heading = "Devices", value_name = "HOW", default_value_t = Self::default().place)]
    #[serde(skip)]
    pub place: Division,
    /// Transport of blocks between device and host memory: auto, copy-engine, kernel, two-hop or
    /// each-block (one copy call per block). auto uses the fastest, which it measures first on
    /// GPUs.
    #[arg(long, help_heading = "Devices", value_name = "WAY", default_value_t = Self::default().transport)]
    #[serde(with = "by_name")]
    pub transport: TransportChoice,
    /// Number of tokens of a block, a divisor or a multiple of the tokens of a hash id in the trace.
    #[arg(long, help_heading = "Memory", value_name = "B", default_value_t = Self::default().block_tokens, value_parser = whole::<u32>)]
    pub block_tokens: u32,
    /// Maximum number of blocks in device memory.
    #[arg(long, help_heading = "Memory", value_name = "N", default_value_t = Self::default().device_blocks, value_parser = whole::<u64>)]
    pub device_blocks: u64,
    /// Bytes of each device that all groups of layers share, instead of as many blocks for each; with
    /// --window, --state-layers or --draft-layers.
    #[arg(long, help_heading = "Memory", value_name = "BYTES", value_parser = whole::<u64>, conflicts_with = "device_blocks")]
    #[serde(skip)]
    pub device_memory: Option<u64>,
    /// Maximum number of blocks in pinned host memory; 0 for no host tier.
    #[arg(long, help_heading = "Memory", value_name = "N", default_value_t = Self::default().host_blocks, value_parser = whole::<u64>)]
    pub host_blocks: u64,
    /// Eviction policy for cached blocks, on the device and in host memory: lru or hit_density.
    #[arg(long, help_heading = "Memory", value_name = "POLICY", default_value_t = Self::default().policy)]
    #[serde(skip)]
    pub policy: PolicyKind,
    /// What of the evicted blocks is stored in host memory, and in files: evidence for what is likely to
    /// be asked for again, or all.
    #[arg(long, help_heading = "Memory", value_name = "RULE", default_value_t = Self::default().store)]
    #[serde(skip)]
    pub store: StoreKind,
    /// Bytes a second that are stored in host memory at most, such as 4GiB: its share of the link.
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = byte_size)]
    #[serde(skip)]
    pub store_rate: Option<u64>,
    /// Tokens that the engine computes in a second: what a tier below the host would take longer for is computed
    /// instead of loaded [default: measured with --disk; loads all that is there with --drill tier-faults].
    #[arg(long, help_heading = "Memory", value_name = "TOKENS", value_parser = whole::<u64>)]
    #[serde(skip)]
    pub compute_rate: Option<u64>,
    /// Maximum number of requests at once.
    #[arg(long, help_heading = "Life of requests", value_name = "N", default_value_t = Self::default().max_batch, value_parser = whole::<u32>)]
    pub max_batch: u32,
    /// Maximum number of tokens, prompt and generated together, that one iteration writes.
    #[arg(long, help_heading = "Life of requests", value_name = "N", default_value_t = Self::default().step_tokens, value_parser = whole::<u32>)]
    pub step_tokens: u32,
    #[command(flatten, next_help_heading = "Life of requests")]
    pub life: Life,
    /// The seed of a tier in memory below the host, which is late, fails, tears and corrupts; `None` for no such tier.
    #[arg(skip)]
    pub tier_faults: Option<u64>,
    #[arg(skip)]
    pub disk: Option<DiskConfig>,
    /// Which node this process is of several that keep blocks for each other; `None` for a run of one process.
    #[arg(skip)]
    #[serde(skip)]
    pub node: Option<NodeConfig>,
    /// How many of the read blocks are compared: none, sample or full.
    #[arg(long, help_heading = "Verification and results", value_name = "HOW", default_value_t = Self::default().verify)]
    pub verify: Verify,
    /// Adds to the report what the run did over time, for `page` of `tools/`: samples, histograms and a timeline, of
    /// bounded length.
    #[arg(long, help_heading = "Verification and results", conflicts_with_all = ["nodes", "prefill_nodes"])]
    #[serde(skip)]
    pub series: bool,
}

fn byte_size(text: &str) -> Result<u64, ByteSizeError> {
    text.parse().map(|ByteSize(bytes)| bytes)
}

/// A value that is written as its name.
mod by_name {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(
        value: &impl std::fmt::Display,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, T>(from: D) -> Result<T, D::Error>
    where
        T: std::str::FromStr<Err: std::fmt::Display>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl Default for RunConfig {
    /// A model so small that a simulated device replays a long trace in a minute or two.
    fn default() -> Self {
        Self {
            shape: KvModelShape { layers: 1, kv_heads: 1, head_size: 8, dtype: Dtype::Fp8 },
            block_tokens: 512,
            place: Division::default(),
            device_blocks: 8192,
            device_memory: None,
            host_blocks: 32_768,
            max_batch: 32,
            step_tokens: 16_384,
            policy: PolicyKind::default(),
            store: StoreKind::default(),
            store_rate: None,
            transport: TransportChoice::default(),
            open_loop: false,
            model: ModelCost::default(),
            life: Life::default(),
            tier_faults: None,
            disk: None,
            node: None,
            compute_rate: None,
            verify: Verify::Full,
            seed: 0,
            window: None,
            full_layers: 0,
            state_layers: 0,
            state_tokens: 1,
            draft_layers: 0,
            series: false,
        }
    }
}

#[derive(Clone, Eq, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("--drill tier-faults puts a tier below host memory, but --host-blocks is 0")]
    TierWithoutHost,
    #[error("--nodes puts other nodes below host memory, but --host-blocks is 0")]
    NodesWithoutHost,
    #[error("--prefill-nodes hands prompts of one group over, and {option} is given")]
    HandoverOf { option: &'static str },
    #[error("--store-rate limits what --store evidence stores, but --store is all")]
    StoreRateOfAll,
    #[error("--disk puts files below host memory, but --host-blocks is 0")]
    DiskWithoutHost,
    #[error("{option} is 0, expected at least 1")]
    Zero { option: &'static str },
    #[error("{option} is {value}, more than the largest allowed, {limit}")]
    TooLarge { option: &'static str, value: u64, limit: u64 },
    #[error(
        "--device-blocks {device_blocks} and --host-blocks {host_blocks} are together more than the largest \
         allowed, {BLOCKS_MAX}"
    )]
    TooManyBlocks { device_blocks: u64, host_blocks: u64 },
    #[error(
        "--block-tokens is {block_tokens}, expected a divisor or a multiple of {trace_block_tokens}, the tokens of a \
         hash id in the trace"
    )]
    BlockTokens { block_tokens: u32, trace_block_tokens: u64 },
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("{option} {blocks} of {block_bytes} bytes each overflow the address space")]
    PoolOverflow { option: &'static str, blocks: u64, block_bytes: u64 },
    #[error("--layers is {layers}, expected at least one for each of the {devices} devices")]
    DevicesOverLayers { devices: usize, layers: u32 },
    #[error("--kv-heads is {kv_heads}: {reason}")]
    Heads { kv_heads: u32, reason: PlacementError },
    #[error(
        "--layers {layers} and --full-layers {full_layers} leave no layer with a window, or only such"
    )]
    WindowLayers { layers: u32, full_layers: u32 },
    #[error(
        "--device-memory {bytes} is shared by groups of layers, but there is one group without --window, \
         --state-layers and --draft-layers"
    )]
    NothingToShare { bytes: u64 },
    #[error(
        "--place {place} cannot be combined with --window, --state-layers or --draft-layers on {devices} devices"
    )]
    PlacedGroups { place: Division, devices: usize },
    #[error("{option} {value} cannot be combined with --workers")]
    Timed { option: &'static str, value: String },
    #[error(
        "request {request}, counted from 0, has {tokens} tokens, which take {blocks} blocks of {block_tokens}, \
         but --device-blocks is {device_blocks}"
    )]
    RequestTooLarge {
        request: usize,
        tokens: u64,
        blocks: u64,
        block_tokens: u32,
        device_blocks: u64,
    },
}

cuda_driver::messages::one_line_debug!(ConfigError);

impl RunConfig {
    pub fn window_layers(&self) -> u32 {
        match (self.window, self.full_layers) {
            (None, _) => 0,
            (Some(_), 0) => self.shape.layers / 2,
            (Some(_), full) => self.shape.layers.saturating_sub(full),
        }
    }

    /// Whether not all layers keep the same of a sequence.
    pub fn has_groups(&self) -> bool {
        self.window.is_some() || self.state_layers > 0 || self.draft_layers > 0
    }

    /// Checks that prompts of such a run can be handed over.
    pub fn check_split(&self) -> Result<(), ConfigError> {
        let others = [
            ("a group of layers beside the first", self.has_groups()),
            ("--draft", self.life.drafts > 0),
            ("--fork", self.life.fork > 1),
        ];
        match others.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(ConfigError::HandoverOf { option }),
            None => Ok(()),
        }
    }

    /// Checks everything that can be checked without a device.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_numbers()?;
        if self.tier_faults.is_some() && self.host_blocks == 0 {
            return Err(ConfigError::TierWithoutHost);
        }
        match &self.node {
            Some(node) if node.prefill > 0 => self.check_split()?,
            Some(_) if self.host_blocks == 0 => return Err(ConfigError::NodesWithoutHost),
            _ => {}
        }
        if self.store == StoreKind::All && self.store_rate.is_some() {
            return Err(ConfigError::StoreRateOfAll);
        }
        if self.disk.is_some() && self.host_blocks == 0 {
            return Err(ConfigError::DiskWithoutHost);
        }
        let &Self { device_blocks, host_blocks, full_layers, .. } = self;
        if device_blocks + host_blocks > BLOCKS_MAX {
            return Err(ConfigError::TooManyBlocks { device_blocks, host_blocks });
        }
        let layers = self.shape.layers;
        if self.window.is_some() && !(1..layers).contains(&self.window_layers()) {
            return Err(ConfigError::WindowLayers { layers, full_layers });
        }
        if let Some(bytes) = self.device_memory.filter(|_| !self.has_groups()) {
            return Err(ConfigError::NothingToShare { bytes });
        }
        let block_bytes = self.block_bytes()?;
        for (option, blocks) in [("--device-blocks", device_blocks), ("--host-blocks", host_blocks)]
        {
            if blocks.checked_mul(block_bytes).is_none_or(|bytes| bytes > POOL_BYTES_MAX) {
                return Err(ConfigError::PoolOverflow { option, blocks, block_bytes });
            }
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        let Life { drafts, accept, fork, suspend, cancel, budget_swing, .. } = self.life;
        let at_least_1 = [
            ("--device-blocks", self.device_blocks, DEVICE_BLOCKS_MAX),
            ("--max-batch", self.max_batch.into(), BATCH_MAX),
            ("--step-tokens", self.step_tokens.into(), STEP_TOKENS_MAX),
            ("--block-tokens", self.block_tokens.into(), BLOCK_TOKENS_MAX),
            ("--window", self.window.unwrap_or(1).into(), u64::MAX),
            ("--device-memory", self.device_memory.unwrap_or(1), POOL_BYTES_MAX),
            ("--state-tokens", self.state_tokens.into(), STATE_TOKENS_MAX),
        ];
        let any = [
            ("--draft", drafts.into(), DRAFTS_MAX),
            ("--accept", accept.into(), 100),
            ("--fork", fork.into(), FORKS_MAX),
            ("--suspend", suspend.into(), 100),
            ("--cancel", cancel.into(), 100),
            ("--budget-swing", budget_swing.into(), 100),
            ("--host-blocks", self.host_blocks, HOST_BLOCKS_MAX),
            ("--state-layers", self.state_layers.into(), LAYERS_MAX),
            ("--draft-layers", self.draft_layers.into(), LAYERS_MAX),
        ];
        if let Some((option, ..)) = at_least_1.into_iter().find(|(_, value, _)| *value == 0) {
            return Err(ConfigError::Zero { option });
        }
        // A shape without layers, heads or elements is refused by itself, and one of too many by its bytes first.
        let layers = self.block_bytes().map_or(0, |_| self.shape.layers.into());
        let mut all = at_least_1.into_iter().chain(any).chain([("--layers", layers, LAYERS_MAX)]);
        match all.find(|(_, value, limit)| value > limit) {
            Some((option, value, limit)) => Err(ConfigError::TooLarge { option, value, limit }),
            None => Ok(()),
        }
    }

    pub fn check_devices(&self, devices: usize) -> Result<(), ConfigError> {
        let (layers, place) = (self.shape.layers, self.place);
        let in_runs = matches!(place, Division::Layers(Strategy::Contiguous) | Division::Heads);
        if self.has_groups() && devices > 1 && !in_runs {
            return Err(ConfigError::PlacedGroups { place, devices });
        }
        match place {
            Division::Layers(_) if devices as u64 > u64::from(layers) => {
                Err(ConfigError::DevicesOverLayers { devices, layers })
            }
            Division::Layers(_) => Ok(()),
            Division::Heads => shards(self.shape.kv_heads, devices)
                .map(|_| ())
                .map_err(|reason| ConfigError::Heads { kv_heads: self.shape.kv_heads, reason }),
        }
    }

    /// Checks that no request waits for its arrival and no model takes time, which is for runs of one process.
    pub fn check_untimed(&self) -> Result<(), ConfigError> {
        match self.timed() {
            Some((option, value)) => Err(ConfigError::Timed { option, value }),
            None => Ok(()),
        }
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.timed().is_some()
    }

    fn timed(&self) -> Option<(&'static str, String)> {
        let ModelCost { prefill_tokens_per_s, decode_step_us } = self.model;
        let timed = [
            ("--open-loop", u64::from(self.open_loop)),
            ("--prefill-rate", prefill_tokens_per_s),
            ("--decode-step-us", decode_step_us),
        ];
        let (option, value) = timed.into_iter().find(|(_, value)| *value > 0)?;
        let value = if self.open_loop { String::new() } else { value.to_string() };
        Some((option, value))
    }

    /// Checks that every request of `trace` can at least run alone. With
    /// [`device_memory`](Self::device_memory) the manager finds that out when it is to admit the request.
    pub fn check_trace(&self, trace: &Trace) -> Result<(), ConfigError> {
        let &Self { block_tokens, device_blocks, .. } = self;
        let (ours, theirs) = (u64::from(block_tokens), trace.block_tokens);
        if ours == 0 || theirs == 0 || !(ours.is_multiple_of(theirs) || theirs.is_multiple_of(ours))
        {
            return Err(ConfigError::BlockTokens { block_tokens, trace_block_tokens: theirs });
        }
        for (request, entry) in trace.requests.iter().enumerate() {
            let tokens = entry.input_length.saturating_add(entry.output_length);
            let blocks = tokens.div_ceil(block_tokens.into());
            if blocks > device_blocks && self.device_memory.is_none() {
                return Err(ConfigError::RequestTooLarge {
                    request,
                    tokens,
                    blocks,
                    block_tokens,
                    device_blocks,
                });
            }
        }
        Ok(())
    }

    /// Bytes of a block in all layers, K and V.
    pub fn block_bytes(&self) -> Result<u64, ShapeError> {
        self.shape.block_bytes(self.block_tokens)
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgressState {
    pub requests: u64,
    pub finished: u64,
    pub running: u64,
    pub iterations: u64,
    /// Number of blocks that held bytes of another request.
    pub corrupt_blocks: u64,
    pub verified_blocks: u64,
    pub device_blocks_in_use: u64,
    /// Share of block lookups that hit, from 0 to 1.
    pub hit_rate: f64,
}

pub trait Progress {
    /// Called on the run's own thread, up to once per iteration. It must be fast.
    fn update(&mut self, state: &ProgressState);
}

impl Progress for () {
    fn update(&mut self, _state: &ProgressState) {}
}
