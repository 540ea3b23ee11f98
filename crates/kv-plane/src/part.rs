//! One device's part of a cache: its streams, its batch, and its share of every group's blocks.

use std::ops::Range;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError, Fence, Stream, guard};
use cuda_vmm::EpochGate;
use kv_kernels::{KvKernels, KvShape, PagedKv};
use kv_manager::{Checked, GroupId, SharedMemory, Start, StepPlan};
use kv_pool::{BlockId, Row, TableEntry};
use kv_stage::{
    BatchBuffers, BatchLength, BatchStep, DeviceBatch, RowStates, StagingOptions, StagingPool,
    error::BatchError,
};
use kv_tier::GroupKind;

use crate::draft::DraftBatch;
use crate::granules::Granules;
use crate::group::{Given, GroupPart, Making};
use crate::runs::Run;
use crate::shares::Share;
use crate::streams::Streams;
use crate::{
    BuildError, CloseError, GranuleError, GroupOptions, HostCopyError, HostPinning, KvCacheOptions,
};

/// One device's part of a cache.
#[derive(Debug)]
pub struct Part {
    pub(crate) streams: Streams,
    /// One for each group, in their order.
    pub(crate) groups: Vec<GroupPart>,
    /// Where the groups share memory, its pages.
    granules: Option<Granules>,
    /// Loaded for this part alone: they tell it from all others.
    pub(crate) kernels: Arc<KvKernels>,
    staging: StagingPool,
    pub(crate) batch: DeviceBatch,
    lengths: Vec<BatchLength>,
    /// What a draft model computes, if there is one.
    draft: Option<DraftBatch>,
}

impl Part {
    pub(crate) fn new(
        compute: &Stream,
        shares: Vec<Share>,
        options: &KvCacheOptions,
        (gate, adopted): (&EpochGate, Option<Vec<PagedKv>>),
        pinning: HostPinning,
    ) -> Result<Self, BuildError> {
        let device = compute.device();
        let kernels = Arc::new(KvKernels::load(device)?);
        let (granules, given) = match &options.shared {
            Some(memory) => shared_memory(device, &shares, (options, memory), gate)?,
            None => (None, Vec::new()),
        };
        let adopted = adopted.into_iter().flatten().map(|paged| Given::Tensors(Box::new(paged)));
        let mut given = given.into_iter().chain(adopted);
        let with = Making { compute, options, gate, kernels: &kernels, pinning };
        let group = |(share, group): (Share, (GroupId, &GroupOptions))| {
            GroupPart::new(&with, group, share, given.next().unwrap_or(Given::Nothing))
        };
        let groups = shares.into_iter().zip(options.numbered()).map(group);
        let mut groups = groups.collect::<Result<Vec<_>, _>>()?;
        let batch = options.batch();
        let depth = options.overlap_depth as usize;
        let buffers = StagingOptions::overlapped(batch.buffer_bytes(), depth);
        let staging = StagingPool::new(device, buffers)?;
        let batch = DeviceBatch::new(&staging, batch)?;
        let draft = DraftBatch::new(device, options)?;
        let streams = Streams::new(compute)?;
        // Last, so that no memory is mapped for a cache that cannot be built.
        if let Some(first) = groups.first_mut().filter(|_| options.first().kind == GroupKind::Full)
        {
            first.start_growing(&options.growth);
        }
        let lengths = Vec::with_capacity(options.sequences_max as usize);
        Ok(Self { streams, groups, granules, kernels, staging, batch, lengths, draft })
    }

    /// The groups' blocks on this device.
    #[must_use]
    pub fn groups(&self) -> &[GroupPart] {
        &self.groups
    }

    /// The first group's blocks, of which there always are.
    pub(crate) fn first(&self) -> &GroupPart {
        &self.groups[0]
    }

    /// A group's blocks. The plan that names the group was checked.
    pub(crate) fn of(&self, group: GroupId) -> &GroupPart {
        &self.groups[usize::from(group.0)]
    }

