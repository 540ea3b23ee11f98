//! Priority LRU: the lowest priority first, and in it the block that was released first.

use super::queues::{Queue, Queues};
use kv_pool::ConfigError;
use kv_pool::Priority;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};

/// One queue a priority.
const PRIORITIES: usize = Priority::MAX.get() as usize + 1;

/// Evicts from the lowest priority first, and in it the block that became evictable first: the order of a pool without
/// a policy, for simulations without a pool.
///
/// One queue a priority and a bit for each that has members, so that every operation takes the same
/// time however many blocks or priorities there are.
#[derive(Debug)]
pub struct PriorityLru {
    queues: Queues<PRIORITIES>,
    /// A bit for each queue that may have members with a place.
    occupied: u128,
}

impl PriorityLru {
    /// A policy for blocks with indices below `blocks`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, ConfigError> {
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
        self.queues.evictable_len()
    }
}
