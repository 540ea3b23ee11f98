//! Moving several chunks in one launch: by slots or by blocks, of all layers or of some, in device or in
//! pinned memory.

use std::ops::Range;

use cuda_driver::{DeviceSpan, PinnedBuffer, Stream, guard};
use kv_pool::{Slot, TableEntry};
use smallvec::SmallVec;

use crate::launch::{CHUNKS_MAX, COUNT_MAX, RawChunk, RawMapping, RawTransfer, TransferKernels};
use crate::launcher::Launcher;
use crate::operand::{Extent, check_array, check_disjoint, check_length};
use crate::stored::{Named, check_named};
use crate::{
    DeviceReport, Direction, KernelError, KernelSource, PagedKv,
    error::{Operand, OperandError},
};

pub use crate::launch::LaunchLimits;

/// Where a chunk lies.
#[derive(Clone, Copy, Debug)]
pub enum ChunkMemory<'a> {
    /// On the kernels' device, or on a peer to which access is enabled.
    Device(DeviceSpan),
    /// `bytes` bytes from `offset` of pinned host memory, which the kernel reads or writes over the bus.
    Pinned {
        /// The memory.
        buffer: &'a PinnedBuffer,
        /// Where the chunk begins in it, in bytes.
        offset: u64,
        /// Bytes of the chunk.
        bytes: u64,
    },
}

impl From<DeviceSpan> for ChunkMemory<'_> {
    fn from(span: DeviceSpan) -> Self {
        Self::Device(span)
    }
}

impl ChunkMemory<'_> {
    /// The memory as kernels on `stream` reach it.
    fn extent(self, stream: &Stream) -> Result<Extent, KernelError> {
        match self {
            Self::Device(span) => {
                Ok(Extent { address: span.address_on(stream)?, bytes: span.bytes() })
            }
            Self::Pinned { buffer, offset, bytes } => {
                let (operand, rows) = (Operand::Chunk, offset);
                let overflow = OperandError::Overflow { operand, rows, row_bytes: bytes };
                let needed_bytes = offset.checked_add(bytes).ok_or(overflow)?;
                check_length(operand, buffer.bytes(), needed_bytes)?;
                // No overflow: it lies in the buffer.
                let address = guard!(
                    "kernels.pinned-of-the-driver",
                    buffer.device_address_on(stream)?,
                    else buffer.device_address()
                );
                Ok(Extent { address: address + offset, bytes })
            }
        }
    }
}

/// Which slots the tokens of a chunk have.
#[derive(Clone, Copy, Debug)]
pub enum ChunkMapping<'a> {
    /// A [`Slot`] for each token.
    Slots {
        /// The slots as the kernel reads them, at least one for each token.
        slots: KernelSource<'a>,
        /// The host's copy, exactly one for each token, which is checked before the launch.
        host: Option<&'a [Slot]>,
    },
    /// An entry of a block table for each `block_tokens` tokens; the last block may be named for fewer.
    Blocks {
        /// The ids as the kernel reads them, at least one for each begun block.
        ids: KernelSource<'a>,
        /// The host's copy, exactly one for each begun block, which is checked before the launch.
        host: Option<&'a [TableEntry]>,
    },
}

/// One chunk, `[kv, layer, token, row]`.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// Its memory: exactly `tokens` tokens of all planes of the layers that are moved.
    pub memory: ChunkMemory<'a>,
    /// Where its tokens lie in the pages. [`Slot::NONE`] means "skip this token", and [`TableEntry::NONE`]
    /// this block.
    pub mapping: ChunkMapping<'a>,
    /// Tokens of the chunk.
    pub tokens: u64,
    /// How many of the first tokens stay untouched, at most `tokens`; with a mapping by blocks whole
    /// blocks, or all tokens.
    ///
    /// They are neither read nor written, in chunk and paged memory both. Chunk and mapping keep their
    /// indices. Nothing is rounded: a number of blocks rounded down would write over tokens that
    /// others share, so it is refused.
    pub skip_prefix_n_tokens: u64,
}

/// What [`KvKernels::transfer_chunks`](crate::KvKernels::transfer_chunks) moves.
#[derive(Clone, Debug)]
pub struct ChunkTransfer<'a> {
    /// The chunks, all mapped by slots or all by blocks.
    pub chunks: &'a [Chunk<'a>],
    /// Layers of the paged memory that the chunks hold. One layer is `layer..layer + 1`.
    pub layers: Range<u32>,
    /// Which way.
    pub direction: Direction,
    /// Blocks that are ready, the first of the paged memory; others are refused.
    pub num_blocks: u64,
    /// How much of the device the launch may take.
    pub limits: LaunchLimits,
    /// Where the device tells of slots and ids that are out of range, if anywhere; a place in the
    /// mapping counts once for each row that it would have moved.
    pub report: Option<&'a DeviceReport>,
}

