//! The cache: a manager, and workers that carry out what it decides.

use std::sync::Arc;

use cuda_driver::{Stream, guard};
use kv_kernels::PagedKv;
use kv_manager::{GroupId, Manager, ManagerOptions, WorkerId};
use kv_pool::{PoolBuilder, Tier};

use crate::part::Part;
use crate::{
    BuildError, CloseError, CloseErrors, InProcess, KvCacheOptions, KvWorker, PoolRules,
    TransportStats, Workers,
};

/// The rank of a cache's own worker.
const ALONE: (WorkerId, u16) = (WorkerId(0), 1);

/// Counts of the blocks and bytes that a cache has mapped and moved. What was decided is counted by its
/// [manager](KvCache::manager).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CacheStats {
    /// Blocks of the first group with device memory, in use or ready for use. Those of further groups have it from the
    /// start.
    pub ready_blocks: u64,
    /// Host blocks of the first group that can be used: those that are pinned, within the budget.
    pub host_blocks: u64,
    /// Pages of the first group that were mapped ahead of need, on all devices.
    pub pages_ahead: u64,
    /// Pages of the first group that were mapped by calls that needed them, on all devices.
    pub pages_inline: u64,
    /// Calls that found too few blocks ready and mapped pages themselves.
    pub growth_stalls: u64,
    /// Bytes copied between the devices and host memory, or about to be, on all devices.
    pub copied_bytes: u64,
    /// Bytes by way, on all devices together.
    pub ways: WayBytes,
    /// Batches and blocks enqueued between the devices and host memory, by transport, summed over the devices.
    pub transports: TransportStats,
}

/// Bytes that plans have moved, by way: whole blocks, also where only the first tokens of a block were copied.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct WayBytes {
    /// Of evicted and suspended blocks.
    pub device_to_host: u64,
    /// Of blocks that came back from host memory.
    pub host_to_device: u64,
    /// Copied within the device, because a fork or a cached block shared them, or from a checkpoint of a state.
    pub copy_on_write: u64,
    /// Stored in tiers below host memory, on all workers, the nearer tier first.
    pub stored: [u64; 2],
    /// Loaded from these tiers, and right.
    pub loaded: [u64; 2],
}

/// A KV cache for an LLM engine: a manager that decides, and `W` that carries out: [this process](InProcess), or worker
/// processes. The calls of an engine's loop are the same for both.
///
/// Device memory is mapped page by page, ahead of need or when blocks are first needed. Blocks are
/// found by prefix, shared, evicted to pinned host memory and brought back. Layers may be split
/// over several devices, which share one numbering of blocks.
///
/// # Ordering
/// The engine enqueues the work of a step on the compute streams between [`stage`](KvCache::stage) and
/// [`finish_step`](KvCache::finish_step). Copies between device and host run on streams of their own,
/// and the work of a step waits for those that touch its blocks, on the device. A released block is
/// handed out again when the step of its release has completed on every device.
#[derive(Debug)]
pub struct KvCache<W: Workers = InProcess> {
    pub(crate) manager: Manager,
    pub(crate) workers: W,
    /// The step that was staged and not finished.
    pub(crate) staged: Option<u64>,
    /// Device blocks of the first group that the manager hands out: those that have memory.
    pub(crate) told_blocks: u64,
}

impl KvCache {
    /// A cache on the devices of `compute`, one stream each, all of one driver, which the
    /// [placement](KvCacheOptions::placement) names in the same order. Without one, the layers are split
    /// over them in contiguous runs of nearly equal length.
    ///
    /// Reserves addresses, pins the staging buffers, and loads the kernels; maps no device memory yet. Threads
    /// pin the host tier in the background, slab after slab, and later steps use what is pinned; see
    /// [`pinning`](KvCacheOptions::pinning).
    ///
    /// # Errors
    /// [`BuildError`]; nothing stays allocated.
    #[track_caller]
    pub fn new(compute: &[Stream], options: KvCacheOptions) -> Result<Self, BuildError> {
        Self::with(KvWorker::with_memory(compute, None, options, ALONE)?)
    }

    /// The same over KV memory that the engine allocated: a [`PagedKv`] for each device with layers, in
    /// their order, that [`PagedKv::adopt`] has checked against the tensors' real shapes and strides.
    /// The cache maps and frees nothing then; `growth` and `memory` of the options mean nothing.
    ///
    /// The tensors must stay allocated while the cache lives, and until its work has completed. What an
    /// engine writes there outside its steps is not ordered with the cache's copies.
    ///
    /// # Errors
    /// [`BuildError`]; tensors of another shape, of fewer blocks than `device_blocks`, or of another device
    /// are refused, never guessed.
    #[track_caller]
    pub fn over(
        compute: &[Stream],
        tensors: Vec<PagedKv>,
        options: KvCacheOptions,
    ) -> Result<Self, BuildError> {
        Self::with(KvWorker::with_memory(compute, Some(tensors), options, ALONE)?)
    }

