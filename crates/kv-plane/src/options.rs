//! Options of a cache, checked before anything is allocated.

use std::sync::Arc;

use cuda_driver::guard;
use cuda_vmm::{MemoryRules, Worker};
use kv_kernels::KvShape;
use kv_manager::{GroupId, ManagerOptions, SharedMemory};
use kv_multigpu::place::Placement;
use kv_pool::ConfigError;
use kv_pool::clock::Clock;
use kv_pool::policy::{EvictionPolicy, PolicyKind};
use kv_pool::store::{StoreKind, StorePolicy, StoreRules};
use kv_pool::{BlockHasher, BlockId, PoolConfig};
use kv_stage::{BatchOptions, BatchTable, SlabsOptions};
use kv_tier::GroupKind;

use crate::{LowerTiers, TransportRules, shares};

/// Most steps that the host may be ahead of the device.
const OVERLAP_DEPTH_MAX: u32 = 1024;

/// Most layers: far beyond any model, and few enough for a list of them.
const LAYERS_MAX: u32 = 1 << 16;

/// Most bytes of a step's staged arrays: far beyond any engine's need, and few enough to pin for
/// each step in flight.
const STEP_BYTES_MAX: u64 = 1 << 30;

/// A group of layers: its blocks have a table, a shape and memory of their own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GroupOptions {
    /// What the layers keep of a sequence.
    pub kind: GroupKind,
    /// All layers of the group, with whole rows. Of recurrent layers ([`GroupKind::State`]), a block is one
    /// state of all layers: the shape has as many rows as make up a layer's state.
    pub shape: KvShape,
    /// Most blocks on the device. Memory is mapped under those of a first group that keeps everything as
    /// [`growth`](KvCacheOptions::growth) says, and under all others when the cache is made.
    pub device_blocks: u32,
    /// Blocks of pinned host memory that evicted blocks are offloaded to; 0 for no host tier.
    pub host_blocks: u32,
    /// Most blocks of one sequence: columns of the block table. A sequence has one state, and one for each draft beside.
    pub blocks_per_sequence_max: u32,
    /// Device blocks that admission leaves for the growth of running sequences, while there are any.
    pub watermark_blocks: u32,
    /// Whether a draft model writes it, whose KV has an end of its own: see
    /// [`kv_manager::GroupOptions::draft_model`]. What a step computes of it is in the parts'
    /// [`draft_batch`](crate::Part::draft_batch).
    pub draft_model: bool,
}

impl GroupOptions {
    /// Layers of full attention with `device_blocks` blocks on the device, none in host memory, and up to 2,048 of a sequence.
    #[must_use]
    pub fn new(shape: KvShape, device_blocks: u32) -> Self {
        Self {
            kind: GroupKind::Full,
            shape,
            device_blocks,
            host_blocks: 0,
            blocks_per_sequence_max: 2048,
            watermark_blocks: 0,
            draft_model: false,
        }
    }

    pub(crate) fn is_state(&self) -> bool {
        matches!(self.kind, GroupKind::State { .. })
    }

    /// Entries of a row of the block table.
    pub(crate) fn width(&self) -> u32 {
        match self.kind {
            GroupKind::State { drafts, .. } => drafts.saturating_add(1),
            _ => self.blocks_per_sequence_max,
        }
    }
}

