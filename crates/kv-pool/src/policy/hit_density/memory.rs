//! What is remembered of evicted content: eight bytes each, in a table that forgets the oldest.

use super::super::PolicyError;
use super::super::error::table;
use super::ages::Gap;

/// Entries of one set: a cache line of them.
const WAYS: usize = 8;

/// Spreads names over the sets: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Memory {
    /// Number of the cohort that it belonged to.
    pub(super) cohort: u32,
    /// The mean time between its uses.
    pub(super) gap: Gap,
}

/// An entry: 24 bits of the name, 8 bits of the gap, and the cohort. The cohort 0,
/// which no block belongs to, marks a free entry.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name_and_gap: u32,
    cohort: u32,
}

/// A table of memories by name. Two names are taken for one with a chance of less than 1 in 10,000 when
/// all sets of a million-block pool are full, which costs a wrong guess and nothing else.
#[derive(Debug)]
pub(super) struct Memories {
    entries: Vec<Entry>,
    sets: usize,
}

impl Memories {
    /// Room for at least `names` names, for a policy of `blocks` blocks.
    pub(super) fn new(names: usize, blocks: u64) -> Result<Self, PolicyError> {
        let sets = names.div_ceil(WAYS).max(1);
        let free = Entry { name_and_gap: 0, cohort: 0 };
        let len = sets.checked_mul(WAYS).ok_or(PolicyError::OutOfMemory { blocks })?;
        Ok(Self { entries: table(len, free, blocks)?, sets })
    }

    /// Remembers `name`. The cohort of what was forgotten for it, if it took a place.
    pub(super) fn insert(&mut self, name: u32, memory: Memory) -> Option<u32> {
        let (set, tag) = self.locate(name);
        // Cohorts count up and around: the one furthest back is the oldest.
        let age = |entry: &&mut Entry| match entry.cohort {
            0 => u32::MAX,
            cohort => memory.cohort.wrapping_sub(cohort),
        };
        let place = set.iter_mut().max_by_key(age)?;
        let forgotten = place.cohort;
        *place =
            Entry { name_and_gap: tag | u32::from(memory.gap.to_bits()), cohort: memory.cohort };
        (forgotten != 0).then_some(forgotten)
    }

    /// Takes out what is remembered of `name`.
    pub(super) fn take(&mut self, name: u32) -> Option<Memory> {
        let (set, tag) = self.locate(name);
        let is_it = |entry: &&mut Entry| entry.cohort != 0 && entry.name_and_gap & !0xFF == tag;
        let entry = set.iter_mut().find(is_it)?;
        let gap = Gap::from_bits(entry.name_and_gap as u8);
        Some(Memory { cohort: std::mem::take(&mut entry.cohort), gap })
    }

    /// The set of `name`, and its tag: the upper 24 of 32 bits.
    fn locate(&mut self, name: u32) -> (&mut [Entry], u32) {
        let spread = u64::from(name).wrapping_mul(SPREAD);
        let tag = (spread as u32) & !0xFF;
        // The upper half, scaled from 2^32 to the number of sets.
        let set = ((u128::from(spread >> 32) * self.sets as u128) >> 32) as usize;
        (&mut self.entries[set * WAYS..(set + 1) * WAYS], tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(cohort: u32) -> Memory {
        Memory { cohort, gap: Gap::from_bits(200) }
    }

    #[test]
    fn what_was_put_in_comes_out_once() {
        let mut memories = Memories::new(64, 64).unwrap();
        assert_eq!(memories.insert(7, Memory { cohort: 9, gap: Gap::from_bits(70) }), None);
        assert_eq!(memories.take(8), None);
        assert_eq!(memories.take(7), Some(Memory { cohort: 9, gap: Gap::from_bits(70) }));
        assert_eq!(memories.take(7), None);
    }

    #[test]
    fn a_full_set_forgets_its_oldest_also_where_numbers_wrap() {
        let mut memories = Memories::new(1, 1).unwrap();
        let first = u32::MAX - 3;
        for (name, step) in (0..WAYS as u32).zip([0, 1, 2, 3, 5, 6, 7, 8]) {
            assert_eq!(memories.insert(name, memory(first.wrapping_add(step))), None);
        }
        let latest = memory(first.wrapping_add(9));
        assert_eq!(memories.insert(100, latest), Some(first));
        assert_eq!(memories.take(0), None);
        assert_eq!(memories.take(100), Some(latest));
        assert_eq!(memories.take(1), Some(memory(first.wrapping_add(1))));
    }
}
