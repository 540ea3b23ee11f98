//! What the transfer of one chunk takes, and when it serves.

use bytemuck::{Pod, Zeroable};
use cuda_driver::LaunchConfig;

use crate::launch::{Chunk, Divider32, Divider64, Pages, Part};

/// Vectors that a thread moves: `KV_ONE_UNROLL` of `kernels/kv.cuh`.
const UNROLL: u64 = 1;
/// Threads of a block where nothing else is asked for.
const THREADS: u32 = 128;
/// Most threads of a block: `KV_ONE_THREADS` of `kernels/kv.cuh`.
const THREADS_MAX: u32 = 256;

/// `OneChunk` of `kernels/one_chunk.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct OneChunk {
    plane_ptrs: u64,
    mapping: u64,
    report: u64,
    address: u64,
    kv_stride: u64,
    layer_stride: u64,
    row_stride: u64,
    block_stride: u64,
    token_stride: u64,
    segment_stride: u64,
    block_tokens: Divider32,
    row_vectors: Divider32,
    segment_vectors: Divider32,
    layers: Divider32,
    moved: Divider32,
    skip: u32,
    first_row: u32,
    items: u32,
    num_blocks: u32,
    num_slots: u32,
    plane_layers: u32,
    first_layer: u32,
    direction: u32,
    mapping_kind: u32,
    vector_bytes: u32,
}

const _: () = assert!(size_of::<OneChunk>() == 160);

impl OneChunk {
    /// The same launch as of one chunk, if its numbers allow: rows of one part, and nothing that 32
    /// bits do not count. A block of threads moves one tile, so `blocks_max` must allow as many;
    /// `threads` is 0 for the default.
    pub(crate) fn of(
        pages: &Pages,
        chunk: &Chunk,
        threads: u32,
        blocks_max: u64,
    ) -> Option<(Self, LaunchConfig)> {
        let threads = if threads == 0 { THREADS } else { threads };
        let tile = u64::from(threads) * UNROLL;
        let blocks = chunk.items.div_ceil(tile);
        let counted = |count: u64| u32::try_from(count).ok();
        let block_tokens = counted(pages.block_tokens.divisor)?;
        let whole_parts = pages.first_part_vectors == pages.row_vectors.divisor;
        let last_row = chunk.first_row + chunk.items / u64::from(pages.row_vectors.divisor);
        if threads > THREADS_MAX
            || blocks > blocks_max
            || !whole_parts
            || pages.parts[0].offset != 0
        {
            return None;
        }
        // An item beyond the last tile must not wrap; neither may the row after the last.
        counted(chunk.items.checked_add(tile)?)?;
        counted(last_row)?;
        let one = Self {
            plane_ptrs: pages.plane_ptrs,
            mapping: chunk.mapping,
            report: pages.report,
            address: chunk.address,
            kv_stride: chunk.kv_stride,
            layer_stride: chunk.layer_stride,
            row_stride: chunk.token_stride,
            block_stride: pages.block_stride,
            token_stride: pages.parts[0].token_stride,
            segment_stride: pages.parts[0].segment_stride,
            block_tokens: Divider32::new(block_tokens),
            row_vectors: pages.row_vectors,
            segment_vectors: pages.parts[0].segment_vectors,
            layers: pages.layers,
            moved: chunk.moved,
            skip: chunk.skip,
            first_row: counted(chunk.first_row)?,
            items: counted(chunk.items)?,
            num_blocks: counted(pages.num_blocks)?,
            num_slots: counted(pages.num_blocks.checked_mul(pages.block_tokens.divisor)?)?,
            plane_layers: pages.plane_layers,
            first_layer: pages.first_layer,
            direction: pages.direction,
            mapping_kind: pages.mapping_kind,
            vector_bytes: pages.vector_bytes,
        };
        Some((one, LaunchConfig::linear(blocks as u32, threads)))
    }

    /// The same as what the general kernels take, for the CPU reference.
    pub(crate) fn general(&self) -> (Pages, Chunk) {
        let pages = Pages {
            plane_ptrs: self.plane_ptrs,
            report: self.report,
            num_blocks: self.num_blocks.into(),
            block_stride: self.block_stride,
            block_tokens: Divider64 {
                divisor: self.block_tokens.divisor.into(),
                ..Zeroable::zeroed()
            },
            parts: [
                Part {
                    offset: 0,
                    token_stride: self.token_stride,
                    segment_stride: self.segment_stride,
                    segment_vectors: self.segment_vectors,
                },
                Part::zeroed(),
            ],
            row_vectors: self.row_vectors,
            layers: self.layers,
            first_part_vectors: self.row_vectors.divisor,
            plane_layers: self.plane_layers,
            first_layer: self.first_layer,
            direction: self.direction,
            mapping_kind: self.mapping_kind,
            chunks: 1,
            vector_bytes: self.vector_bytes,
            ..Pages::zeroed()
        };
        let chunk = Chunk {
            address: self.address,
            mapping: self.mapping,
            first_row: self.first_row.into(),
            items: self.items.into(),
            kv_stride: self.kv_stride,
            layer_stride: self.layer_stride,
            token_stride: self.row_stride,
            moved: self.moved,
            skip: self.skip,
            ..Chunk::zeroed()
        };
        (pages, chunk)
    }
}
