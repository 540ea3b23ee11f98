//! Why blocks were not copied, written or summed.

use cuda_driver::{DeviceError, ModuleError};
use kv_pool::BlockId;

use crate::{KernelError, error::OperandError};

/// A side of a copy of blocks.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Side {
    /// The blocks that are read.
    Source,
    /// The blocks that are written.
    Destination,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// A block would be written by two pairs of a copy.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("block {block} is the destination of pair {first} and of pair {second}")]
pub struct PairsError {
    /// The id.
    pub block: BlockId,
    /// Position of the last pair before `second` that writes the block.
    pub first: usize,
    /// Position of the first pair that writes a block again.
    pub second: usize,
}

/// Why an operation on blocks was not launched. Nothing was enqueued.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlocksError {
    /// The host's copy of the ids has another length.
    #[error("the host's copy has {given} ids of blocks, where {count} are named")]
    Count {
        /// Ids, or pairs, named.
        count: u64,
        /// Ids, or pairs, given.
        given: u64,
    },
    /// An id names no ready block.
    #[error("the {side} of pair {place} is block {block}, out of range: {blocks} blocks are ready")]
    BlockOutOfRange {
        /// Position of the pair, or of the id.
        place: u64,
        /// Which side.
        side: Side,
        /// The id.
        block: BlockId,
        /// Blocks that the launch may touch.
        blocks: u64,
    },
    /// The pairs are none that may be copied.
    #[error(transparent)]
    Pairs(#[from] PairsError),
    /// A block is read by one pair and written by another, or by the same, in an order that nobody
    /// knows.
    #[error("pair {reader} reads block {block}, which pair {writer} writes")]
    SourceWritten {
        /// Position of the pair that reads.
        reader: u64,
        /// Position of the pair that writes.
        writer: u64,
        /// The block.
        block: BlockId,
    },
    /// The two sides have not the same planes and tokens.
    #[error(
        "{what}: {source_count} in the source blocks and {destination_count} in the destination blocks"
    )]
    Shapes {
        /// What differs: `"layers"`, `"tensors of a layer"`, `"tokens of a block"` or `"bytes of a row"`.
        what: &'static str,
        /// That of the source.
        source_count: u64,
        /// That of the destination.
        destination_count: u64,
    },
    /// A part of the rows that is not inside them.
    #[error("a copy of {bytes} bytes from byte {start} on, of {side} rows of {row_bytes} bytes")]
    RowRange {
        /// Which side.
        side: Side,
        /// First byte of the part.
        start: u64,
        /// Bytes of the part.
        bytes: u64,
        /// Bytes of a row.
        row_bytes: u64,
    },
    /// More, or longer, units than a kernel can count.
    #[error("{count} {what} are more than a kernel counts")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// How many.
        count: u64,
    },
    /// The layers of the rows are not layers of the pages.
    #[error("an append to {layers} layers from layer {first_layer} on, of {of}")]
    Layers {
        /// First layer named.
        first_layer: u32,
        /// Layers named.
        layers: u32,
        /// Layers of the pages.
        of: u32,
    },
    /// Keys without values, or values where each layer has one tensor.
    #[error("an append of {given} tensors, where a layer has {kv_count}")]
    Tensors {
        /// Tensors of rows given.
        given: u32,
        /// Tensors of a layer.
        kv_count: u32,
    },
    /// What every launch is checked for.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl From<OperandError> for BlocksError {
    fn from(error: OperandError) -> Self {
        Self::Kernel(error.into())
    }
}

impl From<ModuleError> for BlocksError {
    fn from(error: ModuleError) -> Self {
        Self::Kernel(error.into())
    }
}

impl From<DeviceError> for BlocksError {
    fn from(error: DeviceError) -> Self {
        Self::Kernel(error.into())
    }
}

cuda_driver::messages::one_line_debug!(PairsError, BlocksError);
