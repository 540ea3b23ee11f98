//! Who is next: claims, and the moves of content that they cause.

use std::num::NonZeroU64;

use crate::blocks::{BlockPhase, Flag};
use crate::claim::ClaimList;
use crate::guard;
use crate::state::PoolState;
use crate::sync::Arc;
use crate::tenants::{MayCache, Tenant};
use crate::view::Shared;
use crate::{BlockId, ClaimError, Location, RecordId, Tier};

/// What one block of a claim is: the block itself, and what must be moved away from it first.
///
/// Two words, for a pair of registers: a structure that is written part by part and then copied as a
/// whole, as those that go through memory are, makes the processor wait.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Claim {
    /// The number of the block, counted from 1, and its block id in the high half.
    ids: NonZeroU64,
    /// The block of the content that moves, counted from 1, or 0; in the high half the block id that it
    /// goes to, and whether content lost the block id to the claim.
    moved: u64,
}

impl Claim {
    const EVICTED: u64 = 1 << 63;

    #[inline]
    pub(crate) fn new(block: RecordId, block_id: BlockId, evicted: bool) -> Self {
        let block = NonZeroU64::MIN.saturating_add(block.0.into());
        let ids = block | u64::from(block_id.0) << 32;
        Self { ids, moved: if evicted { Self::EVICTED } else { 0 } }
    }

    /// The same with content that goes to a block id of the secondary tier. Block ids are below 2^31.
    pub(super) fn with_offload(self, content: RecordId, to: BlockId) -> Self {
        let content = u64::from(content.0) + 1;
        Self { moved: self.moved & Self::EVICTED | u64::from(to.0) << 32 | content, ..self }
    }

    #[inline]
    pub(crate) fn block(&self) -> RecordId {
        RecordId((self.ids.get() as u32) - 1)
    }

    #[inline]
    pub(crate) fn block_id(&self) -> BlockId {
        BlockId((self.ids.get() >> 32) as u32)
    }

    #[inline]
    pub(crate) fn evicted(&self) -> bool {
        self.moved & Self::EVICTED != 0
    }

    #[inline]
    pub(crate) fn offload(&self) -> Option<Move> {
        let block = RecordId((self.moved as u32).checked_sub(1)?);
        let to = BlockId((self.moved >> 32) as u32 & (u32::MAX >> 1));
        Some(Move { block, from: self.block_id(), to })
    }

    /// The same when the move has been handed on, or given up.
    #[inline]
    pub(crate) fn without_offload(self) -> Self {
        Self { moved: self.moved & Self::EVICTED, ..self }
    }
}

/// Content that moves between two block ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    /// The block of the content, which lies at `to` already, unless another one
    /// [stands in](PoolState::stand_ins) for it.
    pub(crate) block: RecordId,
    /// The block id that the copy reads. It is not handed on before the copy has ended.
    pub(crate) from: BlockId,
    pub(crate) to: BlockId,
}

/// Why content does not move to the tier below.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Lost {
    /// The store policy has refused it.
    Refused,
    /// There is no place for it, or it is not worth one.
    Otherwise,
}

impl PoolState {
    /// Whether there are `count` blocks that nobody uses.
    #[inline]
    pub(crate) fn check_claimable(
        &self,
        tier: Tier,
        by: Tenant,
        count: usize,
    ) -> Result<(), ClaimError> {
        if count > self.tier(tier).claimable() {
            return Err(self.exhausted(tier, count));
        }
        match &self.watch.tenancy {
            None => Ok(()),
            Some(tenancy) => Ok(tenancy.tenants.check((by, tier), count as u64, &[], 0)?),
        }
    }

    pub(crate) fn exhausted(&self, tier: Tier, requested: usize) -> ClaimError {
        let tier = self.tier(tier);
        let (claimable, retiring) = (tier.claimable(), tier.retiring());
        ClaimError::Exhausted { requested, claimable, retiring }
    }

    /// Claims `count` blocks of a tier; there are as many.
    #[inline]
    pub(crate) fn claim(&mut self, tier: Tier, by: Tenant, count: usize, into: &mut Vec<Claim>) {
        into.reserve(count);
        let sabotaged = self.is_sabotaged();
        let empty = if sabotaged { 0 } else { self.claim_empties(tier, by, count, into) };
        self.counters.claimed += empty as u64;
        let rest = count - empty;
        if rest > 1 {
            // Content that moves keeps its name: what loses it lies where the move goes to.
            let to = if self.offloads(tier) { Tier::Secondary } else { tier };
            self.warm_victims(to, rest);
        }
        for _ in 0..rest {
            let Some(claim) = self.claim_one(tier, by) else { break };
            into.push(claim);
        }
    }

