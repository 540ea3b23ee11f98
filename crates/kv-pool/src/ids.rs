//! Names of things: blocks, block ids, rows, groups, tiers, priorities and epochs.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A block of the pool: an identity that content belongs to, wherever the content lies.
///
/// When content moves to another tier, the record stays and gets another [`BlockId`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RecordId(pub(crate) u32);

impl RecordId {
    /// The id as an index, from 0 to one below the number of blocks in all tiers.
    #[must_use]
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where in its tier a block lies, counted in blocks from the start of the tier's memory.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// The block id with this index: one that has come from another process, for instance. No pool takes
    /// block ids, so it gives no access to a block.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The index, counted in blocks.
    #[must_use]
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The index as block tables hold it. Pools have at most `i32::MAX` blocks.
    #[must_use]
    #[inline]
    pub fn as_i32(self) -> i32 {
        self.0 as i32
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A row of a block table: the block ids of one sequence, in the order of its tokens.
///
/// A pool knows no rows. All who share block tables name them alike, and take them for nothing else.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Row(u32);

impl Row {
    /// Row number `index`, counted from 0.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The number, counted from 0.
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Layers that share one block table and one rule for what they keep.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct GroupId(pub u16);

/// A kind of memory that blocks lie in.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Tier {
    /// The memory that attention reads: a GPU's.
    Primary,
    /// The memory that evicted content goes to: the host's.
    Secondary,
    /// Memory further away still, such as a disk's.
    Third,
    /// The furthest.
    Fourth,
}

impl Tier {
    /// How many tiers a pool can have.
    pub const COUNT: usize = 4;

    /// All tiers, the nearest first.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Primary, Self::Secondary, Self::Third, Self::Fourth];

    /// The tier's place among all, counted from 0 for the nearest.
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The tier that is one further away.
    #[must_use]
    #[inline]
    pub const fn below(self) -> Option<Self> {
        match self {
            Self::Primary => Some(Self::Secondary),
            Self::Secondary => Some(Self::Third),
            Self::Third => Some(Self::Fourth),
            Self::Fourth => None,
        }
    }

    /// The tier in the two lowest bits.
    #[inline]
    pub(crate) fn from_bits(bits: u32) -> Self {
        // The compiler makes a mask of this, and a read from memory of an index into `ALL`.
        match bits & 3 {
            0 => Self::Primary,
            1 => Self::Secondary,
            2 => Self::Third,
            _ => Self::Fourth,
        }
    }
}

/// A tier and a block id in it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Location {
    /// The tier.
    pub tier: Tier,
    /// The block id in that tier.
    pub id: BlockId,
}

/// How much a cached block is worth keeping: of two blocks the one with the lower number is
/// evicted first, however recently it was used.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Priority(u8);

impl Priority {
    /// The lowest priority.
    pub const MIN: Self = Self(0);
    /// The highest priority.
    pub const MAX: Self = Self(100);
    /// The priority of blocks that nobody said anything about.
    pub const DEFAULT: Self = Self(35);
    /// The lowest priority whose content is offloaded, unless a pool is told otherwise.
    pub const OFFLOAD_MIN: Self = Self(30);
    /// How many priorities there are.
    pub(crate) const COUNT: usize = 101;

    /// A priority, if `value` is at most 100.
    #[must_use]
    pub const fn new(value: u8) -> Option<Self> {
        if value <= Self::MAX.0 { Some(Self(value)) } else { None }
    }

    /// The number, from 0 to 100.
    #[must_use]
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The priority in the seven lowest bits, which were one.
    #[inline]
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self((bits & 0x7F) as u8)
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A stretch of device work, numbered in the order in which it was begun.
///
/// A block that is released may still be read by work that was enqueued before. It is therefore
/// stamped with the epoch of its release, and handed out again when that epoch is complete.
///
/// An epoch is of the pool that began it: another pool does not take it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Epoch {
    pub(crate) pool: PoolMark,
    pub(crate) number: u64,
}

impl Epoch {
    /// The number of the epoch; the first that is begun is 1.
    #[must_use]
    #[inline]
    pub fn number(self) -> u64 {
        self.number
    }
}

/// What tells the pools of a process apart, for names that only one of them gives a meaning.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct PoolMark(u64);

impl PoolMark {
    /// The mark of names that mean the same in all pools.
    pub(crate) const ALL: Self = Self(0);

    /// A mark that no pool has, or had.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // No other memory is published with it.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_from_0_and_written_as_their_number() {
        assert_eq!((Row::default().index(), Row::new(u32::MAX).index()), (0, u32::MAX as usize));
        assert!(Row::new(1) < Row::new(2));
        assert_eq!(Row::new(7).to_string(), "7");
    }

    #[test]
    fn priorities_end_at_a_hundred() {
        assert_eq!(Priority::new(100), Some(Priority::MAX));
        assert_eq!(Priority::new(101), None);
        assert_eq!(Priority::default().get(), 35);
    }
}
