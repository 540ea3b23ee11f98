//! Everything that the pool's one lock guards, and the steps that keep it consistent.
//!
//! A method here is one critical section's work: it leaves every block in exactly one place, and
//! in the list that this place names.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, TryReserveError};

use crate::eviction::{Class, EvictionQueues};
use crate::hash::BuildHashOfHash;
use crate::list::Links;
use crate::retiring::Retiring;
use crate::stats::PoolCounters;
use crate::{BlockHash, BlockId, Epoch, Location, PoolConfig, Priority, SlotIndex, Tier};

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// Its slot has no memory yet.
    Absent,
    /// In its tier's eviction queues, under this class.
    Queued(Class),
    /// In the list of released blocks whose epoch is not complete.
    Retiring(Epoch),
    /// Held by one `ClaimedBlock`.
    Claimed,
    /// Held by at least one `BlockPin`.
    Pinned,
    /// The content is on its way to the secondary tier; held by one `Offload`.
    Moving,
}

#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) hash: Option<BlockHash>,
    pub(crate) references: u32,
    pub(crate) location: Location,
    pub(crate) priority: Priority,
    pub(crate) place: Place,
}

/// What one block of a claim is: the block itself, and what must be moved away from it first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) block: BlockId,
    pub(crate) location: Location,
    pub(crate) evicted: bool,
    pub(crate) offload: Option<Move>,
}

/// Content that moves between two slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) block: BlockId,
    pub(crate) from: SlotIndex,
    pub(crate) to: SlotIndex,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) blocks: Vec<Block>,
    pub(crate) index: HashMap<BlockHash, BlockId, BuildHashOfHash>,
    pub(crate) links: Links,
    pub(crate) queues: [EvictionQueues; 2],
    pub(crate) retiring: Retiring,
    /// The names of content that is on its way to the secondary tier, which it may get back.
    pub(crate) moving: HashMap<BlockId, BlockHash>,
    pub(crate) current: Epoch,
    pub(crate) completed: Epoch,
    pub(crate) primary_ready: u64,
    pub(crate) counters: PoolCounters,
    offload_min_priority: Priority,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) sabotage: crate::sabotage::Sabotage,
}

impl State {
    /// `config` has been checked.
    pub(crate) fn new(config: &PoolConfig) -> Result<Self, TryReserveError> {
        let slots = |tier, count: u64| {
            (0..count as u32).map(move |slot| Location { tier, slot: SlotIndex(slot) })
        };
        let count = (config.primary_blocks + config.secondary_blocks) as usize;
        let mut blocks: Vec<Block> = Vec::new();
        blocks.try_reserve_exact(count)?;
        let mut index = HashMap::with_hasher(BuildHashOfHash::default());
        index.try_reserve(count)?;
        let links = Links::new(count)?;
        let locations = slots(Tier::Primary, config.primary_blocks)
            .chain(slots(Tier::Secondary, config.secondary_blocks));
        blocks.extend(locations.map(|location| Block {
            hash: None,
            references: 0,
            location,
            priority: Priority::DEFAULT,
            place: Place::Absent,
        }));
        let mut state = Self {
            links,
            index,
            queues: [EvictionQueues::new(), EvictionQueues::new()],
            blocks,
            retiring: Retiring::new(),
            moving: HashMap::new(),
            current: Epoch(0),
            completed: Epoch(0),
            primary_ready: 0,
            counters: PoolCounters::default(),
            offload_min_priority: config.offload_min_priority,
            #[cfg(all(feature = "sabotage", debug_assertions))]
            sabotage: crate::sabotage::Sabotage::default(),
        };
        state.add_primary_slots(config.primary_ready);
        for block in config.primary_blocks..config.primary_blocks + config.secondary_blocks {
            state.appear(BlockId(block as u32));
        }
        Ok(state)
    }

    /// Gives the primary slots below `upto` memory. Until its slot has memory, a primary block's
    /// id equals its slot.
    pub(crate) fn add_primary_slots(&mut self, upto: u64) {
        for block in self.primary_ready..upto {
            self.appear(BlockId(block as u32));
        }
        self.primary_ready = self.primary_ready.max(upto);
    }

    /// Lets a new block be claimed, after the empty blocks that are there already.
    fn appear(&mut self, id: BlockId) {
        let tier = self.blocks[id.index()].location.tier;
        self.blocks[id.index()].place = Place::Queued(None);
        self.queues[tier.index()].insert_last(&mut self.links, id, None);
    }

    /// Takes one reference: the block leaves the lists if it is the first.
    pub(crate) fn pin(&mut self, id: BlockId) {
        self.take_out(id);
        let block = &mut self.blocks[id.index()];
        // A count that ever got this high stays there: better held for good than given away early.
        block.references = block.references.saturating_add(1);
        block.place = Place::Pinned;
    }

