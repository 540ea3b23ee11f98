//! The common case: priority LRU, no tenants, no log of events, no tier below to move content to.
//!
//! What `claim` and `names` do step by step, with a look at every special case at each, is done here
//! for the case that has none of them, in one pass over each record. The outcome is the same; whoever
//! meets something special returns before anything has changed.

use crate::blocks::BlockPhase;
use crate::claim::Naming;
use crate::index::Mixed;
use crate::state::{Claim, PoolState};
use crate::tenants::Tenant;
use crate::{BlockHash, RecordId, Tier};

impl PoolState {
    #[inline]
    fn is_plain(&self) -> bool {
        self.plain && self.quiet
    }

    /// Claims the next block of a tier if it has content that is dropped.
    #[inline]
    pub(super) fn claim_plainly(&mut self, tier: Tier, by: Tenant) -> Option<Claim> {
        let offloads = tier == Tier::Primary && self.tiers[Tier::Secondary.index()].ready > 0;
        if !self.is_plain() || offloads {
            return None;
        }
        let Self { blocks, tiers, .. } = self;
        let state = &mut tiers[tier.index()];
        if state.appeared != state.ready {
            return None;
        }
        loop {
            let (class, id) = state.queues.first()?;
            if !blocks.is_plain_content(id) {
                return None;
            }
            if blocks.children(id) == 0 {
                state.queues.pop_class(blocks, class);
                return Some(self.evict(id, tier, by));
            }
            // It waits for those that follow it.
            state.queues.pop_class(blocks, class);
            state.counts[BlockPhase::Queued as usize] -= 1;
            state.counts[BlockPhase::Shadowed as usize] += 1;
            blocks.set_place(id, BlockPhase::Shadowed);
            state.shadowed.push_back(blocks, id);
        }
    }

    #[inline]
    fn evict(&mut self, id: RecordId, tier: Tier, by: Tenant) -> Claim {
        let Self { blocks, tiers, .. } = self;
        let state = &mut tiers[tier.index()];
        self.index.remove(blocks, id);
        let (parent, slot, stamp) = blocks.evict(id, by.0);
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
        Claim::new(id, slot, true)
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
