//! What is told apart when blocks are expected to be found again.

use super::ages::Gap;

/// Classes of how often a block was found: never, once, two or three times, more often.
const COUNTS: u8 = 4;

/// Classes of the gap between uses: unknown, then one an octave, up to the gaps of a thousand ticks and more.
const GAPS: u8 = 14;

/// Classes of how many blocks the request added that used them last: few, many.
const ADDED: u8 = 2;

/// Classes of the time after which a block is declared to come back: below a second, then one an octave.
const RETURNS: u8 = 12;
const RETURN_OCTAVE_MIN_MS: u32 = 9;

/// Kinds that say something special of a block, which come first: not full, a shared head, and those that
/// are declared to come back.
const SPECIAL: u8 = 2 + RETURNS;

/// Kinds of blocks.
pub(super) const KINDS: usize = (SPECIAL + ADDED * COUNTS * GAPS) as usize;

/// Number of [families](Kind::family).
pub(super) const FAMILIES: usize = (SPECIAL + ADDED * COUNTS) as usize;

/// A kind of block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Kind(u8);

impl Kind {
    /// Not full: a longer prompt has another block in its place.
    pub(super) const PARTIAL: Self = Self(0);

    /// Declared to be what sessions begin with.
    pub(super) const SHARED_HEAD: Self = Self(1);

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..KINDS as u8).map(Self)
    }

    /// The kind of a full block that was found so often, with its pace, and used last by a request that
    /// added many blocks or few.
    pub(super) fn of(count: u8, gap: Gap, many_added: bool) -> Self {
        let gap = if gap == Gap::UNKNOWN { 0 } else { (1 + gap.octave()).min(GAPS - 1) };
        let count = match count {
            0 => 0,
            1 => 1,
            2 | 3 => 2,
            _ => COUNTS - 1,
        };
        Self(SPECIAL + (u8::from(many_added) * COUNTS + count) * GAPS + gap)
    }

    /// The kind of a block that is declared to be looked up again after so many milliseconds.
    pub(super) fn back_in(ms: u128) -> Self {
        let octave = ms.max(1).ilog2().saturating_sub(RETURN_OCTAVE_MIN_MS);
        Self(2 + octave.min(u32::from(RETURNS) - 1) as u8)
    }

    /// One of the special kinds, by number.
    pub(super) fn special(index: u8) -> Self {
        Self(index.min(SPECIAL - 1))
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The kinds that this one is taken to be like until more is known: those with any gap.
    pub(super) fn family(self) -> usize {
        match self.0.checked_sub(SPECIAL) {
            None => self.index(),
            Some(kind) => usize::from(SPECIAL + kind / GAPS),
        }
    }

    /// Whether it says something that other kinds say nothing about.
    pub(super) fn is_special(self) -> bool {
        self.0 < SPECIAL
    }
}