    /// The same, as all that one caller claims, in a list of its own.
    pub(crate) fn claim_list(
        &mut self,
        pool: &Arc<Shared>,
        tier: Tier,
        by: Tenant,
        count: usize,
    ) -> Box<ClaimList> {
        let mut list = self.spares.take_claims(pool);
        self.claim(tier, by, count, &mut list.claims);
        #[cfg(all(feature = "sabotage", debug_assertions))]
        self.sabotage.next_caller();
        list
    }

    /// Whether blocks are not claimed in the order of the queue.
    #[inline]
    fn is_sabotaged(&self) -> bool {
        #[cfg(all(feature = "sabotage", debug_assertions))]
        return self.sabotage.is_on();
        #[cfg(not(all(feature = "sabotage", debug_assertions)))]
        false
    }

    /// Reads the places of the names that are about to be removed.
    fn warm_victims(&self, tier: Tier, count: usize) {
        let victims = self.tier(tier).queues.next_cached(&self.blocks).take(count);
        let seen = victims.fold(0, |seen, id| seen ^ self.index.warm(self.blocks.hash(id)));
        std::hint::black_box(seen);
    }

    /// Claims the next block of a tier, wherever its content is to go.
    #[inline]
    pub(crate) fn claim_one(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if tier == Tier::Primary
            && let Some(stale) = self.sabotage.stale()
        {
            return Some(self.claim_stale(stale));
        }
        let claim = match self.claim_empty(tier, by) {
            Some(claim) => claim,
            None => self.claim_cached(tier, by)?,
        };
        self.counters.claimed += 1;
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if tier == Tier::Primary {
            self.sabotage.peeked(claim.block());
        }
        Some(claim)
    }

    /// Claims the next block of a tier, where none without content can be had in the short way.
    #[inline]
    fn claim_cached(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        match self.claim_plainly(tier, by) {
            None => self.claim_next(tier, by),
            claim => claim,
        }
    }

    fn claim_next(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        let state = &self.tiers[tier.index()];
        if state.queues.empty() == 0
            && let Some(id) = self.appear(tier)
        {
            return Some(self.claimed(id, by, false));
        }
        loop {
            let (id, last_resort) = self.pop_for(tier, by)?;
            if !self.blocks.is(id, Flag::NAMED) {
                return Some(self.claimed(id, by, false));
            }
            let lost = match self.offload_target(tier, id) {
                Ok(target) => return Some(self.displace(id, target, by)),
                Err(lost) => lost,
            };
            if self.blocks.children(id) > 0 && !last_resort {
                self.shadow(id);
                continue;
            }
            self.count_lost(lost);
            self.drop_content(id);
            return Some(self.claimed(id, by, true));
        }
    }

    /// Takes the next block out of a tier's queues that is not kept for another tenant than `by`; the
    /// last resort if others follow it.
    #[inline]
    fn pop_for(&mut self, tier: Tier, by: Tenant) -> Option<(RecordId, bool)> {
        loop {
            let (id, last_resort) = self.pop(tier, by)?;
            if !self.blocks.is(id, Flag::NAMED) || !self.is_kept(id, by) {
                return Some((id, last_resort));
            }
            guard!("pool.kept-is-set-aside", self.pass_over(id), else self.enqueue(id));
        }
    }

    /// Takes the next block out of a tier's queues, without those that were passed over and are kept
    /// from `by`. Blocks that wait for those that follow them come when there is nothing else: what
    /// follows them is then in use or elsewhere.
    #[inline]
    fn pop(&mut self, tier: Tier, by: Tenant) -> Option<(RecordId, bool)> {
        let state = &mut self.tiers[tier.index()];
        if (state.queues.empty() > 0 || self.watch.tenancy.is_none())
            && let Some(id) = state.queues.pop(&mut self.blocks)
        {
            return Some((id, false));
        }
        self.pop_cached(tier, by)
    }

    /// The same, of blocks with content.
    fn pop_cached(&mut self, tier: Tier, by: Tenant) -> Option<(RecordId, bool)> {
        if let Some((class, id)) = self.first_passed(tier, by) {
            let queued = self.tier(tier).queues.first_cached();
            if queued.is_none_or(|queued| class <= queued) {
                self.take_out_passed(id);
                return Some((id, false));
            }
        }
        let state = &mut self.tiers[tier.index()];
        if let Some(id) = state.queues.pop_cached(&mut self.blocks) {
            return Some((id, false));
        }
        if self.watch.policies[tier.index()].is_some()
            && let Some(id) = self.pop_by_policy(tier)
        {
            return Some((id, false));
        }
        self.pop_shadowed(tier).or_else(|| self.pop_held_back(tier))
    }