    fn with(worker: KvWorker) -> Result<Self, BuildError> {
        let manager = manager(worker.options(), worker.options().manager())?;
        let mut cache = Self::joined(manager, InProcess::new(worker));
        cache.workers.begin(&mut cache.manager);
        Ok(cache)
    }

    /// The devices' parts of the cache, in the order of the devices. A device without layers has no
    /// part.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        self.workers.worker.parts()
    }

    /// Counts of moved and mapped blocks so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let InProcess { worker, grown, pinned, .. } = &self.workers;
        let mut stats = CacheStats {
            ready_blocks: grown.ready_blocks,
            host_blocks: pinned.groups.first().map_or(0, |group| group.told_blocks),
            growth_stalls: grown.stalls,
            copied_bytes: worker.copied_bytes(),
            ways: self.way_bytes(),
            transports: worker.transports(),
            ..CacheStats::default()
        };
        for part in &worker.parts {
            let growth = part.first().ahead_stats();
            stats.pages_ahead += growth.ahead_pages;
            stats.pages_inline += growth.inline_pages;
        }
        stats
    }

    fn way_bytes(&self) -> WayBytes {
        let mut ways = self.workers.worker.ways;
        for (id, of) in self.options().numbered() {
            let moved = self.manager.lower_blocks(id).unwrap_or_default();
            let of = guard!(
                "cache.tier-bytes-are-of-their-group",
                &of.shape,
                else &self.options().first().shape
            );
            for tier in 0..ways.stored.len() {
                ways.stored[tier] += moved.stored[tier] * of.block_bytes();
                ways.loaded[tier] += moved.loaded[tier] * of.block_bytes();
            }
        }
        ways
    }
}

impl<W: Workers> KvCache<W> {
    pub(crate) fn joined(manager: Manager, mut workers: W) -> Self {
        // Memory that groups share is all there, and so are an engine's tensors.
        let told_blocks = match workers.options().shared {
            Some(_) => workers.options().first().device_blocks.into(),
            None => 0,
        };
        let ready = workers.ready_blocks();
        let mut cache = Self { manager, workers, staged: None, told_blocks };
        cache.tell(ready);
        cache
    }

    /// The options that the cache was built with.
    #[must_use]
    pub fn options(&self) -> &KvCacheOptions {
        self.workers.options()
    }

    /// The deciding half: the pool, counts, the block table, names, events, the last plan. It cannot be
    /// changed from here.
    #[must_use]
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Those who carry out what the manager decides.
    #[must_use]
    pub fn workers(&self) -> &W {
        &self.workers
    }

    /// Waits for all devices and releases everything: mappings, addresses, physical and pinned
    /// memory. Sequences that are still alive lose their memory; dropping them stays safe.
    ///
    /// Dropping a cache instead is safe at any time. A drop does not wait. It releases the memory
    /// under the blocks if that is provably at rest. The pinned memory is freed by the device's
    /// next allocation, or with the device.
    ///
    /// # Ordering
    /// Waits on the host for the compute and transfer streams.
    ///
    /// # Errors
    /// Every refused call, of every device. With a step open, or a device that cannot be waited
    /// for, the cache is dropped instead.
    #[track_caller]
    pub fn close(self) -> Result<W::Closed, CloseErrors> {
        let _site = cuda_driver::site::enter();
        if self.manager.has_open_step() {
            return Err(vec![CloseError::StepOpen].into());
        }
        self.workers.close()
    }
}

/// The manager of a cache, with the policies that `options` ask for. None of its device blocks has memory yet.
pub(crate) fn manager(
    options: &KvCacheOptions,
    of_manager: ManagerOptions,
) -> Result<Manager, BuildError> {
    let PoolRules { eviction, host_eviction, store, clock, .. } = &options.pool;
    let mut policies = Vec::new();
    for group in options.groups.iter() {
        let blocks = u64::from(group.device_blocks) + u64::from(group.host_blocks);
        let device = eviction.make(blocks)?.map(|made| (Tier::Primary, made));
        let host = host_eviction.make(blocks)?.map(|made| (Tier::Secondary, made));
        policies.push((device.into_iter().chain(host), store.make(group.host_blocks)?));
    }
    let mut policies = policies.into_iter();
    // Called for each group, in their order.
    let build = |mut builder: PoolBuilder| {
        if let Some(clock) = clock {
            builder = builder.clock(Arc::clone(clock));
        }
        let Some((own, store)) = policies.next() else { return builder };
        builder = own.fold(builder, |builder, (tier, policy)| builder.policy(tier, policy));
        match store {
            Some(policy) => builder.store_policy(policy),
            None => builder,
        }
    };
    let mut manager = Manager::with_pool(of_manager, build)?;
    options.tiers.set_store_policies(&mut manager)?;
    if options.shared.is_none() {
        // Nothing is kept for tenants yet, so no budget is too small.
        drop(manager.set_budget(GroupId::default(), Tier::Primary, 0));
    }
    Ok(manager)
}
