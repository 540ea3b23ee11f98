//! Integer arithmetic, comparison and logic.

use super::super::types::{Type, mask};
use super::{Binary, Ternary, Unary, Word, of};

/// `add`, `sub`, `mul.lo`, `mul.hi`, `div`, `rem`, `min` and `max`.
pub(in crate::ptx) fn integer_binary(name: &str, ty: Type) -> Option<Binary> {
    macro_rules! each {
        (|$a:ident, $b:ident| $result:expr) => {
            of!(ty; U16 u16, S16 i16, U32 u32, S32 i32, U64 u64, S64 i64; |$a, $b| $result)
        };
    }
    match name {
        "add" => each!(|a, b| a.wrapping_add(b)),
        "sub" => each!(|a, b| a.wrapping_sub(b)),
        "mul.lo" => each!(|a, b| a.wrapping_mul(b)),
        "mul.hi" => high(ty),
        // PTX leaves the result of a division by zero open. GPUs return all ones.
        "div" => each!(|a, b| if b == 0 { !0 } else { a.wrapping_div(b) }),
        "rem" => each!(|a, b| if b == 0 { !0 } else { a.wrapping_rem(b) }),
        "min" => each!(|a, b| a.min(b)),
        "max" => each!(|a, b| a.max(b)),
        _ => None,
    }
}

fn high(ty: Type) -> Option<Binary> {
    Some(match ty {
        Type::U16 => |a, b| u64::of(u64::from(u16::of(a)) * u64::from(u16::of(b))) >> 16,
        Type::S16 => {
            |a, b| (((i32::from(i16::of(a)) * i32::from(i16::of(b))) >> 16) as i16).register()
        }
        Type::U32 => |a, b| (u64::from(u32::of(a)) * u64::from(u32::of(b))) >> 32,
        Type::S32 => {
            |a, b| (((i64::from(i32::of(a)) * i64::from(i32::of(b))) >> 32) as i32).register()
        }
        Type::U64 => |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64,
        Type::S64 => |a, b| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64,
        _ => return None,
    })
}

/// `mul.wide`: a product of double width.
pub(in crate::ptx) fn wide_binary(ty: Type) -> Option<Binary> {
    Some(match ty {
        Type::U16 => |a, b| u64::from(u16::of(a)) * u64::from(u16::of(b)),
        Type::S16 => |a, b| (i32::from(i16::of(a)) * i32::from(i16::of(b))).register(),
        Type::U32 => |a, b| u64::from(u32::of(a)) * u64::from(u32::of(b)),
        Type::S32 => |a, b| (i64::from(i32::of(a)) * i64::from(i32::of(b))).register(),
        _ => return None,
    })
}

/// `mad.wide`: a product of double width, plus a sum of that width.
pub(in crate::ptx) fn wide_ternary(ty: Type) -> Option<Ternary> {
    Some(match ty {
        Type::U16 => |a, b, c| {
            (u32::from(u16::of(a)) * u32::from(u16::of(b))).wrapping_add(c as u32).register()
        },
        Type::S16 => |a, b, c| {
            (i32::from(i16::of(a)) * i32::from(i16::of(b))).wrapping_add(c as i32).register()
        },
        Type::U32 => |a, b, c| (u64::from(u32::of(a)) * u64::from(u32::of(b))).wrapping_add(c),
        Type::S32 => |a, b, c| {
            (i64::from(i32::of(a)) * i64::from(i32::of(b))).wrapping_add(c as i64).register()
        },
        _ => return None,
    })
}

/// `mad.lo`, `mad.hi` and `sad`.
pub(in crate::ptx) fn integer_ternary(name: &str, ty: Type) -> Option<Ternary> {
    macro_rules! each {
        (|$a:ident, $b:ident, $c:ident| $result:expr) => {
            of!(ty; U16 u16, S16 i16, U32 u32, S32 i32, U64 u64, S64 i64; |$a, $b, $c| $result)
        };
    }
    match name {
        "mad.lo" => each!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        "mad.hi" => Some(match ty {
            Type::U32 => |a, b, c| {
                (((u64::from(u32::of(a)) * u64::from(u32::of(b))) >> 32) as u32)
                    .wrapping_add(c as u32)
                    .register()
            },
            Type::S32 => |a, b, c| {
                (((i64::from(i32::of(a)) * i64::from(i32::of(b))) >> 32) as i32)
                    .wrapping_add(c as i32)
                    .register()
            },
            Type::U64 => |a, b, c| (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c),
            Type::S64 => |a, b, c| {
                (((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64).wrapping_add(c)
            },
            _ => return None,
        }),
        "sad" => each!(
            |a, b, c| if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) }.wrapping_add(c)
        ),
        _ => None,
    }
}

