//! Which list has the block at one of its ends that is worth least.

use super::ages::Tick;
use super::kind::KINDS;
use super::lists::{End, Lists};
use super::rates::Rates;

/// How much less the newest block of a list must be worth than the oldest to go before it. Equal
/// densities differ by rounding.
const CLEARLY_LESS: f32 = 0.999;

/// The key of a list without blocks.
const EMPTY: i32 = i32::MAX;

/// Bits of a key that name the list and the end, below those of the density.
const NAME_BITS: u32 = 8;

const _: () = assert!(KINDS << 1 <= 1 << NAME_BITS);

/// For each list of a kind, what its end that is worth less is worth.
///
/// Blocks of one kind become worth more with the age up to some age, and less after it. So the block
/// that is worth least is the oldest or the newest of its kind, and the others need not be looked at.
#[derive(Debug)]
pub(super) struct Ranking {
    /// Densities as bits, which are in the order of the numbers, with list and end in the low bits.
    keys: [i32; KINDS],
    /// The moment that they were made for.
    at: Tick,
    is_stale: bool,
}

impl Ranking {
    pub(super) const fn new() -> Self {
        Self { keys: [EMPTY; KINDS], at: Tick::ZERO, is_stale: true }
    }

    /// Says that densities have changed.
    pub(super) fn expire(&mut self) {
        self.is_stale = true;
    }

    /// The list and the end with the block that is worth least.
    pub(super) fn lowest(
        &mut self,
        lists: &mut Lists,
        rates: &Rates,
        now: Tick,
    ) -> Option<(usize, End)> {
        let mut changed = lists.take_changed();
        if self.is_stale || self.at != now {
            changed = (1 << KINDS) - 1;
            (self.is_stale, self.at) = (false, now);
        }
        while changed != 0 {
            let list = changed.trailing_zeros() as usize;
            changed &= changed - 1;
            self.keys[list] = key(list, lists, rates, now);
        }
        // A form that compilers make several comparisons at once of.
        let lowest = self.keys.iter().fold(EMPTY, |one, &key| if key < one { key } else { one });
        if lowest == EMPTY {
            return None;
        }
        let end = if lowest & 1 == 1 { End::Newest } else { End::Oldest };
        Some(((lowest as usize & ((1 << NAME_BITS) - 1)) >> 1, end))
    }
}

fn key(list: usize, lists: &Lists, rates: &Rates, now: Tick) -> i32 {
    let density = |end| {
        let (_, used) = lists.end(list, end)?;
        Some(rates.density(list, used.age_at(now)))
    };
    let (Some(oldest), Some(newest)) = (density(End::Oldest), density(End::Newest)) else {
        return EMPTY;
    };
    let is_newest = newest < CLEARLY_LESS * oldest;
    let density = if is_newest { newest } else { oldest };
    let name = (list as u32) << 1 | u32::from(is_newest);
    // Densities are not negative, so the sign is free.
    (density.to_bits() >> NAME_BITS << NAME_BITS | name) as i32
}
