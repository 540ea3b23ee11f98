//! What the host knows of slots and blocks that a launch names: whether they are there, and whether two
//! tokens of a store go to the same slot, where either's bytes might stay.

use std::cell::Cell;

use cuda_driver::guard;
use kv_pool::{Slot, TableEntry};

use crate::KernelError;
use crate::places::first_repeat;

/// Bits that a thread keeps for its next call, at most: 2 MiB. Where there are more slots, those that are
/// named are looked up one by one.
const BITS_MAX: u64 = 1 << 24;

thread_local! {
    /// What the call before has left, all zero.
    static KEPT: Cell<Seen> = const { Cell::new(Seen { words: Vec::new(), touched: Vec::new() }) };
}

/// The slots that a chunk names from its first token that moves on, and how many tokens stand for one: of
/// a chunk by blocks, entries are blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Named<'a> {
    Slots { skip: u64, slots: &'a [Slot] },
    Blocks { skip: u64, ids: &'a [TableEntry], block_tokens: u32 },
}

impl Named<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Slots { slots, .. } => slots.len(),
            Self::Blocks { ids, .. } => ids.len(),
        }
    }

    /// The first entry that is stored.
    fn first(&self) -> usize {
        match *self {
            Self::Slots { skip, .. } => skip as usize,
            Self::Blocks { skip, block_tokens, .. } => skip.div_ceil(block_tokens.into()) as usize,
        }
    }

    /// The slot, or block, of an entry, if it names one and is not skipped.
    fn place(&self, entry: usize) -> Option<u64> {
        if entry < self.first() {
            return None;
        }
        match self {
            Self::Slots { slots, .. } => slots[entry].place(),
            Self::Blocks { ids, .. } => place_of(ids[entry]),
        }
    }

    /// Checks the entries that move.
    fn check_range(&self, places: u64) -> Result<(), KernelError> {
        let is_out = |entry: &usize| self.place(*entry).is_some_and(|place| place >= places);
        let Some(at) = (self.first()..self.len()).find(is_out) else { return Ok(()) };
        let place = at as u64;
        Err(match self {
            Self::Slots { slots, .. } => {
                KernelError::SlotOutOfRange { token: place, slot: slots[at], slots: places }
            }
            Self::Blocks { ids, .. } => {
                KernelError::IdOutOfRange { entry: place, block: ids[at], blocks: places }
            }
        })
    }

    /// Tokens of an entry.
    fn unit(&self) -> u64 {
        match *self {
            Self::Slots { .. } => 1,
            Self::Blocks { block_tokens, .. } => block_tokens.into(),
        }
    }

    /// The slot of an entry's first token.
    fn slot(&self, entry: usize) -> Slot {
        match *self {
            Self::Slots { slots, .. } => slots[entry],
            Self::Blocks { ids, block_tokens, .. } => {
                ids[entry].block().map_or(Slot::NONE, |block| block.slot(block_tokens, 0))
            }
        }
    }
}