    /// The first group's layers on this device, in their order.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        self.first().layers()
    }

    /// The bytes of each row of K and of V of the first group on this device: all of the row, unless the layers are
    /// divided by heads.
    #[must_use]
    pub fn row(&self) -> Range<u64> {
        self.first().row()
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

    /// The shape of the first group's blocks on this device.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        self.first().shape()
    }

    /// The memory of the first group as kernels see it. Only the first [`ready_blocks`](Part::ready_blocks) are
    /// mapped.
    #[must_use]
    pub fn paged(&self) -> &PagedKv {
        self.first().paged()
    }

    /// The kernels, loaded on this device.
    #[must_use]
    pub fn kernels(&self) -> &KvKernels {
        &self.kernels
    }

    /// Blocks of the first group that have memory, from block 0 on.
    #[must_use]
    pub fn ready_blocks(&self) -> u64 {
        self.first().ready_blocks()
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

    /// What the draft model computes in a step, as [`batch`](Self::batch) has it for the model: tables of its groups, in their
    /// order, lengths, positions and slots, of the sequences that have tokens
    /// [reserved](crate::KvCache::reserve_draft) for it, in the order of the batch. `None` without groups of a draft model.
    ///
    /// # Ordering
    /// On the [compute stream](Self::compute) they hold the step that was staged last.
    #[must_use]
    pub fn draft_batch(&self) -> Option<&BatchBuffers> {
        self.draft.as_ref().map(DraftBatch::buffers)
    }

    /// The length of each sequence there, for kernels that are planned on the host.
    #[must_use]
    pub fn draft_lengths(&self) -> &[BatchLength] {
        self.draft.as_ref().map_or(&[], DraftBatch::lengths)
    }

    /// The pinned buffers that steps are staged in.
    #[must_use]
    pub fn staging(&self) -> &StagingPool {
        &self.staging
    }

    /// Maps the memory of all groups whose memory stays.
    pub(crate) fn map_fixed(&mut self, options: &KvCacheOptions) -> Result<(), BuildError> {
        let ordinal = self.device().ordinal();
        for (part, (group, of)) in self.groups.iter_mut().zip(options.numbered()) {
            if group.0 == 0 && !options.has_null_block(of) {
                continue;
            }
            let blocks = options.memory_blocks(of).into();
            let mapped = part.grow_towards(blocks)?;
            if mapped < blocks {
                return Err(BuildError::NoMemory { group, ordinal, mapped, blocks });
            }
            part.fixed = true;
        }
        Ok(())
    }

    /// Notes the changes that a plan makes to the block table. If the changes of too many plans could not be sent, the whole table
    /// takes their place.
    pub(crate) fn edit(&mut self, plan: Checked<'_>) -> Result<(), BatchError> {
        let mut ids = &plan.edit_ids[..];
        for edit in &plan.edits {
            let (here, rest) = ids.split_at(edit.count as usize);
            ids = rest;
            let noted = self.edit_row(edit.group.0.into(), edit.row, edit.first, here);
            if let Err(BatchError::Backlog { .. }) = noted {
                return guard!(
                    "cache.refused-tables-are-written",
                    self.write_table(|group, row| plan.row(group, row)),
                    else noted
                );
            }
            noted?;
        }
        Ok(())
    }

    fn edit_row(
        &mut self,
        group: usize,
        row: Row,
        first: u32,
        ids: &[TableEntry],
    ) -> Result<(), BatchError> {
        self.batch.edit(group, row, first, ids)?;
        let draft = guard!("cache.draft-tables-follow", self.draft.as_mut(), else None);
        draft.map_or(Ok(()), |draft| draft.edit(group, row, first, ids))
    }

    /// Notes that the block table is another one.
    pub(crate) fn write_table<'a>(
        &mut self,
        row_of: impl Fn(GroupId, Row) -> &'a [TableEntry],
    ) -> Result<(), BatchError> {
        self.batch.forget_edits();
        self.draft.iter_mut().for_each(DraftBatch::forget_edits);
        for group in 0..self.groups.len() {
            for row in (0..self.batch.options().rows).map(Row::new) {
                self.edit_row(group, row, 0, row_of(GroupId(group as u16), row))?;
            }
        }
        Ok(())
    }

    /// Sends the batch of a plan, with what `add` adds.
    pub(crate) fn stage(
        &mut self,
        plan: &StepPlan,
        add: impl FnOnce(&mut BatchStep<'_>) -> Result<(), BatchError>,
    ) -> Result<(), BatchError> {
        let Self { batch, streams: Streams { compute, .. }, lengths, draft, .. } = self;
        let device = compute.device().clone();
        let staged = device.while_current(|| {
            let mut step = batch.step_wait(compute)?;
            for row in &plan.batch {
                let (resolved, upper) = match row.start {
                    Start::At(at) => (at, at),
                    Start::Open { resolved, upper } => (resolved, upper),
                };
                let states = RowStates { drafts: row.drafts, input: row.input };
                let bounds = (resolved, upper);
                step.row_with_states(row.row, bounds, row.tokens, states)?;
            }
            add(&mut step)?;
            let staged = step.submit()?;
            lengths.clear();
            lengths.extend_from_slice(staged.lengths);
            draft.as_mut().map_or(Ok(()), |draft| draft.stage(compute, &plan.draft_batch))
        });
        staged.map_err(BatchError::from)?
    }

    pub(crate) fn map_granule(&mut self, group: GroupId, granule: u32) -> Result<(), GranuleError> {
        match (&self.granules, self.groups.get_mut(usize::from(group.0))) {
            (Some(granules), Some(group)) => group.map_granule(granules, granule),
            _ => Ok(()),
        }
    }

    /// Enqueues runs of copies of a group, except those that this device was sent before.
    pub(crate) fn send(&mut self, group: usize, runs: &[Run]) -> Result<(), HostCopyError> {
        let Self { streams, groups, .. } = self;
        let device = streams.device().clone();
        device.while_current(|| groups[group].send(streams, runs))?
    }

    /// Makes copies of blocks that arrive layer by layer come after the copies so far that touch one of them.
    pub(crate) fn order_layers(&mut self, group: GroupId, run: &Run) -> Result<(), HostCopyError> {
        let Self { streams, groups, .. } = self;
        let (device, group) = (streams.device().clone(), &mut groups[usize::from(group.0)]);
        device.while_current(|| group.order_layers(streams, run))?
    }

    /// Enqueues copies of the bytes `range` of a group's host block to a device block, as far as they are whole layers; the
    /// end of what is enqueued.
    pub(crate) fn send_layers(
        &mut self,
        group: GroupId,
        blocks: (BlockId, BlockId),
        range: Range<u64>,
    ) -> Result<u64, HostCopyError> {
        if range.is_empty() {
            return Ok(0);
        }
        let Self { streams, groups, .. } = self;
        let (device, group) = (streams.device().clone(), &mut groups[usize::from(group.0)]);
        device.while_current(|| group.send_layers(streams, blocks, range))?
    }

    /// Makes the engine's work wait for the copies of the directions in `needed`, and adds a fence after
    /// all copies that have none yet.
    pub(crate) fn fence_copies(
        &mut self,
        needed: [bool; 2],
        fences: &mut Vec<Fence>,
    ) -> Result<(), DeviceError> {
        let Self { streams, groups, .. } = self;
        let waits = |lane| groups.iter_mut().for_each(|group| group.work_waits_for(lane));
        streams.fence_copies(needed, fences, waits)
    }

    /// What the bytes of host blocks mean, as a text that is the same in every process.
    pub(crate) fn host_format(&self) -> String {
        self.groups.iter().map(GroupPart::host_format).collect::<Vec<_>>().join(",")
    }

    /// Releases everything. The device is at rest, and no lease of the gate is open.
    pub(crate) fn close(self) -> Vec<CloseError> {
        let Self { groups, granules, staging, batch, draft, .. } = self;
        drop(batch);
        let mut errors: Vec<_> = groups.into_iter().flat_map(GroupPart::close).collect();
        // The groups have unmapped them.
        errors.extend(granules.into_iter().flat_map(Granules::close));
        errors.extend(draft.and_then(|draft| draft.close().err()).map(CloseError::from));
        // Frees the memory dropped just now, too: a device has one list of memory to be freed.
        errors.extend(staging.close().err().map(CloseError::from));
        errors
    }
}

/// The pages of shared memory, and the addresses of each group.
fn shared_memory(
    device: &Device,
    shares: &[Share],
    (options, memory): (&KvCacheOptions, &SharedMemory),
    gate: &EpochGate,
) -> Result<(Option<Granules>, Vec<Given>), BuildError> {
    let shapes = shares.iter().zip(&options.groups);
    let bytes = shapes.map(|(share, group)| Ok(share.shape(&group.shape)?.block_bytes()));
    let bytes = bytes.collect::<Result<Vec<_>, BuildError>>()?;
    let granules = Granules::new(device, memory, &bytes, options.memory.clone())?;
    let groups = bytes.iter().zip(&memory.granule_blocks).zip(0..);
    let ranges = groups.map(|((&bytes, &blocks), id)| {
        let granule = bytes * u64::from(blocks);
        Ok(Given::Range(granules.range(gate, (GroupId(id), granule, bytes))?))
    });
    let ranges = ranges.collect::<Result<Vec<_>, BuildError>>()?;
    Ok((Some(granules), ranges))
}
