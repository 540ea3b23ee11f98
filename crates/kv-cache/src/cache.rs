//! The cache: blocks on one or several devices, and a tier in host memory.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use cuda_driver::Stream;
use cuda_vmm::{EpochGate, Fence, Lease};
use kv_kernels::KvShape;
use kv_pool::{BlockPool, PoolConfig, PoolView, Tier};
use kv_stage::BlockTable;
use parking_lot::Mutex;

use crate::growth::Shortage;
use crate::part::Part;
use crate::rows::RowPool;
use crate::runs::Runs;
use crate::shares::shares;
use crate::step::{InFlight, Latest};
use crate::{BuildError, KvCacheOptions, OptionsError, PoolRules, TransportStats};

/// Counts of the blocks and bytes that a cache has mapped and moved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CacheStats {
    /// Blocks with device memory, in use or ready for use.
    pub ready_blocks: u64,
    /// Pages that were mapped ahead of need, on all devices.
    pub pages_ahead: u64,
    /// Pages that were mapped by calls that needed them, on all devices.
    pub pages_inline: u64,
    /// Calls that found too few blocks ready and mapped pages themselves.
    pub growth_stalls: u64,
    /// Blocks copied to host memory, or to be copied there when the next step is staged.
    pub offloaded_blocks: u64,
    /// Blocks copied back from host memory, or to be copied back when the next step is staged.
    pub onboarded_blocks: u64,
    /// Bytes of both kinds of copies, on all devices.
    pub copied_bytes: u64,
    /// Steps finished.
    pub steps: u64,
}

/// A KV cache for an LLM engine.
///
/// Device memory is mapped page by page, ahead of need or when blocks are first needed. Blocks are
/// found by prefix, shared, evicted to pinned host memory and brought back. Layers may be split
/// over several devices, which share one numbering of blocks.
///
/// # Ordering
/// The engine enqueues the work of a step on the compute streams between
/// [`begin_step`](KvCache::begin_step) and [`finish_step`](KvCache::finish_step), after it has
/// [staged](KvCache::stage) the step's tables. Copies between device and host run on streams of
/// their own, and the work of a step that is staged after them waits for them on the device. A
/// released block is handed out again when the step of its release has completed on every device.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) options: KvCacheOptions,
    pub(crate) pool: BlockPool,
    /// Dropped before the leases below, so that memory in use stays mapped.
    pub(crate) parts: Vec<Part>,
    /// # Invariants
    /// A lease, or its fences, covers all work that may use the parts' memory, of steps and of
    /// copies.
    pub(crate) gate: EpochGate,
    pub(crate) table: BlockTable,
    pub(crate) rows: RowPool,
    /// Steps that were not yet seen to complete, oldest first.
    pub(crate) in_flight: VecDeque<InFlight>,
    /// Fences after copies that the compute streams wait for, and that no step in flight has taken
    /// over yet.
    pub(crate) arrived: Vec<Fence>,
    /// Copies that are not enqueued yet, or not on all devices.
    pub(crate) runs: Runs,
    /// Held while copies are enqueued and some compute stream does not wait for them yet.
    pub(crate) copies: Option<Lease>,
    /// Device blocks whose content comes from host memory by copies that no compute stream waits for
    /// yet.
    pub(crate) arriving: HashSet<usize>,
    /// The latest step, shared with its [`OpenStep`](crate::OpenStep).
    pub(crate) latest: Arc<Mutex<Latest>>,
    /// Memory ran out, and may have come back since.
    pub(crate) shortage: Option<Shortage>,
    pub(crate) stats: CacheStats,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) sabotage: Sabotage,
}

/// Protections taken out, for tests that must see the harm.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[derive(Debug, Default)]
pub(crate) struct Sabotage {
    pub(crate) ignores_copies: bool,
    pub(crate) sends_backwards: bool,
}

impl KvCache {
    /// A cache on the devices of `compute`, one stream each, which the
    /// [placement](KvCacheOptions::placement) names in the same order. Without one, the layers are split
    /// over them in contiguous runs of nearly equal length.
    ///
    /// Reserves addresses, pins the host tier and the staging buffers, and loads the kernels; maps
    /// no device memory yet. Takes about 0.4 s for each GiB of host memory.
    ///
    /// # Errors
    /// [`BuildError`]; nothing stays allocated.
    #[track_caller]
    pub fn new(compute: &[Stream], options: KvCacheOptions) -> Result<Self, BuildError> {
        let _site = cuda_driver::site::enter();
        options.check(compute.len())?;
        check_placed(&options, compute)?;
        let built = Self::build(compute, options);
        if built.is_err() {
            for stream in compute {
                // An error here would hide the first one; the driver crate logs it.
                let _ = stream.device().free_retired();
            }
        }
        built
    }

