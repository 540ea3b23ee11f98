//! Number formats of a KV cache, by integer operations and single precision alone: what
//! `kernels/floats.cuh` computes, to the bit.

/// A 16-bit format, as models compute in.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u32)]
pub enum WideFormat {
    /// bfloat16: the upper half of single precision.
    Bf16 = 0,
    /// IEEE half precision.
    F16 = 1,
}

/// An 8-bit format, as caches keep.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u32)]
pub enum NarrowFormat {
    /// 8-bit float of 4 bits of exponent and 3 of mantissa, up to 448, without infinities.
    E4m3 = 0,
    /// 8-bit float of 5 bits of exponent and 2 of mantissa, up to 57344.
    E5m2 = 1,
    /// Integer from -128 to 127.
    Int8 = 2,
}

/// A NaN without sign or payload.
const NAN: u32 = 0x7FC0_0000;
const INFINITY: u32 = 0x7F80_0000;

impl WideFormat {
    /// The value of a code; every NaN becomes the same one.
    #[must_use]
    pub fn decode(self, code: u16) -> f32 {
        let code = u32::from(code);
        if self == Self::Bf16 {
            let is_nan = code & 0x7FFF > 0x7F80;
            return f32::from_bits(if is_nan { NAN } else { code << 16 });
        }
        let sign = (code & 0x8000) << 16;
        let (exponent, mantissa) = (code >> 10 & 31, code & 0x3FF);
        f32::from_bits(match (exponent, mantissa) {
            (31, 0) => sign | INFINITY,
            (31, _) => NAN,
            // A multiple of 2^-24.
            (0, _) => sign | (mantissa as f32 * 5.960_464_5e-8).to_bits(),
            _ => sign | (exponent + 112) << 23 | mantissa << 13,
        })
    }

    /// The nearest code, ties to even. What is too large becomes an infinity, a NaN 0x7FFF.
    #[must_use]
    pub fn encode(self, value: f32) -> u16 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7FFF_FFFF;
        if magnitude > INFINITY {
            return 0x7FFF;
        }
        if self == Self::Bf16 {
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        }
        let code = if magnitude == INFINITY { 0x7C00 } else { rounded::<10, 15>(magnitude) };
        (bits >> 16 & 0x8000 | code.min(0x7C00)) as u16
    }

    /// The bits of the magnitude of a code in single precision, to find the largest: 0 of a NaN, the
    /// largest finite number of an infinity.
    pub(crate) fn magnitude_bits(self, code: u16) -> u32 {
        let magnitude = self.decode(code).to_bits() & 0x7FFF_FFFF;
        match (magnitude.cmp(&INFINITY), self) {
            (std::cmp::Ordering::Less, _) => magnitude,
            (std::cmp::Ordering::Greater, _) => 0,
            (_, Self::Bf16) => 0x7F7F_0000,
            (_, Self::F16) => 0x477F_E000,
        }
    }

    pub(crate) fn of(number: u32) -> Self {
        if number == Self::Bf16 as u32 { Self::Bf16 } else { Self::F16 }
    }
}

