//! Options of a cache, checked before anything is allocated.

use std::sync::Arc;

use cuda_vmm::{MemoryRules, Worker};
use kv_kernels::KvShape;
use kv_place::Placement;
use kv_pool::BlockHasher;
use kv_pool::clock::Clock;
use kv_pool::policy::{EvictionPolicy, PolicyError, PolicyKind};
use kv_stage::{BatchOptions, BatchTable, SlabsOptions};

use crate::{LowerTiers, TransportRules, shares};

/// Most steps that the host may be ahead of the device.
const OVERLAP_DEPTH_MAX: u32 = 1024;

/// Most layers: far beyond any model, and few enough for a list of them.
const LAYERS_MAX: u32 = 1 << 16;

/// Most bytes of a step's staged arrays: far beyond any engine's need, and few enough to pin for
/// each step in flight.
const STEP_BYTES_MAX: u64 = 1 << 30;

/// Shape and size of a [`KvCache`](crate::KvCache).
#[derive(Clone, Debug)]
pub struct KvCacheOptions {
    /// All layers of the model, with whole rows.
    pub shape: KvShape,
    /// The layers of each device, or its heads of all layers. `None` splits the layers over the
    /// devices in contiguous runs of nearly equal length.
    pub placement: Option<Placement>,
    /// Most blocks on the device. Memory is mapped under them as `growth` says.
    pub device_blocks: u32,
    /// How memory is mapped under device blocks.
    pub growth: Growth,
    /// Blocks of pinned host memory that evicted blocks are offloaded to; 0 for no host tier.
    pub host_blocks: u32,
    /// How host memory is pinned.
    pub pinning: HostPinning,
    /// How blocks travel between the devices and host memory.
    pub transport: TransportRules,
    /// Most sequences at once: rows of the block table.
    pub sequences_max: u32,
    /// Most blocks of one sequence: columns of the block table.
    pub blocks_per_sequence_max: u32,
    /// Steps that the host may be ahead of the device, at most 1024; 1 for an overlap scheduler.
    pub overlap_depth: u32,
    /// Device blocks that admission leaves for the growth of running sequences, while there are any.
    pub watermark_blocks: u32,
    /// Whether a block is overwritten with zeros before another tenant gets it.
    pub scrubs: bool,
    /// How blocks are named. Caches that exchange names use the same.
    pub hasher: BlockHasher,
    /// Tiers below host memory. They need a host tier.
    pub tiers: LowerTiers,
    /// Most tokens of a step, over all its sequences.
    pub step_tokens_max: u32,
    /// Most bytes of each array of the caller's own that a step sends to every device, beside the batch.
    pub step_arrays: Vec<u64>,
    /// A limit on the memory under device blocks, summed over the devices, and the memory that each
    /// device keeps free. The cache works with fewer blocks while these leave no memory. It grows
    /// again when the limit is raised or when another user frees memory. A lowered limit unmaps
    /// nothing.
    pub memory: MemoryRules,
    /// Rules of the block pool: order of eviction, log of events, clock.
    pub pool: PoolRules,
}

/// How the memory of host blocks is pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HostPinning {
    /// Threads that pin in the background, shared among the devices; no more are started than the machine
    /// has cores. Host blocks are used as they are pinned. With 0, the driver allocates all of them before
    /// the cache is returned, in about 0.4 s for each GiB.
    pub threads: u32,
    /// Most bytes of a slab, the unit that is pinned and given back, on each device; at least a block, and at
    /// most 64 GiB. While one is pinned, about 20 ms for each GiB, calls of the driver may wait.
    pub slab_bytes_max: u64,
}

impl HostPinning {
    /// Pins 64 GiB in 2 s, by 16 threads in slabs of 512 MiB.
    pub const BACKGROUND: Self = Self { threads: 16, slab_bytes_max: SlabsOptions::SLAB_BYTES };

    /// Has the driver allocate all memory before the cache is returned.
    pub const AT_ONCE: Self = Self { threads: 0, ..Self::BACKGROUND };

    /// The same for one of `parts` devices.
    pub(crate) fn of_one(self, parts: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let all = (self.threads as usize).min(cores);
        let threads = (all / parts.max(1)).clamp(usize::from(all > 0), SlabsOptions::THREADS_MAX);
        Self { threads: threads as u32, ..self }
    }
}

/// Rules of a cache's block pool.
#[derive(Clone, Debug, Default)]
pub struct PoolRules {
    /// The order in which cached blocks leave the device.
    pub eviction: Eviction,
    /// The order in which cached blocks leave host memory, when evicted device blocks need room
    /// there.
    pub host_eviction: Eviction,
    /// Number of latest events kept for [readers](crate::KvCache::events), a block's each; `None` keeps none. What
    /// they cost is told at [`ManagerOptions::events_max`](kv_manager::ManagerOptions::events_max).
    pub events: Option<usize>,
    /// The clock of ages and durations, read once a step; `None` is the system's clock.
    pub clock: Option<Arc<dyn Clock>>,
    /// Device blocks that [pins](crate::KvCache::pin) hold at most, all together.
    pub pinned_blocks_max: u64,
}

