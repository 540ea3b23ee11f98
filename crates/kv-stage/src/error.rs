//! Errors, one enum for each family of operations.

use cuda_driver::host_pages::PinError;
use cuda_driver::messages::{ByteSize, Chain, one_line_debug};
use cuda_driver::{CopyError, DeviceError, ModuleError};

use crate::Row;

/// The reason why a pool, slabs or a batch could not be created, resized, drained or closed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// Buffers of 0 bytes, no buffers, more than 1,048,576, or more bytes than an address space has.
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
    /// A block of 0 bytes or of more than 64 GiB, more bytes than an address space has, or
    /// more than [`THREADS_MAX`] threads.
    ///
    /// [`THREADS_MAX`]: crate::SlabsOptions::THREADS_MAX
    #[error("{threads} threads cannot pin {blocks} blocks of {} in slabs", ByteSize(*block_bytes))]
    SlabOptions {
        /// Requested bytes of a block.
        block_bytes: u64,
        /// Requested number of blocks.
        blocks: u64,
        /// Requested number of threads.
        threads: usize,
    },
    /// More than 32,768 slabs.
    #[error("{slabs} slabs of pinned memory are more than {}", crate::SlabsOptions::SLABS_MAX)]
    TooManySlabs {
        /// Number of slabs that the blocks would need.
        slabs: u64,
    },
    /// The slabs need more bytes than the host's memory has.
    #[error("slabs of {} in all exceed the host's memory of {}", ByteSize(*bytes), ByteSize(*host_bytes))]
    SlabMemory {
        /// Bytes of all slabs.
        bytes: u64,
        /// Bytes of the host's memory.
        host_bytes: u64,
    },
    /// A thread that pins memory could not be started.
    #[error("no thread to pin memory could be started: {0}")]
    Thread(std::io::ErrorKind),
    /// The system cannot map more memory.
    #[error("no host memory for staging buffers")]
    Pages(#[source] PinError),
    /// A size of a batch is 0 or too large.
    #[error("no batch can have {value} {what}: 1 to {most}")]
    Batch {
        /// What there are so many of.
        what: &'static str,
        /// The requested number.
        value: u64,
        /// The largest number.
        most: u64,
    },
    /// The host does not have enough memory for the lists of a batch.
    #[error("no host memory of {} for a batch", ByteSize(*bytes))]
    HostMemory {
        /// Requested bytes.
        bytes: u64,
    },
    /// Device memory of a batch could not be filled.
    #[error("the memory of a batch could not be filled")]
    Copy(#[from] CopyError),
    /// The batch's kernel was not loaded.
    #[error("the kernel of the staging could not be loaded")]
    Kernel(#[from] ModuleError),
    /// The device refused or is lost.
    #[error("the device refused a call for staging memory")]
    Device(#[from] DeviceError),
}

impl From<PinError> for StagingError {
    fn from(error: PinError) -> Self {
        match error {
            PinError::Device(error) => Self::Device(error),
            other => Self::Pages(other),
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
        /// Number of the pool's buffers.
        max: usize,
    },
    /// The pool was closed.
    #[error("the staging pool is closed")]
    Closed,
    /// The device refused or is lost.
    #[error("the device refused to say which staging buffers are free")]
    Device(#[from] DeviceError),
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
    /// is lost, the buffer is used again when its streams are seen without work.
    #[error("no event could be recorded after the readers of a staging buffer")]
    Retire(#[source] DeviceError),
}

/// The reason why a step of a batch was not assembled or not sent.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The batch has no such block table.
    #[error("block table {table} of a batch that has {tables}")]
    Table {
        /// Requested table.
        table: usize,
        /// Number of tables.
        tables: usize,
    },
    /// The row does not exist.
    #[error("row {row} of a batch whose block tables have {rows} rows")]
    Row {
        /// Requested row.
        row: Row,
        /// Number of rows.
        rows: u32,
    },
    /// The entries do not exist.
    #[error("{count} entries from {first} on, in row {row} of a block table that is {width} wide")]
    Columns {
        /// The row.
        row: Row,
        /// The first entry.
        first: u32,
        /// Number of entries.
        count: usize,
        /// Entries of a row.
        width: u32,
    },
    /// More ids would wait to be sent than twice the entries of all tables. Any step sends them, also an
    /// empty one.
    #[error("{ids} block ids would wait to be sent, of at most {max}")]
    Backlog {
        /// Ids that would wait.
        ids: u64,
        /// Ids that can wait.
        max: u64,
    },
    /// The step has the row already.
    #[error("row {row} twice in a step")]
    RowTwice {
        /// The row.
        row: Row,
    },
    /// The first token of a row in a step is no draft.
    #[error("row {row} has {drafts} drafts among {tokens} tokens")]
    Drafts {
        /// The row.
        row: Row,
        /// Its drafts.
        drafts: u32,
        /// Its tokens in the step.
        tokens: u32,
    },
    /// The step has no room for another sequence.
    #[error("a step of more than {max} sequences")]
    Sequences {
        /// Sequences that a step can have.
        max: u32,
    },
    /// The step has no room for the tokens.
    #[error("a step of {tokens} tokens, of at most {max}")]
    Tokens {
        /// Tokens that the step would have.
        tokens: u64,
        /// Tokens that a step can have.
        max: u32,
    },
    /// The least number of tokens before the step's is above the most.
    #[error("the tokens of row {row} begin behind at least {resolved} and at most {upper}")]
    Start {
        /// The row.
        row: Row,
        /// The least.
        resolved: u64,
        /// The most.
        upper: u64,
    },
    /// The row has no room for the tokens.
    #[error("the tokens of row {row} end at {end}, and a row has room for {max}")]
    End {
        /// The row.
        row: Row,
        /// Where the tokens end.
        end: u64,
        /// Tokens that a row has room for, in every block table.
        max: u64,
    },
    /// The batch has no such array.
    #[error("array {array} of a batch that has {arrays}")]
    Array {
        /// Requested array.
        array: usize,
        /// Number of arrays.
        arrays: usize,
    },
    /// The array is longer than announced.
    #[error("array {array} of {}, announced with at most {}", ByteSize(*bytes), ByteSize(*max))]
    ArrayBytes {
        /// The array.
        array: usize,
        /// Its bytes.
        bytes: u64,
        /// The most bytes.
        max: u64,
    },
    /// The step has the array already.
    #[error("array {array} twice in a step")]
    ArrayTwice {
        /// The array.
        array: usize,
    },
    /// The batch's steps use another stream.
    #[error("the batch is bound to stream {bound:#x}, and a step was begun on stream {given:#x}")]
    OtherStream {
        /// Raw handle of the stream of the first step.
        bound: u64,
        /// Raw handle of the given stream.
        given: u64,
    },
    /// The stream belongs to another device than the batch.
    #[error("the batch is on GPU {batch}, and a step was begun on a stream of GPU {stream}")]
    OtherDevice {
        /// Ordinal of the batch's device.
        batch: i32,
        /// Ordinal of the stream's device.
        stream: i32,
    },
    /// There is no staging buffer for the step.
    #[error("the step has no staging buffer")]
    Acquire(#[from] AcquireError),
    /// The step was not sent, or not completely.
    #[error("the step was not sent")]
    Submit(#[from] SubmitError<CopyError>),
    /// A part of the packet lies outside the batch's memory, which does not happen.
    #[error("the step was not copied")]
    Copy(#[from] CopyError),
    /// The launch that makes the batch was refused, or the device is lost.
    #[error("the batch was not gathered")]
    Device(#[from] DeviceError),
}

one_line_debug!(StagingError, AcquireError, BatchError);

impl<E: std::error::Error + 'static> std::fmt::Debug for SubmitError<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&Chain(self), f)
    }
}
