//! Admission: the cached prefixes of requests are found and pinned, the rest allocated.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use kv_pool::{
    Admit, Admitted, BlockHash, BlockId, BlockPin, ClaimedBlock, ClaimedBlocks, Naming,
    Registration, TenantId, Tier,
};
use kv_stage::TableError;

use crate::copies::Arrival;
use crate::rows::RowLease;
use crate::sequence::{Held, Sequence};
use crate::{AdmitError, KvCache, Request, SealError, SlotError};

/// A block in host memory that sequences of a batch have found, and where it may go.
#[derive(Debug)]
struct Far {
    pin: BlockPin,
    first: Target,
    others: Vec<Target>,
}

/// Where a block from host memory may go, and whose it is then.
#[derive(Debug)]
struct Target {
    /// The sequence, and the place in it.
    place: (usize, usize),
    block: ClaimedBlock,
}

/// A sequence's blocks, some of which are on their way.
type Places = Vec<Option<Held>>;

/// All that a batch found in host memory, each block once.
#[derive(Debug, Default)]
struct Fars {
    list: Vec<Far>,
    by_block: HashMap<BlockId, usize>,
}

impl Fars {
    fn add(&mut self, pin: BlockPin, target: Target) {
        match self.by_block.entry(pin.block()) {
            Entry::Occupied(known) => self.list[*known.get()].others.push(target),
            Entry::Vacant(new) => {
                new.insert(self.list.len());
                self.list.push(Far { pin, first: target, others: Vec::new() });
            }
        }
    }
}

impl KvCache {
    /// Admits one request of nobody in particular; see [`admit_batch`](KvCache::admit_batch).
    ///
    /// # Ordering
    /// As for [`admit_batch`](KvCache::admit_batch).
    ///
    /// # Errors
    /// [`AdmitError`]; [`is_retryable`](AdmitError::is_retryable) says whether waiting helps.
    #[track_caller]
    pub fn admit(&mut self, tokens: u64, hashes: &[BlockHash]) -> Result<Sequence, AdmitError> {
        let _site = cuda_driver::site::enter();
        let mut sequences = self.admit_batch(&[Request::new(tokens, hashes)])?;
        // One request makes one sequence.
        sequences.pop().ok_or(AdmitError::NoTokens)
    }

