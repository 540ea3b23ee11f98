//! Blocks whose memory a tier has borrowed, to have it read or written without a copy.

use std::fmt;
use std::sync::Arc;

use crate::{Batch, HostPiece};

/// The memory of a block that a tier has borrowed, and reads or writes by itself: see
/// [`BlockSource::lend`](crate::BlockSource::lend) and [`BlockSink::lend`](crate::BlockSink::lend).
///
/// Dropping it gives the memory back: nothing of the tier may touch it from then on. Until then the block's ticket
/// does not end, even if the worker gives the block up, so that nobody else is given the memory. A tier gives it back without
/// being polled, or in [`poll`](crate::LowerTier::poll).
#[must_use = "dropping it gives the memory back"]
pub struct LentBlock {
    batch: Arc<Batch>,
    index: u32,
    pieces: Vec<HostPiece>,
}

impl LentBlock {
    pub(crate) fn new(batch: &Arc<Batch>, index: u32, pieces: Vec<HostPiece>) -> Self {
        Self { batch: Arc::clone(batch), index, pieces }
    }

    /// The memory, piece after piece.
    #[must_use]
    pub fn pieces(&self) -> &[HostPiece] {
        &self.pieces
    }

    /// Whether the worker has asked for its memory back: what is read of it may be of another block by now, and what is
    /// written to it is of no use.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.batch.is_fenced()
    }

    /// Whether it is the block of a batch at a position.
    pub(crate) fn is_of(&self, batch: &Arc<Batch>, index: u32) -> bool {
        Arc::ptr_eq(&self.batch, batch) && self.index == index
    }
}

impl Drop for LentBlock {
    fn drop(&mut self) {
        self.batch.give_back(self.index);
    }
}

impl fmt::Debug for LentBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentBlock").field("pieces", &self.pieces.len()).finish_non_exhaustive()
    }
}
