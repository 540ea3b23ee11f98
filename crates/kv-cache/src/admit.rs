//! Admission: finds and pins the cached prefixes of requests, and claims their other blocks.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use kv_pool::{
    Admission as PoolAdmission, Admit, Admitted, BlockHash, BlockId, ClaimError, Claimed, Pinned,
    Tier, moves::Onboarded, tenants::TenantId,
};
use kv_stage::error::TableError;

use crate::rows::RowLease;
use crate::sequence::{Blocks, Run, Sequence};
use crate::{AdmitError, KvCache, Request, SealError, SlotError};

/// What came of requests of which as many were admitted as fit.
#[derive(Debug)]
pub struct Admission {
    /// The sequences of the first requests, in their order.
    pub admitted: Vec<Sequence>,
    /// Why the next request was not admitted; [`is_retryable`](AdmitError::is_retryable) says whether
    /// waiting helps. `None` if all were admitted, or the budget was spent.
    pub refused: Option<AdmitError>,
}

/// Requests that are possible, each with a row, and why the next one is not.
#[derive(Debug, Default)]
struct Prepared<'a> {
    batch: Vec<Admit<'a>>,
    rows: Vec<RowLease>,
    refused: Option<AdmitError>,
}

/// Blocks of a sequence that is being admitted.
#[derive(Debug)]
enum Piece {
    Held(Run),
    /// Blocks in host memory, and where they may go.
    Far(Pinned, Claimed),
    /// A block in host memory that an earlier sequence of the batch has found too, and where it may go.
    Again(BlockId, Claimed),
}

/// Blocks that a batch found in host memory.
#[derive(Debug, Default)]
struct Fars {
    /// Found by now, in a batch of several.
    seen: HashSet<BlockId>,
    /// Blocks found more than once, with a pin of each once its place is decided.
    shared: HashMap<BlockId, Pinned>,
}

impl Fars {
    /// Splits the blocks of an admission by tier; how many are in host memory.
    fn pieces(&mut self, admitted: Admitted, alone: bool) -> (Vec<Piece>, usize) {
        let Admitted { mut prefix, mut claimed, .. } = admitted;
        let (mut pieces, mut far) = (Vec::with_capacity(2), 0);
        while let Some(tier) = first_tier(&prefix) {
            let alike = prefix.locations().take_while(|at| at.tier == tier).count();
            let near = tier == Tier::Primary;
            let again = |fars: &Self, id| !alone && fars.seen.contains(&id);
            let count = match prefix.ids().next() {
                Some(first) if !near && again(self, first) => 1,
                _ if near => alike,
                _ => prefix.ids().take(alike).take_while(|&id| !again(self, id)).count(),
            };
            let rest = prefix.split_off(count);
            let part = std::mem::replace(&mut prefix, rest);
            if near {
                pieces.push(Piece::Held(Run::Shared(part)));
                continue;
            }
            far += count;
            // The pool has claimed a block for each of these.
            let rest = claimed.split_off(count);
            let target = std::mem::replace(&mut claimed, rest);
            let first = part.ids().next();
            match first {
                Some(id) if again(self, id) => {
                    // A second pin would keep the block in host memory.
                    self.shared.entry(id).or_default();
                    pieces.push(Piece::Again(id, target));
                }
                _ => {
                    self.seen.extend(part.ids().filter(|_| !alone));
                    pieces.push(Piece::Far(part, target));
                }
            }
        }
        pieces.push(Piece::Held(Run::Own(claimed)));
        (pieces, far)
    }
}

impl KvCache {
    /// Admits one request without a tenant, or says why there is no room; see
    /// [`admit_fitting`](KvCache::admit_fitting).
    ///
    /// # Ordering
    /// As for [`admit_fitting`](KvCache::admit_fitting).
    ///
    /// # Errors
    /// [`AdmitError`]; [`is_retryable`](AdmitError::is_retryable) says whether waiting helps.
    #[track_caller]
    pub fn admit(&mut self, tokens: u64, hashes: &[BlockHash]) -> Result<Sequence, AdmitError> {
        let _site = cuda_driver::site::enter();
        let mut admission = self.admit_fitting(&[Request::new(tokens, hashes)], u64::MAX)?;
        // One request makes one sequence, or is refused.
        let refused = admission.refused.unwrap_or(AdmitError::NoTokens);
        admission.admitted.pop().ok_or(refused)
    }

