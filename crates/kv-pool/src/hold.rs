//! What keeps blocks from being evicted or moved: a list of references with one count of owners.
//!
//! Pins of the same blocks share one hold, so that cloning and dropping a pin of what stays held is
//! one atomic addition each, without a lock and without touching the pool. Only the last owner takes
//! the lock, and then all blocks are given back in one step (H9). Holds are used again.

use crate::state::State;
use crate::sync::Arc;
use crate::{BlockId, BlockPool, Location};

/// A block, and where its content lies for as long as it is pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockAt {
    /// The block.
    pub block: BlockId,
    /// Where it is.
    pub location: Location,
}

/// # Invariants
///
/// With a pool, one reference to each of `blocks` is counted there. Without one, there are none.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    pool: Option<BlockPool>,
    pub(crate) blocks: Vec<BlockAt>,
}

impl Hold {
    pub(crate) fn capacity(&self) -> usize {
        self.blocks.capacity()
    }

    /// Gives the references back to the pool whose lock the caller holds. The caller has a handle of
    /// it, too, so the one that is dropped here is not the last.
    pub(crate) fn give_back(&mut self, state: &mut State) {
        self.pool = None;
        state.unpin_all(&self.blocks);
        self.blocks.clear();
    }

    pub(crate) fn pool(&self) -> Option<&BlockPool> {
        self.pool.as_ref()
    }
}

/// Fills a hold that nobody else has. `fill` is given the list, which is empty, and counts a
/// reference for every block that it puts there.
pub(crate) fn fill(
    mut hold: Arc<Hold>,
    pool: BlockPool,
    fill: impl FnOnce(&mut Vec<BlockAt>),
) -> Arc<Hold> {
    match Arc::get_mut(&mut hold) {
        Some(own) => {
            own.pool = Some(pool);
            fill(&mut own.blocks);
            hold
        }
        // Spare holds have no other owner, so this does not happen.
        None => {
            let mut own = Hold { pool: Some(pool), blocks: Vec::new() };
            fill(&mut own.blocks);
            Arc::new(own)
        }
    }
}

/// Drops one owner of a hold, and gives the blocks back if it was the last.
#[inline]
pub(crate) fn let_go(hold: Arc<Hold>) {
    // If another owner goes at the same time, whoever is last does it in `Hold::drop`.
    if Arc::strong_count(&hold) == 1 {
        give_back(hold);
    }
}

fn give_back(mut hold: Arc<Hold>) {
    let Some(own) = Arc::get_mut(&mut hold) else { return };
    let Some(pool) = own.pool.take() else { return };
    let mut state = pool.shared.state.lock();
    state.unpin_all(&own.blocks);
    own.blocks.clear();
    state.keep_hold(hold);
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(pool) = self.pool.take() else { return };
        let mut state = pool.shared.state.lock();
        state.unpin_all(&self.blocks);
    }
}
