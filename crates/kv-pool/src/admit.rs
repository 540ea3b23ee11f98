//! Admission of a batch: all matches first, then all allocations, all or nothing.

use crate::blocks::{Flag, Place};
use crate::claim::ClaimedBlocks;
use crate::hold::BlockAt;
use crate::pin::{BlockPin, PinnedBlocks};
use crate::state::{Claim, State};
use crate::sync::Arc;
use crate::tenants::Need;
use crate::{BlockHash, BlockId, BlockPool, ClaimError, TenantId, Tier};

/// What one sequence of a batch needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Admit<'a> {
    /// Names of consecutive full blocks from the first on. The longest cached prefix is pinned. To
    /// have the last token of a prompt computed, leave its block out.
    pub prefix: &'a [BlockHash],
    /// Names that the block after the prefix would have if it had fewer tokens, the longest first.
    /// They are looked for only if all of `prefix` is cached.
    pub partial: &'a [BlockHash],
    /// Blocks that the sequence needs in all.
    pub blocks: usize,
    /// Whose it is.
    pub tenant: TenantId,
}

/// What one sequence of a batch was given.
#[derive(Debug)]
pub struct Admitted {
    /// The cached prefix.
    pub prefix: PinnedBlocks,
    /// The blocks to write: first one for each block of the prefix that lies in another tier than
    /// the primary one, in order, to be moved there; then those that follow the prefix.
    pub claimed: ClaimedBlocks,
    /// What the first block that follows the prefix can begin with.
    pub partial: Option<Partial>,
}

/// Cached content that is the beginning of what a block is to hold.
#[derive(Debug)]
pub enum Partial {
    /// To be copied to the first block that follows the prefix: it is in use, or others follow it,
    /// or it lies in another tier.
    Copy {
        /// Which of the names was found.
        candidate: usize,
        /// The block that has it.
        source: BlockPin,
    },
    /// There already: the block was unused and none followed it, so it was taken over and has lost
    /// its name.
    TakenOver {
        /// Which of the names was found.
        candidate: usize,
    },
}

/// What was found for one sequence.
#[derive(Clone, Copy, Debug)]
struct Found {
    matched: usize,
    far: usize,
}

