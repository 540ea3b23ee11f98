//! What is handed over, how it lies in a block, and the stream that copies blocks.

use std::sync::Arc;

#[cfg(feature = "nixl")]
use cuda_driver::Device;
use cuda_driver::{CopyError, DeviceSpan, Stream, guard};
use kv_kernels::KvKernels;
#[cfg(feature = "nixl")]
use kv_kernels::verify::BlockSums;
use kv_pool::BlockId;
use kv_remote::handover::{GroupSheet, Sheet};
use kv_tier::{GroupFormat, GroupKind};

use super::HandoverError;
use crate::{KvCache, Part};

/// What is handed over, and how it lies in a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) format: GroupFormat,
    /// Layers of a block that are handed over apart; 1 for whole blocks.
    pub(super) layers: u32,
    pub(super) part_bytes: u32,
}

impl Form {
    /// What a cache hands over, by layers.
    pub(super) fn new(cache: &KvCache) -> Result<Self, HandoverError> {
        let part = only_part(cache)?;
        let formats = cache.manager().formats();
        let [format] = formats[..] else {
            return Err(HandoverError::Cache { groups: formats.len(), devices: 1 });
        };
        if format.kind != GroupKind::Full || format.draft_model {
            return Err(HandoverError::Kind);
        }
        if !part.paged().layout().has_whole_blocks(part.shape()) {
            return Err(HandoverError::Layout);
        }
        let (layers, bytes) = (part.shape().layers(), part.shape().block_bytes());
        let part_bytes = part_bytes(bytes / u64::from(layers))?;
        Ok(Self { format, layers, part_bytes })
    }

    /// The same by blocks: what is summed on the devices of both sides is a block.
    #[cfg(feature = "nixl")]
    pub(super) fn by_blocks(self) -> Result<Self, HandoverError> {
        Ok(Self { layers: 1, part_bytes: part_bytes(self.block_bytes() as u64)?, ..self })
    }

    /// Blocks of so many tokens, the last one partly full.
    pub(super) fn blocks(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.format.block_tokens.into())
    }

    /// Blocks that so many tokens fill.
    pub(super) fn full_blocks(&self, tokens: u64) -> usize {
        (tokens / u64::from(self.format.block_tokens)) as usize
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.layers as usize * self.part_bytes as usize
    }

    /// Layers of so many bytes of a block.
    pub(super) fn layers_of(&self, bytes: usize) -> u32 {
        (bytes / (self.part_bytes as usize).max(1)) as u32
    }

    /// The sheet of a prompt of this content: block by block, so that what is complete is taken at once.
    pub(super) fn sheet(&self, tokens: u64, content: u128) -> Sheet {
        let places = (0..self.blocks(tokens)).map(|place| place as u32).collect();
        let Self { format, layers, part_bytes } = *self;
        Sheet {
            tokens,
            draft_tokens: 0,
            ids: Vec::new(),
            shards: 1,
            readers: 1,
            chunk_places: 1,
            content,
            groups: vec![GroupSheet { format, layers, part_bytes, places }],
        }
    }
}

fn part_bytes(bytes: u64) -> Result<u32, HandoverError> {
    u32::try_from(bytes).map_err(|_| HandoverError::TooLarge { bytes })
}

/// The only part of a cache.
fn only_part(cache: &KvCache) -> Result<&Part, HandoverError> {
    let [part] = cache.parts() else {
        let groups = cache.manager().formats().len();
        return Err(HandoverError::Cache { groups, devices: cache.parts().len() });
    };
    Ok(part)
}

/// Copies of one cache's blocks. They run on a stream of their own: the host waits for them, and would
/// wait for steps on the stream of these.
#[derive(Debug)]
pub(super) struct Copies {
    on: Stream,
    /// Of the cache's part, which no other one has.
    kernels: Arc<KvKernels>,
}

impl Copies {
    pub(super) fn new(cache: &KvCache) -> Result<Self, HandoverError> {
        let part = only_part(cache)?;
        Ok(Self { on: Stream::new(part.device())?, kernels: Arc::clone(&part.kernels) })
    }