/// Shape and size of a [`KvCache`](crate::KvCache).
#[derive(Clone, Debug)]
pub struct KvCacheOptions {
    /// The groups of the model's layers, 1 or more: one if all layers keep the same of a sequence in blocks of one size. The
    /// place of a group in this list is its [`GroupId`].
    ///
    /// The device memory of groups behind the first is mapped when the cache is made, and stays. So does that of a first
    /// group that does not keep everything ([`GroupKind::Full`]), since a block behind its last one stands where rows
    /// have none.
    pub groups: Vec<GroupOptions>,
    /// Device memory that all groups draw on, two or more, by granules; `None` where each group has memory of its
    /// own. Usually made by [`sharing`](Self::sharing). Each group then has `granules * granule_blocks` device
    /// blocks, of which it is given those that it needs, while there is memory.
    ///
    /// A granule takes whole pages of the device in every group, so that no block is padded. Its memory is taken
    /// when the cache is made, and stays the cache's; [`growth`](Self::growth) means nothing. Where granules of
    /// two groups have different numbers of bytes, each takes the larger one.
    pub shared: Option<SharedMemory>,
    /// The layers of each device, or its heads of all layers. `None` splits the layers over the
    /// devices in contiguous runs of nearly equal length.
    pub placement: Option<Placement>,
    /// Whether compute streams may be of one device, which then has a part for each: a test of several parts on a machine with
    /// one GPU. Otherwise a device that is given twice is taken for a mistake.
    pub parts_share_devices: bool,
    /// How memory is mapped under the device blocks of the first group.
    pub growth: Growth,
    /// How host memory is pinned.
    pub pinning: HostPinning,
    /// How blocks travel between the devices and host memory.
    pub transport: TransportRules,
    /// Most sequences at once: rows of the block table.
    pub sequences_max: u32,
    /// Steps that the host may be ahead of the device, at most 1024; 1 for an overlap scheduler.
    pub overlap_depth: u32,
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
    /// What of the evicted content is stored in host memory. What the tiers below it store is told by
    /// [`LowerTiers::store`](crate::LowerTiers::store).
    pub store: HostStore,
    /// Number of latest events kept for [readers](kv_manager::Manager::events), a block's each; `None` keeps none. What
    /// they cost is told at [`ManagerOptions::events_max`](kv_manager::ManagerOptions::events_max).
    pub events: Option<usize>,
    /// The clock of ages and durations, read once a step; `None` is the system's clock.
    pub clock: Option<Arc<dyn Clock>>,
    /// Device blocks that [pins](crate::KvCache::pin) hold at most, all together.
    pub pinned_blocks_max: u64,
}

/// What of the evicted content is stored in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum HostStore {
    /// Everything.
    #[default]
    All,
    /// What is likely to be asked for again while host memory has it, by evidence. The rules' number of blocks is
    /// the cache's own: that of each group's host blocks.
    Evidence(StoreRules),
}

impl From<StoreKind> for HostStore {
    fn from(kind: StoreKind) -> Self {
        match kind {
            StoreKind::All => Self::All,
            _ => Self::Evidence(StoreRules::new(0)),
        }
    }
}

impl HostStore {
    /// The policy of a group with so many host blocks; `None` if everything is stored.
    ///
    /// # Errors
    /// [`ConfigError`] if there is no memory for its tables.
    pub fn make(self, host_blocks: u32) -> Result<Option<Box<dyn StorePolicy>>, ConfigError> {
        match self {
            Self::Evidence(rules) if host_blocks > 0 => {
                StoreKind::Evidence.make(StoreRules { blocks: host_blocks.into(), ..rules })
            }
            _ => Ok(None),
        }
    }
}

/// The order in which cached blocks leave a tier.
#[derive(Clone, Copy, Debug)]
pub enum Eviction {
    /// One of the policies of `kv-pool`. Priorities come first in each.
    Kind(PolicyKind),
    /// A policy of the caller, made for the given number of blocks.
    Custom(fn(u64) -> Result<Box<dyn EvictionPolicy>, ConfigError>),
}

impl Default for Eviction {
    fn default() -> Self {
        Self::Kind(PolicyKind::default())
    }
}

impl From<PolicyKind> for Eviction {
    fn from(kind: PolicyKind) -> Self {
        Self::Kind(kind)
    }
}

