//! The options of a run, checked before anything is allocated, and the progress of a run.

use std::fmt;
use std::str::FromStr;

use kv_cache::TransportChoice;
use kv_multigpu::place::{HeadsError, Strategy};
use kv_pool::policy::PolicyKind;
use kv_pool::store::StoreKind;
use serde::{Serialize, Serializer};

use crate::disk::DiskConfig;
pub use crate::life::Life;
pub use crate::model_cost::ModelCost;
use crate::nodes::NodeConfig;
use crate::place::{Division, shards};
pub use crate::run_progress::{Progress, ProgressState};
use crate::shape::{Dtype, KvModelShape, ShapeError};
use crate::trace::Trace;

/// Maximum number of blocks of device memory: a block table holds signed 32-bit ids.
pub const DEVICE_BLOCKS_MAX: u64 = i32::MAX as u64;

/// Maximum number of blocks of host memory.
pub const HOST_BLOCKS_MAX: u64 = u32::MAX as u64;

/// Maximum batch size: every row is staged at full width in each iteration.
pub const BATCH_MAX: u32 = 1 << 16;

/// Maximum number of blocks of device and host memory together: the pool takes their ids from one
/// range.
pub const BLOCKS_MAX: u64 = i32::MAX as u64;

/// Maximum number of layers: far beyond any model, and small enough to store an address for each.
pub const LAYERS_MAX: u32 = 1 << 16;

/// Maximum number of tokens of one iteration: their slots and keys are staged at full width.
pub const STEP_TOKENS_MAX: u32 = 1 << 24;

/// Maximum number of tokens of a block.
pub const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// Maximum number of draft tokens behind a sampled one.
pub const DRAFTS_MAX: u32 = 1024;

/// Maximum size of a layer's state, in tokens: far beyond any model.
pub const STATE_TOKENS_MAX: u32 = 1 << 20;

/// Maximum number of answers to a request.
pub const FORKS_MAX: u32 = 1024;

/// Maximum size of a pool, in bytes. Half of the address space leaves room for rounding up to
/// pages.
const POOL_BYTES_MAX: u64 = 1 << 62;

/// How many of the read blocks are compared.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Verify {
    /// None.
    None,
    /// In each iteration a sample of the blocks, chosen by the seed.
    Sample,
    /// Every block of every live request in each iteration.
    #[default]
    Full,
}

impl Verify {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Sample => "sample",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Verify {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A text that is not a degree of verification.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("unknown verification {found:?}; expected none, sample or full")]
pub struct UnknownVerify {
    /// The text.
    pub found: String,
}

cuda_driver::messages::one_line_debug!(UnknownVerify);

impl FromStr for Verify {
    type Err = UnknownVerify;

