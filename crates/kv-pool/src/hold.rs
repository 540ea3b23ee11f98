//! What keeps blocks from being evicted or moved: a count of owners for one reference, or for a list
//! of them.
//!
//! Pins of the same blocks share one count, so that cloning and dropping a pin of what stays held is
//! one atomic addition each, without a lock and without touching the pool. Only the last owner takes
//! the lock, and then all blocks are given back in one step (H9).
//!
//! Both are used again. A token, which stands for one block, owns the pool also while it is spare: it
//! goes from the pool to a claim, to a pin and back without a count being touched.

use crate::pool::Shared;
use crate::state::PoolState;
use crate::sync::{Arc, into_inner, is_sole};
use crate::{Location, RecordId};

/// A block, and where its content lies for as long as it is pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct BlockAt {
    pub(crate) block: RecordId,
    pub(crate) location: Location,
}

/// # Invariants
///
/// With a pool, one reference to each of `blocks` is counted there. Without one, there are none.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    pool: Option<Arc<Shared>>,
    pub(crate) blocks: Vec<BlockAt>,
}

/// A count of owners of one block's reference, by which they reach the pool.
#[derive(Debug)]
pub(crate) struct Token {
    pub(crate) pool: Arc<Shared>,
}

impl Hold {
    pub(crate) fn capacity(&self) -> usize {
        self.blocks.capacity()
    }

    pub(crate) fn pool(&self) -> Option<&Arc<Shared>> {
        self.pool.as_ref()
    }

    /// The pool, which this hold forgets. The references are the caller's to give back.
    pub(crate) fn take_pool(&mut self) -> Option<Arc<Shared>> {
        self.pool.take()
    }

    /// Gives the references back, the last one first.
    pub(crate) fn give_back(&mut self, state: &mut PoolState) {
        state.unpin_all(&self.blocks);
        self.blocks.clear();
    }
}

/// Fills a hold that nobody else has. `fill` is given the list, which is empty, and counts a
/// reference for every block that it puts there.
pub(crate) fn fill(
    mut hold: Arc<Hold>,
    pool: Arc<Shared>,
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
    let mut state = pool.state.lock();
    own.give_back(&mut state);
    state.keep_hold(hold);
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(pool) = self.pool.take() else { return };
        self.give_back(&mut pool.state.lock());
    }
}

/// Drops one owner of a token, and gives the block back if it was the last.
#[inline]
pub(crate) fn unpin(token: Arc<Token>, block: RecordId) {
    if is_sole(&token) {
        give_token_back(token, |state| state.unpin(block));
    } else if let Some(Token { pool }) = into_inner(token) {
        // Another owner went at the same time.
        pool.state.lock().unpin(block);
    }
}

/// Does the last of what the token was for, and keeps it for the next user.
pub(crate) fn give_token_back(token: Arc<Token>, last: impl FnOnce(&mut PoolState)) {
    // While it is locked, the pool is this function's, wherever the token goes.
    let pool = Arc::clone(&token.pool);
    let mut state = pool.state.lock();
    last(&mut state);
    let left = state.keep_token(token);
    drop(state);
    drop(left);
}