impl Eviction {
    /// The policy, or `None` for a pool's built-in order.
    pub(crate) fn make(self, blocks: u64) -> Result<Option<Box<dyn EvictionPolicy>>, ConfigError> {
        match self {
            Self::Kind(kind) => kind.make(blocks),
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
    /// A number of a group is zero.
    #[error("the option {field} of group {} is 0", group.0)]
    GroupZero {
        /// The group: its place in the list of groups.
        group: GroupId,
        /// Name of the option.
        field: &'static str,
    },
    /// A cache is on one device at least.
    #[error("a cache on no device: give a compute stream for each that it is to be on")]
    NoDevices,
    /// A device would have two parts, and do the work of two.
    #[error(
        "compute streams {first} and {second} are both of GPU {ordinal}: give one for each device, \
         or set parts_share_devices"
    )]
    DeviceTwice {
        /// Position of one stream.
        first: usize,
        /// Position of the other.
        second: usize,
        /// Ordinal of the device.
        ordinal: i32,
    },
    /// Workers are counted from 0.
    #[error(
        "worker {worker} of {workers}: give its number, counted from 0, and how many there are"
    )]
    Rank {
        /// The number that was given.
        worker: u16,
        /// How many there are.
        workers: u16,
    },
    /// Streams, events and memory of two drivers do not know each other.
    #[error("compute stream {position} is of another driver than the first one")]
    TwoDrivers {
        /// Position of the stream.
        position: usize,
    },
    /// The host would run too many steps ahead, with a staging buffer for each.
    #[error("overlap_depth is {overlap_depth}, more than {OVERLAP_DEPTH_MAX}")]
    OverlapDepth {
        /// Depth asked for.
        overlap_depth: u32,
    },
    /// Too many layers.
    #[error("group {} has {layers} layers, more than {LAYERS_MAX}", group.0)]
    TooManyLayers {
        /// The group.
        group: GroupId,
        /// Number of layers.
        layers: u32,
    },
    /// Layers are placed, and there are several groups.
    #[error("a placement is for a model of one group, and the cache has {groups}")]
    PlacedGroups {
        /// Groups of the cache.
        groups: usize,
    },
    /// More devices than layers.
    #[error("group {} has {layers} layers, too few to divide over {devices} devices", group.0)]
    DevicesOverLayers {
        /// The group.
        group: GroupId,
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
    #[error("the adopted tensors of group {} hold {given:?}, and the cache's part is {expected:?}", group.0)]
    AdoptedShape {
        /// The group.
        group: GroupId,
        /// The shape of the tensors.
        given: KvShape,
        /// The shape that the options say.
        expected: KvShape,
    },
    /// The engine's tensors have too few blocks.
    #[error("the adopted tensors of group {} have {given} blocks, and the cache {expected}", group.0)]
    AdoptedBlocks {
        /// The group.
        group: GroupId,
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
    /// So much memory has no room for a granule.
    #[error("{bytes} bytes of shared memory have no room for a granule of {granule_bytes} bytes")]
    Granule {
        /// Bytes of a device that groups are to share.
        bytes: u64,
        /// Bytes of a granule, and of the blocks of all groups that nobody owns.
        granule_bytes: u64,
    },
    /// A granule ends within a page of the device.
    #[error(
        "a granule of group {} has {bytes} bytes, no multiple of the device's pages of {page_bytes}",
        group.0
    )]
    SplitPage {
        /// The group.
        group: GroupId,
        /// Bytes of its blocks in a granule, on one device.
        bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// The engine's tensors cannot be shared by granules.
    #[error("tensors of the engine have fixed numbers of blocks, and cannot be shared by groups")]
    SharedAdopted,
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
    #[error(
        "a tier of {blocks} blocks of {block_bytes} bytes of group {} overflows the address space", group.0
    )]
    Overflow {
        /// The group.
        group: GroupId,
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
    #[error("{blocks} device and host blocks of group {} are more than {}", group.0, kv_pool::BLOCKS_MAX)]
    TooManyBlocks {
        /// The group.
        group: GroupId,
        /// Number of blocks.
        blocks: u64,
    },
    /// A worker process that takes another's place gets all block tables at once.
    #[error(
        "the block tables have {bytes} bytes, more than the {max} that worker processes get at once: give sequences_max or \
         blocks_per_sequence_max less"
    )]
    Snapshot {
        /// Bytes of all tables.
        bytes: u64,
        /// The most.
        max: u64,
    },
}

cuda_driver::messages::one_line_debug!(OptionsError);

