//! Errors, one enum for each family of operations.

use cuda_driver::messages::{ByteSize, one_line_debug};
use cuda_driver::{CopyError, DeviceError, ModuleError};
use cuda_vmm::{GrowError, elastic::AheadError};
use kv_kernels::{
    error::{PagedKvError, ShapeError},
    link::TransportError,
};
use kv_pool::policy::PolicyError;
use kv_pool::{ClaimError, ConfigError, moves::OnboardError, tenants::TenantError};
use kv_stage::error::{AcquireError, PartError, StageError, StagingError, TableError};

use crate::{OpenStep, OptionsError};

/// Why a cache was not built.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The options contradict each other or cannot be met anywhere.
    #[error("no cache can have these options")]
    Options(#[from] OptionsError),
    /// The layers of one device have no shape.
    #[error("no cache can have this share of the layers on one device")]
    Shape(#[from] ShapeError),
    /// The pool refused its size.
    #[error("no cache can have a block pool of this size")]
    Pool(#[from] ConfigError),
    /// An eviction policy could not be made.
    #[error("the eviction policy of the cache could not be made")]
    Policy(#[from] PolicyError),
    /// No addresses could be reserved.
    #[error("no addresses could be reserved for the cache's blocks")]
    Memory(#[from] cuda_vmm::PoolError),
    /// The memory could not be described to the kernels.
    #[error("the cache's blocks could not be described to the kernels")]
    Paged(#[from] PagedKvError),
    /// The kernels could not be loaded.
    #[error("the cache's kernels could not be loaded")]
    Kernels(#[from] ModuleError),
    /// The staging buffers could not be pinned.
    #[error("the cache's staging buffers could not be made")]
    Staging(#[from] StagingError),
    /// The block table is not possible.
    #[error("the cache's block table could not be made")]
    Table(#[from] TableError),
    /// A span of the reservation is not where it should be.
    #[error("the addresses reserved for the cache's blocks are too few")]
    Span(#[from] CopyError),
    /// The device refused: a stream, an event, or pinned memory for the host tier.
    #[error("a device refused a call that builds the cache")]
    Device(#[from] DeviceError),
}

/// Why a request was not admitted, or a sequence not extended. No sequence holds more or fewer
/// blocks than before. Memory may have been mapped.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// A sequence has at least one token.
    #[error("a request of 0 tokens cannot be admitted")]
    NoTokens,
    /// The hashes are those of full blocks of the prompt.
    #[error("{hashes} block hashes for a prompt with {full_blocks} full blocks")]
    TooManyHashes {
        /// Hashes given.
        hashes: usize,
        /// Full blocks of the prompt.
        full_blocks: usize,
    },
    /// The sequence needs more columns than the block table has.
    #[error("a sequence of {blocks} blocks is too long: a row of the block table has {max}")]
    TooLong {
        /// Blocks needed.
        blocks: u64,
        /// The most that a sequence may have.
        max: u64,
    },
    /// The sequence needs more blocks than there are: it can never be admitted.
    #[error("a sequence of {blocks} blocks never fits: the cache has {capacity}")]
    NeverFits {
        /// Blocks needed.
        blocks: u64,
        /// Blocks of the device.
        capacity: u64,
    },
    /// Every row of the block table is taken: an expected outcome.
    #[error("all {rows} rows of the block table are in use")]
    NoRow {
        /// Rows of the table.
        rows: u32,
    },
    /// Not enough blocks are free, or the tenant may not hold so many: an expected outcome. Try again
    /// when sequences were released and steps completed. There may be fewer blocks than the cache was built
    /// for because memory has run out; the cache asks for it again by itself.
    #[error("too few blocks are free for the sequence")]
    NoSpace(#[source] ClaimError),
    /// The sequence belongs to another cache.
    #[error("the sequence belongs to another cache")]
    ForeignSequence,
    /// Device memory could not be mapped, though memory is left.
    #[error("memory could not be mapped under device blocks")]
    Grow(#[from] GrowError),
    /// The worker that maps memory ahead of need has ended, by a panic or with the device.
    #[error("the worker that maps device memory ahead of need has stopped")]
    Ahead(#[from] AheadError),
    /// The pool refused to bring a block back: a defect of this crate.
    #[error("a block could not be brought back from host memory")]
    Onboard(#[source] OnboardError),
    /// The block table refused an entry.
    #[error("the sequence's row of the block table could not be written")]
    Table(#[from] TableError),
}

impl AdmitError {
    /// Whether the same call may succeed later: after releases and completed steps, or when other
    /// users of the device free memory.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NoRow { .. } => true,
            Self::NoSpace(ClaimError::Tenant(error)) => match *error {
                TenantError::HeldMax { requested, held_max, .. } => requested <= held_max,
                TenantError::KeptForOthers { .. } => true,
                _ => false,
            },
            Self::NoSpace(_) => true,
            _ => false,
        }
    }
}

/// Why memory was not mapped under device blocks.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DemandError {
    /// The driver refused, though memory is left.
    #[error("memory could not be mapped under device blocks")]
    Grow(#[from] GrowError),
    /// The worker that maps memory ahead of need has ended, by a panic or with the device.
    #[error("the worker that maps device memory ahead of need has stopped")]
    Ahead(#[from] AheadError),
}

impl From<DemandError> for AdmitError {
    fn from(error: DemandError) -> Self {
        match error {
            DemandError::Grow(error) => error.into(),
            DemandError::Ahead(error) => error.into(),
        }
    }
}

/// Why a tenant was not given a quota.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// There is no such tenant, or more blocks would be reserved than exist.
    #[error("the tenant's quota was not set")]
    Tenant(#[from] TenantError),
    /// The memory under the reserved blocks could not be mapped.
    #[error("the tenant's quota was not set: the blocks to keep have no memory")]
    Memory(#[from] DemandError),
}

/// Why blocks were not made findable. Blocks before the refused one are findable.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// More hashes than the sequence has full blocks.
    #[error("{hashes} block hashes for a sequence with {full_blocks} full blocks")]
    TooManyHashes {
        /// Hashes given.
        hashes: usize,
        /// Full blocks of the sequence.
        full_blocks: usize,
    },
    /// The sequence belongs to another cache.
    #[error("the sequence belongs to another cache")]
    ForeignSequence,
    /// The block table refused an entry.
    #[error("the sequence's row of the block table could not be written")]
    Table(#[from] TableError),
}

/// Why the slots of a sequence's tokens were not listed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The sequence has fewer tokens.
    #[error("no slots for tokens {start}..{end} of a sequence of {tokens} tokens")]
    OutOfRange {
        /// First token asked for.
        start: u64,
        /// One past the last.
        end: u64,
        /// Tokens of the sequence.
        tokens: u64,
    },
    /// The sequence belongs to another cache.
    #[error("the sequence belongs to another cache")]
    ForeignSequence,
}

/// Why copies between device and host memory were not enqueued. They are enqueued when the next
/// step is staged, in their order.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HostCopyError {
    /// The copy of one block was refused.
    #[error("a block was not copied between device and host memory")]
    Block(#[from] CopyError),
    /// The transfer of several blocks was refused.
    #[error("a list of blocks was not copied between device and host memory")]
    Blocks(#[from] TransportError),
    /// No buffer is left for the list of blocks.
    #[error("no staging buffer for a list of blocks to copy")]
    List(#[from] AcquireError),
    /// The device refused: to be bound, or an event for the list.
    #[error("a device refused a call that copies blocks")]
    Device(#[from] DeviceError),
}

/// Why a step could not be begun, staged or finished.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// No staging buffer is left.
    #[error("no staging buffer for the step's tables")]
    Buffer(#[from] AcquireError),
    /// The step does not fit, or could not be sent.
    #[error("the step's tables were not staged")]
    Stage(#[from] StageError),
    /// A part of another step was asked for.
    #[error("the staged step does not have this array")]
    Part(#[from] PartError),
    /// A staged sequence belongs to another cache.
    #[error("the sequence belongs to another cache")]
    ForeignSequence,
    /// The step before was neither finished nor dropped.
    #[error("no step can begin while another is open")]
    StillOpen,
    /// The step was begun by another cache, where it is still open.
    #[error("the step was begun by another cache")]
    ForeignStep {
        /// The step.
        step: OpenStep,
    },
    /// A staged sequence has more tokens than a kernel can count.
    #[error("a sequence of {tokens} tokens cannot be staged: lengths have 32 bits")]
    TooLong {
        /// Its tokens.
        tokens: u64,
    },
    /// Not one length for each staged sequence.
    #[error("a step of {sequences} sequences cannot be staged with {lengths} lengths")]
    LengthCount {
        /// Lengths given.
        lengths: usize,
        /// Sequences given.
        sequences: usize,
    },
    /// A step would read more tokens of a sequence than it has.
    #[error("a step cannot read {length} tokens of sequence {index}, which has {tokens}")]
    Length {
        /// Position of the sequence among those given.
        index: usize,
        /// Tokens to read.
        length: u32,
        /// Tokens of the sequence.
        tokens: u64,
    },
    /// Blocks could not be sent between device and host memory. Nothing of the step was staged.
    #[error("the step was not staged: blocks were not copied between device and host memory")]
    HostCopy(#[from] HostCopyError),
    /// The device refused or is lost.
    #[error("the device refused a call of the step")]
    Device(#[from] DeviceError),
}

/// Why a cache could not be closed in full.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// A step is open, which may yet use the memory: only what is provably at rest was given back.
    #[error("the cache cannot be closed while a step is open")]
    StepOpen,
    /// The device could not be waited for: only what is provably at rest was given back.
    #[error("the cache cannot be closed: GPU {ordinal} could not be waited for")]
    NotAtRest {
        /// Ordinal of the device.
        ordinal: i32,
    },
    /// The driver refused a step of the clean-up.
    #[error("GPU {ordinal} refused a call of the clean-up: {} leaked", ByteSize(*leaked_bytes))]
    Refused {
        /// Ordinal of the device.
        ordinal: i32,
        /// Bytes that stay mapped until the process ends, or may not have been released.
        leaked_bytes: u64,
        /// The first refusal.
        #[source]
        source: cuda_vmm::pages::CloseError,
    },
    /// The staging buffers, the host tier's pinned memory or a small buffer on the device could not
    /// be freed.
    #[error("the cache's pinned memory was not freed")]
    Staging(#[from] StagingError),
}

one_line_debug!(
    BuildError,
    AdmitError,
    DemandError,
    QuotaError,
    SealError,
    SlotError,
    HostCopyError,
    StepError,
    CloseError
);