    /// Takes a block that waits for those that follow it.
    fn pop_shadowed(&mut self, tier: Tier) -> Option<(RecordId, bool)> {
        let state = &mut self.tiers[tier.index()];
        let id = state.shadowed.front()?;
        state.shadowed.remove(&mut self.blocks, id);
        // Like every block that was popped: the end of what follows it must not look for it in a list.
        self.put(id, BlockPhase::Queued);
        Some((id, true))
    }

    /// Sets a block aside that is evicted only after those that follow it.
    #[inline]
    pub(super) fn shadow(&mut self, id: RecordId) {
        self.put(id, BlockPhase::Shadowed);
        let tier = self.blocks.tier(id);
        self.tiers[tier.index()].shadowed.push_back(&mut self.blocks, id);
    }

    /// The last block that followed this one is gone: its turn, which has come up before, is now.
    #[inline]
    pub(crate) fn unshadow(&mut self, id: RecordId) {
        let tier = self.blocks.tier(id).index();
        self.tiers[tier].shadowed.remove(&mut self.blocks, id);
        if self.plain {
            let state = &mut self.tiers[tier];
            state.counts[BlockPhase::Shadowed as usize] -= 1;
            state.counts[BlockPhase::Queued as usize] += 1;
            self.blocks.set_place(id, BlockPhase::Queued);
            let class = self.blocks.class(id);
            return state.queues.push_front(&mut self.blocks, id, class);
        }
        self.put(id, BlockPhase::Queued);
        if self.watch.policies[tier].is_some() {
            return self.enqueue_by_policy(id, self.blocks.tier(id));
        }
        let class = self.blocks.class(id);
        self.tiers[tier].queues.push_front(&mut self.blocks, id, class);
    }

    /// Counts how long a victim was unused, which was released at `stamp`.
    #[inline]
    pub(super) fn count_age(&mut self, stamp: u32) {
        let age = (self.watch.now_ms() as u32).wrapping_sub(stamp);
        self.ages.evicted += 1;
        self.ages.total_ms += u64::from(age);
        self.ages.max_ms = self.ages.max_ms.max(age.into());
    }

    pub(crate) fn drop_content(&mut self, id: RecordId) {
        self.unname(id);
        self.counters.dropped += 1;
        if self.blocks.tier(id) == Tier::Primary {
            self.counters.evicted += 1;
            self.count_age(self.blocks.stamp(id));
        }
    }

    /// Counts content that is lost for want of a place below.
    pub(super) fn count_lost(&mut self, lost: Lost) {
        self.counters.refused += u64::from(lost == Lost::Refused);
    }

    /// A block of the tier below for the content of a victim of the primary tier, if it is worth
    /// keeping. The content of that block is dropped: of the same tenant, if that may have no more there.
    #[inline]
    pub(super) fn offload_target(
        &mut self,
        tier: Tier,
        victim: RecordId,
    ) -> Result<RecordId, Lost> {
        const BELOW: Tier = Tier::Secondary;
        let keep =
            tier == Tier::Primary && self.blocks.priority(victim) >= self.offload_min_priority;
        if !keep || !self.offloads(tier) {
            return Err(Lost::Otherwise);
        }
        let owner = Tenant(self.blocks.tenant(victim));
        let tenancy = guard!("pool.offload-within-quota", self.watch.tenancy.as_ref(), else None);
        let room = tenancy.map(|own| own.tenants.may_cache(owner, BELOW));
        let own = match room {
            None | Some(MayCache::More) => None,
            Some(MayCache::Nothing) => return Err(Lost::Otherwise),
            Some(MayCache::NoMore) => {
                // None that others follow: it may be what comes before this content.
                let next = self.next_to_give_way(owner, BELOW);
                let leaf = next.filter(|&id| self.blocks.children(id) == 0);
                // The tenant's own gives way when the content arrives. Nobody else's does.
                if leaf.is_none() && self.tier(BELOW).empty() == 0 {
                    return Err(Lost::Otherwise);
                }
                leaf
            }
        };
        if guard!("pool.refused-content-does-not-move", !self.is_worth_storing(victim), else false)
        {
            return Err(Lost::Refused);
        }
        if let Some(id) = own {
            self.take_out(id);
            // The end of what follows it must not look for it in a list.
            self.put(id, BlockPhase::Queued);
            self.unname(id);
            self.counters.dropped += 1;
            return Ok(id);
        }
        if self.tiers[BELOW.index()].queues.empty() == 0
            && let Some(id) = self.appear(BELOW)
        {
            return Ok(id);
        }
        loop {
            let (id, last_resort) = self.pop_for(BELOW, owner).ok_or(Lost::Otherwise)?;
            if self.blocks.is(id, Flag::NAMED) {
                if self.blocks.children(id) > 0 && !last_resort {
                    self.shadow(id);
                    continue;
                }
                self.unname(id);
                self.counters.dropped += 1;
            }
            return Ok(id);
        }
    }

