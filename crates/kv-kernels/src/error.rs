//! Why a launch was refused, one enum for each family of operations.

use std::fmt;

use cuda_driver::{CopyError, DeviceError, ModuleError, ResidencyError};
use kv_pool::{BlockId, Slot, TableEntry};

use crate::format::{KvFormat, TensorAxis};
use crate::layout::LayoutError;

pub use crate::report::OutOfRange;

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

/// The memory that a kernel is given, by its role.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Operand {
    /// The paged memory itself.
    Pages,
    /// The contiguous rows of a run of tokens.
    Chunk,
    /// One slot for each token of the chunk.
    SlotMapping,
    /// One key for each token of the chunk.
    TokenKeys,
    /// Rows of block ids.
    BlockTable,
    /// One length for each sequence.
    SeqLens,
    /// One sum for each entry of the block table.
    Checksums,
    /// The table that rows are gathered from.
    Table,
    /// Which row to gather, for each row of the result.
    RowIndex,
    /// The memory that is written: the gathered rows.
    Out,
    /// Blocks in pinned host memory.
    HostBlocks,
    /// Which block goes where.
    BlockPairs,
    /// Which blocks.
    BlockIds,
    /// The rows of new tokens.
    Rows,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pages => "paged memory",
            Self::Chunk => "chunk",
            Self::SlotMapping => "slot mapping",
            Self::TokenKeys => "token keys",
            Self::BlockTable => "block table",
            Self::SeqLens => "sequence lengths",
            Self::Checksums => "checksums",
            Self::Table => "table",
            Self::RowIndex => "row index",
            Self::Out => "output",
            Self::HostBlocks => "host blocks",
            Self::BlockPairs => "block pairs",
            Self::BlockIds => "block ids",
            Self::Rows => "rows of new tokens",
        })
    }
}

/// Memory that is too short for what a kernel would access, or not aligned for it.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandError {
    /// The kernel would access more than there is.
    #[error("the {operand} needs {needed_bytes} bytes and has {bytes}")]
    TooShort {
        /// Which memory.
        operand: Operand,
        /// Bytes that the kernel would access.
        needed_bytes: u64,
        /// Bytes that there are.
        bytes: u64,
    },
    /// The kernel would access more bytes than 64 bits can count.
    #[error("the {operand} of {rows} rows of {row_bytes} bytes does not fit in 64 bits")]
    Overflow {
        /// Which memory.
        operand: Operand,
        /// Rows, or single values, that the kernel would access.
        rows: u64,
        /// Bytes from one to the next.
        row_bytes: u64,
    },
    /// The address is not a multiple of the size of what lies there.
    #[error("the {operand} at {address:#x} is not aligned to {alignment} bytes")]
    Misaligned {
        /// Which memory.
        operand: Operand,
        /// Its address.
        address: u64,
        /// The alignment it needs, in bytes.
        alignment: u64,
    },
    /// Rows of a table would overlap.
    #[error("the {operand} has rows of {width} entries and only {stride} from one to the next")]
    Stride {
        /// Which memory.
        operand: Operand,
        /// Entries of a row.
        width: u64,
        /// Entries from a row's start to the next row's.
        stride: u64,
    },
    /// What the kernel writes it would also read, in an order that nobody knows.
    #[error("the {written} and the {read} share {bytes} bytes from {address:#x} on")]
    Overlap {
        /// The memory that is written.
        written: Operand,
        /// The memory that is read, or written too.
        read: Operand,
        /// The first byte that they share.
        address: u64,
        /// Bytes that they share.
        bytes: u64,
    },
}