/// Moves chunks, whose memory and places it checks.
#[derive(Debug)]
pub(crate) struct ChunkTransfers {
    kernels: TransferKernels,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    ignore_skip: std::sync::atomic::AtomicBool,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    allow_stored_twice: std::sync::atomic::AtomicBool,
}

impl ChunkTransfers {
    pub(crate) fn new() -> Self {
        Self {
            kernels: TransferKernels::new(),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            ignore_skip: false.into(),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            allow_stored_twice: false.into(),
        }
    }

    /// The kernels, for launches that check no memory.
    pub(crate) fn kernels(&self) -> &TransferKernels {
        &self.kernels
    }

    /// See [`KvKernels::transfer_chunks`](crate::KvKernels::transfer_chunks).
    pub(crate) fn transfer(
        &self,
        on: &Launcher,
        stream: &Stream,
        paged: &PagedKv,
        transfer: &ChunkTransfer<'_>,
    ) -> Result<(), KernelError> {
        on.check_stream(stream)?;
        on.check_paged(paged, transfer.num_blocks)?;
        let planes = planes_of(paged, &transfer.layers)?;
        let mut chunks = Vec::with_capacity(transfer.chunks.len());
        for chunk in transfer.chunks {
            let raw = check_chunk((stream, paged), chunk, planes)?;
            if raw.mapping.kind() != chunks.first().map_or(raw.mapping.kind(), kind_of) {
                return Err(KernelError::MixedMappings);
            }
            chunks.push(RawChunk {
                skip_prefix_n_tokens: self.skip_of_launch(raw.skip_prefix_n_tokens),
                ..raw
            });
        }
        check_overlaps((stream, paged), transfer)?;
        let is_stored = transfer.direction == Direction::ChunkToPaged;
        check_places(paged, transfer, is_stored && self.looks_for_stored_twice())?;
        for chunks in chunks.chunks(CHUNKS_MAX) {
            let raw = RawTransfer {
                paged,
                chunks,
                layers: transfer.layers.clone(),
                direction: transfer.direction,
                num_blocks: transfer.num_blocks,
                limits: transfer.limits,
                report: transfer.report,
            };
            // SAFETY: each chunk holds the rows of its tokens, and each mapping their entries
            // (`check_chunk`). Their memory is of device spans, or pinned: a dropped `PinnedBuffer` is
            // freed by a call that waits for the device, it hands out no references to its bytes except
            // through `slice_mut`, whose caller rules out device access, and its `read_at` and
            // `write_at` leave the wait to their callers; a `PinnedSpan` is only read, as mappings are.
            // Chunks overlap neither pages nor, where they are written, each other (`check_overlaps`).
            unsafe { self.kernels.launch(on, stream, &raw) }?;
        }
        Ok(())
    }