    /// Admits requests, all or none: finds and pins the cached prefixes of all of them, then allocates
    /// blocks for the rest of their prompts, in one step of the pool, so that no request takes what
    /// another one has found. What of the prefixes lies in host memory is brought back, once for all
    /// that share it.
    ///
    /// At least the last token of each is left to be computed, whatever is cached, for its output is
    /// what the request is after. A prefix that is not cached yet is computed by each request of the
    /// batch that has it. Space is asked for as if each request brought its blocks back by itself, which
    /// each must if somebody else is reading them in host memory.
    ///
    /// Empty blocks are taken first; if there are too few, more memory is mapped, which
    /// [`Growth::Ahead`](crate::Growth::Ahead) has done already in the steady state; if there is none,
    /// cached blocks are evicted, to host memory where there is room.
    ///
    /// # Ordering
    /// Waits for nothing. What is to be copied for it the next [`stage`](KvCache::stage) enqueues, and
    /// waits for: enqueue no work that reads or writes the new sequences before it. (When copies of
    /// 65,536 blocks have been decided and no step was staged, they are enqueued all the same, which may
    /// wait for the device to take the first of them.)
    ///
    /// # Errors
    /// [`AdmitError`]; [`is_retryable`](AdmitError::is_retryable) says whether waiting helps. A batch
    /// for which there is no space or no row may be too large as a whole: ask for fewer.
    #[track_caller]
    pub fn admit_batch(&mut self, requests: &[Request<'_>]) -> Result<Vec<Sequence>, AdmitError> {
        let _site = cuda_driver::site::enter();
        let batch =
            requests.iter().map(|request| self.check(request)).collect::<Result<Vec<_>, _>>()?;
        let rows = self.options.sequences_max;
        let lease = |_| self.rows.lease().ok_or(AdmitError::NoRow { rows });
        let rows = requests.iter().map(lease).collect::<Result<Vec<_>, _>>()?;
        for row in &rows {
            self.table.clear_row(row.row())?;
        }
        let mut admitted = self.admit_to_pool(&batch)?;
        // Whatever fails from here on, dropping gives all of it back, tails first.
        for admitted in &mut admitted {
            self.offload_from(&mut admitted.claimed);
        }
        let mut sequences = Vec::with_capacity(requests.len());
        for (request, row) in requests.iter().zip(rows) {
            sequences.push(self.empty_sequence(request, row));
        }
        self.hold(&mut sequences, admitted)?;
        for sequence in &sequences {
            self.write_row(sequence, 0)?;
        }
        Ok(sequences)
    }

    /// What the pool is asked for, if such a request is possible at all.
    fn check<'a>(&self, request: &Request<'a>) -> Result<Admit<'a>, AdmitError> {
        let &Request { tokens, hashes, tenant, .. } = request;
        let blocks = self.check_length(tokens)? as usize;
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let full_blocks = (tokens / block_tokens) as usize;
        if hashes.len() > full_blocks {
            return Err(AdmitError::TooManyHashes { hashes: hashes.len(), full_blocks });
        }
        let findable = hashes.len().min(((tokens - 1) / block_tokens) as usize);
        Ok(Admit { prefix: &hashes[..findable], partial: &[], blocks, tenant })
    }

    fn empty_sequence(&self, request: &Request<'_>, row: RowLease) -> Sequence {
        Sequence {
            pool: self.pool.clone(),
            row,
            blocks: Vec::with_capacity(self.blocks_for(request.tokens) as usize),
            tokens: request.tokens,
            prompt_tokens: request.tokens,
            cached_tokens: 0,
            onboarded_blocks: 0,
            sealed: 0,
            tenant: request.tenant,
            retention: request.retention.map(Arc::clone),
        }
    }

    /// Has the pool admit a batch, with as much memory under its blocks as there can be.
    fn admit_to_pool(&mut self, batch: &[Admit<'_>]) -> Result<Vec<Admitted>, AdmitError> {
        self.grow_if_short(|pool| pool.blocks_to_claim(batch))?;
        let admitted = match self.pool.admit(batch) {
            Err(error) if self.grow_beside_kept(&error)? => self.pool.admit(batch),
            admitted => admitted,
        };
        admitted.map_err(AdmitError::NoSpace)
    }

    /// Gives new sequences their blocks: the pinned prefixes, with what lies in host memory brought
    /// back to the first claimed blocks, and the other claimed blocks.
    fn hold(
        &mut self,
        sequences: &mut [Sequence],
        admitted: Vec<Admitted>,
    ) -> Result<(), AdmitError> {
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let mut places: Vec<Places> = Vec::with_capacity(sequences.len());
        let mut fars = Fars::default();
        for (number, (sequence, admitted)) in sequences.iter_mut().zip(admitted).enumerate() {
            let Admitted { prefix, claimed, .. } = admitted;
            sequence.cached_tokens = prefix.len() as u64 * block_tokens;
            sequence.sealed = prefix.len();
            let mut claimed = claimed.into_iter();
            let mut own: Places = Vec::with_capacity(prefix.len() + claimed.len());
            for pin in prefix {
                if pin.location().tier == Tier::Primary {
                    own.push(Some(Held::Shared(pin)));
                    continue;
                }
                // The pool has claimed a block for each of these.
                let Some(target) = claimed.next() else { break };
                sequence.onboarded_blocks += 1;
                fars.add(pin, Target { place: (number, own.len()), block: target });
                own.push(None);
            }
            own.extend(claimed.map(|block| Some(Held::Own(block))));
            places.push(own);
        }
        let onboarded = self.onboard_all(fars, &mut places);
        // Also what a failure left: a sequence gives its blocks back in the right order.
        for (sequence, places) in sequences.iter_mut().zip(places) {
            sequence.blocks.extend(places.into_iter().flatten());
        }
        onboarded
    }

    /// Brings back what lies in host memory, and puts it where it belongs. Who shares a block shares
    /// its way back, for each other's pins would keep it in host memory.
    fn onboard_all(&mut self, fars: Fars, places: &mut [Places]) -> Result<(), AdmitError> {
        for Far { pin, first, others } in fars.list {
            let (mut put, (sequence, index)) = (Vec::new(), first.place);
            match self.onboard(pin, first.block)? {
                Arrival::Moved(pin) => {
                    // The blocks that were claimed for the others are given back.
                    let share = |other: Target| (other.place, Held::Shared(pin.clone()));
                    put.extend(others.into_iter().map(share));
                    places[sequence][index] = Some(Held::Shared(pin));
                }
                Arrival::Copied { copy, source } => {
                    places[sequence][index] = Some(Held::Own(copy));
                    for other in others {
                        let arrival = self.onboard(source.clone(), other.block)?;
                        put.push((other.place, arrival.into_held()));
                    }
                }
            }
            for ((sequence, index), held) in put {
                places[sequence][index] = Some(held);
            }
        }
        Ok(())
    }

    /// Gives a sequence room for `tokens` tokens in all; it never shrinks.
    ///
    /// # Ordering
    /// As for [`admit`](KvCache::admit).
    ///
    /// # Errors
    /// [`AdmitError`]; the sequence is then as it was.
    #[track_caller]
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
            let _site = cuda_driver::site::enter();
            let claimed = self.claim(sequence.tenant, blocks - have)?;
            sequence.blocks.extend(claimed.into_iter().map(Held::Own));
            self.write_row(sequence, have)?;
        }
        sequence.tokens = tokens;
        Ok(())
    }

    /// Makes full blocks of a sequence findable for others, under the names `hashes`, which begin
    /// with its first block. Blocks that have been sealed before are passed over.
    ///
    /// Where another sequence has sealed equal content meanwhile, this sequence changes over to that
    /// block and gives its own back, so that equal content is held once. It keeps its own where the
    /// other is still on its way from host memory: what is enqueued after this call may read the block.
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
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let full_blocks = (sequence.tokens / block_tokens) as usize;
        if hashes.len() > full_blocks {
            return Err(SealError::TooManyHashes { hashes: hashes.len(), full_blocks });
        }
        let first = sequence.sealed;
        for (index, &hash) in hashes.iter().enumerate().skip(first) {
            let parent = index.checked_sub(1).map(|before| hashes[before]);
            let naming = Naming { parent, retention: sequence.retention_of(index, block_tokens) };
            sequence.replace(index, |held| match held {
                Held::Own(block) => sealed(block, hash, naming, &self.arriving),
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
        // Memory that has run out may come back: that is no matter of what can be at all.
        let capacity = u64::from(self.options.device_blocks);
        if blocks > capacity {
            return Err(AdmitError::NeverFits { blocks, capacity });
        }
        Ok(blocks)
    }

    /// Claims blocks and moves what is evicted from them to host memory.
    fn claim(&mut self, tenant: TenantId, count: usize) -> Result<ClaimedBlocks, AdmitError> {
        self.grow_if_short(|_| count)?;
        let claimed = match self.pool.claim_for(tenant, count) {
            Err(error) if self.grow_beside_kept(&error)? => self.pool.claim_for(tenant, count),
            claimed => claimed,
        };
        let mut claimed = claimed.map_err(AdmitError::NoSpace)?;
        self.offload_from(&mut claimed);
        Ok(claimed)
    }

    /// Moves what was evicted from claimed blocks to host memory.
    fn offload_from(&mut self, claimed: &mut ClaimedBlocks) {
        while let Some(offload) = claimed.take_offload() {
            self.offload(offload);
        }
    }

    /// Writes a sequence's row of the block table, from block `first` on.
    fn write_row(&mut self, sequence: &Sequence, first: usize) -> Result<(), TableError> {
        for (index, held) in sequence.blocks.iter().enumerate().skip(first) {
            self.table.set(sequence.row.row(), index, held.slot().as_i32())?;
        }
        Ok(())
    }
}

/// Gives a block's content its name, or changes over to the block that has it, if work that is enqueued
/// now can read it there. Otherwise there are two copies, of which this one has no name.
fn sealed(block: ClaimedBlock, hash: BlockHash, naming: Naming, arriving: &HashSet<usize>) -> Held {
    match block.register(hash, naming) {
        Registration::New(pin) => Held::Shared(pin),
        Registration::Duplicate { existing, own } => {
            // Host memory has what a remote reader holds there.
            let on_device = existing.location().tier == Tier::Primary;
            match on_device && !arriving.contains(&existing.slot().index()) {
                true => Held::Shared(existing),
                false => Held::Own(own),
            }
        }
    }
}
