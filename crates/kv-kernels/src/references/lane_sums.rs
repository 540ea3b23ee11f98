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

/// The indices of words in rows of whole groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Indices {
    /// Of each lane's first word.
    pub(super) first: [u64; LANES],
    /// From a group to the next of its row: an even number.
    pub(super) group_step: u64,
    /// From a row to the next: an even number, too.
    pub(super) row_step: u64,
}

/// Below this, summing halves side by side costs more than it brings.
const HALVES_BYTES_MIN: usize = 4 << 10;

/// The weighted sum of rows of `row_groups` groups each, at least 1; `bytes` holds whole rows.
///
/// The halves of what is long are summed side by side. A processor fetches ahead within a page only,
/// and waits at the start of the next one; from two places at once it waits half as often.
pub(super) fn weighted_sum(bytes: &[u8], row_groups: usize, indices: &Indices) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the feature that the function is compiled for.
        return unsafe { weighted_sum_avx2(bytes, row_groups, indices) };
    }
    weighted_sum_any(bytes, row_groups, indices)
}

/// The same with vectors twice as wide, which makes it nearly twice as fast.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn weighted_sum_avx2(bytes: &[u8], row_groups: usize, indices: &Indices) -> u64 {
    weighted_sum_any(bytes, row_groups, indices)
}

#[inline(always)]
fn weighted_sum_any(bytes: &[u8], row_groups: usize, indices: &Indices) -> u64 {
    let row_bytes = row_groups * GROUP_BYTES;
    let rows = bytes.len() / row_bytes;
    if bytes.len() < HALVES_BYTES_MIN {
        let [sums, _] = sum_side_by_side(bytes, &[], row_bytes);
        return sums.weigh(row_groups, rows, indices, 0);
    }
    // One row is split in its middle, several rows between two of them.
    let (part_groups, part_rows, shift) = match rows {
        1 => (row_groups / 2, 1, indices.group_step.wrapping_mul(row_groups as u64 / 2)),
        _ => (row_groups, rows / 2, indices.row_step.wrapping_mul(rows as u64 / 2)),
    };
    let part_bytes = part_groups * GROUP_BYTES * part_rows;
    let (first, rest) = bytes.split_at(part_bytes);
    let (second, rest) = rest.split_at(part_bytes);
    let parts = sum_side_by_side(first, second, part_groups * GROUP_BYTES);
    let [first, second] = parts.map(|sums| (sums, part_groups, part_rows));
    // What an odd number of groups, or of rows, leaves at the end.
    let [odd, _] = sum_side_by_side(rest, &[], row_bytes.min(rest.len().max(GROUP_BYTES)));
    let odd = (odd, rest.len().min(row_bytes) / GROUP_BYTES, 1);
    [first, second, odd].iter().zip([0, shift, shift.wrapping_mul(2)]).fold(
        0,
        |sum, ((part, groups, rows), shift)| {
            sum.wrapping_add(part.weigh(*groups, *rows, indices, shift))
        },
    )
}

/// Sums rows of `row_bytes` bytes, at least a group, of two places at once; `second` is as long as
/// `first`, or empty.
#[inline(always)]
fn sum_side_by_side(first: &[u8], second: &[u8], row_bytes: usize) -> [Running; 2] {
    let (mut of_first, mut of_second) = (Running::default(), Running::default());
    if second.is_empty() {
        for row in first.chunks_exact(row_bytes) {
            let mut of_row = [0; LANES];
            for group in row.chunks_exact(GROUP_BYTES) {
                of_first.add_group(&mut of_row, group);
            }
            of_first.add_row(&of_row);
        }
        return [of_first, of_second];
    }
    for (first, second) in first.chunks_exact(row_bytes).zip(second.chunks_exact(row_bytes)) {
        let (mut row_of_first, mut row_of_second) = ([0; LANES], [0; LANES]);
        let groups = first.chunks_exact(GROUP_BYTES).zip(second.chunks_exact(GROUP_BYTES));
        for (first, second) in groups {
            of_first.add_group(&mut row_of_first, first);
            of_second.add_group(&mut row_of_second, second);
        }
        of_first.add_row(&row_of_first);
        of_second.add_row(&row_of_second);
    }
    [of_first, of_second]
}

