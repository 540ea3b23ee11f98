//! Priorities for policies that know none.

use super::{BlockFacts, EvictionPolicy, PolicyError, PolicyTime, PriorityLru, ReuseHint};
use crate::{Priority, RecordId};

/// Any policy for the blocks of default priority, with priority LRU for all others.
///
/// Most blocks have the default priority, so the policy decides among nearly all of them; a lower
/// priority still goes before, and a higher one after, whatever the policy thinks. Only children are
/// stronger than priorities: a block that has some waits for them. Blocks that the policy has
/// [`overdue`](EvictionPolicy::overdue) are not reported as such, for a lower priority goes before.
#[derive(Debug)]
pub struct Prioritized<P> {
    default: P,
    others: PriorityLru,
}

impl<P: EvictionPolicy> Prioritized<P> {
    /// Puts `default`, made for blocks with indices below `blocks`, in charge of blocks of default
    /// priority.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] if there are too many blocks, or no memory for the tables.
    pub fn new(default: P, blocks: u64) -> Result<Self, PolicyError> {
        Ok(Self { default, others: PriorityLru::new(blocks)? })
    }
}

impl<P: EvictionPolicy> EvictionPolicy for Prioritized<P> {
    fn name(&self) -> &'static str {
        self.default.name()
    }

    fn missed(&mut self, hash: crate::BlockHash, now: PolicyTime) {
        self.default.missed(hash, now);
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        self.default.stored(block, facts);
    }

    fn found(&mut self, block: RecordId, now: PolicyTime) {
        self.default.found(block, now);
    }

    fn hinted(&mut self, block: RecordId, hint: ReuseHint, now: PolicyTime) {
        self.default.hinted(block, hint, now);
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        if facts.priority == Priority::DEFAULT {
            self.others.removed(block);
            self.default.evictable(block, facts);
        } else {
            self.default.removed(block);
            self.others.evictable(block, facts);
        }
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.default.children(block, has_children);
        self.others.children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.default.held(block);
        self.others.held(block);
    }

    fn removed(&mut self, block: RecordId) {
        self.default.removed(block);
        self.others.removed(block);
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        if self.others.lowest().is_some_and(|lowest| lowest < Priority::DEFAULT) {
            return self.others.victim(now);
        }
        self.default.victim(now).or_else(|| self.others.victim(now))
    }

    fn evicted(&mut self, block: RecordId, hash: crate::BlockHash) {
        self.default.evicted(block, hash);
    }

    fn len(&self) -> usize {
        self.default.len() + self.others.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Slru;
    use super::*;
    use crate::BlockHash;

    const NOW: PolicyTime = PolicyTime { lookups: 0, ms: 0 };

    #[test]
    fn a_policy_decides_inside_the_default_priority_only() {
        let mut policy = Prioritized::new(Slru::new(5).unwrap(), 5).unwrap();
        for (index, priority, found) in
            [(0, 36, 0), (1, 35, 1), (2, 35, 0), (3, 34, 9), (4, 100, 0)]
        {
            let facts = BlockFacts::new(BlockHash::from_u128(u128::from(index)));
            let priority = Priority::new(priority).unwrap();
            let facts = BlockFacts { priority, found, ..facts };
            policy.evictable(RecordId::from_index(index), &facts);
        }
        assert_eq!(policy.len(), 5);
        // A new priority moves a block from one side to the other.
        policy.held(RecordId::from_index(4));
        policy.evictable(
            RecordId::from_index(4),
            &BlockFacts { found: 1, ..BlockFacts::new(BlockHash::from_u128(4)) },
        );
        let order: Vec<_> =
            std::iter::from_fn(|| policy.victim(NOW)).map(RecordId::index).collect();
        assert_eq!(order, [3, 2, 1, 4, 0]);
        assert!(policy.is_empty());
    }
}
