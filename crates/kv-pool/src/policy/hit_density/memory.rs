//! What is remembered of evicted content: eight bytes each, in a table that forgets the oldest.

use super::super::table;
use super::ages::Tick;
use super::traits::Traits;
use crate::BlockHash;
use crate::ConfigError;

/// Entries of one set.
const WAYS: usize = 4;

/// Spreads names over the sets: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Memory {
    pub(super) traits: Traits,
    /// When it was last used.
    pub(super) used: Tick,
}

/// 16 bits of a name, beside those that the set stands for, and what is remembered of it.
#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: u16,
    /// [`FREE`], or traits.
    traits: u16,
    used: Tick,
}

/// No traits have all bits.
const FREE: u16 = u16::MAX;

/// A table of memories by name. When it is full, a name that is not in it is taken for one that is
/// once in 16,000 lookups, which costs a wrong guess and nothing else.
#[derive(Debug)]
pub(super) struct Memories {
    entries: Vec<Entry>,
    sets: usize,
}

impl Memories {
    /// Room for at least `names` names, for a policy of `blocks` blocks.
    pub(super) fn new(names: usize, blocks: u64) -> Result<Self, ConfigError> {
        let sets = names.div_ceil(WAYS);
        let free = Entry { tag: 0, traits: FREE, used: Tick::ZERO };
        let len = sets.checked_mul(WAYS).ok_or(ConfigError::PolicyMemory { blocks })?;
        Ok(Self { entries: table(len, free, blocks)?, sets })
    }

    /// Entries, free ones among them.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The entry at a place below [`len`](Self::len), if it is in use, with ages that are told apart.
    pub(super) fn at(&mut self, place: usize, now: Tick) -> Option<Memory> {
        let entry = self.entries.get_mut(place).filter(|entry| entry.traits != FREE)?;
        entry.used = entry.used.at_least(now);
        Some(entry.memory())
    }

    /// Remembers `name`. What was forgotten for it: without room for any name, itself.
    pub(super) fn insert(&mut self, name: BlockHash, memory: Memory, now: Tick) -> Option<Memory> {
        let (set, tag) = self.locate(name);
        // Free ones first, then the oldest.
        let age = |entry: &Entry| match entry.traits {
            FREE => u32::MAX,
            _ => entry.used.age_at(now).ticks(),
        };
        let mut oldest = (0, 0);
        for (place, entry) in set.iter().enumerate() {
            let older = age(entry) >= oldest.1;
            oldest = if older { (place, age(entry)) } else { oldest };
        }
        let Some(entry) = set.get_mut(oldest.0) else { return Some(memory) };
        let forgotten = (entry.traits != FREE).then(|| entry.memory());
        *entry = Entry { tag, traits: memory.traits.to_bits(), used: memory.used };
        forgotten
    }

    /// Takes out what is remembered of `name`.
    pub(super) fn take(&mut self, name: BlockHash) -> Option<Memory> {
        let (set, tag) = self.locate(name);
        let entry = set.iter_mut().find(|entry| entry.traits != FREE && entry.tag == tag)?;
        let memory = entry.memory();
        entry.traits = FREE;
        Some(memory)
    }

    /// The set of `name`, and its tag.
    fn locate(&mut self, name: BlockHash) -> (&mut [Entry], u16) {
        let name = name.to_u128() as u64;
        let spread = (name ^ name >> 32).wrapping_mul(SPREAD);
        // The upper half, scaled from 2^32 to the number of sets.
        let set = ((u128::from(spread >> 32) * self.sets as u128) >> 32) as usize;
        let from = (set * WAYS).min(self.entries.len());
        let to = (from + WAYS).min(self.entries.len());
        (&mut self.entries[from..to], (spread >> 16) as u16)
    }
}

impl Entry {
    fn memory(&self) -> Memory {
        Memory { traits: Traits::from_bits(self.traits), used: self.used }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ages::Gap;
    use super::*;

    fn at(lookups: u64) -> Tick {
        Tick::of(lookups as u32)
    }

    fn memory(lookups: u64) -> Memory {
        Memory { traits: Traits::new(1, Gap::from_bits(100)), used: at(lookups) }
    }

    fn name(number: u128) -> BlockHash {
        BlockHash::from_u128(number)
    }

    #[test]
    fn a_full_set_forgets_its_oldest_also_where_moments_go_round() {
        let mut memories = Memories::new(1, 1).unwrap();
        let first = u64::from(u32::MAX) - 3;
        let now = at(first + 20);
        for (number, step) in (0..WAYS as u128).zip([1, 0, 2, 3, 5, 6, 7, 8]) {
            assert_eq!(memories.insert(name(number), memory(first + step), now), None);
        }
        assert_eq!(memories.insert(name(100), memory(first + 9), now), Some(memory(first)));
        assert_eq!(memories.take(name(1)), None);
        assert_eq!(memories.take(name(100)), Some(memory(first + 9)));
        assert_eq!(memories.insert(name(101), memory(first), now), None, "a free entry is there");
    }
}