    /// Admits as many of the requests, in order, as memory, rows and the budget of a step allow, and says
    /// why the next one was not admitted. No memory is to be asked about before, and nothing to be tried
    /// again with fewer requests.
    ///
    /// One step of the pool pins the cached prefixes of all that are admitted, then claims blocks for the
    /// rest of their prompts, so no request evicts a block that another one has found. Prefix blocks in
    /// host memory are brought back, once for all requests that share them. What is refused has no effect.
    ///
    /// `tokens_max` is the budget: a request is admitted if those before it have fewer tokens to compute,
    /// counted in whole blocks. `u64::MAX` is no bound.
    ///
    /// At least the last token of each prompt is left to be computed, since the request needs its
    /// output. A prefix that is not cached yet is computed by each request of the batch that has
    /// it. Blocks are claimed as if each request brought back its prefix for itself, because it
    /// must if another owner has pinned the prefix in host memory.
    ///
    /// Empty blocks are claimed first. If there are too few, more memory is mapped; with
    /// [`Growth::Ahead`](crate::Growth::Ahead) that has been done already in the steady state. If
    /// no memory is left, cached blocks are evicted, to host memory where there is room.
    ///
    /// # Ordering
    /// Does not wait. The next [`stage`](KvCache::stage) enqueues the copies of the admission, and
    /// makes the compute streams wait for them. Enqueue no work that reads or writes the new
    /// sequences before that call. (If copies of 65,536 blocks have been decided and no step was
    /// staged, they are enqueued at once, which may wait for the device to take the first of them.)
    ///
    /// # Errors
    /// [`AdmitError`] if a driver call failed; nothing was admitted then.
    #[track_caller]
    pub fn admit_fitting(
        &mut self,
        requests: &[Request<'_>],
        tokens_max: u64,
    ) -> Result<Admission, AdmitError> {
        let _site = cuda_driver::site::enter();
        let mut prepared = Prepared::default();
        for request in requests {
            match self.prepare(request) {
                Ok((admit, row)) => {
                    prepared.batch.push(admit);
                    prepared.rows.push(row);
                }
                Err(refused) => {
                    prepared.refused = Some(refused);
                    break;
                }
            }
        }
        let Prepared { batch, rows, refused: impossible } = prepared;
        let (mut admitted, refused) = self.admit_to_pool(&batch, tokens_max)?;
        // If a later call fails, dropping the lists gives all blocks back, tails first.
        for admitted in &mut admitted {
            self.offload_from(&mut admitted.claimed);
        }
        let fewer = admitted.len() < batch.len();
        let mut sequences = Vec::with_capacity(admitted.len());
        for ((request, row), _) in requests.iter().zip(rows).zip(&admitted) {
            self.table.clear_row(row.row())?;
            sequences.push(self.empty_sequence(request, row));
        }
        self.hold(&mut sequences, admitted)?;
        for sequence in &sequences {
            self.write_row(sequence, 0)?;
        }
        // The first request that was not admitted is one that the pool was asked about, if there is one.
        let refused = if fewer { refused } else { impossible };
        Ok(Admission { admitted: sequences, refused })
    }

    /// The pool's form of a request, and a row for it.
    fn prepare<'a>(&self, request: &Request<'a>) -> Result<(Admit<'a>, RowLease), AdmitError> {
        let admit = self.check(request)?;
        let rows = self.options.sequences_max;
        let row = self.rows.lease().ok_or(AdmitError::NoRow { rows })?;
        Ok((admit, row))
    }

