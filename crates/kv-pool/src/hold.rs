//! What keeps blocks from being evicted or moved: a count of owners for one reference, or for a list
//! of them.
//!
//! Pins of the same blocks share one count, so that cloning and dropping a pin of what stays held is
//! one atomic addition each, without a lock and without touching the pool. Only the last owner takes
//! the lock, and then all blocks are given back in one step (H9).
//!
//! Holds are used again. A spare one owns the pool, too: it goes from the pool to a claim, to a pin
//! and back without a count being touched.

use std::fmt;
use std::num::NonZeroU64;

use crate::guard;
use crate::state::PoolState;
use crate::sync::{Arc, is_sole};
use crate::view::Shared;
use crate::{BlockId, Location, RecordId, Tier};

/// A block, and where its content lies for as long as it is pinned.
///
/// One word, so that a list of one is handed on in two registers: the record's number, the tier, and
/// the block id counted from 1. Numbers and ids are below [`BLOCKS_MAX`](crate::BLOCKS_MAX), 2^31 - 1.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct BlockAt(NonZeroU64);

impl BlockAt {
    const TIER_SHIFT: u32 = 31;
    const ID_SHIFT: u32 = 33;

    #[inline]
    pub(crate) fn new(block: RecordId, location: Location) -> Self {
        let id = u64::from(location.id.0) + 1;
        let tier = location.tier.index() as u64;
        let word = u64::from(block.0) | tier << Self::TIER_SHIFT | id << Self::ID_SHIFT;
        let Some(word) = NonZeroU64::new(word) else { unreachable!("ids are counted from 1") };
        Self(word)
    }

    #[inline]
    pub(crate) fn block(self) -> RecordId {
        RecordId(self.0.get() as u32 & (u32::MAX >> 1))
    }

    #[inline]
    pub(crate) fn location(self) -> Location {
        let tier = Tier::from_bits((self.0.get() >> Self::TIER_SHIFT) as u32);
        Location { tier, id: BlockId((self.0.get() >> Self::ID_SHIFT) as u32 - 1) }
    }
}

impl fmt::Debug for BlockAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockAt").field(&self.block()).field(&self.location()).finish()
    }
}

/// A count of owners, by which they reach the pool.
///
/// # Invariants
///
/// One reference to each of `blocks` is counted in the pool. There are none while the hold is spare, or
/// stands for one block that its owners name.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) pool: Arc<Shared>,
    pub(crate) blocks: Vec<BlockAt>,
}

impl Hold {
    pub(crate) fn new(pool: &Arc<Shared>) -> Arc<Self> {
        Arc::new(Self { pool: Arc::clone(pool), blocks: Vec::new() })
    }

    /// Gives the references back, the last one first.
    pub(crate) fn give_back(&mut self, state: &mut PoolState) {
        guard!(
            "pool.list-is-released-tail-first",
            state.unpin_all(&self.blocks),
            else self.blocks.iter().for_each(|at| state.unpin(at.block()))
        );
        self.blocks.clear();
    }
}

/// Drops one owner of a list of blocks, and gives the blocks back if it was the last.
#[inline]
pub(crate) fn let_go(hold: Arc<Hold>) {
    // If another owner goes at the same time, whoever is last does it in `Hold::drop`.
    if Arc::strong_count(&hold) == 1 {
        give_back(hold);
    }
}

fn give_back(mut hold: Arc<Hold>) {
    // While it is locked, the pool is this function's, wherever the hold goes.
    let pool = Arc::clone(&hold.pool);
    let Some(own) = Arc::get_mut(&mut hold) else { return };
    let mut state = pool.state.lock();
    own.give_back(&mut state);
    state.spares.keep_hold(hold);
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Spare ones go while the lock is held.
        if self.blocks.is_empty() {
            return;
        }
        let pool = Arc::clone(&self.pool);
        self.give_back(&mut pool.state.lock());
    }
}

/// Drops one owner of one block, and gives the block back if it was the last.
#[inline]
pub(crate) fn unpin(hold: Arc<Hold>, block: RecordId) {
    if is_sole(&hold) { unpin_last(hold, block) } else { leave(hold, block) }
}

/// Neither this nor [`leave`] is inlined: inlined, they make the drop of an empty list save registers
/// that it does not use.
#[inline(never)]
fn unpin_last(hold: Arc<Hold>, block: RecordId) {
    give_single_back(hold, |state| state.unpin(block));
}

#[inline(never)]
fn leave(hold: Arc<Hold>, block: RecordId) {
    if let Some(hold) = Arc::into_inner(hold) {
        // Another owner went at the same time.
        hold.pool.state.lock().unpin(block);
    }
}

/// Does the last of what a hold of one block was for, and keeps it for the next user.
#[inline]
pub(crate) fn give_single_back(hold: Arc<Hold>, last: impl FnOnce(&mut PoolState)) {
    // While it is locked, the pool is this function's, wherever the hold goes.
    let pool = Arc::clone(&hold.pool);
    let mut state = pool.state.lock();
    last(&mut state);
    state.spares.keep_hold(hold);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BLOCKS_MAX;

    #[test]
    fn a_block_and_its_place_come_back_from_their_word() {
        let last = (BLOCKS_MAX - 1) as u32;
        for (block, id) in [(0, 0), (0, last), (last, 0), (last, last), (5, 9)] {
            for tier in Tier::ALL {
                let location = Location { tier, id: BlockId(id) };
                let at = BlockAt::new(RecordId(block), location);
                assert_eq!((at.block(), at.location()), (RecordId(block), location));
            }
        }
    }
}
