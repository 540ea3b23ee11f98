//! What can go wrong with a pool of blocks.

use cuda_driver::DeviceError;
use cuda_driver::messages::one_line_debug;

use crate::limit::{OverLimit, Verdict};
use crate::pages::ReserveError;

/// Why an elastic pool could not be made.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A block or the pool has no bytes.
    #[error("a pool of {capacity_blocks} blocks of {block_bytes} bytes has no bytes")]
    Empty {
        /// Bytes of a block.
        block_bytes: u64,
        /// Blocks of the pool.
        capacity_blocks: u64,
    },
    /// The pool's size does not fit in 64 bits.
    #[error(
        "{capacity_blocks} blocks of {block_bytes} bytes, in pages of {page_bytes}, overflow 64 bits"
    )]
    Overflow {
        /// Bytes of a block.
        block_bytes: u64,
        /// Blocks of the pool.
        capacity_blocks: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// The addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The first blocks could not be mapped.
    #[error(transparent)]
    Grow(#[from] GrowError),
}

/// Why a pool did not grow. `ready_blocks` are ready: those from before, and parked ones that were at rest.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GrowError {
    /// More blocks than the pool's addresses have room for.
    #[error("{asked_blocks} blocks asked of a pool of {capacity_blocks}")]
    OverCapacity {
        /// Blocks asked for.
        asked_blocks: u64,
        /// Most blocks of the pool.
        capacity_blocks: u64,
    },
    /// The device has too little memory now: an expected outcome, worth a retry when some is free.
    #[error(
        "growth to {asked_blocks} blocks with {ready_blocks} ready: CUDA_ERROR_OUT_OF_MEMORY (2)"
    )]
    OutOfMemory {
        /// Blocks asked for.
        asked_blocks: u64,
        /// Blocks that are ready.
        ready_blocks: u64,
    },
    /// A limit that several pools share leaves no room; worth a retry when it was raised or memory
    /// under it has gone.
    #[error("a shared limit leaves no room for {asked_blocks} blocks, {ready_blocks} are ready")]
    OverLimit {
        /// Blocks asked for.
        asked_blocks: u64,
        /// Blocks that are ready.
        ready_blocks: u64,
        /// The limit and what is in use.
        #[source]
        source: OverLimit,
    },
    /// The device has less free than is to stay free; worth a retry when others have freed memory.
    #[error("the device cannot spare memory for {asked_blocks} blocks, {ready_blocks} are ready")]
    NoHeadroom {
        /// Blocks asked for.
        asked_blocks: u64,
        /// Blocks that are ready.
        ready_blocks: u64,
        /// What the device has.
        #[source]
        source: Verdict,
    },
    /// Pages that an earlier shrinking retired are still in use; worth a retry when they are not.
    #[error("page {index} is not yet at rest after shrinking, {ready_blocks} blocks are ready")]
    Retiring {
        /// The first such page.
        index: u64,
        /// Blocks that are ready.
        ready_blocks: u64,
    },
    /// A page cannot be unmapped after an earlier failure and stands in the way.
    #[error("page {index} is in quarantine, {ready_blocks} blocks are ready")]
    Quarantined {
        /// The first such page.
        index: u64,
        /// Blocks that are ready.
        ready_blocks: u64,
    },
    /// The device refused.
    #[error("the pool did not grow, {ready_blocks} blocks are ready")]
    Device {
        /// Blocks that are ready.
        ready_blocks: u64,
        /// What it answered.
        #[source]
        source: DeviceError,
    },
}

impl GrowError {
    /// Whether the same call may succeed later without anything being repaired.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.is_out_of_memory() || matches!(self, Self::Retiring { .. })
    }

    /// Whether memory is what is missing: the device's, or what a limit or headroom leaves of it. A
    /// smaller growth may succeed.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OverLimit { .. } | Self::NoHeadroom { .. })
    }
}

/// A block that is not ready: beyond the pool's present size.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("block {block} asked of {ready_blocks} ready blocks")]
pub struct BlockNotReady {
    /// The block.
    pub block: u64,
    /// Blocks that are ready.
    pub ready_blocks: u64,
}

one_line_debug!(PoolError, GrowError, BlockNotReady);
