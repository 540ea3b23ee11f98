//! Moving tokens between a contiguous chunk and paged memory, all layers in one launch.

use cuda_driver::{DeviceSpan, Stream};

use crate::kernels::check_chunk;
use crate::launch::{LaunchLimits, RawChunk, RawMapping, RawTransfer};
use crate::operand::check_array;
use crate::{KernelError, KvKernels, Operand, PagedKv};

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
    /// One slot (`i64`) for each token, on the device; at least `tokens` of them.
    ///
    /// [`PagedKv::slots`] says what a slot is. A negative slot means "skip this token".
    pub slot_mapping: DeviceSpan,
    /// The host's copy of the mapping, which is checked before the launch; exactly `tokens` slots.
    pub host_slots: &'a [i64],
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
    /// Where two tokens that are stored share a slot, one of them wins, and it is not defined which.
    /// Chunk and paged memory must not overlap. Nothing is launched when no token is left to move.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The mapping on the device is read when the kernel runs:
    /// a slot that is out of range then is skipped, whatever the host's copy said.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then. Slots of skipped tokens are not looked at.
    pub fn multi_layer_transfer(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        transfer: Transfer<'_>,
    ) -> Result<(), KernelError> {
        self.check_stream(stream)?;
        self.check_paged(paged, transfer.num_blocks)?;
        let shape = paged.shape();
        let Transfer { chunk, slot_mapping, tokens, skip_prefix_n_tokens, .. } = transfer;
        if skip_prefix_n_tokens > tokens {
            return Err(KernelError::Skip { skip_prefix_n_tokens, tokens });
        }
        check_chunk(shape, chunk, tokens)?;
        check_array(Operand::SlotMapping, slot_mapping, tokens, size_of::<i64>() as u64)?;
        let slots = transfer.num_blocks * u64::from(shape.block_tokens());
        check_slots(&transfer, slots)?;
        if skip_prefix_n_tokens == tokens {
            return Ok(());
        }

        let chunk = RawChunk {
            address: chunk.address(),
            mapping: RawMapping::Slots(slot_mapping.address()),
            tokens,
            skip_prefix_n_tokens: self.skip_of_launch(skip_prefix_n_tokens),
            // No overflow: the rows of all tokens fit in the chunk.
            rows: 0..tokens * shape.planes(),
        };
        let transfer = RawTransfer {
            paged,
            chunks: &[chunk],
            layers: 0..shape.layers(),
            direction: transfer.direction,
            num_blocks: transfer.num_blocks,
            limits: LaunchLimits::default(),
            report: None,
        };
        // SAFETY: chunk and mapping come from device spans; the rows of `tokens` tokens lie in the
        // chunk (`check_chunk`), and the mapping has `tokens` slots (`check_array`). That the chunk does
        // not overlap the pages is a matter of bytes in device memory, and the caller's.
        unsafe { self.multi_layer_transfer_raw(stream, &transfer) }
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

    /// Makes transfers ignore the skip, as a store that rounds down to its chunk would, until it is
    /// switched off.
    ///
    /// This is the mistake that the parameter exists to prevent; tests use it to show that they
    /// would notice. Slots of skipped tokens that are out of range are still left alone.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_ignore_skip(&self, ignore: bool) {
        self.ignore_skip.store(ignore, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Checks the host's copy of the mapping, from the first token that moves.
fn check_slots(transfer: &Transfer<'_>, slots: u64) -> Result<(), KernelError> {
    let Transfer { host_slots, tokens, skip_prefix_n_tokens, .. } = *transfer;
    if host_slots.len() as u64 != tokens {
        return Err(KernelError::SlotCount { slots: host_slots.len() as u64, tokens });
    }
    // The skip is at most the length.
    let moved = (skip_prefix_n_tokens..).zip(&host_slots[skip_prefix_n_tokens as usize..]);
    for (token, &slot) in moved {
        if u64::try_from(slot).is_ok_and(|slot| slot >= slots) {
            return Err(KernelError::SlotOutOfRange { token, slot, slots });
        }
    }
    Ok(())
}
