//! What a step's driver calls and lists of blocks cost by themselves.

#![allow(dead_code, clippy::unwrap_used, reason = "one benchmark uses it, and says where it fails")]

use std::collections::BTreeMap;
use std::time::Instant;

use cuda_driver::{CapturedGraph, DeviceBuffer, Event, HostAllocFlags, PinnedBuffer, Stream};
use kv_plane::KvCache;
use kv_pool::policy::PolicyKind;
use kv_pool::{BlockHash, BlockHasher, BlockId, BlockPool, Naming, PoolConfig, Tier};
use kv_stage::{BatchOptions, BatchTable, DeviceBatch, StagingOptions, StagingPool};

use super::{BLOCK_TOKENS, Rig, chain};

/// Repeats the driver calls of steps, on the stream of the steps and with memory of their sizes.
pub(crate) struct Bare<'a> {
    rig: &'a Rig,
    stream: Stream,
    packet: DeviceBuffer,
    host: PinnedBuffer,
    /// The launch of a step, as the cache makes it. Its kernel reads and writes memory of the batch.
    launch: CapturedGraph,
    _batch: DeviceBatch,
    events: Vec<Event>,
    before: BTreeMap<&'static str, u64>,
}

impl<'a> Bare<'a> {
    pub(crate) fn new(rig: &'a Rig, cache: &KvCache) -> Self {
        let options = cache.options();
        let (width, null_block) =
            (options.groups[0].blocks_per_sequence_max, BlockId::new(0).unwrap());
        let table = BatchTable { width, block_tokens: BLOCK_TOKENS, null_block, is_state: false };
        let batch = BatchOptions {
            rows: options.sequences_max,
            sequences_max: options.sequences_max,
            tokens_max: options.step_tokens_max,
            tables: vec![table],
            arrays: options.step_arrays.clone(),
        };
        // A header, a record for each row, the array of the engine, and a change for each row that begins a block.
        let rows = u64::from(options.sequences_max);
        let bytes = 128 + rows * 32 + options.step_arrays.iter().sum::<u64>() + rows / 16 * 48;
        let buffers = StagingOptions::overlapped(batch.buffer_bytes(), 1);
        let staging = StagingPool::new(&rig.device, buffers).unwrap();
        let batch = DeviceBatch::new(&staging, batch).unwrap();
        let capturing = Stream::new(&rig.device).unwrap();
        Self {
            rig,
            stream: cache.parts()[0].compute().clone(),
            packet: DeviceBuffer::alloc(&rig.device, bytes).unwrap(),
            host: PinnedBuffer::alloc(&rig.device, bytes, HostAllocFlags::CACHED).unwrap(),
            launch: capturing.capture(|| batch.gather(&capturing)).unwrap(),
            _batch: batch,
            events: (0..4).map(|_| Event::new(&rig.device).unwrap()).collect(),
            before: BTreeMap::new(),
        }
    }

    /// The calls from here on are to be repeated.
    pub(crate) fn begin(&mut self) {
        self.before = self.rig.calls_by_name();
    }

    /// The time of the same calls as were made since, but for one of each of `without`; `None` if there are calls that
    /// cannot be repeated.
    pub(crate) fn repeat(&mut self, without: &[&str]) -> Option<u64> {
        let mut counts = self.rig.calls_by_name();
        for (name, count) in &mut counts {
            *count -= self.before.get(name).unwrap_or(&0) + u64::from(without.contains(name));
        }
        counts.retain(|_, count| *count > 0);
        let mut count = |name| counts.remove(name).unwrap_or(0);
        let (queries, copies) = (count("cuEventQuery"), count("cuMemcpyHtoDAsync"));
        let (launches, records) = (count("cuGraphLaunch"), count("cuEventRecord"));
        if !counts.is_empty() {
            return None;
        }
        let start = Instant::now();
        for _ in 0..queries {
            std::hint::black_box(self.events[0].is_complete().unwrap());
        }
        for _ in 0..copies {
            self.stream.copy_to_device(self.packet.span(), &self.host, 0).unwrap();
        }
        for _ in 0..launches {
            // SAFETY: the drop waits for the launches before the batch, which owns what the kernel accesses, is dropped.
            unsafe { self.launch.launch(&self.stream) }.unwrap();
        }
        for event in self.events.iter().cycle().take(records as usize) {
            event.record(&self.stream).unwrap();
        }
        Some(start.elapsed().as_nanos() as u64)
    }
}

impl Drop for Bare<'_> {
    fn drop(&mut self) {
        // The kernels of the calls use memory that is dropped now. On a device that is lost, nothing runs.
        let _ = self.stream.synchronize();
    }
}

/// A block pool that nothing else uses, with the order of eviction that a cache has unless told otherwise.
pub(crate) struct Lists {
    pool: BlockPool,
    next: u32,
}

impl Lists {
    pub(crate) fn new(blocks: u64) -> Self {
        let order = PolicyKind::default().make(blocks).unwrap().unwrap();
        let builder = BlockPool::builder(&PoolConfig::primary_only(blocks));
        Self { pool: builder.policy(Tier::Primary, order).build().unwrap(), next: 1 << 20 }
    }

    /// The time in which a list of new blocks is claimed and named, and released.
    pub(crate) fn claim_and_name(&mut self, blocks: u32) -> u64 {
        let names = self.names(blocks);
        let start = Instant::now();
        let mut claimed = self.pool.claim(blocks as usize).unwrap();
        drop(claimed.register(&names, Naming::default()).unwrap());
        start.elapsed().as_nanos() as u64
    }

    /// Has content cached that is named so.
    pub(crate) fn cache(&mut self, names: &[BlockHash]) {
        let mut claimed = self.pool.claim(names.len()).unwrap();
        drop(claimed.register(names, Naming::default()).unwrap());
    }

    /// The time in which a cached prefix is found, pinned and released, while a step is open.
    pub(crate) fn find_and_release(&self, names: &[BlockHash]) -> u64 {
        self.in_an_epoch(|pool| {
            let pinned = pool.match_prefix(names);
            assert_eq!(pinned.len(), names.len());
        })
    }

    /// The same with the time in which the prefix of these ids is named.
    pub(crate) fn name_and_find(&self, ids: &[u32]) -> u64 {
        self.in_an_epoch(|pool| {
            let names =
                BlockHasher::FAST.prefix(BlockHash::ROOT, ids, BLOCK_TOKENS.try_into().unwrap());
            let names: Vec<_> = names.collect();
            assert_eq!(pool.match_prefix(&names).len(), names.len());
        })
    }

    fn in_an_epoch(&self, calls: impl FnOnce(&BlockPool)) -> u64 {
        let epoch = self.pool.begin_epoch();
        let start = Instant::now();
        calls(&self.pool);
        let spent = start.elapsed().as_nanos() as u64;
        self.pool.complete_epoch(epoch).unwrap();
        spent
    }

    fn names(&mut self, blocks: u32) -> Vec<BlockHash> {
        self.next += 1;
        chain(self.next, blocks.into())
    }
}
