//! Floating-point arithmetic, rounded to nearest even, with the same result bits as NVIDIA GPUs.
//!
//! Every single-precision operation whose result is a NaN returns the same NaN. Double precision
//! returns an operand that is a NaN, made quiet; which of several depends on the operation. If no
//! operand is a NaN, the result is the negative NaN. All of this was measured on an H100.
//!
//! Results are bits from here on, because a compiler may replace a NaN of a float value by another
//! NaN.

use cuda_driver::guard;

use super::super::types::Type;
use super::{Binary, Ternary, Unary, Word, of};

pub(super) const SINGLE_NAN: u32 = 0x7fff_ffff;

/// The NaN that double-precision operations produce from numbers.
const DOUBLE_NAN: u64 = 0xfff8_0000_0000_0000;

/// The bit that makes a double-precision NaN quiet.
const DOUBLE_QUIET: u64 = 1 << 51;

/// The bits of a double-precision NaN, made quiet.
pub(super) const fn quiet(bits: u64) -> u64 {
    bits | DOUBLE_QUIET
}

/// A type of operands.
trait Float: Word + PartialOrd {
    /// The result type: bits.
    type Bits: Word;

    fn bits(self) -> Self::Bits;
    /// The bits of the result `self`. If `self` is a NaN and this type returns NaN operands, the
    /// result is the first NaN among `operands`.
    fn settled(self, operands: &[Self]) -> Self::Bits;
    fn is_nan(self) -> bool;
    fn is_negative(self) -> bool;

    /// The smaller of two numbers, where -0 is less than +0. If one operand is a NaN, the other
    /// operand.
    fn lesser(self, other: Self) -> Self::Bits {
        match (self.is_nan(), other.is_nan()) {
            (true, true) => other.settled(&[other]),
            (true, false) => other.bits(),
            (false, true) => self.bits(),
            _ if self < other || (self == other && self.is_negative()) => self.bits(),
            _ => other.bits(),
        }
    }

    /// The greater of two numbers, with the same rules.
    fn greater(self, other: Self) -> Self::Bits {
        match (self.is_nan(), other.is_nan()) {
            (true, true) => other.settled(&[other]),
            (true, false) => other.bits(),
            (false, true) => self.bits(),
            _ if self > other || (self == other && !self.is_negative()) => self.bits(),
            _ => other.bits(),
        }
    }
}

impl Float for f32 {
    type Bits = u32;

    fn bits(self) -> u32 {
        self.to_bits()
    }

    fn settled(self, _operands: &[Self]) -> u32 {
        if guard!("sim.one-nan", self.is_nan(), else false) { SINGLE_NAN } else { self.to_bits() }
    }

    fn is_nan(self) -> bool {
        self.to_bits() & 0x7fff_ffff > 0x7f80_0000
    }

    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

impl Float for f64 {
    type Bits = u64;

    fn bits(self) -> u64 {
        self.to_bits()
    }

    fn settled(self, operands: &[Self]) -> u64 {
        if !Float::is_nan(self) {
            return self.to_bits();
        }
        let passed_on = operands.iter().find(|&&operand| Float::is_nan(operand));
        passed_on.map_or(DOUBLE_NAN, |&operand| quiet(operand.to_bits()))
    }

    fn is_nan(self) -> bool {
        self.to_bits() & 0x7fff_ffff_ffff_ffff > 0x7ff0_0000_0000_0000
    }

    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

/// `add`, `sub`, `mul`, `div`, `min`, `max` and `copysign`.
pub(in crate::ptx) fn float_binary(name: &str, ty: Type) -> Option<Binary> {
    macro_rules! each {
        (|$a:ident, $b:ident| $result:expr) => {
            of!(ty; F32 f32, F64 f64; |$a, $b| $result)
        };
    }
    match name {
        "add" => each!(|a, b| (a + b).settled(&[b, a])),
        "sub" => each!(|a, b| (a - b).settled(&[b, a])),
        "mul" => each!(|a, b| (a * b).settled(&[b, a])),
        "div" => each!(|a, b| (a / b).settled(&[a, b])),
        "min" => each!(|a, b| a.lesser(b)),
        "max" => each!(|a, b| a.greater(b)),
        "copysign" => each!(|a, b| b.copysign(a)),
        _ => None,
    }
}

pub(in crate::ptx) fn float_ternary(name: &str, ty: Type) -> Option<Ternary> {
    match name {
        "fma" => of!(ty; F32 f32, F64 f64; |a, b, c| a.mul_add(b, c).settled(&[b, c, a])),
        _ => None,
    }
}

pub(in crate::ptx) fn float_unary(name: &str, ty: Type) -> Option<Unary> {
    match name {
        // A NaN keeps its sign.
        "neg" => of!(ty; F32 f32, F64 f64; |a| (-a).settled(&[a])),
        "abs" => of!(ty; F32 f32, F64 f64; |a| a.abs().settled(&[a])),
        "sqrt" => of!(ty; F32 f32, F64 f64; |a| a.sqrt().settled(&[a])),
        "rcp" => of!(ty; F32 f32, F64 f64; |a| a.recip().settled(&[a])),
        _ => None,
    }
}
