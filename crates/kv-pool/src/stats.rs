//! Counts of what a pool holds and has done.

pub use crate::error::IntegrityError;

use crate::blocks::BlockPhase;
use crate::state::{PoolState, TierState};

/// What one tier holds. Each of its blocks is counted in one field beside `blocks` and `beyond`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TierStats {
    /// Blocks that may be handed out, and those beyond the [budget](crate::BlockPool::set_budget) that have
    /// not left.
    pub blocks: u64,
    /// Of these, blocks beyond the budget. They leave when their users let go of them.
    pub beyond: u64,
    /// Unused and without content.
    pub empty: u64,
    /// Unused, with content that a lookup may find.
    pub cached: u64,
    /// Released, and not claimable before the epoch of the release is complete, or the copy that
    /// reads the block has ended.
    pub retiring: u64,
    /// Pinned at least once.
    pub pinned: u64,
    /// Claimed by one owner, or target of a move.
    pub claimed: u64,
}

impl TierStats {
    /// Blocks that a claim can take at once.
    #[must_use]
    pub fn claimable(&self) -> u64 {
        self.empty + self.cached
    }
}

/// What a pin of cached content takes; see [`BlockPool::pin_cost`](crate::BlockPool::pin_cost).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PinCost {
    /// Device blocks that nobody uses: fewer blocks can be claimed by so many.
    pub unused: usize,
    /// Blocks that do not lie on the device. For each of them a device block is claimed, to copy it to.
    pub far: usize,
    /// Of these, blocks that nobody uses: fewer blocks of their tier can be claimed by so many.
    pub far_unused: usize,
}

/// What a pool has done since it was made.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PoolCounters {
    /// Blocks looked up by prefix.
    pub lookups: u64,
    /// Of these, blocks found.
    pub hits: u64,
    /// Blocks claimed.
    pub claimed: u64,
    /// Blocks whose content was given a name that no block had, or an unused secondary copy only.
    pub registered: u64,
    /// Content that turned out to be there already when it was registered.
    pub duplicates: u64,
    /// Cached content that lost its primary block to a claim, was taken over by one, or lost it to a budget or a
    /// granule that was taken while it was unused, whether it was kept elsewhere or not.
    pub evicted: u64,
    /// Content that was moved from the primary to the secondary tier: when it was evicted, or ahead of that.
    pub offloaded: u64,
    /// Evicted content that was lost because the [store policy](crate::store) refused to move it.
    pub refused: u64,
    /// Content that was refused and then asked for, while the secondary tier would have had it still; of a large tier
    /// estimated from a sample.
    pub regretted: u64,
    /// Content that came to the primary tier from another one, moved or as a private copy.
    pub onboarded: u64,
    /// Names taken from content that was evicted and not kept, let go of beyond the budget, removed, given up beyond
    /// a [quota](crate::tenants::TenantQuota::cached_max), or cached a second time.
    /// `registered - dropped` is what is cached or pinned under a name, or on its way to the
    /// secondary tier.
    pub dropped: u64,
    /// Policies that are called no more, because they chose a block that they were not given, lost one, or
    /// panicked. A panic is counted when the tier needs its next victim.
    pub policy_faults: u64,
    /// Releases refused because the block was not held. Always 0: the types see to it.
    pub misuses: u64,
}

/// How long content had been unused when it lost its primary block to a claim.
///
/// Measured by the pool's clock as it was last read: by [`tick`](crate::BlockPool::tick), by
/// [`refresh`](crate::BlockPool::refresh), for a loan, for a duration that began, or for a store policy that was asked.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct EvictionAges {
    /// Blocks of content.
    pub evicted: u64,
    /// The sum of their ages, in milliseconds.
    pub total_ms: u64,
    /// The highest age, in milliseconds; ages beyond 49 days are counted without their whole
    /// multiples of 2^32 milliseconds.
    pub max_ms: u64,
}

/// What a pool holds and has done, as of one moment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PoolStats {
    /// The primary tier.
    pub primary: TierStats,
    /// The secondary tier.
    pub secondary: TierStats,
    /// The third and the fourth tier.
    pub further: [TierStats; 2],
    /// What was done.
    pub counters: PoolCounters,
}

impl PoolState {
    pub(crate) fn stats(&self) -> PoolStats {
        let [primary, secondary, third, fourth] = self.tiers.each_ref().map(TierState::stats);
        PoolStats { primary, secondary, further: [third, fourth], counters: self.counters }
    }
}

impl TierState {
    fn stats(&self) -> TierStats {
        let count = |place| self.count(place) as u64;
        let empty = self.empty() as u64;
        TierStats {
            blocks: u64::from(self.budget) + u64::from(self.beyond()),
            beyond: self.beyond().into(),
            empty,
            cached: self.claimable() as u64 - empty,
            retiring: self.retiring() as u64,
            pinned: count(BlockPhase::Pinned),
            claimed: count(BlockPhase::Claimed) + count(BlockPhase::Moving),
        }
    }
}
