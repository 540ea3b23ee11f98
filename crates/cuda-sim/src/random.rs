//! The only source of randomness: a small generator whose whole state follows from its seed.

/// A xorshift generator (Marsaglia 2003, shifts 13, 7, 17). Not for secrets.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Mixing separates neighbouring seeds. The state must not be zero.
        Self(mix(seed) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A random number below `bound`. `bound` is not zero.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        // The high half has better quality. The bias of the remainder is below 2^-20 here.
        ((self.next() >> 32) % bound as u64) as usize
    }
}

/// Spreads every bit of `value` over the whole word (the finaliser of SplitMix64).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
