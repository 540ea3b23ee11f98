//! The tables of policies, and of how many blocks they can be.

use crate::{BLOCKS_MAX, ConfigError};

/// A table of `len` times `value`, for a policy of `blocks` blocks.
pub(crate) fn table<T: Clone>(len: usize, value: T, blocks: u64) -> Result<Vec<T>, ConfigError> {
    let mut table = Vec::new();
    table.try_reserve_exact(len).map_err(|_| ConfigError::PolicyMemory { blocks })?;
    table.resize(len, value);
    Ok(table)
}

/// `blocks` as an index bound, if a pool can be so large.
pub(crate) fn check_blocks(blocks: u64) -> Result<usize, ConfigError> {
    if blocks > BLOCKS_MAX {
        return Err(ConfigError::PolicyBlocks { blocks });
    }
    usize::try_from(blocks).map_err(|_| ConfigError::PolicyBlocks { blocks })
}
