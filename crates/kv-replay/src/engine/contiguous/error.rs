//! Why ranges were refused.

use cuda_driver::{CopyError, DeviceError, ModuleError};
use cuda_vmm::gate::Unrest;
use cuda_vmm::pages::{CloseError, PageError};
use cuda_vmm::sequences::{AdmitError, ExtendError, SpaceError};
use cuda_vmm::worker::SpawnError;
use kv_kernels::error::{PagedKvError, ShapeError};
use kv_kernels::{KernelError, layout::LayoutError};
use kv_stage::error::{AcquireError, StagingError, SubmitError};

/// The reason why contiguous ranges were not made, grown, read or closed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The pages of a request are more than the limit of device memory, even if it runs alone.
    #[error(
        "request {request}, counted from 0, has {tokens} tokens, whose ranges take {pages} pages of {page_bytes} \
         bytes, but --device-blocks is memory for {limit_pages}"
    )]
    RequestTooLarge {
        /// The request, counted from 0.
        request: usize,
        /// Number of tokens of its prompt and answer.
        tokens: u64,
        /// Number of pages that they take, over all planes.
        pages: u64,
        /// Bytes of a page.
        page_bytes: u64,
        /// Number of pages of the limit.
        limit_pages: u64,
    },
    /// The ranges of all requests have more blocks than a table of signed 32-bit ids can name.
    #[error(
        "the ranges of --max-batch {max_batch} requests of {tokens_max} tokens have {blocks} blocks of \
         --block-tokens {block_tokens} in a plane, more than a block table can name"
    )]
    TooManyBlocks {
        /// Maximum number of requests at once.
        max_batch: u32,
        /// Number of tokens of a range, rounded up to whole pages and blocks.
        tokens_max: u64,
        /// Number of tokens of a block.
        block_tokens: u32,
        /// Number of blocks; `u64::MAX` if 64 bits cannot count them.
        blocks: u64,
    },
    /// The bytes of an iteration's tokens exceed 64 bits.
    #[error("an iteration of {tokens} tokens has more bytes than 64 bits can count")]
    ChunkOverflow {
        /// Number of tokens of an iteration.
        tokens: u64,
    },
    /// The kernels do not support the shape.
    #[error("the kernels do not support the shape")]
    Shape(#[from] ShapeError),
    /// The kernels were not loaded.
    #[error("cannot load the kernels")]
    Kernels(#[from] ModuleError),
    /// The pool of pages was not made.
    #[error("cannot make a pool of pages")]
    Pages(#[from] PageError),
    /// The addresses were not reserved.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The ranges have no layout that the kernels can read.
    #[error("the kernels cannot read the ranges")]
    Layout(#[from] LayoutError),
    /// The ranges were not described to the kernels.
    #[error("cannot describe the ranges to the kernels")]
    View(#[from] PagedKvError),
    /// The engine's own buffers could not be allocated.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Buffers {
        /// The contents, and the option that determines the size.
        what: &'static str,
        /// Their size.
        bytes: u64,
        /// The device's error.
        source: DeviceError,
    },
    /// The staging buffers were not pinned, or not freed.
    #[error("cannot pin or free staging buffers")]
    Staging(#[from] StagingError),
    /// There was no staging buffer.
    #[error("an iteration got no staging buffer")]
    Acquire(#[from] AcquireError),
    /// The arrays of an iteration were not submitted.
    #[error("the arrays of an iteration were not submitted")]
    Submit(#[from] SubmitError<CopyError>),
    /// The thread that maps memory ahead of need was not started.
    #[error("cannot start growth ahead of need")]
    Worker(#[from] SpawnError),
    /// A request got no range.
    #[error("cannot give a range to request {request}")]
    Admit {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: AdmitError,
    },
    /// A range did not grow, and waiting would not help.
    #[error("cannot grow the range of request {request}")]
    Extend {
        /// The request, counted from 0.
        request: usize,
        /// The cause.
        source: ExtendError,
    },
    /// A kernel was not launched.
    #[error("a kernel was not launched")]
    Kernel(#[from] KernelError),
    /// A copy was not enqueued.
    #[error("a copy was not enqueued")]
    Copy(#[from] CopyError),
    /// The device refused.
    #[error("the device refused")]
    Device(#[from] DeviceError),
    /// The ranges were not closed completely.
    #[error("cannot close the ranges completely ({count} refusals, {leaked_bytes} bytes leaked)")]
    Close {
        /// Number of refusals.
        count: usize,
        /// Bytes that stay mapped or allocated.
        leaked_bytes: u64,
        /// The first refusal.
        source: Box<CloseError>,
    },
    /// Requests still had their ranges.
    #[error("{live} requests still have their ranges")]
    StillLive {
        /// Number of requests.
        live: u64,
    },
    /// Work on the ranges did not end.
    #[error("the ranges are not at rest")]
    NotAtRest(#[source] Unrest),
}

cuda_driver::messages::one_line_debug!(RangeError);
