//! Token slots: where each token of a sequence lies.

use std::ops::Range;

use kv_pool::Slot;

use crate::{GroupId, Manager, Sequence};

/// The slots of a sequence's tokens were not listed: it has no blocks for them, is suspended, or belongs to
/// another manager.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("no slots for tokens {start}..{end} of a sequence with room for {tokens} tokens here")]
pub struct SlotError {
    /// First token asked for.
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// Tokens that its blocks have room for; 0 if it has none here.
    pub tokens: u64,
}

kv_pool::one_line_debug!(SlotError);

impl Manager {
    /// Appends the slots of a sequence's tokens in a group to `slots`: slot `s` is token `s % block_tokens` of
    /// device block `s / block_tokens`, and [`Slot::NONE`] is that of a token whose block is needed no more.
    ///
    /// # Errors
    /// [`SlotError`], for a group that there is not, too; nothing was appended then.
    pub fn slot_mapping(
        &self,
        group: GroupId,
        sequence: &Sequence,
        tokens: Range<u64>,
        slots: &mut Vec<Slot>,
    ) -> Result<(), SlotError> {
        let Range { start, end } = tokens;
        let ids = self.block_ids(group, sequence);
        let own = self.groups.get(usize::from(group.0)).map_or(1, |group| group.block_tokens);
        let block_tokens = u64::from(own);
        let room = match ids {
            [] => 0,
            _ => sequence.block_count(group) as u64 * block_tokens,
        };
        if start > end || end > room || ids.is_empty() {
            return Err(SlotError { start, end, tokens: room });
        }
        slots.reserve((end - start) as usize);
        let mut at = start;
        while at < end {
            let block = at / block_tokens;
            let next = end.min((block + 1) * block_tokens);
            // The sequence has blocks for all of its room.
            let id = ids[block as usize].block();
            let offsets = (at - block * block_tokens) as u32..(next - block * block_tokens) as u32;
            let slot = |offset| id.map_or(Slot::NONE, |id| id.slot(own, offset));
            slots.extend(offsets.map(slot));
            at = next;
        }
        Ok(())
    }
}