impl NarrowFormat {
    /// The value of a code; every NaN becomes the same one.
    #[must_use]
    pub fn decode(self, code: u8) -> f32 {
        if self == Self::Int8 {
            return f32::from(code as i8);
        }
        let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7F));
        let bits = match self {
            Self::E4m3 if magnitude == 0x7F => return f32::from_bits(NAN),
            Self::E4m3 if magnitude >= 8 => (magnitude << 20) + (120 << 23),
            Self::E4m3 => (magnitude as f32 * 0.001_953_125).to_bits(),
            _ if magnitude > 0x7C => return f32::from_bits(NAN),
            _ if magnitude == 0x7C => INFINITY,
            _ if magnitude >= 4 => (magnitude << 21) + (112 << 23),
            _ => (magnitude as f32 * 1.525_878_9e-5).to_bits(),
        };
        f32::from_bits(sign | bits)
    }

    /// The nearest code, ties to even. What is too large, an infinity too, becomes the largest finite
    /// code of its sign; a NaN becomes 0x7F in the floats and 0 in [`Int8`](NarrowFormat::Int8).
    #[must_use]
    pub fn encode(self, value: f32) -> u8 {
        if self == Self::Int8 {
            // A conversion of Rust's saturates, and makes 0 of a NaN.
            return (value.round_ties_even() as i32).clamp(-128, 127) as u8;
        }
        let bits = value.to_bits();
        let magnitude = bits & 0x7FFF_FFFF;
        if magnitude > INFINITY {
            return 0x7F;
        }
        let most = if self == Self::E4m3 { 0x7E } else { 0x7B };
        let code = match self {
            _ if magnitude == INFINITY => most,
            Self::E4m3 => rounded::<3, 7>(magnitude).min(most),
            _ => rounded::<2, 15>(magnitude).min(most),
        };
        (bits >> 24 & 0x80 | code) as u8
    }

    /// The largest finite number; of [`Int8`](NarrowFormat::Int8) that of both signs.
    #[must_use]
    pub fn largest(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
            Self::Int8 => 127.0,
        }
    }

    pub(crate) fn of(number: u32) -> Self {
        match number {
            0 => Self::E4m3,
            1 => Self::E5m2,
            _ => Self::Int8,
        }
    }
}

