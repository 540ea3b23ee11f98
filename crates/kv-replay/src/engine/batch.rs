//! The tokens that one iteration writes, with their slots and keys, in the order of the chunk.

use std::ops::Range;

use kv_cache::{KvCache, Sequence, SlotError};

use super::content::RequestContent;

/// The tokens of one launch of the transfer kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Launch {
    /// Index of its first token in the batch's arrays.
    pub(super) first: usize,
    /// Number of tokens, skipped ones included.
    pub(super) tokens: usize,
    /// Number of skipped tokens at its start.
    pub(super) skip: usize,
}

/// The tokens of an iteration.
/// Stores are aligned to chunks of a grid. If a cached prefix ends inside a chunk, the store begins
/// at the start of the chunk and skips the cached tokens. The chunk's data for these tokens is
/// invalid, and their slots are those of the shared prefix. A transfer that ignored the skip would
/// overwrite KV that other requests read (H12).
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) slots: Vec<i64>,
    pub(super) keys: Vec<u64>,
    launches: Vec<Launch>,
    /// Index of the first token that no launch covers yet.
    open: usize,
    written: u64,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.keys.clear();
        self.launches.clear();
        self.open = 0;
        self.written = 0;
    }

    /// Number of tokens so far, skipped ones included. They count against the chunk's length.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Number of written tokens.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Adds tokens of a request. None of them is cached. Those from `right` on are drafts that `step` rejects.
    pub(super) fn add(
        &mut self,
        cache: &KvCache,
        sequence: &Sequence,
        content: &RequestContent,
        (tokens, right, step): (Range<u64>, u64, u64),
    ) -> Result<(), SlotError> {
        cache.slot_mapping(sequence, tokens.clone(), &mut self.slots)?;
        self.written += tokens.end - tokens.start;
        let key = |token| match token < right {
            true => content.key(token),
            false => content.rejected_key(token, step),
        };
        self.keys.extend(tokens.map(key));
        Ok(())
    }

    /// Adds tokens `head..end` of a request. Those before `start` are skipped.
    pub(super) fn add_with_skip(
        &mut self,
        cache: &KvCache,
        sequence: &Sequence,
        content: &RequestContent,
        (head, start, end): (u64, u64, u64),
    ) -> Result<(), SlotError> {
        self.close_open();
        let first = self.slots.len();
        cache.slot_mapping(sequence, head..end, &mut self.slots)?;
        self.keys.extend((head..start).map(|token| !content.key(token)));
        self.keys.extend((start..end).map(|token| content.key(token)));
        self.written += end - start;
        let (tokens, skip) = ((end - head) as usize, (start - head) as usize);
        self.launches.push(Launch { first, tokens, skip });
        self.open = self.slots.len();
        Ok(())
    }

    /// Ends the batch. [`launches`](Batch::launches) then covers everything added.
    pub(super) fn finish(&mut self) {
        self.close_open();
    }

    /// The launches of a finished batch.
    pub(super) fn launches(&self) -> &[Launch] {
        &self.launches
    }

    fn close_open(&mut self) {
        let tokens = self.slots.len() - self.open;
        if tokens > 0 {
            self.launches.push(Launch { first: self.open, tokens, skip: 0 });
            self.open = self.slots.len();
        }
    }
}
