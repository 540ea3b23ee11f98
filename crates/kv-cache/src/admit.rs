//! Admission: a request's cached prefix is found and pinned, the rest allocated.

use std::ops::Range;

use cuda_vmm::MemoryLimit;
use kv_pool::{
    BlockAt, BlockHash, BlockPin, ClaimedBlock, ClaimedBlocks, Naming, Offload, Onboarded,
    PinnedBlocks, Registration, Tier,
};
use kv_stage::TableError;

use crate::sequence::{Held, Sequence};
use crate::{AdmitError, KvCache, SealError, SlotError};

impl KvCache {
    /// Admits a request: finds and pins its cached prefix, brings what of it lies in host memory
    /// back, and allocates blocks for the rest of the prompt.
    ///
    /// `hashes` names the prompt's full blocks, from the first on, as far as others may share them.
    /// At least the last token is left to be computed, whatever is cached, for its output is what
    /// the request is after.
    ///
    /// Empty blocks are taken first; if there are too few, more memory is mapped, which
    /// [`Growth::Ahead`](crate::Growth::Ahead) has done already in the steady state; if there is none,
    /// cached blocks are evicted, to host memory where there is room.
    ///
    /// # Ordering
    /// Waits for nothing. What this call copies is waited for by the next [`stage`](KvCache::stage):
    /// enqueue no work that reads or writes the new sequence before it.
    ///
    /// # Errors
    /// [`AdmitError`]; [`is_retryable`](AdmitError::is_retryable) says whether waiting helps.
    pub fn admit(&mut self, tokens: u64, hashes: &[BlockHash]) -> Result<Sequence, AdmitError> {
        let blocks = self.check_length(tokens)?;
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let full_blocks = (tokens / block_tokens) as usize;
        if hashes.len() > full_blocks {
            return Err(AdmitError::TooManyHashes { hashes: hashes.len(), full_blocks });
        }
        let rows = self.options.sequences_max;
        let row = self.rows.lease().ok_or(AdmitError::NoRow { rows })?;
        self.table.clear_row(row.row())?;
        let findable = hashes.len().min(((tokens - 1) / block_tokens) as usize);
        let pins = self.pool.match_prefix(&hashes[..findable]);
        // From here on the sequence releases what it holds, tail first, whatever goes wrong.
        let mut sequence = Sequence {
            pool: self.pool.clone(),
            row,
            blocks: Vec::with_capacity(blocks as usize),
            tokens,
            cached_tokens: pins.len() as u64 * block_tokens,
            onboarded_blocks: 0,
            sealed: pins.len(),
        };
        let far = |at: &&BlockAt| at.location.tier != Tier::Primary;
        let in_host = pins.as_slice().iter().filter(far).count();
        // On failure the pins are released, tail first.
        let claimed = self.claim(blocks as usize - pins.len() + in_host)?;
        self.hold(&mut sequence, pins, claimed)?;
        self.write_row(&sequence, 0)?;
        Ok(sequence)
    }

    /// Gives a new sequence its blocks: the pinned prefix, with what lies in host memory brought back
    /// to the first claimed blocks, and the other claimed blocks.
    fn hold(
        &mut self,
        sequence: &mut Sequence,
        pins: PinnedBlocks,
        claimed: ClaimedBlocks,
    ) -> Result<(), AdmitError> {
        let (mut pins, mut claimed) = (pins.into_iter(), claimed.into_iter());
        while let Some(pin) = pins.next() {
            let held = match pin.location().tier {
                Tier::Primary => Ok(Held::Shared(pin)),
                _ => {
                    let Some(target) = claimed.next() else { break };
                    sequence.onboarded_blocks += 1;
                    self.onboard(pin, target)
                }
            };
            match held {
                Ok(held) => sequence.blocks.push(held),
                Err(error) => {
                    self.pool.release(pins.collect());
                    return Err(error);
                }
            }
        }
        sequence.blocks.extend(claimed.map(Held::Own));
        Ok(())
    }

    /// Gives a sequence room for `tokens` tokens in all; it never shrinks.
    ///
    /// # Ordering
    /// As for [`admit`](KvCache::admit).
    ///
    /// # Errors
    /// [`AdmitError`]; the sequence is then as it was.
    pub fn extend(&mut self, sequence: &mut Sequence, tokens: u64) -> Result<(), AdmitError> {
        if !self.rows.owns(&sequence.row) {
            return Err(AdmitError::ForeignSequence);
        }
        if tokens <= sequence.tokens {
            return Ok(());
        }
        let blocks = self.check_length(tokens)? as usize;
        let have = sequence.blocks.len();
        if blocks > have {
            let claimed = self.claim(blocks - have)?;
            sequence.blocks.extend(claimed.into_iter().map(Held::Own));
            self.write_row(sequence, have)?;
        }
        sequence.tokens = tokens;
        Ok(())
    }

