//! Operations on bits: shifts, counts, fields and permutations.

use super::super::types::{Type, extend, mask};
use super::{Binary, Quaternary, Ternary, Unary, Word, of};

/// `not`, `cnot`, `popc`, `clz`, `brev` and `bfind`.
pub(in crate::ptx) fn bit_unary(name: &str, ty: Type) -> Option<Unary> {
    match name {
        "not" if ty == Type::Pred => Some(|a| a & 1 ^ 1),
        "not" => of!(ty; B16 u16, B32 u32, B64 u64; |a| !a),
        "cnot" => of!(ty; B16 u16, B32 u32, B64 u64; |a| u8::from(a == 0)),
        "popc" => of!(ty; B32 u32, B64 u64; |a| a.count_ones()),
        "clz" => of!(ty; B32 u32, B64 u64; |a| a.leading_zeros()),
        "brev" => of!(ty; B32 u32, B64 u64; |a| a.reverse_bits()),
        "bfind" => match ty {
            Type::U32 | Type::U64 => of!(ty; U32 u32, U64 u64; |a| a.checked_ilog2().unwrap_or(!0)),
            // The highest bit that differs from the sign bit.
            Type::S32 => Some(|a| {
                let a = i32::of(a);
                (if a < 0 { !a } else { a } as u32).checked_ilog2().unwrap_or(!0).register()
            }),
            Type::S64 => Some(|a| {
                let a = i64::of(a);
                (if a < 0 { !a } else { a } as u64).checked_ilog2().unwrap_or(!0).register()
            }),
            _ => None,
        },
        "bfind.shiftamt" => match ty {
            Type::U32 => Some(|a| {
                let found = u32::of(a).checked_ilog2();
                found.map_or(!0, |bit| 31 - bit).register()
            }),
            Type::U64 => Some(|a| a.checked_ilog2().map_or(!0, |bit| 63 - bit).register()),
            _ => None,
        },
        _ => None,
    }
}

/// `shl` and `shr`. A shift amount above the width counts as the width.
pub(in crate::ptx) fn bit_binary(name: &str, ty: Type) -> Option<Binary> {
    match name {
        "shl" => Some(match ty.bits() {
            16 => |a, b| if b as u32 >= 16 { 0 } else { (a << (b as u32)) & 0xFFFF },
            32 => |a, b| if b as u32 >= 32 { 0 } else { u32::of(a << (b as u32)).into() },
            64 => |a, b| if b as u32 >= 64 { 0 } else { a << (b as u32) },
            _ => return None,
        }),
        "shr" if ty.is_signed() => Some(match ty {
            Type::S16 => |a, b| (i16::of(a) >> (b as u32).min(15)).register(),
            Type::S32 => |a, b| (i32::of(a) >> (b as u32).min(31)).register(),
            _ => |a, b| (i64::of(a) >> (b as u32).min(63)).register(),
        }),
        "shr" => Some(match ty.bits() {
            16 => |a, b| if b as u32 >= 16 { 0 } else { u64::from(u16::of(a)) >> (b as u32) },
            32 => |a, b| if b as u32 >= 32 { 0 } else { u64::from(u32::of(a)) >> (b as u32) },
            64 => |a, b| if b as u32 >= 64 { 0 } else { a >> (b as u32) },
            _ => return None,
        }),
        _ => None,
    }
}

/// `bfe`, `prmt`, and `selp` without its type.
pub(in crate::ptx) fn bit_ternary(name: &str, ty: Type) -> Option<Ternary> {
    match (name, ty) {
        ("selp", _) => Some(|a, b, choice| if choice & 1 == 1 { a } else { b }),
        ("prmt", Type::B32) => Some(permute),
        ("bfe", Type::U32) => Some(|a, start, count| field(a, start, count, 32, false)),
        ("bfe", Type::S32) => Some(|a, start, count| field(a, start, count, 32, true)),
        ("bfe", Type::U64) => Some(|a, start, count| field(a, start, count, 64, false)),
        ("bfe", Type::S64) => Some(|a, start, count| field(a, start, count, 64, true)),
        _ => None,
    }
}

/// The start or length of a bit field. As on an H100, 32-bit fields use the low 8 bits of the
/// operand, and 64-bit fields the whole operand.
fn place(operand: u64, bits: u32) -> u32 {
    match bits {
        32 => (operand & 0xFF) as u32,
        _ => (operand & 0xFFFF_FFFF).min(0xFF) as u32,
    }
}

/// Bits `start .. start + count`. Bits beyond the width are zero, or copies of the sign.
fn field(a: u64, start: u64, count: u64, bits: u32, signed: bool) -> u64 {
    let (start, count) = (place(start, bits), place(count, bits));
    if count == 0 {
        return 0;
    }
    let wide = i128::from(extend(a, bits, signed) as i64);
    let wide = if signed { wide } else { i128::from(extend(a, bits, false)) };
    let shifted = (wide >> start.min(127)) as u64;
    // The sign is the field's last bit, or the value's sign if the field reaches beyond the value.
    let inside = count.min(bits.saturating_sub(start));
    let sign_bits = if inside == 0 { 64 } else { inside };
    extend(shifted, sign_bits.min(64), signed) & mask(bits)
}

/// `bfi`: inserts `a` into `b` at `start`.
pub(in crate::ptx) fn insert_bits(ty: Type) -> Option<Quaternary> {
    fn insert(a: u64, b: u64, start: u64, count: u64, bits: u32) -> u64 {
        let (start, count) = (place(start, bits), place(count, bits));
        if start >= bits || count == 0 {
            return b & mask(bits);
        }
        let hole = mask(count.min(bits)) << start;
        ((b & !hole) | (a << start & hole)) & mask(bits)
    }
    match ty {
        Type::B32 => Some(|a, b, start, count| insert(a, b, start, count, 32)),
        Type::B64 => Some(|a, b, start, count| insert(a, b, start, count, 64)),
        _ => None,
    }
}

/// `prmt`: each byte of the result is one of the eight bytes of `b:a`.
fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = (a & 0xFFFF_FFFF) | b << 32;
    (0..4).fold(0, |result, at| {
        let pick = selector >> (4 * at) & 0xF;
        let byte = bytes >> (8 * (pick & 7)) & 0xFF;
        let byte = if pick & 8 == 0 { byte } else { 0xFF * (byte >> 7) };
        result | byte << (8 * at)
    })
}

/// `shf`: shifts `b:a`, and returns the upper or lower half.
pub(in crate::ptx) fn funnel_shift(left: bool, wrap: bool) -> Ternary {
    fn join(a: u64, b: u64) -> u64 {
        (a & 0xFFFF_FFFF) | b << 32
    }
    match (left, wrap) {
        (true, true) => |a, b, by| join(a, b) << (by & 31) >> 32,
        (true, false) => |a, b, by| join(a, b) << (by & 0xFFFF_FFFF).min(32) >> 32,
        (false, true) => |a, b, by| u32::of(join(a, b) >> (by & 31)).into(),
        (false, false) => |a, b, by| u32::of(join(a, b) >> (by & 0xFFFF_FFFF).min(32)).into(),
    }
}

/// `lop3`: any function of three bits, given by its truth table.
pub(in crate::ptx) fn lop3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let pick = |x: u64, bit: u64| if bit == 1 { x } else { !x };
    let result = (0..8).filter(|row| table >> row & 1 == 1).fold(0, |result, row| {
        result | pick(a, row >> 2 & 1) & pick(b, row >> 1 & 1) & pick(c, row & 1)
    });
    result & 0xFFFF_FFFF
}