    #[cfg(feature = "nixl")]
    pub(super) fn device(&self) -> &Device {
        self.on.device()
    }

    /// The part of the cache that these are copies of.
    pub(super) fn part<'a>(&self, cache: &'a KvCache) -> Result<&'a Part, HandoverError> {
        let part = only_part(cache)?;
        let is_same = Arc::ptr_eq(&part.kernels, &self.kernels);
        match guard!("handover.blocks-are-of-their-cache", is_same, else true) {
            true => Ok(part),
            false => Err(HandoverError::OtherCache),
        }
    }

    fn block(&self, cache: &KvCache, id: BlockId) -> Result<DeviceSpan, HandoverError> {
        let span = self.part(cache)?.paged().block_span(id.index() as u64);
        span.map_err(|error| HandoverError::Copy(error.into()))?.ok_or(HandoverError::Layout)
    }

    /// Copies a block out of the device, and waits for the copy.
    pub(super) fn read(
        &self,
        cache: &KvCache,
        id: BlockId,
        bytes: &mut [u8],
    ) -> Result<(), HandoverError> {
        let span = self.block(cache, id)?;
        let beside = guard!(
            "handover.blocks-leave-beside-steps",
            &self.on,
            else self.part(cache)?.compute()
        );
        Ok(beside.download(bytes, span)?)
    }

    /// Copies bytes to a block, from one of its bytes on, and waits for the copy.
    pub(super) fn write(
        &self,
        cache: &KvCache,
        (id, from): (BlockId, usize),
        bytes: &[u8],
    ) -> Result<(), HandoverError> {
        let span = self.block(cache, id)?.slice(from as u64, bytes.len() as u64);
        Ok(self.on.upload(span.map_err(CopyError::from)?, bytes)?)
    }
}

/// From device to device.
#[cfg(feature = "nixl")]
impl Copies {
    /// Copies blocks to other memory of the device, or back, and waits for that; what the blocks sum up
    /// to then. Nothing is being copied any more behind this, also where something was refused. `scratch`
    /// has 12 bytes for each.
    pub(super) fn beside(
        &self,
        cache: &KvCache,
        blocks: &[(BlockId, DeviceSpan)],
        is_out: bool,
        scratch: DeviceSpan,
    ) -> Result<Vec<u64>, HandoverError> {
        let copied = blocks.iter().try_for_each(|&(id, other)| {
            let block = self.block(cache, id)?;
            let (to, from) = if is_out { (other, block) } else { (block, other) };
            Ok(self.on.copy_on_device(to, from)?)
        });
        let ids: Vec<_> = blocks.iter().map(|(id, _)| *id).collect();
        let summed = copied.and_then(|()| self.sums(cache, &ids, scratch));
        if summed.is_err() {
            self.on.synchronize()?;
        }
        summed
    }

    /// The sums of blocks, behind all that is enqueued here, which is waited for.
    fn sums(
        &self,
        cache: &KvCache,
        ids: &[BlockId],
        scratch: DeviceSpan,
    ) -> Result<Vec<u64>, HandoverError> {
        let (part, count) = (self.part(cache)?, ids.len() as u64);
        let piece = |offset, bytes| scratch.slice(offset, bytes).map_err(CopyError::from);
        let (sums, on_device) = (piece(0, 8 * count)?, piece(8 * count, 4 * count)?);
        self.on.upload(on_device, bytemuck::cast_slice(ids))?;
        let args = BlockSums {
            blocks: part.paged().into(),
            ids: on_device.into(),
            count,
            host_ids: Some(ids),
            num_blocks: part.ready_blocks(),
            sums,
            report: None,
        };
        part.kernels().sum_blocks(&self.on, args)?;
        let mut found = vec![0_u64; ids.len()];
        self.on.download(bytemuck::cast_slice_mut(&mut found), sums)?;
        Ok(found)
    }
}
