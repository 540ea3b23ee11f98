//! Floats of 16 and 8 bits: conversions and packed arithmetic.
//!
//! Numbers are computed in double or single precision, both of which represent all of them exactly.

use super::float::SINGLE_NAN;
use super::{Binary, Unary};

/// A float format of less than 32 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Small {
    /// Number of bits of the whole code.
    bits: u32,
    mantissa: u32,
    bias: i32,
    /// Whether the format has no infinity, and all codes of the largest exponent except one are
    /// numbers.
    finite: bool,
}

const F16: Small = Small { bits: 16, mantissa: 10, bias: 15, finite: false };
const BF16: Small = Small { bits: 16, mantissa: 7, bias: 127, finite: false };
const E4M3: Small = Small { bits: 8, mantissa: 3, bias: 7, finite: true };
const E5M2: Small = Small { bits: 8, mantissa: 2, bias: 15, finite: false };

impl Small {
    /// All ones except the sign: the NaN that every operation returns.
    const fn nan(self) -> u64 {
        (1 << (self.bits - 1)) - 1
    }

    /// The code of infinity, or of the NaN in a format without infinity.
    const fn beyond(self) -> u64 {
        if self.finite { self.nan() } else { self.nan() >> self.mantissa << self.mantissa }
    }

    fn decode(self, code: u64) -> f64 {
        let magnitude = code & self.nan();
        let value = match (magnitude.cmp(&self.beyond()), self.finite) {
            (std::cmp::Ordering::Less, _) => {
                let fraction = magnitude & ((1 << self.mantissa) - 1);
                let exponent = (magnitude >> self.mantissa) as i32;
                let (whole, exponent) =
                    if exponent == 0 { (0, 1) } else { (1 << self.mantissa, exponent) };
                let step = exponent - self.bias - self.mantissa as i32;
                (whole + fraction) as f64 * 2f64.powi(step)
            }
            (std::cmp::Ordering::Equal, false) => f64::INFINITY,
            _ => return f64::NAN,
        };
        if code >> (self.bits - 1) & 1 == 1 { -value } else { value }
    }

    /// The nearest code, ties to even. A number out of range becomes infinity, or the largest
    /// number if `saturates`.
    fn encode(self, value: f64, saturates: bool) -> u64 {
        if value.is_nan() {
            return self.nan();
        }
        let sign = u64::from(value.is_sign_negative()) << (self.bits - 1);
        let value = value.abs();
        let largest = if saturates { self.beyond() - 1 } else { self.beyond() };
        if value.is_infinite() {
            return sign | largest;
        }
        let least = 1 - self.bias;
        // For a subnormal double this is below every smallest exponent.
        let exponent = ((value.to_bits() >> 52) as i32 - 1023).max(least);
        let step = exponent - self.mantissa as i32;
        // Exact: the factor is a power of two, and every result stays in the range of normal
        // numbers.
        let steps = (value * 2f64.powi(-step)).round_ties_even() as u64;
        // If rounding reaches the next power of two, the sum carries into the exponent, as
        // intended.
        let code = (((exponent - least) as u64) << self.mantissa) + steps;
        sign | code.min(largest)
    }
}

/// `cvt` of one operand between these formats.
pub(in crate::ptx) fn small_unary(to: &str, from: &str) -> Option<Unary> {
    Some(match (to, from) {
        ("f32", "f16") => |a| {
            let value = F16.decode(a);
            u64::from(if value.is_nan() { SINGLE_NAN } else { (value as f32).to_bits() })
        },
        // The upper half of a single. Even a NaN is unchanged.
        ("f32", "bf16") => |a| (a & 0xFFFF) << 16,
        ("f16", "f32") => |a| F16.encode(single(a), false),
        ("bf16", "f32") => |a| BF16.encode(single(a), false),
        ("f16x2", "e4m3x2") => |a| halves(E4M3, a),
        ("f16x2", "e5m2x2") => |a| halves(E5M2, a),
        _ => return None,
    })
}

