//! What one iteration writes: tokens, their slots and keys, in the order of the chunk.

use std::ops::Range;

use kv_cache::{KvCache, Sequence, SlotError};

use super::content::RequestContent;

/// Tokens of one launch of the transfer kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Launch {
    /// Position of its first token in the batch's arrays.
    pub(super) first: usize,
    /// How many tokens, skipped ones included.
    pub(super) tokens: usize,
    /// How many of the first ones are skipped.
    pub(super) skip: usize,
}

/// The tokens of an iteration.
///
/// A request whose cached prefix ends inside a chunk of the grid is stored from the start of that
/// chunk on, as stores on a chunk grid do, with the cached head skipped. What the head of the chunk
/// holds is junk, and its slots are those of the shared prefix: a transfer that ignored the skip
/// would overwrite what others are reading (H12).
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) slots: Vec<i64>,
    pub(super) keys: Vec<u64>,
    launches: Vec<Launch>,
    /// Position of the first token that no launch of its own covers yet.
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

    /// Tokens so far, skipped ones included: what counts against the chunk's length.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Tokens that are written.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Adds tokens of a request, none of which is cached.
    pub(super) fn add(
        &mut self,
        cache: &KvCache,
        sequence: &Sequence,
        content: &RequestContent,
        tokens: Range<u64>,
    ) -> Result<(), SlotError> {
        cache.slot_mapping(sequence, tokens.clone(), &mut self.slots)?;
        self.written += tokens.end - tokens.start;
        self.keys.extend(tokens.map(|token| content.key(token)));
        Ok(())
    }

    /// Adds tokens `head..end` of a request, those before `start` to be skipped.
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

    /// Ends the batch: from here on [`launches`](Batch::launches) write everything added.
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
