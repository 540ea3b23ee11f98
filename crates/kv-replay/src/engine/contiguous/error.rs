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
pub enum RangeError {
    #[error(
        "request {request}, counted from 0, has {tokens} tokens, whose ranges take {pages} pages of {page_bytes} \
         bytes, but --device-blocks is memory for {limit_pages}"
    )]
    RequestTooLarge { request: usize, tokens: u64, pages: u64, page_bytes: u64, limit_pages: u64 },
    #[error(
        "the ranges of --max-batch {max_batch} requests of {tokens_max} tokens have {blocks} blocks of \
         --block-tokens {block_tokens} in a plane, more than a block table can name"
    )]
    TooManyBlocks { max_batch: u32, tokens_max: u64, block_tokens: u32, blocks: u64 },
    #[error("an iteration of {tokens} tokens has more bytes than 64 bits can count")]
    ChunkOverflow { tokens: u64 },
    #[error("the kernels do not support the shape")]
    Shape(#[from] ShapeError),
    #[error("cannot load the kernels")]
    Kernels(#[from] ModuleError),
    #[error("cannot make a pool of pages")]
    Pages(#[from] PageError),
    #[error(transparent)]
    Space(#[from] SpaceError),
    #[error("the kernels cannot read the ranges")]
    Layout(#[from] LayoutError),
    #[error("cannot describe the ranges to the kernels")]
    View(#[from] PagedKvError),
    #[error("cannot allocate {bytes} bytes for {what}")]
    Buffers { what: &'static str, bytes: u64, source: DeviceError },
    #[error("cannot pin or free staging buffers")]
    Staging(#[from] StagingError),
    #[error("an iteration got no staging buffer")]
    Acquire(#[from] AcquireError),
    #[error("the arrays of an iteration were not submitted")]
    Submit(#[from] SubmitError<CopyError>),
    #[error("cannot start growth ahead of need")]
    Worker(#[from] SpawnError),
    #[error("cannot give a range to request {request}")]
    Admit { request: usize, source: AdmitError },
    #[error("cannot grow the range of request {request}")]
    Extend { request: usize, source: ExtendError },
    #[error("a kernel was not launched")]
    Kernel(#[from] KernelError),
    #[error("a copy was not enqueued")]
    Copy(#[from] CopyError),
    #[error("the device refused")]
    Device(#[from] DeviceError),
    #[error("cannot close the ranges completely ({count} refusals, {leaked_bytes} bytes leaked)")]
    Close { count: usize, leaked_bytes: u64, source: Box<CloseError> },
    #[error("{live} requests still have their ranges")]
    StillLive { live: u64 },
    #[error("the ranges are not at rest")]
    NotAtRest(#[source] Unrest),
}

cuda_driver::messages::one_line_debug!(RangeError);
