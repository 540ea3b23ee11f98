//! How large a pool is, and what it may move to host memory.

use crate::retention::TokenRange;
use crate::{Priority, Tier};

/// The most blocks of all tiers together: block tables hold block ids as `i32`.
pub const BLOCKS_MAX: u64 = i32::MAX as u64;

/// What a [`BlockPool`](crate::BlockPool) is made with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PoolConfig {
    /// Blocks that the primary tier may come to have. It begins with all of them: a pool whose memory is yet
    /// to come gets a smaller [budget](crate::BlockPool::set_budget) at first.
    pub primary_blocks: u64,
    /// The same of the secondary tier; 0 for none.
    pub secondary_blocks: u64,
    /// The same of the third and of the fourth tier, which content comes to by
    /// [`begin_onboard`](crate::BlockPool::begin_onboard) alone.
    pub further_blocks: [u64; 2],
    /// Evicted content of at least this priority moves to the secondary tier, other is dropped.
    pub offload_min_priority: Priority,
}

impl PoolConfig {
    /// A pool of `blocks` primary blocks, without a secondary tier.
    #[must_use]
    pub fn primary_only(blocks: u64) -> Self {
        Self { primary_blocks: blocks, ..Self::default() }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.primary_blocks == 0 {
            return Err(ConfigError::NoBlocks);
        }
        let blocks = self.blocks().iter().try_fold(0_u64, |sum, &blocks| sum.checked_add(blocks));
        match blocks {
            Some(blocks) if blocks <= BLOCKS_MAX => Ok(()),
            _ => Err(ConfigError::TooManyBlocks {
                primary: self.primary_blocks,
                secondary: self.secondary_blocks,
                further: self.further_blocks,
            }),
        }
    }

    /// Blocks of each tier, the nearest first.
    pub(crate) fn blocks(&self) -> [u64; Tier::COUNT] {
        let [third, fourth] = self.further_blocks;
        [self.primary_blocks, self.secondary_blocks, third, fourth]
    }
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            primary_blocks: 0,
            secondary_blocks: 0,
            further_blocks: [0; 2],
            offload_min_priority: Priority::OFFLOAD_MIN,
        }
    }
}

/// Why a pool, a policy of it, or ranges of tokens to retain were not made.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Granules without blocks.
    #[error("granules of 0 blocks for the {tier:?} tier")]
    EmptyGranules {
        /// The tier.
        tier: Tier,
    },
    /// A pool without primary blocks can serve nobody.
    #[error("primary_blocks is 0")]
    NoBlocks,
    /// More blocks than a block table can name.
    #[error(
        "{primary} primary, {secondary} secondary and {further:?} further blocks are more than \
         {BLOCKS_MAX}"
    )]
    TooManyBlocks {
        /// Primary blocks asked for.
        primary: u64,
        /// Secondary blocks asked for.
        secondary: u64,
        /// Blocks of the third and fourth tier asked for.
        further: [u64; 2],
    },
    /// The host has not enough memory to record so many blocks.
    #[error("no host memory for the records of {blocks} blocks")]
    OutOfMemory {
        /// Blocks of all tiers.
        blocks: u64,
    },
    /// A policy for more blocks than a pool can have.
    #[error("a policy for {blocks} blocks, more than the largest pool, {BLOCKS_MAX}")]
    PolicyBlocks {
        /// Blocks asked for.
        blocks: u64,
    },
    /// The tables of a policy do not fit into memory.
    #[error("no memory for the tables of a policy for {blocks} blocks")]
    PolicyMemory {
        /// Blocks asked for.
        blocks: u64,
    },
    /// A text that names no [`PolicyKind`](crate::policy::PolicyKind).
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
    /// A range to retain contains no token.
    #[error("the range {} ends before its first token", span(range))]
    EmptyRange {
        /// The range.
        range: TokenRange,
    },
    /// A range to retain is open, and another one follows.
    #[error("the range {} is open, but {} follows", span(range), span(next))]
    OpenBeforeAnother {
        /// The open range.
        range: TokenRange,
        /// The one that follows.
        next: TokenRange,
    },
    /// Two ranges to retain have a token in common.
    #[error("the range {} overlaps {}", span(range), span(next))]
    RangesOverlap {
        /// The range that starts first.
        range: TokenRange,
        /// The other one.
        next: TokenRange,
    },
}

crate::error::one_line_debug!(ConfigError);

fn span(range: &TokenRange) -> String {
    match range.end {
        Some(end) => format!("{}..{end}", range.start),
        None => format!("{}..", range.start),
    }
}
