//! Errors of moves, with the memory that was handed to them.

use std::fmt;

use cuda_driver::messages::{ByteSize, Chain, one_line_debug};
use cuda_driver::{CopyError, DeviceError, DriverError, ModuleError, OutOfBounds};
use kv_kernels::KernelError;
use kv_kernels::error::Side;

use super::Withheld;

/// Why a move, or a part that moves need, was refused.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// Source and destination share memory: a move within one device, to where it reads.
    #[error("source and destination overlap by {}", ByteSize(*bytes))]
    Overlap {
        /// Bytes of a range, or of a plane, that are in both.
        bytes: u64,
    },
    /// Memory or a stream is of another device than its end of the move.
    #[error("the {what} is of GPU {found}, not of GPU {expected}")]
    WrongDevice {
        /// What it is.
        what: &'static str,
        /// Ordinal of the device that was expected.
        expected: i32,
        /// Ordinal of the device found.
        found: i32,
    },
    /// Memory or a stream is of the right GPU, and of another context or another driver object than its end of
    /// the move.
    #[error(
        "the {what} is of GPU {device}, and of another context or driver object: {found:#x}, not {expected:#x}"
    )]
    WrongContext {
        /// What it is.
        what: &'static str,
        /// Ordinal of the GPU.
        device: i32,
        /// Raw context of the move's end.
        expected: u64,
        /// Raw context found.
        found: u64,
    },
    /// Source and destination differ in length.
    #[error("a source of {source_bytes} bytes and a destination of {destination_bytes} bytes")]
    Lengths {
        /// Length of the source, in bytes.
        source_bytes: u64,
        /// Length of the destination, in bytes.
        destination_bytes: u64,
    },
    /// A configuration of no chunks, chunks of no bytes, or the like.
    #[error("0 {what}, where at least 1 is needed")]
    Zero {
        /// Which number.
        what: &'static str,
    },
    /// A configuration of more than any machine has room for.
    #[error("{count} {what}, where there can be at most {most}")]
    TooMany {
        /// Which number.
        what: &'static str,
        /// How many were asked for.
        count: u64,
        /// The most.
        most: u64,
    },
    /// A configuration whose pinned memory the host does not have.
    #[error(
        "a mover with {} of pinned memory, on a host of {}",
        ByteSize(*bytes),
        ByteSize(*host_bytes)
    )]
    Memory {
        /// Bytes of chunks and tables.
        bytes: u64,
        /// Bytes of the host's memory.
        host_bytes: u64,
    },
    /// A memory of blocks has no planes, or too many.
    #[error("a memory of blocks with {planes} planes, where 1 to {most} are possible")]
    PlaneCount {
        /// Planes given.
        planes: usize,
        /// The most.
        most: usize,
    },
    /// Two planes of a destination would be written in one place.
    #[error("planes {first} and {second} of the destination share bytes: each takes {bytes}")]
    PlanesOverlap {
        /// Position of the plane that begins first.
        first: usize,
        /// Position of the other one.
        second: usize,
        /// Bytes of the blocks of a plane.
        bytes: u64,
    },
    /// Source and destination differ in planes.
    #[error("a source of {source_planes} planes and a destination of {destination_planes}")]
    Planes {
        /// Planes of the source.
        source_planes: usize,
        /// Planes of the destination.
        destination_planes: usize,
    },
    /// Rows overlap each other, or do not end within their block.
    #[error(
        "{rows} rows of {row_bytes} bytes at offset {offset}, {row_stride} bytes apart, \
         are not within a block of {block_stride} bytes"
    )]
    Rows {
        /// Rows of a block.
        rows: u32,
        /// Bytes of a row that move.
        row_bytes: u64,
        /// Where the first row begins in its block.
        offset: u64,
        /// From row to row, in bytes.
        row_stride: u64,
        /// From block to block, in bytes.
        block_stride: u64,
    },
    /// A plane is shorter than its blocks.
    #[error("plane {plane} has {bytes} bytes, fewer than {blocks} blocks of {block_stride}")]
    PlaneTooShort {
        /// Position of the plane.
        plane: usize,
        /// Its length, in bytes.
        bytes: u64,
        /// Blocks that it should hold.
        blocks: u32,
        /// From block to block, in bytes.
        block_stride: u64,
    },
    /// Mapped memory without access for the device whose kernel would touch it.
    #[error("the {what} is mapped without access for GPU {device}")]
    NotMapped {
        /// Which end.
        what: &'static str,
        /// Ordinal of the device.
        device: i32,
    },
    /// One block's part in a plane is more than a kernel counts, or than a chunk of the bounce holds.
    #[error("{bytes} bytes of a block in one plane, where at most {most} move at a time")]
    BlockTooLarge {
        /// Rows times bytes of a row.
        bytes: u64,
        /// The most.
        most: u64,
    },
    /// More pairs of blocks than the tables hold.
    #[error("{pairs} pairs of blocks, where at most {most} fit the mover's tables")]
    TooManyPairs {
        /// Pairs asked for.
        pairs: usize,
        /// Most that fit.
        most: usize,
    },
    /// The tables are in use by moves under way. Worth trying again when one of them has completed.
    #[error("{needed} tables are needed, and {in_use} of {tables} are in use by moves under way")]
    Busy {
        /// Tables that the move needs.
        needed: usize,
        /// Tables that are in use.
        in_use: usize,
        /// All tables.
        tables: usize,
    },
    /// The next buffer of a hand-over is still held, or all were abandoned. Worth trying again when a buffer was
    /// given back.
    #[error("no buffer is free: of {buffers}, {in_use} are held and {abandoned} were abandoned")]
    NoBuffer {
        /// Buffers that are held by their users.
        in_use: usize,
        /// Buffers whose [`Outgoing`](super::Outgoing) or [`Incoming`](super::Incoming) was dropped. They are never
        /// handed out again: with all of them abandoned, trying again is of no use.
        abandoned: usize,
        /// All buffers.
        buffers: usize,
    },
    /// The device at one end of a hand-over is lost. The other end is not, for all that is known.
    #[error("GPU {device}, the {end}, is lost since {first}")]
    EndLost {
        /// Which end.
        end: Side,
        /// Ordinal of the device.
        device: i32,
        /// The error that lost it.
        first: DriverError,
    },
    /// A buffer that another hand-over gave out.
    #[error("buffer {buffer} is of hand-over {found}, not of hand-over {expected}")]
    OtherHandOver {
        /// Position of the buffer in its own hand-over.
        buffer: usize,
        /// Number of the hand-over that was asked.
        expected: u64,
        /// Number of the hand-over that the buffer is of.
        found: u64,
    },
    /// A range that does not lie in its memory.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// The kernels could not be loaded.
    #[error("the kernels that move blocks could not be loaded")]
    Module(#[source] Box<ModuleError>),
    /// A copy was refused for another reason.
    #[error(transparent)]
    Copy(Box<CopyError>),
    /// The kernel cannot be launched with these blocks.
    #[error(transparent)]
    Blocks(Box<KernelError>),
    /// A device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<ModuleError> for MoveError {
    fn from(error: ModuleError) -> Self {
        Self::Module(Box::new(error))
    }
}

