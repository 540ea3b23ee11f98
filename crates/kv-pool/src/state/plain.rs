//! The common case: no tenants, no log of events where names change, and no policy where one is asked.
//!
//! What `claim` and `names` do step by step, with a look at every special case at each, is done here
//! for the case that has none of them, in one pass over each record. The outcome is the same; what
//! meets something special returns before anything has changed.

use crate::blocks::BlockPhase;
use crate::index::Mixed;
use crate::naming::Naming;
use crate::state::{Claim, PoolState};
use crate::tenants::Tenant;
use crate::{BlockHash, BlockId, RecordId, Tier};

impl PoolState {
    #[inline]
    fn is_plain(&self) -> bool {
        self.plain && self.quiet
    }

    /// Whether content that a claim in this tier evicts may be worth a move to the tier below.
    #[inline]
    pub(super) fn offloads(&self, tier: Tier) -> bool {
        tier == Tier::Primary && self.tiers[Tier::Secondary.index()].budget > 0
    }

    /// Claims up to `count` blocks of a tier that have no content: those that were released so, then those
    /// that were never used. How many.
    #[inline]
    pub(super) fn claim_empties(
        &mut self,
        tier: Tier,
        by: Tenant,
        count: usize,
        claims: &mut Vec<Claim>,
    ) -> usize {
        if self.open && self.tier(tier).empty() > 0 {
            return self.take_empties(tier, by, count, |claim| claims.push(claim));
        }
        0
    }

    /// Claims one block of a tier that has no content.
    #[inline]
    pub(super) fn claim_empty(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        let mut claim = None;
        if self.open && self.tier(tier).empty() > 0 {
            self.take_empties(tier, by, 1, |empty| claim = Some(empty));
        }
        claim
    }

    #[inline(never)]
    fn take_empties(
        &mut self,
        tier: Tier,
        by: Tenant,
        count: usize,
        mut claimed: impl FnMut(Claim),
    ) -> usize {
        let Self { blocks, tiers, .. } = self;
        let state = &mut tiers[tier.index()];
        let mut queued = 0;
        if state.queues.empty() > 0 {
            queued = state.queues.pop_run_empty(blocks, count, |blocks, id| {
                let (block_id, after) = blocks.claim_empty(id, by.0)?;
                claimed(Claim::new(id, block_id, false));
                Some(after)
            });
            state.counts[BlockPhase::Queued as usize] -= queued as u32;
        }
        let mut new = 0;
        if state.queues.empty() == 0 && queued < count {
            new = state.fresh().min(count - queued);
            for n in state.appeared..state.appeared + new as u32 {
                let (id, block_id) = (RecordId(state.base + n), BlockId(n));
                blocks.claim_new(id, tier, block_id, by.0);
                claimed(Claim::new(id, block_id, false));
            }
            state.appeared += new as u32;
        }
        state.counts[BlockPhase::Claimed as usize] += (queued + new) as u32;
        queued + new
    }

    /// Gives claimed blocks of a tier back, the last one first, as far as they have neither content nor a
    /// copy to wait for; how many.
    #[inline]
    pub(crate) fn release_empties(&mut self, tier: Tier, claims: &[Claim]) -> usize {
        if !self.open || !self.frees_at_once() {
            return 0;
        }
        let Self { blocks, tiers, .. } = self;
        let state = &mut tiers[tier.index()];
        let run = claims.iter().rev().take_while(|claim| claim.offload().is_none());
        let released = state.queues.push_run_empty(blocks, run.map(Claim::block), tier);
        state.counts[BlockPhase::Claimed as usize] -= released as u32;
        state.counts[BlockPhase::Queued as usize] += released as u32;
        released
    }

    /// Claims the next block of a tier, if it has content and nothing else to it. To be tried when there is
    /// none left for [`claim_empty`](Self::claim_empty).
    #[inline]
    pub(super) fn claim_plainly(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        if !self.is_plain() {
            return None;
        }
        let least = self.offloads(tier).then_some(self.offload_min_priority);
        loop {
            let (class, id) = self.next_plain(tier)?;
            if least.is_some_and(|least| self.blocks.priority(id) >= least) {
                return self.displace_plainly(id, class, by);
            }
            if self.blocks.children(id) == 0 {
                let Self { blocks, tiers, .. } = self;
                tiers[tier.index()].queues.pop_class(blocks, class);
                return Some(self.evict(id, tier, by));
            }
            self.shadow_plainly(id, tier, class);
        }
    }

    /// The next block of a tier, with its class, if it has content and nothing else to it.
    #[inline]
    fn next_plain(&self, tier: Tier) -> Option<(usize, RecordId)> {
        let next = self.tiers[tier.index()].queues.first()?;
        self.blocks.is_plain_content(next.1).then_some(next)
    }