/// The code, without its sign, of a finite single-precision magnitude in a format of `MANTISSA` bits
/// after the point whose exponents are biased by `BIAS`; too large a number runs on beyond the format.
fn rounded<const MANTISSA: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let exponent = magnitude >> 23;
    if exponent >= 128 - BIAS {
        let shift = 23 - MANTISSA;
        let half = (1 << (shift - 1)) - 1 + (magnitude >> shift & 1);
        return ((magnitude + half) >> shift) - ((127 - BIAS) << MANTISSA);
    }
    // Below the smallest normal number steps stay as they are.
    let shift = 23 - MANTISSA + (128 - BIAS) - exponent;
    if shift > 24 {
        return 0;
    }
    let whole = magnitude & 0x7F_FFFF | 0x80_0000;
    let half = (1 << (shift - 1)) - 1 + (whole >> shift & 1);
    (whole + half) >> shift
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code whose value is nearest, found by looking at all of them.
    fn nearest<C: Copy>(
        codes: impl Iterator<Item = C>,
        decode: impl Fn(C) -> f32,
        even: impl Fn(C) -> bool,
        value: f32,
    ) -> C {
        let distance = |code: &C| (f64::from(decode(*code)) - f64::from(value)).abs();
        let finite = codes.filter(|code| decode(*code).is_finite());
        finite
            .filter(|code| decode(*code).is_sign_negative() == value.is_sign_negative())
            .min_by(|a, b| distance(a).total_cmp(&distance(b)).then(even(*b).cmp(&even(*a))))
            .unwrap()
    }

    /// Numbers near every code, near the middle between neighbours, and far beyond.
    fn numbers(codes: impl Iterator<Item = f32>) -> Vec<f32> {
        let mut values: Vec<f32> =
            codes.filter(|value| value.is_finite() && value.is_sign_positive()).collect();
        values.sort_by(f32::total_cmp);
        let middles: Vec<f32> =
            values.windows(2).map(|pair| pair[0] / 2.0 + pair[1] / 2.0).collect();
        let near = |value: f32| {
            let bits = value.to_bits();
            [bits.saturating_sub(1), bits, bits + 1].map(f32::from_bits)
        };
        let mut numbers: Vec<f32> = values.into_iter().chain(middles).flat_map(near).collect();
        numbers.extend([1e-40, 1e-30, 1e9]);
        let negative: Vec<f32> = numbers.iter().map(|value| -value).collect();
        numbers.extend(negative);
        numbers
    }

    #[test]
    fn narrow_codes_are_the_nearest_ties_to_even_and_saturate() {
        for format in [NarrowFormat::E4m3, NarrowFormat::E5m2] {
            let numbers = numbers((0..=255).map(|code| format.decode(code)));
            assert!(numbers.len() > 1000);
            for value in numbers {
                let even = |code: u8| code & 1 == 0;
                let expected = nearest(0..=255, |code| format.decode(code), even, value);
                assert_eq!(format.encode(value), expected, "{format:?} {value:e}");
            }
        }
        for (value, code) in
            [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (127.5, 127), (-128.5, -128)]
        {
            assert_eq!(NarrowFormat::Int8.encode(value), code as u8, "{value}");
        }
        assert_eq!(NarrowFormat::Int8.encode(1e20), 127);
        assert_eq!(NarrowFormat::Int8.encode(f32::NEG_INFINITY) as i8, -128);
    }

    #[test]
    fn half_precision_is_the_nearest_ties_to_even() {
        let format = WideFormat::F16;
        let finite = 0..=0x7BFFu16;
        // Every code, and the middle between it and the next.
        for code in finite {
            let (value, next) = (format.decode(code), format.decode(code + 1));
            assert_eq!(format.encode(value), code);
            assert_eq!(format.encode(-value), code | 0x8000);
            if next.is_finite() {
                let middle = value / 2.0 + next / 2.0;
                assert_eq!(format.encode(middle), code + (code & 1), "{middle:e}");
                assert_eq!(format.encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
                assert_eq!(format.encode(f32::from_bits(middle.to_bits() - 1)), code);
            }
        }
        assert_eq!([65519.9, 65520.0, 1e30].map(|v| format.encode(v)), [0x7BFF, 0x7C00, 0x7C00]);
        assert_eq!(format.encode(2e-8), 0);
        assert_eq!(format.decode(0x3C00), 1.0);
        assert_eq!(format.decode(0x0001), 2f32.powi(-24));
    }

    #[test]
    fn bfloat16_is_the_upper_half_rounded() {
        let format = WideFormat::Bf16;
        for code in 0..=u16::MAX {
            let value = format.decode(code);
            if value.is_nan() {
                assert_eq!(format.encode(value), 0x7FFF);
                continue;
            }
            assert_eq!(format.encode(value), code);
        }
        assert_eq!(format.encode(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(format.encode(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(format.encode(f32::MAX), 0x7F80);
    }

    #[test]
    fn what_is_no_number_stays_none_and_infinities_saturate() {
        for wide in [WideFormat::Bf16, WideFormat::F16] {
            assert!(wide.decode(0x7FFF).is_nan() && wide.decode(0xFFFF).is_nan());
            assert_eq!(wide.encode(f32::NAN), 0x7FFF);
            assert_eq!(wide.decode(wide.encode(f32::NEG_INFINITY)), f32::NEG_INFINITY);
        }
        for narrow in [NarrowFormat::E4m3, NarrowFormat::E5m2] {
            assert_eq!(narrow.encode(-f32::NAN), 0x7F);
            assert!(narrow.decode(0x7F).is_nan() && narrow.decode(0xFF).is_nan());
            assert_eq!(narrow.decode(narrow.encode(f32::INFINITY)), narrow.largest());
            assert_eq!(narrow.decode(narrow.encode(f32::MAX)), narrow.largest());
            assert_eq!(narrow.decode(narrow.encode(f32::NEG_INFINITY)), -narrow.largest());
            assert_eq!(narrow.encode(-0.0), 0x80);
        }
        assert_eq!(NarrowFormat::E5m2.decode(0xFC), f32::NEG_INFINITY);
        assert_eq!(NarrowFormat::Int8.encode(f32::NAN), 0);
        assert_eq!(NarrowFormat::E4m3.decode(0x38), 1.0);
        assert_eq!(NarrowFormat::E5m2.decode(0x3C), 1.0);
    }
}
