//! Where the rows of a paged KV cache lie: axes and strides, proven not to overlap.

mod error;
mod rows;

use crate::KvShape;

pub use error::LayoutError;
pub use rows::RowPart;
pub(crate) use rows::RowParts;

/// The strides of a layout of the caller's own, in one tensor, with rows in one piece.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Strides {
    /// Bytes from a plane's first row to the next plane's.
    pub plane_bytes: u64,
    /// Bytes from a block's first row to the next block's, in one plane.
    pub block_bytes: u64,
    /// Bytes from a token's row to the next token's, in one block of one plane.
    pub token_bytes: u64,
}

/// How the planes of a KV cache are spread over tensors, which may lie anywhere.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Tensors {
    /// All planes in one tensor.
    One,
    /// A tensor for each layer.
    PerLayer,
    /// A tensor for each plane, those of a layer beside each other: tensor `layer * kv_count + kv`.
    PerPlane,
    /// A tensor for each plane, keys of all layers first: tensor `kv * layers + layer`.
    PerPlaneKvFirst,
}

impl Tensors {
    /// How many tensors there are.
    #[must_use]
    pub fn count(self, shape: &KvShape) -> u64 {
        match self {
            Self::One => 1,
            Self::PerLayer => u64::from(shape.layers()),
            Self::PerPlane | Self::PerPlaneKvFirst => shape.planes(),
        }
    }

    /// The tensor that holds plane `(layer, kv)`.
    pub(crate) fn index(self, shape: &KvShape, layer: u64, kv: u64) -> u64 {
        match self {
            Self::One => 0,
            Self::PerLayer => layer,
            Self::PerPlane => layer * u64::from(shape.kv_count()) + kv,
            Self::PerPlaneKvFirst => kv * u64::from(shape.layers()) + layer,
        }
    }
}

impl Tensors {
    /// Whether a tensor holds values alone (1), or keys (0).
    pub(crate) fn kv_of(self, shape: &KvShape, tensor: u64) -> usize {
        match self {
            Self::One | Self::PerLayer => 0,
            Self::PerPlane => usize::from(tensor % u64::from(shape.kv_count()) == 1),
            Self::PerPlaneKvFirst => usize::from(tensor / u64::from(shape.layers()) == 1),
        }
    }
}

/// Axes and strides of a layout, for [`PagedLayout::new`] and from [`PagedLayout::options`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LayoutOptions<'a> {
    /// Which tensors there are.
    pub tensors: Tensors,
    /// Bytes from a layer's first row to the next layer's; not looked at unless there is one tensor.
    pub layer_stride_bytes: u64,
    /// Bytes from the first row of a tensor of a layer (K) to that of the next (V); not looked at
    /// where each plane has a tensor of its own.
    pub kv_stride_bytes: u64,
    /// Bytes from a block's first row to the next block's, in one plane, padding and all.
    pub block_stride_bytes: u64,
    /// What a row is made of: one part or two.
    pub parts: &'a [RowPart],
}

/// How the rows of a KV cache of one [`KvShape`] are laid out in memory.
///
/// The row of token `t` of block `b` in plane `(layer, kv)` is made of parts, and a part of segments.
/// Byte `x` of segment `i` of part `p` lies, in the tensor that [`tensors`](PagedLayout::tensors) tells, at
/// ```text
/// layer * layer_stride + kv * kv_stride + b * block_stride
///     + p.offset + t * p.token_stride + i * p.segment_stride + x
/// ```
/// where the strides of axes that choose the tensor are 0. Keys and values may have parts of their own. In a chunk the same row is its segments one
/// after another, those of the first part first.
///
/// [`KvFormat`](crate::KvFormat) names the layouts of serving engines.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PagedLayout {
    tensors: Tensors,
    /// # Invariants
    /// 0 unless there is one tensor.
    layer_stride_bytes: u64,
    /// # Invariants
    /// 0 where each plane has a tensor.
    kv_stride_bytes: u64,
    block_stride_bytes: u64,
    /// Of every plane, or of keys alone.
    rows: RowParts,
    /// # Invariants
    /// None unless values lie differently from keys, and then a layer has two tensors.
    value_rows: Option<RowParts>,
}