impl KvCacheOptions {
    /// A cache with [one group](GroupOptions::new) of `device_blocks` blocks, whose memory is mapped when they are first
    /// needed: up to 256 sequences, and steps of up to 8,192 tokens, one ahead of the device. Each field can be set to
    /// something else, and other groups pushed behind the first.
    #[must_use]
    pub fn new(shape: KvShape, device_blocks: u32) -> Self {
        Self::of(vec![GroupOptions::new(shape, device_blocks)])
    }

    /// The same with these groups.
    #[must_use]
    pub fn of(groups: Vec<GroupOptions>) -> Self {
        Self {
            groups,
            shared: None,
            placement: None,
            parts_share_devices: false,
            growth: Growth::OnDemand,
            pinning: HostPinning::BACKGROUND,
            transport: TransportRules::default(),
            sequences_max: 256,
            overlap_depth: 1,
            scrubs: false,
            hasher: BlockHasher::FAST,
            tiers: LowerTiers::default(),
            step_tokens_max: 8192,
            step_arrays: Vec::new(),
            memory: MemoryRules::default(),
            pool: PoolRules::default(),
        }
    }

    /// The same with `bytes` bytes on each of `devices` devices, which all groups share: as granules of about the
    /// same size in each group, in which blocks of all groups waste least, and of at most a 64th of the memory
    /// where that is possible. The groups' numbers of device blocks follow from it.
    ///
    /// # Errors
    /// [`OptionsError`], for too little memory, too many devices or too many blocks.
    pub fn sharing(self, bytes: u64, devices: usize) -> Result<Self, OptionsError> {
        if devices == 0 {
            return Err(OptionsError::Zero { field: "devices" });
        }
        let mut block_bytes = Vec::new();
        for (group, of) in self.numbered() {
            let layers = of.shape.layers();
            if devices as u64 > u64::from(layers) {
                return Err(OptionsError::DevicesOverLayers { group, devices, layers });
            }
            // Without a placement, devices have whole layers, the first ones one more.
            let layer = of.shape.block_bytes() / u64::from(layers);
            let fewest = u64::from(layers) / devices as u64;
            let most = u64::from(layers).div_ceil(devices as u64);
            block_bytes.push([most * layer, fewest * layer]);
        }
        let memory = shared_memory(bytes, &block_bytes)?;
        let mut options = self;
        let groups = (0..).map(GroupId).zip(&mut options.groups);
        for ((group, own), &of) in groups.zip(&memory.granule_blocks) {
            let blocks = u64::from(memory.granules) * u64::from(of);
            own.device_blocks = match u32::try_from(blocks) {
                Ok(count) if blocks < kv_pool::BLOCKS_MAX => count,
                _ => return Err(OptionsError::TooManyBlocks { group, blocks }),
            };
        }
        options.shared = Some(memory);
        Ok(options)
    }

    /// Whether rows of a group have entries without a block that kernels may read, as behind a window and in padding
    /// where block 0 may be another group's, or read and write, as the states of padding.
    pub(crate) fn has_null_block(&self, group: &GroupOptions) -> bool {
        group.kind != GroupKind::Full || self.shared.is_some()
    }

    /// Blocks with memory on the device: where rows lack blocks one more, which no sequence owns.
    pub(crate) fn memory_blocks(&self, group: &GroupOptions) -> u32 {
        group.device_blocks.saturating_add(self.has_null_block(group).into())
    }

    /// The block that stands where a row has none.
    pub(crate) fn null_block(&self, group: &GroupOptions) -> BlockId {
        let has_own = guard!("cache.padding-names-nobody", self.has_null_block(group), else false);
        // Pages of more blocks than there are ids are refused.
        BlockId::new(group.device_blocks).filter(|_| has_own).unwrap_or(BlockId::from(0))
    }