/// Checks that slots, or blocks, that chunks name are below `places`, which counts slots, or blocks; and,
/// where `apart`, that no two entries name the same. All chunks are by slots, or all by blocks.
///
/// Entries are looked at once, and again only where something is wrong or where there are more slots
/// than bits are kept for: about a nanosecond for each token of a run, and three for one by itself.
///
/// # Errors
/// [`KernelError::SlotOutOfRange`], [`KernelError::IdOutOfRange`], [`KernelError::StoredTwice`].
pub(crate) fn check_named(
    places: u64,
    chunks: &[Named<'_>],
    apart: bool,
) -> Result<(), KernelError> {
    if apart && !is_unsure(places, chunks) {
        return Ok(());
    }
    chunks.iter().try_for_each(|chunk| chunk.check_range(places))?;
    if apart { find_repeat(chunks) } else { Ok(()) }
}

/// Whether an entry may be out of range, or one of two that name the same.
fn is_unsure(places: u64, chunks: &[Named<'_>]) -> bool {
    let mut seen = Kept::take();
    chunks.iter().any(|chunk| match *chunk {
        Named::Slots { slots, .. } => {
            seen.any_twice(places, slots.iter().skip(chunk.first()).filter_map(|slot| slot.place()))
        }
        Named::Blocks { ids, .. } => {
            seen.any_twice(places, ids.iter().skip(chunk.first()).filter_map(|id| place_of(*id)))
        }
    })
}

/// The index of the block that an entry names.
fn place_of(entry: TableEntry) -> Option<u64> {
    entry.block().map(|block| block.index() as u64)
}

/// Names the first repeat with both of its tokens, if there is one.
fn find_repeat(chunks: &[Named<'_>]) -> Result<(), KernelError> {
    let mut ends = Vec::with_capacity(chunks.len());
    let mut count = 0;
    for chunk in chunks {
        count += chunk.len();
        ends.push(count);
    }
    let at = |position: usize| {
        let chunk = ends.partition_point(|end| *end <= position);
        (chunk, position + chunks[chunk].len() - ends[chunk])
    };
    let repeat = first_repeat(count, |position| {
        let (chunk, entry) = at(position);
        chunks[chunk].place(entry)
    });
    let Some((first, second)) = repeat else { return Ok(()) };
    let [(first_chunk, first_entry), (chunk, entry)] = [at(first), at(second)];
    let (unit, slot) = (chunks[chunk].unit(), chunks[chunk].slot(entry));
    Err(KernelError::StoredTwice {
        slot,
        chunk,
        token: entry as u64 * unit,
        first_chunk,
        first_token: first_entry as u64 * unit,
    })
}

/// A bit for each place, and which words of them are not zero.
#[derive(Debug, Default)]
struct Seen {
    words: Vec<u64>,
    touched: Vec<usize>,
}

impl Seen {
    #[cold]
    fn grow(&mut self, word: usize) {
        self.words.resize(word + 1, 0);
    }

    fn take(&mut self, word: usize, bits: u64) -> bool {
        if bits == 0 {
            return false;
        }
        if word >= self.words.len() {
            self.grow(word);
        }
        let seen = &mut self.words[word];
        if *seen == 0 {
            self.touched.push(word);
        }
        let again = *seen & bits != 0;
        *seen |= bits;
        again
    }
}

/// The thread's own, given back with every bit zero.
pub(crate) struct Kept(Seen);

impl Kept {
    pub(crate) fn take() -> Self {
        Self(KEPT.take())
    }

    /// Whether one of the places was seen before, or is not below `end`, or beyond the bits that are kept:
    /// only a `false` is sure.
    pub(crate) fn any_twice(&mut self, end: u64, places: impl Iterator<Item = u64>) -> bool {
        let end = end.min(BITS_MAX);
        // Places that follow each other share a word, which is looked at once for all of them.
        let (mut word, mut bits) = (0, 0u64);
        for place in places {
            if guard!("kernels.slots-are-there", place >= end, else place >= BITS_MAX) {
                return true;
            }
            let (of, bit) = ((place / 64) as usize, 1 << (place % 64));
            if of != word {
                if self.0.take(word, bits) {
                    return true;
                }
                (word, bits) = (of, 0);
            }
            if bits & bit != 0 {
                return true;
            }
            bits |= bit;
        }
        self.0.take(word, bits)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let Seen { words, touched } = &mut self.0;
        for word in touched.drain(..) {
            words[word] = 0;
        }
        KEPT.set(std::mem::take(&mut self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn twice(slot: i64, first: (usize, u64), second: (usize, u64)) -> Result<(), KernelError> {
        let slot = Slot::new(slot).unwrap();
        let ((first_chunk, first_token), (chunk, token)) = (first, second);
        Err(KernelError::StoredTwice { slot, chunk, token, first_chunk, first_token })
    }

    #[track_caller]
    fn assert_found(chunks: &[Named<'_>], expected: Result<(), KernelError>) {
        assert_eq!(format!("{:?}", check_named(1 << 14, chunks, true)), format!("{expected:?}"));
        // Nothing is left for the next call.
        let kept = KEPT.take();
        assert!(kept.touched.is_empty() && kept.words.iter().all(|word| *word == 0));
        KEPT.set(kept);
    }

    fn slots(skip: u64, numbers: &[i64]) -> Named<'static> {
        let slots = numbers.iter().map(|&slot| Slot::new(slot).unwrap());
        Named::Slots { skip, slots: slots.collect::<Vec<_>>().leak() }
    }

    fn blocks(skip: u64, numbers: &[i32]) -> Named<'static> {
        let ids = numbers.iter().map(|&id| TableEntry::new(id).unwrap());
        Named::Blocks { skip, ids: ids.collect::<Vec<_>>().leak(), block_tokens: 4 }
    }

    #[test]
    fn a_slot_that_is_named_twice_is_found_with_both_tokens() {
        assert_found(&[], Ok(()));
        assert_found(&[slots(0, &[4, 5, 6, -1, 3, 2, -1, -1])], Ok(()));
        assert_found(&[slots(0, &[4, 5, 6, 4])], twice(4, (0, 0), (0, 3)));
        assert_found(&[slots(0, &[6, 100, 5, 6])], twice(6, (0, 0), (0, 3)));
        assert_found(&[slots(0, &[9, 1, 2, 300, 2])], twice(2, (0, 2), (0, 4)));
        assert_found(&[slots(0, &[9, 9])], twice(9, (0, 0), (0, 1)));
        assert_found(&[slots(0, &[0, 64, 0])], twice(0, (0, 0), (0, 2)));
        // What is skipped is not stored.
        assert_found(&[slots(1, &[4, 5, 6, 4])], Ok(()));
        assert_found(&[slots(2, &[4, 5])], Ok(()));
        assert_found(&[slots(0, &[4, 5]), slots(0, &[6, 7]), slots(2, &[4, 5, 8])], Ok(()));
        let chunks = [slots(0, &[4, 5]), slots(0, &[]), slots(1, &[4, 7, 5])];
        assert_found(&chunks, twice(5, (0, 1), (2, 2)));
    }

    #[test]
    fn a_block_that_is_named_twice_is_found_by_its_first_token() {
        assert_found(&[blocks(0, &[2, -1, 0, -1]), blocks(0, &[1])], Ok(()));
        assert_found(&[blocks(0, &[2, 0, 2])], twice(8, (0, 0), (0, 8)));
        assert_found(&[blocks(0, &[2, 0]), blocks(0, &[70, 0])], twice(0, (0, 4), (1, 4)));
        assert_found(&[blocks(4, &[2, 2])], Ok(()));
        assert_found(&[blocks(8, &[2, 2]), blocks(0, &[2])], Ok(()));
    }

    #[test]
    fn slots_beyond_the_bits_that_are_kept_are_looked_up() {
        let far = 1i64 << 40;
        let check = |named: &[i64]| check_named(1 << 41, &[slots(0, named)], true);
        assert_eq!(check(&[far, 3, far + 1]), Ok(()));
        assert_eq!(
            format!("{:?}", check(&[far, 3, far])),
            format!("{:?}", twice(1 << 40, (0, 0), (0, 2)))
        );
    }

    #[test]
    fn a_slot_out_of_range_is_seen_in_the_pass_for_repeats() {
        let named = [3, 8, 1];
        let expected = KernelError::SlotOutOfRange { token: 1, slot: Slot::from(8), slots: 8 };
        assert_eq!(check_named(8, &[slots(0, &named)], true), Err(expected));
        assert_eq!(check_named(9, &[slots(0, &named)], true), Ok(()));
    }

    #[test]
    fn a_slot_out_of_range_is_found_though_others_repeat() {
        for apart in [false, true] {
            let check = |chunk: Named<'_>| check_named(8, &[chunk], apart).unwrap_err();
            let (token, slot) = (4, Slot::from(8));
            let named = [9, 2, 2, -1, 8];
            let expected = KernelError::SlotOutOfRange { token, slot, slots: 8 };
            assert_eq!(check(slots(1, &named)), expected);
            let ids = blocks(4, &[9, 2, 2, 8]);
            let block = TableEntry::new(8).unwrap();
            assert_eq!(check(ids), KernelError::IdOutOfRange { entry: 3, block, blocks: 8 });
        }
    }

    /// Against a set, over slots in runs and by themselves.
    #[test]
    fn what_a_set_says_is_found() {
        let mut state = 7u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let mut found = [0; 2];
        for _ in 0..400 {
            let mut named = Vec::new();
            while named.len() < 60 {
                let (start, run) = (random(1 << 10), 1 + random(24));
                named.extend((start..start + run).map(|slot| slot as i64));
            }
            let distinct: std::collections::HashSet<_> = named.iter().collect();
            let unique = distinct.len() == named.len();
            found[usize::from(unique)] += 1;
            assert_eq!(check_named(1 << 14, &[slots(0, &named)], true).is_ok(), unique);
        }
        assert!(found[0] > 10 && found[1] > 10, "{found:?}");
    }
}
