//! How large a pool is, and what it may move to host memory.

use crate::Priority;

/// The most blocks of all tiers together: block tables hold slots as `i32`.
pub const BLOCKS_MAX: u64 = i32::MAX as u64;

/// What a [`BlockPool`](crate::BlockPool) is made with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PoolConfig {
    /// Blocks that the primary tier may come to have.
    pub primary_blocks: u64,
    /// Blocks that the primary tier has memory for from the start; the rest is added with
    /// [`add_primary_slots`](crate::BlockPool::add_primary_slots).
    pub primary_ready: u64,
    /// Blocks of the secondary tier; 0 for none.
    pub secondary_blocks: u64,
    /// Evicted content of at least this priority moves to the secondary tier, other is dropped.
    pub offload_min_priority: Priority,
}

impl PoolConfig {
    /// A pool of `blocks` primary blocks that are all there, without a secondary tier.
    #[must_use]
    pub fn primary_only(blocks: u64) -> Self {
        Self { primary_blocks: blocks, primary_ready: blocks, ..Self::default() }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.primary_blocks == 0 {
            return Err(ConfigError::NoBlocks);
        }
        if self.primary_ready > self.primary_blocks {
            return Err(ConfigError::ReadyOverCapacity {
                ready: self.primary_ready,
                capacity: self.primary_blocks,
            });
        }
        match self.primary_blocks.checked_add(self.secondary_blocks) {
            Some(blocks) if blocks <= BLOCKS_MAX => Ok(()),
            _ => Err(ConfigError::TooManyBlocks {
                primary: self.primary_blocks,
                secondary: self.secondary_blocks,
            }),
        }
    }
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            primary_blocks: 0,
            primary_ready: 0,
            secondary_blocks: 0,
            offload_min_priority: Priority::OFFLOAD_MIN,
        }
    }
}

/// Why a pool was not made.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A pool without primary blocks can serve nobody.
    #[error("primary_blocks is 0")]
    NoBlocks,
    /// More blocks are ready than there may ever be.
    #[error("primary_ready is {ready}, more than the {capacity} primary_blocks")]
    ReadyOverCapacity {
        /// What was asked for.
        ready: u64,
        /// The most that is possible.
        capacity: u64,
    },
    /// More blocks than a block table can name.
    #[error("{primary} primary and {secondary} secondary blocks are more than {BLOCKS_MAX}")]
    TooManyBlocks {
        /// Primary blocks asked for.
        primary: u64,
        /// Secondary blocks asked for.
        secondary: u64,
    },
    /// The host has not enough memory to record so many blocks.
    #[error("no host memory for the records of {blocks} blocks")]
    OutOfMemory {
        /// Blocks of both tiers.
        blocks: u64,
    },
}