impl BlockPool {
    /// Admits all sequences of a batch, or none, in one step: first the cached prefixes of all of
    /// them are pinned, then blocks are claimed. So no sequence takes what another one has found.
    ///
    /// At most one unused block is taken over for a [`Partial`] in a call.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was pinned, claimed or evicted then.
    pub fn admit(&self, batch: &[Admit<'_>]) -> Result<Vec<Admitted>, ClaimError> {
        let mut state = self.shared.state.lock();
        let mut blocks = Vec::new();
        let (found, mut slack) = state.plan(batch, &mut blocks)?;
        for &block in &blocks {
            // Policies hear of the find first, and then that the block is held.
            state.note_use(block, true);
            state.pin(block);
        }
        let mut taken_over = false;
        let mut admitted = Vec::with_capacity(batch.len());
        let mut rest = &blocks[..];
        let mut partials = Vec::with_capacity(batch.len());
        // What is to be copied is pinned before anything is claimed, too.
        for (request, found) in batch.iter().zip(&found) {
            let partial = state.find_partial(request, *found, &mut taken_over, &mut slack);
            partials.push(partial);
        }
        for ((request, found), partial) in batch.iter().zip(&found).zip(partials) {
            let (own, others) = rest.split_at(found.matched);
            rest = others;
            let prefix = self.hold_counted(&mut state, own);
            let (claimed, partial) = self.claim_rest(&mut state, request, *found, partial);
            admitted.push(Admitted { prefix, claimed, partial });
        }
        #[cfg(all(feature = "sabotage", debug_assertions))]
        state.sabotage.next_caller();
        Ok(admitted)
    }

    /// How many blocks [`admit`](BlockPool::admit) would claim for a batch as of now, for a caller who
    /// makes room before asking. A hint: others may come between, and only `admit` decides. Counts as
    /// no lookup.
    #[must_use]
    pub fn blocks_to_claim(&self, batch: &[Admit<'_>]) -> usize {
        let state = self.shared.state.lock();
        let claims = |request: &Admit<'_>| {
            let cached = request.prefix.iter().take(request.blocks).map_while(|&hash| {
                let block = state.find(hash)?;
                Some(state.blocks.tier(block) == Tier::Primary)
            });
            request.blocks - cached.filter(|&near| near).count()
        };
        batch.iter().map(claims).fold(0, usize::saturating_add)
    }

    /// A list of blocks whose references are counted.
    fn hold_counted(&self, state: &mut State, own: &[BlockId]) -> PinnedBlocks {
        if own.is_empty() {
            return PinnedBlocks::default();
        }
        PinnedBlocks::counted(state, &self.shared, |state, pins| {
            let at = |&block| BlockAt { block, location: state.blocks.location(block) };
            pins.extend(own.iter().map(at));
        })
    }

    fn claim_rest(
        &self,
        state: &mut State,
        request: &Admit<'_>,
        found: Found,
        partial: Option<(usize, Begin)>,
    ) -> (ClaimedBlocks, Option<Partial>) {
        let mut claims = state.take_claims();
        let after = request.blocks.saturating_sub(found.matched);
        state.claim(Tier::Primary, request.tenant, found.far, &mut claims);
        let partial = match partial {
            None => {
                state.claim(Tier::Primary, request.tenant, after, &mut claims);
                None
            }
            Some((candidate, Begin::TakenOver(claim))) => {
                claims.push(claim);
                state.claim(Tier::Primary, request.tenant, after - 1, &mut claims);
                Some(Partial::TakenOver { candidate })
            }
            Some((candidate, Begin::Copy(block))) => {
                state.claim(Tier::Primary, request.tenant, after, &mut claims);
                let at = BlockAt { block, location: state.blocks.location(block) };
                let source = BlockPin::counted(state.take_token(&self.shared), at);
                Some(Partial::Copy { candidate, source })
            }
        };
        (ClaimedBlocks::new(Arc::clone(&self.shared), Tier::Primary, claims), partial)
    }
}

/// Where the beginning of a block is.
#[derive(Debug)]
enum Begin {
    Copy(BlockId),
    TakenOver(Claim),
}

impl State {
    /// Finds what is cached of every prefix, and whether there is room for the rest; how many blocks
    /// more there is room for. Pins nothing.
    fn plan(
        &mut self,
        batch: &[Admit<'_>],
        blocks: &mut Vec<BlockId>,
    ) -> Result<(Vec<Found>, usize), ClaimError> {
        let mut found = Vec::with_capacity(batch.len());
        // Unused blocks that will be in use.
        let (mut needed, mut reused) = (0_usize, 0);
        for request in batch {
            let (start, mut before) = (blocks.len(), None);
            let mut far = 0;
            for &hash in request.prefix.iter().take(request.blocks) {
                let Some(block) = self.find_after(hash, before) else { break };
                before = Some(block);
                far += usize::from(self.blocks.tier(block) != Tier::Primary);
                if self.is_unused(block) && !self.blocks.is(block, Flag::MARK) {
                    reused += 1;
                }
                self.blocks.set(block, Flag::MARK);
                blocks.push(block);
            }
            let matched = blocks.len() - start;
            needed = needed.saturating_add(request.blocks - matched + far);
            found.push(Found { matched, far });
        }
        for &block in blocks.iter() {
            self.blocks.clear(block, Flag::MARK);
        }
        let claimable = self.tier(Tier::Primary).claimable() - reused;
        if needed > claimable {
            let retiring = self.tier(Tier::Primary).retiring();
            return Err(ClaimError::Exhausted { requested: needed, claimable, retiring });
        }
        let slack = match &self.watch.tenancy {
            None => claimable - needed,
            Some(_) => self.check_tenants(batch, &found, blocks)?.min(claimable - needed),
        };
        for (request, found) in batch.iter().zip(&found) {
            let asked = request.prefix.len().min(request.blocks);
            self.counters.lookups += asked as u64;
            self.counters.hits += found.matched as u64;
            if found.matched < asked {
                self.note_miss(request.prefix[found.matched]);
            }
        }
        Ok((found, slack))
    }

    /// Whether all tenants may hold together what their sequences need; how many blocks more may be
    /// in use.
    fn check_tenants(
        &mut self,
        batch: &[Admit<'_>],
        found: &[Found],
        blocks: &[BlockId],
    ) -> Result<usize, ClaimError> {
        let mut needs: Vec<Need> = Vec::new();
        let mut add = |tenant, claimed: u64, reused: u64| match needs
            .iter_mut()
            .find(|need| need.tenant == tenant)
        {
            Some(need) => {
                (need.claimed, need.reused) = (need.claimed + claimed, need.reused + reused)
            }
            None => needs.push(Need { tenant, claimed, reused }),
        };
        for (request, found) in batch.iter().zip(found) {
            add(request.tenant, (request.blocks - found.matched + found.far) as u64, 0);
        }
        for &block in blocks {
            if self.is_unused(block) && !self.blocks.is(block, Flag::MARK) {
                self.blocks.set(block, Flag::MARK);
                add(TenantId(self.blocks.tenant(block)), 0, 1);
            }
        }
        for &block in blocks {
            self.blocks.clear(block, Flag::MARK);
        }
        let Some(tenancy) = &self.watch.tenancy else { return Ok(usize::MAX) };
        Ok(tenancy.tenants.admit_batch(Tier::Primary, &needs)? as usize)
    }

    /// Whether nobody uses this block of the primary tier.
    fn is_unused(&self, block: BlockId) -> bool {
        self.blocks.tier(block) == Tier::Primary
            && matches!(self.blocks.place(block), Place::Queued | Place::Shadowed)
    }

    /// Finds what the block after a prefix can begin with, and pins it or takes it over.
    fn find_partial(
        &mut self,
        request: &Admit<'_>,
        found: Found,
        taken_over: &mut bool,
        slack: &mut usize,
    ) -> Option<(usize, Begin)> {
        if found.matched < request.prefix.len() || found.matched >= request.blocks {
            return None;
        }
        let names = request.partial.iter().enumerate();
        let (candidate, block) =
            names.filter_map(|(at, &hash)| Some((at, self.find(hash)?))).next()?;
        let unused = self.is_unused(block);
        let taken = *taken_over || self.is_kept(block, request.tenant);
        if taken || !unused || self.blocks.children(block) > 0 {
            if unused {
                // It is one less to be claimed.
                *slack = slack.checked_sub(1)?;
            }
            self.pin(block);
            return Some((candidate, Begin::Copy(block)));
        }
        *taken_over = true;
        self.forget(block);
        self.take_out(block);
        let claim = self.claimed(block, request.tenant, true);
        self.counters.claimed += 1;
        Some((candidate, Begin::TakenOver(claim)))
    }
}
