//! Segmented LRU: a block must be found once before it may displace blocks that were.

use super::queues::{Queue, Queues};
use kv_pool::ConfigError;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};

const PROBATION: Queue = Queue(0);
const PROTECTED: Queue = Queue(1);

/// The protected segment's part of the blocks: one in so many.
const PROTECTED_ONE_IN: usize = 5;

/// Segmented LRU (Karedla, Love and Wherry, 1994), with a fifth of the blocks protected.
///
/// New blocks enter the probation segment, those that a lookup found the protected one, and what
/// that has no room for goes back to probation as its most recent block. Evicted is the least recent
/// block on probation. Priorities are not looked at.
#[derive(Debug)]
pub struct Slru {
    segments: Queues<2>,
    protected_max: usize,
}

impl Slru {
    /// A policy for blocks with indices below `blocks`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, ConfigError> {
        let segments = Queues::new(blocks)?;
        Ok(Self { protected_max: segments.blocks() / PROTECTED_ONE_IN, segments })
    }
}

impl EvictionPolicy for Slru {
    fn name(&self) -> &'static str {
        "slru"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        if !self.segments.knows(block) {
            return;
        }
        if facts.found == 0 {
            self.segments.push_back(PROBATION, block, facts);
            return;
        }
        self.segments.push_back(PROTECTED, block, facts);
        if self.segments.members(PROTECTED) > self.protected_max
            && let Some(demoted) = self.segments.oldest(PROTECTED)
        {
            self.segments.move_back(PROBATION, demoted);
        }
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.segments.children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.segments.remove(block);
    }

    fn removed(&mut self, block: RecordId) {
        self.segments.remove(block);
    }

    fn victim(&mut self, _now: PolicyTime) -> Option<RecordId> {
        self.segments.pop_front(PROBATION).or_else(|| self.segments.pop_front(PROTECTED))
    }

    fn len(&self) -> usize {
        self.segments.evictable_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_pool::BlockHash;

    const NOW: PolicyTime = PolicyTime { lookups: 0, ms: 0 };

    #[test]
    fn what_was_found_outlives_what_was_not_until_a_fifth_is_protected() {
        let mut policy = Slru::new(10).unwrap();
        for index in 0..10 {
            let hash = BlockHash::from_u128(u128::from(index));
            let found = u32::from(index < 3);
            let facts = BlockFacts { found, ..BlockFacts::new(hash) };
            policy.evictable(RecordId::from_index(index), &facts);
        }
        let order: Vec<_> =
            std::iter::from_fn(|| policy.victim(NOW)).map(RecordId::index).collect();
        // Two of the three that were found are protected; the oldest of them was sent back first.
        assert_eq!(order, [0, 3, 4, 5, 6, 7, 8, 9, 1, 2]);
    }
}
