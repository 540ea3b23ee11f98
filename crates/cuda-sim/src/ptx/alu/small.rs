//! Conversions of floats of 16 bits.
//!
//! Double precision represents all of them exactly.

use super::float::SINGLE_NAN;
use super::{Binary, Unary};

/// A float format of 16 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Small {
    mantissa: u32,
    bias: i32,
}

const F16: Small = Small { mantissa: 10, bias: 15 };
const BF16: Small = Small { mantissa: 7, bias: 127 };

const SIGN: u64 = 1 << 15;
/// All ones except the sign: the NaN that every operation returns.
const NAN: u64 = SIGN - 1;

impl Small {
    const fn infinity(self) -> u64 {
        NAN >> self.mantissa << self.mantissa
    }

    fn decode(self, code: u64) -> f64 {
        let magnitude = code & NAN;
        let value = match magnitude.cmp(&self.infinity()) {
            std::cmp::Ordering::Less => {
                let fraction = magnitude & ((1 << self.mantissa) - 1);
                let exponent = (magnitude >> self.mantissa) as i32;
                let (whole, exponent) =
                    if exponent == 0 { (0, 1) } else { (1 << self.mantissa, exponent) };
                let step = exponent - self.bias - self.mantissa as i32;
                (whole + fraction) as f64 * 2f64.powi(step)
            }
            std::cmp::Ordering::Equal => f64::INFINITY,
            std::cmp::Ordering::Greater => return f64::NAN,
        };
        if code & SIGN != 0 { -value } else { value }
    }

    /// The nearest code, ties to even. A number out of range becomes infinity.
    fn encode(self, value: f64) -> u64 {
        if value.is_nan() {
            return NAN;
        }
        let sign = if value.is_sign_negative() { SIGN } else { 0 };
        let value = value.abs();
        if value.is_infinite() {
            return sign | self.infinity();
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
        sign | code.min(self.infinity())
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
        ("f16", "f32") => |a| F16.encode(single(a)),
        ("bf16", "f32") => |a| BF16.encode(single(a)),
        _ => return None,
    })
}

/// `cvt` of two single-precision operands to a pair. The first operand becomes the upper half.
pub(in crate::ptx) fn small_pair(to: &str) -> Option<Binary> {
    Some(match to {
        "f16x2" => |a, b| F16.encode(single(a)) << 16 | F16.encode(single(b)),
        "bf16x2" => |a, b| BF16.encode(single(a)) << 16 | BF16.encode(single(b)),
        _ => return None,
    })
}

fn single(register: u64) -> f64 {
    f32::from_bits(register as u32).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back() {
        for format in [F16, BF16] {
            for code in 0..2 * SIGN {
                let value = format.decode(code);
                let expected = if value.is_nan() { NAN } else { code };
                assert_eq!(format.encode(value), expected, "{format:?} {code:#x}");
            }
        }
    }

    #[test]
    fn what_lies_between_goes_to_the_nearest_and_ties_to_even() {
        for format in [F16, BF16] {
            for code in 0..format.infinity() - 1 {
                let (here, next) = (format.decode(code), format.decode(code + 1));
                let middle = here / 2.0 + next / 2.0;
                let even = code + (code & 1);
                assert_eq!(format.encode(middle), even, "{format:?} {code:#x}");
                assert_eq!(format.encode(middle.next_down()), code);
                assert_eq!(format.encode(middle.next_up()), code + 1);
            }
        }
    }
}
