//! The weighted sum of a run of words, without a multiplication for each word.
//!
//! The weight of the word with index `i` is `((i + 1) * GOLDEN) | 1`. `GOLDEN` is odd, so the low
//! bit is missing exactly where `i` is odd, and a sum of weighted words is
//! `GOLDEN * sum((i + 1) * word) + sum(word where i is odd)`. Words are dealt to lanes; within a
//! lane, `i + 1` grows by a constant, so that two running sums of each lane, of its words and of
//! that sum, give both parts. Additions have vector forms, 64-bit multiplications do not.

use crate::pattern::GOLDEN;

/// Lanes that words are dealt to: enough independent sums to keep a processor busy.
pub(super) const LANES: usize = 8;

/// What a whole number of lane groups sums to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LaneSums {
    /// Of each lane, the sum of its words.
    words: [u64; LANES],
    /// Of each lane, the sum of its words, each times its number in the lane.
    numbered: [u64; LANES],
}

impl LaneSums {
    /// Sums groups of [`LANES`] words; `bytes` holds a whole number of groups.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let groups = bytes.chunks_exact(LANES * 8);
        let count = groups.len() as u64;
        let mut words = [0u64; LANES];
        let mut prefixes = [0u64; LANES];
        for group in groups {
            let group = load_group(group);
            for lane in 0..LANES {
                // The sums before each word, summed: word j is in all of count - 1 - j of them.
                prefixes[lane] = prefixes[lane].wrapping_add(words[lane]);
                words[lane] = words[lane].wrapping_add(group[lane]);
            }
        }
        let last = count.wrapping_sub(1);
        let mut numbered = [0; LANES];
        for lane in 0..LANES {
            numbered[lane] = last.wrapping_mul(words[lane]).wrapping_sub(prefixes[lane]);
        }
        Self { words, numbered }
    }

    /// The weighted sum, when the index of lane `l`'s first word is `first(l)`, and those of its
    /// following words are each `step` more. `step` is even.
    pub(super) fn weigh(&self, first: impl Fn(usize) -> u64, step: u64) -> u64 {
        let mut by_index = 0u64;
        let mut odd = 0u64;
        for lane in 0..LANES {
            let index = first(lane);
            by_index = by_index
                .wrapping_add(index.wrapping_add(1).wrapping_mul(self.words[lane]))
                .wrapping_add(step.wrapping_mul(self.numbered[lane]));
            odd = odd.wrapping_add(if index & 1 == 1 { self.words[lane] } else { 0 });
        }
        GOLDEN.wrapping_mul(by_index).wrapping_add(odd)
    }
}

fn load_group(bytes: &[u8]) -> [u64; LANES] {
    let mut words = [0; LANES];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = load_word(bytes);
    }
    words
}

/// The word in 8 bytes.
pub(super) fn load_word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::weight;

    #[test]
    fn running_sums_equal_weighted_words() {
        for (groups, first, spread, step) in
            [(0u64, 0u64, 1u64, 8u64), (1, 0, 1, 8), (5, 3, 1, 8), (64, 1 << 40, 7, 1000)]
        {
            let words: Vec<u64> = (0..groups * 8).map(|i| crate::plane_word(i + first)).collect();
            let sums = LaneSums::of(bytemuck::cast_slice(&words));
            let index = |lane: usize| first + spread * lane as u64;
            let expected = words.iter().enumerate().fold(0u64, |sum, (at, word)| {
                let index = index(at % 8) + step * (at / 8) as u64;
                sum.wrapping_add(word.wrapping_mul(weight(index)))
            });
            assert_eq!(sums.weigh(index, step), expected, "{groups} groups from {first}");
        }
    }
}
