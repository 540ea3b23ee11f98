//! Admission of a batch: all matches first, then all allocations, all or nothing.

use crate::RecordId;
use crate::blocks::Flag;
use crate::guard;
use crate::hold::BlockAt;
use crate::state::{Claim, PoolState};
use crate::tenants::Tenant;
use crate::{BlockHash, BlockPool, ClaimError, Claimed, Pinned, TenantId, Tier};

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
    pub prefix: Pinned,
    /// The blocks to write: first one for each block of the prefix that lies in another tier than
    /// the primary one, in order, to be moved there; then those that follow the prefix.
    pub claimed: Claimed,
    /// What the first block that follows the prefix can begin with.
    pub partial: Option<Partial>,
}

/// What a batch may take, at most. A number alone is [`to_write_max`](Self::to_write_max).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Budget {
    /// Blocks that are to be written in a step: a sequence is admitted if those before it have fewer
    /// blocks than that beside their cached prefixes.
    pub to_write_max: usize,
    /// Primary blocks that can still be claimed afterwards, for sequences that grow.
    pub leave: usize,
}

impl From<usize> for Budget {
    fn from(to_write_max: usize) -> Self {
        Self { to_write_max, leave: 0 }
    }
}

/// What came of a batch of which as much was admitted as fits.
#[derive(Debug)]
pub struct Admission {
    /// What the first sequences of the batch were given, in their order.
    pub admitted: Vec<Admitted>,
    /// Why the next sequence was not admitted: what it and those before it need together, and what there
    /// is. `None` if all were admitted, or the others are beyond the budget.
    pub refused: Option<ClaimError>,
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
        source: Pinned,
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
    blocks: Vec<BlockAt>,
    /// Whether one of the blocks may lack a parent.
    alone: bool,
    /// How many blocks more may be in use.
    slack: usize,
    /// Blocks that the sequences have beside what is cached.
    to_write: usize,
}

