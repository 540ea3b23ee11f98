//! Where the rows of a paged KV cache lie: three strides, proven not to overlap.

use crate::KvShape;
use crate::shape::WORD_BYTES;

/// The strides of a layout of the caller's own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Strides {
    /// Bytes from a plane's first row to the next plane's.
    pub plane_bytes: u64,
    /// Bytes from a block's first row to the next block's, in one plane.
    pub block_bytes: u64,
    /// Bytes from a token's row to the next token's, in one block of one plane.
    pub token_bytes: u64,
}

/// How the rows of a KV cache of one [`KvShape`] are laid out in memory.
///
/// The row of token `t` of block `b` in plane `p` lies at
/// `base + p * plane + b * block + t * token`, with the three strides of the layout.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PagedLayout {
    /// # Invariants
    /// All strides are multiples of 8, and `token` is at least the row's bytes.
    plane_stride_bytes: u64,
    block_stride_bytes: u64,
    token_stride_bytes: u64,
}

impl PagedLayout {
    /// `[block][plane][token][row]`: a block is one piece, so that it can be mapped, copied and
    /// sent as one.
    #[must_use]
    pub fn block_major(shape: &KvShape) -> Self {
        Self {
            plane_stride_bytes: shape.block_plane_bytes(),
            block_stride_bytes: shape.block_bytes(),
            token_stride_bytes: shape.row_bytes(),
        }
    }

    /// `[plane][block][token][row]`: each plane is one piece of `blocks` blocks.
    ///
    /// # Errors
    /// [`LayoutError::Size`].
    pub fn layer_major(shape: &KvShape, blocks: u64) -> Result<Self, LayoutError> {
        let plane_stride_bytes = shape
            .block_plane_bytes()
            .checked_mul(blocks)
            .ok_or(LayoutError::Size { block_bytes: shape.block_bytes(), blocks })?;
        Ok(Self {
            plane_stride_bytes,
            block_stride_bytes: shape.block_plane_bytes(),
            token_stride_bytes: shape.row_bytes(),
        })
    }

    /// Any strides under which rows do not overlap, such as those of a tensor of the host program.
    ///
    /// # Errors
    /// [`LayoutError::Misaligned`], [`LayoutError::TokenStride`]. Overlaps between blocks and planes
    /// depend on the number of blocks; [`extent_bytes`](PagedLayout::extent_bytes) finds them.
    pub fn custom(shape: &KvShape, strides: Strides) -> Result<Self, LayoutError> {
        let Strides { plane_bytes, block_bytes, token_bytes } = strides;
        for stride_bytes in [plane_bytes, block_bytes, token_bytes] {
            if !stride_bytes.is_multiple_of(WORD_BYTES) {
                return Err(LayoutError::Misaligned { stride_bytes });
            }
        }
        if token_bytes < shape.row_bytes() {
            let row_bytes = shape.row_bytes();
            return Err(LayoutError::TokenStride { token_stride_bytes: token_bytes, row_bytes });
        }
        Ok(Self {
            plane_stride_bytes: plane_bytes,
            block_stride_bytes: block_bytes,
            token_stride_bytes: token_bytes,
        })
    }

    /// Bytes from the first byte of the first row to the last byte of the last, for `blocks` blocks.
    ///
    /// # Errors
    /// [`LayoutError::Overlap`] when two rows would share a byte, or could not be told not to;
    /// [`LayoutError::Size`] when 64 bits cannot count the bytes.
    pub fn extent_bytes(&self, shape: &KvShape, blocks: u64) -> Result<u64, LayoutError> {
        let size = LayoutError::Size { block_bytes: shape.block_bytes(), blocks };
        let mut axes = [
            (self.plane_stride_bytes, shape.planes(), "plane"),
            (self.block_stride_bytes, blocks, "block"),
            (self.token_stride_bytes, u64::from(shape.block_tokens()), "token"),
        ];
        axes.sort_by_key(|&(stride, ..)| stride);
        // From the innermost axis out: each step must clear all that lies inside it.
        let mut extent = shape.row_bytes();
        for (stride_bytes, count, axis) in axes {
            if count <= 1 {
                continue;
            }
            if stride_bytes < extent {
                return Err(LayoutError::Overlap { axis, stride_bytes, inner_bytes: extent });
            }
            extent = stride_bytes
                .checked_mul(count - 1)
                .and_then(|bytes| bytes.checked_add(extent))
                .ok_or(size)?;
        }
        Ok(extent)
    }

    /// Bytes from a plane to the next.
    #[must_use]
    pub fn plane_stride_bytes(&self) -> u64 {
        self.plane_stride_bytes
    }

