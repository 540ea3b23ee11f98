//! One tier: its block ids, its queues, and how many of its blocks are where.

use super::budget::Gone;
use super::granules::Granules;
use crate::blocks::BlockPhase;
use crate::eviction::EvictionQueues;
use crate::guard;
use crate::list::List;
use crate::{BlockId, RecordId};

/// A list of blocks, and how many there are.
#[derive(Debug)]
pub(crate) struct HeldBack {
    pub(crate) list: List,
    pub(crate) len: usize,
}

/// The blocks from `base` on lie in this tier at first, block `base + n` at the tier's block id `n`.
#[derive(Debug)]
pub(crate) struct TierState {
    pub(crate) queues: EvictionQueues,
    /// Blocks that are evicted only after those that follow them, in the order of their turns.
    pub(crate) shadowed: List,
    /// Of blocks whose order is a policy's, those that others follow in this tier. `None` until they are asked for
    /// for the first time.
    pub(crate) held_back: Option<HeldBack>,
    /// Blocks by place. Of the absent ones, those that have left are counted.
    pub(crate) counts: [u32; BlockPhase::COUNT],
    pub(crate) base: u32,
    /// Block ids that the tier was made for.
    pub(crate) capacity: u32,
    /// Block ids that may be handed out: the first ones, or those of its granules.
    pub(crate) budget: u32,
    /// Block ids that have been used, which are the first ones. The others are not in any list yet.
    pub(crate) appeared: u32,
    /// Of these, the ones that have left because they are beyond the budget.
    pub(super) gone: Gone,
    /// The granules that the tier has, if it is given its memory by granules.
    pub(crate) granules: Option<Granules>,
}

impl TierState {
    pub(crate) fn new(base: u32, capacity: u32) -> Self {
        Self {
            queues: EvictionQueues::new(),
            shadowed: List::EMPTY,
            held_back: None,
            counts: [0; BlockPhase::COUNT],
            base,
            capacity,
            budget: capacity,
            appeared: 0,
            gone: Gone::default(),
            granules: None,
        }
    }

    /// Whether a block id is not to be handed out.
    #[inline]
    pub(crate) fn is_beyond(&self, id: BlockId) -> bool {
        match &self.granules {
            None => id.0 >= self.budget,
            Some(granules) => {
                guard!("pool.taken-granule-is-beyond", !granules.has(id.0), else false)
            }
        }
    }

    /// Notes which record a block is from now on, if the tier is divided into granules.
    #[inline]
    pub(crate) fn note_record(&mut self, block: BlockId, id: RecordId) {
        if let Some(granules) = &mut self.granules {
            granules.note(block.0, id);
        }
    }

    /// The record that a block is, if the tier is divided into granules.
    pub(crate) fn record(&self, block: BlockId) -> Option<RecordId> {
        Some(self.granules.as_ref()?.record(block.0))
    }

    pub(crate) fn count(&self, place: BlockPhase) -> usize {
        self.counts[place as usize] as usize
    }

    /// Block ids that may be handed out and were never used.
    pub(crate) fn fresh(&self) -> usize {
        self.budget.saturating_sub(self.appeared) as usize
    }

    /// Blocks that nobody uses.
    pub(crate) fn claimable(&self) -> usize {
        self.count(BlockPhase::Queued) + self.count(BlockPhase::Shadowed) + self.fresh()
    }

    /// Blocks that nobody uses and that have no content.
    pub(crate) fn empty(&self) -> usize {
        self.queues.empty() + self.fresh()
    }

    /// Released blocks that wait for an epoch or for the end of a copy.
    pub(crate) fn retiring(&self) -> usize {
        self.count(BlockPhase::Retiring) + self.count(BlockPhase::Draining)
    }
}