    /// `options` has been checked.
    fn build(compute: &[Stream], options: KvCacheOptions) -> Result<Self, BuildError> {
        // See the invariant of `gate`.
        let gate = EpochGate::for_all_uses();
        let parts = shares(&options, compute.len())
            .into_iter()
            .map(|share| Part::new(&compute[share.device], share, &options, &gate))
            .collect::<Result<Vec<_>, _>>()?;
        let pool = pool(&options)?;
        let rows = options.sequences_max;
        let table = BlockTable::new(rows as usize, options.blocks_per_sequence_max as usize)?;
        Ok(Self {
            pool,
            parts,
            gate,
            table,
            rows: RowPool::new(rows),
            in_flight: VecDeque::with_capacity(options.overlap_depth as usize + 2),
            arrived: Vec::new(),
            runs: Runs::default(),
            copies: None,
            arriving: HashSet::new(),
            latest: Arc::default(),
            shortage: None,
            stats: CacheStats::default(),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            sabotage: Sabotage::default(),
            options,
        })
    }

    /// The shape of the KV of all layers.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.options.shape
    }

    /// The options that the cache was built with.
    #[must_use]
    pub fn options(&self) -> &KvCacheOptions {
        &self.options
    }

    /// The devices' parts of the cache, in the order of the devices. A device without layers has no
    /// part.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// A view of the block pool: statistics, events and lookups. It cannot release blocks that the
    /// cache uses.
    ///
    /// ```compile_fail,E0599
    /// # fn view(cache: kv_cache::KvCache) {
    /// cache.pool().begin_epoch();
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0599
    /// # fn view(cache: kv_cache::KvCache, epoch: kv_pool::Epoch) {
    /// cache.pool().complete_epoch(epoch);
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0599
    /// # fn view(cache: kv_cache::KvCache) {
    /// cache.pool().add_primary_slots(1);
    /// # }
    /// ```
    #[must_use]
    pub fn pool(&self) -> PoolView {
        self.pool.view()
    }

    /// Counts of moved and mapped blocks so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let mut stats = self.stats;
        for part in &self.parts {
            let growth = part.memory.ahead_stats();
            stats.pages_ahead += growth.ahead_pages;
            stats.pages_inline += growth.inline_pages;
        }
        stats
    }

    /// Batches and blocks enqueued between the devices and host memory, by way, summed over the
    /// devices.
    #[must_use]
    pub fn transports(&self) -> TransportStats {
        let mut all = TransportStats::default();
        self.parts.iter().for_each(|part| all.add(&part.transports));
        all
    }

    /// Lets steps begin without waiting for the copies of blocks to and from host memory.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_ignore_copies(&mut self) {
        self.sabotage.ignores_copies = true;
    }

    /// Sends a step's copies in the reverse of the decided order.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_send_backwards(&mut self) {
        self.sabotage.sends_backwards = true;
    }

    /// Makes copies to host memory and copies back wait for none of the other direction.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_ignore_directions(&mut self) {
        self.parts.iter_mut().for_each(Part::sabotage_ignore_directions);
    }

    /// Blocks with memory on every device, including those that the pool does not have yet.
    pub(crate) fn mapped_blocks(&self) -> u64 {
        self.parts.iter().map(Part::ready_blocks).min().unwrap_or(0)
    }

    /// Blocks of `tokens` tokens.
    pub(crate) fn blocks_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.options.shape.block_tokens()))
    }
}

/// Checks that the placement is for these devices.
fn check_placed(options: &KvCacheOptions, compute: &[Stream]) -> Result<(), OptionsError> {
    let Some(placement) = &options.placement else { return Ok(()) };
    for (position, (gpu, stream)) in placement.gpus().iter().zip(compute).enumerate() {
        if gpu.uuid != stream.device().info().uuid {
            return Err(OptionsError::PlacedElsewhere { position });
        }
    }
    Ok(())
}

/// The pool that `options` ask for. None of its device blocks has memory yet.
fn pool(options: &KvCacheOptions) -> Result<BlockPool, BuildError> {
    let (primary_blocks, secondary_blocks) =
        (u64::from(options.device_blocks), u64::from(options.host_blocks));
    let config = PoolConfig { primary_blocks, secondary_blocks, ..PoolConfig::default() };
    let mut builder = BlockPool::builder(&config);
    let PoolRules { eviction, host_eviction, events, clock } = &options.pool;
    if let Some(clock) = clock {
        builder = builder.clock(Arc::clone(clock));
    }
    if let Some(events) = *events {
        builder = builder.events(events);
    }
    for (tier, eviction) in [(Tier::Primary, eviction), (Tier::Secondary, host_eviction)] {
        if let Some(policy) = eviction.make(primary_blocks + secondary_blocks)? {
            builder = builder.policy(tier, policy);
        }
    }
    let pool = builder.build()?;
    // Nothing is kept for tenants yet, so no budget is too small.
    drop(pool.set_budget(Tier::Primary, 0));
    Ok(pool)
}