/// How a batch is to be admitted.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// All or none, not the first ones.
    all: bool,
    /// Blocks without content only.
    empty: bool,
    /// No sequence more once so many blocks are to be written, or if fewer would be left.
    budget: Budget,
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
        self.admit_all(batch, Rules { all: true, empty: false, budget: usize::MAX.into() })
    }

    /// Admits sequences of a batch if no content has to be evicted for them, in one step: all that
    /// [`admit_fitting`](BlockPool::admit_fitting) admits with the same budget and room for all, or none.
    /// For a caller that makes more blocks ready before content is evicted.
    ///
    /// # Errors
    /// As [`admit`](BlockPool::admit); of an `Exhausted` error, `claimable` counts blocks without content.
    pub fn admit_to_empty(
        &self,
        batch: &[Admit<'_>],
        budget: impl Into<Budget>,
    ) -> Result<Vec<Admitted>, ClaimError> {
        self.admit_all(batch, Rules { all: true, empty: true, budget: budget.into() })
    }

    fn admit_all(&self, batch: &[Admit<'_>], rules: Rules) -> Result<Vec<Admitted>, ClaimError> {
        let mut state = self.shared.state.lock();
        let (plan, refused) = state.plan(batch, rules);
        match refused {
            Some(error) => {
                state.end_batch();
                Err(error)
            }
            None => Ok(self.serve(&mut state, &batch[..plan.found.len()], plan)),
        }
    }

    /// Admits as many of the first sequences of a batch as fit, in one step: those up to the first for
    /// which there is no room beside those before it, and none beyond the [budget](Budget). What the
    /// others would find is neither pinned nor kept for them.
    ///
    /// Beside that it is as [`admit`](BlockPool::admit).
    #[must_use = "dropping it gives back what was admitted"]
    pub fn admit_fitting(&self, batch: &[Admit<'_>], budget: impl Into<Budget>) -> Admission {
        let budget = budget.into();
        let mut state = self.shared.state.lock();
        let (plan, refused) = state.plan(batch, Rules { all: false, empty: false, budget });
        let batch = &batch[..plan.found.len()];
        Admission { admitted: self.serve(&mut state, batch, plan), refused }
    }

    /// Pins and claims what was planned for a batch.
    fn serve(&self, state: &mut PoolState, batch: &[Admit<'_>], mut plan: Plan) -> Vec<Admitted> {
        if plan.alone {
            // Not before it is certain that all is admitted.
            let mut rest = &plan.blocks[..];
            for found in &plan.found {
                let (own, others) = rest.split_at(found.matched);
                state.adopt_all(own);
                rest = others;
            }
        }
        if state.has_notes() {
            for at in &plan.blocks {
                // Policies hear of the find first, and then that the block is held.
                state.note_use(at.block(), true);
                state.pin(at.block());
            }
        } else {
            state.pin_all(&plan.blocks);
        }
        if let Some(tenancy) = &mut state.watch.tenancy {
            tenancy.tenants.all_reused_are_held();
        }
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
            let prefix = if own.is_empty() {
                Pinned::default()
            } else {
                Pinned::counted(state, &self.shared, |_, pins| pins.extend_from_slice(own))
            };
            let (claimed, partial) = self.claim_rest(state, request, *found, partial);
            admitted.push(Admitted { prefix, claimed, partial });
        }
        state.end_batch();
        #[cfg(all(feature = "sabotage", debug_assertions))]
        state.sabotage.next_caller();
        admitted
    }

    fn claim_rest(
        &self,
        state: &mut PoolState,
        request: &Admit<'_>,
        found: Found,
        partial: Option<(usize, Begin)>,
    ) -> (Claimed, Option<Partial>) {
        let mut list = state.spares.take_claims(&self.shared);
        let claims = &mut list.claims;
        let after = request.blocks.saturating_sub(found.matched);
        state.claim(Tier::Primary, found.tenant, found.far, claims);
        let partial = match partial {
            None => {
                state.claim(Tier::Primary, found.tenant, after, claims);
                None
            }
            Some((candidate, Begin::TakenOver(claim))) => {
                claims.push(claim);
                state.claim(Tier::Primary, found.tenant, after - 1, claims);
                Some(Partial::TakenOver { candidate })
            }
            Some((candidate, Begin::Copy(block))) => {
                state.claim(Tier::Primary, found.tenant, after, claims);
                let at = state.blocks.at(block);
                let source = Pinned::one(state.spares.take_single(&self.shared), at);
                Some(Partial::Copy { candidate, source })
            }
        };
        (Claimed::list(Tier::Primary, list), partial)
    }
}

/// Where the beginning of a block is.
#[derive(Debug)]
enum Begin {
    Copy(RecordId),
    TakenOver(Claim),
}

impl PoolState {
    /// Finds what is cached of the prefixes, for as many of the first sequences as there is room for, and
    /// why there is none for the next; for none of them if all are wanted. Pins nothing.
    fn plan(&mut self, batch: &[Admit<'_>], rules: Rules) -> (Plan, Option<ClaimError>) {
        let (plan, refused) = match batch {
            [request] => match self.plan_at_ease(request, rules) {
                Some(plan) => (plan, None),
                None => self.plan_by_count(batch, rules),
            },
            _ => self.plan_by_count(batch, rules),
        };
        for (request, found) in batch.iter().zip(&plan.found) {
            let asked = request.prefix.len().min(request.blocks);
            self.counters.lookups += asked as u64;
            self.counters.hits += found.matched as u64;
            if found.matched < asked {
                self.note_miss(request.prefix[found.matched]);
            }
        }
        (plan, refused)
    }

    /// The plan for one sequence, if there is room for it whatever is found, and nobody to be told: then no
    /// block has to be looked at for itself.
    fn plan_at_ease(&self, request: &Admit<'_>, rules: Rules) -> Option<Plan> {
        let room = self.tier(Tier::Primary).claimable();
        // As many as are claimed and reused at most: those in this tier are not claimed.
        let Budget { to_write_max, leave } = rules.budget;
        let ample = request.blocks.saturating_add(leave) <= room && to_write_max > 0;
        if !ample || !request.partial.is_empty() || self.watch.tenancy.is_some() {
            return None;
        }
        let tenant = self.tenant(request.tenant).ok()?;
        let prefix = &request.prefix[..request.prefix.len().min(request.blocks)];
        let mut blocks = Vec::with_capacity(prefix.len());
        let alone = self.find_prefix(prefix, &mut blocks);
        let (matched, near) = (blocks.len(), Tier::Primary);
        let far = blocks.iter().filter(|at| at.location().tier != near).count();
        if rules.empty && request.blocks - matched + far > self.tier(near).empty() {
            return None;
        }
        let found = vec![Found { tenant, matched, far }];
        Some(Plan { found, blocks, alone, ..Plan::default() })
    }

    /// The plan for sequences whose needs are added up.
    fn plan_by_count(&mut self, batch: &[Admit<'_>], rules: Rules) -> (Plan, Option<ClaimError>) {
        let Rules { all, empty, budget: Budget { to_write_max, leave } } = rules;
        let leave_now = (!all).then_some(leave);
        let names = batch.iter().map(|request| request.prefix.len().min(request.blocks)).sum();
        let mut plan = Plan {
            slack: self.tier(Tier::Primary).claimable(),
            blocks: Vec::with_capacity(names),
            alone: true,
            ..Plan::default()
        };
        let mut refused = None;
        let (mut needed, mut reused) = (0_usize, 0);
        for request in batch {
            if plan.to_write >= to_write_max {
                break;
            }
            if let Err(error) =
                self.plan_next(request, leave_now, &mut plan, &mut needed, &mut reused)
            {
                refused = Some(error);
                break;
            }
        }
        if all && refused.is_none() {
            let room = self.room_for((needed, reused), leave, false);
            let room = if empty { self.check_empty(needed).and(room) } else { room };
            match room {
                Ok(slack) => plan.slack = slack,
                Err(error) => refused = Some(error),
            }
        }
        for at in &plan.blocks {
            self.blocks.clear(at.block(), Flag::MARK);
        }
        if refused.is_some() {
            if all {
                plan.found.clear();
            }
            let matched = plan.found.iter().map(|found| found.matched).sum();
            plan.blocks.truncate(matched);
        }
        (plan, refused)
    }

    /// Adds a sequence to a plan, if there is room for it beside `leave` blocks, or that is looked at later:
    /// `needed` blocks are claimed for the plan, and `reused` blocks that nobody uses will be in use. After a refusal, what the
    /// plan found for it is left behind its blocks.
    fn plan_next(
        &mut self,
        request: &Admit<'_>,
        leave: Option<usize>,
        plan: &mut Plan,
        needed: &mut usize,
        reused: &mut usize,
    ) -> Result<(), ClaimError> {
        let tenant = self.tenant(request.tenant)?;
        if let Some(tenancy) = &mut self.watch.tenancy {
            tenancy.tenants.begin_sequence();
        }
        let start = plan.blocks.len();
        let (mut far, mut again) = (0, *reused);
        for &hash in request.prefix.iter().take(request.blocks) {
            let Some(block) = self.find(hash) else { break };
            let new = guard!(
                "pool.batch-counts-what-is-shared-once",
                !self.blocks.is(block, Flag::MARK),
                else true
            );
            if new && guard!("pool.batch-within-quota", !self.may_use_beside(block), else false) {
                break;
            }
            far += usize::from(self.blocks.tier(block) != Tier::Primary);
            again += usize::from(new && self.is_unused_near(block));
            self.blocks.set(block, Flag::MARK);
            plan.blocks.push(self.blocks.at(block));
        }
        let matched = plan.blocks.len() - start;
        let claimed = request.blocks - matched + far;
        let requested = needed.saturating_add(claimed);
        if let Some(tenancy) = &mut self.watch.tenancy {
            tenancy.tenants.want(tenant, claimed as u64);
        }
        if let Some(leave) = leave {
            match self.room_for((requested, again), leave, true) {
                Ok(slack) => plan.slack = slack,
                Err(error) => {
                    if let Some(tenancy) = &mut self.watch.tenancy {
                        tenancy.tenants.take_back();
                    }
                    return Err(error);
                }
            }
        }
        (*needed, *reused) = (requested, again);
        plan.to_write = plan.to_write.saturating_add(request.blocks - matched);
        plan.found.push(Found { tenant, matched, far });
        Ok(())
    }

    /// Whether so many primary blocks have no content.
    fn check_empty(&self, requested: usize) -> Result<(), ClaimError> {
        let tier = self.tier(Tier::Primary);
        let (claimable, retiring) = (tier.empty(), tier.retiring());
        if requested > claimable {
            return Err(ClaimError::Exhausted { requested, claimable, retiring });
        }
        Ok(())
    }

    /// How many blocks more may be in use when `requested` are claimed, `reused` that nobody uses are used
    /// again, and `leave` are left. All but the `last` sequence may be known to have room.
    fn room_for(
        &self,
        (requested, reused): (usize, usize),
        leave: usize,
        last: bool,
    ) -> Result<usize, ClaimError> {
        let tier = self.tier(Tier::Primary);
        // What takes nothing leaves what there is.
        let leave = if requested == 0 && reused == 0 { 0 } else { leave };
        let claimable = (tier.claimable() - reused).saturating_sub(leave);
        let takes_too_much = leave > tier.claimable() - reused;
        if requested > claimable || takes_too_much {
            let retiring = tier.retiring();
            return Err(ClaimError::Exhausted { requested, claimable, retiring });
        }
        let slack = claimable - requested;
        match &self.watch.tenancy {
            None => Ok(slack),
            Some(tenancy) => {
                let most = tenancy.tenants.admit_batch(last)?;
                Ok(slack.min(most as usize))
            }
        }
    }

    /// Whether nobody uses this block of the primary tier.
    pub(crate) fn is_unused_near(&self, block: RecordId) -> bool {
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
        let taken = *taken_over
            || guard!("pool.kept-is-not-taken-over", self.is_kept(block, tenant), else false);
        if taken || !unused || self.blocks.children(block) > 0 {
            // It is one less to be claimed.
            let slack = if unused { plan.slack.checked_sub(1)? } else { plan.slack };
            if guard!("pool.beginning-within-quota", !self.may_use_beside(block), else false) {
                return None;
            }
            plan.slack = slack;
            let (owner, tier) = (Tenant(self.blocks.tenant(block)), self.blocks.tier(block));
            self.pin(block);
            if let Some(tenancy) = &mut self.watch.tenancy {
                tenancy.tenants.reused_are_held(owner, tier);
            }
            return Some((candidate, Begin::Copy(block)));
        }
        *taken_over = true;
        self.take_out(block);
        self.drop_content(block);
        let claim = self.claimed(block, tenant, true);
        self.counters.claimed += 1;
        if let Some(tenancy) = &mut self.watch.tenancy {
            tenancy.tenants.want_less(tenant);
        }
        Some((candidate, Begin::TakenOver(claim)))
    }
}
