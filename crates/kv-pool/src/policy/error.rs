//! Why a policy cannot be made.

use crate::BLOCKS_MAX;

/// Why a policy, or a rule for what to store, cannot be made.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// More blocks than a pool can have.
    #[error("a policy for {blocks} blocks, more than the largest pool, {BLOCKS_MAX}")]
    TooManyBlocks {
        /// Blocks asked for.
        blocks: u64,
    },
    /// The tables do not fit into memory.
    #[error("no memory for the tables of a policy for {blocks} blocks")]
    OutOfMemory {
        /// Blocks asked for.
        blocks: u64,
    },
    /// A text that names no [`PolicyKind`](super::PolicyKind).
    #[error("unknown policy {found:?}; expected lru or hit_density")]
    UnknownPolicy {
        /// The text.
        found: String,
    },
    /// A text that names no [`StoreKind`](crate::store::StoreKind).
    #[error("unknown rule {found:?} for what to store; expected evidence or all")]
    UnknownStore {
        /// The text.
        found: String,
    },
}

crate::error::one_line_debug!(PolicyError);

/// A table of `len` times `value`, for a policy of `blocks` blocks.
pub(crate) fn table<T: Clone>(len: usize, value: T, blocks: u64) -> Result<Vec<T>, PolicyError> {
    let mut table = Vec::new();
    table.try_reserve_exact(len).map_err(|_| PolicyError::OutOfMemory { blocks })?;
    table.resize(len, value);
    Ok(table)
}

/// `blocks` as an index bound, if a pool can be so large.
pub(crate) fn check_blocks(blocks: u64) -> Result<usize, PolicyError> {
    if blocks > BLOCKS_MAX {
        return Err(PolicyError::TooManyBlocks { blocks });
    }
    usize::try_from(blocks).map_err(|_| PolicyError::TooManyBlocks { blocks })
}
