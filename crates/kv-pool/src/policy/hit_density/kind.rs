//! What is told apart when blocks are expected to be found again.

use super::ages::Gap;

/// Classes of the number of blocks that a request added: 1, 2, 3 to 7, up to 31, up to 127, more.
const ADDED: u8 = 6;

/// Classes of the gap between uses: unknown, below 64 lookups, then one an octave.
const GAPS: u8 = 18;
const GAP_OCTAVE_MIN: u8 = 5;

/// Kinds that say something special of a block, which come first.
const SPECIAL: u8 = 2;

/// Kinds of blocks.
pub(super) const KINDS: usize = (SPECIAL + 2 * ADDED * GAPS) as usize;

/// A kind of block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Kind(u8);

impl Kind {
    /// A later request followed the chain up to here and left it: the conversation has gone
    /// another way.
    pub(super) const LEFT: Self = Self(0);
    /// Not full: a longer prompt has another block in its place.
    pub(super) const PARTIAL: Self = Self(1);

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..KINDS as u8).map(Self)
    }

    /// The kind of a block that was found before or not, with its pace, in a request that added so
    /// many blocks.
    pub(super) fn of(full: bool, found: bool, gap: Gap, added: u32) -> Self {
        if !full {
            return Self::PARTIAL;
        }
        let gap = match gap {
            Gap::UNKNOWN => 0,
            gap => (1 + gap.octave().saturating_sub(GAP_OCTAVE_MIN)).min(GAPS - 1),
        };
        let kind = (added_class(added) * 2 + u8::from(found)) * GAPS + gap;
        Self(SPECIAL + kind)
    }

    /// The same kind in a request that added another number of blocks.
    pub(super) fn with_added(self, added: u32) -> Self {
        if self.0 < SPECIAL {
            return self;
        }
        let rest = (self.0 - SPECIAL) % (2 * GAPS);
        Self(SPECIAL + added_class(added) * 2 * GAPS + rest)
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

    /// Whether a request that finds some blocks of this kind, and others not, has left the others.
    pub(super) fn can_be_left(self) -> bool {
        self.0 >= SPECIAL
    }
}

/// Number of [families](Kind::family).
pub(super) const FAMILIES: usize = (SPECIAL + 2 * ADDED) as usize;

/// Two octaves a class.
pub(super) fn added_class(added: u32) -> u8 {
    match added {
        0..=1 => 0,
        2 => 1,
        more => ((more + 1).ilog2() / 2 + 1).min(u32::from(ADDED) - 1) as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_families_are_numbered_without_gaps() {
        let (mut kinds, mut families) = ([false; KINDS], [false; FAMILIES]);
        let mut see = |kind: Kind| {
            kinds[kind.index()] = true;
            families[kind.family()] = true;
        };
        see(Kind::LEFT);
        for full in [false, true] {
            for found in [false, true] {
                for gap in 0..=u8::MAX {
                    for added in [0, 1, 2, 3, 7, 20, 100, 1000] {
                        let kind = Kind::of(full, found, Gap::from_bits(gap), added);
                        assert_eq!(
                            Kind::of(full, found, Gap::from_bits(gap), 9).with_added(added),
                            kind
                        );
                        see(kind);
                    }
                }
            }
        }
        assert_eq!((kinds, families), ([true; KINDS], [true; FAMILIES]));
    }
}