impl From<KernelError> for MoveError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Device(error) => Self::Device(error),
            KernelError::Module(error) => error.into(),
            other => Self::Blocks(Box::new(other)),
        }
    }
}

impl From<CopyError> for MoveError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Device(error) => Self::Device(error),
            CopyError::OutOfBounds(error) => Self::OutOfBounds(error),
            CopyError::Lengths { destination, source_bytes } => {
                Self::Lengths { source_bytes, destination_bytes: destination }
            }
            // The enum may grow.
            other => Self::Copy(Box::new(other)),
        }
    }
}

/// A move that failed, with what was handed to it.
///
/// The source is unchanged. A part of the move may be under way, so both ends are withheld.
/// [`Withheld::try_finish`] gives them back as soon as no part is under way. [`Withheld::reclaim_on`] gives them back
/// at once, for work that waits on the device.
pub struct MoveFailed<S: Send + 'static, D: Send + 'static> {
    /// Why.
    pub error: MoveError,
    /// Source and destination.
    pub held: Withheld<S, D>,
    /// Ordinals of the GPUs of the source and of the destination.
    pub(super) gpus: [i32; 2],
}

one_line_debug!(MoveError);

impl<S: Send, D: Send> fmt::Debug for MoveFailed<S, D> {
    /// One line with all causes: what `?` in `main` prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Chain(self), f)
    }
}

impl<S: Send, D: Send> fmt::Display for MoveFailed<S, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [from, to] = self.gpus;
        write!(f, "move from GPU {from} to GPU {to}: {}", self.error)
    }
}

impl<S: Send, D: Send> std::error::Error for MoveFailed<S, D> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // The line above says what `error` says.
        self.error.source()
    }
}
