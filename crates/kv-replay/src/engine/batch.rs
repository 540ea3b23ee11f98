//! The tokens that one iteration writes, with their slots and keys, in the order of the rows.

use std::ops::Range;

use cuda_driver::guard;
use kv_plane::Sequence;
use kv_plane::manager::{GroupId, Row, SlotError};
use kv_pool::Slot;

use super::cache::Compute;
use super::content::RequestContent;
use super::groups::Reads;
use super::live::Staged;

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

/// What the sampler says of a sequence.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Rejected {
    pub(super) index: usize,
    pub(super) row: Row,
}

/// What an iteration writes in a further group.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Further {
    /// Of a window, the slot of each token; of states, the slot of each that a sequence leaves.
    pub(super) slots: Vec<Slot>,
    /// Of states, the key of each; of a draft model, the key of each token that it computes.
    pub(super) keys: Vec<u64>,
    /// Of a draft model, tokens of each sequence that it has right KV for.
    pub(super) lengths: Vec<u32>,
}

/// The tokens of an iteration.
///
/// Stores are aligned to chunks of a grid. If a cached prefix ends inside a chunk, the store begins
/// at the start of the chunk and skips the cached tokens. The chunk's data for these tokens is
/// invalid, and their slots are those of the shared prefix. A transfer that ignored the skip would
/// overwrite KV that other requests read (H12).
///
/// Where drafts are in flight, the host does not know where a row's tokens begin: the slots are then
/// those that the cache computes on the device, and the batch has none.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) slots: Vec<Slot>,
    pub(super) keys: Vec<u64>,
    /// Tokens of each sequence that are right.
    pub(super) lengths: Vec<u32>,
    /// Of the tokens of each sequence in this iteration, how many are right.
    pub(super) accepted: Vec<u32>,
    /// Sequences of which drafts are rejected.
    pub(super) rejected: Vec<Rejected>,
    pub(super) further: Vec<Further>,
    pub(super) launches: Vec<Launch>,
    /// Index of the first token that no launch covers yet.
    pub(super) open: usize,
    pub(super) written: u64,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.keys.clear();
        self.lengths.clear();
        self.accepted.clear();
        self.rejected.clear();
        for further in &mut self.further {
            further.slots.clear();
            further.keys.clear();
            further.lengths.clear();
        }
        self.launches.clear();
        self.open = 0;
        self.written = 0;
    }

    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Whether the slots are those that the cache computes on the device.
    pub(super) fn is_unplaced(&self) -> bool {
        self.slots.is_empty()
    }

    /// Adds tokens of a request. Those that are skipped are cached, and no other is.
    pub(super) fn add(
        &mut self,
        cache: &impl Compute,
        sequence: &Sequence,
        content: &RequestContent,
        Staged { skip, start, end, .. }: Staged,
    ) -> Result<(), SlotError> {
        if skip > 0 {
            self.close_open();
        }
        let first = self.keys.len();
        cache.manager().slot_mapping(GroupId(0), sequence, start - skip..end, &mut self.slots)?;
        for ((further, reads), id) in self.further.iter_mut().zip(cache.further_groups()).zip(1..) {
            if !matches!(reads, Reads::State | Reads::Drafted) {
                let tokens = start - skip..end;
                further_slots(cache, GroupId(id), (sequence, tokens), &mut further.slots);
            }
        }
        self.keys.extend((start - skip..start).map(|token| !content.key(token)));
        self.keys.extend((start..end).map(|token| content.key(token)));
        self.written += end - start;
        if skip > 0 {
            let tokens = (end - start + skip) as usize;
            let skip = guard!("replay.cached-head-skipped", skip as usize, else 0);
            self.launches.push(Launch { first, tokens, skip });
            self.open = self.keys.len();
        }
        Ok(())
    }

    pub(super) fn add_unplaced(
        &mut self,
        content: &RequestContent,
        Staged { start, right, end, .. }: Staged,
        step: u64,
    ) {
        self.written += end - start;
        self.keys.extend((start..right).map(|token| content.key(token)));
        self.keys.extend((right..end).map(|token| content.rejected_key(token, step)));
    }

    /// Adds what a sequence leaves in the groups of states and of a draft model in step `step`.
    pub(super) fn add_further(
        &mut self,
        cache: &impl Compute,
        sequence: &Sequence,
        content: &RequestContent,
        (staged, sure, step): (Staged, u64, u64),
    ) {
        let Staged { right, end, .. } = staged;
        self.further.resize_with(cache.further_groups().len(), Further::default);
        for ((further, reads), id) in self.further.iter_mut().zip(cache.further_groups()).zip(1..) {
            match reads {
                Reads::State => {
                    // One behind the tokens before the drafts, and one behind each draft.
                    let states = 0..1 + end - sure;
                    further_slots(cache, GroupId(id), (sequence, states), &mut further.slots);
                    let key = |behind| match behind <= right {
                        true => content.state_key(behind),
                        false => content.rejected_key(behind, !step),
                    };
                    further.keys.extend((sure..=end).map(key));
                }
                Reads::Drafted => {
                    let start = sequence.draft_end();
                    let end = start + sequence.next_draft();
                    let key = |token| match token < right {
                        true => content.key(token),
                        false => content.rejected_key(token, step),
                    };
                    further.keys.extend((start..end).map(key));
                    further.lengths.push(start.max(end.min(right)) as u32);
                }
                Reads::All | Reads::Last(_) => {}
            }
        }
    }

    /// Says of the next sequence what is read of it: its first tokens up to `right`, of which this iteration
    /// computes the last `accepted`.
    pub(super) fn read(&mut self, right: u64, accepted: u64, rejects: bool, row: Option<Row>) {
        if let Some(row) = row.filter(|_| rejects) {
            self.rejected.push(Rejected { index: self.lengths.len(), row });
        }
        // Not longer than a sequence that can be staged.
        self.lengths.push(right as u32);
        self.accepted.push(accepted as u32);
    }

    pub(super) fn finish(&mut self) {
        self.close_open();
    }

    pub(super) fn launches(&self) -> &[Launch] {
        &self.launches
    }

    fn close_open(&mut self) {
        let tokens = self.keys.len() - self.open;
        if tokens > 0 {
            self.launches.push(Launch { first: self.open, tokens, skip: 0 });
            self.open = self.keys.len();
        }
    }
}

/// Appends, for a window group, the slots of a sequence's tokens, none where it has no block; for
/// states, the slots of these entries of the sequence's row.
fn further_slots(
    cache: &impl Compute,
    group: GroupId,
    (sequence, tokens): (&Sequence, Range<u64>),
    slots: &mut Vec<Slot>,
) {
    let manager = cache.manager();
    let ids = manager.block_ids(group, sequence);
    let slot = |entry: u64, block_tokens, offset| {
        let block = ids.get(entry as usize).and_then(|entry| entry.block());
        block.map_or(Slot::NONE, |block| block.slot(block_tokens, offset))
    };
    if cache.further_groups()[usize::from(group.0) - 1] == Reads::State {
        return slots.extend(tokens.map(|entry| slot(entry, 1, 0)));
    }
    let block_tokens = manager.options().groups[0].block_tokens;
    let place = |token| (token / u64::from(block_tokens), token % u64::from(block_tokens));
    slots.extend(tokens.map(|token| {
        let (entry, offset) = place(token);
        slot(entry, block_tokens, offset as u32)
    }));
}