pub(in crate::ptx) fn integer_unary(name: &str, ty: Type) -> Option<Unary> {
    match name {
        "neg" => of!(ty; S16 i16, S32 i32, S64 i64; |a| a.wrapping_neg()),
        "abs" => of!(ty; S16 i16, S32 i32, S64 i64; |a| a.wrapping_abs()),
        _ => None,
    }
}

/// A sum or difference with carry. Returns the result and the carry out.
pub(in crate::ptx) fn add_carry(
    bits: u32,
    a: u64,
    b: u64,
    carry: u64,
    subtract: bool,
) -> (u64, u64) {
    let limit = mask(bits);
    let (a, b) = (a & limit, b & limit);
    let sum = if subtract {
        u128::from(a).wrapping_sub(u128::from(b)).wrapping_sub(u128::from(carry))
    } else {
        u128::from(a) + u128::from(b) + u128::from(carry)
    };
    (sum as u64 & limit, (sum >> bits) as u64 & 1)
}

/// A comparison. Returns 1 or 0.
pub(in crate::ptx) fn compare(name: &str, ty: Type) -> Option<Binary> {
    // Untyped bits can only be compared for equality.
    if matches!(ty, Type::B16 | Type::B32 | Type::B64 | Type::Pred) && !matches!(name, "eq" | "ne")
    {
        return None;
    }
    macro_rules! each {
        (|$a:ident, $b:ident| $result:expr) => {
            of!(ty; U16 u16, B16 u16, S16 i16, U32 u32, B32 u32, S32 i32, U64 u64, B64 u64,
                S64 i64, F32 f32, F64 f64; |$a, $b| u8::from($result))
        };
    }
    macro_rules! floats {
        (|$a:ident, $b:ident| $result:expr) => {
            of!(ty; F32 f32, F64 f64; |$a, $b| u8::from($result))
        };
    }
    macro_rules! unsigned {
        (|$a:ident, $b:ident| $result:expr) => {
            of!(ty; U16 u16, U32 u32, U64 u64; |$a, $b| u8::from($result))
        };
    }
    match name {
        "eq" => each!(|a, b| a == b),
        "ne" if ty.is_float() => floats!(|a, b| a.partial_cmp(&b).is_some_and(|o| o.is_ne())),
        "ne" => each!(|a, b| a != b),
        "lt" => each!(|a, b| a < b),
        "le" => each!(|a, b| a <= b),
        "gt" => each!(|a, b| a > b),
        "ge" => each!(|a, b| a >= b),
        "lo" => unsigned!(|a, b| a < b),
        "ls" => unsigned!(|a, b| a <= b),
        "hi" => unsigned!(|a, b| a > b),
        "hs" => unsigned!(|a, b| a >= b),
        "equ" => floats!(|a, b| a.partial_cmp(&b).is_none_or(|o| o.is_eq())),
        "neu" => floats!(|a, b| a != b),
        "ltu" => floats!(|a, b| a.partial_cmp(&b).is_none_or(|o| o.is_lt())),
        "leu" => floats!(|a, b| a.partial_cmp(&b).is_none_or(|o| o.is_le())),
        "gtu" => floats!(|a, b| a.partial_cmp(&b).is_none_or(|o| o.is_gt())),
        "geu" => floats!(|a, b| a.partial_cmp(&b).is_none_or(|o| o.is_ge())),
        "num" => floats!(|a, b| a.partial_cmp(&b).is_some()),
        "nan" => floats!(|a, b| a.partial_cmp(&b).is_none()),
        _ => None,
    }
}

/// `and`, `or` and `xor`, of bits and of predicates.
pub(in crate::ptx) fn logic(name: &str) -> Option<Binary> {
    Some(match name {
        "and" => |a, b| a & b,
        "or" => |a, b| a | b,
        "xor" => |a, b| a ^ b,
        _ => return None,
    })
}