    /// Makes full blocks of a sequence findable for others, under the names `hashes`, which begin
    /// with its first block. Blocks that have been sealed before are passed over.
    ///
    /// Where somebody else has sealed equal content meanwhile, the sequence changes over to that
    /// block and gives its own back, so that equal content is held once.
    ///
    /// # Ordering
    /// Call it when the work that writes the blocks is enqueued on every compute stream: whoever
    /// finds them reads them in later work of the same streams.
    ///
    /// # Errors
    /// [`SealError`].
    pub fn seal(&mut self, sequence: &mut Sequence, hashes: &[BlockHash]) -> Result<(), SealError> {
        if !self.rows.owns(&sequence.row) {
            return Err(SealError::ForeignSequence);
        }
        let full_blocks = (sequence.tokens / u64::from(self.options.shape.block_tokens())) as usize;
        if hashes.len() > full_blocks {
            return Err(SealError::TooManyHashes { hashes: hashes.len(), full_blocks });
        }
        let first = sequence.sealed;
        for (index, &hash) in hashes.iter().enumerate().skip(first) {
            let before = index.checked_sub(1).map(|before| hashes[before]);
            sequence.replace(index, |held| match held {
                Held::Own(block) => sealed(block, hash, before),
                shared => shared,
            });
            sequence.sealed = index + 1;
        }
        if sequence.sealed > first {
            self.write_row(sequence, first)?;
        }
        Ok(())
    }

    /// Appends the slots of a sequence's tokens to `slots`: slot `s` is token `s % block_tokens` of
    /// device block `s / block_tokens`, as the transfer kernels take them.
    ///
    /// # Errors
    /// [`SlotError`]; nothing was appended then.
    pub fn slot_mapping(
        &self,
        sequence: &Sequence,
        tokens: Range<u64>,
        slots: &mut Vec<i64>,
    ) -> Result<(), SlotError> {
        if !self.rows.owns(&sequence.row) {
            return Err(SlotError::ForeignSequence);
        }
        let Range { start, end } = tokens;
        if start > end || end > sequence.tokens {
            return Err(SlotError::OutOfRange { start, end, tokens: sequence.tokens });
        }
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let slot = |token: u64| {
            // The sequence has blocks for all its tokens.
            let block = sequence.blocks[(token / block_tokens) as usize].slot().index() as u64;
            (block * block_tokens + token % block_tokens) as i64
        };
        slots.extend(tokens.map(slot));
        Ok(())
    }

    /// Blocks of a sequence of `tokens` tokens, if such a sequence is possible at all.
    fn check_length(&self, tokens: u64) -> Result<u64, AdmitError> {
        if tokens == 0 {
            return Err(AdmitError::NoTokens);
        }
        let blocks = self.blocks_for(tokens);
        let max = u64::from(self.options.blocks_per_sequence_max);
        if blocks > max {
            return Err(AdmitError::TooLong { blocks, max });
        }
        let capacity = match self.is_exhausted() {
            true => self.stats.ready_blocks,
            false => u64::from(self.options.device_blocks),
        };
        if blocks > capacity {
            return Err(AdmitError::NeverFits { blocks, capacity });
        }
        Ok(blocks)
    }

    /// Claims blocks and moves what is evicted from them to host memory.
    fn claim(&mut self, count: usize) -> Result<ClaimedBlocks, AdmitError> {
        self.grow_for(count)?;
        let mut claimed = self.pool.claim(count).map_err(AdmitError::NoSpace)?;
        while let Some(offload) = claimed.take_offload() {
            self.offload(offload)?;
        }
        Ok(claimed)
    }

