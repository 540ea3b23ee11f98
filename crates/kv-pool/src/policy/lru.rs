//! Priority LRU: the lowest priority first, and in it the block that was released first.

use super::queues::{Queue, Queues};
use super::{BlockFacts, EvictionPolicy, PolicyError, PolicyTime};
use crate::{Priority, RecordId};

/// Evicts from the lowest priority first, and in it the block that became evictable first.
///
/// One queue a priority and a bit for each that has members, so that every operation takes the same
/// time however many blocks or priorities there are.
///
/// # Examples
///
/// ```
/// use kv_pool::policy::{BlockFacts, EvictionPolicy, PriorityLru};
/// use kv_pool::{BlockHash, Priority, policy::RecordId};
///
/// let mut policy = PriorityLru::new(2)?;
/// let facts = BlockFacts::new(BlockHash::from_u128(1));
/// let keep = BlockFacts { priority: Priority::MAX, ..facts };
/// policy.evictable(RecordId::from_index(0), &keep);
/// policy.evictable(RecordId::from_index(1), &facts);
/// assert_eq!(policy.victim(facts.used), Some(RecordId::from_index(1)));
/// # Ok::<(), kv_pool::policy::PolicyError>(())
/// ```
#[derive(Debug)]
pub struct PriorityLru {
    queues: Queues<{ Priority::COUNT }>,
    /// A bit for each queue that may have members with a place.
    occupied: u128,
}

impl PriorityLru {
    /// A policy for blocks with indices below `blocks`.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, PolicyError> {
        Ok(Self { queues: Queues::new(blocks)?, occupied: 0 })
    }

    /// The priority of the block that [`victim`](EvictionPolicy::victim) would choose.
    fn lowest(&mut self) -> Option<Priority> {
        loop {
            let lowest = self.occupied.trailing_zeros() as u8;
            let priority = Priority::new(lowest)?;
            if self.queues.front(Queue(lowest)).is_some() {
                return Some(priority);
            }
            self.occupied &= !(1 << lowest);
        }
    }
}

impl EvictionPolicy for PriorityLru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        if self.queues.knows(block) {
            let queue = facts.priority.get();
            self.queues.push_back(Queue(queue), block, facts);
            self.occupied |= 1 << queue;
        }
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.queues.children(block, has_children);
        if let Some(queue) = self.queues.queue_of(block) {
            self.occupied |= 1 << queue.0;
        }
    }

    fn held(&mut self, block: RecordId) {
        self.queues.remove(block);
    }

    fn removed(&mut self, block: RecordId) {
        self.queues.remove(block);
    }

    fn victim(&mut self, _now: PolicyTime) -> Option<RecordId> {
        let priority = self.lowest()?;
        self.queues.pop_front(Queue(priority.get()))
    }

    fn len(&self) -> usize {
        self.queues.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockHash;

    const NOW: PolicyTime = PolicyTime { lookups: 0, ms: 0 };

    fn block(index: u32) -> RecordId {
        RecordId::from_index(index)
    }

    fn facts(index: u32, priority: u8) -> BlockFacts {
        let priority = Priority::new(priority).unwrap();
        BlockFacts { priority, ..BlockFacts::new(BlockHash::from_u128(u128::from(index))) }
    }

    fn drain(policy: &mut PriorityLru) -> Vec<usize> {
        std::iter::from_fn(|| policy.victim(NOW)).map(RecordId::index).collect()
    }

    #[test]
    fn the_lowest_priority_leaves_first_and_in_it_the_first_released() {
        let mut policy = PriorityLru::new(5).unwrap();
        for (index, priority) in [(0, 35), (1, 100), (2, 35), (3, 0), (4, 35)] {
            policy.evictable(block(index), &facts(index, priority));
        }
        policy.held(block(0));
        policy.evictable(block(0), &facts(0, 35));
        assert_eq!(policy.len(), 5);
        assert_eq!(drain(&mut policy), [3, 2, 4, 0, 1]);
        assert!(policy.is_empty());
    }

    #[test]
    fn a_block_with_children_waits_for_them_and_is_next_in_its_priority_then() {
        let mut policy = PriorityLru::new(4).unwrap();
        policy.evictable(block(0), &BlockFacts { has_children: true, ..facts(0, 0) });
        for index in 1..4 {
            policy.evictable(block(index), &facts(index, 35));
        }
        assert_eq!(policy.victim(NOW), Some(block(1)));
        policy.children(block(0), false);
        assert_eq!(policy.victim(NOW), Some(block(0)));
        policy.children(block(2), true);
        assert_eq!(drain(&mut policy), [3]);
        assert_eq!(policy.len(), 1);
        policy.children(block(2), false);
        assert_eq!(drain(&mut policy), [2]);
    }

    #[test]
    fn calls_about_unknown_blocks_change_nothing() {
        let mut policy = PriorityLru::new(1).unwrap();
        policy.evictable(block(1), &facts(1, 35));
        for index in [0, 1, u32::MAX] {
            policy.held(block(index));
            policy.removed(block(index));
            policy.children(block(index), false);
        }
        assert_eq!((policy.len(), policy.victim(NOW)), (0, None));
    }
}
