//! The shape of a model's KV: the bytes of one token and of one block.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// K and V: each layer keeps one row of each for every token.
pub const KV_COUNT: u64 = 2;

/// The row length must be a multiple of this: the widest single access of the transfer kernels.
pub const ROW_ALIGNMENT_BYTES: u64 = 8;

/// The element type of keys and values.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 8-bit float, either of the two formats.
    Fp8,
}

impl Dtype {
    /// Every type, in the order of messages.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Fp8];

    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A text that is not an element type.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("unknown dtype {found:?}; expected f32, f16, bf16 or fp8")]
pub struct UnknownDtype {
    /// The text.
    pub found: String,
}

cuda_driver::messages::one_line_debug!(UnknownDtype);

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(text: &str) -> Result<Self, UnknownDtype> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| UnknownDtype { found: text.to_owned() })
    }
}

/// The shape of a model's KV.
///
/// # Examples
///
/// ```
/// use kv_replay::shape::{Dtype, KvModelShape};
///
/// let shape = KvModelShape { layers: 32, kv_heads: 8, head_size: 128, dtype: Dtype::Bf16 };
/// assert_eq!(shape.row_bytes()?, 2048);
/// assert_eq!(shape.block_bytes(16)?, 2 << 20);
/// # Ok::<(), kv_replay::shape::ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KvModelShape {
    /// Number of layers, which are divided over the devices.
    pub layers: u32,
    /// Number of heads of K, and of V, in one layer.
    pub kv_heads: u32,
    /// Number of elements of one head.
    pub head_size: u32,
    /// Type of one element.
    pub dtype: Dtype,
}

/// The reason why a shape is refused.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A dimension is 0.
    #[error("{option} is 0, expected at least 1")]
    Zero {
        /// The option with the dimension.
        option: &'static str,
    },
    /// The transfer kernels cannot copy a row in whole words.
    #[error(
        "a row of {kv_heads} KV heads x {head_size} elements of {dtype} has {row_bytes} bytes, \
         expected a multiple of {ROW_ALIGNMENT_BYTES}"
    )]
    RowAlignment {
        /// Number of heads.
        kv_heads: u32,
        /// Number of elements of a head.
        head_size: u32,
        /// Type of an element.
        dtype: Dtype,
        /// Length of the row.
        row_bytes: u64,
    },
    /// The bytes of a block exceed 64 bits.
    #[error(
        "a block of {block_tokens} tokens x {layers} layers x K and V x {kv_heads} heads x \
         {head_size} elements of {dtype} has more bytes than 64 bits can count"
    )]
    Overflow {
        /// Number of tokens of a block.
        block_tokens: u32,
        /// Number of layers.
        layers: u32,
        /// Number of heads.
        kv_heads: u32,
        /// Number of elements of a head.
        head_size: u32,
        /// Type of an element.
        dtype: Dtype,
    },
}

cuda_driver::messages::one_line_debug!(ShapeError);

impl KvModelShape {
    /// Bytes of one token's K, or V, in one layer.
    ///
    /// # Errors
    ///
    /// [`ShapeError`] for an invalid shape.
    pub fn row_bytes(&self) -> Result<u64, ShapeError> {
        let Self { layers, kv_heads, head_size, dtype } = *self;
        for (option, value) in
            [("--layers", layers), ("--kv-heads", kv_heads), ("--head-size", head_size)]
        {
            if value == 0 {
                return Err(ShapeError::Zero { option });
            }
        }
        let row_bytes = (u64::from(kv_heads) * u64::from(head_size))
            .checked_mul(dtype.bytes())
            .ok_or_else(|| self.overflow(1))?;
        if !row_bytes.is_multiple_of(ROW_ALIGNMENT_BYTES) {
            return Err(ShapeError::RowAlignment { kv_heads, head_size, dtype, row_bytes });
        }
        Ok(row_bytes)
    }

    /// Bytes of a block of `block_tokens` tokens in all layers, K and V.
    ///
    /// # Errors
    ///
    /// [`ShapeError`] for an invalid shape.
    pub fn block_bytes(&self, block_tokens: u32) -> Result<u64, ShapeError> {
        self.row_bytes()
            .map_err(|error| match error {
                ShapeError::Overflow { .. } => self.overflow(block_tokens),
                other => other,
            })?
            .checked_mul(KV_COUNT * u64::from(self.layers))
            .and_then(|bytes| bytes.checked_mul(u64::from(block_tokens)))
            .ok_or_else(|| self.overflow(block_tokens))
    }

    fn overflow(&self, block_tokens: u32) -> ShapeError {
        let Self { layers, kv_heads, head_size, dtype } = *self;
        ShapeError::Overflow { block_tokens, layers, kv_heads, head_size, dtype }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvModelShape =
        KvModelShape { layers: 2, kv_heads: 3, head_size: 4, dtype: Dtype::Bf16 };

    #[test]
    fn bytes_are_counted() {
        assert_eq!(SHAPE.row_bytes(), Ok(24));
        assert_eq!(SHAPE.block_bytes(16), Ok(24 * 2 * 2 * 16));
        assert_eq!(KvModelShape { dtype: Dtype::F32, ..SHAPE }.row_bytes(), Ok(48));
    }

    #[test]
    fn a_row_that_is_no_multiple_of_a_word_is_named() {
        let error = KvModelShape { dtype: Dtype::Fp8, ..SHAPE }.block_bytes(16).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a row of 3 KV heads x 4 elements of fp8 has 12 bytes, expected a multiple of 8"
        );
    }

    #[test]
    fn zero_and_overflow_name_their_values() {
        let zero = KvModelShape { head_size: 0, ..SHAPE }.row_bytes().unwrap_err();
        assert_eq!(zero.to_string(), "--head-size is 0, expected at least 1");
        let max = u32::MAX;
        let huge = KvModelShape { layers: max, kv_heads: 1 << 31, head_size: 8, dtype: Dtype::F32 };
        let error = huge.block_bytes(64).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a block of 64 tokens x 4294967295 layers x K and V x 2147483648 heads x 8 elements \
             of f32 has more bytes than 64 bits can count"
        );
        let row = KvModelShape { kv_heads: max, head_size: max, ..huge };
        assert!(matches!(
            row.block_bytes(64),
            Err(ShapeError::Overflow { block_tokens: 64, kv_heads: u32::MAX, .. })
        ));
    }

    #[test]
    fn names_of_types_are_read_back() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        let error = "int8".parse::<Dtype>().unwrap_err();
        assert_eq!(error.to_string(), "unknown dtype \"int8\"; expected f32, f16, bf16 or fp8");
    }
}
