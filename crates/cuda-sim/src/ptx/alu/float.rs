//! Floating-point arithmetic, rounded to nearest even.

use super::super::types::Type;
use super::{Binary, Ternary, Unary, Word, of};

/// `add`, `sub`, `mul`, `div`, `min` and `max`.
pub(in crate::ptx) fn float_binary(name: &str, ty: Type) -> Option<Binary> {
    macro_rules! each {
        (|$a:ident, $b:ident| $result:expr) => {
            of!(ty; F32 f32, F64 f64; |$a, $b| $result)
        };
    }
    match name {
        "add" => each!(|a, b| a + b),
        "sub" => each!(|a, b| a - b),
        "mul" => each!(|a, b| a * b),
        "div" => each!(|a, b| a / b),
        "min" => each!(|a, b| a.min(b)),
        "max" => each!(|a, b| a.max(b)),
        "copysign" => each!(|a, b| b.copysign(a)),
        _ => None,
    }
}

/// `fma`.
pub(in crate::ptx) fn float_ternary(name: &str, ty: Type) -> Option<Ternary> {
    match name {
        "fma" => of!(ty; F32 f32, F64 f64; |a, b, c| a.mul_add(b, c)),
        _ => None,
    }
}

/// `neg`, `abs`, `sqrt` and `rcp`.
pub(in crate::ptx) fn float_unary(name: &str, ty: Type) -> Option<Unary> {
    match name {
        "neg" => of!(ty; F32 f32, F64 f64; |a| -a),
        "abs" => of!(ty; F32 f32, F64 f64; |a| a.abs()),
        "sqrt" => of!(ty; F32 f32, F64 f64; |a| a.sqrt()),
        "rcp" => of!(ty; F32 f32, F64 f64; |a| a.recip()),
        _ => None,
    }
}
