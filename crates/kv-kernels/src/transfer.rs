//! Moving tokens between a contiguous chunk and paged memory, all layers in one launch.

use cuda_driver::{DeviceSpan, Stream};
use kv_pool::Slot;

use crate::{
    KernelError, KvKernels, PagedKv,
    chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits},
};

/// Which way tokens move.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u32)]
pub enum Direction {
    /// Stores the chunk's tokens into their slots.
    ChunkToPaged = 0,
    /// Gathers tokens from their slots into the chunk.
    PagedToChunk = 1,
}

/// What [`KvKernels::multi_layer_transfer`] moves.
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

impl KvKernels {
    /// Moves tokens between a chunk and paged memory.
    ///
    /// A slot that two tokens would be stored to is refused, as far as the host's copies tell; where only the
    /// device's mapping names it twice, one token wins, and it is not defined which.
    /// Nothing is launched when no token is left to move.
    /// [`transfer_chunks`](KvKernels::transfer_chunks) moves several chunks, some layers, or pinned memory.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The mapping on the device is read when the kernel runs:
    /// a slot that is out of range then is skipped, whatever the host's copy said.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then. Slots of skipped tokens are not looked at.
    #[track_caller]
    pub fn multi_layer_transfer(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        transfer: Transfer<'_>,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        let Transfer { chunk, slot_mapping, tokens, skip_prefix_n_tokens, .. } = transfer;
        let chunk = Chunk {
            memory: chunk.into(),
            mapping: ChunkMapping::Slots {
                slots: slot_mapping.into(),
                host: Some(transfer.host_slots),
            },
            tokens,
            skip_prefix_n_tokens,
        };
        let transfer = ChunkTransfer {
            chunks: &[chunk],
            layers: 0..paged.shape().layers(),
            direction: transfer.direction,
            num_blocks: transfer.num_blocks,
            limits: LaunchLimits::default(),
            report: None,
        };
        self.transfer_chunks(stream, paged, &transfer)
    }
}
