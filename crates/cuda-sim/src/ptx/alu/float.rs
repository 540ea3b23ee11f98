//! Floating-point arithmetic, rounded to nearest even, with the bits that NVIDIA's cards give.
//!
//! Single precision has one NaN, which every operation gives. Double precision passes on an operand that
//! is a NaN, made quiet: of several, one that depends on the operation. Where none is, the NaN is the
//! negative one. All of it was read off an H100.
//!
//! Results are bits from here on: a compiler may put another NaN in the place of one that is a float.

use super::super::types::Type;
use super::{Binary, Ternary, Unary, Word, of};

/// The NaN of single precision.
pub(super) const SINGLE_NAN: u32 = 0x7fff_ffff;

/// The NaN that operations of double precision make of numbers.
const DOUBLE_NAN: u64 = 0xfff8_0000_0000_0000;

/// The bit that makes a NaN of double precision quiet.
const DOUBLE_QUIET: u64 = 1 << 51;

/// The bits of a NaN of double precision, made quiet.
pub(super) const fn quiet(bits: u64) -> u64 {
    bits | DOUBLE_QUIET
}

/// A type of operands.
trait Float: Word + PartialOrd {
    /// The results, as bits.
    type Bits: Word;

    fn bits(self) -> Self::Bits;
    /// The result of an operation that gave `self`. If that is a NaN, it is the first NaN of
    /// `operands` that is passed on, where this type does so.
    fn settled(self, operands: &[Self]) -> Self::Bits;
    fn is_nan(self) -> bool;
    fn is_negative(self) -> bool;

    /// The lesser of two numbers, where -0 is less than +0; of a number and a NaN the number.
    fn lesser(self, other: Self) -> Self::Bits {
        match (self.is_nan(), other.is_nan()) {
            (true, true) => other.settled(&[other]),
            (true, false) => other.bits(),
            (false, true) => self.bits(),
            _ if self < other || (self == other && self.is_negative()) => self.bits(),
            _ => other.bits(),
        }
    }

    /// The greater of two numbers, likewise.
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
        if self.is_nan() { SINGLE_NAN } else { self.to_bits() }
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

/// `fma`.
pub(in crate::ptx) fn float_ternary(name: &str, ty: Type) -> Option<Ternary> {
    match name {
        "fma" => of!(ty; F32 f32, F64 f64; |a, b, c| a.mul_add(b, c).settled(&[b, c, a])),
        _ => None,
    }
}

/// `neg`, `abs`, `sqrt` and `rcp`.
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