    /// Gives one reference back; the block retires if it was the last.
    pub(crate) fn unpin(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let Some(references) = block.references.checked_sub(1) else {
            self.counters.misuses += 1;
            return;
        };
        if references == u32::MAX - 1 {
            return;
        }
        block.references = references;
        if references == 0 {
            self.rest(id);
        }
    }

    /// Releases a claimed block that was given no content worth a name.
    pub(crate) fn release_claimed(&mut self, id: BlockId) {
        if self.blocks[id.index()].place == Place::Claimed {
            self.rest(id);
        } else {
            self.counters.misuses += 1;
        }
    }

    /// Puts a block that nobody holds where it waits for its next user.
    pub(crate) fn rest(&mut self, id: BlockId) {
        // Of two owners the other may have released it before.
        #[cfg(all(feature = "sabotage", debug_assertions))]
        self.take_out(id);
        if self.current <= self.completed {
            self.enqueue(id);
        } else {
            let block = &mut self.blocks[id.index()];
            block.place = Place::Retiring(self.current);
            self.retiring.insert(&mut self.links, id, block.location.tier);
        }
    }

    /// Makes the blocks claimable whose release lies in an epoch up to `epoch`.
    pub(crate) fn complete(&mut self, epoch: Epoch) {
        self.completed = self.completed.max(epoch);
        // Stamps never fall from front to back, for they are the epoch that was current.
        while let Some(id) = self.retiring.front() {
            let block = &self.blocks[id.index()];
            match block.place {
                Place::Retiring(stamp) if stamp > self.completed => break,
                _ => {}
            }
            self.retiring.remove(&mut self.links, id, block.location.tier);
            self.enqueue(id);
        }
    }

    /// Claims `count` primary blocks; there are as many.
    pub(crate) fn claim(&mut self, count: usize) -> Vec<Claim> {
        let mut claims = Vec::with_capacity(count);
        for _ in 0..count {
            let Some(id) = self.next_primary() else { break };
            claims.push(self.displace(id));
        }
        self.counters.claimed += claims.len() as u64;
        claims
    }

    #[cfg(not(all(feature = "sabotage", debug_assertions)))]
    fn next_primary(&mut self) -> Option<BlockId> {
        self.pop(Tier::Primary)
    }

    fn pop(&mut self, tier: Tier) -> Option<BlockId> {
        self.queues[tier.index()].pop(&mut self.links)
    }

    /// Takes a primary block that has just left its queue, and finds its content another slot.
    fn displace(&mut self, id: BlockId) -> Claim {
        let Some(hash) = self.unname(id) else {
            return self.claimed(id, false, None);
        };
        self.counters.evicted += 1;
        let keep = self.blocks[id.index()].priority >= self.offload_min_priority;
        let target = keep.then(|| self.pop(Tier::Secondary));
        let Some(target) = target.flatten() else {
            self.counters.dropped += 1;
            return self.claimed(id, true, None);
        };
        if self.unname(target).is_some() {
            self.counters.dropped += 1;
        }
        self.swap_locations(id, target);
        let (from, to) =
            (self.blocks[target.index()].location.slot, self.blocks[id.index()].location.slot);
        // No lookup can find the content before the copy is committed.
        self.blocks[id.index()].place = Place::Moving;
        self.moving.insert(id, hash);
        self.claimed(target, true, Some(Move { block: id, from, to }))
    }

    fn claimed(&mut self, id: BlockId, evicted: bool, offload: Option<Move>) -> Claim {
        let block = &mut self.blocks[id.index()];
        block.place = Place::Claimed;
        block.priority = Priority::DEFAULT;
        Claim { block: id, location: block.location, evicted, offload }
    }

    /// Names content that has arrived at its secondary slot, so that lookups find it.
    pub(crate) fn commit_offload(&mut self, moved: Move) {
        let Some(hash) = self.moving.remove(&moved.block) else {
            return self.give_up(moved.block);
        };
        let Entry::Vacant(name) = self.index.entry(hash) else {
            // Computed again meanwhile. The newer copy is nearer, so this one is dropped.
            return self.give_up(moved.block);
        };
        name.insert(moved.block);
        self.blocks[moved.block.index()].hash = Some(hash);
        self.counters.offloaded += 1;
        self.rest(moved.block);
    }

    /// Gives up content whose copy was not made.
    pub(crate) fn abort_offload(&mut self, moved: Move) {
        self.moving.remove(&moved.block);
        self.give_up(moved.block);
    }

    fn give_up(&mut self, moved: BlockId) {
        self.counters.dropped += 1;
        self.rest(moved);
    }