    #[cfg(not(all(feature = "sabotage", debug_assertions)))]
    fn skip_of_launch(&self, skip_prefix_n_tokens: u64) -> u64 {
        skip_prefix_n_tokens
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    fn skip_of_launch(&self, skip_prefix_n_tokens: u64) -> u64 {
        let ignored = self.ignore_skip.load(std::sync::atomic::Ordering::Relaxed);
        if ignored { 0 } else { skip_prefix_n_tokens }
    }

    #[cfg(not(all(feature = "sabotage", debug_assertions)))]
    fn looks_for_stored_twice(&self) -> bool {
        true
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    fn looks_for_stored_twice(&self) -> bool {
        !self.allow_stored_twice.load(std::sync::atomic::Ordering::Relaxed)
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn allow_stored_twice(&self, allow: bool) {
        self.allow_stored_twice.store(allow, std::sync::atomic::Ordering::Relaxed);
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn ignore_skip(&self, ignore: bool) {
        self.ignore_skip.store(ignore, std::sync::atomic::Ordering::Relaxed);
    }
}

fn kind_of(chunk: &RawChunk) -> u32 {
    chunk.mapping.kind()
}

/// The planes of a range of layers, which are of the paged memory.
fn planes_of(paged: &PagedKv, layers: &Range<u32>) -> Result<u64, KernelError> {
    let shape = paged.shape();
    if layers.start > layers.end || layers.end > shape.layers() {
        let (start, end) = (layers.start, layers.end);
        return Err(KernelError::Layers { start, end, layers: shape.layers() });
    }
    Ok(layers.len() as u64 * u64::from(shape.kv_count()))
}

/// Checks one chunk and its mapping.
fn check_chunk(
    (stream, paged): (&Stream, &PagedKv),
    chunk: &Chunk<'_>,
    planes: u64,
) -> Result<RawChunk, KernelError> {
    let shape = paged.shape();
    let Chunk { tokens, skip_prefix_n_tokens: skip, .. } = *chunk;
    if skip > tokens {
        return Err(KernelError::Skip { skip_prefix_n_tokens: skip, tokens });
    }
    if tokens > COUNT_MAX {
        return Err(KernelError::TooManyTokens { tokens, most: COUNT_MAX });
    }
    let Extent { address, bytes } = chunk.memory.extent(stream)?;
    // No overflow: it is part of a block's bytes.
    let token_bytes = planes * shape.row_bytes();
    if tokens.checked_mul(token_bytes) != Some(bytes) {
        return Err(KernelError::ChunkTokens { bytes, tokens, token_bytes });
    }
    let block_tokens = u64::from(shape.block_tokens());
    let mapping = match chunk.mapping {
        ChunkMapping::Slots { slots, host } => {
            check_array(Operand::SlotMapping, slots, tokens, size_of::<Slot>() as u64)?;
            if let Some(given) = host.map(|host| host.len() as u64).filter(|&given| given != tokens)
            {
                return Err(KernelError::SlotCount { slots: given, tokens });
            }
            RawMapping::Slots(slots.address(stream)?)
        }
        ChunkMapping::Blocks { ids, host } => {
            if !skip.is_multiple_of(block_tokens) && skip != tokens {
                let block_tokens = shape.block_tokens();
                return Err(KernelError::SkipBlocks { skip_prefix_n_tokens: skip, block_tokens });
            }
            let blocks = tokens.div_ceil(block_tokens);
            check_array(Operand::BlockIds, ids, blocks, size_of::<TableEntry>() as u64)?;
            if let Some(ids) = host.map(|host| host.len() as u64).filter(|&given| given != blocks) {
                return Err(KernelError::IdCount { ids, blocks });
            }
            RawMapping::Blocks(ids.address(stream)?)
        }
    };
    Ok(RawChunk { address, mapping, tokens, skip_prefix_n_tokens: skip })
}

/// Checks the slots and blocks that the host's copies name, from the first token that moves of each chunk on:
/// that they are ready and, where `apart`, that no two tokens go to one slot.
fn check_places(
    paged: &PagedKv,
    transfer: &ChunkTransfer<'_>,
    apart: bool,
) -> Result<(), KernelError> {
    let block_tokens = paged.shape().block_tokens();
    let named: SmallVec<[Named<'_>; 4]> = transfer
        .chunks
        .iter()
        .map(|chunk| {
            let skip = chunk.skip_prefix_n_tokens;
            match chunk.mapping {
                ChunkMapping::Slots { host, .. } => {
                    Named::Slots { skip, slots: host.unwrap_or_default() }
                }
                ChunkMapping::Blocks { host, .. } => {
                    Named::Blocks { skip, ids: host.unwrap_or_default(), block_tokens }
                }
            }
        })
        .collect();
    let is_by_blocks = matches!(named.first(), Some(Named::Blocks { .. }));
    let tokens = if is_by_blocks { 1 } else { block_tokens };
    check_named(transfer.num_blocks * u64::from(tokens), &named, apart)
}

/// Checks that nothing that is written is also read, or written twice.
fn check_overlaps(
    (stream, paged): (&Stream, &PagedKv),
    transfer: &ChunkTransfer<'_>,
) -> Result<(), KernelError> {
    let to_paged = transfer.direction == Direction::ChunkToPaged;
    let mut written: Vec<Extent> = Vec::new();
    for chunk in transfer.chunks {
        let memory = chunk.memory.extent(stream)?;
        let mapping = mapping_of(chunk);
        if let Some(tensor) = paged.tensor_meeting(memory) {
            let (pages, chunk) = ((Operand::Pages, tensor), (Operand::Chunk, memory));
            let (written, read) = if to_paged { (pages, chunk) } else { (chunk, pages) };
            check_disjoint(written, read)?;
        }
        if to_paged && let Some(tensor) = paged.tensor_meeting(mapping.1) {
            check_disjoint((Operand::Pages, tensor), mapping)?;
        }
        // An empty one shares nothing, and would stand between two that do.
        let has_bytes = guard!("kernels.empty-chunks-hide-none", memory.bytes > 0, else true);
        if !to_paged && has_bytes {
            written.push(memory);
        }
    }
    written.sort_unstable_by_key(|memory| memory.address);
    for pair in written.windows(2) {
        check_disjoint((Operand::Chunk, pair[0]), (Operand::Chunk, pair[1]))?;
    }
    // They are apart now, so the last that begins before a mapping's end is the one that reaches furthest.
    for mapping in transfer.chunks.iter().map(mapping_of) {
        let before = written.partition_point(|memory| memory.address < mapping.1.end());
        if let Some(last) = before.checked_sub(1) {
            let apart = check_disjoint((Operand::Chunk, written[last]), mapping);
            guard!("kernels.chunks-spare-mappings", apart?);
        }
    }
    Ok(())
}

/// The mapping of a chunk, by its role.
fn mapping_of(chunk: &Chunk<'_>) -> (Operand, Extent) {
    match chunk.mapping {
        ChunkMapping::Slots { slots, .. } => (Operand::SlotMapping, slots.into()),
        ChunkMapping::Blocks { ids, .. } => (Operand::BlockIds, ids.into()),
    }
}
