//! Sequences that go back, to where every group can go on, or go on with tokens of the engine's.

use kv_tier::GroupKind;
use smallvec::SmallVec;

use crate::blocks::Blocks;
use crate::group::{Group, Held};
use crate::hit::Found;
use crate::{ChangeError, Manager, Sequence, Tokens};

impl Manager {
    /// Cuts a sequence to its first `tokens` tokens, and returns where its KV ends. Results of steps that were
    /// staged before are stale.
    ///
    /// The KV ends at the cut, or where it ended before; with groups that do not keep all of it, further ahead:
    /// where every group can go on, at token 0 if nowhere else. The tokens from there on are to be computed again.
    ///
    /// Blocks behind the cut are released. A cut inside a block that others hold, or that has a name,
    /// leaves that as it is: the block is copied before the sequence writes to it.
    ///
    /// # Errors
    /// [`ChangeError`]; the sequence is as it was.
    pub fn truncate(&mut self, sequence: &mut Sequence, tokens: u64) -> Result<u64, ChangeError> {
        self.look_at_running(sequence)?;
        let known = sequence.known.tokens();
        if tokens > known {
            return Err(ChangeError::Beyond { tokens, known });
        }
        sequence.known.truncate(&self.namer, tokens);
        Ok(self.cut(sequence, tokens))
    }

    /// Adds tokens that did not come out of a step: the next turn of a conversation. The next steps
    /// compute them as they compute a prompt. What stands behind placeholder ids among them, such as a picture, is said with
    /// them, by [`Tokens::With`].
    ///
    /// # Errors
    /// [`ChangeError`]; the sequence is as it was.
    pub fn extend<'a>(
        &mut self,
        sequence: &mut Sequence,
        tokens: impl Into<Tokens<'a>>,
    ) -> Result<(), ChangeError> {
        self.look_at_running(sequence)?;
        if sequence.ends.is_open() {
            return Err(ChangeError::Later);
        }
        let tokens = tokens.into();
        sequence.known.check(&self.namer, &tokens)?;
        sequence.known.add(&self.namer, tokens);
        Ok(())
    }

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
        let mut found: SmallVec<[Option<Found>; 1]> = self.groups.iter().map(|_| None).collect();
        let end = match &sequence.row {
            Some(_) => self.end_for_all(sequence, tokens, state_at, &mut found),
            None => tokens,
        };
        sequence.end_at(end);
        let marks = sequence.marks();
        for (index, found) in found.into_iter().enumerate() {
            let (group, held) = (&mut self.groups[index], &mut sequence.held[index]);
            let goes_on = sequence.row.is_none() || group.goes_on(held, end, state_at);
            let end = if group.is_draft { sequence.draft.end } else { end };
            held.named = held.named.min(group.full_blocks(end));
            held.turn = group.turn(end, marks);
            if goes_on {
                let (kept, before) = (group.blocks_for(end), held.blocks.len());
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
            self.note_pending(index, &found, sequence.ends.resolved(), &mut sequence.depends);
            // What others have had brought from host memory is there when the next plan is complete.
            sequence.copied = self.plan.copied_by();
            let (group, held) = (&mut self.groups[index], &mut sequence.held[index]);
            if !group.is_state() {
                let gone = found.tail_first - found.head.len();
                held.blocks.push_shared(found.head);
                held.blocks.push_gone(gone);
            }
            held.blocks.push_shared(found.tail);
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
        let names = self.namer.current(known);
        self.groups.agree(tokens, |index, end| {
            let (group, held) = (&self.groups[index], &sequence.held[index]);
            let goes_on = group.goes_on(held, end, state_at);
            if goes_on { end } else { group.find(names, end, true, &mut found[index]) }
        })
    }
}

impl Group {
    /// Whether a sequence goes on behind `end` tokens with the blocks that it has, whose state is that behind `state_at`.
    fn goes_on(&self, held: &Held, end: u64, state_at: u64) -> bool {
        match self.kind {
            // A draft model's KV may end anywhere before.
            _ if end == 0 || self.is_draft => true,
            GroupKind::State { .. } => end == state_at,
            _ => self.covers(&held.blocks.gone(), end),
        }
    }
}
