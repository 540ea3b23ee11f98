//! Everything that the pool's one lock guards, and the steps that keep it consistent.
//!
//! A method here is one critical section's work: it leaves every block in exactly one place, and
//! in the list that this place names. None allocates, but for buffers that are kept and used again, and the times at which
//! priorities end.

mod budget;
mod caught;
mod claim;
mod granules;
mod names;
mod plain;
mod runs;
mod spares;
mod tenancy;
mod tier;
mod victim;
mod watch;

use std::collections::{HashMap, TryReserveError};

pub use budget::Withdrawn;
pub(crate) use claim::{Claim, Move};
pub use granules::GranuleUse;
pub(crate) use names::Named;
pub(crate) use spares::Spares;
pub(crate) use tier::{HeldBack, TierState};
pub(crate) use watch::Watch;

use crate::blocks::{BlockPhase, Blocks, Flag, Unlinked};
use crate::eviction::EMPTY;
use crate::ids::PoolMark;
use crate::index::Index;
use crate::list::List;
use crate::loan::Loans;
use crate::stats::{EvictionAges, PoolCounters};
use crate::tenants::Tenant;
use crate::{BlockId, Location, PoolConfig, Priority, RecordId, Tier};

#[derive(Debug)]
pub(crate) struct PoolState {
    /// The pool that ids belong to which its callers have been given.
    pub(crate) mark: PoolMark,
    pub(crate) blocks: Blocks,
    pub(crate) index: Index,
    pub(crate) tiers: [TierState; Tier::COUNT],
    /// Released blocks whose epoch is not complete, in the order of their release.
    pub(crate) retiring: List,
    /// Blocks that wait for the end of an [`Offload`](crate::moves::Offload) in the place of the one that it
    /// names, by the block id that it copies to.
    pub(crate) stand_ins: HashMap<BlockId, RecordId>,
    /// The numbers of the epochs that were begun last, and completed.
    pub(crate) current: u64,
    pub(crate) completed: u64,
    pub(crate) counters: PoolCounters,
    pub(crate) ages: EvictionAges,
    pub(crate) watch: Watch,
    /// No tenants, and no block beyond its tier's budget that is to leave.
    open: bool,
    /// The same, and no policy but priority LRU.
    pub(crate) plain: bool,
    /// No log of events either, when it was made.
    quiet: bool,
    /// What was named last: mostly the parent of what is named next.
    last_named: RecordId,
    pub(crate) loans: Loans,
    offload_min_priority: Priority,
    pub(crate) spares: Spares,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) sabotage: crate::sabotage::Sabotage,
}

impl PoolState {
    /// `config` has been checked.
    pub(crate) fn new(config: &PoolConfig, watch: Watch) -> Result<Self, TryReserveError> {
        let mut base = 0;
        let tiers = config.blocks().map(|capacity| {
            let tier = TierState::new(base, capacity as u32);
            base += capacity as u32;
            tier
        });
        Ok(Self {
            mark: PoolMark::new(),
            blocks: Blocks::new(base as usize)?,
            index: Index::new(base as usize)?,
            tiers,
            retiring: List::EMPTY,
            stand_ins: HashMap::new(),
            current: 0,
            completed: 0,
            counters: PoolCounters::default(),
            ages: EvictionAges::default(),
            open: watch.tenancy.is_none(),
            plain: watch.is_plain(),
            quiet: watch.events.is_none(),
            last_named: RecordId(0),
            watch,
            loans: Loans::new(),
            offload_min_priority: config.offload_min_priority,
            spares: Spares::new(base as usize),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            sabotage: crate::sabotage::Sabotage::default(),
        })
    }

    /// A pool with nothing but what every pool has.
    #[cfg(test)]
    pub(crate) fn plain(config: &PoolConfig) -> Result<Self, TryReserveError> {
        let clock = Box::new(crate::clock::ManualClock::new());
        let watch = Watch::new(clock, None, [const { None }; Tier::COUNT], None, 0)?;
        Self::new(config, watch)
    }

    #[inline]
    pub(crate) fn tier(&self, tier: Tier) -> &TierState {
        &self.tiers[tier.index()]
    }

    /// Changes a block's place, and the counts with it. Lists are the caller's to change.
    #[inline]
    pub(crate) fn put(&mut self, id: RecordId, place: BlockPhase) {
        let counts = &mut self.tiers[self.blocks.tier(id).index()].counts;
        counts[self.blocks.place(id) as usize] -= 1;
        counts[place as usize] += 1;
        self.blocks.set_place(id, place);
        self.account(id);
    }

