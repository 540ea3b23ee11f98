//! Names of things: blocks, block ids, entries of block tables, slots, rows, groups, tiers, priorities and
//! epochs.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{NoUninit, Zeroable};

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
///
/// Kernels read it as an `i32`: bytes of a slice go to the device as they are.
#[derive(Clone, Copy, Debug, Eq, Hash, NoUninit, Ord, PartialEq, PartialOrd, Zeroable)]
#[repr(transparent)]
pub struct BlockId(
    /// # Invariants
    /// At most `i32::MAX`: pools have no more blocks.
    pub(crate) u32,
);

impl BlockId {
    /// The block id with this index, which is at most `i32::MAX`: one that has come from another process, for
    /// instance. No pool takes block ids, so it gives no access to a block.
    #[must_use]
    pub const fn new(index: u32) -> Option<Self> {
        if index <= i32::MAX as u32 { Some(Self(index)) } else { None }
    }

    /// The index, counted in blocks.
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Where a block lies whose memory is cut into slabs of `slab_blocks` blocks, of which 0 count as 1: the
    /// slab, and the block's id within it.
    #[must_use]
    #[inline]
    pub const fn in_slabs(self, slab_blocks: usize) -> (usize, Self) {
        let slab_blocks = if slab_blocks == 0 { 1 } else { slab_blocks };
        (self.index() / slab_blocks, Self((self.index() % slab_blocks) as u32))
    }

    /// The slot of the token that is `offset` tokens behind the first one of the block, of blocks of
    /// `block_tokens` tokens.
    #[must_use]
    #[inline]
    pub const fn slot(self, block_tokens: u32, offset: u32) -> Slot {
        // No overflow: the factors have 31 and 32 bits.
        Slot(self.0 as i64 * block_tokens as i64 + offset as i64)
    }
}

impl From<u16> for BlockId {
    fn from(index: u16) -> Self {
        Self(index.into())
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An entry of a block table: a block id, or none.
///
/// Kernels read it as an `i32`, of which -1 is none: bytes of a slice go to the device as they are.
#[derive(Clone, Copy, Debug, Eq, Hash, NoUninit, Ord, PartialEq, PartialOrd)]
#[repr(transparent)]
pub struct TableEntry(
    /// # Invariants
    /// At least -1.
    i32,
);

impl TableEntry {
    /// The entry that names no block.
    pub const NONE: Self = Self(-1);

    /// The entry that kernels read as this number, if it is one.
    #[must_use]
    pub const fn new(number: i32) -> Option<Self> {
        if number >= -1 { Some(Self(number)) } else { None }
    }

    /// The number that kernels read.
    #[must_use]
    #[inline]
    pub const fn get(self) -> i32 {
        self.0
    }

    /// The block, if it names one.
    #[must_use]
    #[inline]
    pub const fn block(self) -> Option<BlockId> {
        if self.0 >= 0 { Some(BlockId(self.0 as u32)) } else { None }
    }
}

impl Default for TableEntry {
    fn default() -> Self {
        Self::NONE
    }
}

impl From<BlockId> for TableEntry {
    #[inline]
    fn from(id: BlockId) -> Self {
        Self(id.0 as i32)
    }
}

impl From<u16> for TableEntry {
    fn from(block: u16) -> Self {
        Self(block.into())
    }
}

impl From<Option<BlockId>> for TableEntry {
    #[inline]
    fn from(id: Option<BlockId>) -> Self {
        id.map_or(Self::NONE, Self::from)
    }
}

impl fmt::Display for TableEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a token in the memory of blocks, or none: an entry of a slot mapping.
///
/// Slot `s` is token `s % block_tokens` of block `s / block_tokens`. Kernels read it as an `i64`, of which -1 is
/// none: padding, or a token that does not move. Bytes of a slice go to the device as they are.
#[derive(Clone, Copy, Debug, Eq, Hash, NoUninit, Ord, PartialEq, PartialOrd)]
#[repr(transparent)]
pub struct Slot(
    /// # Invariants
    /// At least -1.
    i64,
);

impl Slot {
    /// No place.
    pub const NONE: Self = Self(-1);

    /// The slot that kernels read as this number, if it is one.
    #[must_use]
    pub const fn new(number: i64) -> Option<Self> {
        if number >= -1 { Some(Self(number)) } else { None }
    }

    /// The number that kernels read.
    #[must_use]
    #[inline]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The place, counted in tokens from the start of the memory, if it is one.
    #[must_use]
    #[inline]
    pub const fn place(self) -> Option<u64> {
        if self.0 >= 0 { Some(self.0 as u64) } else { None }
    }
}

impl From<u32> for Slot {
    #[inline]
    fn from(place: u32) -> Self {
        Self(place.into())
    }
}

impl fmt::Display for Slot {
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
    pub(crate) const COUNT: usize = 4;

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
    pub(crate) const OFFLOAD_MIN: Self = Self(30);
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
    fn what_kernels_read_is_checked_where_it_is_made() {
        let most = i32::MAX as u32;
        assert_eq!(BlockId::new(most).map(BlockId::index), Some(most as usize));
        assert_eq!(BlockId::new(most + 1), None);
        assert_eq!((TableEntry::new(-2), Slot::new(-2)), (None, None));
        assert_eq!((TableEntry::NONE.block(), Slot::NONE.place()), (None, None));
        let entries = [TableEntry::from(BlockId(7)), TableEntry::from(None)];
        assert_eq!(bytemuck::cast_slice::<_, u8>(&entries), bytemuck::cast_slice(&[7, -1]));
        assert_eq!(entries.map(TableEntry::block), [Some(BlockId(7)), None]);
        let slots = [BlockId(7).slot(16, 3), Slot::NONE];
        assert_eq!(bytemuck::cast_slice::<_, u8>(&slots), bytemuck::cast_slice(&[115_i64, -1]));
        let last = BlockId(most).slot(u32::MAX, u32::MAX - 1).place();
        assert_eq!(last, Some((u64::from(most) + 1) * u64::from(u32::MAX) - 1));
        assert_eq!(BlockId(7).in_slabs(3), (2, BlockId(1)));
        assert_eq!(BlockId(7).in_slabs(0), (7, BlockId(0)));
    }

    #[test]
    fn priorities_end_at_a_hundred() {
        assert_eq!(Priority::new(100), Some(Priority::MAX));
        assert_eq!(Priority::new(101), None);
        assert_eq!(Priority::default().get(), 35);
    }
}
