//! The common case: priority LRU, no tenants, and no log of events where names change.
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
        if self.plain && self.tier(tier).empty() > 0 {
            return self.take_empties(tier, by, count, |claim| claims.push(claim));
        }
        0
    }

    /// Claims one block of a tier that has no content.
    #[inline]
    pub(super) fn claim_empty(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        let mut claim = None;
        if self.plain && self.tier(tier).empty() > 0 {
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
        if !self.plain || self.current > self.completed {
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
        if !self.is_plain() || naming.retention.duration.is_some() {
            return false;
        }
        let chained = naming.parent.is_some() || parent.is_some();
        let priority = naming.retention.priority;
        let Some(tier) = self.blocks.name_claimed(id, hash, priority, chained) else {
            return false;
        };
        self.index.insert_new(mixed, id);
        if let Some(parent) = parent {
            self.blocks.follow(id, parent);
        }
        let counts = &mut self.tiers[tier.index()].counts;
        counts[BlockPhase::Claimed as usize] -= 1;
        counts[BlockPhase::Pinned as usize] += 1;
        self.counters.registered += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Move, Named};
    use crate::{PoolConfig, Priority, integrity};

    /// The same pool twice: one takes the short way, the other looks at every special case.
    struct Twins {
        plain: PoolState,
        general: PoolState,
        random: u64,
        claimed: Vec<Claim>,
        moves: Vec<Move>,
        pinned: Vec<RecordId>,
        budgets: bool,
    }

    impl Twins {
        fn new(secondary: u64, seed: u64) -> Self {
            let config = PoolConfig { secondary_blocks: secondary, ..PoolConfig::primary_only(12) };
            let [plain, mut general] = [(), ()].map(|()| PoolState::plain(&config).unwrap());
            general.plain = false;
            let (claimed, moves, pinned) = (Vec::new(), Vec::new(), Vec::new());
            let budgets = seed % 2 == 1;
            Self { plain, general, random: seed, claimed, moves, pinned, budgets }
        }

        fn next(&mut self, end: usize) -> usize {
            const STEP: u64 = 1_442_695_040_888_963_407;
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(STEP);
            (self.random >> 33) as usize % end
        }

        fn any<T>(&mut self, list: impl Fn(&mut Self) -> &mut Vec<T>) -> Option<T> {
            let len = list(self).len();
            let at = if len == 0 { return None } else { self.next(len) };
            Some(list(self).swap_remove(at))
        }

        /// Does the same with both, and compares what came of it.
        fn both<T: PartialEq + std::fmt::Debug>(&mut self, f: impl Fn(&mut PoolState) -> T) -> T {
            let outcome = f(&mut self.plain);
            assert_eq!(outcome, f(&mut self.general));
            self.general.plain = false;
            outcome
        }

        fn claim(&mut self) {
            let tier = if self.next(8) == 0 { Tier::Secondary } else { Tier::Primary };
            let count = self.next(5).min(self.plain.tier(tier).claimable());
            let single = self.next(2) == 0;
            let claims = self.both(|state| {
                let mut claims = Vec::new();
                if single {
                    claims.extend(state.claim_one(tier, Tenant::NOBODY));
                } else {
                    state.claim(tier, Tenant::NOBODY, count, &mut claims);
                }
                claims
            });
            for claim in claims {
                self.moves.extend(claim.offload());
                self.claimed.push(claim.without_offload());
            }
        }

        fn name(&mut self) {
            let Some(claim) = self.any(|twins| &mut twins.claimed) else { return };
            let hash = BlockHash::from_u128(self.next(40) as u128 + 1);
            let parent = BlockHash::from_u128(self.next(40) as u128 + 1);
            // Half of them are below the priority from which on content moves.
            let priority = Priority::new(25 + 5 * self.next(4) as u8).unwrap();
            let parent = (self.next(2) == 0 && parent != hash).then_some(parent);
            let naming = Naming { parent, ..Naming::from(priority) };
            let named = self.both(|state| {
                let parent = parent.and_then(|parent| state.find_parent(parent));
                let named = state.register(claim.block(), hash, parent, &naming);
                if let Named::Duplicate(_) = named {
                    state.release_claimed(claim.block());
                }
                named
            });
            let (Named::New(block) | Named::Duplicate(block)) = named;
            self.pinned.push(block);
        }

        fn set_budget(&mut self) {
            let tier = if self.next(3) == 0 { Tier::Secondary } else { Tier::Primary };
            let budget = self.next(self.plain.tier(tier).capacity as usize + 1) as u32;
            let claims = self.both(|state| {
                let mut claims = Vec::new();
                state.set_budget(tier, budget, &mut claims);
                claims
            });
            for claim in claims {
                self.moves.extend(claim.offload());
                self.claimed.push(claim.without_offload());
            }
        }

        fn step(&mut self) {
            if self.budgets && self.next(12) == 0 {
                return self.set_budget();
            }
            match self.next(12) {
                0..3 => self.claim(),
                3..6 => self.name(),
                6 => {
                    let claims: Vec<_> = self.any(|twins| &mut twins.claimed).into_iter().collect();
                    for claim in claims {
                        let tier = self.plain.blocks.tier(claim.block());
                        self.both(|state| {
                            // Its move is with another owner.
                            if state.release_empties(tier, &[claim]) == 0 {
                                state.release_claimed(claim.block());
                            }
                        });
                    }
                }
                7 => {
                    let hash = BlockHash::from_u128(self.next(40) as u128 + 1);
                    let found = self.both(|state| {
                        let id = state.find(hash)?;
                        state.pin(id);
                        Some(id)
                    });
                    self.pinned.extend(found);
                }
                8 => {
                    let Some(moved) = self.any(|twins| &mut twins.moves) else { return };
                    match self.next(3) {
                        0 => self.both(|state| state.abort_offload(moved)),
                        _ => self.both(|state| state.commit_offload(moved)),
                    }
                }
                9 => {
                    let current = self.plain.current;
                    match self.next(6) {
                        0 => self.both(|state| state.current += 1),
                        _ => self.both(|state| state.complete(current)),
                    }
                }
                _ => {
                    let Some(id) = self.any(|twins| &mut twins.pinned) else { return };
                    self.both(|state| state.unpin(id));
                }
            }
        }

        fn compare(&mut self) {
            integrity::check(&self.plain).unwrap();
            self.both(|state| {
                let tiers = state.tiers.each_ref().map(|tier| {
                    let queue: Vec<_> = tier.queues.iter(&state.blocks).collect();
                    let waiting: Vec<_> = tier.shadowed.iter(&state.blocks).collect();
                    (queue, waiting, tier.counts, tier.queues.len(), tier.empty())
                });
                (tiers, format!("{:?} {:?}", state.counters, state.ages))
            });
            assert_eq!(self.plain.blocks.words(), self.general.blocks.words());
        }
    }

    #[test]
    fn the_short_way_comes_to_the_same() {
        let (mut moved, mut dropped) = (0, 0);
        for seed in 0..300 {
            for secondary in [0, 3, 12] {
                let mut twins = Twins::new(secondary, seed);
                for _ in 0..120 {
                    twins.step();
                    twins.compare();
                }
                moved += twins.plain.counters.offloaded;
                dropped += twins.plain.counters.dropped;
            }
        }
        assert!(moved > 1_000 && dropped > 5_000, "{moved} moved, {dropped} dropped");
    }
}