    /// Takes a name away wherever it is, also from content on its way. Whether anybody bore it.
    pub(crate) fn remove(&mut self, hash: BlockHash) -> bool {
        let moving = self.moving.len();
        self.moving.retain(|_, name| *name != hash);
        let Some(&id) = self.index.get(&hash) else { return self.moving.len() != moving };
        self.forget(id);
        true
    }

    /// Names a claimed block's content, or pins the block that holds the same content already.
    /// The pin that this returns is counted.
    pub(crate) fn register(
        &mut self,
        id: BlockId,
        hash: BlockHash,
        priority: Priority,
    ) -> Option<BlockId> {
        if let Some(&existing) = self.index.get(&hash) {
            let found = &self.blocks[existing.index()];
            let near = found.location.tier == Tier::Primary;
            if near || found.references > 0 {
                self.counters.duplicates += 1;
                self.pin(existing);
                return Some(existing);
            }
            // An unused copy in host memory gives way to the one that is nearer.
            self.forget(existing);
        }
        #[cfg(all(feature = "sabotage", debug_assertions))]
        self.part_from_other_owner(id);
        self.index.insert(hash, id);
        let block = &mut self.blocks[id.index()];
        block.hash = Some(hash);
        block.priority = priority;
        block.references += 1;
        block.place = Place::Pinned;
        self.counters.registered += 1;
        None
    }

    /// Takes the name from a block's content: no lookup finds it any more.
    pub(crate) fn forget(&mut self, id: BlockId) {
        if self.unname(id).is_some() {
            self.counters.dropped += 1;
        }
        if let Place::Queued(_) = self.blocks[id.index()].place {
            self.take_out(id);
            self.enqueue(id);
        }
    }

    /// Exchanges the slots of two blocks. Neither is in a queue, or its queue would be wrong.
    pub(crate) fn swap_locations(&mut self, one: BlockId, other: BlockId) {
        let location = self.blocks[one.index()].location;
        self.blocks[one.index()].location = self.blocks[other.index()].location;
        self.blocks[other.index()].location = location;
    }

    fn unname(&mut self, id: BlockId) -> Option<BlockHash> {
        let hash = self.blocks[id.index()].hash.take()?;
        self.index.remove(&hash);
        Some(hash)
    }

    /// Removes a block from the list that its place names, if any.
    fn take_out(&mut self, id: BlockId) {
        let block = &self.blocks[id.index()];
        match block.place {
            Place::Queued(class) => {
                let tier = block.location.tier.index();
                self.queues[tier].remove(&mut self.links, id, class);
            }
            Place::Retiring(_) => {
                self.retiring.remove(&mut self.links, id, block.location.tier);
            }
            Place::Absent | Place::Claimed | Place::Pinned | Place::Moving => {}
        }
    }

    /// Content goes to the back of its priority, a block without content before all others.
    fn enqueue(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let queues = &mut self.queues[block.location.tier.index()];
        if block.hash.is_some() {
            block.place = Place::Queued(Some(block.priority));
            queues.insert_last(&mut self.links, id, Some(block.priority));
        } else {
            block.place = Place::Queued(None);
            queues.insert_first(&mut self.links, id, None);
        }
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
impl State {
    /// Keeps the lists whole when a block with two owners is named by the second: its bytes are what
    /// a test wants to see damaged.
    fn part_from_other_owner(&mut self, id: BlockId) {
        self.take_out(id);
        self.unname(id);
    }

    fn next_primary(&mut self) -> Option<BlockId> {
        if let Some(stale) = self.sabotage.stale() {
            // Its other owner may have released it already.
            self.take_out(stale);
            return Some(stale);
        }
        let id = self.pop(Tier::Primary)?;
        self.sabotage.peeked(id);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State::new(&PoolConfig::primary_only(2)).unwrap()
    }

    #[test]
    fn a_release_of_what_is_not_held_is_counted_and_changes_nothing() {
        let mut state = state();
        let id = state.claim(1)[0].block;
        state.release_claimed(id);
        state.release_claimed(id);
        state.unpin(id);
        assert_eq!(state.counters.misuses, 2);
        assert_eq!(state.blocks[id.index()].references, 0);
        assert_eq!(state.queues[0].iter(&state.links).count(), 2);
        assert_eq!(state.claim(2).iter().map(|claim| claim.block).collect::<Vec<_>>().len(), 2);
    }

    #[test]
    fn a_count_that_reaches_its_end_holds_the_block_for_good() {
        let mut state = state();
        let id = state.claim(1)[0].block;
        assert_eq!(state.register(id, BlockHash::from_u128(1), Priority::DEFAULT), None);
        state.blocks[id.index()].references = u32::MAX - 1;
        state.pin(id);
        state.pin(id);
        for _ in 0..3 {
            state.unpin(id);
        }
        assert_eq!(state.blocks[id.index()].references, u32::MAX);
        assert_eq!(state.blocks[id.index()].place, Place::Pinned);
    }
}
