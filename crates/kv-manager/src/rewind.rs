//! Sequences that go back: to where every group can go on.

use kv_pool::Pinned;
use smallvec::SmallVec;

use crate::blocks::Blocks;
use crate::hit::Found;
use crate::{Manager, Sequence};

impl Manager {
    /// Ends a sequence's KV after `tokens` tokens, or further ahead where every group can go on, and releases
    /// the blocks behind; where it ends. The ids stay known.
    pub(crate) fn cut(&mut self, sequence: &mut Sequence, tokens: u64) -> u64 {
        // A state is that behind the longest outcome.
        let state_at = sequence.ends.upper();
        self.cut_from(sequence, tokens, state_at)
    }

    /// The same of a sequence whose states are those behind `state_at` tokens, further than its KV can reach.
    pub(crate) fn cut_behind(&mut self, sequence: &mut Sequence, state_at: u64) -> u64 {
        let resolved = sequence.ends.resolved();
        self.cut_from(sequence, resolved, state_at)
    }

    fn cut_from(&mut self, sequence: &mut Sequence, tokens: u64, state_at: u64) -> u64 {
        let tokens = tokens.min(sequence.ends.resolved());
        self.settle_states(sequence);
        let resides = sequence.row.is_some() && !self.keeps_all;
        let mut found: SmallVec<[Option<Found>; 4]> = self.groups.iter().map(|_| None).collect();
        let end = match resides {
            true => self.end_for_all(sequence, tokens, state_at, &mut found),
            false => tokens,
        };
        sequence.ends.truncate(end, sequence.known.tokens());
        sequence.draft.truncate(end);
        let marks = sequence.marks();
        for (index, found) in found.into_iter().enumerate() {
            let (group, held) = (&mut self.groups[index], &mut sequence.held[index]);
            let end = if group.is_draft { sequence.draft.end } else { end };
            let kept = group.blocks_for(end);
            held.named = held.named.min(group.full_blocks(end));
            held.turn = group.next_checkpoint(end, marks);
            if group.is_window() {
                held.turn = 0;
            }
            let before = held.blocks.len();
            let keeps = !resides
                || end == 0
                || group.is_draft
                || match group.is_state() {
                    true => end == state_at,
                    false => group.covers(&held.blocks.gone(), end),
                };
            if keeps {
                held.blocks.truncate(kept);
                if let Some(row) = &sequence.row {
                    group.table.clear(&mut self.plan, row.row(), kept, before);
                }
                continue;
            }
            // What it had is of no use any more.
            let found = group.trimmed(found.unwrap_or_default(), end);
            held.blocks = Blocks::default();
            held.named = group.full_blocks(end);
            let first = found.tail_first;
            let (head, tail): (Pinned, Pinned) = (found.head, found.tail);
            self.note_pending(index, sequence, 0, &head);
            self.note_pending(index, sequence, first, &tail);
            // What others have had brought from host memory is there when the next plan is complete.
            sequence.copied = self.copied_by();
            let (group, held) = (&mut self.groups[index], &mut sequence.held[index]);
            if !group.is_state() {
                let gone = first - head.len();
                held.blocks.push_shared(head);
                held.blocks.push_gone(gone);
            }
            held.blocks.push_shared(tail);
            if let Some(row) = &sequence.row {
                group.write_row(&mut self.plan, row.row(), held, 0);
            }
        }
        sequence.frontier = None;
        end
    }

    /// The largest end, `tokens` or less, for which a sequence has what it needs in every group, or finds it on
    /// the device. Its states are those behind `state_at` tokens.
    fn end_for_all(
        &self,
        sequence: &Sequence,
        tokens: u64,
        state_at: u64,
        found: &mut [Option<Found>],
    ) -> u64 {
        let known = &sequence.known;
        let current = known.generation() == self.namer.generation;
        let names = if current { known.names() } else { &[] };
        self.agree(tokens, |index, end| {
            let (group, held) = (&self.groups[index], &sequence.held[index]);
            let has = end == 0
                // A draft model's KV may end anywhere before.
                || group.is_draft
                || match group.is_state() {
                    true => end == state_at,
                    false => group.covers(&held.blocks.gone(), end),
                };
            if has { end } else { group.find(names, end, true, &mut found[index]) }
        })
    }
}
