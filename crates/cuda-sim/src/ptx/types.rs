//! The types of PTX operands.

/// A fundamental type.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F32,
    F64,
}

impl Type {
    /// Parses a type name, written without its dot.
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" | "f16" | "bf16" => Self::B16,
            "b32" | "f16x2" | "bf16x2" => Self::B32,
            "b64" => Self::B64,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Width in bits; a predicate has 1.
    pub(super) fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::B8 | Self::U8 | Self::S8 => 8,
            Self::B16 | Self::U16 | Self::S16 => 16,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 64,
        }
    }

    /// Size in memory, in bytes.
    pub(super) fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    pub(super) fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

/// A mask of the low `bits` bits.
pub(super) fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits.clamp(1, 64))
}

/// The low `bits` bits of `value`, sign- or zero-extended to 64 bits.
pub(super) fn extend(value: u64, bits: u32, signed: bool) -> u64 {
    let shift = 64 - bits.clamp(1, 64);
    if signed { ((value << shift) as i64 >> shift) as u64 } else { value << shift >> shift }
}
