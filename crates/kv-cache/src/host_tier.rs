//! The host tier: pinned memory that evicted blocks are copied to and onboarded from.

use std::sync::Arc;

use cuda_driver::{
    CopyError, Device, DeviceError, DeviceSpan, HostAllocFlags, OutOfBounds, PinnedBuffer, Stream,
};

/// If the system refuses the tier in one piece, it is asked for halves, down to this many bytes.
/// Blocks in one piece travel by one call.
const SLAB_BYTES_MIN: u64 = 256 << 20;

/// Equal blocks of pinned memory, all pinned at construction.
#[derive(Debug)]
pub(crate) struct HostTier {
    /// Shared with the descriptions of host memory that kernels take. No host thread writes them.
    slabs: Vec<Arc<PinnedBuffer>>,
    block_bytes: u64,
    blocks_per_slab: u64,
}

impl HostTier {
    pub(crate) fn new(device: &Device, blocks: u64, block_bytes: u64) -> Result<Self, DeviceError> {
        Self::with_slabs(device, blocks, block_bytes, SLAB_BYTES_MIN)
    }

    /// With slabs of no less than `slab_bytes_min` bytes, where there are several.
    pub(crate) fn with_slabs(
        device: &Device,
        blocks: u64,
        block_bytes: u64,
        slab_bytes_min: u64,
    ) -> Result<Self, DeviceError> {
        let least = (slab_bytes_min / block_bytes).max(1);
        let (mut slabs, mut blocks_per_slab, mut left) = (Vec::new(), blocks.max(1), blocks);
        while left > 0 {
            let here = left.min(blocks_per_slab);
            let pinned = PinnedBuffer::alloc(device, here * block_bytes, HostAllocFlags::CACHED);
            match pinned {
                Ok(slab) => {
                    slabs.push(Arc::new(slab));
                    left -= here;
                }
                // All slabs but the last are equal, so halves are for a tier that has none yet.
                Err(error) if error.is_out_of_memory() && slabs.is_empty() && here > least => {
                    blocks_per_slab = here.div_ceil(2).max(least);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Self { slabs, block_bytes, blocks_per_slab })
    }

    /// The memory; block `b` lies in slab `b / blocks_per_slab`.
    pub(crate) fn slabs(&self) -> &[Arc<PinnedBuffer>] {
        &self.slabs
    }

    /// Blocks of a slab; the last slab may have fewer.
    pub(crate) fn blocks_per_slab(&self) -> usize {
        self.blocks_per_slab as usize
    }

    /// Blocks of the given slab.
    pub(crate) fn blocks_of(&self, slab: &PinnedBuffer) -> u64 {
        slab.bytes() / self.block_bytes
    }

    /// Enqueues the copy of a device block into host block `id`.
    pub(crate) fn store(
        &self,
        stream: &Stream,
        id: usize,
        block: DeviceSpan,
    ) -> Result<(), CopyError> {
        let (slab, offset) = self.place(id)?;
        stream.copy_to_host(slab, offset, block)
    }

    /// Enqueues the copy of host block `id` into a device block.
    pub(crate) fn load(
        &self,
        stream: &Stream,
        id: usize,
        block: DeviceSpan,
    ) -> Result<(), CopyError> {
        let (slab, offset) = self.place(id)?;
        stream.copy_to_device(block, slab, offset)
    }

    fn place(&self, id: usize) -> Result<(&PinnedBuffer, u64), CopyError> {
        let id = id as u64;
        let slab = self.slabs.get((id / self.blocks_per_slab) as usize);
        let offset = (id % self.blocks_per_slab) * self.block_bytes;
        match slab {
            Some(slab) => Ok((slab, offset)),
            None => Err(CopyError::OutOfBounds(OutOfBounds {
                offset: id.saturating_mul(self.block_bytes),
                bytes: self.block_bytes,
                capacity: self.slabs.iter().map(|slab| slab.bytes()).sum(),
            })),
        }
    }
}