impl PagedLayout {
    /// `[block][plane][token][row]`: a block is one piece, so that it can be mapped, copied and
    /// sent as one.
    #[must_use]
    pub fn block_major(shape: &KvShape) -> Self {
        Self::in_one_piece(shape, shape.block_plane_bytes(), shape.block_bytes(), shape.row_bytes())
    }

    /// `[plane][block][token][row]`: each plane is one piece of `blocks` blocks.
    ///
    /// # Errors
    /// [`LayoutError::Size`].
    pub fn layer_major(shape: &KvShape, blocks: u64) -> Result<Self, LayoutError> {
        let size = LayoutError::Size { block_bytes: shape.block_bytes(), blocks };
        let plane_bytes = shape.block_plane_bytes().checked_mul(blocks).ok_or(size)?;
        plane_bytes.checked_mul(shape.planes()).ok_or(size)?;
        Ok(Self::in_one_piece(shape, plane_bytes, shape.block_plane_bytes(), shape.row_bytes()))
    }

    /// Any strides under which rows do not overlap, such as those of a tensor of the host program.
    ///
    /// # Errors
    /// [`LayoutError::TokenStride`], [`LayoutError::Size`]. Overlaps between blocks and planes
    /// depend on the number of blocks; [`extent_bytes`](PagedLayout::extent_bytes) finds them.
    pub fn custom(shape: &KvShape, strides: Strides) -> Result<Self, LayoutError> {
        let Strides { plane_bytes, block_bytes, token_bytes } = strides;
        if token_bytes < shape.row_bytes() {
            let row_bytes = shape.row_bytes();
            return Err(LayoutError::TokenStride { token_stride_bytes: token_bytes, row_bytes });
        }
        let size = LayoutError::Size { block_bytes: shape.block_bytes(), blocks: 1 };
        plane_bytes.checked_mul(u64::from(shape.kv_count())).ok_or(size)?;
        Ok(Self::in_one_piece(shape, plane_bytes, block_bytes, token_bytes))
    }

    /// Any axes and strides.
    ///
    /// # Errors
    /// [`LayoutError::Parts`] and [`LayoutError::RowBytes`] for parts that do not make up a row;
    /// [`LayoutError::Overlap`] and [`LayoutError::PartsOverlap`] where rows of one block share a
    /// byte; [`LayoutError::Size`]. Overlaps between blocks and planes depend on the number of blocks;
    /// [`extent_bytes`](PagedLayout::extent_bytes) finds them.
    pub fn new(shape: &KvShape, options: LayoutOptions<'_>) -> Result<Self, LayoutError> {
        let one = options.tensors == Tensors::One;
        let lists = matches!(options.tensors, Tensors::PerPlane | Tensors::PerPlaneKvFirst);
        let layout = Self {
            tensors: options.tensors,
            layer_stride_bytes: if one { options.layer_stride_bytes } else { 0 },
            kv_stride_bytes: if lists { 0 } else { options.kv_stride_bytes },
            block_stride_bytes: options.block_stride_bytes,
            rows: RowParts::new(shape, options.parts)?,
            value_rows: None,
        };
        layout.extent_bytes(shape, 1)?;
        Ok(layout)
    }

    /// The same with rows of values made of other parts than those of keys, as paged attention's are: keys
    /// `[head][head size / x][token][x]`, values `[head][head size][token]`.
    ///
    /// Kernels then take a launch for keys and one for values.
    ///
    /// # Errors
    /// [`LayoutError::Format`] where a layer has not two tensors, and as of [`new`](PagedLayout::new).
    pub fn with_value_parts(self, shape: &KvShape, parts: &[RowPart]) -> Result<Self, LayoutError> {
        if shape.kv_count() != 2 {
            let (quantity, value) = ("kv_count", shape.kv_count().into());
            return Err(LayoutError::Format { quantity, value });
        }
        let rows = RowParts::new(shape, parts)?;
        let layout = Self { value_rows: (rows != self.rows).then_some(rows), ..self };
        layout.extent_bytes(shape, 1)?;
        Ok(layout)
    }

