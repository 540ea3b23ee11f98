//! Which slot holds which block, and which block makes room for another: slots are the blocks of a pool.

use kv_pool::policy::PolicyKind;
use kv_pool::{BlockHash, BlockPool, Claimed, GroupId, Pinned, PoolConfig, Priority, Tier};

use crate::OpenError;

/// A block: its group, and its name.
pub(crate) type Key = (GroupId, BlockHash);

/// What is known of a slot's record. The rest of its entry is the same in the whole file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Kept {
    pub(crate) name: BlockHash,
    pub(crate) group: GroupId,
    pub(crate) generation: u64,
    pub(crate) length: u64,
    pub(crate) head: u32,
    pub(crate) sum: u64,
    pub(crate) key: Option<u64>,
}

impl Kept {
    pub(crate) fn block(&self) -> Key {
        (self.group, self.name)
    }
}

/// The slots of a file.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Its blocks are the slots. A block has a name there as long as its record can be loaded.
    pool: BlockPool,
    /// The records of slots that can be loaded, and of those that the table does not have yet.
    kept: Vec<Option<Kept>>,
}

/// A slot that is to be written.
#[derive(Debug)]
pub(crate) struct ClaimedSlot {
    claimed: Claimed,
    pub(crate) slot: u64,
}

/// The name of a block in the pool. Blocks of two groups may have the same name.
fn pool_name((group, name): Key) -> BlockHash {
    const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    BlockHash::from_u128(name.to_u128() ^ SPREAD.wrapping_mul(group.0.into()))
}

impl Slots {
    pub(crate) fn new(slots: u64, policy: PolicyKind) -> Result<Self, OpenError> {
        let no_memory = || OpenError::NoMemory { slots };
        let mut builder = BlockPool::builder(&PoolConfig::primary_only(slots));
        if let Some(policy) = policy.make(slots).map_err(|_| no_memory())? {
            builder = builder.policy(Tier::Primary, policy);
        }
        let pool = builder.build().map_err(|_| no_memory())?;
        let mut kept = Vec::new();
        kept.try_reserve_exact(slots as usize).map_err(|_| no_memory())?;
        kept.resize(slots as usize, None);
        Ok(Self { pool, kept })
    }

    /// Takes in records that were there when the file was opened; those that were written longest ago leave first. Of
    /// two records of one block, the older one is passed over.
    pub(crate) fn restore(&mut self, records: &[Option<Kept>]) -> Vec<Key> {
        let mut found = Vec::new();
        let newest =
            (0..).zip(records).filter_map(|(slot, kept)| Some((kept.as_ref()?.generation, slot)));
        let Some((_, newest)) = newest.max() else { return found };
        let Ok(mut first) = self.pool.claim(records.len()) else { return found };
        // Slots are written in turn, so the oldest one is behind the newest one.
        let behind = first.split_off(newest + 1);
        for mut slots in [behind, first] {
            while let Some(claimed) = slots.take_first() {
                let Some(slot) = claimed.ids().next().map(|id| id.index() as u64) else { continue };
                let Some(kept) = records.get(slot as usize).copied().flatten() else { continue };
                let before = self.slot_of(kept.block());
                if let Some(before) = before {
                    let older =
                        self.kept[before as usize].is_none_or(|of| of.generation < kept.generation);
                    if !older {
                        continue;
                    }
                    self.remove(kept.block());
                }
                self.kept[slot as usize] = Some(kept);
                self.publish(ClaimedSlot { claimed, slot });
                if before.is_none() {
                    found.push(kept.block());
                }
            }
        }
        found
    }

    /// A slot that is to be written, and the block that made room for it; none if all are in use.
    pub(crate) fn claim(&mut self) -> Option<(ClaimedSlot, Option<Key>)> {
        let claimed = self.pool.claim_one().ok()?;
        let slot = claimed.ids().next()?.index() as u64;
        let evicted = self.kept[slot as usize].take();
        Some((ClaimedSlot { claimed, slot }, evicted.map(|kept| kept.block())))
    }

    /// Has loads find a slot's record.
    pub(crate) fn publish(&mut self, slot: ClaimedSlot) {
        let ClaimedSlot { mut claimed, slot } = slot;
        if let Some(kept) = &self.kept[slot as usize] {
            // There is one block, so it takes the name.
            drop(claimed.register(&[pool_name(kept.block())], Priority::DEFAULT));
        }
    }

