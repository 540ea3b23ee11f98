//! Whether two tokens of a store go to the same slot, where either's bytes might stay.

use smallvec::SmallVec;

use crate::KernelError;

/// Tokens that follow each other into slots that follow each other.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Run {
    /// Which pages the slots are of.
    pages: u64,
    slot: u64,
    /// Position of the chunk in the call, and of the first token in the chunk.
    chunk: usize,
    token: u64,
    tokens: u64,
}

/// The slots that the chunks of a call are stored to.
///
/// Blocks make runs, so there are far fewer of them than tokens, and only runs out of order are sorted.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    runs: SmallVec<[Run; 32]>,
}

impl Stored {
    /// Adds the tokens of a chunk that move, from `skip` on; a negative slot stores nothing. `pages` tells
    /// paged memories apart.
    pub(crate) fn add_slots(&mut self, pages: u64, chunk: usize, skip: u64, slots: &[i64]) {
        for (token, &slot) in (skip..).zip(slots.iter().skip(skip as usize)) {
            if let Ok(slot) = u64::try_from(slot) {
                self.push(Run { pages, slot, chunk, token, tokens: 1 });
            }
        }
    }

    /// Likewise the `tokens` tokens of a chunk by its blocks, from `skip` on, which begins a block.
    pub(crate) fn add_blocks(
        &mut self,
        (pages, block_tokens): (u64, u64),
        chunk: usize,
        (skip, tokens): (u64, u64),
        ids: &[i32],
    ) {
        for (&id, entry) in ids.iter().zip(0u64..) {
            let token = entry * block_tokens;
            let whole = (token + block_tokens).min(tokens).saturating_sub(token);
            if let Ok(block) = u64::try_from(id)
                && token >= skip
                && whole > 0
            {
                let slot = block * block_tokens;
                self.push(Run { pages, slot, chunk, token, tokens: whole });
            }
        }
    }

    fn push(&mut self, next: Run) {
        if let Some(last) = self.runs.last_mut()
            && (last.pages, last.chunk) == (next.pages, next.chunk)
            && last.token + last.tokens == next.token
            && last.slot + last.tokens == next.slot
        {
            last.tokens += next.tokens;
        } else {
            self.runs.push(next);
        }
    }

    /// Checks that no slot is named twice.
    ///
    /// # Errors
    /// [`KernelError::StoredTwice`].
    pub(crate) fn check(mut self) -> Result<(), KernelError> {
        if !self.runs.is_sorted() {
            self.runs.sort_unstable();
        }
        // A run may reach over several that follow; it does over the next then, too.
        for pair in self.runs.windows(2) {
            let [first, second] = [pair[0], pair[1]];
            if first.pages == second.pages && second.slot < first.slot + first.tokens {
                let in_first = first.token + (second.slot - first.slot);
                let mut named = [(first.chunk, in_first), (second.chunk, second.token)];
                named.sort_unstable();
                let [(first_chunk, first_token), (chunk, token)] = named;
                let slot = second.slot;
                return Err(KernelError::StoredTwice {
                    slot,
                    chunk,
                    token,
                    first_chunk,
                    first_token,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn twice(slot: u64, first: (usize, u64), second: (usize, u64)) -> Result<(), KernelError> {
        let ((first_chunk, first_token), (chunk, token)) = (first, second);
        Err(KernelError::StoredTwice { slot, chunk, token, first_chunk, first_token })
    }

    #[track_caller]
    fn assert_slots(chunks: &[(u64, &[i64])], expected: Result<(), KernelError>) {
        let mut stored = Stored::default();
        for (chunk, (skip, slots)) in chunks.iter().enumerate() {
            stored.add_slots(7, chunk, *skip, slots);
        }
        assert_eq!(format!("{:?}", stored.check()), format!("{expected:?}"));
    }

    #[test]
    fn a_slot_that_is_named_twice_is_found_with_both_tokens() {
        assert_slots(&[], Ok(()));
        assert_slots(&[(0, &[4, 5, 6, -1, 3, 2, -1, -7])], Ok(()));
        assert_slots(&[(0, &[4, 5, 6, 4])], twice(4, (0, 0), (0, 3)));
        assert_slots(&[(0, &[6, 4, 5, 6])], twice(6, (0, 0), (0, 3)));
        assert_slots(&[(0, &[9, 1, 2, 3, 2])], twice(2, (0, 2), (0, 4)));
        // What is skipped is not stored.
        assert_slots(&[(1, &[4, 5, 6, 4])], Ok(()));
        assert_slots(&[(0, &[4, 5]), (0, &[6, 7]), (2, &[4, 5, 8])], Ok(()));
        assert_slots(&[(0, &[4, 5]), (0, &[6, 7, 5])], twice(5, (0, 1), (1, 2)));
        assert_slots(&[(0, &[i64::MAX, 0, i64::MAX])], twice(i64::MAX as u64, (0, 0), (0, 2)));
    }

    #[test]
    fn blocks_take_the_slots_of_their_tokens() {
        let check = |skip, tokens, ids: &[i32], slots: &[i64]| {
            let mut stored = Stored::default();
            stored.add_blocks((7, 4), 0, (skip, tokens), ids);
            stored.add_slots(7, 1, 0, slots);
            format!("{:?}", stored.check())
        };
        let fine = format!("{:?}", Ok::<(), KernelError>(()));
        assert_eq!(check(0, 12, &[2, -1, 0], &[]), fine);
        assert_eq!(check(0, 12, &[2, 0, 2], &[]), format!("{:?}", twice(8, (0, 0), (0, 8))));
        // The last block is not whole, and the first is skipped.
        assert_eq!(check(0, 10, &[3, 1, 0], &[2, 3]), fine);
        assert_eq!(check(0, 10, &[3, 1, 0], &[2, 1]), format!("{:?}", twice(1, (0, 9), (1, 1))));
        assert_eq!(check(4, 8, &[2, 2], &[]), fine);
        assert_eq!(check(8, 8, &[2, 2], &[8]), fine);
    }

    #[test]
    fn pages_are_told_apart() {
        let mut stored = Stored::default();
        stored.add_slots(1, 0, 0, &[5, 6]);
        stored.add_slots(2, 1, 0, &[5, 6]);
        assert!(stored.check().is_ok());
    }
}
