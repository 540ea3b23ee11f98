//! Admission of a batch: all matches first, then all allocations, all or nothing.

use crate::blocks::Flag;
use crate::claim::ClaimedBlocks;
use crate::hold::BlockAt;
use crate::pin::{BlockPin, PinnedBlocks};
use crate::state::{Claim, State};
use crate::sync::Arc;
use crate::tenants::{Need, Tenant, need_of};
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
    tenant: Tenant,
    matched: usize,
    far: usize,
}

/// What was found for a batch, and what it needs.
#[derive(Debug, Default)]
struct Plan {
    found: Vec<Found>,
    /// Of all sequences, in their order.
    blocks: Vec<BlockId>,
    needs: Vec<Need>,
    /// How many blocks more may be in use.
    slack: usize,
}

impl BlockPool {
    /// Admits all sequences of a batch, or none, in one step: first the cached prefixes of all of
    /// them are pinned, then blocks are claimed. So no sequence takes what another one has found.
    ///
    /// At most one unused block is taken over for a [`Partial`] in a call. Cached content that its
    /// tenant may not hold, or that would leave less than is kept for others, is not found.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was pinned, claimed or evicted then.
    pub fn admit(&self, batch: &[Admit<'_>]) -> Result<Vec<Admitted>, ClaimError> {
        let mut state = self.shared.state.lock();
        let mut plan = state.plan(batch)?;
        for &block in &plan.blocks {
            // Policies hear of the find first, and then that the block is held.
            state.note_use(block, true);
            state.pin(block);
        }
        // They are counted as held now.
        plan.needs.iter_mut().for_each(|need| need.reused = 0);
        let mut taken_over = false;
        let mut admitted = Vec::with_capacity(batch.len());
        let mut partials = Vec::with_capacity(batch.len());
        // What is to be copied is pinned before anything is claimed, too.
        for (at, request) in batch.iter().enumerate() {
            let partial = state.find_partial(request, at, &mut plan, &mut taken_over);
            partials.push(partial);
        }
        let Plan { found, blocks, .. } = &plan;
        let mut rest = &blocks[..];
        for ((request, found), partial) in batch.iter().zip(found).zip(partials) {
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
        let mut needs = Vec::new();
        let claims = |request: &Admit<'_>| {
            let cached = request.prefix.iter().take(request.blocks).map_while(|&hash| {
                let block = state.find(hash)?;
                let near = state.blocks.tier(block) == Tier::Primary;
                state.may_use_beside(block, &mut needs).then_some(near)
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
        state.claim(Tier::Primary, found.tenant, found.far, &mut claims);
        let partial = match partial {
            None => {
                state.claim(Tier::Primary, found.tenant, after, &mut claims);
                None
            }
            Some((candidate, Begin::TakenOver(claim))) => {
                claims.push(claim);
                state.claim(Tier::Primary, found.tenant, after - 1, &mut claims);
                Some(Partial::TakenOver { candidate })
            }
            Some((candidate, Begin::Copy(block))) => {
                state.claim(Tier::Primary, found.tenant, after, &mut claims);
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
    /// Finds what is cached of every prefix, and whether there is room for the rest. Pins nothing.
    fn plan(&mut self, batch: &[Admit<'_>]) -> Result<Plan, ClaimError> {
        let mut plan = Plan::default();
        for request in batch {
            let tenant = self.tenant(request.tenant)?;
            plan.found.push(Found { tenant, matched: 0, far: 0 });
        }
        // Unused blocks that will be in use.
        let (mut needed, mut reused) = (0_usize, 0);
        for (at, request) in batch.iter().enumerate() {
            let (start, mut before) = (plan.blocks.len(), None);
            let mut far = 0;
            for &hash in request.prefix.iter().take(request.blocks) {
                let Some(block) = self.find_after(hash, before) else { break };
                let new = !self.blocks.is(block, Flag::MARK);
                if new && !self.may_use_beside(block, &mut plan.needs) {
                    break;
                }
                before = Some(block);
                far += usize::from(self.blocks.tier(block) != Tier::Primary);
                reused += usize::from(new && self.is_unused_near(block));
                self.blocks.set(block, Flag::MARK);
                plan.blocks.push(block);
            }
            let matched = plan.blocks.len() - start;
            let claimed = request.blocks - matched + far;
            needed = needed.saturating_add(claimed);
            let found = &mut plan.found[at];
            (found.matched, found.far) = (matched, far);
            if self.watch.tenancy.is_some() {
                let need = need_of(&mut plan.needs, found.tenant, Tier::Primary);
                need.claimed = need.claimed.saturating_add(claimed as u64);
            }
        }
        for &block in &plan.blocks {
            self.blocks.clear(block, Flag::MARK);
        }
        let claimable = self.tier(Tier::Primary).claimable() - reused;
        if needed > claimable {
            let retiring = self.tier(Tier::Primary).retiring();
            return Err(ClaimError::Exhausted { requested: needed, claimable, retiring });
        }
        plan.slack = claimable - needed;
        if let Some(tenancy) = &self.watch.tenancy {
            let slack = tenancy.tenants.admit_batch(Tier::Primary, &plan.needs)?;
            plan.slack = plan.slack.min(slack as usize);
        }
        for (request, found) in batch.iter().zip(&plan.found) {
            let asked = request.prefix.len().min(request.blocks);
            self.counters.lookups += asked as u64;
            self.counters.hits += found.matched as u64;
            if found.matched < asked {
                self.note_miss(request.prefix[found.matched]);
            }
        }
        Ok(plan)
    }

    /// Whether nobody uses this block of the primary tier.
    fn is_unused_near(&self, block: BlockId) -> bool {
        self.blocks.tier(block) == Tier::Primary && self.is_unused(block)
    }

    /// Finds what the block after a prefix can begin with, and pins it or takes it over.
    fn find_partial(
        &mut self,
        request: &Admit<'_>,
        at: usize,
        plan: &mut Plan,
        taken_over: &mut bool,
    ) -> Option<(usize, Begin)> {
        let Found { tenant, matched, .. } = plan.found[at];
        if matched < request.prefix.len() || matched >= request.blocks {
            return None;
        }
        let names = request.partial.iter().enumerate();
        let (candidate, block) =
            names.filter_map(|(at, &hash)| Some((at, self.find(hash)?))).next()?;
        let unused = self.is_unused_near(block);
        let taken = *taken_over || self.is_kept(block, tenant);
        if taken || !unused || self.blocks.children(block) > 0 {
            // It is one less to be claimed.
            let slack = if unused { plan.slack.checked_sub(1)? } else { plan.slack };
            if !self.may_use_beside(block, &mut plan.needs) {
                return None;
            }
            plan.slack = slack;
            self.pin(block);
            // It is counted as held now.
            plan.needs.iter_mut().for_each(|need| need.reused = 0);
            return Some((candidate, Begin::Copy(block)));
        }
        *taken_over = true;
        self.forget(block);
        self.take_out(block);
        let claim = self.claimed(block, tenant, true);
        self.counters.claimed += 1;
        if self.watch.tenancy.is_some() {
            need_of(&mut plan.needs, tenant, Tier::Primary).claimed -= 1;
        }
        Some((candidate, Begin::TakenOver(claim)))
    }
}