    /// The pool's form of the request, if such a request is possible at all.
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
            row,
            blocks: Blocks::default(),
            tokens: request.tokens,
            prompt_tokens: request.tokens,
            cached_tokens: 0,
            onboarded_blocks: 0,
            sealed: 0,
            tenant: request.tenant,
            retention: request.retention.map(Arc::clone),
        }
    }

    /// Has the pool admit as many of a batch as fit, and says why not the next. Where blocks without
    /// content do not suffice, maps as much memory as the batch needs and the devices have, before any
    /// content is evicted.
    fn admit_to_pool(
        &mut self,
        batch: &[Admit<'_>],
        tokens_max: u64,
    ) -> Result<(Vec<Admitted>, Option<AdmitError>), AdmitError> {
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let mut to_write_max =
            usize::try_from(tokens_max.div_ceil(block_tokens)).unwrap_or(usize::MAX);
        if self.can_grow() {
            self.take_mapped();
            match self.pool.admit_to_empty(batch, to_write_max) {
                Ok(admitted) => {
                    // Tells the workers how much is in use.
                    self.grow_for(0)?;
                    return Ok((admitted, None));
                }
                Err(ClaimError::Exhausted { requested, .. }) => self.grow_for(requested)?,
                Err(_) => {}
            }
        }
        let PoolAdmission { mut admitted, mut refused } =
            self.pool.admit_fitting(batch, to_write_max);
        if let Some(error) = &refused
            && self.grow_beside_kept(error)?
        {
            let written = |(admit, own): (&Admit<'_>, &Admitted)| admit.blocks - own.prefix.len();
            to_write_max -= batch.iter().zip(&admitted).map(written).sum::<usize>();
            let more = self.pool.admit_fitting(&batch[admitted.len()..], to_write_max);
            admitted.extend(more.admitted);
            refused = more.refused;
        }
        Ok((admitted, refused.map(AdmitError::NoSpace)))
    }

    /// Gives new sequences their blocks: the pinned prefixes, and the claimed blocks. Prefix blocks
    /// in host memory are brought back to the first claimed blocks.
    ///
    /// Sequences that share a block in host memory share the copy back, since each other's pins
    /// would keep the block there.
    fn hold(
        &mut self,
        sequences: &mut [Sequence],
        admitted: Vec<Admitted>,
    ) -> Result<(), AdmitError> {
        let block_tokens = u64::from(self.options.shape.block_tokens());
        let mut fars = Fars::default();
        let alone = sequences.len() == 1;
        let mut all = Vec::with_capacity(sequences.len());
        for (sequence, admitted) in sequences.iter_mut().zip(admitted) {
            let prefix = &admitted.prefix;
            sequence.cached_tokens = prefix.len() as u64 * block_tokens;
            sequence.sealed = prefix.len();
            let (pieces, far) = fars.pieces(admitted, alone);
            sequence.onboarded_blocks = far;
            all.push(pieces);
        }
        for (sequence, pieces) in sequences.iter_mut().zip(all) {
            for piece in pieces {
                self.hold_piece(&mut sequence.blocks, piece, &mut fars)?;
            }
        }
        Ok(())
    }

    fn hold_piece(
        &mut self,
        blocks: &mut Blocks,
        piece: Piece,
        fars: &mut Fars,
    ) -> Result<(), AdmitError> {
        match piece {
            Piece::Held(run) => blocks.push(run),
            Piece::Far(pinned, target) => {
                let from: Vec<_> = match fars.shared.is_empty() {
                    true => Vec::new(),
                    false => pinned.ids().collect(),
                };
                let onboarded = self.onboard(pinned, target)?;
                for (index, id) in from.into_iter().enumerate() {
                    if let Some(shared) = fars.shared.get_mut(&id) {
                        *shared = onboarded.pinned.pin(index).unwrap_or_default();
                    }
                }
                hold_onboarded(blocks, onboarded);
            }
            Piece::Again(id, target) => match fars.shared.get(&id).cloned().unwrap_or_default() {
                // The block that was claimed for it is given back.
                there if on_device(&there) => blocks.push(Run::Shared(there)),
                there => hold_onboarded(blocks, self.onboard(there, target)?),
            },
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
            sequence.blocks.push(Run::Own(claimed));
            self.write_row(sequence, have)?;
        }
        sequence.tokens = tokens;
        Ok(())
    }

    /// Makes full blocks of a sequence findable under the names `hashes`, the first of which is
    /// that of the sequence's first block. Blocks that were sealed before are skipped.
    ///
    /// If another sequence has sealed equal content meanwhile, this sequence changes over to that
    /// block and releases its own, so that equal content is held once. It keeps its own block if
    /// the other one has not arrived from host memory yet, because work enqueued after this call
    /// may read it.
    ///
    /// # Ordering
    /// Call it when the work that writes the blocks is enqueued on every compute stream. Sequences
    /// that find the blocks read them in later work of the same streams.
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
        if hashes.len() <= first {
            return Ok(());
        }
        let mut blocks = std::mem::take(&mut sequence.blocks);
        let arriving = &self.arriving;
        let readable = |existing: &Pinned| {
            // A block that a remote reader has pinned may be in host memory only.
            let on_device = on_device(existing);
            on_device && !existing.ids().any(|id| arriving.contains(&id.index()))
        };
        let worth = |index| sequence.retention_of(index, block_tokens);
        blocks.seal(first, hashes, worth, readable);
        sequence.blocks = blocks;
        sequence.sealed = hashes.len();
        self.write_row(sequence, first)?;
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
        slots.reserve((end - start) as usize);
        let blocks = (start / block_tokens) as usize..end.div_ceil(block_tokens) as usize;
        // The sequence has blocks for all its tokens.
        sequence.blocks.for_each_id(blocks, |index, id| {
            let begins = index as u64 * block_tokens;
            let tokens = start.max(begins)..end.min(begins + block_tokens);
            let slot = id.index() as u64 * block_tokens;
            slots.extend(tokens.map(|token| (slot + token - begins) as i64));
            Ok(())
        })
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
        // Compare with the capacity, not with the present memory: exhausted memory may come back.
        let capacity = u64::from(self.options.device_blocks);
        if blocks > capacity {
            return Err(AdmitError::NeverFits { blocks, capacity });
        }
        Ok(blocks)
    }

    /// Claims blocks and moves their evicted content to host memory.
    fn claim(&mut self, tenant: TenantId, count: usize) -> Result<Claimed, AdmitError> {
        if self.can_grow() {
            self.grow_for(count)?;
        }
        let claimed = match self.pool.claim_for(tenant, count) {
            Err(error) if self.grow_beside_kept(&error)? => self.pool.claim_for(tenant, count),
            claimed => claimed,
        };
        let mut claimed = claimed.map_err(AdmitError::NoSpace)?;
        self.offload_from(&mut claimed);
        Ok(claimed)
    }

    /// Moves the evicted content of claimed blocks to host memory.
    fn offload_from(&mut self, claimed: &mut Claimed) {
        while let Some(offload) = claimed.take_offload() {
            self.offload(offload);
        }
    }

    /// Writes a sequence's row of the block table, from block `first` on.
    fn write_row(&mut self, sequence: &Sequence, first: usize) -> Result<(), TableError> {
        sequence.blocks.write_row(&mut self.table, sequence.row.row(), first)
    }
}

fn first_tier(pinned: &Pinned) -> Option<Tier> {
    pinned.locations().next().map(|first| first.tier)
}

/// Whether work that reads pages can read all of these blocks.
fn on_device(pinned: &Pinned) -> bool {
    !pinned.is_empty() && pinned.locations().all(|at| at.tier == Tier::Primary)
}

/// Adds the blocks that were brought back, in their order: moved blocks are shared, the others are
/// copies.
fn hold_onboarded(blocks: &mut Blocks, onboarded: Onboarded) {
    let Onboarded { mut pinned, mut copies } = onboarded;
    while let Some(tier) = first_tier(&pinned) {
        let alike = pinned.locations().take_while(|at| at.tier == tier).count();
        let rest = pinned.split_off(alike);
        let part = std::mem::replace(&mut pinned, rest);
        if tier == Tier::Primary {
            blocks.push(Run::Shared(part));
        } else {
            let rest = copies.split_off(alike);
            blocks.push(Run::Own(std::mem::replace(&mut copies, rest)));
        }
    }
}