    /// Gives the content of `victim` the block id of `target`, and claims `target` at the block id that it
    /// leaves.
    #[inline]
    pub(super) fn displace(&mut self, victim: RecordId, target: RecordId, by: Tenant) -> Claim {
        self.counters.evicted += 1;
        self.count_age(self.blocks.stamp(victim));
        self.swap_locations(victim, target);
        let from = self.blocks.location(target).id;
        let to = self.blocks.location(victim).id;
        // No lookup can find the content before the copy is committed. The name keeps its place in the
        // index, so that all else that is asked by name meets the content on its way.
        self.blocks.clear(victim, Flag::NAMED);
        self.blocks.set(victim, Flag::EXPECTED);
        self.put(victim, BlockPhase::Moving);
        self.blocks.pair(victim, target);
        let claim = self.claimed(target, by, true);
        debug_assert_eq!(claim.block_id(), from);
        claim.with_offload(victim, to)
    }

    #[inline]
    pub(crate) fn claimed(&mut self, id: RecordId, by: Tenant, evicted: bool) -> Claim {
        // What was said of it while it had no name is not said of what it will hold.
        self.untime(id);
        let (place, tier, block_id) = self.blocks.claim(id, by.0);
        let counts = &mut self.tiers[tier.index()].counts;
        counts[place as usize] -= 1;
        counts[BlockPhase::Claimed as usize] += 1;
        self.account(id);
        Claim::new(id, block_id, evicted)
    }

    /// Lookups find content from now on that has arrived in the secondary tier, unless it was removed
    /// meanwhile, or computed again: that copy is nearer.
    #[inline]
    pub(crate) fn commit_offload(&mut self, moved: Move) {
        let id = self.moving_to(moved);
        if guard!(
            "pool.removed-content-does-not-arrive",
            self.blocks.is(id, Flag::EXPECTED),
            else true
        ) {
            self.blocks.clear(id, Flag::EXPECTED);
            self.blocks.set(id, Flag::NAMED);
            self.counters.offloaded += 1;
            self.emit_moved(id, Location { tier: Tier::Primary, id: moved.from });
        }
        self.arrive(id);
    }

    /// Gives up content whose copy was not made.
    #[inline]
    pub(crate) fn abort_offload(&mut self, moved: Move) {
        let id = self.moving_to(moved);
        if self.blocks.is(id, Flag::EXPECTED) {
            self.forget(id);
        }
        self.arrive(id);
    }

    /// The block at the id that the content of a move goes to.
    #[inline]
    fn moving_to(&mut self, moved: Move) -> RecordId {
        if self.stand_ins.is_empty() {
            return moved.block;
        }
        self.stand_ins.remove(&moved.to).unwrap_or(moved.block)
    }

    /// Ends a move: both of its block ids are free of the copy.
    #[inline]
    fn arrive(&mut self, id: RecordId) {
        let holder = self.blocks.partner(id);
        self.blocks.part(id, holder);
        self.put(id, BlockPhase::Claimed);
        self.rest(id);
        if self.blocks.place(holder) == BlockPhase::Draining {
            self.rest(holder);
        }
    }

    /// Has the claimed block `own` wait in the place of `id` for the copy that brings content on its way
    /// to the block id of `id`, which is the other's from now on.
    pub(super) fn stand_in(&mut self, id: RecordId, own: RecordId) {
        let (to, holder) = (self.blocks.location(id).id, self.blocks.partner(id));
        self.blocks.part(id, holder);
        self.swap_locations(id, own);
        // The block id that the copy reads may be the one that was just given away.
        let holder = guard!(
            "pool.copied-id-waits-under-its-new-holder",
            if holder == own { id } else { holder },
            else holder
        );
        self.blocks.pair(own, holder);
        self.put(own, BlockPhase::Moving);
        guard!("pool.offload-ends-for-its-stand-in", {
            self.stand_ins.insert(to, own);
        });
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
impl PoolState {
    /// Claims a block that somebody else has claimed, and may have released, named or shared.
    fn claim_stale(&mut self, stale: RecordId) -> Claim {
        self.take_out(stale);
        self.counters.claimed += 1;
        if !self.blocks.is(stale, Flag::NAMED) {
            return self.claimed(stale, Tenant::NOBODY, false);
        }
        self.drop_content(stale);
        self.claimed(stale, Tenant::NOBODY, true)
    }
}
