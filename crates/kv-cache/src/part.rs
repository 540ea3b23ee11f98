//! One device's part of a cache: its streams, its batch, and its share of every group's blocks.

use std::ops::Range;
use std::sync::Arc;

use cuda_driver::host_pages::PinError;
use cuda_driver::{Device, DeviceError, Stream};
#[cfg(all(feature = "sabotage", debug_assertions))]
use cuda_vmm::ElasticPool;
use cuda_vmm::{EpochGate, Fence};
use kv_kernels::{KvKernels, KvShape, PagedKv};
use kv_manager::{Replica, Start, StepPlan};
use kv_stage::{
    BatchBuffers, BatchLength, BatchStep, DeviceBatch, Row, StagingOptions, StagingPool,
    error::BatchError,
};

use crate::group::GroupPart;
use crate::runs::{COMPUTE, Run};
use crate::shares::Share;
use crate::streams::Streams;
use crate::tiers::PinnedPart;
use crate::{BuildError, CloseError, HostCopyError, HostPinning, KvCacheOptions};

/// One device's part of a cache.
#[derive(Debug)]
pub struct Part {
    pub(crate) streams: Streams,
    pub(crate) group: GroupPart,
    kernels: Arc<KvKernels>,
    staging: StagingPool,
    pub(crate) batch: DeviceBatch,
    lengths: Vec<BatchLength>,
}

impl Part {
    pub(crate) fn new(
        compute: &Stream,
        share: Share,
        options: &KvCacheOptions,
        memory: (&EpochGate, Option<PagedKv>),
        pinning: HostPinning,
    ) -> Result<Self, BuildError> {
        let device = compute.device();
        let kernels = Arc::new(KvKernels::load(device)?);
        let mut group = GroupPart::new(compute, share, options, memory, (&kernels, pinning))?;
        let batch = options.batch();
        let depth = options.overlap_depth as usize;
        let buffers = StagingOptions::overlapped(batch.buffer_bytes(), depth);
        let staging = StagingPool::new(device, buffers)?;
        let batch = DeviceBatch::new(&staging, batch)?;
        let streams = Streams::new(compute)?;
        // Last, so that no memory is mapped for a cache that cannot be built.
        group.start_growing(&options.growth);
        let lengths = Vec::with_capacity(options.sequences_max as usize);
        Ok(Self { streams, group, kernels, staging, batch, lengths })
    }

