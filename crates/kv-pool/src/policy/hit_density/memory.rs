//! What is remembered of evicted content: eight bytes each, in a table that forgets the oldest.

use super::super::PolicyError;
use super::super::error::table;

/// Entries of one set: a cache line of them.
const WAYS: usize = 8;

/// Spreads names over the sets: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Memory {
    /// Number of the cohort that it belonged to.
    pub(super) cohort: u32,
    /// How often it had been found, up to 15.
    pub(super) found: u8,
    /// Turns of its conversation, up to 15.
    pub(super) turns: u8,
}

/// An entry: 24 bits of the name, 4 bits each of `found` and `turns`, and the cohort. The cohort 0,
/// which no block belongs to, marks a free entry.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name_and_counts: u32,
    cohort: u32,
}

/// A table of memories by name. Two names are taken for one with a chance of 1 in two million for
/// each set that is full, which costs a wrong guess and nothing else.
#[derive(Debug)]
pub(super) struct Memories {
    entries: Vec<Entry>,
    sets: usize,
}

impl Memories {
    /// Room for at least `names` names, for a policy of `blocks` blocks.
    pub(super) fn new(names: usize, blocks: u64) -> Result<Self, PolicyError> {
        let sets = names.div_ceil(WAYS).max(1);
        let free = Entry { name_and_counts: 0, cohort: 0 };
        let len = sets.checked_mul(WAYS).ok_or(PolicyError::OutOfMemory { blocks })?;
        Ok(Self { entries: table(len, free, blocks)?, sets })
    }

    /// Remembers `name`. The cohort of what was forgotten for it, if it took a place.
    pub(super) fn insert(&mut self, name: u64, memory: Memory) -> Option<u32> {
        let (set, tag) = self.locate(name);
        let counts = u32::from(memory.found.min(15)) << 4 | u32::from(memory.turns.min(15));
        // Cohorts count up and around: the one furthest back is the oldest.
        let age = |entry: &&mut Entry| match entry.cohort {
            0 => u32::MAX,
            cohort => memory.cohort.wrapping_sub(cohort),
        };
        let place = set.iter_mut().max_by_key(age)?;
        let forgotten = place.cohort;
        *place = Entry { name_and_counts: tag | counts, cohort: memory.cohort };
        (forgotten != 0).then_some(forgotten)
    }

    /// Takes out what is remembered of `name`.
    pub(super) fn take(&mut self, name: u64) -> Option<Memory> {
        let (set, tag) = self.locate(name);
        let is_it = |entry: &&mut Entry| entry.cohort != 0 && entry.name_and_counts & !0xFF == tag;
        let entry = set.iter_mut().find(is_it)?;
        let counts = entry.name_and_counts as u8;
        let cohort = std::mem::take(&mut entry.cohort);
        Some(Memory { cohort, found: counts >> 4, turns: counts & 15 })
    }

    /// The set of `name`, and its tag: the upper 24 of 32 bits.
    fn locate(&mut self, name: u64) -> (&mut [Entry], u32) {
        let spread = name.wrapping_mul(SPREAD);
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
        Memory { cohort, found: 3, turns: 15 }
    }

    #[test]
    fn what_was_put_in_comes_out_once() {
        let mut memories = Memories::new(64, 64).unwrap();
        assert_eq!(memories.insert(7, Memory { cohort: 9, found: 200, turns: 2 }), None);
        assert_eq!(memories.take(8), None);
        assert_eq!(memories.take(7), Some(Memory { cohort: 9, found: 15, turns: 2 }));
        assert_eq!(memories.take(7), None);
    }

    #[test]
    fn a_full_set_forgets_its_oldest_also_where_numbers_wrap() {
        let mut memories = Memories::new(1, 1).unwrap();
        let first = u32::MAX - 3;
        for (name, step) in (0..WAYS as u64).zip([0, 1, 2, 3, 5, 6, 7, 8]) {
            assert_eq!(memories.insert(name, memory(first.wrapping_add(step))), None);
        }
        let latest = memory(first.wrapping_add(9));
        assert_eq!(memories.insert(100, latest), Some(first));
        assert_eq!(memories.take(0), None);
        assert_eq!(memories.take(100), Some(latest));
        assert_eq!(memories.take(1), Some(memory(first.wrapping_add(1))));
    }
}
