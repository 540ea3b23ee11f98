//! What can go wrong, one enum for each family of operations.

use cuda_driver::host_pages::{HostPagesError, PinError};
use cuda_driver::messages::{ByteSize, Chain, one_line_debug};
use cuda_driver::{CopyError, DeviceError, ModuleError};

use crate::Row;

/// Why a pool or a stager could not be made, drained or closed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// Buffers of no bytes, or no buffers, or more than [`StagingPool::BUFFERS_MAX`] in all, or more bytes
    /// than an address space holds.
    ///
    /// [`StagingPool::BUFFERS_MAX`]: crate::StagingPool::BUFFERS_MAX
    #[error("no staging pool can have {buffers_max} buffers of {}", ByteSize(*buffer_bytes))]
    Options {
        /// Bytes of one buffer asked for.
        buffer_bytes: u64,
        /// Number of buffers asked for.
        buffers_max: usize,
    },
    /// The buffers have more bytes than the host has.
    #[error("a staging pool of {} exceeds the host's memory of {}", ByteSize(*bytes), ByteSize(*host_bytes))]
    Memory {
        /// Bytes of all buffers.
        bytes: u64,
        /// Bytes that the host has.
        host_bytes: u64,
    },
    /// The thread that pins memory could not be started.
    #[error("no thread to pin staging memory could be started: {0}")]
    Thread(std::io::ErrorKind),
    /// The system maps no more memory.
    #[error("no host memory for staging buffers")]
    Pages(#[from] HostPagesError),
    /// The stager's kernel could not be loaded.
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
            // No other kind is known to this version.
            _ => Self::Pages(HostPagesError::Unsupported),
        }
    }
}

/// Why there is no buffer to write.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Every buffer is being written or still being read: an expected outcome, try again later.
    #[error("{live} of {max} staging buffers are in use")]
    Exhausted {
        /// Buffers being written or still being read.
        live: usize,
        /// Buffers that the pool has in circulation.
        max: usize,
    },
    /// No buffer of the pool is so large.
    #[error("no staging buffer has {}: the largest has {}", ByteSize(*bytes), ByteSize(*largest_bytes))]
    TooLarge {
        /// Bytes asked for.
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
    /// Whether trying again after some of the device's work has finished can succeed.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }
}

/// Why a submission did not happen in full. The buffer is out of the caller's hands all the same.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError<E> {
    /// No event could be had to retire the buffer with; nothing was enqueued.
    #[error("a staging buffer was not submitted: no event to retire it with")]
    Event(#[source] DeviceError),
    /// The caller's closure failed; what it had enqueued by then runs, and the buffer is kept for it.
    #[error("the readers of a staging buffer were not all enqueued")]
    Enqueue(#[source] E),
    /// The closure's work is enqueued, but no event could be recorded after it. Unless the device is
    /// lost, the buffer is never used again.
    #[error("no event could be recorded after the readers of a staging buffer")]
    Retire(#[source] DeviceError),
}

/// Why a block table was not changed or read.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// A table of no rows or no columns, or too large for an address space.
    #[error("no block table can have {rows} rows of {max_blocks} blocks")]
    Shape {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        max_blocks: usize,
    },
    /// The host has not enough memory for such a table.
    #[error("no host memory for a block table of {rows} rows of {max_blocks} blocks")]
    OutOfMemory {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        max_blocks: usize,
    },
    /// There is no such row.
    #[error("row {row} of a block table that has {rows} rows")]
    Row {
        /// Row asked for.
        row: Row,
        /// Rows of the table.
        rows: usize,
    },
    /// There is no such column.
    #[error("column {logical} of a block table that has {max_blocks} columns")]
    Column {
        /// Column asked for, or one past the last column that a row would need.
        logical: usize,
        /// Columns of the table.
        max_blocks: usize,
    },
    /// The row has no free column.
    #[error("row {row} of the block table is full with {max_blocks} blocks")]
    Full {
        /// The row.
        row: Row,
        /// Columns of the table.
        max_blocks: usize,
    },
    /// Neither a block id nor -1.
    #[error("{block} in a block table is neither a block id nor -1")]
    Block {
        /// The value given.
        block: i32,
    },
}

/// Why a step was not put together or not sent.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The step does not fit; the part was not added, and the parts before it stand.
    #[error("the staged step needs {}, and has room for {}", ByteSize(*needed_bytes), ByteSize(*capacity_bytes))]
    Capacity {
        /// Bytes that the step would need, with the new part.
        needed_bytes: u64,
        /// Bytes that a step can have: the lesser of buffer and device memory.
        capacity_bytes: u64,
    },
    /// The rows asked for are not in the table.
    #[error("the rows were not staged")]
    Table(#[from] TableError),
    /// The stager's steps go to another stream.
    #[error(
        "the stager is bound to stream {bound:#x}, and the step was given to stream {given:#x}"
    )]
    OtherStream {
        /// Raw handle of the stream that the first step was submitted to.
        bound: u64,
        /// Raw handle of the stream given.
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
    /// The step was not sent, or not all of it. The next one sends everything anew.
    #[error("the staged step was not sent")]
    Submit(#[from] SubmitError<CopyError>),
}

/// A part that does not belong to the step it was asked of.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("a part of staged step {part_step} was asked of staged step {step}")]
pub struct PartError {
    /// Number of the step that made the part.
    pub part_step: u64,
    /// Number of the step that was asked.
    pub step: u64,
}

one_line_debug!(StagingError, AcquireError, TableError, StageError, PartError);

impl<E: std::error::Error + 'static> std::fmt::Debug for SubmitError<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&Chain(self), f)
    }
}
