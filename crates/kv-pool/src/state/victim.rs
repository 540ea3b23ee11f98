//! Victims that a policy chooses, which may be the caller's and wrong.
//!
//! A policy decides on an order and on nothing else: what it answers is checked, and one that answers
//! wrongly, or loses a block, is asked no more. Its tier goes on with priority LRU.

use crate::blocks::{BlockPhase, Flag};
use crate::guard;
use crate::list::List;
use crate::state::{HeldBack, PoolState};
use crate::{RecordId, Tier};

impl PoolState {
    /// Takes the block out of its tier that the policy chooses. `None` if it chooses none, or if it was
    /// wrong: then its blocks are in the queues of the tier.
    pub(super) fn pop_by_policy(&mut self, tier: Tier) -> Option<RecordId> {
        let now = self.policy_time();
        let policy = self.watch.policies[tier.index()].as_mut()?;
        if let Some(victim) = policy.ask(|policy| policy.victim(now)) {
            let victim = victim?;
            if guard!(
                "pool.victim-is-one-that-was-given",
                self.is_ordered_by_policy(victim, tier),
                else victim.index() < self.blocks.len()
            ) {
                self.hold_back_no_more(victim);
                let hash = self.blocks.hash(victim);
                self.watch.tell(tier, |policy| policy.evicted(victim, hash));
                return Some(victim);
            }
        }
        self.depose_policy(tier);
        self.tiers[tier.index()].queues.pop_cached(&mut self.blocks)
    }

    /// Takes a block that a policy holds back because others follow it, which are in use: the one that was let go
    /// of first; and that it is the last resort. They are searched for once, when nothing else is left in a tier for the first time, and listed
    /// from then on.
    pub(super) fn pop_held_back(&mut self, tier: Tier) -> Option<(RecordId, bool)> {
        self.watch.policies[tier.index()].as_ref()?;
        let state = self.tier(tier);
        // By the pool's own counts: the policy may be wrong about what it has.
        let others = state.queues.len() + self.passed_count(tier);
        let ordered = state.count(BlockPhase::Queued) - others;
        if ordered == 0 {
            return None;
        }
        if guard!("pool.held-back-are-searched-for-once", state.held_back.is_none(), else true) {
            self.list_held_back(tier);
        }
        let held_back = self.tier(tier).held_back.as_ref()?;
        if held_back.len < ordered {
            // The policy has lost one that nobody follows.
            self.depose_policy(tier);
            let id = self.tiers[tier.index()].queues.pop_cached(&mut self.blocks)?;
            return Some((id, false));
        }
        let id = held_back.list.front()?;
        self.watch.policies[tier.index()].as_mut()?.tell(|policy| policy.held(id));
        self.hold_back_no_more(id);
        Some((id, true))
    }

    fn list_held_back(&mut self, tier: Tier) {
        let ids: Vec<_> = self.ordered_by_policy(tier).collect();
        self.tiers[tier.index()].held_back = Some(HeldBack { list: List::EMPTY, len: 0 });
        for id in ids {
            if self.facts(id).has_children {
                self.hold_back(id, tier);
            }
        }
    }

    /// Lists a block that its tier's policy holds back, if these are listed.
    #[inline]
    pub(super) fn hold_back(&mut self, id: RecordId, tier: Tier) {
        if self.tier(tier).held_back.is_some() {
            self.hold_back_listed(id, tier);
        }
    }

    fn hold_back_listed(&mut self, id: RecordId, tier: Tier) {
        if self.blocks.is(id, Flag::HELD_BACK) || !self.is_ordered_by_policy(id, tier) {
            return;
        }
        let Some(held_back) = &mut self.tiers[tier.index()].held_back else { return };
        held_back.list.push_back(&mut self.blocks, id);
        held_back.len += 1;
        self.blocks.set(id, Flag::HELD_BACK);
    }

    /// Takes a block out of those that are listed.
    #[inline]
    pub(super) fn hold_back_no_more(&mut self, id: RecordId) {
        if !self.blocks.is(id, Flag::HELD_BACK) {
            return;
        }
        self.blocks.clear(id, Flag::HELD_BACK);
        let tier = self.blocks.tier(id).index();
        if let Some(held_back) = &mut self.tiers[tier].held_back {
            held_back.list.remove(&mut self.blocks, id);
            held_back.len -= 1;
        }
    }

