//! What the KV of one token and of one block looks like, in numbers that are known to fit.

use crate::layout::LayoutError;

/// What a [`KvShape`] is made of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KvShapeOptions {
    /// Layers whose KV is kept, at least 1.
    pub layers: u32,
    /// Tensors of each layer: 2 for keys and values, 1 where both are compressed into one.
    pub kv_count: u32,
    /// Bytes of one token in one tensor (heads x head size x bytes of an element), at least 1.
    ///
    /// Any length moves; the pattern and its checksums are for multiples of 8.
    pub row_bytes: u64,
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
}

/// The shape of a KV cache: layers, tensors of a layer, bytes of a row, tokens of a block.
///
/// A *row* is one token's bytes in one tensor of one layer. A *plane* is one tensor of one layer;
/// planes are numbered `layer * kv_count + kv`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct KvShape {
    /// # Invariants
    /// All four are at least 1, and `block_bytes` is their product, which fits.
    layers: u32,
    kv_count: u32,
    row_bytes: u64,
    block_tokens: u32,
    block_bytes: u64,
}

impl KvShape {
    /// Checks the numbers.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn new(options: KvShapeOptions) -> Result<Self, LayoutError> {
        let KvShapeOptions { layers, kv_count, row_bytes, block_tokens } = options;
        let zero = [
            ("layers", u64::from(layers)),
            ("kv_count", u64::from(kv_count)),
            ("row_bytes", row_bytes),
            ("block_tokens", u64::from(block_tokens)),
        ];
        if let Some(&(quantity, _)) = zero.iter().find(|(_, value)| *value == 0) {
            return Err(LayoutError::Zero { quantity });
        }
        let planes = u64::from(layers) * u64::from(kv_count);
        let block_bytes = planes
            .checked_mul(row_bytes)
            .and_then(|token_bytes| token_bytes.checked_mul(u64::from(block_tokens)))
            .ok_or(LayoutError::BlockBytes { layers, kv_count, row_bytes, block_tokens })?;
        Ok(Self { layers, kv_count, row_bytes, block_tokens, block_bytes })
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Tensors of a layer.
    #[must_use]
    pub fn kv_count(&self) -> u32 {
        self.kv_count
    }

    /// Bytes of one token in one plane.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Whole 64-bit words of a row.
    #[must_use]
    pub fn row_words(&self) -> u64 {
        self.row_bytes / WORD_BYTES
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Number of planes: layers times tensors of a layer.
    #[must_use]
    pub fn planes(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.kv_count)
    }

    /// Bytes of one token in all planes.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        self.planes() * self.row_bytes
    }

    /// Bytes of one block in one plane.
    #[must_use]
    pub fn block_plane_bytes(&self) -> u64 {
        self.row_bytes * u64::from(self.block_tokens)
    }

    /// Bytes of one block in all planes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }
}

/// The pattern and its checksums are made of such words.
pub(crate) const WORD_BYTES: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: KvShapeOptions =
        KvShapeOptions { layers: 32, kv_count: 2, row_bytes: 2048, block_tokens: 16 };

    #[test]
    fn sizes_follow_from_the_shape() {
        let shape = KvShape::new(LLAMA).unwrap();
        assert_eq!((shape.planes(), shape.token_bytes()), (64, 128 << 10));
        assert_eq!((shape.block_plane_bytes(), shape.block_bytes()), (32 << 10, 2 << 20));
        assert_eq!(shape.row_words(), 256);
    }

    #[test]
    fn impossible_shapes_are_refused_with_their_numbers() {
        let zero = |quantity| Err(LayoutError::Zero { quantity });
        assert_eq!(KvShape::new(KvShapeOptions { layers: 0, ..LLAMA }), zero("layers"));
        assert_eq!(KvShape::new(KvShapeOptions { kv_count: 0, ..LLAMA }), zero("kv_count"));
        assert_eq!(KvShape::new(KvShapeOptions { row_bytes: 0, ..LLAMA }), zero("row_bytes"));
        assert_eq!(KvShape::new(KvShapeOptions { block_tokens: 0, ..LLAMA }), zero("block_tokens"));
        let odd = KvShape::new(KvShapeOptions { row_bytes: 132, ..LLAMA }).unwrap();
        assert_eq!((odd.block_plane_bytes(), odd.row_words()), (2112, 16));
        let (layers, row_bytes) = (u32::MAX, 1 << 32);
        let refused = KvShape::new(KvShapeOptions { layers, row_bytes, ..LLAMA });
        let (kv_count, block_tokens) = (2, 16);
        let error = LayoutError::BlockBytes { layers, kv_count, row_bytes, block_tokens };
        assert_eq!(refused, Err(error));
        assert!(error.to_string().contains("4294967295 layers x 2 tensors x 4294967296 bytes"));
    }
}