    /// The model's layers on this device, in their order.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        self.group.layers()
    }

    /// The bytes of each row of K and of V on this device: all of the row, unless the layers are
    /// divided by heads.
    #[must_use]
    pub fn row(&self) -> Range<u64> {
        self.group.row()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.streams.device()
    }

    /// The stream that the engine enqueues its steps on.
    #[must_use]
    pub fn compute(&self) -> &Stream {
        &self.streams.compute
    }

    /// The shape of this device's KV: the cache's shape with these layers and bytes of rows.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        self.group.shape()
    }

    /// The memory as kernels see it. Only the first [`ready_blocks`](Part::ready_blocks) are mapped.
    #[must_use]
    pub fn paged(&self) -> &PagedKv {
        self.group.paged()
    }

    /// The kernels, loaded on this device.
    #[must_use]
    pub fn kernels(&self) -> &KvKernels {
        &self.kernels
    }

    /// Blocks that have memory, from block 0 on.
    #[must_use]
    pub fn ready_blocks(&self) -> u64 {
        self.group.ready_blocks()
    }

    /// The batch of a step on this device: block table, lengths, positions, slots and the engine's arrays,
    /// at addresses that stay for the life of the cache.
    ///
    /// # Ordering
    /// On the [compute stream](Self::compute) they hold the step that was staged last.
    #[must_use]
    pub fn batch(&self) -> &BatchBuffers {
        self.batch.buffers()
    }

    /// The length of each sequence of the step that was staged last, in the order of the batch, for kernels
    /// that are planned on the host.
    #[must_use]
    pub fn lengths(&self) -> &[BatchLength] {
        &self.lengths
    }

    /// The pinned buffers that steps are staged in.
    #[must_use]
    pub fn staging(&self) -> &StagingPool {
        &self.staging
    }

    /// The streams of the copies to host memory and of those back, for tests that stop them.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[must_use]
    pub fn sabotage_transfers(&self) -> &[Stream; 2] {
        &self.streams.transfers
    }

    /// The pools of lists of blocks, for tests that take their protection out.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_lists(&self) -> impl Iterator<Item = &StagingPool> {
        self.group.sabotage_lists()
    }

    /// The memory itself, if it is the cache's own, for tests that take its protection out.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[must_use]
    pub fn sabotage_memory(&self) -> Option<&ElasticPool> {
        self.group.sabotage_memory()
    }

    /// Notes the changes that a plan makes to the block table, which is `table` with them. If the changes of
    /// too many plans could not be sent, the whole table takes their place.
    pub(crate) fn edit(&mut self, plan: &StepPlan, table: &Replica) -> Result<(), BatchError> {
        let mut ids = &plan.edit_ids[..];
        for edit in &plan.edits {
            let (here, rest) = ids.split_at(edit.count as usize);
            ids = rest;
            match self.batch.edit(0, Row::new(edit.row.index() as u32), edit.first, here) {
                Err(BatchError::Backlog { .. }) => return self.write_table(table),
                noted => noted?,
            }
        }
        Ok(())
    }

    /// Notes that the block table is another one.
    pub(crate) fn write_table(&mut self, table: &Replica) -> Result<(), BatchError> {
        self.batch.forget_edits();
        for row in 0..self.batch.options().rows {
            let ids = table.row(kv_manager::Row::new(row)).unwrap_or_default();
            self.batch.edit(0, Row::new(row), 0, ids)?;
        }
        Ok(())
    }

    /// Sends the batch of a plan, with what `add` adds.
    pub(crate) fn stage(
        &mut self,
        plan: &StepPlan,
        add: impl FnOnce(&mut BatchStep<'_>) -> Result<(), BatchError>,
    ) -> Result<(), BatchError> {
        let Self { batch, streams: Streams { compute, .. }, lengths, .. } = self;
        let device = compute.device().clone();
        let staged = device.while_current(|| {
            let mut step = batch.step_wait(compute)?;
            for row in &plan.batch {
                let (resolved, upper) = match row.start {
                    Start::At(at) => (at, at),
                    Start::Open { resolved, upper } => (resolved, upper),
                };
                step.row(Row::new(row.row.index() as u32), resolved, upper, row.tokens)?;
            }
            add(&mut step)?;
            let staged = step.submit()?;
            lengths.clear();
            lengths.extend_from_slice(staged.lengths);
            Ok(())
        });
        staged.map_err(BatchError::from)?
    }

    /// Enqueues runs of copies, except those that this device was sent before.
    pub(crate) fn send(&mut self, runs: &[Run]) -> Result<(), HostCopyError> {
        let Self { streams, group, .. } = self;
        let device = streams.device().clone();
        device.while_current(|| group.send(streams, runs))?
    }

    /// Makes the engine's work wait for the copies of the directions in `needed`, and adds a fence after
    /// all copies that have none yet.
    pub(crate) fn fence_copies(
        &mut self,
        needed: [bool; 2],
        fences: &mut Vec<Fence>,
    ) -> Result<(), DeviceError> {
        let Self { streams, group, .. } = self;
        streams.fence_copies(needed, fences, |lane| group.work_waits_for(lane))
    }

    /// A fence after the work of the engine.
    pub(crate) fn fence_compute(&mut self) -> Result<Fence, DeviceError> {
        self.streams.fence_after(COMPUTE)
    }

    /// The memory of host blocks.
    pub(crate) fn pinned_host(&self) -> PinnedPart {
        self.group.pinned_host()
    }

    /// What the bytes of a host block mean, as a text that is the same in every process.
    pub(crate) fn host_format(&self) -> String {
        self.group.host_format()
    }

    /// Takes over the host memory that was pinned since the last call; the number of usable host blocks.
    ///
    /// # Errors
    /// A refusal, once: the tier then stays as it is.
    pub(crate) fn poll_host(&mut self) -> Result<u64, PinError> {
        self.group.poll_host(&self.streams.compute)
    }

    /// The same, after waiting until no more host memory will be pinned.
    pub(crate) fn wait_for_host(&mut self) -> Result<u64, PinError> {
        self.group.wait_for_host(&self.streams.compute)
    }

    /// Releases everything. The device is at rest, and no lease of the gate is open.
    pub(crate) fn close(self) -> Vec<CloseError> {
        let Self { group, staging, batch, .. } = self;
        drop(batch);
        let mut errors = group.close();
        // Frees the memory dropped just now, too: a device has one list of memory to be freed.
        errors.extend(staging.close().err().map(CloseError::from));
        errors
    }
}
