//! Which place was named first: whether two of a launch's writes meet, found in linear time and, call
//! after call, in the same memory.

use std::cell::Cell;

/// Entries that a thread keeps for its next call, at most: 8 MiB.
const KEPT_MAX: usize = 1 << 20;

thread_local! {
    /// The table of the call before, empty while one is at work.
    static TABLE: Cell<Vec<usize>> = const { Cell::new(Vec::new()) };
}

/// Positions by the place that each names, for places that `place` tells.
pub(crate) struct Places<F: Fn(usize) -> u64> {
    place: F,
    /// Position plus one, or 0 where there is none.
    ///
    /// # Invariants
    /// A power of two in length, more than the positions that can be taken, so that every search ends.
    table: Vec<usize>,
}

impl<F: Fn(usize) -> u64> Places<F> {
    /// Room for positions below `count`.
    pub(crate) fn new(count: usize, place: F) -> Self {
        let mut table = TABLE.take();
        table.clear();
        table.resize((count + 1).next_power_of_two() * 2, 0);
        Self { place, table }
    }

    /// Takes a position's place; the position that has it already, if one does.
    pub(crate) fn take(&mut self, position: usize) -> Option<usize> {
        let at = self.search((self.place)(position));
        match self.table[at] {
            0 => {
                self.table[at] = position + 1;
                None
            }
            taken => Some(taken - 1),
        }
    }

    /// The position that has taken a place.
    pub(crate) fn who_took(&self, place: u64) -> Option<usize> {
        self.table[self.search(place)].checked_sub(1)
    }

    /// The entry of a place, or the empty one where it would go.
    fn search(&self, place: u64) -> usize {
        let mask = self.table.len() - 1;
        // The upper bits of the product depend on all of the place's.
        let mut at = (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & mask;
        while self.table[at] != 0 && (self.place)(self.table[at] - 1) != place {
            at = (at + 1) & mask;
        }
        at
    }
}

impl<F: Fn(usize) -> u64> Drop for Places<F> {
    fn drop(&mut self) {
        if self.table.len() <= KEPT_MAX {
            TABLE.set(std::mem::take(&mut self.table));
        }
    }
}

/// The first position whose place an earlier one has, after that one; positions without a place have
/// none in common.
pub(crate) fn first_repeat(
    count: usize,
    place: impl Fn(usize) -> Option<u64>,
) -> Option<(usize, usize)> {
    // Places that rise, as those of a sequence in order do, need no table.
    let mut named = (0..count).filter_map(&place);
    let mut last = named.next()?;
    let rises = named.all(|next| next > std::mem::replace(&mut last, next));
    if rises {
        return None;
    }
    let mut places = Places::new(count, |position| place(position).unwrap_or_default());
    (0..count)
        .filter(|&position| place(position).is_some())
        .find_map(|position| Some((places.take(position)?, position)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repeat(places: &[Option<u64>]) -> Option<(usize, usize)> {
        first_repeat(places.len(), |position| places[position])
    }

    #[test]
    fn the_first_repeat_is_found_with_both_positions() {
        assert_eq!(repeat(&[]), None);
        assert_eq!(repeat(&[Some(4)]), None);
        assert_eq!(repeat(&[Some(4), Some(4)]), Some((0, 1)));
        assert_eq!(repeat(&[Some(9), None, Some(4), None, Some(9), Some(4)]), Some((0, 4)));
        assert_eq!(repeat(&[None, Some(0), None, Some(u64::MAX)]), None);
        assert_eq!(repeat(&[Some(0), None, Some(0)]), Some((0, 2)));
    }

    /// Against what a set says, over places that share their lower, or upper, bits.
    #[test]
    fn many_places_are_told_apart() {
        for step in [1u64, 1 << 16, 1 << 32, 1 << 52, 0x61C8_8646_80B5_83EB] {
            let mut places: Vec<_> =
                (0..3000).rev().map(|n: u64| Some(n.wrapping_mul(step))).collect();
            assert_eq!(repeat(&places), None, "{step:#x}");
            places.push(places[17]);
            assert_eq!(repeat(&places), Some((17, 3000)), "{step:#x}");
        }
    }

    #[test]
    fn a_table_is_kept_and_one_within_another_is_its_own() {
        let mut outer = Places::new(100, |position| position as u64);
        assert_eq!(outer.take(7), None);
        {
            let mut inner = Places::new(50, |position| position as u64);
            assert_eq!((inner.take(7), inner.who_took(8)), (None, None));
        }
        assert_eq!((outer.take(7), outer.who_took(7)), (Some(7), Some(7)));
        drop(outer);
        let kept = TABLE.take();
        assert!(kept.capacity() >= 200, "{}", kept.capacity());
    }
}
