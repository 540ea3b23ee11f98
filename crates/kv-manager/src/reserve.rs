//! Room for the next tokens of running sequences, and copy-on-write.

use kv_pool::{Location, Tier};

use crate::{Manager, ReserveError, Sequence};

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
        let mut reserved = Reserved::default();
        if sequence.frontier.is_some() && tokens > 0 {
            reserved.adopted_tokens = self.adopt_computed(sequence);
        }
        let mut tokens = tokens;
        if reserved.adopted_tokens > 0 {
            let left = sequence.known.tokens() - sequence.ends.resolved();
            tokens = tokens.min(u32::try_from(left).unwrap_or(u32::MAX));
        }
        let upper = sequence.ends.upper();
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
        let have = sequence.blocks.len();
        let missing = needed.saturating_sub(have);
        let count = missing + usize::from(shared);
        if count > 0 {
            let mut claimed = self.claim(sequence.tenant, count)?;
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
        (reserved.blocks, reserved.copied) = (count, shared);
        Ok(reserved)
    }

    /// Puts `own` in the place of a shared block, of which `filled` tokens are copied to it.
    fn copy_on_write(
        &mut self,
        sequence: &mut Sequence,
        index: usize,
        filled: u32,
        own: kv_pool::Claimed,
    ) {
        let at = |id| Location { tier: Tier::Primary, id };
        if let (Some(from), Some(to)) = (sequence.blocks.id(index), own.ids().next()) {
            self.copy(at(from), at(to), filled);
        }
        // The copy comes before every later use of the block, in the order of the plans.
        drop(sequence.blocks.replace(index, own));
        self.stats.copied_on_write += 1;
    }

    /// Goes over to cached blocks that begin where the KV of a prompt ends; how many tokens they hold.
    fn adopt_computed(&mut self, sequence: &mut Sequence) -> u64 {
        let block_tokens = u64::from(self.options.block_tokens);
        let resolved = sequence.ends.resolved();
        if !resolved.is_multiple_of(block_tokens) || sequence.ends.is_uncertain() {
            return 0;
        }
        let first = (resolved / block_tokens) as usize;
        // The last token is computed in any case: its output is wanted.
        let end = (sequence.known.tokens().saturating_sub(1) / block_tokens) as usize;
        let current = sequence.known.generation() == self.namer.generation;
        if first >= end || sequence.named != first || !current {
            return 0;
        }
        let mut found = self.pool.match_prefix(&sequence.known.names()[first..end]);
        let near = found.locations().take_while(|at| at.tier == Tier::Primary).count();
        found.truncate(near);
        if found.is_empty() {
            return 0;
        }
        self.note_pending(sequence, first, &found);
        let mut behind = sequence.blocks.split_off(first);
        let rest = behind.split_off(near);
        sequence.blocks.push_shared(found);
        sequence.blocks.append(rest);
        // They were claimed for this prompt, and never written.
        drop(behind);
        if let Some(row) = sequence.row() {
            self.write_row(row, &sequence.blocks, first);
        }
        let tokens = near as u64 * block_tokens;
        sequence.named += near;
        sequence.ends.skip(tokens);
        self.follow_frontier(sequence);
        tokens
    }

    /// Notes on which steps the content of pinned blocks depends, the first of which is block `first` of
    /// the sequence.
    pub(crate) fn note_pending(
        &self,
        sequence: &mut Sequence,
        first: usize,
        pinned: &kv_pool::Pinned,
    ) {
        for (index, record) in pinned.records().enumerate() {
            let Some(step) = self.pending(record) else { continue };
            if !sequence.depends.iter().any(|(on, _)| *on == step) {
                sequence.depends.push((step, first + index));
            }
        }
    }
}
