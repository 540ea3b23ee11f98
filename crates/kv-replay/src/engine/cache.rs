//! What the scheduler asks of the KV cache, wherever its devices are.

use std::collections::VecDeque;
use std::ops::Range;

use cuda_driver::guard;
use cuda_driver::{DeviceSpan, Stream};
use kv_kernels::KvShape;
#[cfg(feature = "nixl")]
use kv_kernels::verify::BlockSums;
use kv_plane::manager::{
    CommitError, DraftError, ForkError, GroupId, Manager, Reserved, SlotError, SuspendError,
};
use kv_plane::{
    Admission, CacheStats, Committed, DemandError, KvCache, OpenStep, Part, Request, ReserveError,
    ResumeError, Sequence, Tokens,
};
use kv_pool::{BlockHash, BlockId, Slot, Tier};

use super::RunError;
use super::batch::Batch;
use super::groups::Reads;
use super::verify::Reading;
use super::work::DeviceWork;

/// Requests that wait, with their numbers.
pub(crate) type Queue = VecDeque<(usize, Request)>;

/// A manager of the KV cache, and those who carry its plans out. The calls mean what those of
/// [`KvCache`] with the same names mean.
pub(crate) trait Cache {
    fn manager(&self) -> &Manager;

    /// What was mapped and moved; `None` if only the manager is here.
    fn stats(&self) -> Option<CacheStats> {
        None
    }

    /// The shape of each part of the model, in the order of the devices and then of the groups, and what its
    /// readers read.
    fn shapes(&self) -> Vec<(KvShape, Reads)>;

    /// Device blocks that have memory on every device.
    fn mapped_blocks(&self) -> u64;

    /// Device blocks that can be handed out.
    fn ready_blocks(&self) -> u64;

    fn set_granules(&mut self, granules: u32) -> Result<(), RunError>;

    fn begin_step(&mut self) -> Result<OpenStep, RunError>;

    fn finish_step(&mut self, step: OpenStep) -> Result<(), RunError>;

    fn drain(&mut self) -> Result<(), RunError>;

    /// The latest step that counts, if all that was computed has been lost since the last call: sequences
    /// that were admitted before are lost, and later steps were computed for nobody.
    fn take_loss(&mut self) -> Option<u64> {
        None
    }

    fn commit(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        tokens: Tokens<'_>,
    ) -> Result<Committed, CommitError>;

