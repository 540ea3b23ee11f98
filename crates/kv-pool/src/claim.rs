//! Claimed blocks: primary blocks that one owner writes, until the content gets a name.

use crate::pin::BlockPin;
use crate::state::{Claim, Move};
use crate::{BlockHash, BlockId, BlockPool, Location, Priority, SlotIndex};

/// A primary block that belongs to the holder alone. No lookup finds it.
///
/// Dropped without a name, it is the next to be claimed once its epoch is complete.
#[derive(Debug)]
#[must_use = "dropping a claimed block gives it back"]
pub struct ClaimedBlock {
    pool: BlockPool,
    block: BlockId,
    location: Location,
    evicted: bool,
    offload: Option<Offload>,
    owned: bool,
}

/// What became of content that was given a name.
#[derive(Debug)]
pub enum Registration {
    /// Lookups find it from now on. The block is pinned by the pin.
    New(BlockPin),
    /// The same content was cached already. Whoever asks for the hash is given `existing`.
    Duplicate {
        /// A pin of the block that has the name; it may lie in either tier.
        existing: BlockPin,
        /// The block that was to be named, still claimed.
        own: ClaimedBlock,
    },
}

impl ClaimedBlock {
    pub(crate) fn new(pool: &BlockPool, claim: Claim) -> Self {
        let offload = claim.offload.map(|moved| Offload { pool: pool.clone(), moved, open: true });
        Self {
            pool: pool.clone(),
            block: claim.block,
            location: claim.location,
            evicted: claim.evicted,
            offload,
            owned: true,
        }
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Its slot in the primary tier.
    #[must_use]
    pub fn slot(&self) -> SlotIndex {
        self.location.slot
    }

    /// Whether cached content lost this slot to the claim.
    #[must_use]
    pub fn evicted(&self) -> bool {
        self.evicted
    }

    /// The move of the evicted content to the secondary tier, if there is to be one, once.
    ///
    /// The slot must not be written before that copy has read it. So keep this block, or the pin
    /// that it becomes, until the copy is enqueued: dropped earlier, the slot is another claim's.
    #[must_use]
    pub fn take_offload(&mut self) -> Option<Offload> {
        self.offload.take()
    }

    /// Gives the content of the block its name, so that lookups find and share it.
    ///
    /// The content must have been written, or its writing enqueued where all readers come after
    /// it. An offload that was not taken is given up.
    pub fn register(mut self, hash: BlockHash, priority: Priority) -> Registration {
        let given_up = self.offload.take().map(Offload::into_move);
        let mut state = self.pool.shared.state.lock();
        if let Some(moved) = given_up {
            state.abort_offload(moved);
        }
        let existing = state.register(self.block, hash, priority);
        let location = existing.map(|block| state.blocks[block.index()].location);
        drop(state);
        match existing.zip(location) {
            Some((block, location)) => {
                let existing = BlockPin::counted(&self.pool, block, location);
                Registration::Duplicate { existing, own: self }
            }
            None => {
                self.owned = false;
                Registration::New(BlockPin::counted(&self.pool, self.block, self.location))
            }
        }
    }

    pub(crate) fn has_offload(&self) -> bool {
        self.offload.is_some()
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.pool.is(pool)
    }

    /// Hands the block over to the caller, who holds it from now on.
    pub(crate) fn into_block(mut self) -> BlockId {
        self.owned = false;
        self.block
    }
}

impl Drop for ClaimedBlock {
    fn drop(&mut self) {
        let given_up = self.offload.take().map(Offload::into_move);
        if given_up.is_none() && !self.owned {
            return;
        }
        let mut state = self.pool.shared.state.lock();
        if let Some(moved) = given_up {
            state.abort_offload(moved);
        }
        if self.owned {
            state.release_claimed(self.block);
        }
    }
}

/// Evicted content on its way from a primary slot to a secondary one.
///
/// The caller copies, then commits. Lookups find the content again after the commit. Dropped
/// without a commit, the content is given up.
#[derive(Debug)]
#[must_use = "evicted content is lost unless its copy is committed"]
pub struct Offload {
    pool: BlockPool,
    moved: Move,
    open: bool,
}

impl Offload {
    /// The primary slot that holds the content.
    #[must_use]
    pub fn from(&self) -> SlotIndex {
        self.moved.from
    }

    /// The secondary slot that it goes to.
    #[must_use]
    pub fn to(&self) -> SlotIndex {
        self.moved.to
    }

    /// Says that the copy is done, or enqueued where every later use of the secondary slot comes
    /// after it.
    pub fn commit(mut self) {
        self.open = false;
        self.pool.shared.state.lock().commit_offload(self.moved);
    }

    /// Hands the move over to the caller, who ends it.
    fn into_move(mut self) -> Move {
        self.open = false;
        self.moved
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        if self.open {
            self.pool.shared.state.lock().abort_offload(self.moved);
        }
    }
}