/// `cvt` of two single-precision operands to a pair. The first operand becomes the upper half.
pub(in crate::ptx) fn small_pair(to: &str) -> Option<Binary> {
    Some(match to {
        "f16x2" => |a, b| F16.encode(single(a), false) << 16 | F16.encode(single(b), false),
        "bf16x2" => |a, b| BF16.encode(single(a), false) << 16 | BF16.encode(single(b), false),
        "e4m3x2" => |a, b| E4M3.encode(single(a), true) << 8 | E4M3.encode(single(b), true),
        "e5m2x2" => |a, b| E5M2.encode(single(a), true) << 8 | E5M2.encode(single(b), true),
        _ => return None,
    })
}

/// `cvt.pack.sat.s8.s32.b32`: two numbers saturated to bytes, and shifted in below the lower half
/// of a third operand.
pub(in crate::ptx) fn pack_bytes(a: u64, b: u64, c: u64) -> u64 {
    let byte = |value: u64| u64::from((value as i32).clamp(-128, 127) as u8);
    (c & 0xFFFF) << 16 | byte(a) << 8 | byte(b)
}

/// Arithmetic on both halves of a register.
pub(in crate::ptx) fn packed_binary(name: &str, format: &str) -> Option<Binary> {
    Some(match (name, format) {
        // A product of two halves is exact in double precision, so it is rounded only once.
        ("mul", "f16x2") => |a, b| each(F16, a, b, |a, b| a * b),
        ("min", "f16x2") => |a, b| each(F16, a, b, lesser),
        ("max", "f16x2") => |a, b| each(F16, a, b, |a, b| -lesser(-a, -b)),
        ("min", "bf16x2") => |a, b| each(BF16, a, b, lesser),
        ("max", "bf16x2") => |a, b| each(BF16, a, b, |a, b| -lesser(-a, -b)),
        _ => return None,
    })
}

/// The smaller of two numbers; the number if the other is a NaN; the negative of two zeros.
fn lesser(a: f64, b: f64) -> f64 {
    match () {
        () if a.is_nan() => b,
        () if b.is_nan() => a,
        () if a.total_cmp(&b).is_lt() => a,
        () => b,
    }
}

fn each(format: Small, a: u64, b: u64, f: fn(f64, f64) -> f64) -> u64 {
    let one = |a, b| format.encode(f(format.decode(a), format.decode(b)), false);
    one(a >> 16 & 0xFFFF, b >> 16 & 0xFFFF) << 16 | one(a & 0xFFFF, b & 0xFFFF)
}

fn halves(from: Small, pair: u64) -> u64 {
    let half = |code: u64| F16.encode(from.decode(code & 0xFF), false);
    half(pair >> 8) << 16 | half(pair)
}

fn single(register: u64) -> f64 {
    f32::from_bits(register as u32).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Small; 4] = [F16, BF16, E4M3, E5M2];

    #[test]
    fn every_code_comes_back() {
        for format in ALL {
            for code in 0..1 << format.bits {
                let value = format.decode(code);
                let back = format.encode(value, false);
                let expected = if value.is_nan() { format.nan() } else { code };
                assert_eq!(back, expected, "{format:?} {code:#x}");
            }
        }
    }

    #[test]
    fn what_lies_between_goes_to_the_nearest_and_ties_to_even() {
        for format in ALL {
            for code in 0..format.beyond() - 1 {
                let (here, next) = (format.decode(code), format.decode(code + 1));
                let middle = here / 2.0 + next / 2.0;
                let even = code + (code & 1);
                assert_eq!(format.encode(middle, true), even, "{format:?} {code:#x}");
                assert_eq!(format.encode(middle.next_down(), true), code);
                assert_eq!(format.encode(middle.next_up(), true), code + 1);
            }
        }
    }
}
