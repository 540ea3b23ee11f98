//! What can go wrong, one enum for each family of operations.

use cuda_driver::{CopyError, DeviceError, HostPagesError, PinError};

use crate::ScatterError;

/// Why a pool or a stager could not be made, drained or closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// Buffers of no bytes, or no buffers, or more than [`StagingPool::BUFFERS_MAX`] in all, or more bytes
    /// than an address space holds.
    ///
    /// [`StagingPool::BUFFERS_MAX`]: crate::StagingPool::BUFFERS_MAX
    #[error("a pool of {buffers_max} buffers of {buffer_bytes} bytes is not possible")]
    Options {
        /// Bytes of one buffer asked for.
        buffer_bytes: u64,
        /// Number of buffers asked for.
        buffers_max: usize,
    },
    /// The buffers have more bytes than the host has.
    #[error("a pool of {bytes} bytes, on a host of {host_bytes} bytes")]
    Memory {
        /// Bytes of all buffers.
        bytes: u64,
        /// Bytes that the host has.
        host_bytes: u64,
    },
    /// The thread that pins memory could not be started.
    #[error("no thread to pin staging memory: {0}")]
    Thread(std::io::ErrorKind),
    /// The system maps no more memory.
    #[error(transparent)]
    Pages(#[from] HostPagesError),
    /// The device refused or is lost.
    #[error("staging failed on the device")]
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
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Every buffer is being written or still being read: an expected outcome, try again later.
    #[error("all staging buffers are in use: {live} of {max}")]
    Exhausted {
        /// Buffers being written or still being read.
        live: usize,
        /// Buffers that the pool has in circulation.
        max: usize,
    },
    /// No buffer of the pool is so large.
    #[error("a staging buffer of {bytes} bytes was asked for, and the largest has {largest_bytes}")]
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
    #[error("staging failed on the device")]
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
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError<E> {
    /// No event could be had to retire the buffer with; nothing was enqueued.
    #[error("no event for the staging buffer; nothing was enqueued")]
    Event(#[source] DeviceError),
    /// The caller's closure failed; what it had enqueued by then runs, and the buffer is kept for it.
    #[error("enqueueing the readers of the staging buffer failed")]
    Enqueue(#[source] E),
    /// The closure's work is enqueued, but no event could be recorded after it. Unless the device is
    /// lost, the buffer is never used again.
    #[error("the staging buffer could not be retired")]
    Retire(#[source] DeviceError),
}

/// Why a block table was not changed or read.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// A table of no slots or no columns, or too large for an address space.
    #[error("a table of {slots} slots and {max_blocks} columns is not possible")]
    Shape {
        /// Slots asked for.
        slots: usize,
        /// Columns asked for.
        max_blocks: usize,
    },
    /// The host has not enough memory for such a table.
    #[error("no host memory for a table of {slots} slots and {max_blocks} columns")]
    OutOfMemory {
        /// Slots asked for.
        slots: usize,
        /// Columns asked for.
        max_blocks: usize,
    },
    /// There is no such slot.
    #[error("slot {slot} of a table of {slots} slots")]
    Slot {
        /// Slot asked for.
        slot: usize,
        /// Slots of the table.
        slots: usize,
    },
    /// There is no such column.
    #[error("column {logical} of a table of {max_blocks} columns")]
    Column {
        /// Column asked for, or one past the last column that a row would need.
        logical: usize,
        /// Columns of the table.
        max_blocks: usize,
    },
    /// The row has no free column.
    #[error("row of slot {slot} is full with {max_blocks} blocks")]
    Full {
        /// The slot of the row.
        slot: usize,
        /// Columns of the table.
        max_blocks: usize,
    },
    /// Neither a block id nor -1.
    #[error("{block} is neither a block id nor -1")]
    Block {
        /// The value given.
        block: i32,
    },
}

/// Why a step was not staged.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The step does not fit; the part was not added, and the parts before it stand.
    #[error("the step needs {needed_bytes} bytes of {capacity_bytes}")]
    Capacity {
        /// Bytes that the step would need, with the new part.
        needed_bytes: u64,
        /// Bytes that a step can have: the lesser of buffer and device memory.
        capacity_bytes: u64,
    },
    /// The rows asked for are not in the table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The stager's steps go to another stream.
    #[error("the stager is bound to stream {bound:#x}, not to {given:#x}")]
    OtherStream {
        /// Raw handle of the stream that the first step was submitted to.
        bound: u64,
        /// Raw handle of the stream given.
        given: u64,
    },
    /// The stream belongs to another device than the stager's memory.
    #[error("the stager is on device {stager}, the stream on device {stream}")]
    OtherDevice {
        /// Ordinal of the stager's device.
        stager: i32,
        /// Ordinal of the stream's device.
        stream: i32,
    },
    /// The step was not sent, or not all of it. The next one sends everything anew.
    #[error("the step was not sent")]
    Submit(#[from] SubmitError<SendError>),
}

/// Why the device was not sent a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The copy was refused.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The kernel was refused.
    #[error(transparent)]
    Scatter(#[from] ScatterError),
}

/// A part that does not belong to the step it was asked of.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the part belongs to step {part_step}, not to step {step}")]
pub struct PartError {
    /// Number of the step that made the part.
    pub part_step: u64,
    /// Number of the step that was asked.
    pub step: u64,
}
