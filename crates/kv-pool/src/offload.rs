//! Evicted content on its way to the tier below.

use crate::BlockId;
use crate::pool::Shared;
use crate::state::{Claim, Move};
use crate::sync::Arc;

/// Evicted content on its way from a primary block to a secondary one.
///
/// The caller copies, then commits. Lookups find the content again after the commit. Dropped
/// without a commit, the content is given up. Until either, nobody is handed one of the two block ids,
/// except for the one who claimed the primary one.
#[derive(Debug)]
#[must_use = "evicted content is lost unless its copy is committed"]
pub struct Offload {
    /// `None` only when the move has ended.
    pool: Option<Arc<Shared>>,
    pub(crate) moved: Move,
}

impl Offload {
    /// The primary block that holds the content.
    #[must_use]
    pub fn from(&self) -> BlockId {
        self.moved.from
    }

    /// The secondary block that it goes to.
    #[must_use]
    pub fn to(&self) -> BlockId {
        self.moved.to
    }

    /// Says that the copy is done, or enqueued where every later use of either block comes after it.
    pub fn commit(mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().commit_offload(self.moved);
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().abort_offload(self.moved);
        }
    }
}

/// Takes the move out of a claim, which has it.
pub(crate) fn take_offload(pool: &Arc<Shared>, claim: &mut Claim, moved: Move) -> Offload {
    *claim = claim.without_offload();
    Offload { pool: Some(Arc::clone(pool)), moved }
}