    /// Holds the slot of a block for a load.
    pub(crate) fn find(&self, block: Key) -> Option<(Pinned, u64, Kept)> {
        let pinned = self.pool.find_and_pin(pool_name(block), Tier::Primary)?;
        let slot = pinned.ids().next()?.index() as u64;
        // Two groups may have two names that the pool takes for one.
        let kept = self.kept[slot as usize].filter(|kept| kept.block() == block)?;
        Some((pinned, slot, kept))
    }

    /// Forgets a block that loads find; its slot, if there is one.
    pub(crate) fn remove(&mut self, block: Key) -> Option<u64> {
        let slot = self.slot_of(block)?;
        self.pool.remove(pool_name(block));
        self.kept[slot as usize] = None;
        Some(slot)
    }

    /// The slot of a block that loads find.
    fn slot_of(&self, block: Key) -> Option<u64> {
        let (_, at) = self.pool.locate(pool_name(block))?;
        let slot = at.id.index() as u64;
        let same = self.kept[slot as usize].is_some_and(|kept| kept.block() == block);
        same.then_some(slot)
    }

    /// All blocks that there are.
    pub(crate) fn blocks(&self) -> Vec<Key> {
        self.kept.iter().flatten().map(Kept::block).collect()
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) -> Vec<Key> {
        let blocks = self.blocks();
        for &block in &blocks {
            self.remove(block);
        }
        self.kept.fill(None);
        blocks
    }

    /// Blocks that loads find, and whose records are encrypted with a key.
    pub(crate) fn of_key(&self, key: u64) -> Vec<Key> {
        let of_key = (0..).zip(&self.kept).filter_map(|(slot, kept)| Some((slot, kept.as_ref()?)));
        let of_key = of_key.filter(|(_, kept)| kept.key == Some(key));
        let found = of_key.filter(|(slot, kept)| self.slot_of(kept.block()) == Some(*slot));
        found.map(|(_, kept)| kept.block()).collect()
    }

    /// Slots whose records are encrypted.
    pub(crate) fn with_keys(&self) -> impl Iterator<Item = u64> {
        let kept = (0..).zip(&self.kept);
        kept.filter(|(_, kept)| kept.is_some_and(|kept| kept.key.is_some())).map(|(slot, _)| slot)
    }

    pub(crate) fn kept(&self, slot: u64) -> Option<&Kept> {
        self.kept.get(slot as usize)?.as_ref()
    }

    /// Notes what a claimed slot has come to hold, or that it holds nothing.
    pub(crate) fn set(&mut self, slot: u64, kept: Option<Kept>) {
        if let Some(of) = self.kept.get_mut(slot as usize) {
            *of = kept;
        }
    }

    /// Slots whose records loads find.
    pub(crate) fn used(&self) -> u64 {
        self.pool.stats().primary.cached
    }

    /// Slots that can be claimed, with or without a record.
    pub(crate) fn claimable(&self) -> u64 {
        self.pool.claimable() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(name: u128, generation: u64) -> Kept {
        let name = BlockHash::from_u128(name);
        Kept { name, group: GroupId(0), generation, length: 8, head: 0, sum: 0, key: None }
    }

    #[test]
    fn of_two_records_of_a_block_the_newer_one_is_found_whichever_comes_first() {
        for (generations, newer) in [([5, 3], 0), ([3, 5], 1)] {
            let [one, two] = generations.map(|generation| Some(kept(1, generation)));
            let mut slots = Slots::new(4, PolicyKind::Lru).unwrap();
            let found = slots.restore(&[one, two, None, Some(kept(2, 9))]);
            assert_eq!(found, [kept(1, 0).block(), kept(2, 0).block()]);
            let (_, slot, of) = slots.find(kept(1, 0).block()).unwrap();
            assert_eq!((slot, of), (newer, kept(1, 5)));
            assert_eq!((slots.used(), slots.claimable()), (2, 4));
        }
    }

    #[test]
    fn nothing_is_kept_or_found_after_all_was_forgotten() {
        let mut slots = Slots::new(2, PolicyKind::Lru).unwrap();
        slots.restore(&[Some(kept(1, 1)), Some(kept(2, 2))]);
        assert_eq!(slots.clear().len(), 2);
        assert_eq!((slots.used(), slots.claimable(), slots.blocks()), (0, 2, vec![]));
        assert!(slots.find(kept(1, 0).block()).is_none());
        let claimed = [slots.claim(), slots.claim()].map(|claim| claim.unwrap().1);
        assert_eq!(claimed, [None, None], "no block makes room");
    }
}
