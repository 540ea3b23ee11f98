//! Divisors of which kernels divide by a multiplication.

use bytemuck::{Pod, Zeroable};

/// A divisor with its magic number, for numbers below 2^31: `Divider31` of `kernels/kv.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Divider31 {
    pub(crate) divisor: u32,
    pub(crate) magic: u32,
    pub(crate) shift: u32,
}

/// The same for every number of 64 bits: `Divider64` of `kernels/kv.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Divider64 {
    pub(crate) divisor: u64,
    pub(crate) magic: u64,
}

impl Divider31 {
    /// `divisor` is 1 to 2^31.
    pub(crate) fn new(divisor: u32) -> Self {
        let power = u64::from(divisor).next_power_of_two();
        // At most 2^32 times (1 - 1 / divisor), plus 1.
        let magic = ((power - u64::from(divisor)) << 32) / u64::from(divisor) + 1;
        Self { divisor, magic: magic as u32, shift: power.trailing_zeros() }
    }
}

impl Divider64 {
    /// `divisor` is at least 1.
    pub(crate) fn new(divisor: u64) -> Self {
        Self { divisor, magic: u64::MAX / divisor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels' own arithmetic, which must not wrap.
    fn quotient31(divider: Divider31, n: u32) -> u32 {
        let product = ((u64::from(n) * u64::from(divider.magic)) >> 32) as u32;
        product.checked_add(n).unwrap() >> divider.shift
    }

    #[test]
    fn numbers_of_31_bits_divide_exactly_at_every_edge() {
        let top = (1 << 31) - 1;
        let mut edges: Vec<u64> = (1..70).collect();
        for power in 6..31 {
            edges.extend([(1 << power) - 1, 1 << power, (1 << power) + 1]);
        }
        edges.extend([top - 1, top, top / 3, top / 7, 0x1234_5678, 1_000_000_007]);
        for &divisor in &edges {
            let divider = Divider31::new(divisor as u32);
            for &n in &edges {
                let whole = n / divisor * divisor;
                for n in [0, n, whole, whole.saturating_sub(1), top, top / divisor * divisor] {
                    assert_eq!(
                        u64::from(quotient31(divider, n as u32)),
                        n / divisor,
                        "{n} / {divisor}"
                    );
                }
            }
        }
    }

    fn quotient64(divider: Divider64, n: u64) -> u64 {
        let estimate = ((u128::from(n) * u128::from(divider.magic)) >> 64) as u64;
        estimate
            + u64::from(n.wrapping_sub(estimate.wrapping_mul(divider.divisor)) >= divider.divisor)
    }

    #[test]
    fn numbers_of_64_bits_divide_exactly_at_every_edge() {
        let edges = |top: u64| {
            let mut all: Vec<u64> = (1..40).collect();
            for power in 5..64 {
                let power = 1u64 << power;
                all.extend([power - 1, power, power + 1].into_iter().filter(|n| *n <= top));
            }
            all.extend([top - 1, top, top / 3, top / 7, 0x1234_5678 & top, 1_000_000_007 & top]);
            all
        };
        for divisor in edges(u64::MAX) {
            let divider = Divider64::new(divisor);
            for n in edges(u64::MAX) {
                for n in [0, n, n / divisor * divisor, (n / divisor * divisor).wrapping_sub(1)] {
                    assert_eq!(quotient64(divider, n), n / divisor, "{n} / {divisor}");
                }
            }
        }
    }
}
