//! `cvt`: conversions between types.

use cuda_driver::guard;

use super::super::types::{Type, extend, mask};
use super::float::{SINGLE_NAN, quiet};

/// Rounding of a float to an integer or to lower precision.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::ptx) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::ptx) struct Conversion {
    pub(in crate::ptx) from: Type,
    pub(in crate::ptx) to: Type,
    /// For a float that is converted to an integer, or rounded to an integral float of the same
    /// type.
    pub(in crate::ptx) to_integral: Option<Rounding>,
    pub(in crate::ptx) saturate: bool,
    /// Width of the destination register. An integer is extended to it.
    pub(in crate::ptx) register_bits: u32,
}

impl Conversion {
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

    /// Converts a NaN with these bits, widened to double precision. To integers: 0 if the source is
    /// single precision and the integer has at most 32 bits, otherwise only the highest bit of the
    /// integer type is set. Between floats, narrowing from double precision keeps the sign and the
    /// part of the payload that fits.
    fn of_nan(&self, bits: u64) -> u64 {
        match self.to {
            Type::F32 | Type::F64 if self.saturate => 0,
            Type::F32 if self.from == Type::F64 => {
                let (sign, payload) = (bits >> 63 << 31, quiet(bits) >> 29 & 0x7F_FFFF);
                sign | 0x7F80_0000 | payload
            }
            Type::F32 => SINGLE_NAN.into(),
            Type::F64 => quiet(bits),
            to if guard!(
                "sim.nan-to-integer",
                self.from == Type::F64 || to.bits() == 64,
                else false
            ) =>
            {
                extend(1 << (to.bits() - 1), to.bits(), to.is_signed()) & mask(self.register_bits)
            }
            _ => 0,
        }
    }

    /// Clamps a number to 0 to 1, if requested; -0 becomes +0.
    fn saturated(&self, value: f64) -> f64 {
        if !self.saturate {
            value
        } else if value > 0.0 {
            value.min(1.0)
        } else {
            0.0
        }
    }

    /// Clamps an integer to the range of the destination type.
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
