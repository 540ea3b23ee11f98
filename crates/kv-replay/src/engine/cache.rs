//! Where the model of a run computes, beside the cache that its calls go to.

use std::ops::{Deref, DerefMut};

use cuda_driver::guard;
use cuda_driver::{DeviceSpan, Stream};
use kv_kernels::KvShape;
#[cfg(feature = "nixl")]
use kv_kernels::verify::BlockSums;
use kv_plane::{CacheStats, InProcess, KvCache, OpenStep, Part, Sequence, Workers};
use kv_pool::BlockId;

use super::RunError;
use super::batch::Batch;
use super::groups::Reads;
use super::verify::Reading;
use super::work::DeviceWork;

/// A cache, and the model of the run on the devices of its workers.
pub(crate) trait Compute: DerefMut<Target = KvCache<Self::Workers>> {
    type Workers: Workers;

    /// The shape of each part of the model, in the order of the devices and then of the groups, and what its
    /// readers read.
    fn shapes(&self) -> Vec<(KvShape, Reads)>;

    /// What the further groups' readers read.
    fn further_groups(&self) -> &[Reads];

    /// Device blocks that have memory on every device.
    fn mapped_blocks(&self) -> u64;

    /// What was mapped and moved; `None` if only the manager is here.
    fn moved(&self) -> Option<CacheStats> {
        None
    }

    /// Before a call that waits for devices until no more than so many steps are in flight.
    fn about_to_wait(&mut self, _most: usize) {}

    /// The latest step that counts, if all that was computed has been lost since the last call: sequences
    /// that were admitted before are lost, and later steps were computed for nobody.
    fn take_loss(&mut self) -> Option<u64> {
        None
    }

    /// The cache itself, where its devices are this process's: only such a process hands sequences over.
    fn local(&mut self) -> Result<&mut Local, RunError> {
        Err(RunError::HandoverElsewhere)
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

impl Deref for Local {
    type Target = KvCache;

    fn deref(&self) -> &KvCache {
        &self.cache
    }
}

impl DerefMut for Local {
    fn deref_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }
}

impl Compute for Local {
    type Workers = InProcess;

    fn shapes(&self) -> Vec<(KvShape, Reads)> {
        let reads = || std::iter::once(Reads::All).chain(self.further.iter().copied());
        let groups = |part: &Part| {
            let shapes: Vec<_> = part.groups().iter().map(|group| *group.shape()).collect();
            shapes.into_iter().zip(reads())
        };
        self.cache.parts().iter().flat_map(groups).collect()
    }

    fn further_groups(&self) -> &[Reads] {
        &self.further
    }

    fn mapped_blocks(&self) -> u64 {
        self.cache.parts().iter().map(Part::ready_blocks).min().unwrap_or(0)
    }

    fn moved(&self) -> Option<CacheStats> {
        Some(self.cache.stats())
    }

    fn local(&mut self) -> Result<&mut Local, RunError> {
        Ok(self)
    }

    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError> {
        let Self { cache, work, .. } = self;
        cache
            .stage_with(step, readers, &mut |part, staged| work.add_arrays(part, batch, staged))?;
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