    /// Bytes from a block to the next, in one plane.
    #[must_use]
    pub fn block_stride_bytes(&self) -> u64 {
        self.block_stride_bytes
    }

    /// Bytes from a token to the next, in one block of one plane.
    #[must_use]
    pub fn token_stride_bytes(&self) -> u64 {
        self.token_stride_bytes
    }

    pub(crate) fn parts(&self, shape: &KvShape) -> [crate::block_units::RowPart; 1] {
        [crate::block_units::RowPart {
            segment_bytes: shape.row_bytes(),
            segments: 1,
            segment_stride_bytes: shape.row_bytes(),
            token_stride_bytes: self.token_stride_bytes,
            offset_bytes: 0,
        }]
    }

    /// Whether a block of `shape` is one piece of memory, planes and all.
    #[must_use]
    pub fn has_whole_blocks(&self, shape: &KvShape) -> bool {
        *self == Self::block_major(shape)
    }
}

/// A layout in which rows would overlap, or which does not fit an address space.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Rows are accessed in words of 8 bytes.
    #[error("a stride of {stride_bytes} bytes is not a multiple of 8")]
    Misaligned {
        /// The stride given, in bytes.
        stride_bytes: u64,
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
        /// `"plane"`, `"block"` or `"token"`.
        axis: &'static str,
        /// Bytes of the step.
        stride_bytes: u64,
        /// Bytes that the axes inside it take.
        inner_bytes: u64,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvShapeOptions;

    fn shape() -> KvShape {
        let options = KvShapeOptions { layers: 3, kv_count: 2, row_bytes: 24, block_tokens: 4 };
        KvShape::new(options).unwrap()
    }

    #[test]
    fn both_named_layouts_are_dense() {
        let shape = shape();
        let block_major = PagedLayout::block_major(&shape);
        let layer_major = PagedLayout::layer_major(&shape, 10).unwrap();
        for layout in [block_major, layer_major] {
            assert_eq!(layout.extent_bytes(&shape, 10), Ok(10 * shape.block_bytes()));
        }
        assert_eq!((block_major.plane_stride_bytes(), block_major.block_stride_bytes()), (96, 576));
        assert_eq!((layer_major.plane_stride_bytes(), layer_major.block_stride_bytes()), (960, 96));
        assert!(block_major.has_whole_blocks(&shape) && !layer_major.has_whole_blocks(&shape));
        assert_eq!(layer_major.extent_bytes(&shape, 3), Ok(5 * 960 + 3 * 96));
        // More blocks than the planes were spaced for.
        assert_eq!(
            layer_major.extent_bytes(&shape, 11),
            Err(LayoutError::Overlap { axis: "plane", stride_bytes: 960, inner_bytes: 1056 })
        );
    }

    #[test]
    fn own_strides_are_checked() {
        let shape = shape();
        let dense = Strides { plane_bytes: 96, block_bytes: 576, token_bytes: 24 };
        assert_eq!(PagedLayout::custom(&shape, dense), Ok(PagedLayout::block_major(&shape)));
        assert_eq!(
            PagedLayout::custom(&shape, Strides { block_bytes: 580, ..dense }),
            Err(LayoutError::Misaligned { stride_bytes: 580 })
        );
        assert_eq!(
            PagedLayout::custom(&shape, Strides { token_bytes: 16, ..dense }),
            Err(LayoutError::TokenStride { token_stride_bytes: 16, row_bytes: 24 })
        );
        // Planes interleaved inside a token, [block][token][plane][row], as some engines have it.
        let interleaved = Strides { plane_bytes: 24, block_bytes: 576, token_bytes: 144 };
        let interleaved = PagedLayout::custom(&shape, interleaved).unwrap();
        assert_eq!(interleaved.extent_bytes(&shape, 7), Ok(7 * 576));
        let torn = PagedLayout::custom(&shape, Strides { block_bytes: 88, ..dense }).unwrap();
        assert!(matches!(torn.extent_bytes(&shape, 2), Err(LayoutError::Overlap { .. })));
        assert_eq!(torn.extent_bytes(&shape, 1), Ok(576));
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let shape = shape();
        let size = |blocks| LayoutError::Size { block_bytes: 576, blocks };
        assert_eq!(PagedLayout::layer_major(&shape, u64::MAX), Err(size(u64::MAX)));
        let layout = PagedLayout::block_major(&shape);
        assert_eq!(layout.extent_bytes(&shape, u64::MAX / 8), Err(size(u64::MAX / 8)));
    }
}