    /// Has the next block of a tier wait for those that follow it.
    #[inline]
    fn shadow_plainly(&mut self, id: RecordId, tier: Tier, class: usize) {
        let Self { blocks, tiers, .. } = self;
        let state = &mut tiers[tier.index()];
        state.queues.pop_class(blocks, class);
        state.counts[BlockPhase::Queued as usize] -= 1;
        state.counts[BlockPhase::Shadowed as usize] += 1;
        blocks.set_place(id, BlockPhase::Shadowed);
        state.shadowed.push_back(blocks, id);
    }

    /// Gives the content of `victim`, which is queued in `class` of the primary tier, the place of the
    /// next block of the tier below, and claims that block at the place that the content leaves.
    #[inline(never)]
    fn displace_plainly(&mut self, victim: RecordId, class: usize, by: Tenant) -> Option<Claim> {
        const NEAR: usize = Tier::Primary.index();
        const FAR: usize = Tier::Secondary.index();
        let target = self.far_target()?;
        let Self { blocks, tiers, .. } = self;
        // Eviction in the tier below may have put another block before the victim.
        tiers[NEAR].queues.remove(blocks, victim, class);
        let (from, to, stamp) = blocks.displace(victim, target, by.0);
        tiers[NEAR].note_record(from, target);
        tiers[FAR].note_record(to, victim);
        tiers[NEAR].counts[BlockPhase::Queued as usize] -= 1;
        tiers[NEAR].counts[BlockPhase::Claimed as usize] += 1;
        tiers[FAR].counts[BlockPhase::Moving as usize] += 1;
        self.counters.evicted += 1;
        self.count_age(stamp);
        Some(Claim::new(target, from, true).with_offload(victim, to))
    }

    /// Takes the next block of the secondary tier out of it, without its content: it is counted nowhere.
    #[inline]
    fn far_target(&mut self) -> Option<RecordId> {
        const FAR: usize = Tier::Secondary.index();
        let mut claim = self.claim_empty(Tier::Secondary, Tenant::NOBODY);
        if claim.is_none() {
            let (class, id) = loop {
                let (class, id) = self.next_plain(Tier::Secondary)?;
                if self.blocks.children(id) == 0 {
                    break (class, id);
                }
                self.shadow_plainly(id, Tier::Secondary, class);
            };
            let Self { blocks, tiers, .. } = self;
            tiers[FAR].queues.pop_class(blocks, class);
            claim = Some(self.evict(id, Tier::Secondary, Tenant::NOBODY));
        }
        self.tiers[FAR].counts[BlockPhase::Claimed as usize] -= 1;
        claim.map(|claim| claim.block())
    }

    #[inline]
    fn evict(&mut self, id: RecordId, tier: Tier, by: Tenant) -> Claim {
        let Self { blocks, tiers, .. } = self;
        let state = &mut tiers[tier.index()];
        self.index.remove(blocks, id);
        let (parent, block_id, stamp) = blocks.evict(id, by.0);
        state.counts[BlockPhase::Queued as usize] -= 1;
        state.counts[BlockPhase::Claimed as usize] += 1;
        self.counters.dropped += 1;
        if tier == Tier::Primary {
            self.counters.evicted += 1;
            self.count_age(stamp);
        }
        if let Some(parent) = parent
            && self.blocks.lose_child(parent)
        {
            self.unshadow(parent);
        }
        self.warm_next(tier);
        Claim::new(id, block_id, true)
    }

    /// Reads the place of the name that the next claim will remove. Nothing here waits for it.
    #[inline]
    fn warm_next(&self, tier: Tier) {
        if let Some((_, next)) = self.tiers[tier.index()].queues.first() {
            std::hint::black_box(self.index.warm(self.blocks.hash(next)));
        }
    }

    /// Names a claimed block; whether there was nothing special to it. Nobody bears the name.
    #[inline]
    pub(super) fn name_plainly(
        &mut self,
        id: RecordId,
        (hash, mixed): (BlockHash, Mixed),
        parent: Option<RecordId>,
        naming: &Naming,
    ) -> bool {
        if !self.open || !self.quiet || naming.retention.duration.is_some() {
            return false;
        }
        let chained = naming.parent.is_some() || parent.is_some();
        let priority = naming.retention.priority;
        let Some(tier) = self.blocks.name_claimed(id, hash, priority, chained) else {
            return false;
        };
        self.index.insert_new(mixed, id);
        self.note_new(id);
        if let Some(parent) = parent
            && self.blocks.follow(id, parent)
        {
            self.note_child(parent, tier, true);
        }
        self.note_stored(id);
        let counts = &mut self.tiers[tier.index()].counts;
        counts[BlockPhase::Claimed as usize] -= 1;
        counts[BlockPhase::Pinned as usize] += 1;
        self.counters.registered += 1;
        true
    }
}
