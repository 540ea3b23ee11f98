//! Whether two tokens of a store go to the same slot, where either's bytes might stay.

use std::cell::Cell;

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
    Slots { skip: u64, slots: &'a [i64] },
    Blocks { skip: u64, ids: &'a [i32], block_tokens: u64 },
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
            Self::Blocks { skip, block_tokens, .. } => skip.div_ceil(block_tokens) as usize,
        }
    }

    /// The slot, or block, of an entry; none for a negative one, and for one that is skipped.
    fn place(&self, entry: usize) -> Option<u64> {
        if entry < self.first() {
            return None;
        }
        match self {
            Self::Slots { slots, .. } => u64::try_from(slots[entry]).ok(),
            Self::Blocks { ids, .. } => u64::try_from(ids[entry]).ok(),
        }
    }

    /// Tokens of an entry.
    fn unit(&self) -> u64 {
        match *self {
            Self::Slots { .. } => 1,
            Self::Blocks { block_tokens, .. } => block_tokens,
        }
    }
}

/// Checks that no slot is named twice by the chunks of a call, whose slots are below `slots`. All are by
/// slots, or all by blocks.
///
/// Takes about two nanoseconds for each token of a run, and six for one by itself.
///
/// # Errors
/// [`KernelError::StoredTwice`].
pub(crate) fn check_stored(slots: u64, chunks: &[Named<'_>]) -> Result<(), KernelError> {
    let repeated = if slots <= BITS_MAX { seen_twice(slots, chunks) } else { true };
    // The bits tell that there is a repeat, and this where.
    if repeated { find_repeat(chunks) } else { Ok(()) }
}

fn seen_twice(slots: u64, chunks: &[Named<'_>]) -> bool {
    let mut seen = Kept::take(slots);
    chunks.iter().any(|chunk| match *chunk {
        Named::Slots { slots, .. } => seen.0.any_twice(slots.iter().skip(chunk.first()).copied()),
        Named::Blocks { ids, .. } => {
            seen.0.any_twice(ids.iter().skip(chunk.first()).map(|id| i64::from(*id)))
        }
    })
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
    let (unit, named) = (chunks[chunk].unit(), chunks[chunk].place(entry));
    Err(KernelError::StoredTwice {
        slot: named.unwrap_or_default() * unit,
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
    /// Whether one of the places was seen before; negative ones are none.
    fn any_twice(&mut self, places: impl Iterator<Item = i64>) -> bool {
        // Places that follow each other share a word, which is looked at once for all of them.
        let (mut word, mut bits) = (0, 0u64);
        for place in places.filter_map(|place| u64::try_from(place).ok()) {
            let (of, bit) = ((place / 64) as usize, 1 << (place % 64));
            if of != word {
                if self.take(word, bits) {
                    return true;
                }
                (word, bits) = (of, 0);
            }
            if bits & bit != 0 {
                return true;
            }
            bits |= bit;
        }
        self.take(word, bits)
    }

    fn take(&mut self, word: usize, bits: u64) -> bool {
        if bits == 0 {
            return false;
        }
        // Places were checked to be in range; of others nothing is known here.
        let Some(seen) = self.words.get_mut(word) else { return true };
        if *seen == 0 {
            self.touched.push(word);
        }
        let again = *seen & bits != 0;
        *seen |= bits;
        again
    }
}

/// The thread's own, given back with every bit zero.
struct Kept(Seen);

impl Kept {
    fn take(places: u64) -> Self {
        let mut seen = KEPT.take();
        let words = places.div_ceil(64) as usize;
        if seen.words.len() < words {
            seen.words.resize(words, 0);
        }
        Self(seen)
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

    fn twice(slot: u64, first: (usize, u64), second: (usize, u64)) -> Result<(), KernelError> {
        let ((first_chunk, first_token), (chunk, token)) = (first, second);
        Err(KernelError::StoredTwice { slot, chunk, token, first_chunk, first_token })
    }

    /// With a bit for each slot, and without.
    #[track_caller]
    fn assert_found(chunks: &[Named<'_>], expected: Result<(), KernelError>) {
        for slots in [1 << 14, BITS_MAX + 1] {
            assert_eq!(format!("{:?}", check_stored(slots, chunks)), format!("{expected:?}"));
        }
        // Nothing is left for the next call.
        let kept = KEPT.take();
        assert!(kept.touched.is_empty() && kept.words.iter().all(|word| *word == 0));
        KEPT.set(kept);
    }

    fn slots(skip: u64, slots: &[i64]) -> Named<'_> {
        Named::Slots { skip, slots }
    }

    #[test]
    fn a_slot_that_is_named_twice_is_found_with_both_tokens() {
        assert_found(&[], Ok(()));
        assert_found(&[slots(0, &[4, 5, 6, -1, 3, 2, -1, -7])], Ok(()));
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
        let blocks = |skip, ids| Named::Blocks { skip, ids, block_tokens: 4 };
        assert_found(&[blocks(0, &[2, -1, 0, -1]), blocks(0, &[1])], Ok(()));
        assert_found(&[blocks(0, &[2, 0, 2])], twice(8, (0, 0), (0, 8)));
        assert_found(&[blocks(0, &[2, 0]), blocks(0, &[70, 0])], twice(0, (0, 4), (1, 4)));
        assert_found(&[blocks(4, &[2, 2])], Ok(()));
        assert_found(&[blocks(8, &[2, 2]), blocks(0, &[2])], Ok(()));
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
            assert_eq!(check_stored(1 << 14, &[slots(0, &named)]).is_ok(), unique);
        }
        assert!(found[0] > 10 && found[1] > 10, "{found:?}");
    }
}
