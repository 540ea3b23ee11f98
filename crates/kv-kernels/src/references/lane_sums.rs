//! The weighted sum of words, without a multiplication for each word.
//!
//! The weight of the word with index `i` is `((i + 1) * GOLDEN) | 1`. `GOLDEN` is odd, so the low
//! bit is missing exactly where `i` is odd, and a sum of weighted words is
//! `GOLDEN * sum((i + 1) * word) + sum(word where i is odd)`. Words are dealt to lanes; within a
//! lane, `i + 1` grows by a constant from group to group and by another from row to row, so that
//! running sums, and sums of running sums, give both parts. Additions have vector forms in every
//! x86-64 processor; 64-bit multiplications do not.

use crate::pattern::GOLDEN;

/// Lanes that words are dealt to: enough independent sums to keep a processor busy.
pub(super) const LANES: usize = 8;

/// Bytes of a group: one word for each lane.
pub(super) const GROUP_BYTES: usize = LANES * 8;

/// What rows of whole groups sum to.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneSums {
    /// Of each lane, the sum of its words.
    words: [u64; LANES],
    /// Of each lane, the sum of its words, each times its group's number in the row.
    by_group: [u64; LANES],
    /// Of each lane, the sum of its words, each times its row's number.
    by_row: [u64; LANES],
}

impl LaneSums {
    /// Sums rows of `row_groups` groups each, at least 1; `bytes` holds whole rows.
    pub(super) fn of(bytes: &[u8], row_groups: usize) -> Self {
        let rows = bytes.chunks_exact(row_groups * GROUP_BYTES);
        let row_last = (rows.len() as u64).wrapping_sub(1);
        let mut words = [0u64; LANES];
        let mut before_groups = [0u64; LANES];
        let mut before_rows = [0u64; LANES];
        for row in rows {
            let mut of_row = [0u64; LANES];
            for group in row.chunks_exact(GROUP_BYTES) {
                let group = load_group(group);
                for lane in 0..LANES {
                    // What came before each group, summed: word j is in all but j + 1 of them.
                    before_groups[lane] = before_groups[lane].wrapping_add(of_row[lane]);
                    of_row[lane] = of_row[lane].wrapping_add(group[lane]);
                }
            }
            for lane in 0..LANES {
                before_rows[lane] = before_rows[lane].wrapping_add(words[lane]);
                words[lane] = words[lane].wrapping_add(of_row[lane]);
            }
        }
        let number = |last: u64, before: [u64; LANES]| {
            let mut numbered = [0; LANES];
            for lane in 0..LANES {
                numbered[lane] = last.wrapping_mul(words[lane]).wrapping_sub(before[lane]);
            }
            numbered
        };
        let by_group = number(row_groups as u64 - 1, before_groups);
        Self { words, by_group, by_row: number(row_last, before_rows) }
    }

    /// The weighted sum, when `first(l)` is the index of lane `l`'s first word, and indices grow by
    /// `group_step` from group to group and by `row_step` from row to row. Both are even.
    pub(super) fn weigh(
        &self,
        first: impl Fn(usize) -> u64,
        group_step: u64,
        row_step: u64,
    ) -> u64 {
        let mut by_index = 0u64;
        let mut odd = 0u64;
        for lane in 0..LANES {
            let index = first(lane);
            by_index = by_index
                .wrapping_add(index.wrapping_add(1).wrapping_mul(self.words[lane]))
                .wrapping_add(group_step.wrapping_mul(self.by_group[lane]))
                .wrapping_add(row_step.wrapping_mul(self.by_row[lane]));
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
        for (rows, row_groups, first, spread) in [
            (0u64, 1u64, 0u64, 1u64),
            (1, 1, 0, 1),
            (1, 64, 3, 1),
            (5, 3, 1 << 40, 7),
            (9, 1, 2, 3),
        ] {
            let (group_step, row_step) = (8, 1000);
            let words: Vec<u64> = (0..rows * row_groups * 8).map(crate::plane_word).collect();
            let sums = LaneSums::of(bytemuck::cast_slice(&words), row_groups as usize);
            let index = |lane: usize| first + spread * lane as u64;
            let expected = (0u64..).zip(&words).fold(0u64, |sum, (at, word)| {
                let (group, row) = (at / 8 % row_groups, at / 8 / row_groups);
                let index = index(at as usize % 8) + group * group_step + row * row_step;
                sum.wrapping_add(word.wrapping_mul(weight(index)))
            });
            let sum = sums.weigh(index, group_step, row_step);
            assert_eq!(sum, expected, "{rows} rows of {row_groups} groups from {first}");
        }
    }
}