/// Sums on their way through rows, for each lane.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    words: [u64; LANES],
    /// For each group, what its row had summed to before it, summed: a word is in all of them but
    /// those of the groups up to its own.
    before_groups: [u64; LANES],
    /// For each row, what the rows had summed to before it, summed.
    before_rows: [u64; LANES],
}

impl Running {
    #[inline(always)]
    fn add_group(&mut self, row: &mut [u64; LANES], group: &[u8]) {
        let group = load_group(group);
        for lane in 0..LANES {
            self.before_groups[lane] = self.before_groups[lane].wrapping_add(row[lane]);
            row[lane] = row[lane].wrapping_add(group[lane]);
        }
    }

    #[inline(always)]
    fn add_row(&mut self, row: &[u64; LANES]) {
        for ((before, words), of_row) in self.before_rows.iter_mut().zip(&mut self.words).zip(row) {
            *before = before.wrapping_add(*words);
            *words = words.wrapping_add(*of_row);
        }
    }

    /// The weighted sum of `rows` rows of `groups` groups, whose indices are all `shift` more.
    ///
    /// As if every word were of the last group of the last row, less what that is too much.
    fn weigh(&self, groups: usize, rows: usize, indices: &Indices, shift: u64) -> u64 {
        let &Indices { first, group_step, row_step } = indices;
        let last = (groups as u64)
            .wrapping_sub(1)
            .wrapping_mul(group_step)
            .wrapping_add((rows as u64).wrapping_sub(1).wrapping_mul(row_step))
            .wrapping_add(shift);
        let (mut by_index, mut odd) = (0u64, 0u64);
        let (mut groups_over, mut rows_over) = (0u64, 0u64);
        for lane in 0..LANES {
            let (words, first) = (self.words[lane], first[lane]);
            let index = first.wrapping_add(last).wrapping_add(1);
            by_index = by_index.wrapping_add(index.wrapping_mul(words));
            groups_over = groups_over.wrapping_add(self.before_groups[lane]);
            rows_over = rows_over.wrapping_add(self.before_rows[lane]);
            odd = odd.wrapping_add(words & (first & 1).wrapping_neg());
        }
        let by_index = by_index
            .wrapping_sub(group_step.wrapping_mul(groups_over))
            .wrapping_sub(row_step.wrapping_mul(rows_over));
        GOLDEN.wrapping_mul(by_index).wrapping_add(odd)
    }
}

#[inline(always)]
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
        let (group_step, row_step) = (8, 1000);
        // Short and long, one row and several, even and odd numbers of them.
        for (rows, row_groups) in
            [(0u64, 1u64), (1, 1), (5, 3), (1, 63), (1, 64), (1, 65), (64, 1), (65, 1), (31, 5)]
        {
            for (first, spread) in [(0u64, 1u64), (3, 1), (1 << 40, 7), (2, 4)] {
                let words: Vec<u64> =
                    (0..rows * row_groups * 8).map(crate::verify::plane_word).collect();
                let lanes = std::array::from_fn(|lane| first + spread * lane as u64);
                let expected = (0u64..).zip(&words).fold(0u64, |sum, (at, word)| {
                    let (group, row) = (at / 8 % row_groups, at / 8 / row_groups);
                    let index = lanes[at as usize % 8] + group * group_step + row * row_step;
                    sum.wrapping_add(word.wrapping_mul(weight(index)))
                });
                let indices = Indices { first: lanes, group_step, row_step };
                let bytes = bytemuck::cast_slice(&words);
                for sum in [weighted_sum, weighted_sum_any] {
                    let sum = sum(bytes, row_groups as usize, &indices);
                    assert_eq!(sum, expected, "{rows} rows of {row_groups} groups from {first}");
                }
            }
        }
    }
}