/// Why paged memory could not be described to the device, or an engine's tensors not adopted as such: they are not
/// what the format says. Tensors and axes are counted from 0.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PagedKvError {
    /// No block, or more than block ids (32 bits, signed) and slots (64 bits, signed) can name.
    #[error(
        "paged KV has {blocks} blocks of {block_tokens} tokens, where 1 to 2147483647 blocks are possible"
    )]
    Blocks {
        /// Blocks asked for.
        blocks: u64,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// The layout spreads the planes over another number of tensors.
    #[error("paged KV is given {given} tensors, where its layout has {needed}")]
    Tensors {
        /// Tensors given.
        given: u64,
        /// Tensors of the layout.
        needed: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first} and {second} of paged KV overlap: each takes {extent_bytes} bytes")]
    TensorsOverlap {
        /// Position of one of them.
        first: usize,
        /// Position of the other.
        second: usize,
        /// Bytes that each takes.
        extent_bytes: u64,
    },
    /// The format to adopt spreads the planes over another number of tensors.
    #[error("{given} tensors cannot be adopted as {format:?}, which has {needed}")]
    AdoptedTensors {
        /// The format.
        format: KvFormat,
        /// Tensors given.
        given: u64,
        /// Tensors of the format.
        needed: u64,
    },
    /// Elements of another length.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: its elements have {given} bytes, not {needed}"
    )]
    Elements {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Bytes of an element of the tensor.
        given: u64,
        /// Bytes of an element of the format.
        needed: u64,
    },
    /// The address is not a multiple of an element's length.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: {address:#x} is not aligned to elements of \
         {element_bytes} bytes"
    )]
    Misaligned {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Its address.
        address: u64,
        /// Bytes of an element.
        element_bytes: u64,
    },
    /// Another number of axes.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: {shape} lengths and {strides} strides are given \
         for {needed} axes"
    )]
    Axes {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Lengths given.
        shape: usize,
        /// Strides given.
        strides: usize,
        /// Axes of the format's tensor.
        needed: usize,
    },
    /// An axis has another length.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: axis {place} ({axis}) has {given} places, not \
         {needed}"
    )]
    Length {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Position of the axis.
        place: usize,
        /// What it counts.
        axis: TensorAxis,
        /// Its places.
        given: u64,
        /// Those of the format.
        needed: u64,
    },
    /// An axis has another stride: axes lie in another order, or with gaps.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: axis {place} ({axis}) has a stride of {given} \
         elements, not {needed}"
    )]
    Stride {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Position of the axis.
        place: usize,
        /// What it counts.
        axis: TensorAxis,
        /// Its stride, in elements.
        given: i64,
        /// That of the format.
        needed: u64,
    },
    /// The memory ends before the tensor does.
    #[error("tensor {tensor} cannot be adopted as {format:?}: it has {given} bytes, of {needed}")]
    Short {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Bytes of its memory.
        given: u64,
        /// Bytes from its first element to its last.
        needed: u64,
    },
    /// The memory is not the device's.
    #[error("tensor {tensor} cannot be adopted as {format:?} on this device")]
    Residency {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// What lies there.
        #[source]
        error: ResidencyError,
    },
    /// The owner of the memory is gone, or of another driver object.
    #[error("tensor {tensor} cannot be adopted as {format:?}")]
    Owner {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Why.
        #[source]
        error: CopyError,
    },
    /// The numbers make no layout, or the layout does not hold that many blocks.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The memory is too short or not aligned.
    #[error(transparent)]
    Operand(#[from] OperandError),
    /// The pinned memory is of another driver object than the stream.
    #[error(transparent)]
    Memory(CopyError),
    /// The host has not enough memory for an address for each plane.
    #[error("no host memory for the addresses of {planes} planes")]
    OutOfMemory {
        /// Planes of the shape.
        planes: u64,
    },
    /// The device refused, or is lost.
    #[error("the plane addresses of paged KV did not reach the device")]
    Device(#[from] DeviceError),
}

impl From<CopyError> for PagedKvError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Device(error) => Self::Device(error),
            other => Self::Memory(other),
        }
    }
}

