//! Errors, one enum for each family of operations.

use cuda_driver::host_pages::{HostPagesError, PinError};
use cuda_driver::messages::{ByteSize, Chain, one_line_debug};
use cuda_driver::{CopyError, DeviceError, ModuleError};

use crate::Row;

/// The reason why a pool or a stager could not be created, drained or closed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// Buffers of 0 bytes, no buffers, more than [`StagingPool::BUFFERS_MAX`] in total, or more
    /// bytes than an address space has.
    ///
    /// [`StagingPool::BUFFERS_MAX`]: crate::StagingPool::BUFFERS_MAX
    #[error("no staging pool can have {buffers_max} buffers of {}", ByteSize(*buffer_bytes))]
    Options {
        /// Requested bytes of one buffer.
        buffer_bytes: u64,
        /// Requested number of buffers.
        buffers_max: usize,
    },
    /// The buffers need more bytes than the host's memory has.
    #[error("a staging pool of {} exceeds the host's memory of {}", ByteSize(*bytes), ByteSize(*host_bytes))]
    Memory {
        /// Bytes of all buffers.
        bytes: u64,
        /// Bytes of the host's memory.
        host_bytes: u64,
    },
    /// The thread that pins memory could not be started.
    #[error("no thread to pin staging memory could be started: {0}")]
    Thread(std::io::ErrorKind),
    /// The system cannot map more memory.
    #[error("no host memory for staging buffers")]
    Pages(#[from] HostPagesError),
    /// The stager's kernel was not loaded.
    #[error("the kernel of the step stager could not be loaded")]
    Kernel(#[from] ModuleError),
    /// The device refused or is lost.
    #[error("the device refused a call for staging memory")]
    Device(#[from] DeviceError),
}

impl From<PinError> for StagingError {
    fn from(error: PinError) -> Self {
        match error {
            PinError::Device(error) => Self::Device(error),
            PinError::Pages(error) => Self::Pages(error),
            // This version knows no other kind.
            _ => Self::Pages(HostPagesError::Unsupported),
        }
    }
}

/// The reason why no buffer is available to write.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Every buffer is being written or still being read. This is expected; try again later.
    #[error("{live} of {max} staging buffers are in use")]
    Exhausted {
        /// Number of buffers being written or still being read.
        live: usize,
        /// Number of the pool's pinned buffers.
        max: usize,
    },
    /// The request is larger than the pool's largest buffer.
    #[error("no staging buffer has {}: the largest has {}", ByteSize(*bytes), ByteSize(*largest_bytes))]
    TooLarge {
        /// Requested bytes.
        bytes: u64,
        /// Bytes of the pool's largest buffers.
        largest_bytes: u64,
    },
    /// The pool was closed.
    #[error("the staging pool is closed")]
    Closed,
    /// The device refused or is lost.
    #[error("the device refused to say which staging buffers are free")]
    Device(#[from] DeviceError),
}

impl AcquireError {
    /// Whether trying again can succeed after some device work has finished.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }
}

/// The reason why a submission did not happen completely. The buffer is given up in any case.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError<E> {
    /// No event to retire the buffer could be created. Nothing was enqueued.
    #[error("a staging buffer was not submitted: no event to retire it with")]
    Event(#[source] DeviceError),
    /// The caller's closure failed. Work that it already enqueued runs, and the buffer is kept for
    /// it.
    #[error("the readers of a staging buffer were not all enqueued")]
    Enqueue(#[source] E),
    /// The closure's work is enqueued, but no event could be recorded after it. Unless the device
    /// is lost, the buffer is never used again.
    #[error("no event could be recorded after the readers of a staging buffer")]
    Retire(#[source] DeviceError),
}

/// The reason why a block table was not changed or read.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The table has no rows, no columns, or more bytes than an address space.
    #[error("no block table can have {rows} rows of {max_blocks} blocks")]
    Shape {
        /// Requested number of rows.
        rows: usize,
        /// Requested number of columns.
        max_blocks: usize,
    },
    /// The host does not have enough memory for the table.
    #[error("no host memory for a block table of {rows} rows of {max_blocks} blocks")]
    OutOfMemory {
        /// Requested number of rows.
        rows: usize,
        /// Requested number of columns.
        max_blocks: usize,
    },
    /// The row does not exist.
    #[error("row {row} of a block table that has {rows} rows")]
    Row {
        /// Requested row.
        row: Row,
        /// Number of rows of the table.
        rows: usize,
    },
    /// The column does not exist.
    #[error("column {logical} of a block table that has {max_blocks} columns")]
    Column {
        /// Requested column, or the first missing column that a row would need.
        logical: usize,
        /// Number of columns of the table.
        max_blocks: usize,
    },
    /// The row has no free column.
    #[error("row {row} of the block table is full with {max_blocks} blocks")]
    Full {
        /// The row.
        row: Row,
        /// Number of columns of the table.
        max_blocks: usize,
    },
    /// The value is neither a block id nor -1.
    #[error("{block} in a block table is neither a block id nor -1")]
    Block {
        /// The given value.
        block: i32,
    },
}

/// The reason why a step was not assembled or not sent.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The step does not fit. The part was not added; earlier parts remain.
    #[error("the staged step needs {}, and has room for {}", ByteSize(*needed_bytes), ByteSize(*capacity_bytes))]
    Capacity {
        /// Number of bytes that the step would need with the new part.
        needed_bytes: u64,
        /// Maximum number of bytes of a step: the smaller of buffer and device memory.
        capacity_bytes: u64,
    },
    /// The requested rows are not in the table.
    #[error("the rows were not staged")]
    Table(#[from] TableError),
    /// The stager's steps use another stream.
    #[error(
        "the stager is bound to stream {bound:#x}, and the step was given to stream {given:#x}"
    )]
    OtherStream {
        /// Raw handle of the stream of the first submission.
        bound: u64,
        /// Raw handle of the given stream.
        given: u64,
    },
    /// The stream belongs to another device than the stager's memory.
    #[error(
        "the stager's memory is on GPU {stager}, and the step was given to a stream of GPU {stream}"
    )]
    OtherDevice {
        /// Ordinal of the stager's device.
        stager: i32,
        /// Ordinal of the stream's device.
        stream: i32,
    },
    /// The step was not sent, or not completely. The next step sends everything again.
    #[error("the staged step was not sent")]
    Submit(#[from] SubmitError<CopyError>),
}

/// A part that does not belong to the step.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("a part of staged step {part_step} was asked of staged step {step}")]
pub struct PartError {
    /// Number of the step that made the part.
    pub part_step: u64,
    /// Number of the step that received the part.
    pub step: u64,
}

one_line_debug!(StagingError, AcquireError, TableError, StageError, PartError);

impl<E: std::error::Error + 'static> std::fmt::Debug for SubmitError<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&Chain(self), f)
    }
}
