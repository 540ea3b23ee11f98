//! Why a shape or a layout cannot be.

/// A shape that a KV cache cannot have, or a layout in which rows would overlap or which does not fit an address
/// space.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// There would be nothing to keep.
    #[error("the {quantity} of a KV shape is 0")]
    Zero {
        /// Name of the number that is 0.
        quantity: &'static str,
    },
    /// The sums of such a block are not prepared beforehand.
    #[error(
        "a block of {block_bytes} bytes and {block_tokens} tokens is too long to prepare its sums"
    )]
    Sums {
        /// Bytes of a block.
        block_bytes: u64,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// A block would have more bytes than 64 bits can count.
    #[error(
        "a block of {layers} layers x {kv_count} tensors x {row_bytes} bytes x {block_tokens} \
         tokens does not fit in 64 bits"
    )]
    BlockBytes {
        /// Layers asked for.
        layers: u32,
        /// Tensors of a layer asked for.
        kv_count: u32,
        /// Bytes of a row asked for.
        row_bytes: u64,
        /// Tokens of a block asked for.
        block_tokens: u32,
    },
    /// Each row would overlap the next token's.
    #[error("a token stride of {token_stride_bytes} bytes is shorter than a row of {row_bytes}")]
    TokenStride {
        /// The stride given, in bytes.
        token_stride_bytes: u64,
        /// Bytes of a row.
        row_bytes: u64,
    },
    /// One step along an axis does not clear what lies within the step.
    #[error(
        "a {axis} stride of {stride_bytes} bytes does not clear the {inner_bytes} bytes inside it"
    )]
    Overlap {
        /// `"layer"`, `"kv"`, `"block"`, `"token"` or `"segment"`.
        axis: &'static str,
        /// Bytes of the step.
        stride_bytes: u64,
        /// Bytes that the axes inside it take.
        inner_bytes: u64,
    },
    /// A row is made of one part or two.
    #[error("{parts} parts, where a row has 1 or 2")]
    Parts {
        /// Parts given.
        parts: usize,
    },
    /// The parts of a row are not as long as a row together.
    #[error("parts of {parts_bytes} bytes in a row of {row_bytes}")]
    RowBytes {
        /// Bytes of all segments of all parts.
        parts_bytes: u64,
        /// Bytes of a row of the shape.
        row_bytes: u64,
    },
    /// The two parts of the rows of a block share bytes.
    #[error(
        "the parts of a block, {first_bytes} bytes at {first_offset} and {second_bytes} at \
         {second_offset}, overlap"
    )]
    PartsOverlap {
        /// Where the first part of a block begins.
        first_offset: u64,
        /// Bytes that the first part takes in a block.
        first_bytes: u64,
        /// Where the second part of a block begins.
        second_offset: u64,
        /// Bytes that the second part takes in a block.
        second_bytes: u64,
    },
    /// A quantity that a format needs is 0, or one that it cannot have is not.
    #[error("{quantity} of {value} in a format that cannot have it")]
    Format {
        /// Name of the quantity.
        quantity: &'static str,
        /// Its value.
        value: u64,
    },
    /// 64 bits cannot count the bytes.
    #[error("{blocks} blocks of {block_bytes} bytes do not fit in 64 bits")]
    Size {
        /// Bytes of a block, without gaps.
        block_bytes: u64,
        /// Number of blocks.
        blocks: u64,
    },
}

cuda_driver::messages::one_line_debug!(LayoutError);
