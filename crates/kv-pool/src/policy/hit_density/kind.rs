//! What is told apart when blocks are expected to be found again.

/// Kinds of blocks.
pub(super) const KINDS: usize = 15;

/// Hits of the block itself, and turns of its conversation, that are told apart.
const FOUND_MAX: u8 = 2;
const TURNS_MAX: u8 = 3;

/// Hits after which a block is taken to be shared by conversations, as system prompts are.
pub(super) const SHARED_FROM: u8 = 8;

/// A kind of block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Kind(u8);

impl Kind {
    /// A later request followed the chain up to here and left it: the conversation has gone
    /// another way.
    pub(super) const LEFT: Self = Self(0);
    /// Not full: a longer prompt has another block in its place.
    pub(super) const PARTIAL: Self = Self(1);
    /// Found so often that it is part of many conversations.
    pub(super) const SHARED: Self = Self(2);
    /// The kinds from here on are blocks of one conversation, by their hits and its turns.
    const CONVERSATION: u8 = 3;

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..KINDS as u8).map(Self)
    }

    /// The kind of a block that was found so often, in a conversation of so many turns.
    pub(super) fn of(full: bool, found: u8, turns: u8) -> Self {
        match (full, found) {
            (false, _) => Self::PARTIAL,
            (true, SHARED_FROM..) => Self::SHARED,
            (true, _) => {
                let turns = turns.min(TURNS_MAX);
                Self(Self::CONVERSATION + found.min(FOUND_MAX) * (TURNS_MAX + 1) + turns)
            }
        }
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Whether a request that finds some blocks of this kind, and others not, has left the others.
    pub(super) fn can_be_left(self) -> bool {
        self.0 >= Self::CONVERSATION
    }

    /// Whether two kinds are alike until more is known.
    pub(super) fn shares_prior(self, other: Self) -> bool {
        self == other || (self.can_be_left() && other.can_be_left())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_numbered_without_gaps() {
        let mut seen = [false; KINDS];
        for (full, found, turns) in [false, true].into_iter().flat_map(|full| {
            (0..20).flat_map(move |found| (0..20).map(move |turns| (full, found, turns)))
        }) {
            seen[Kind::of(full, found, turns).index()] = true;
        }
        seen[Kind::LEFT.index()] = true;
        assert_eq!(seen, [true; KINDS]);
    }
}