    /// Takes one reference: the block leaves the lists if it is the first.
    #[inline]
    pub(crate) fn pin(&mut self, id: RecordId) {
        if self.plain
            && let Some(Unlinked { tier, class, before, after }) = self.blocks.pin_queued(id)
        {
            let tier = &mut self.tiers[tier.index()];
            tier.counts[BlockPhase::Queued as usize] -= 1;
            tier.counts[BlockPhase::Pinned as usize] += 1;
            return tier.queues.unlinked(&mut self.blocks, class, before, after, 1);
        }
        self.pin_anywhere(id);
    }

    fn pin_anywhere(&mut self, id: RecordId) {
        if self.blocks.place(id) == BlockPhase::Pinned {
            // A count that ever got this high stays there: better held for good than given away
            // early.
            let references = self.blocks.references(id).saturating_add(1);
            self.blocks.set_references(id, references);
            if self.blocks.is(id, Flag::OVER) {
                self.untime(id);
            }
            return;
        }
        self.take_out(id);
        crate::guard!("pool.use-ends-the-duration", self.untime(id));
        self.blocks.set_references(id, 1);
        self.put(id, BlockPhase::Pinned);
    }

    /// Gives one reference back; the block rests if it was the last.
    #[inline]
    pub(crate) fn unpin(&mut self, id: RecordId) {
        if self.plain
            && self.frees_at_once()
            && let Some((tier, class)) = self.blocks.unpin_last(id, self.watch.now_ms() as u32)
        {
            let tier = &mut self.tiers[tier.index()];
            tier.counts[BlockPhase::Pinned as usize] -= 1;
            tier.counts[BlockPhase::Queued as usize] += 1;
            return tier.queues.push_back(&mut self.blocks, id, class);
        }
        self.unpin_anywhere(id);
    }

    fn unpin_anywhere(&mut self, id: RecordId) {
        if self.blocks.place(id) != BlockPhase::Pinned {
            self.counters.misuses += 1;
            return;
        }
        match self.blocks.references(id) {
            u32::MAX => {}
            0 => self.counters.misuses += 1,
            1 => {
                self.blocks.set_references(id, 0);
                self.rest(id);
            }
            more => self.blocks.set_references(id, more - 1),
        }
    }

    /// Releases a claimed block that was given no content worth a name.
    #[inline]
    pub(crate) fn release_claimed(&mut self, id: RecordId) {
        if self.blocks.place(id) == BlockPhase::Claimed {
            self.rest(id);
        } else {
            self.counters.misuses += 1;
        }
    }

    /// Puts a block that nobody holds where it waits for its next user.
    #[inline]
    pub(crate) fn rest(&mut self, id: RecordId) {
        // Of two owners the other may have released it before.
        #[cfg(all(feature = "sabotage", debug_assertions))]
        self.take_out(id);
        self.arm(id);
        if crate::guard!("pool.copied-id-drains", self.blocks.is(id, Flag::COPYING), else false) {
            self.put(id, BlockPhase::Draining);
        } else if self.frees_at_once() {
            self.enqueue(id);
        } else {
            self.blocks.set_stamp(id, self.current as u32);
            self.put(id, BlockPhase::Retiring);
            self.retiring.push_back(&mut self.blocks, id);
        }
    }

    /// Whether a block that is released now can be claimed at once: no epoch is open.
    #[inline]
    pub(super) fn frees_at_once(&self) -> bool {
        crate::guard!("pool.released-is-not-free", self.current <= self.completed, else true)
    }

    /// Makes the blocks claimable whose release lies in an epoch up to `epoch`.
    pub(crate) fn complete(&mut self, epoch: u64) {
        self.completed = self.completed.max(epoch);
        // Stamps never fall from front to back, for they are the epoch that was current.
        while let Some(id) = self.retiring.front() {
            if self.plain && self.free_run(id) {
                continue;
            }
            if !self.blocks.is_over(id, self.completed) {
                break;
            }
            self.retiring.remove(&mut self.blocks, id);
            self.enqueue(id);
        }
    }

    /// Exchanges the block ids of two blocks, and with them the copies that read these. Neither is in a
    /// list, or the list would be wrong.
    #[inline]
    pub(crate) fn swap_locations(&mut self, one: RecordId, other: RecordId) {
        let (first, second) = (self.blocks.location(one), self.blocks.location(other));
        self.relocate(one, second);
        self.relocate(other, first);
        crate::guard!("pool.readers-go-with-the-id", self.blocks.swap_readers(one, other));
    }

    #[inline]
    fn relocate(&mut self, id: RecordId, to: Location) {
        let (place, from) = (self.blocks.place(id) as usize, self.blocks.tier(id));
        self.uncount(id);
        self.tiers[from.index()].counts[place] -= 1;
        self.tiers[to.tier.index()].counts[place] += 1;
        self.blocks.set_location(id, to);
        crate::guard!(
            "pool.granule-knows-what-moved-in",
            self.tiers[to.tier.index()].note_record(to.id, id)
        );
        self.account(id);
        if let Some(parent) = self.blocks.parent(id) {
            self.note_child(parent, from, false);
            self.note_child(parent, to.tier, true);
        }
        if from != to.tier && self.blocks.is(id, Flag::NAMED) {
            self.note_left(id, from);
            self.note_stored(id);
        }
    }

