//! Room for the next tokens of running sequences, and copy-on-write.

use kv_pool::{Claimed, Location, Pinned, Tier};

use crate::{BlockCopy, Manager, ReserveError, Sequence};

/// What a sequence was given.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reserved {
    /// Blocks that it got.
    pub blocks: usize,
    /// Whether its last block was shared, and is copied before the step writes it. The block's id in the
    /// table is another one.
    pub copied: bool,
    /// Tokens of its prompt that others have computed since it was admitted. They need not be computed.
    pub adopted_tokens: u64,
}

impl Manager {
    /// Gives a sequence room for the next `tokens` tokens: a chunk of its prompt, the token that was
    /// sampled last, or that and drafts behind it. The next [`stage`](Manager::stage) computes them.
    ///
    /// They count from the upper end of the sequence's KV, as if every open outcome were the longest.
    /// Of two calls before a step is staged, the last one counts.
    ///
    /// A prompt that is being computed goes over to blocks that others have computed meanwhile, if they
    /// begin where its KV ends: then the tokens count from behind these, and are no more than are left.
    ///
    /// # Errors
    /// [`ReserveError`]. With [`NoRoom`](ReserveError::NoRoom), which says what is missing, nothing has
    /// changed; suspend or drop another sequence.
    pub fn reserve(
        &mut self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Reserved, ReserveError> {
        self.look_at_running(sequence)?;
        if sequence.frontier.is_none() && self.has_room(sequence, tokens) {
            sequence.ends.next = tokens;
            return Ok(Reserved::default());
        }
        // Nothing changes before all blocks are there.
        let computed = match sequence.frontier.is_some() && tokens > 0 {
            true => self.find_computed(sequence),
            false => Pinned::default(),
        };
        let adopted = self.tokens_of(computed.len());
        let mut tokens = tokens;
        if adopted > 0 {
            let left = sequence.known.tokens() - sequence.ends.resolved() - adopted;
            tokens = tokens.min(u32::try_from(left).unwrap_or(u32::MAX));
        }
        let upper = sequence.ends.upper() + adopted;
        let needed = self.blocks_for(upper + u64::from(tokens));
        let max = self.table.width();
        if needed > max {
            return Err(ReserveError::TooLong { blocks: needed as u64, max: max as u64 });
        }
        let block_tokens = u64::from(self.options.block_tokens);
        let (last, filled) = ((upper / block_tokens) as usize, (upper % block_tokens) as u32);
        let shared = filled > 0
            && tokens > 0
            && !sequence.blocks.is_own(last)
            && !sequence.blocks.claim_back(last);
        let have = match adopted {
            0 => sequence.blocks.len(),
            // Of a prompt that was extended, there may be more than it has blocks for.
            _ => sequence.blocks.len().max(sequence.named + computed.len()),
        };
        let missing = needed.saturating_sub(have);
        let count = missing + usize::from(shared);
        let claimed = match count {
            0 => Claimed::default(),
            _ => self.claim(sequence.tenant, count)?,
        };
        if adopted > 0 {
            self.adopt_computed(sequence, computed);
        }
        if count > 0 {
            let mut claimed = claimed;
            let first = if shared { last } else { have };
            if shared {
                let behind = claimed.split_off(1);
                self.copy_on_write(sequence, last, filled, claimed);
                claimed = behind;
            }
            sequence.blocks.push_own(claimed);
            if let Some(row) = sequence.row() {
                self.write_row(row, &sequence.blocks, first);
            }
        }
        sequence.ends.next = tokens;
        Ok(Reserved { blocks: count, copied: shared, adopted_tokens: adopted })
    }

    /// Whether `tokens` more tokens fit into blocks that a sequence has and may write: the common case, without a
    /// division.
    fn has_room(&self, sequence: &Sequence, tokens: u32) -> bool {
        let upper = sequence.ends.upper();
        let (own_from, len) = (sequence.blocks.own_from(), sequence.blocks.len());
        self.tokens_of(own_from) <= upper && upper + u64::from(tokens) <= self.tokens_of(len)
    }

    /// Blocks that [`reserve`](Self::reserve) would claim for so many tokens, at most: for an owner of memory
    /// that maps it before cached content is evicted.
    #[must_use]
    pub fn blocks_to_reserve(&self, sequence: &Sequence, tokens: u32) -> usize {
        let end = sequence.ends.upper().saturating_add(tokens.into());
        let needed = self.blocks_for(end).min(self.table.width());
        let last = (sequence.ends.upper() / u64::from(self.options.block_tokens)) as usize;
        let shared = last < sequence.blocks.len() && !sequence.blocks.is_own(last);
        needed.saturating_sub(sequence.blocks.len()) + usize::from(shared)
    }

    /// Puts `own` in the place of a shared block, of which `filled` tokens are copied to it.
    fn copy_on_write(&mut self, sequence: &mut Sequence, index: usize, filled: u32, own: Claimed) {
        let at = |id| Location { tier: Tier::Primary, id };
        if let (Some(from), Some(to)) = (sequence.blocks.id(index), own.ids().next()) {
            let written_by = sequence.ends.latest().unwrap_or(0);
            let (from, to) = (at(from), at(to));
            self.plan.copies.push(BlockCopy { from, to, tokens: filled, written_by });
        }
        // The copy comes before every later use of the block, in the order of the plans.
        drop(sequence.blocks.replace(index, own));
        sequence.copied = self.copied_by();
        self.stats.copied_on_write += 1;
    }

    /// Finds cached blocks that begin where the KV of a prompt ends.
    fn find_computed(&self, sequence: &Sequence) -> Pinned {
        let block_tokens = u64::from(self.options.block_tokens);
        let resolved = sequence.ends.resolved();
        let first = (resolved / block_tokens) as usize;
        // The last token is computed in any case: its output is wanted.
        let last = sequence.known.tokens().saturating_sub(1);
        let end = (last.min(sequence.hit_max) / block_tokens) as usize;
        let current = sequence.known.generation() == self.namer.generation;
        let begins = resolved.is_multiple_of(block_tokens) && sequence.named == first;
        if !begins || sequence.ends.is_uncertain() || first >= end || !current {
            return Pinned::default();
        }
        let mut found = self.pool.match_prefix(&sequence.known.names()[first..end]);
        let near = found.locations().take_while(|at| at.tier == Tier::Primary).count();
        found.truncate(near);
        found
    }

    /// Goes over to cached blocks that begin where the KV of a prompt ends.
    fn adopt_computed(&mut self, sequence: &mut Sequence, found: Pinned) {
        let (first, count) = (sequence.named, found.len());
        self.note_pending(sequence, first, &found);
        sequence.copied = self.copied_by();
        let mut behind = sequence.blocks.split_off(first);
        let rest = behind.split_off(count);
        sequence.blocks.push_shared(found);
        sequence.blocks.append(rest);
        // They were claimed for this prompt, and never written.
        drop(behind);
        if let Some(row) = sequence.row() {
            self.write_row(row, &sequence.blocks, first);
        }
        sequence.named += count;
        sequence.ends.skip(self.tokens_of(count));
        self.follow_frontier(sequence);
    }

    /// Notes on which steps the content of pinned blocks depends, the first of which is block `first` of
    /// the sequence.
    pub(crate) fn note_pending(&self, sequence: &mut Sequence, first: usize, pinned: &Pinned) {
        for (index, record) in pinned.records().enumerate() {
            let Some(step) = self.pending(record) else { continue };
            if !sequence.depends.iter().any(|(on, _)| *on == step) {
                sequence.depends.push((step, first + index));
            }
        }
    }
}
