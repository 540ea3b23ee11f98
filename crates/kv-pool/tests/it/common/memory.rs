//! The memory behind the block ids, and who owns each, so that a wrong hand-out does visible harm.

#![allow(dead_code, reason = "each test program uses a part")]

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
#[cfg(all(shuttle, not(loom)))]
use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
#[cfg(not(any(loom, shuttle)))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use kv_pool::{
    BlockId, Claimed, Location, Pinned, Tier,
    moves::{Offload, Onboard},
};

use super::one::{One, OneMove};

const NOBODY: u32 = 0;

/// One number stands for the bytes of each block id. All accesses are relaxed: what orders them is the
/// pool's lock, as it must order the copies of an engine.
pub struct Memory {
    tiers: [Vec<AtomicU64>; 2],
    owners: Vec<AtomicU32>,
}

/// A block id that was given to somebody who should not have it, or changed under a reader.
#[derive(Debug, Eq, PartialEq)]
pub enum Harm {
    HandedOutTwice { block_id: usize, owner: u32, second: u32 },
    NotOurs { block_id: usize, owner: u32, expected: u32 },
    Overwritten { block_id: usize, read: u64, expected: u64 },
}

impl Memory {
    pub fn new(primary: usize, secondary: usize) -> Self {
        let block_ids = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            tiers: [block_ids(primary), block_ids(secondary)],
            owners: (0..primary).map(|_| AtomicU32::new(NOBODY)).collect(),
        }
    }

    fn at(&self, location: Location) -> &AtomicU64 {
        let tier = usize::from(location.tier == Tier::Secondary);
        &self.tiers[tier][location.id.index()]
    }

    fn copy(&self, from: Location, to: Location) {
        self.at(to).store(self.at(from).load(Relaxed), Relaxed);
    }

    /// Records that `owner`, which is not 0, has claimed a block.
    pub fn take(&self, block: &Claimed, owner: u32) -> Option<Harm> {
        self.take_id(block.block_id(), owner)
    }

    /// The same of a block id of the primary tier that nobody has.
    pub fn take_id(&self, block_id: BlockId, owner: u32) -> Option<Harm> {
        let block_id = block_id.index();
        let first = self.owners[block_id].swap(owner, Relaxed);
        (first != NOBODY).then_some(Harm::HandedOutTwice { block_id, owner: first, second: owner })
    }

    /// Records that a block is about to be shared or given back by its owner.
    pub fn give(&self, block: &Claimed, owner: u32) -> Option<Harm> {
        self.give_id(block.block_id(), owner)
    }

    /// The same of a block id of the primary tier.
    pub fn give_id(&self, block_id: BlockId, owner: u32) -> Option<Harm> {
        let block_id = block_id.index();
        let found = self.owners[block_id].swap(NOBODY, Relaxed);
        (found != owner).then_some(Harm::NotOurs { block_id, owner: found, expected: owner })
    }

    /// Records that the block which is onboarded to is about to be shared or handed on.
    pub fn give_target(&self, onboard: &Onboard, owner: u32) -> Option<Harm> {
        self.give_id(onboard.to(), owner)
    }

    pub fn write(&self, block: &Claimed, content: u64) {
        self.at(block.location()).store(content, Relaxed);
    }

    /// Writes a block id of the primary tier.
    pub fn fill(&self, block_id: BlockId, content: u64) {
        self.at(primary(block_id)).store(content, Relaxed);
    }

    /// Reads a block that is claimed.
    pub fn own(&self, block: &Claimed, expected: u64) -> Option<Harm> {
        self.expect(block.location(), expected)
    }

    /// Reads a block that is pinned.
    pub fn shared(&self, pin: &Pinned, expected: u64) -> Option<Harm> {
        self.expect(pin.location(), expected)
    }

    /// Reads a block id that somebody has pinned.
    pub fn holds(&self, location: Location, expected: u64) -> Option<Harm> {
        self.expect(location, expected)
    }

    /// What lies at a block id.
    pub fn read(&self, location: Location) -> u64 {
        self.at(location).load(Relaxed)
    }

    /// Copies pinned content to another tier, in either direction.
    pub fn move_content(&self, onboard: &Onboard) {
        self.copy(onboard.source(), onboard.target());
    }

    fn expect(&self, location: Location, expected: u64) -> Option<Harm> {
        let read = self.at(location).load(Relaxed);
        let block_id = location.id.index();
        (read != expected).then_some(Harm::Overwritten { block_id, read, expected })
    }

    pub fn offload(&self, offload: &Offload) {
        self.copy(primary(offload.from()), secondary(offload.to()));
    }

    pub fn onboard(&self, onboard: &Onboard) {
        self.copy(secondary(onboard.from()), primary(onboard.to()));
    }
}

fn primary(block_id: BlockId) -> Location {
    Location { tier: Tier::Primary, id: block_id }
}

fn secondary(block_id: BlockId) -> Location {
    Location { tier: Tier::Secondary, id: block_id }
}