    fn from_str(text: &str) -> Result<Self, UnknownVerify> {
        [Self::None, Self::Sample, Self::Full]
            .into_iter()
            .find(|verify| verify.name() == text)
            .ok_or_else(|| UnknownVerify { found: text.to_owned() })
    }
}

/// The options of a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RunConfig {
    /// Shape of the model's KV.
    pub shape: KvModelShape,
    /// Number of tokens of a block: a divisor or a multiple of the [tokens of a hash id](Trace::block_tokens).
    pub block_tokens: u32,
    /// Division of the model over several devices.
    pub place: Division,
    /// Maximum number of blocks in device memory. Each of several devices holds its part of every
    /// block. Not used with [`device_memory`](Self::device_memory).
    pub device_blocks: u64,
    /// Bytes of each device that all groups of layers share; `None` where each group has `device_blocks` blocks.
    pub device_memory: Option<u64>,
    /// Maximum number of blocks in pinned host memory; 0 for no host tier.
    pub host_blocks: u64,
    /// Maximum number of requests at once.
    pub max_batch: u32,
    /// Maximum number of tokens, prompt and generated together, that one iteration writes.
    pub step_tokens: u32,
    /// Eviction policy for cached blocks, on the device and in host memory.
    pub policy: PolicyKind,
    /// What of the evicted blocks is stored in host memory, and what in tiers below.
    pub store: StoreKind,
    /// Bytes a second that evidence has stored in host memory, at most.
    pub store_rate: Option<u64>,
    /// Transport of blocks between device and host memory.
    pub transport: TransportChoice,
    /// Whether requests wait for their arrival: by the virtual time of simulated devices, on others by the host's.
    pub open_loop: bool,
    /// What the model's computation costs: virtual time of simulated devices, on others a kernel that waits.
    pub model: ModelCost,
    /// What happens to requests beside prefill and decoding.
    pub life: Life,
    /// The seed of a tier in memory below the host, which is late, fails, tears and corrupts; `None` for no such tier.
    pub tier_faults: Option<u64>,
    /// Files below the host; `None` for none.
    pub disk: Option<DiskConfig>,
    /// Which node this process is of several that keep blocks for each other; `None` for a run of one process.
    pub node: Option<NodeConfig>,
    /// Tokens that the engine computes in a second, by which loads from tiers below the host are judged; `None` measures
    /// it in a run over files, and loads all that a tier has in others.
    pub compute_rate: Option<u64>,
    /// How many of the read blocks are compared.
    pub verify: Verify,
    /// Seed of all random choices of the run.
    pub seed: u64,
    /// Tokens of the sliding window of the layers without full attention; `None` if there are none.
    pub window: Option<u32>,
    /// With a window, layers with full attention; 0 for every second one.
    pub full_layers: u32,
    /// Layers with a recurrent state, beside those with attention.
    pub state_layers: u32,
    /// A state of a layer has as many bytes as keys and values of so many tokens; 1 or more.
    pub state_tokens: u32,
    /// Layers of a draft model, whose KV ends where its own steps have come to: at times it computes nothing, and catches up
    /// later.
    pub draft_layers: u32,
    /// Whether the report has what the run did [over time](crate::series).
    pub series: bool,
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

/// The reason why options are refused.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A tier below the host needs one.
    #[error("--drill tier-faults puts a tier below host memory, but --host-blocks is 0")]
    TierWithoutHost,
    /// Nodes are below the host's memory.
    #[error("--nodes puts other nodes below host memory, but --host-blocks is 0")]
    NodesWithoutHost,
    /// Prompts that are handed over are of one group, without branches and drafts.
    #[error("--prefill-nodes hands prompts of one group over, and {option} is given")]
    HandoverOf {
        /// The other option.
        option: &'static str,
    },
    /// What is stored has a rate at most where evidence chooses it.
    #[error("--store-rate limits what --store evidence stores, but --store is all")]
    StoreRateOfAll,
    /// Files below the host need one.
    #[error("--disk puts files below host memory, but --host-blocks is 0")]
    DiskWithoutHost,
    /// An option is 0 but must not be.
    #[error("{option} is 0, expected at least 1")]
    Zero {
        /// The option.
        option: &'static str,
    },
    /// An option exceeds its limit.
    #[error("{option} is {value}, more than the largest allowed, {limit}")]
    TooLarge {
        /// The option.
        option: &'static str,
        /// Its value.
        value: u64,
        /// The largest value allowed.
        limit: u64,
    },
    /// The pools together have more blocks than there are ids.
    #[error(
        "--device-blocks {device_blocks} and --host-blocks {host_blocks} are together more than the largest \
         allowed, {BLOCKS_MAX}"
    )]
    TooManyBlocks {
        /// Number of blocks of device memory.
        device_blocks: u64,
        /// Number of blocks of host memory.
        host_blocks: u64,
    },
    /// Neither of the block size and the blocks of the trace divides the other.
    #[error(
        "--block-tokens is {block_tokens}, expected a divisor or a multiple of {trace_block_tokens}, the tokens of a \
         hash id in the trace"
    )]
    BlockTokens {
        /// Number of tokens of a block.
        block_tokens: u32,
        /// Number of tokens of a hash id in the trace.
        trace_block_tokens: u64,
    },
    /// The shape is invalid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A pool would not fit into the address space.
    #[error("{option} {blocks} of {block_bytes} bytes each overflow the address space")]
    PoolOverflow {
        /// The option with the pool's size.
        option: &'static str,
        /// Number of blocks of the pool.
        blocks: u64,
        /// Number of bytes of a block.
        block_bytes: u64,
    },
    /// There are fewer layers than devices, so some device would get none.
    #[error("--layers is {layers}, expected at least one for each of the {devices} devices")]
    DevicesOverLayers {
        /// Requested number of devices.
        devices: usize,
        /// Number of layers of the model.
        layers: u32,
    },
    /// The heads do not divide evenly over the devices.
    #[error("--kv-heads is {kv_heads}: {reason}")]
    Heads {
        /// Number of heads of K, and of V, of the model.
        kv_heads: u32,
        /// The reason.
        reason: HeadsError,
    },
    /// No layer is left for a sliding window, or none for full attention.
    #[error(
        "--layers {layers} and --full-layers {full_layers} leave no layer with a window, or only such"
    )]
    WindowLayers {
        /// Number of layers.
        layers: u32,
        /// Layers with full attention; 0 for every second one.
        full_layers: u32,
    },
    /// There is only one group of layers, and so nothing to share.
    #[error(
        "--device-memory {bytes} is shared by groups of layers, but there is one group without --window, \
         --state-layers and --draft-layers"
    )]
    NothingToShare {
        /// Bytes to share.
        bytes: u64,
    },
    /// The layers of each group lie on the devices in contiguous runs.
    #[error(
        "--place {place} cannot be combined with --window, --state-layers or --draft-layers on {devices} devices"
    )]
    PlacedGroups {
        /// The requested division.
        place: Division,
        /// Number of devices.
        devices: usize,
    },
    /// The option is about time, and several processes have no clock in common.
    #[error("{option} {value} cannot be combined with --workers")]
    Timed {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
    },
    /// Contiguous ranges have nothing that the option could act on.
    #[error("{option} {value} cannot be combined with --contiguous")]
    NotContiguous {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
    },
    /// A request of the trace could not even run alone.
    #[error(
        "request {request}, counted from 0, has {tokens} tokens, which take {blocks} blocks of {block_tokens}, \
         but --device-blocks is {device_blocks}"
    )]
    RequestTooLarge {
        /// The request, counted from 0.
        request: usize,
        /// Number of tokens of its prompt and answer.
        tokens: u64,
        /// Number of blocks that they take.
        blocks: u64,
        /// Number of tokens of a block.
        block_tokens: u32,
        /// Number of device blocks.
        device_blocks: u64,
    },
}