/// The order in which cached blocks leave a tier.
#[derive(Clone, Copy, Debug)]
pub enum Eviction {
    /// One of the policies of `kv-pool`. Priorities come first in each.
    Kind(PolicyKind),
    /// A policy of the caller, made for the given number of blocks.
    Custom(fn(u64) -> Result<Box<dyn EvictionPolicy>, PolicyError>),
}

impl Default for Eviction {
    fn default() -> Self {
        Self::Kind(PolicyKind::Lru)
    }
}

impl From<PolicyKind> for Eviction {
    fn from(kind: PolicyKind) -> Self {
        Self::Kind(kind)
    }
}

impl Eviction {
    /// The policy, or `None` for a pool's built-in order.
    pub(crate) fn make(self, blocks: u64) -> Result<Option<Box<dyn EvictionPolicy>>, PolicyError> {
        match self {
            Self::Kind(PolicyKind::Lru) => Ok(None),
            Self::Kind(kind) => kind.make(blocks).map(Some),
            Self::Custom(make) => make(blocks).map(Some),
        }
    }
}

/// When memory is mapped under device blocks, and by whom.
#[derive(Clone, Debug, Default)]
pub enum Growth {
    /// The call that needs blocks maps them, in about 75 µs a page.
    #[default]
    OnDemand,
    /// A worker maps blocks ahead of need. A call that finds its blocks ready makes no driver call
    /// for memory. A call that finds too few maps the missing blocks itself, and is counted.
    Ahead {
        /// Empty blocks to keep ready: as many as one step may claim, admissions included.
        blocks: u32,
        /// The worker, with a thread of its own or polled. The cache does not close it.
        worker: Worker,
    },
}

impl Growth {
    /// The worker, if there is one.
    #[must_use]
    pub fn worker(&self) -> Option<&Worker> {
        match self {
            Self::OnDemand => None,
            Self::Ahead { worker, .. } => Some(worker),
        }
    }
}

/// Options that no cache can be built with.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A count is zero.
    #[error("the cache option {field} is 0")]
    Zero {
        /// Name of the option.
        field: &'static str,
    },
    /// The host would run too many steps ahead, with a staging buffer for each.
    #[error("overlap_depth is {overlap_depth}, more than {OVERLAP_DEPTH_MAX}")]
    OverlapDepth {
        /// Depth asked for.
        overlap_depth: u32,
    },
    /// Too many layers.
    #[error("a cache of {layers} layers has more than {LAYERS_MAX}")]
    TooManyLayers {
        /// Number of layers.
        layers: u32,
    },
    /// More devices than layers.
    #[error("a cache on {devices} devices has only {layers} layers to divide")]
    DevicesOverLayers {
        /// Number of devices.
        devices: usize,
        /// Number of layers.
        layers: u32,
    },
    /// The placement is for a model with another number of layers.
    #[error("the placement has {placed} layers, and the cache {layers}")]
    PlacedLayers {
        /// Layers of the placement.
        placed: usize,
        /// Layers of the shape.
        layers: u32,
    },
    /// The placement is for another number of devices.
    #[error("the placement has {placed} devices, and the cache {devices}")]
    PlacedDevices {
        /// Devices of the placement.
        placed: usize,
        /// Devices given.
        devices: usize,
    },
    /// The engine's tensors hold KV of another shape.
    #[error("the adopted tensors hold {given:?}, and the cache's part is {expected:?}")]
    AdoptedShape {
        /// The shape of the tensors.
        given: KvShape,
        /// The shape that the options say.
        expected: KvShape,
    },
    /// The engine's tensors have too few blocks.
    #[error("the adopted tensors have {given} blocks, and the cache {expected}")]
    AdoptedBlocks {
        /// Blocks of the tensors.
        given: u64,
        /// Blocks that the options say.
        expected: u64,
    },
    /// Not one adopted description for each device that has layers.
    #[error("{given} adopted descriptions for {expected} devices with layers")]
    AdoptedParts {
        /// Descriptions given.
        given: usize,
        /// Devices that have layers.
        expected: usize,
    },
    /// A description is of another device than the compute stream in its place.
    #[error("adopted description {position} is of another device than the compute stream there")]
    AdoptedElsewhere {
        /// Position of the description.
        position: usize,
    },
    /// Memory of two adopted descriptions overlaps: each would write what the other keeps.
    #[error("adopted descriptions {first} and {second} overlap at {address:#x}")]
    AdoptedOverlap {
        /// Position of one description.
        first: usize,
        /// Position of the other.
        second: usize,
        /// Where a tensor of one begins inside a tensor of the other.
        address: u64,
    },
    /// Blocks in several pieces cannot be copied by one call each.
    #[error(
        "blocks of the adopted tensors lie in several pieces: TransportChoice::EachBlock cannot copy them"
    )]
    BlocksInPieces,
    /// The placement is for another device.
    #[error("compute stream {position} is not on the GPU that the placement has in that position")]
    PlacedElsewhere {
        /// Position of the device.
        position: usize,
    },
    /// The placement is for blocks of another size.
    #[error("layer {layer} was placed with blocks of {placed_bytes} bytes, not {layer_bytes}")]
    PlacedBlocks {
        /// The layer.
        layer: usize,
        /// Bytes of a block in it, as placed.
        placed_bytes: u64,
        /// Bytes of a block in a layer of the shape.
        layer_bytes: u64,
    },
    /// The rows do not divide into the heads of the placement.
    #[error("rows of {row_bytes} bytes do not divide into {kv_heads} heads")]
    PlacedHeads {
        /// Bytes of a row of the shape.
        row_bytes: u64,
        /// Heads of K, and of V, of the placement.
        kv_heads: u64,
    },
    /// The placement has room for fewer blocks.
    #[error("the cache has {blocks} device blocks, and the placement room for {fit}")]
    PlacedTooMany {
        /// Blocks asked for.
        blocks: u64,
        /// The most that fit.
        fit: u64,
    },
    /// The cache would not fit into the address space.
    #[error("a tier of {blocks} blocks of {block_bytes} bytes overflows the address space")]
    Overflow {
        /// Number of blocks.
        blocks: u32,
        /// Size of one.
        block_bytes: u64,
    },
    /// The inputs of a step would take too much pinned memory.
    #[error("the inputs of a step take {bytes} bytes, more than {STEP_BYTES_MAX}")]
    StepBytes {
        /// Bytes of all inputs.
        bytes: u64,
    },
    /// A block id must fit the block table's entries.
    #[error("{blocks} device and host blocks are more than {}", kv_pool::BLOCKS_MAX)]
    TooManyBlocks {
        /// Number of blocks.
        blocks: u64,
    },
}