/// Why a kernel was not launched: one that moves the tokens of chunks, or one over blocks. Nothing was enqueued.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Pinned memory that is for work on another stream, device memory whose owner was dropped, or memory of another
    /// driver object; what a device refuses is [`Device`](Self::Device).
    #[error(transparent)]
    Memory(CopyError),
    /// More tokens are to be skipped than there are.
    #[error("a transfer skips {skip_prefix_n_tokens} tokens of a chunk of {tokens}")]
    Skip {
        /// Tokens to skip.
        skip_prefix_n_tokens: u64,
        /// Tokens of the chunk.
        tokens: u64,
    },
    /// The chunk does not hold that many tokens. Its planes are spaced by its token count, so a
    /// wrong count would move the wrong rows.
    #[error("a chunk of {bytes} bytes does not have {tokens} tokens of {token_bytes} bytes")]
    ChunkTokens {
        /// Bytes of the chunk.
        bytes: u64,
        /// Tokens named.
        tokens: u64,
        /// Bytes of one token in all planes.
        token_bytes: u64,
    },
    /// The host's copy of the slot mapping has another length than the chunk.
    #[error("a slot mapping has {slots} slots for {tokens} tokens")]
    SlotCount {
        /// Slots given.
        slots: u64,
        /// Tokens of the chunk.
        tokens: u64,
    },
    /// A token would go to, or come from, beyond the ready blocks.
    #[error("slot {slot} of token {token} is out of range: {slots} slots are ready")]
    SlotOutOfRange {
        /// Position of the token in the chunk.
        token: u64,
        /// Its slot.
        slot: Slot,
        /// Slots of the blocks that the launch may touch.
        slots: u64,
    },
    /// Two tokens would be stored to one slot, where either's bytes might stay.
    #[error(
        "token {first_token} of chunk {first_chunk} and token {token} of chunk {chunk} are both stored to \
         slot {slot}"
    )]
    StoredTwice {
        /// The slot.
        slot: Slot,
        /// Position in the call of the later chunk that names it.
        chunk: usize,
        /// Position of the token in that chunk.
        token: u64,
        /// The chunk that names it first.
        first_chunk: usize,
        /// The token there.
        first_token: u64,
    },
    /// The launch names more blocks than the paged memory has.
    #[error("{num_blocks} blocks are named ready, of {capacity}")]
    Blocks {
        /// Blocks named.
        num_blocks: u64,
        /// Blocks of the paged memory.
        capacity: u64,
    },
    /// A number of tokens to skip that is not whole blocks, where blocks are moved. Rounded down, tokens
    /// that others share would be written.
    #[error(
        "a transfer by blocks skips {skip_prefix_n_tokens} tokens, no whole blocks of {block_tokens}"
    )]
    SkipBlocks {
        /// Tokens to skip.
        skip_prefix_n_tokens: u64,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// The host's copy of the block ids has another length than the chunk has blocks.
    #[error("a block mapping has {ids} ids for {blocks} blocks")]
    IdCount {
        /// Ids given.
        ids: u64,
        /// Blocks that the tokens of the chunk begin.
        blocks: u64,
    },
    /// A block would be moved that is not ready.
    #[error("block id {block} of entry {entry} is out of range: {blocks} blocks are ready")]
    IdOutOfRange {
        /// Position in the block ids.
        entry: u64,
        /// The block there.
        block: TableEntry,
        /// Blocks that the launch may touch.
        blocks: u64,
    },
    /// The layers of a chunk are not layers of the paged memory.
    #[error("a transfer of layers {start} to {end}, of {layers}")]
    Layers {
        /// First layer named.
        start: u32,
        /// The layer after the last.
        end: u32,
        /// Layers of the paged memory.
        layers: u32,
    },
    /// More chunks than one launch describes.
    #[error("a launch of {chunks} chunks, of at most {most}")]
    Chunks {
        /// Chunks given.
        chunks: usize,
        /// Chunks of a launch, at most.
        most: usize,
    },
    /// Some chunks of a launch name slots and others blocks.
    #[error("one launch has chunks mapped by slots and chunks mapped by blocks")]
    MixedMappings,
    /// More tokens in a chunk than kernels count.
    #[error("a chunk of {tokens} tokens, of at most {most}")]
    TooManyTokens {
        /// Tokens of the chunk.
        tokens: u64,
        /// Most tokens.
        most: u64,
    },
    /// A row of more vectors than kernels count.
    #[error(
        "rows of {row_bytes} bytes are too long for a launch that moves {vector_bytes} bytes at a time"
    )]
    RowTooLong {
        /// Bytes of a row.
        row_bytes: u64,
        /// Bytes that addresses and lengths allow to move at once.
        vector_bytes: u64,
    },
    /// A block of threads that a device cannot run, or that leaves warps partial.
    #[error("{threads} threads in a block, where multiples of 32 up to {most} are possible")]
    Threads {
        /// Threads asked for.
        threads: u32,
        /// Most threads.
        most: u32,
    },
    /// Rows are not made of words of 8 bytes, as pattern and checksums are.
    #[error("rows of {row_bytes} bytes, where pattern and checksums need a multiple of 8")]
    RowWords {
        /// Bytes of a row.
        row_bytes: u64,
    },
    /// Rows of the paged memory are in pieces, or not aligned to 8 bytes, and checksums need both.
    #[error("rows in pieces or aligned to {alignment} bytes, where checksums need whole rows at 8")]
    PagedWords {
        /// What every row's address is a multiple of.
        alignment: u64,
    },
    /// More planes than a kernel can count.
    #[error("paged memory of {planes} planes, of at most {}", u32::MAX)]
    Planes {
        /// Planes of the shape.
        planes: u64,
    },
    /// An operand is too short or not aligned.
    #[error(transparent)]
    Operand(#[from] OperandError),
    /// The stream or the paged memory belongs to another context than the kernels: of another device, of the same
    /// one, or of another driver object.
    #[error(
        "the {operand} is of another context, on device {other}, than the kernels, on device {kernels}"
    )]
    OtherDevice {
        /// Ordinal of the kernels' device.
        kernels: i32,
        /// What is elsewhere: `"stream"`, `"paged memory"`, `"host blocks"` or `"report"`.
        operand: &'static str,
        /// Ordinal of the other device.
        other: i32,
    },
    /// More rows are to be written than there are.
    #[error("a gather of {rows} rows, of at most {capacity}")]
    Rows {
        /// Rows to write.
        rows: u64,
        /// Rows of the output.
        capacity: u64,
    },
    /// The host's copy of the row index has another length than there are rows.
    #[error("a gather of {rows} rows has {given} row numbers")]
    IndexCount {
        /// Rows to write.
        rows: u64,
        /// Numbers given.
        given: u64,
    },
    /// A row would be read from beyond its pool of the source.
    #[error(
        "row {row} comes from row {source_row}, beyond {pool_stride} entries in rows of {row_stride}"
    )]
    RowOutOfRange {
        /// Row of the output.
        row: u64,
        /// Row of the source.
        source_row: u64,
        /// Entries of a pool of the source.
        pool_stride: u64,
        /// Entries from a row of the source to the next.
        row_stride: u64,
    },
    /// The host's copy of the ids has another length.
    #[error("the host's copy has {given} ids of blocks, where {count} are named")]
    BlockCount {
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
    /// A block would be written by two pairs of a copy.
    #[error("block {block} is the destination of pair {first} and of pair {second}")]
    PairTwice {
        /// The id.
        block: BlockId,
        /// Position of the last pair before `second` that writes the block.
        first: usize,
        /// Position of the first pair that writes a block again.
        second: usize,
    },
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
    AppendLayers {
        /// First layer named.
        first_layer: u32,
        /// Layers named.
        layers: u32,
        /// Layers of the pages.
        of: u32,
    },
    /// Keys without values, or values where each layer has one tensor.
    #[error("an append of {given} tensors, where a layer has {kv_count}")]
    AppendTensors {
        /// Tensors of rows given.
        given: u32,
        /// Tensors of a layer.
        kv_count: u32,
    },
    /// The kernel's module was not loaded at its first use.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The driver refused the launch, or the device is lost.
    #[error("the kernel was not launched")]
    Device(#[from] DeviceError),
}

impl From<CopyError> for KernelError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Device(error) => Self::Device(error),
            other => Self::Memory(other),
        }
    }
}

cuda_driver::messages::one_line_debug!(OperandError, PagedKvError, KernelError);