    /// Checks what can be checked without a device.
    pub(crate) fn check(&self, devices: usize) -> Result<(), OptionsError> {
        if devices == 0 {
            return Err(OptionsError::NoDevices);
        }
        for (field, value) in [
            ("groups", self.groups.len() as u64),
            ("sequences_max", self.sequences_max.into()),
            ("step_tokens_max", self.step_tokens_max.into()),
            ("overlap_depth", self.overlap_depth.into()),
        ] {
            if value == 0 {
                return Err(OptionsError::Zero { field });
            }
        }
        if self.overlap_depth > OVERLAP_DEPTH_MAX {
            return Err(OptionsError::OverlapDepth { overlap_depth: self.overlap_depth });
        }
        if self.placement.is_some() && self.groups.len() > 1 {
            return Err(OptionsError::PlacedGroups { groups: self.groups.len() });
        }
        for (id, group) in self.numbered() {
            self.check_group(id, group, devices)?;
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

    fn check_group(
        &self,
        group: GroupId,
        own: &GroupOptions,
        devices: usize,
    ) -> Result<(), OptionsError> {
        for (field, value) in [
            ("device_blocks", own.device_blocks),
            ("blocks_per_sequence_max", own.blocks_per_sequence_max),
        ] {
            if value == 0 {
                return Err(OptionsError::GroupZero { group, field });
            }
        }
        let layers = own.shape.layers();
        if layers > LAYERS_MAX {
            return Err(OptionsError::TooManyLayers { group, layers });
        }
        if self.placement.is_none() && devices as u64 > u64::from(layers) {
            return Err(OptionsError::DevicesOverLayers { group, devices, layers });
        }
        let block_bytes = own.shape.block_bytes();
        let blocks = u64::from(self.memory_blocks(own)) + u64::from(own.host_blocks);
        if blocks > kv_pool::BLOCKS_MAX {
            return Err(OptionsError::TooManyBlocks { group, blocks });
        }
        for blocks in [self.memory_blocks(own), own.host_blocks] {
            // Half the address space leaves room for every rounding up to a page.
            if u64::from(blocks).checked_mul(block_bytes).is_none_or(|bytes| bytes > 1 << 62) {
                return Err(OptionsError::Overflow { group, blocks, block_bytes });
            }
        }
        Ok(())
    }

    /// The first group, whose device memory can grow. The options were checked.
    pub(crate) fn first(&self) -> &GroupOptions {
        &self.groups[0]
    }

    /// The groups with their ids.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (GroupId, &GroupOptions)> {
        (0..).map(GroupId).zip(&self.groups)
    }

    /// What a manager of this cache is made with.
    pub(crate) fn manager(&self) -> ManagerOptions {
        let groups = self.groups.iter().map(|group| {
            let [primary_blocks, secondary_blocks] =
                [group.device_blocks, group.host_blocks].map(u64::from);
            kv_manager::GroupOptions {
                kind: group.kind,
                block_tokens: self.block_tokens(group),
                pool: PoolConfig { primary_blocks, secondary_blocks, ..PoolConfig::default() },
                blocks_per_sequence_max: group.blocks_per_sequence_max,
                watermark_blocks: group.watermark_blocks,
                draft_model: group.draft_model,
            }
        });
        ManagerOptions {
            groups: groups.collect(),
            sequences_max: self.sequences_max,
            workers: 1,
            steps_in_flight_max: self.overlap_depth + 1,
            pinned_blocks_max: self.pool.pinned_blocks_max,
            scrubs: self.scrubs,
            events_max: self.pool.events.unwrap_or(0),
            hasher: self.hasher,
            placeholder_ids: Vec::new(),
            lower: self.tiers.options(),
            shared: self.shared.clone(),
        }
    }

    /// Tokens of a block of a group, for the manager. Recurrent layers have checkpoints behind multiples of the
    /// first group's blocks that have tokens.
    pub(crate) fn block_tokens(&self, group: &GroupOptions) -> u32 {
        if !group.is_state() {
            return group.shape.block_tokens();
        }
        let tokens = self.groups.iter().filter(|group| !group.is_state());
        tokens.map(|group| group.shape.block_tokens()).max().unwrap_or(1)
    }

    /// The batch of a step on each device. Padding names block 0, which has memory in every step.
    pub(crate) fn batch(&self) -> BatchOptions {
        BatchOptions {
            rows: self.sequences_max,
            sequences_max: self.sequences_max,
            tokens_max: self.step_tokens_max,
            tables: self.groups.iter().map(|group| self.table(group)).collect(),
            arrays: self.step_arrays.clone(),
        }
    }

    /// The batch of the draft model, with the tables of its groups; `None` if there are none.
    pub(crate) fn draft_batch(&self) -> Option<BatchOptions> {
        let groups = self.groups.iter().filter(|group| group.draft_model);
        let tables: Vec<_> = groups.map(|group| self.table(group)).collect();
        (!tables.is_empty()).then(|| BatchOptions { tables, arrays: Vec::new(), ..self.batch() })
    }

    fn table(&self, group: &GroupOptions) -> BatchTable {
        let (is_state, null_block) = (group.is_state(), self.null_block(group));
        let block_tokens = if is_state { 1 } else { group.shape.block_tokens() };
        BatchTable { width: group.width(), block_tokens, null_block, is_state }
    }
}

/// Bytes that a granule's end is a multiple of: those of a page of all devices so far, or a multiple of them.
const PAGE_BYTES: u64 = 2 << 20;

/// Granule sizes that are compared, in pages.
const SIZES_MAX: u64 = 4096;

/// Divides `bytes` bytes of each device among groups whose blocks have so many bytes on the device with most and on
/// the one with fewest.
fn shared_memory(bytes: u64, block_bytes: &[[u64; 2]]) -> Result<SharedMemory, OptionsError> {
    // Blocks that end with a page on every device, and their bytes where there are most.
    let unit = |of: &[u64; 2]| {
        let blocks = of.map(|bytes| PAGE_BYTES / common_divisor(PAGE_BYTES, bytes));
        let blocks = blocks[0].max(blocks[1]);
        (blocks, blocks.saturating_mul(of[0]))
    };
    let units: Vec<(u64, u64)> = block_bytes.iter().map(unit).collect();
    let largest = units.iter().map(|&(_, bytes)| bytes).max().unwrap_or(PAGE_BYTES);
    let fewest = largest / PAGE_BYTES;
    let most = (bytes / 64 / PAGE_BYTES).clamp(fewest, fewest.saturating_add(SIZES_MAX));
    // What groups leave of a granule, in millionths. The first of equals is the smallest.
    let waste = |pages: &u64| {
        let size = pages.saturating_mul(PAGE_BYTES);
        let rest = units.iter().map(|&(_, unit)| size % unit).sum::<u64>();
        u128::from(rest) * 1_000_000 / u128::from(size.max(1))
    };
    let size = (fewest..=most).min_by_key(waste).unwrap_or(fewest).saturating_mul(PAGE_BYTES);
    let taken = units.iter().map(|&(_, unit)| size / unit * unit).max().unwrap_or(size);
    // The null blocks take whole pages, which are as large as all granules allow.
    let page = units.iter().fold(0, |page, &(_, unit)| common_divisor(page, size / unit * unit));
    let page = page.max(PAGE_BYTES);
    let nulls = block_bytes.iter().map(|of| of[0].div_ceil(page).saturating_mul(page));
    let nulls = nulls.fold(0, |all: u64, one| all.saturating_add(one));
    let granules = bytes.saturating_sub(nulls) / taken.max(1);
    if granules == 0 {
        let granule_bytes = taken.saturating_add(nulls);
        return Err(OptionsError::Granule { bytes, granule_bytes });
    }
    let blocks = |(group, &(blocks, unit)): (GroupId, &(u64, u64))| {
        let blocks = size / unit * blocks;
        u32::try_from(blocks).map_err(|_| OptionsError::TooManyBlocks { group, blocks })
    };
    let numbered = (0..).map(GroupId).zip(&units);
    let granule_blocks = numbered.map(blocks).collect::<Result<_, _>>()?;
    Ok(SharedMemory { granules: granules.min(u32::MAX.into()) as u32, granule_blocks })
}

/// The greatest common divisor; of a number and 0, the number.
pub(crate) fn common_divisor(one: u64, other: u64) -> u64 {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    divisor
}
