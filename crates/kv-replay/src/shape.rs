//! The shape of a model's KV: the bytes of one token and of one block.

use serde::{Deserialize, Serialize};

use crate::command_line::by_names;

/// K and V: each layer keeps one row of each for every token.
pub const KV_COUNT: u64 = 2;

/// The row length must be a multiple of this: the widest single access of the transfer kernels.
pub const ROW_ALIGNMENT_BYTES: u64 = 8;

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    #[default]
    Fp8,
}

impl Dtype {
    const NAMES: [(Self, &'static str); 4] =
        [(Self::F32, "f32"), (Self::F16, "f16"), (Self::Bf16, "bf16"), (Self::Fp8, "fp8")];

    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }
}

by_names!(Dtype, "dtype");

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct KvModelShape {
    pub layers: u32,
    pub kv_heads: u32,
    pub head_size: u32,
    pub dtype: Dtype,
}

#[derive(Clone, Eq, PartialEq, thiserror::Error)]
pub enum ShapeError {
    #[error("{option} is 0, expected at least 1")]
    Zero { option: &'static str },
    #[error(
        "a row of {kv_heads} KV heads x {head_size} elements of {dtype} has {row_bytes} bytes, \
         expected a multiple of {ROW_ALIGNMENT_BYTES}"
    )]
    RowAlignment { kv_heads: u32, head_size: u32, dtype: Dtype, row_bytes: u64 },
    #[error(
        "a block of {block_tokens} tokens x {layers} layers x K and V x {kv_heads} heads x \
         {head_size} elements of {dtype} has more bytes than 64 bits can count"
    )]
    Overflow { block_tokens: u32, layers: u32, kv_heads: u32, head_size: u32, dtype: Dtype },
}

cuda_driver::messages::one_line_debug!(ShapeError);

impl KvModelShape {
    /// Bytes of one token's K, or V, in one layer.
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
