//! A small seeded random number generator. A workload follows from its seed on every platform.
//!
//! It uses only integer arithmetic, and floating-point addition, multiplication and comparison,
//! whose results IEEE 754 defines to the last bit. It avoids logarithms and exponentials, which
//! differ between mathematical libraries.

/// SplitMix64 (Steele, Lea and Flood, 2014): a counter with a golden-ratio step, whose values are
/// mixed.
///
/// It passes statistical test batteries and costs three multiplications. Do not use it for secrets.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `bound - 1`; 0 for a bound of 0.
    ///
    /// It is the high half of a 128-bit product: the bias of each number is at most `bound` in
    /// 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included; `low` if the range is empty.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        let span = high.saturating_sub(low);
        match span.checked_add(1) {
            Some(count) => low + self.below(count),
            None => self.next_u64(),
        }
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A number from `low` to `low * 2^octaves - 1`. One of the octaves (`low` to twice `low`, and
    /// so on) is chosen uniformly, then a number in it, so small and large numbers are equally
    /// frequent. This approximates the log-uniform distribution by straight lines; the mean is `1.5
    /// * low * (2^octaves - 1) / octaves`. Results beyond 64 bits are `u64::MAX`.
    pub fn octaves(&mut self, low: u64, octaves: u32) -> u64 {
        let octave = self.below(u64::from(octaves));
        let start = match octave <= u64::from(low.leading_zeros()) {
            true => low.checked_shl(octave as u32).unwrap_or(0),
            false => u64::MAX,
        };
        start.saturating_add(self.below(start))
    }

    /// A number of the exponential distribution with mean 1.
    ///
    /// John von Neumann's comparison method (1951): the whole part counts failed rounds, and the
    /// fraction is the first uniform number of the round whose falling run has odd length. The
    /// method is exact and needs no logarithm.
    pub fn exponential(&mut self) -> f64 {
        let mut whole = 0.0;
        loop {
            let first = self.unit();
            let (mut lowest, mut run) = (first, 1_u32);
            loop {
                let next = self.unit();
                if next >= lowest {
                    break;
                }
                lowest = next;
                run += 1;
            }
            if run % 2 == 1 {
                return whole + first;
            }
            whole += 1.0;
        }
    }

    /// A number from 0 to 1, without 1.
    fn unit(&mut self) -> f64 {
        // A double holds 53 bits exactly.
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
