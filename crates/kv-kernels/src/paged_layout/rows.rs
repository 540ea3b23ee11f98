//! What a row is made of: parts, and segments of a part.

use super::{Axis, LayoutError};
use crate::KvShape;
use cuda_driver::guard;

/// A part of every row: `segments` pieces of `segment_bytes` bytes each.
///
/// A row of keys of 8 heads in blocks `[head][token][head size]` is one part of 8 segments. A row of an
/// indexer's page `[tokens x values][tokens x scale]` is two parts of one segment each.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct RowPart {
    /// Bytes of one segment, at least 1.
    pub segment_bytes: u64,
    /// How many segments, at least 1.
    pub segments: u32,
    /// Bytes from a segment to the next of the same row.
    pub segment_stride_bytes: u64,
    /// Bytes from a token's first segment to the next token's, in one block.
    pub token_stride_bytes: u64,
    /// Bytes from the start of a block to the first segment of its first token.
    pub offset_bytes: u64,
}

/// One part or two.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct RowParts {
    /// # Invariants
    /// The first `count` make up a row of the shape that they were made for; each has at least one
    /// segment of at least one byte. The others are all zero. `count` is 1 or 2.
    parts: [RowPart; 2],
    count: usize,
}

const NO_PART: RowPart = RowPart {
    segment_bytes: 0,
    segments: 0,
    segment_stride_bytes: 0,
    token_stride_bytes: 0,
    offset_bytes: 0,
};

impl RowParts {
    /// Rows of `row_bytes` bytes, at least 1, each in one piece.
    pub(crate) fn in_one_piece(row_bytes: u64, token_stride_bytes: u64) -> Self {
        let part = RowPart {
            segment_bytes: row_bytes,
            segments: 1,
            segment_stride_bytes: row_bytes,
            token_stride_bytes,
            offset_bytes: 0,
        };
        Self { parts: [part, NO_PART], count: 1 }
    }

    pub(crate) fn new(shape: &KvShape, given: &[RowPart]) -> Result<Self, LayoutError> {
        let mut parts = [NO_PART; 2];
        let count = given.len();
        if count == 0 || count > parts.len() {
            return Err(LayoutError::Parts { parts: count });
        }
        let row_bytes = shape.row_bytes();
        let mut parts_bytes = Some(0u64);
        for (part, given) in parts.iter_mut().zip(given) {
            *part = *given;
            if part.segments == 1 {
                // It is never used, and would only stand in the way of comparing.
                part.segment_stride_bytes = part.segment_bytes;
            }
            let bytes = part.segment_bytes.checked_mul(u64::from(part.segments));
            if bytes == Some(0) {
                return Err(LayoutError::RowBytes { parts_bytes: 0, row_bytes });
            }
            parts_bytes = parts_bytes.zip(bytes).and_then(|(all, bytes)| all.checked_add(bytes));
        }
        if parts_bytes != Some(row_bytes) {
            let parts_bytes = parts_bytes.unwrap_or(u64::MAX);
            return Err(LayoutError::RowBytes { parts_bytes, row_bytes });
        }
        Ok(Self { parts, count })
    }

    pub(crate) fn parts(&self) -> &[RowPart] {
        &self.parts[..self.count]
    }

    pub(crate) fn are_whole(&self) -> bool {
        self.count == 1 && self.parts[0].segments == 1 && self.parts[0].offset_bytes == 0
    }

    /// Every number of bytes that vectors must divide, or-ed together.
    pub(crate) fn alignment_bits(&self) -> u64 {
        self.parts().iter().fold(0, |bits, part| {
            bits | part.segment_bytes
                | part.segment_stride_bytes
                | part.token_stride_bytes
                | part.offset_bytes
        })
    }

    /// Bytes from the start of a tensor to the end of its last row.
    pub(crate) fn extent_bytes(
        &self,
        shape: &KvShape,
        [layer, kv, block]: [Axis; 3],
        size: LayoutError,
    ) -> Result<u64, LayoutError> {
        let bytes = |part: &RowPart| part.segment_bytes * u64::from(part.segments);
        // No overflow: they make up a row of the shape that they were made for.
        let parts_bytes = self.parts().iter().map(bytes).sum();
        let is_of_rows = parts_bytes == shape.row_bytes();
        if !guard!("kernels.layout-has-these-rows", is_of_rows, else true) {
            return Err(LayoutError::RowBytes { parts_bytes, row_bytes: shape.row_bytes() });
        }
        let inner = |part: &RowPart| {
            let tokens = u64::from(shape.block_tokens());
            [
                Axis::new("token", part.token_stride_bytes, tokens),
                Axis::new("segment", part.segment_stride_bytes, u64::from(part.segments)),
            ]
        };
        let [first, second] = &self.parts;
        if self.count == 1 {
            let [token, segment] = inner(first);
            // Rows of several planes may be interleaved, so that all axes count together.
            let axes = [layer, kv, block, token, segment];
            let extent = Axis::extent_bytes(axes, first.segment_bytes, size)?;
            return extent.checked_add(first.offset_bytes).ok_or(size);
        }
        let first_bytes = Axis::extent_bytes(inner(first), first.segment_bytes, size)?;
        let second_bytes = Axis::extent_bytes(inner(second), second.segment_bytes, size)?;
        let (first_offset, second_offset) = (first.offset_bytes, second.offset_bytes);
        let first_end = first_offset.checked_add(first_bytes).ok_or(size)?;
        let second_end = second_offset.checked_add(second_bytes).ok_or(size)?;
        if first_offset < second_end && second_offset < first_end {
            return Err(LayoutError::PartsOverlap {
                first_offset,
                first_bytes,
                second_offset,
                second_bytes,
            });
        }
        // A block of one plane, both parts, is what the outer axes step over.
        Axis::extent_bytes([layer, kv, block], first_end.max(second_end), size)
    }
}