cuda_driver::messages::one_line_debug!(OptionsError);

impl KvCacheOptions {
    /// A cache of `device_blocks` blocks, whose memory is mapped when they are first needed: no host tier,
    /// up to 256 sequences of up to 2,048 blocks, and steps of up to 8,192 tokens, one ahead of the
    /// device. Each field can be set to something else.
    #[must_use]
    pub fn new(shape: KvShape, device_blocks: u32) -> Self {
        Self {
            shape,
            placement: None,
            device_blocks,
            growth: Growth::OnDemand,
            host_blocks: 0,
            pinning: HostPinning::BACKGROUND,
            transport: TransportRules::default(),
            sequences_max: 256,
            blocks_per_sequence_max: 2048,
            overlap_depth: 1,
            watermark_blocks: 0,
            scrubs: false,
            hasher: BlockHasher::FAST,
            tiers: LowerTiers::default(),
            step_tokens_max: 8192,
            step_arrays: Vec::new(),
            memory: MemoryRules::default(),
            pool: PoolRules::default(),
        }
    }

    /// Checks what can be checked without a device.
    pub(crate) fn check(&self, devices: usize) -> Result<(), OptionsError> {
        for (field, value) in [
            ("device_blocks", self.device_blocks),
            ("sequences_max", self.sequences_max),
            ("blocks_per_sequence_max", self.blocks_per_sequence_max),
            ("step_tokens_max", self.step_tokens_max),
            ("overlap_depth", self.overlap_depth),
            ("devices", devices as u32),
        ] {
            if value == 0 {
                return Err(OptionsError::Zero { field });
            }
        }
        if self.overlap_depth > OVERLAP_DEPTH_MAX {
            return Err(OptionsError::OverlapDepth { overlap_depth: self.overlap_depth });
        }
        let layers = self.shape.layers();
        if layers > LAYERS_MAX {
            return Err(OptionsError::TooManyLayers { layers });
        }
        if self.placement.is_none() && devices as u64 > u64::from(layers) {
            return Err(OptionsError::DevicesOverLayers { devices, layers });
        }
        let block_bytes = self.shape.block_bytes();
        let all = u64::from(self.device_blocks) + u64::from(self.host_blocks);
        if all > kv_pool::BLOCKS_MAX {
            return Err(OptionsError::TooManyBlocks { blocks: all });
        }
        for blocks in [self.device_blocks, self.host_blocks] {
            // Half the address space leaves room for every rounding up to a page.
            if u64::from(blocks).checked_mul(block_bytes).is_none_or(|bytes| bytes > 1 << 62) {
                return Err(OptionsError::Overflow { blocks, block_bytes });
            }
        }
        let bytes = self.batch().buffer_bytes();
        if bytes > STEP_BYTES_MAX {
            return Err(OptionsError::StepBytes { bytes });
        }
        if let Some(placement) = &self.placement {
            shares::check(placement, self, devices)?;
        }
        Ok(())
    }

    /// The batch of a step on each device. Padding names block 0, which has memory in every step.
    pub(crate) fn batch(&self) -> BatchOptions {
        BatchOptions {
            rows: self.sequences_max,
            sequences_max: self.sequences_max,
            tokens_max: self.step_tokens_max,
            tables: vec![BatchTable {
                width: self.blocks_per_sequence_max,
                block_tokens: self.shape.block_tokens(),
                null_block: 0,
            }],
            arrays: self.step_arrays.clone(),
        }
    }
}