    /// Sees to it that `count` blocks are empty, as far as there is memory. Makes a driver call only
    /// if too few are ready.
    fn grow_for(&mut self, count: usize) -> Result<(), AdmitError> {
        self.take_mapped();
        self.heed_limit();
        let ready = self.stats.ready_blocks;
        let used = ready.saturating_sub(self.pool.empty() as u64) + count as u64;
        let most = if self.memory_exhausted { ready } else { self.options.device_blocks.into() };
        let wanted = used.min(most);
        for part in &self.parts {
            part.demand(wanted)?;
        }
        if wanted <= ready {
            return Ok(());
        }
        self.stats.growth_stalls += 1;
        // Before the attempt: a move that comes during it is heeded next time.
        self.limit_revision = self.limit_revision();
        let mut reachable = wanted;
        for part in &self.parts {
            let ready = part.grow_towards(reachable)?;
            if ready < reachable {
                self.memory_exhausted = true;
                reachable = ready;
            }
        }
        self.take_mapped();
        if self.memory_exhausted {
            for part in &self.parts {
                part.stop_growing();
                part.demand(self.stats.ready_blocks)?;
            }
        }
        Ok(())
    }

    /// Lets a cache that had run out of memory grow again when the limit was moved since.
    fn heed_limit(&mut self) {
        if self.memory_exhausted && !self.is_exhausted() {
            self.memory_exhausted = false;
            for part in &self.parts {
                part.resume_growing(&self.options.growth);
            }
        }
    }

    /// Whether memory ran out, under the limit that there still is.
    fn is_exhausted(&self) -> bool {
        self.memory_exhausted && self.limit_revision() == self.limit_revision
    }

    fn limit_revision(&self) -> u64 {
        self.options.memory.limit.as_ref().map_or(0, MemoryLimit::revision)
    }

    /// Tells the pool of blocks that have memory by now. Pages hold whole numbers of blocks on no two
    /// devices alike: what all have counts.
    fn take_mapped(&mut self) {
        let mapped = self.mapped_blocks();
        if mapped <= self.stats.ready_blocks {
            return;
        }
        match self.pool.add_primary_slots(mapped) {
            Ok(_) => self.stats.ready_blocks = mapped,
            Err(error) => tracing::error!(%error, "the pool has fewer slots than there is memory"),
        }
    }

    /// Enqueues the copy of evicted content to host memory.
    fn offload(&mut self, offload: Offload) -> Result<(), AdmitError> {
        self.expect_copies();
        for part in &self.parts {
            part.offload(offload.from().index(), offload.to().index())?;
        }
        self.stats.offloaded_blocks += 1;
        self.stats.copied_bytes += self.options.shape.block_bytes();
        // Every later use of the host slot is a copy on the same streams.
        offload.commit();
        Ok(())
    }

    /// Enqueues the copy of content in host memory to a claimed block.
    fn onboard(&mut self, pin: BlockPin, target: ClaimedBlock) -> Result<Held, AdmitError> {
        let onboard = self
            .pool
            .begin_onboard(pin, target)
            .map_err(|refused| AdmitError::Onboard(refused.reason))?;
        self.expect_copies();
        for part in &self.parts {
            part.onboard(onboard.from().index(), onboard.to().index())?;
        }
        self.stats.onboarded_blocks += 1;
        self.stats.copied_bytes += self.options.shape.block_bytes();
        Ok(match onboard.commit() {
            Onboarded::Moved(pin) => Held::Shared(pin),
            // Somebody else reads the block in host memory. The copy there is in stream order before
            // every later use of that slot, so the pin need not outlive this call.
            Onboarded::Copied { copy, .. } => Held::Own(copy),
        })
    }

    /// To be called before a copy is enqueued, so that also copies of which only some can be enqueued
    /// are waited for.
    fn expect_copies(&mut self) {
        self.copies.get_or_insert_with(|| self.gate.lease());
    }

    /// Writes a sequence's row of the block table, from block `first` on.
    fn write_row(&mut self, sequence: &Sequence, first: usize) -> Result<(), TableError> {
        for (index, held) in sequence.blocks.iter().enumerate().skip(first) {
            self.table.set(sequence.row.row(), index, held.slot().as_i32())?;
        }
        Ok(())
    }
}

/// Gives a block's content its name, or changes over to the block that has it.
fn sealed(block: ClaimedBlock, hash: BlockHash, before: Option<BlockHash>) -> Held {
    match block.register(hash, Naming { parent: before, ..Naming::default() }) {
        Registration::New(pin) => Held::Shared(pin),
        Registration::Duplicate { existing, own } => match existing.location().tier {
            Tier::Primary => Held::Shared(existing),
            // A remote reader holds it in host memory. Two copies, of which this one has no name.
            _ => Held::Own(own),
        },
    }
}