    /// The same rows in one tensor whose blocks are one piece each, for blocks that are kept elsewhere, as in
    /// a host tier: [`block_major`](PagedLayout::block_major) where rows are in one piece, or leave gaps.
    ///
    /// The bytes of a block and plane have the same order in both, so that copies between the two move them in
    /// long pieces, whatever rows are made of.
    #[must_use]
    pub fn packed(&self, shape: &KvShape) -> Self {
        let (plane_bytes, block_bytes) = (shape.block_plane_bytes(), shape.block_bytes());
        let lists = matches!(self.tensors, Tensors::PerPlane | Tensors::PerPlaneKvFirst);
        // Keys and values that lie between each other stay so.
        let is_between = !lists && self.kv_stride_bytes < plane_bytes;
        let packed = Self {
            tensors: Tensors::One,
            // No overflow: it is part of a block's bytes.
            layer_stride_bytes: plane_bytes * u64::from(shape.kv_count()),
            kv_stride_bytes: if is_between { self.kv_stride_bytes } else { plane_bytes },
            block_stride_bytes: block_bytes,
            ..*self
        };
        match packed.extent_bytes(shape, 1) {
            Ok(bytes) if bytes == block_bytes => packed,
            _ => Self::block_major(shape),
        }
    }

    /// A layout of one tensor whose rows are in one piece.
    fn in_one_piece(
        shape: &KvShape,
        plane_bytes: u64,
        block_stride_bytes: u64,
        token_stride_bytes: u64,
    ) -> Self {
        Self {
            tensors: Tensors::One,
            // The callers have multiplied before, or the product is part of a block's bytes.
            layer_stride_bytes: plane_bytes * u64::from(shape.kv_count()),
            kv_stride_bytes: plane_bytes,
            block_stride_bytes,
            rows: RowParts::in_one_piece(shape.row_bytes(), token_stride_bytes),
            value_rows: None,
        }
    }

    /// Bytes from the first byte of a tensor to the last byte of its last row, for `blocks` blocks;
    /// the same for every tensor.
    ///
    /// # Errors
    /// [`LayoutError::RowBytes`] for a shape whose rows are not those of the layout;
    /// [`LayoutError::Overlap`] when two rows would share a byte, or could not be told not to;
    /// [`LayoutError::Size`] when 64 bits cannot count the bytes.
    pub fn extent_bytes(&self, shape: &KvShape, blocks: u64) -> Result<u64, LayoutError> {
        let size = LayoutError::Size { block_bytes: shape.block_bytes(), blocks };
        let (layers, kv_count) = (u64::from(shape.layers()), u64::from(shape.kv_count()));
        let (layers, kv_count) = match self.tensors {
            Tensors::One => (layers, kv_count),
            Tensors::PerLayer => (1, kv_count),
            Tensors::PerPlane | Tensors::PerPlaneKvFirst => (1, 1),
        };
        let outer = [
            Axis::new("layer", self.layer_stride_bytes, layers),
            Axis::new("kv", self.kv_stride_bytes, kv_count),
            Axis::new("block", self.block_stride_bytes, blocks),
        ];
        let Some(values) = &self.value_rows else {
            return self.rows.extent_bytes(shape, outer, size);
        };
        // A block of a plane of either kind is what the outer axes step over.
        let none = [Axis::new("block", 0, 1); 3];
        let keys_bytes = self.rows.extent_bytes(shape, none, size)?;
        let values_bytes = values.extent_bytes(shape, none, size)?;
        Axis::extent_bytes(outer, keys_bytes.max(values_bytes), size)
    }

    /// Which tensors there are.
    #[must_use]
    pub fn tensors(&self) -> Tensors {
        self.tensors
    }

    /// Where plane `(layer, kv)` begins in its tensor. No overflow where the extent was computed.
    pub(crate) fn plane_offset(&self, layer: u64, kv: u64) -> u64 {
        layer * self.layer_stride_bytes + kv * self.kv_stride_bytes
    }

    /// Bytes from a layer to the next in one tensor, 0 where layers have tensors of their own.
    pub(crate) fn layer_stride_bytes(&self) -> u64 {
        self.layer_stride_bytes
    }

    /// Bytes from K to V in one tensor, 0 where planes have tensors of their own.
    pub(crate) fn kv_stride_bytes(&self) -> u64 {
        self.kv_stride_bytes
    }

    /// Bytes from a block to the next, in one plane.
    pub(crate) fn block_stride_bytes(&self) -> u64 {
        self.block_stride_bytes
    }

