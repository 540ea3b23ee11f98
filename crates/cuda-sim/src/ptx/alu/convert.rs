//! `cvt`: conversions between types.

use super::super::types::{Type, extend, mask};
use super::float::{SINGLE_NAN, quiet};

/// How a float becomes an integer, or a float with less precision.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::ptx) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// One conversion.
#[derive(Clone, Copy, Debug)]
pub(in crate::ptx) struct Conversion {
    pub(in crate::ptx) from: Type,
    pub(in crate::ptx) to: Type,
    /// For a float that becomes an integer or stays of its type.
    pub(in crate::ptx) to_integral: Option<Rounding>,
    pub(in crate::ptx) saturate: bool,
    /// Width of the destination register, to which an integer is extended.
    pub(in crate::ptx) register_bits: u32,
}

impl Conversion {
    /// The converted value.
    pub(in crate::ptx) fn apply(&self, value: u64) -> u64 {
        if self.from.is_float() {
            let value = match self.from {
                Type::F32 => f64::from(f32::from_bits(value as u32)),
                _ => f64::from_bits(value),
            };
            if value.is_nan() {
                return self.of_nan(value.to_bits());
            }
            let value = self.to_integral.map_or(value, |rounding| round(value, rounding));
            return match self.to {
                Type::F32 => u64::from((self.saturated(value) as f32).to_bits()),
                Type::F64 => self.saturated(value).to_bits(),
                _ => self.integer(value as i128),
            };
        }
        let integer = extend(value, self.from.bits(), self.from.is_signed());
        let wide =
            if self.from.is_signed() { i128::from(integer as i64) } else { i128::from(integer) };
        match self.to {
            Type::F32 if self.saturate => u64::from((wide.clamp(0, 1) as f32).to_bits()),
            Type::F32 => u64::from((wide as f32).to_bits()),
            Type::F64 if self.saturate => (wide.clamp(0, 1) as f64).to_bits(),
            Type::F64 => (wide as f64).to_bits(),
            _ if self.saturate => self.integer(wide),
            to => extend(integer, to.bits(), to.is_signed()) & mask(self.register_bits),
        }
    }

    /// What becomes of a NaN of these bits, widened to double precision: the integer 0 of single precision
    /// and to no more than 32 bits, the integer with the highest bit of its type alone otherwise. Between
    /// floats, the sign and what fits of the payload stay where double precision is narrowed.
    fn of_nan(&self, bits: u64) -> u64 {
        match self.to {
            Type::F32 | Type::F64 if self.saturate => 0,
            Type::F32 if self.from == Type::F64 => {
                let (sign, payload) = (bits >> 63 << 31, quiet(bits) >> 29 & 0x7F_FFFF);
                sign | 0x7F80_0000 | payload
            }
            Type::F32 => SINGLE_NAN.into(),
            Type::F64 => quiet(bits),
            to if self.from == Type::F64 || to.bits() == 64 => {
                extend(1 << (to.bits() - 1), to.bits(), to.is_signed()) & mask(self.register_bits)
            }
            _ => 0,
        }
    }

    /// A number clamped to 0 to 1, if that was asked for; -0 becomes +0.
    fn saturated(&self, value: f64) -> f64 {
        match self.saturate {
            true if value > 0.0 => value.min(1.0),
            true => 0.0,
            false => value,
        }
    }

    /// An integer clamped to the range of the destination type.
    fn integer(&self, value: i128) -> u64 {
        let bits = self.to.bits();
        let (least, most) = if self.to.is_signed() {
            (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
        } else {
            (0, (1i128 << bits) - 1)
        };
        value.clamp(least, most) as u64 & mask(self.register_bits)
    }
}

fn round(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}
