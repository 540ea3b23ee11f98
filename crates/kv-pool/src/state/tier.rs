//! One tier: its slots, its queues, and how many of its blocks are where.

use crate::blocks::Place;
use crate::eviction::EvictionQueues;
use crate::list::List;

/// The blocks from `base` on lie in this tier at first, block `base + n` in slot `n`.
#[derive(Debug)]
pub(crate) struct TierState {
    pub(crate) queues: EvictionQueues,
    /// Blocks that are evicted only after those that follow them, in the order of their turns.
    pub(crate) shadowed: List,
    /// Blocks by place; those that have not appeared are not counted.
    pub(crate) counts: [u32; Place::COUNT],
    pub(crate) base: u32,
    /// Slots that have memory.
    pub(crate) ready: u32,
    /// Of these, slots that have been used. The others are not in any list yet.
    pub(crate) appeared: u32,
}

impl TierState {
    pub(crate) fn new(base: u32, capacity: u32) -> Self {
        Self {
            queues: EvictionQueues::new(),
            shadowed: List::EMPTY,
            counts: [0; Place::COUNT],
            base,
            ready: capacity,
            appeared: 0,
        }
    }

    pub(crate) fn count(&self, place: Place) -> usize {
        self.counts[place as usize] as usize
    }

    /// Slots that were never used.
    pub(crate) fn fresh(&self) -> usize {
        (self.ready - self.appeared) as usize
    }

    /// Blocks that nobody uses.
    pub(crate) fn claimable(&self) -> usize {
        self.count(Place::Queued) + self.count(Place::Shadowed) + self.fresh()
    }

    /// Blocks that nobody uses and that have no content.
    pub(crate) fn empty(&self) -> usize {
        self.queues.empty() + self.fresh()
    }

    /// Released blocks that wait for an epoch or for the end of a copy.
    pub(crate) fn retiring(&self) -> usize {
        self.count(Place::Retiring) + self.count(Place::Draining)
    }
}