    fn reserve(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<Reserved, ReserveError>;

    fn reserve_draft(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<(), ReserveError>;

    fn commit_draft(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        end: u64,
    ) -> Result<Committed, DraftError>;

    fn admit(
        &mut self,
        queue: &mut Queue,
        budget: u64,
    ) -> Result<Admission<(usize, Request)>, DemandError>;

    fn fork(&mut self, sequence: &mut Sequence) -> Result<Sequence, ForkError>;

    fn suspend(&mut self, sequence: &mut Sequence) -> Result<(), SuspendError>;

    fn resume(&mut self, sequence: &mut Sequence) -> Result<u64, ResumeError>;

    fn forget(&mut self, names: &[BlockHash]);

    /// The cache itself, where its devices are this process's: only such a process hands sequences over.
    fn local(&mut self) -> Result<&mut Local, RunError> {
        Err(RunError::HandoverElsewhere)
    }

    fn set_budget(&mut self, blocks: u64) -> Result<(), RunError>;

    /// Appends the slots of a sequence's tokens in the first group.
    fn slots(
        &self,
        sequence: &Sequence,
        tokens: Range<u64>,
        slots: &mut Vec<Slot>,
    ) -> Result<(), SlotError> {
        self.manager().slot_mapping(sequence, tokens, slots)
    }

    /// What the further groups' readers read.
    fn further_groups(&self) -> &[Reads];

    /// Appends, for a window group, the slots of a sequence's tokens, none where it has no block; for
    /// states, the slots of these entries of the sequence's row.
    fn further_slots(
        &self,
        group: GroupId,
        sequence: &Sequence,
        tokens: Range<u64>,
        slots: &mut Vec<Slot>,
    ) {
        let manager = self.manager();
        let ids = manager.block_ids_of(group, sequence);
        let slot = |entry: u64, block_tokens, offset| {
            let block = ids.get(entry as usize).and_then(|entry| entry.block());
            block.map_or(Slot::NONE, |block| block.slot(block_tokens, offset))
        };
        if self.further_groups()[usize::from(group.0) - 1] == Reads::State {
            return slots.extend(tokens.map(|entry| slot(entry, 1, 0)));
        }
        let block_tokens = manager.options().block_tokens;
        let place = |token| (token / u64::from(block_tokens), token % u64::from(block_tokens));
        slots.extend(tokens.map(|token| {
            let (entry, offset) = place(token);
            slot(entry, block_tokens, offset as u32)
        }));
    }

    /// Stages `readers`, and has every device write the batch's tokens and then, if `read`, read all of
    /// `readers`, but for rejected drafts.
    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError>;

    /// The checksums that one part has read in a completed step, row by row; entries of a row.
    fn checksums(
        &mut self,
        part: usize,
        reading: &Reading,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError>;
}

/// A cache whose devices are this process's.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) cache: KvCache,
    work: DeviceWork,
    further: Vec<Reads>,
}

impl Local {
    pub(super) fn new(cache: KvCache) -> Result<Self, RunError> {
        let work = DeviceWork::new(cache.parts(), cache.options(), 0)?;
        let further = cache.options().groups().skip(1).map(|of| Reads::of(&of)).collect();
        Ok(Self { cache, work, further })
    }

    /// The memory of a block, on the only device.
    fn block(&self, id: BlockId) -> Result<(&Part, DeviceSpan), RunError> {
        let [part] = self.cache.parts() else { return Err(RunError::HandoverElsewhere) };
        let span = part.paged().block_span(id.index() as u64);
        let span = span.map_err(|error| RunError::BlockCopy(error.into()))?;
        Ok((part, span.ok_or(RunError::HandoverElsewhere)?))
    }

    /// Copies a block of the first group out of the device, and waits for the copy and what is before it on its stream.
    pub(super) fn read_block(
        &self,
        on: &Stream,
        id: BlockId,
        bytes: &mut [u8],
    ) -> Result<(), RunError> {
        let span = self.block(id)?.1;
        let beside =
            guard!("replay.blocks-leave-beside-steps", on, else self.block(id)?.0.compute());
        beside.download(bytes, span).map_err(|error| RunError::BlockCopy(error.into()))
    }

    /// Copies to a block, from one of its bytes on, and waits for the copy and what is before it on its stream.
    pub(super) fn write_block(
        &self,
        on: &Stream,
        (id, from): (BlockId, u64),
        bytes: &[u8],
    ) -> Result<(), RunError> {
        let span = self.block(id)?.1.slice(from, bytes.len() as u64);
        let span = span.map_err(|error| RunError::BlockCopy(error.into()))?;
        on.upload(span, bytes).map_err(|error| RunError::BlockCopy(error.into()))
    }

    /// Enqueues a copy of a block to other memory of its device.
    #[cfg(feature = "nixl")]
    pub(super) fn copy_out(
        &self,
        on: &Stream,
        id: BlockId,
        to: DeviceSpan,
    ) -> Result<(), RunError> {
        let span = self.block(id)?.1;
        on.copy_on_device(to, span).map_err(|error| RunError::BlockCopy(error.into()))
    }

    #[cfg(feature = "nixl")]
    pub(super) fn copy_in(
        &self,
        on: &Stream,
        id: BlockId,
        from: DeviceSpan,
    ) -> Result<(), RunError> {
        let span = self.block(id)?.1;
        on.copy_on_device(span, from).map_err(|error| RunError::BlockCopy(error.into()))
    }

    /// The sums of blocks, behind all that is enqueued on the stream, which is waited for. `scratch` is 12 bytes for each.
    #[cfg(feature = "nixl")]
    pub(super) fn sums(
        &self,
        on: &Stream,
        ids: &[BlockId],
        scratch: DeviceSpan,
    ) -> Result<Vec<u64>, RunError> {
        let [part] = self.cache.parts() else { return Err(RunError::HandoverElsewhere) };
        let count = ids.len() as u64;
        let half = |offset, bytes| {
            scratch.slice(offset, bytes).map_err(|error| RunError::BlockCopy(error.into()))
        };
        let (sums, on_device) = (half(0, 8 * count)?, half(8 * count, 4 * count)?);
        on.upload(on_device, bytemuck::cast_slice(ids))
            .map_err(|error| RunError::BlockCopy(error.into()))?;
        let args = BlockSums {
            blocks: part.paged().into(),
            ids: on_device.into(),
            count,
            host_ids: Some(ids),
            num_blocks: part.ready_blocks(),
            sums,
            report: None,
        };
        part.kernels().sum_blocks(on, args).map_err(|error| RunError::BlockCopy(error.into()))?;
        let mut found = vec![0_u64; ids.len()];
        let bytes = bytemuck::cast_slice_mut(&mut found);
        on.download(bytes, sums).map_err(|error| RunError::BlockCopy(error.into()))?;
        Ok(found)
    }
}

impl Cache for Local {
    fn manager(&self) -> &Manager {
        self.cache.manager()
    }

    fn stats(&self) -> Option<CacheStats> {
        Some(self.cache.stats())
    }

    fn shapes(&self) -> Vec<(KvShape, Reads)> {
        let reads = || std::iter::once(Reads::All).chain(self.further.iter().copied());
        let groups = |part: &Part| {
            let shapes: Vec<_> = part.groups().iter().map(|group| *group.shape()).collect();
            shapes.into_iter().zip(reads())
        };
        self.cache.parts().iter().flat_map(groups).collect()
    }

    fn mapped_blocks(&self) -> u64 {
        self.cache.parts().iter().map(Part::ready_blocks).min().unwrap_or(0)
    }

    fn ready_blocks(&self) -> u64 {
        self.cache.stats().ready_blocks
    }

    fn set_granules(&mut self, granules: u32) -> Result<(), RunError> {
        self.cache.set_granules(granules)?;
        Ok(())
    }

    fn begin_step(&mut self) -> Result<OpenStep, RunError> {
        Ok(self.cache.begin_step()?)
    }

    fn finish_step(&mut self, step: OpenStep) -> Result<(), RunError> {
        Ok(self.cache.finish_step(step)?)
    }

    fn drain(&mut self) -> Result<(), RunError> {
        Ok(self.cache.drain()?)
    }

    fn commit(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        tokens: Tokens<'_>,
    ) -> Result<Committed, CommitError> {
        self.cache.commit(sequence, step, tokens)
    }

    fn reserve(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<Reserved, ReserveError> {
        self.cache.reserve(sequence, tokens)
    }

    fn reserve_draft(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<(), ReserveError> {
        self.cache.reserve_draft(sequence, tokens)
    }

    fn commit_draft(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        end: u64,
    ) -> Result<Committed, DraftError> {
        self.cache.commit_draft(sequence, step, end)
    }

    fn admit(
        &mut self,
        queue: &mut Queue,
        budget: u64,
    ) -> Result<Admission<(usize, Request)>, DemandError> {
        self.cache.admit(queue, budget)
    }

    fn fork(&mut self, sequence: &mut Sequence) -> Result<Sequence, ForkError> {
        self.cache.fork(sequence)
    }

    fn suspend(&mut self, sequence: &mut Sequence) -> Result<(), SuspendError> {
        self.cache.suspend(sequence)
    }

    fn resume(&mut self, sequence: &mut Sequence) -> Result<u64, ResumeError> {
        self.cache.resume(sequence)
    }

    fn forget(&mut self, names: &[BlockHash]) {
        self.cache.forget(names);
    }

    fn local(&mut self) -> Result<&mut Local, RunError> {
        Ok(self)
    }

    fn set_budget(&mut self, blocks: u64) -> Result<(), RunError> {
        self.cache.set_budget(Tier::Primary, blocks)?;
        Ok(())
    }

    fn further_groups(&self) -> &[Reads] {
        &self.further
    }

    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError> {
        let Self { cache, work, .. } = self;
        cache.stage(step, readers, |part, staged| work.add_arrays(part, batch, staged))?;
        work.enqueue(cache.parts(), step.number(), batch, read)
    }

    fn checksums(
        &mut self,
        part: usize,
        reading: &Reading,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError> {
        self.work.arrived(part, reading.step, reading.rows.len(), checksums)
    }
}