    /// Removes a block from the list that its place names, if any.
    #[inline]
    pub(crate) fn take_out(&mut self, id: RecordId) {
        if self.blocks.is(id, Flag::PASSED) {
            return self.take_out_passed(id);
        }
        let blocks = &mut self.blocks;
        let tier = &mut self.tiers[blocks.tier(id).index()];
        match blocks.place(id) {
            BlockPhase::Queued => {
                let class = blocks.class(id);
                match &mut self.watch.policies[blocks.tier(id).index()] {
                    Some(policy) if class != EMPTY => {
                        policy.tell(|policy| policy.held(id));
                        self.hold_back_no_more(id);
                    }
                    _ => tier.queues.remove(blocks, id, class),
                }
            }
            BlockPhase::Shadowed => tier.shadowed.remove(blocks, id),
            BlockPhase::Retiring => self.retiring.remove(blocks, id),
            BlockPhase::Absent
            | BlockPhase::Claimed
            | BlockPhase::Pinned
            | BlockPhase::Moving
            | BlockPhase::Draining => {}
        }
    }

    /// Content goes to the back of its priority, a block without content before all others. A block
    /// beyond the budget leaves.
    #[inline]
    pub(crate) fn enqueue(&mut self, id: RecordId) {
        if crate::guard!("pool.beyond-the-budget-leaves", self.is_beyond(id), else false) {
            return self.leave(id);
        }
        self.put(id, BlockPhase::Queued);
        let tier = self.blocks.tier(id);
        if !self.blocks.is(id, Flag::NAMED) {
            return self.tiers[tier.index()].queues.push_front(&mut self.blocks, id, EMPTY);
        }
        self.blocks.set_stamp(id, self.watch.now_ms() as u32);
        if self.watch.policies[tier.index()].is_some() {
            self.enqueue_by_policy(id, tier);
        } else {
            let class = self.blocks.class(id);
            self.tiers[tier.index()].queues.push_back(&mut self.blocks, id, class);
        }
        if self.watch.tenancy.is_some() {
            self.give_way(Tenant(self.blocks.tenant(id)), tier);
        }
    }

    pub(crate) fn enqueue_by_policy(&mut self, id: RecordId, tier: Tier) {
        let facts = self.facts(id);
        self.watch.tell(tier, |policy| policy.evictable(id, &facts));
        if facts.has_children {
            self.hold_back(id, tier);
        }
    }

    /// The next block id of a tier that has never been used, with a block for it.
    #[inline]
    fn appear(&mut self, tier: Tier) -> Option<RecordId> {
        let state = &mut self.tiers[tier.index()];
        if state.appeared >= state.budget {
            return None;
        }
        let (id, block_id) = (RecordId(state.base + state.appeared), BlockId(state.appeared));
        state.appeared += 1;
        state.counts[BlockPhase::Absent as usize] += 1;
        self.blocks.set_location(id, Location { tier, id: block_id });
        self.blocks.set_priority(id, Priority::DEFAULT);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockHash, Naming};

    fn state() -> PoolState {
        PoolState::plain(&PoolConfig::primary_only(2)).unwrap()
    }

    fn claim(state: &mut PoolState) -> RecordId {
        state.claim_one(Tier::Primary, Tenant::NOBODY).unwrap().block()
    }

    #[test]
    fn a_release_of_what_is_not_held_is_counted_and_changes_nothing() {
        let mut state = state();
        let id = claim(&mut state);
        state.release_claimed(id);
        state.release_claimed(id);
        state.unpin(id);
        assert_eq!(state.counters.misuses, 2);
        assert_eq!(state.tier(Tier::Primary).claimable(), 2);
        assert_ne!(claim(&mut state), claim(&mut state));
        assert!(state.claim_one(Tier::Primary, Tenant::NOBODY).is_none());
    }

    #[test]
    fn a_count_that_reaches_its_end_holds_the_block_for_good() {
        let mut state = state();
        let id = claim(&mut state);
        let hash = BlockHash::from_u128(1);
        assert_eq!(state.register(id, hash, None, &Naming::default()), Named::New(id));
        state.blocks.set_references(id, u32::MAX - 1);
        state.pin(id);
        state.pin(id);
        for _ in 0..3 {
            state.unpin(id);
            state.unpin_all(&[state.blocks.at(id)]);
        }
        assert_eq!(state.blocks.references(id), u32::MAX);
        assert_eq!(state.blocks.place(id), BlockPhase::Pinned);
    }
}
