//! The host tier: pinned memory that evicted blocks are copied to and onboarded from.

use cuda_driver::{
    CopyError, Device, DeviceError, DeviceSpan, HostAllocFlags, OutOfBounds, PinnedBuffer, Stream,
};

/// Most bytes of one pinned allocation. Pinning is slow and needs no contiguous addresses across
/// blocks, so memory is pinned in pieces that any system can give.
const SLAB_BYTES_MAX: u64 = 256 << 20;

/// Equal slots in pinned memory, all pinned at construction.
#[derive(Debug)]
pub(crate) struct HostTier {
    slabs: Vec<PinnedBuffer>,
    block_bytes: u64,
    blocks_per_slab: u64,
}

impl HostTier {
    pub(crate) fn new(device: &Device, blocks: u64, block_bytes: u64) -> Result<Self, DeviceError> {
        let blocks_per_slab = (SLAB_BYTES_MAX / block_bytes).max(1);
        let mut slabs = Vec::new();
        let mut left = blocks;
        while left > 0 {
            let here = left.min(blocks_per_slab);
            slabs.push(PinnedBuffer::alloc(device, here * block_bytes, HostAllocFlags::CACHED)?);
            left -= here;
        }
        Ok(Self { slabs, block_bytes, blocks_per_slab })
    }

    /// Enqueues the copy of a device block into slot `slot`.
    pub(crate) fn store(
        &self,
        stream: &Stream,
        slot: usize,
        block: DeviceSpan,
    ) -> Result<(), CopyError> {
        let (slab, offset) = self.place(slot)?;
        stream.copy_to_host(slab, offset, block)
    }

    /// Enqueues the copy of slot `slot` into a device block.
    pub(crate) fn load(
        &self,
        stream: &Stream,
        slot: usize,
        block: DeviceSpan,
    ) -> Result<(), CopyError> {
        let (slab, offset) = self.place(slot)?;
        stream.copy_to_device(block, slab, offset)
    }

    fn place(&self, slot: usize) -> Result<(&PinnedBuffer, u64), CopyError> {
        let slot = slot as u64;
        let slab = self.slabs.get((slot / self.blocks_per_slab) as usize);
        let offset = (slot % self.blocks_per_slab) * self.block_bytes;
        match slab {
            Some(slab) => Ok((slab, offset)),
            None => Err(CopyError::OutOfBounds(OutOfBounds {
                offset: slot.saturating_mul(self.block_bytes),
                bytes: self.block_bytes,
                capacity: self.slabs.iter().map(PinnedBuffer::bytes).sum(),
            })),
        }
    }
}
