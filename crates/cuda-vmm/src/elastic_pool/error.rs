//! Errors of a pool of blocks.

use cuda_driver::DeviceError;
use cuda_driver::messages::one_line_debug;

use crate::memory_limit::{OverLimit, Verdict};

/// The reason why a pool did not grow. `ready_blocks` includes parked blocks that were at rest.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GrowError {
    /// More blocks than the pool has addresses for.
    #[error("cannot grow to {asked_blocks} blocks: the pool has {capacity_blocks}")]
    OverCapacity {
        /// Requested number of blocks.
        asked_blocks: u64,
        /// Maximum number of blocks of the pool.
        capacity_blocks: u64,
    },
    /// The device has too little memory now. This is expected; retry when memory is free.
    #[error(
        "growth to {asked_blocks} blocks with {ready_blocks} ready: CUDA_ERROR_OUT_OF_MEMORY (2)"
    )]
    OutOfMemory {
        /// Requested number of blocks.
        asked_blocks: u64,
        /// Number of ready blocks.
        ready_blocks: u64,
    },
    /// A shared limit leaves no room. Retry when the limit was raised or memory under it was
    /// released.
    #[error(
        "cannot grow to {asked_blocks} blocks with {ready_blocks} ready: a shared limit leaves no room"
    )]
    OverLimit {
        /// Requested number of blocks.
        asked_blocks: u64,
        /// Number of ready blocks.
        ready_blocks: u64,
        /// The limit and the bytes in use.
        #[source]
        source: OverLimit,
    },
    /// The device has too little free memory beyond what must stay free. Retry when other users
    /// have freed memory.
    #[error(
        "cannot grow to {asked_blocks} blocks with {ready_blocks} ready: the device cannot spare the memory"
    )]
    NoHeadroom {
        /// Requested number of blocks.
        asked_blocks: u64,
        /// Number of ready blocks.
        ready_blocks: u64,
        /// The device's memory figures.
        #[source]
        source: Verdict,
    },
    /// Pages retired by an earlier shrink are still in use. Retry when they are at rest.
    #[error("page {index} is not yet at rest after shrinking, {ready_blocks} blocks are ready")]
    Retiring {
        /// The first such page.
        index: u64,
        /// Number of ready blocks.
        ready_blocks: u64,
    },
    /// A page is in the way that cannot be unmapped after an earlier failure.
    #[error("page {index} is in quarantine, {ready_blocks} blocks are ready")]
    Quarantined {
        /// The first such page.
        index: u64,
        /// Number of ready blocks.
        ready_blocks: u64,
    },
    /// The device refused.
    #[error("the pool did not grow, {ready_blocks} blocks are ready")]
    Device {
        /// Number of ready blocks.
        ready_blocks: u64,
        /// The device's error.
        #[source]
        source: DeviceError,
    },
}

impl GrowError {
    /// Whether the same call may succeed later without a repair.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.is_out_of_memory() || matches!(self, Self::Retiring { .. })
    }

    /// Whether the cause is missing memory: of the device, under a limit, or beyond the headroom. A
    /// smaller growth may succeed.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OverLimit { .. } | Self::NoHeadroom { .. })
    }
}

/// A block that is not ready: it lies beyond the pool's present size.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("block {block} is not ready: {ready_blocks} blocks are")]
pub struct BlockNotReady {
    /// The block.
    pub block: u64,
    /// Number of ready blocks.
    pub ready_blocks: u64,
}

one_line_debug!(GrowError, BlockNotReady);
