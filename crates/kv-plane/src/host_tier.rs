//! The host tier: pinned memory that evicted blocks are copied to and onboarded from, usable as it is
//! pinned.

use std::sync::Arc;

use cuda_driver::host_pages::{HostMemory, PinError};
use cuda_driver::{
    CopyError, Device, DeviceError, DeviceSpan, HostAllocFlags, OutOfBounds, PinnedBuffer, Stream,
};
use kv_stage::{PinnedSlabs, SlabsOptions, error::StagingError};

use crate::{BuildError, HostPinning};

/// Equal blocks of pinned memory, of which the first are usable.
#[derive(Debug)]
pub(crate) struct HostTier {
    /// Shared with the descriptions of host memory that kernels take. No host thread writes them.
    slabs: PinnedSlabs,
    block_bytes: u64,
    /// Blocks wanted.
    blocks: u64,
    /// Whether no thread pins.
    at_once: bool,
}

impl HostTier {
    /// A tier that threads pin in the background, from [`start`](Self::start) on; without threads, memory that
    /// the driver allocates now.
    pub(crate) fn new(
        device: &Device,
        blocks: u64,
        block_bytes: u64,
        HostPinning { threads, slab_bytes_max }: HostPinning,
    ) -> Result<Self, BuildError> {
        let (threads, at_once) = (threads as usize, threads == 0);
        let mut options =
            SlabsOptions { slab_bytes_max, threads, ..SlabsOptions::new(block_bytes, blocks) };
        let slabs = if at_once {
            options.memory = HostMemory::Driver(HostAllocFlags::CACHED);
            let mut slabs = PinnedSlabs::new(device, &options)?;
            slabs.pin_all()?;
            slabs
        } else {
            PinnedSlabs::unstarted(device, &options)?
        };
        Ok(Self { slabs, block_bytes, blocks, at_once })
    }

    /// Starts the threads. The driver's calls of others wait while one of them registers memory.
    pub(crate) fn start(&mut self) -> Result<(), StagingError> {
        if self.at_once { Ok(()) } else { self.slabs.resize(self.blocks) }
    }

    /// Takes over what was pinned since the last call, or, if it `waits`, all that will be. Without threads, all that is
    /// wanted is pinned now.
    ///
    /// # Errors
    /// A refusal, once: the tier then stays as it is.
    pub(crate) fn take(&mut self, waits: bool) -> Result<(), PinError> {
        let lacks = self.slabs.slabs().len() < self.slabs.slabs_wanted();
        let pins = waits || self.at_once && lacks;
        if pins { self.slabs.pin_all().map(drop) } else { self.slabs.poll().map(drop) }
    }

    /// Usable blocks, from block 0 on.
    pub(crate) fn usable(&self) -> u64 {
        (self.slabs.slabs().len() as u64 * self.slabs.blocks_per_slab()).min(self.blocks)
    }

    /// Wants `blocks` blocks, more or fewer; [`take`](Self::take) brings more. Returns the number of slabs that are kept;
    /// the others are given back by [`give_back`](Self::give_back).
    pub(crate) fn resize(&mut self, blocks: u64) -> Result<usize, StagingError> {
        self.slabs.resize(blocks)?;
        self.blocks = blocks;
        Ok(self.slabs.slabs_wanted())
    }

    /// Gives back slabs beyond the wanted blocks that no description holds. Whether none is left.
    pub(crate) fn give_back(&mut self) -> bool {
        self.slabs.give_back();
        self.slabs.slabs().len() <= self.slabs.slabs_wanted()
    }

    pub(crate) fn close(self) -> Result<(), DeviceError> {
        self.slabs.close()
    }

    /// The usable memory; block `b` lies in slab `b / blocks_per_slab`.
    pub(crate) fn slabs(&self) -> &[Arc<PinnedBuffer>] {
        self.slabs.slabs()
    }

    pub(crate) fn blocks_per_slab(&self) -> usize {
        self.slabs.blocks_per_slab() as usize
    }

    /// Enqueues the copy of a device block into host block `id`.
    pub(crate) fn store(
        &self,
        stream: &Stream,
        id: usize,
        from: DeviceSpan,
    ) -> Result<(), CopyError> {
        let (slab, offset) = self.place(id)?;
        stream.copy_to_host(slab, offset, from)
    }

    /// Enqueues the copy of host block `id`, from byte `first` on, into device memory.
    pub(crate) fn load(
        &self,
        stream: &Stream,
        (id, first): (usize, u64),
        to: DeviceSpan,
    ) -> Result<(), CopyError> {
        let (slab, offset) = self.place(id)?;
        stream.copy_to_device(to, slab, offset + first)
    }

    fn place(&self, id: usize) -> Result<(&PinnedBuffer, u64), CopyError> {
        let (id, per_slab) = (id as u64, self.slabs.blocks_per_slab());
        let slab = self.slabs().get((id / per_slab) as usize);
        let offset = (id % per_slab) * self.block_bytes;
        match slab {
            Some(slab) => Ok((slab, offset)),
            None => Err(CopyError::OutOfBounds(OutOfBounds {
                offset: id.saturating_mul(self.block_bytes),
                bytes: self.block_bytes,
                capacity: self.slabs().iter().map(|slab| slab.bytes()).sum(),
            })),
        }
    }
}
