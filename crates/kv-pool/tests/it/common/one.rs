//! Lists of one block, as most tests use them: what the one block is, and what became of it.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use kv_pool::policy::RecordId;
use kv_pool::{BlockHash, BlockId, Claimed, Location, Naming, Pinned, moves::Onboard};

/// The block of a list of one.
pub trait One {
    fn block_id(&self) -> BlockId;
    fn location(&self) -> Location;
    fn block(&self) -> RecordId;
}

impl One for Pinned {
    fn block_id(&self) -> BlockId {
        self.location().id
    }

    fn location(&self) -> Location {
        assert_eq!(self.len(), 1);
        self.locations().next().unwrap()
    }

    fn block(&self) -> RecordId {
        self.records().next().unwrap()
    }
}

impl One for Claimed {
    fn block_id(&self) -> BlockId {
        assert_eq!(self.len(), 1);
        self.ids().next().unwrap()
    }

    fn location(&self) -> Location {
        Location { tier: self.tier(), id: self.block_id() }
    }

    fn block(&self) -> RecordId {
        self.records().next().unwrap()
    }
}

/// What became of one block that was to be named.
#[derive(Debug)]
pub enum Registration {
    New(Pinned),
    /// Others have written it already: the block, which is its owner's still.
    Duplicate(Claimed),
}

/// What became of one block that was to be moved.
#[derive(Debug)]
pub enum Moved {
    Moved(Pinned),
    Copied { copy: Claimed, source: Pinned },
}

pub trait OneClaimed: Sized {
    fn register_one(self, hash: BlockHash, naming: impl Into<Naming>) -> Registration;
    fn cache_one(self, hash: BlockHash, naming: impl Into<Naming>) -> bool;
}

impl OneClaimed for Claimed {
    fn register_one(mut self, hash: BlockHash, naming: impl Into<Naming>) -> Registration {
        assert_eq!(self.len(), 1);
        let mut named = Pinned::default();
        match self.register_onto(&[hash], naming, &mut named).unwrap() {
            0 => Registration::Duplicate(self),
            _ => Registration::New(named),
        }
    }

    fn cache_one(self, hash: BlockHash, naming: impl Into<Naming>) -> bool {
        self.cache(&[hash], naming).unwrap() == 1
    }
}

pub trait OneMove {
    fn source(&self) -> Location;
    fn target(&self) -> Location;
    fn from(&self) -> BlockId;
    fn to(&self) -> BlockId;
    fn commit_one(self) -> Moved;
}

impl OneMove for Onboard {
    fn source(&self) -> Location {
        assert_eq!(self.pairs().len(), 1);
        self.pairs().next().unwrap().0
    }

    fn target(&self) -> Location {
        self.pairs().next().unwrap().1
    }

    fn from(&self) -> BlockId {
        self.source().id
    }

    fn to(&self) -> BlockId {
        self.target().id
    }

    fn commit_one(self) -> Moved {
        let tier = self.target().tier;
        let done = self.commit();
        assert_eq!(done.pinned.len(), 1);
        if done.copies.is_empty() {
            assert_eq!(done.pinned.location().tier, tier);
            Moved::Moved(done.pinned)
        } else {
            assert_ne!(done.pinned.location().tier, tier);
            Moved::Copied { copy: done.copies, source: done.pinned }
        }
    }
}