cuda_driver::messages::one_line_debug!(ConfigError);

impl RunConfig {
    /// Layers with a sliding window.
    #[must_use]
    pub fn window_layers(&self) -> u32 {
        match (self.window, self.full_layers) {
            (None, _) => 0,
            (Some(_), 0) => self.shape.layers / 2,
            (Some(_), full) => self.shape.layers.saturating_sub(full),
        }
    }

    /// Whether not all layers keep the same of a sequence.
    #[must_use]
    pub fn has_groups(&self) -> bool {
        self.window.is_some() || self.state_layers > 0 || self.draft_layers > 0
    }

    fn check_node(&self) -> Result<(), ConfigError> {
        match &self.node {
            Some(node) if node.prefill > 0 => self.check_split(),
            Some(_) if self.host_blocks == 0 => Err(ConfigError::NodesWithoutHost),
            _ => Ok(()),
        }
    }

    /// Checks that prompts of such a run can be handed over.
    ///
    /// # Errors
    /// [`ConfigError::HandoverOf`].
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
    ///
    /// # Errors
    ///
    /// The first [`ConfigError`] found.
    pub fn check(&self) -> Result<(), ConfigError> {
        for (option, value, limit) in [
            ("--device-blocks", self.device_blocks, DEVICE_BLOCKS_MAX),
            ("--max-batch", self.max_batch.into(), BATCH_MAX.into()),
            ("--step-tokens", self.step_tokens.into(), STEP_TOKENS_MAX.into()),
            ("--block-tokens", self.block_tokens.into(), BLOCK_TOKENS_MAX.into()),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { option });
            }
            if value > limit {
                return Err(ConfigError::TooLarge { option, value, limit });
            }
        }
        if self.tier_faults.is_some() && self.host_blocks == 0 {
            return Err(ConfigError::TierWithoutHost);
        }
        self.check_node()?;
        if self.store == StoreKind::All && self.store_rate.is_some() {
            return Err(ConfigError::StoreRateOfAll);
        }
        if self.disk.is_some() && self.host_blocks == 0 {
            return Err(ConfigError::DiskWithoutHost);
        }
        let Life { drafts, accept, fork, suspend, cancel, budget_swing, .. } = self.life;
        for (option, value, limit) in [
            ("--draft", drafts, DRAFTS_MAX),
            ("--accept", accept, 100),
            ("--fork", fork, FORKS_MAX),
            ("--suspend", suspend, 100),
            ("--cancel", cancel, 100),
            ("--budget-swing", budget_swing, 100),
        ] {
            if value > limit {
                let (value, limit) = (value.into(), limit.into());
                return Err(ConfigError::TooLarge { option, value, limit });
            }
        }
        if self.host_blocks > HOST_BLOCKS_MAX {
            return Err(ConfigError::TooLarge {
                option: "--host-blocks",
                value: self.host_blocks,
                limit: HOST_BLOCKS_MAX,
            });
        }
        if self.device_blocks + self.host_blocks > BLOCKS_MAX {
            return Err(ConfigError::TooManyBlocks {
                device_blocks: self.device_blocks,
                host_blocks: self.host_blocks,
            });
        }
        self.check_groups()?;
        let block_bytes = self.block_bytes()?;
        if self.shape.layers > LAYERS_MAX {
            return Err(ConfigError::TooLarge {
                option: "--layers",
                value: self.shape.layers.into(),
                limit: LAYERS_MAX.into(),
            });
        }
        for (option, blocks) in
            [("--device-blocks", self.device_blocks), ("--host-blocks", self.host_blocks)]
        {
            if blocks.checked_mul(block_bytes).is_none_or(|bytes| bytes > POOL_BYTES_MAX) {
                return Err(ConfigError::PoolOverflow { option, blocks, block_bytes });
            }
        }
        Ok(())
    }

    /// Checks that the layers, or the heads, can be divided over that many devices.
    ///
    /// # Errors
    ///
    /// [`ConfigError::DevicesOverLayers`] if some device would get no layer, [`ConfigError::Heads`]
    /// if the heads do not divide evenly, [`ConfigError::PlacedGroups`] if the layers of several groups are to
    /// be placed in another way than in contiguous runs or by heads.
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

    /// Checks the layers of each kind.
    fn check_groups(&self) -> Result<(), ConfigError> {
        if self.window == Some(0) {
            return Err(ConfigError::Zero { option: "--window" });
        }
        let layers = self.shape.layers;
        if self.window.is_some() && !(1..layers).contains(&self.window_layers()) {
            return Err(ConfigError::WindowLayers { layers, full_layers: self.full_layers });
        }
        match self.device_memory {
            Some(0) => return Err(ConfigError::Zero { option: "--device-memory" }),
            Some(value) if value > POOL_BYTES_MAX => {
                let (option, limit) = ("--device-memory", POOL_BYTES_MAX);
                return Err(ConfigError::TooLarge { option, value, limit });
            }
            Some(bytes) if !self.has_groups() => return Err(ConfigError::NothingToShare { bytes }),
            _ => {}
        }
        if self.state_tokens == 0 {
            return Err(ConfigError::Zero { option: "--state-tokens" });
        }
        if self.state_tokens > STATE_TOKENS_MAX {
            let (value, limit) = (self.state_tokens.into(), STATE_TOKENS_MAX.into());
            return Err(ConfigError::TooLarge { option: "--state-tokens", value, limit });
        }
        for (option, value) in
            [("--state-layers", self.state_layers), ("--draft-layers", self.draft_layers)]
        {
            if value > LAYERS_MAX {
                let (value, limit) = (value.into(), LAYERS_MAX.into());
                return Err(ConfigError::TooLarge { option, value, limit });
            }
        }
        Ok(())
    }

    /// Checks that no request waits for its arrival and no model takes time, which is for runs of one process.
    ///
    /// # Errors
    /// [`ConfigError::Timed`] for the first such option.
    pub fn check_untimed(&self) -> Result<(), ConfigError> {
        match self.timed() {
            Some((option, value)) => Err(ConfigError::Timed { option, value }),
            None => Ok(()),
        }
    }

    /// Whether some option is about time.
    pub(crate) fn is_timed(&self) -> bool {
        self.timed().is_some()
    }

    /// The first option that is about time.
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

    /// Checks that contiguous ranges on that many devices have a meaning for every option: there is
    /// no host tier, no sharing and no pool of blocks, and all layers are on one device.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NotContiguous`] for the first option that asks for more.
    pub fn check_contiguous(&self, devices: usize) -> Result<(), ConfigError> {
        let default = Self::default();
        let Life { chunk: _, drafts, accept, fork, suspend, cancel: _, budget_swing, hints } =
            self.life;
        let asked = |option, value: u32| (option, value.to_string(), value > 0);
        let changed = |option, value: String, changed| (option, value, changed);
        let refused = [
            ("--host-blocks", self.host_blocks.to_string(), self.host_blocks > 0),
            asked("--window", self.window.unwrap_or(0)),
            asked("--state-layers", self.state_layers),
            asked("--draft-layers", self.draft_layers),
            changed(
                "--device-memory",
                self.device_memory.unwrap_or(0).to_string(),
                self.device_memory.is_some(),
            ),
            asked("--draft", drafts),
            asked("--accept", accept),
            asked("--fork", fork),
            asked("--suspend", suspend),
            asked("--budget-swing", budget_swing),
            changed("--hints", String::new(), hints),
            changed(
                "--drill tier-faults",
                self.tier_faults.unwrap_or(0).to_string(),
                self.tier_faults.is_some(),
            ),
            changed("--disk", String::new(), self.disk.is_some()),
            changed("--nodes", String::new(), self.node.is_some()),
            changed("--policy", self.policy.name().to_owned(), self.policy != default.policy),
            changed(
                "--transport",
                self.transport.name().to_owned(),
                self.transport != default.transport,
            ),
            changed("--place", self.place.to_string(), self.place != default.place),
            changed("--device with", format!("{devices} devices"), devices != 1),
        ];
        let timed = self.timed().map(|(option, value)| (option, value, true));
        match refused.into_iter().chain(timed).find(|(_, _, refused)| *refused) {
            Some((option, value, _)) => Err(ConfigError::NotContiguous { option, value }),
            None => Ok(()),
        }
    }

    /// Checks that every request of `trace` can at least run alone. With
    /// [`device_memory`](Self::device_memory) the manager finds that out when it is to admit the request.
    ///
    /// # Errors
    ///
    /// [`ConfigError::RequestTooLarge`] for the first that cannot, [`ConfigError::BlockTokens`] for
    /// a block size that does not go with the trace's.
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
    ///
    /// # Errors
    ///
    /// [`ShapeError`] for an invalid shape.
    pub fn block_bytes(&self) -> Result<u64, ShapeError> {
        self.shape.block_bytes(self.block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Request;

    fn message(change: impl FnOnce(&mut RunConfig)) -> String {
        let mut config = RunConfig::default();
        change(&mut config);
        config.check().map_or_else(|error| error.to_string(), |()| "fine".to_owned())
    }

    #[test]
    fn options_that_contiguous_ranges_have_no_meaning_for_are_named() {
        let contiguous = RunConfig { host_blocks: 0, ..RunConfig::default() };
        let check = |change: &dyn Fn(&mut RunConfig)| {
            let mut config = contiguous.clone();
            change(&mut config);
            config.check_contiguous(1).map_err(|error| error.to_string())
        };
        assert_eq!(
            check(&|config| config.life = Life { chunk: 9, cancel: 9, ..Life::default() }),
            Ok(())
        );
        let refused = |option: &str| Err(format!("{option} cannot be combined with --contiguous"));
        assert_eq!(check(&|config| config.host_blocks = 1), refused("--host-blocks 1"));
        assert_eq!(check(&|config| config.life.drafts = 2), refused("--draft 2"));
        assert_eq!(check(&|config| config.life.accept = 3), refused("--accept 3"));
        assert_eq!(check(&|config| config.life.fork = 4), refused("--fork 4"));
        assert_eq!(check(&|config| config.life.suspend = 5), refused("--suspend 5"));
        assert_eq!(check(&|config| config.life.budget_swing = 6), refused("--budget-swing 6"));
        assert_eq!(check(&|config| config.policy = PolicyKind::Lru), refused("--policy lru"));
        assert_eq!(
            check(&|config| config.transport = TransportChoice::EachBlock),
            refused("--transport each-block")
        );
        assert_eq!(check(&|config| config.place = Division::Heads), refused("--place heads"));
        assert_eq!(
            contiguous.check_contiguous(2).unwrap_err().to_string(),
            "--device with 2 devices cannot be combined with --contiguous"
        );
    }

    #[test]
    fn the_default_and_a_run_without_host_tier_are_fine() {
        assert_eq!(message(|_| {}), "fine");
        assert_eq!(message(|config| config.host_blocks = 0), "fine");
        assert_eq!(message(|config| config.block_tokens = 512), "fine");
    }

    #[test]
    fn each_option_is_named_with_its_value() {
        for (found, expected) in [
            (message(|c| c.device_blocks = 0), "--device-blocks is 0, expected at least 1"),
            (message(|c| c.max_batch = 0), "--max-batch is 0, expected at least 1"),
            (message(|c| c.step_tokens = 0), "--step-tokens is 0, expected at least 1"),
            (message(|c| c.block_tokens = 0), "--block-tokens is 0, expected at least 1"),
            (
                message(|c| c.device_blocks = 1 << 31),
                "--device-blocks is 2147483648, more than the largest allowed, 2147483647",
            ),
            (
                message(|c| c.host_blocks = 1 << 32),
                "--host-blocks is 4294967296, more than the largest allowed, 4294967295",
            ),
            (
                message(|c| (c.device_blocks, c.host_blocks) = (1, DEVICE_BLOCKS_MAX)),
                "--device-blocks 1 and --host-blocks 2147483647 are together more than the largest allowed, 2147483647",
            ),
            (
                message(|c| c.step_tokens = (1 << 24) + 1),
                "--step-tokens is 16777217, more than the largest allowed, 16777216",
            ),
            (
                message(|c| c.max_batch = 65_537),
                "--max-batch is 65537, more than the largest allowed, 65536",
            ),
            (message(|c| c.shape.layers = 0), "--layers is 0, expected at least 1"),
            (
                message(|c| c.shape.layers = (1 << 16) + 1),
                "--layers is 65537, more than the largest allowed, 65536",
            ),
            (
                message(|c| {
                    (c.device_blocks, c.host_blocks) = (DEVICE_BLOCKS_MAX, 0);
                    c.shape.head_size = 1 << 31;
                }),
                "--device-blocks 2147483647 of 2199023255552 bytes each overflow the address space",
            ),
        ] {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn more_devices_than_layers_are_refused() {
        let config = RunConfig::default();
        assert_eq!(config.check_devices(1), Ok(()));
        assert_eq!(
            config.check_devices(2),
            Err(ConfigError::DevicesOverLayers { devices: 2, layers: 1 })
        );
    }

    #[test]
    fn a_request_that_could_never_run_is_named() {
        let request = |input_length: u64| Request {
            timestamp_ms: 0,
            input_length,
            output_length: 1,
            hash_ids: vec![0; input_length.div_ceil(512) as usize],
            tenant: None,
        };
        let config = RunConfig { device_blocks: 8, block_tokens: 64, ..RunConfig::default() };
        let mut trace = Trace::new(vec![request(511)]);
        assert_eq!(config.check_trace(&trace), Ok(()));
        trace.requests.push(request(512));
        assert_eq!(
            config.check_trace(&trace).unwrap_err().to_string(),
            "request 1, counted from 0, has 513 tokens, which take 9 blocks of 64, but --device-blocks is 8"
        );
        let refused = |block_tokens, trace_block_tokens| {
            let config = RunConfig { block_tokens, ..RunConfig::default() };
            let trace = Trace { block_tokens: trace_block_tokens, ..Trace::new(Vec::new()) };
            config.check_trace(&trace).map_err(|error| error.to_string())
        };
        assert_eq!((refused(64, 16), refused(16, 64), refused(48, 16)), (Ok(()), Ok(()), Ok(())));
        assert_eq!(
            refused(48, 512).unwrap_err(),
            "--block-tokens is 48, expected a divisor or a multiple of 512, the tokens of a hash id in the trace"
        );
    }

    #[test]
    fn names_of_degrees_are_read_back() {
        for verify in [Verify::None, Verify::Sample, Verify::Full] {
            assert_eq!(verify.to_string().parse(), Ok(verify));
        }
        assert!("all".parse::<Verify>().unwrap_err().to_string().contains("\"all\""));
    }
}
