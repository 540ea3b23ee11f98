//! What is known of one block, in 13 bits.

use super::ages::Gap;
use super::kind::Kind;
use crate::Priority;

/// Greatest number of finds that is counted.
const COUNT_MAX: u8 = 7;

const COUNT_AT: u32 = 7;
const CLASS_AT: u32 = 10;
const CLASSES: u16 = 3;
const PLAIN: u16 = 0;
const PARTIAL: u16 = 1;
const OF_PRIORITY: u16 = 2;
const HINTED: u16 = 3;

/// Whether the request that used it last added many blocks.
const MANY_ADDED: u16 = 1 << 12;

/// Bits that there are at most.
pub(super) const TRAIT_BITS: u32 = 13;

/// How often a block was found and at what pace, or what else decides on when it goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Traits(u16);

/// What decides on when a block goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Order {
    /// What blocks of its kind are worth.
    Learned(Kind),
    /// A priority of its own.
    Priority(Priority),
}

impl Traits {
    /// Of a block that was found `count` times, at a pace that may be unknown.
    pub(super) fn new(count: u8, gap: Gap) -> Self {
        let count = u16::from(count.min(COUNT_MAX));
        Self(u16::from(gap.to_bits()) | count << COUNT_AT | PLAIN << CLASS_AT)
    }

    /// The same of a block that is full or not. What was hinted says more.
    pub(super) fn full(self, full: bool) -> Self {
        match self.class() {
            HINTED => self,
            _ => self.with_class(if full { PLAIN } else { PARTIAL }),
        }
    }

    /// The same of a block that was hinted to be of this special kind, until it is found. Its pace is forgotten.
    pub(super) fn hinted(self, kind: Kind) -> Self {
        let Self(bits) = self.with_class(HINTED);
        Self(bits & !u16::from(Gap::MAX) | kind.index() as u16)
    }

    /// The same of a block that was used last by a request that added many blocks, or few.
    pub(super) fn many_added(self, many_added: bool) -> Self {
        Self(self.0 & !MANY_ADDED | if many_added { MANY_ADDED } else { 0 })
    }

    /// The same of a block with a priority of its own, whose pace is forgotten.
    pub(super) fn with_priority(self, priority: Priority) -> Self {
        let Self(bits) = self.with_class(OF_PRIORITY);
        Self(bits & !u16::from(Gap::MAX) | u16::from(priority.get()))
    }

    /// The same after another find, so long after the use before it.
    pub(super) fn found_after(self, gap: Gap) -> Self {
        let known = if self.count() > 0 { self.gap() } else { Gap::UNKNOWN };
        Self::new(self.count().saturating_add(1), known.then(gap))
    }

    pub(super) fn gap(self) -> Gap {
        match self.class() {
            OF_PRIORITY | HINTED => Gap::UNKNOWN,
            _ => Gap::from_bits(self.0 as u8),
        }
    }

    pub(super) fn order(self) -> Order {
        let own = Priority::new(self.0 as u8 & Gap::MAX);
        match (self.class(), own) {
            (PARTIAL, _) => Order::Learned(Kind::PARTIAL),
            (HINTED, _) => Order::Learned(Kind::special(self.0 as u8 & Gap::MAX)),
            (OF_PRIORITY, Some(priority)) => Order::Priority(priority),
            _ => Order::Learned(Kind::of(self.count(), self.gap(), self.0 & MANY_ADDED != 0)),
        }
    }

    pub(super) const fn to_bits(self) -> u16 {
        self.0
    }

    /// The traits of these bits, of which there are [`TRAIT_BITS`].
    pub(super) const fn from_bits(bits: u16) -> Self {
        Self(bits & ((1 << TRAIT_BITS) - 1))
    }

    fn count(self) -> u8 {
        (self.0 >> COUNT_AT) as u8 & COUNT_MAX
    }

    fn class(self) -> u16 {
        self.0 >> CLASS_AT & CLASSES
    }

    fn with_class(self, class: u16) -> Self {
        Self(self.0 & !(CLASSES << CLASS_AT) | class << CLASS_AT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_holds_until_the_next_find() {
        let traits = Traits::new(3, Gap::from_bits(127));
        let hinted = traits.hinted(Kind::back_in(5000));
        assert_eq!(hinted.order(), Order::Learned(Kind::back_in(5000)));
        assert_eq!((hinted.full(true), hinted.full(false)), (hinted, hinted));
        assert_eq!(hinted.found_after(Gap::from_bits(8)), Traits::new(4, Gap::from_bits(8)));
    }
}
