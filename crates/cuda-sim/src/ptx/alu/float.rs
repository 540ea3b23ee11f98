//! Floating-point arithmetic, rounded to nearest even, with the bits that NVIDIA's cards give.
//!
//! Single precision has one NaN, which every operation gives. Double precision passes on the first
//! operand that is a NaN, made quiet; where none is, the NaN is the negative one.

use super::super::types::Type;
use super::{Binary, Ternary, Unary, Word, of};

/// The NaN of single precision.
pub(super) const SINGLE_NAN: u32 = 0x7fff_ffff;

/// The NaN that operations of double precision make of numbers.
const DOUBLE_NAN: u64 = 0xfff8_0000_0000_0000;

/// The bit that makes a NaN of double precision quiet.
const DOUBLE_QUIET: u64 = 1 << 51;

/// A NaN of double precision, made quiet.
pub(super) fn quiet(value: f64) -> f64 {
    f64::from_bits(value.to_bits() | DOUBLE_QUIET)
}

/// A type of operands and results.
trait Float: Word + PartialOrd {
    /// Itself as the result of an operation on `operands`: another NaN, if it is one.
    fn settled(self, operands: &[Self]) -> Self;
    fn is_nan(self) -> bool;
    fn is_negative(self) -> bool;

    /// The lesser of two numbers, where -0 is less than +0; of a number and a NaN the number.
    fn lesser(self, other: Self) -> Self {
        match (self.is_nan(), other.is_nan()) {
            (true, true) => other.settled(&[other]),
            (true, false) => other,
            (false, true) => self,
            _ if self < other || (self == other && self.is_negative()) => self,
            _ => other,
        }
    }

    /// The greater of two numbers, likewise.
    fn greater(self, other: Self) -> Self {
        match (self.is_nan(), other.is_nan()) {
            (true, true) => other.settled(&[other]),
            (true, false) => other,
            (false, true) => self,
            _ if self > other || (self == other && !self.is_negative()) => self,
            _ => other,
        }
    }
}

impl Float for f32 {
    fn settled(self, _operands: &[Self]) -> Self {
        if self.is_nan() { Self::from_bits(SINGLE_NAN) } else { self }
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }

    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

impl Float for f64 {
    fn settled(self, operands: &[Self]) -> Self {
        if !self.is_nan() {
            return self;
        }
        let first = operands.iter().find(|operand| operand.is_nan());
        first.map_or(Self::from_bits(DOUBLE_NAN), |&operand| quiet(operand))
    }

    fn is_nan(self) -> bool {
        self.is_nan()
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
        "add" => each!(|a, b| (a + b).settled(&[a, b])),
        "sub" => each!(|a, b| (a - b).settled(&[a, b])),
        "mul" => each!(|a, b| (a * b).settled(&[a, b])),
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
        "fma" => of!(ty; F32 f32, F64 f64; |a, b, c| a.mul_add(b, c).settled(&[a, b, c])),
        _ => None,
    }
}

/// `neg`, `abs`, `sqrt` and `rcp`.
pub(in crate::ptx) fn float_unary(name: &str, ty: Type) -> Option<Unary> {
    match name {
        "neg" => of!(ty; F32 f32, F64 f64; |a| (-a).settled(&[-a])),
        "abs" => of!(ty; F32 f32, F64 f64; |a| a.abs().settled(&[a.abs()])),
        "sqrt" => of!(ty; F32 f32, F64 f64; |a| a.sqrt().settled(&[a])),
        "rcp" => of!(ty; F32 f32, F64 f64; |a| a.recip().settled(&[a])),
        _ => None,
    }
}
