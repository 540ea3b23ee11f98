//! Moving tokens between a contiguous chunk and paged memory, all layers in one launch.

use cuda_driver::DeviceSpan;
use kv_pool::Slot;

use crate::chunks::{Chunk, ChunkMapping};

/// Which way tokens move.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u32)]
pub enum Direction {
    /// Stores the chunk's tokens into their slots.
    ChunkToPaged = 0,
    /// Gathers tokens from their slots into the chunk.
    PagedToChunk = 1,
}

/// What [`KvKernels::multi_layer_transfer`](crate::KvKernels::multi_layer_transfer) moves.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// The chunk, `[kv, layer, token, row]`: exactly `tokens` tokens of all planes.
    pub chunk: DeviceSpan,
    /// One [`Slot`] for each token, on the device; at least `tokens` of them. [`Slot::NONE`] means
    /// "skip this token".
    pub slot_mapping: DeviceSpan,
    /// The host's copy of the mapping, which is checked before the launch; exactly `tokens` slots.
    pub host_slots: &'a [Slot],
    /// Tokens of the chunk.
    pub tokens: u64,
    /// How many of the first tokens stay untouched, at most `tokens`.
    ///
    /// They are neither read nor written, in chunk and paged memory both. Chunk and mapping keep
    /// their indices: token `t` is at position `t` of both, skipped head or not. Nothing is rounded.
    pub skip_prefix_n_tokens: u64,
    /// Which way.
    pub direction: Direction,
    /// Blocks that are ready, the first of the paged memory; slots beyond them are refused.
    pub num_blocks: u64,
}

impl<'a> Transfer<'a> {
    /// Its only chunk.
    pub(crate) fn chunk(&self) -> Chunk<'a> {
        let (slots, host) = (self.slot_mapping.into(), Some(self.host_slots));
        Chunk {
            memory: self.chunk.into(),
            mapping: ChunkMapping::Slots { slots, host },
            tokens: self.tokens,
            skip_prefix_n_tokens: self.skip_prefix_n_tokens,
        }
    }
}
