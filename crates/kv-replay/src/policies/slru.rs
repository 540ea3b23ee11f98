//! Segmented LRU: a block must be hit once before it may displace blocks that were.

use super::queues::{Queue, Queues};
use super::{Block, BlockPolicy, Capacity, Lookups};

const PROBATION: Queue = Queue(0);
const PROTECTED: Queue = Queue(1);

/// The protected segment's part of the capacity: one in so many blocks.
const PROTECTED_ONE_IN: usize = 5;

/// Segmented LRU (Karedla, Love and Wherry, 1994).
///
/// New blocks enter the probation segment, a hit there promotes to the protected one, and what that has no room for
/// goes back to probation as its most recent block. Evicted is the least recent block on probation.
pub(super) struct Slru {
    segments: Queues<2>,
    capacity: usize,
    protected_max: usize,
}

impl Slru {
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        let capacity = capacity.blocks();
        Self {
            segments: Queues::new(lookups.distinct()),
            capacity,
            protected_max: capacity / PROTECTED_ONE_IN,
        }
    }
}

impl BlockPolicy for Slru {
    fn access(&mut self, block: Block) -> bool {
        if self.segments.queue_of(block).is_some() {
            self.segments.push_back(PROTECTED, block);
            if self.segments.len(PROTECTED) > self.protected_max
                && let Some(demoted) = self.segments.pop_front(PROTECTED)
            {
                self.segments.push_back(PROBATION, demoted);
            }
            return true;
        }
        if self.segments.len(PROBATION) + self.segments.len(PROTECTED) >= self.capacity
            && self.segments.pop_front(PROBATION).is_none()
        {
            self.segments.pop_front(PROTECTED);
        }
        self.segments.push_back(PROBATION, block);
        false
    }
}