    /// The blocks whose order is the policy's.
    pub(crate) fn ordered_by_policy(&self, tier: Tier) -> impl Iterator<Item = RecordId> + '_ {
        self.blocks.ids().filter(move |&id| self.is_ordered_by_policy(id, tier))
    }

    /// Whether a block is among those whose order is the policy's.
    fn is_ordered_by_policy(&self, id: RecordId, tier: Tier) -> bool {
        #[cfg(test)]
        tests::LOOKS.set(tests::LOOKS.get() + 1);
        let blocks = &self.blocks;
        id.index() < blocks.len()
            && blocks.place(id) == BlockPhase::Queued
            && blocks.tier(id) == tier
            && blocks.is(id, Flag::NAMED)
            && !blocks.is(id, Flag::PASSED)
    }

    /// Asks a policy no more: its blocks come into the queues of the tier, the longest unused first.
    #[cold]
    fn depose_policy(&mut self, tier: Tier) {
        self.counters.policy_faults += 1;
        let mut ids: Vec<_> = self.ordered_by_policy(tier).collect();
        ids.sort_by_key(|&id| self.facts(id).used);
        self.tiers[tier.index()].held_back = None;
        if let Some(mut policy) = self.watch.policies[tier.index()].take() {
            policy.end();
        }
        for id in ids {
            self.blocks.clear(id, Flag::HELD_BACK);
            let class = self.blocks.class(id);
            let queues = &mut self.tiers[tier.index()].queues;
            guard!("pool.lost-blocks-come-back", queues.push_back(&mut self.blocks, id, class));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use crate::policy::PolicyKind;
    use crate::{BlockHash, BlockPool, Naming, PoolConfig, Tier, integrity};

    thread_local! {
        /// Blocks that were looked at for whether a policy orders them.
        pub(super) static LOOKS: Cell<usize> = const { Cell::new(0) };
    }

    const BLOCKS: u64 = 64;

    fn pool() -> BlockPool {
        let policy = PolicyKind::HitDensity.make(BLOCKS).unwrap().unwrap();
        let builder = BlockPool::builder(&PoolConfig::primary_only(BLOCKS));
        builder.policy(Tier::Primary, policy).build().unwrap()
    }

    fn names() -> Vec<BlockHash> {
        (0..BLOCKS).map(|name| BlockHash::from_u128(name.into())).collect()
    }

    /// How many blocks `act` looked at.
    fn looks<T>(act: impl FnOnce() -> T) -> (T, usize) {
        let before = LOOKS.get();
        let done = act();
        (done, LOOKS.get() - before)
    }

    #[test]
    fn blocks_that_a_policy_holds_back_are_searched_for_once() {
        let pool = pool();
        let names = names();
        let mut claimed = pool.claim(names.len()).unwrap();
        drop(claimed.register(&names, Naming::default()).unwrap());
        // All others are followed by a block that is in use, or that one follows.
        let end = pool.find_and_pin(names[names.len() - 1], Tier::Primary).unwrap();
        let (claimed, looks) = looks(|| pool.claim(names.len() - 1).unwrap());
        assert_eq!(claimed.len(), names.len() - 1);
        assert!(looks <= 4 * names.len(), "{looks} looks at {} blocks", names.len());
        integrity::check(&pool.shared.state.lock()).unwrap();
        assert_eq!(pool.counters().policy_faults, 0);
        drop((end, claimed));
        integrity::check(&pool.shared.state.lock()).unwrap();
    }

    #[test]
    fn a_window_that_slides_through_a_full_pool_searches_it_once() {
        let pool = pool();
        let used = pool.claim(BLOCKS as usize - 3).unwrap();
        let name = |number: u64| BlockHash::from_u128(u128::from(number) + 1);
        let mut tail = pool.claim(1).unwrap().register(&[name(0)], Naming::default()).unwrap();
        let ((), looks) = looks(|| {
            for round in 1..1000 {
                // The next block is computed, and the one behind it is left, which it follows.
                let naming = Naming::after(name(round - 1));
                tail = pool.claim_one().unwrap().register(&[name(round)], naming).unwrap();
            }
        });
        assert!(looks < 10_000, "{looks} looks in 1,000 rounds");
        integrity::check(&pool.shared.state.lock()).unwrap();
        drop((tail, used));
        integrity::check(&pool.shared.state.lock()).unwrap();
        assert_eq!(pool.counters().policy_faults, 0);
    }
}