    /// Bytes from a token to the next, in one block of one plane of keys, of the first part of their rows.
    pub(crate) fn token_stride_bytes(&self) -> u64 {
        self.rows.parts()[0].token_stride_bytes
    }

    /// What the rows of tensor `kv` of a layer are made of, one part or two: of keys for 0, of values for 1.
    #[must_use]
    pub fn parts_of(&self, kv: u64) -> &[RowPart] {
        self.rows_of(kv).parts()
    }

    fn rows_of(&self, kv: u64) -> &RowParts {
        self.value_rows.as_ref().filter(|_| kv == 1).unwrap_or(&self.rows)
    }

    /// Axes and strides, with the parts of keys' rows; strides of axes that choose the tensor are 0.
    #[must_use]
    pub fn options(&self) -> LayoutOptions<'_> {
        LayoutOptions {
            tensors: self.tensors,
            layer_stride_bytes: self.layer_stride_bytes,
            kv_stride_bytes: self.kv_stride_bytes,
            block_stride_bytes: self.block_stride_bytes,
            parts: self.parts_of(0),
        }
    }

    /// Whether the rows of all planes are made of the same parts.
    pub(crate) fn has_like_planes(&self) -> bool {
        self.value_rows.is_none()
    }

    /// Whether a row is one piece of memory that begins where its plane, block and token say.
    #[must_use]
    pub fn has_whole_rows(&self) -> bool {
        self.rows.are_whole() && self.has_like_planes()
    }

    /// Whether a block of `shape` is one piece of memory, planes and all, and the next begins at its end: `false` where
    /// there is room behind blocks, even if each is one piece.
    #[must_use]
    pub fn has_whole_blocks(&self, shape: &KvShape) -> bool {
        *self == Self::block_major(shape)
    }

    /// Whether each plane of a block of `shape` is one piece of memory.
    pub(crate) fn has_whole_planes(&self, shape: &KvShape) -> bool {
        let size = LayoutError::Size { block_bytes: shape.block_bytes(), blocks: 1 };
        let none = [Axis::new("block", 0, 1); 3];
        let is_whole =
            |kv| self.rows_of(kv).extent_bytes(shape, none, size) == Ok(shape.block_plane_bytes());
        is_whole(0) && is_whole(1)
    }

    /// What every row's address is a multiple of, given that tensors are: 1, 2, 4, 8 or 16 bytes,
    /// which segments are multiples of too.
    pub(crate) fn alignment(&self) -> u64 {
        self.alignment_of(0).min(self.alignment_of(1))
    }

    /// The same of tensor `kv` of every layer.
    pub(crate) fn alignment_of(&self, kv: u64) -> u64 {
        alignment_of(
            self.layer_stride_bytes
                | self.kv_stride_bytes
                | self.block_stride_bytes
                | self.rows_of(kv).alignment_bits(),
        )
    }
}

/// The greatest power of two, at most 16, that divides all numbers that are or-ed together in `bits`.
pub(crate) fn alignment_of(bits: u64) -> u64 {
    1 << bits.trailing_zeros().min(4)
}

/// Steps along one axis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    name: &'static str,
    stride_bytes: u64,
    count: u64,
}

impl Axis {
    pub(crate) fn new(name: &'static str, stride_bytes: u64, count: u64) -> Self {
        Self { name, stride_bytes, count }
    }

    /// What all the axes take together, from the innermost out: each step must clear all that lies
    /// inside it, beginning with `inner_bytes`.
    pub(crate) fn extent_bytes<const N: usize>(
        mut axes: [Self; N],
        inner_bytes: u64,
        size: LayoutError,
    ) -> Result<u64, LayoutError> {
        axes.sort_by_key(|axis| axis.stride_bytes);
        let mut extent = inner_bytes;
        for Self { name, stride_bytes, count } in axes {
            if count <= 1 {
                continue;
            }
            if stride_bytes < extent {
                return Err(LayoutError::Overlap { axis: name, stride_bytes, inner_bytes: extent });
            }
            extent = stride_bytes
                .checked_mul(count - 1)
                .and_then(|bytes| bytes.checked_add(extent))
                .ok_or(size)?;
        }
        Ok(extent)
    }
}

#[cfg(test)]
mod tests;
