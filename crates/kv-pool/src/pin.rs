//! Pins: references to cached content that keep it where it is.

use crate::{BlockHash, BlockId, BlockPool, Location, SlotIndex};

/// A reference to a block with content. While it lives, the block is neither evicted nor moved.
///
/// Clones are further references. Dropping one gives the reference back; for the blocks of one
/// request use [`BlockPool::release`], which keeps their order.
#[derive(Debug)]
pub struct BlockPin {
    pool: BlockPool,
    block: BlockId,
    location: Location,
    counted: bool,
}

impl BlockPin {
    /// A pin for a reference that has been counted. The location was read in the same hold of the
    /// lock, and stays true as long as the reference is counted.
    pub(crate) fn counted(pool: &BlockPool, block: BlockId, location: Location) -> Self {
        Self { pool: pool.clone(), block, location, counted: true }
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Where its content lies, for as long as this pin lives.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// The slot of the location.
    #[must_use]
    pub fn slot(&self) -> SlotIndex {
        self.location.slot
    }

    /// The name of the content; `None` if it was [removed](BlockPool::remove) from the index.
    #[must_use]
    pub fn hash(&self) -> Option<BlockHash> {
        self.pool.shared.state.lock().blocks[self.block.index()].hash
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub(crate) fn belongs_to(&self, pool: &BlockPool) -> bool {
        self.pool.is(pool)
    }

    /// Hands the counted reference over to the caller.
    pub(crate) fn into_block(mut self) -> BlockId {
        self.counted = false;
        self.block
    }
}

impl Clone for BlockPin {
    fn clone(&self) -> Self {
        self.pool.shared.state.lock().pin(self.block);
        Self::counted(&self.pool, self.block, self.location)
    }
}

impl Drop for BlockPin {
    fn drop(&mut self) {
        if self.counted {
            self.pool.shared.state.lock().unpin(self.block);
        }
    }
}
