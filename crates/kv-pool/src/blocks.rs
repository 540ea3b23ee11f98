//! What is known of each block: one record of 56 bytes, all zero until the block first appears.
//!
//! A record is an array of words, so that the table is asked of the operating system as zeros and
//! memory is touched block by block, as blocks come into use: a pool of a million blocks is made in
//! the time of a few system calls.

use std::collections::TryReserveError;

use crate::{BlockHash, BlockId, Location, Priority, SlotIndex, Tier};

const WORDS: usize = 14;

/// Words 0 to 3 are the hash.
const BEFORE: usize = 4;
const AFTER: usize = 5;
const SLOT: usize = 6;
const META: usize = 7;
const PARENT: usize = 8;
const PARENT_GENERATION: usize = 9;
const GENERATION: usize = 10;
const CHILDREN: usize = 11;
/// Tenant in the low half, depth in the high one.
const ORIGIN: usize = 12;
const STAMP: usize = 13;

const TIER_SHIFT: u32 = 3;
const PRIORITY_SHIFT: u32 = 5;
const PLACE_MASK: u32 = 0b111;
const TIER_MASK: u32 = 0b11 << TIER_SHIFT;
const PRIORITY_MASK: u32 = 0x7F << PRIORITY_SHIFT;

/// Facts about a block that are true or false, as bits of one word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flag(u32);

impl Flag {
    /// The index leads to the block, under the hash in its record.
    pub(crate) const NAMED: Self = Self(1 << 12);
    /// The content was named as the successor of other content.
    pub(crate) const CHAINED: Self = Self(1 << 13);
    /// A copy of evicted content may still read the block's slot.
    pub(crate) const COPYING: Self = Self(1 << 14);
    /// The name is to come back when the copy has been made.
    pub(crate) const EXPECTED: Self = Self(1 << 15);
    /// The priority is to end some time after the release.
    pub(crate) const TIMED: Self = Self(1 << 16);
    /// Counted for its tenant as in use.
    pub(crate) const COUNTED_HELD: Self = Self(1 << 18);
    /// Counted for its tenant as cached.
    pub(crate) const COUNTED_CACHED: Self = Self(1 << 19);
    /// Met before in the operation under way; clear outside of one.
    pub(crate) const MARK: Self = Self(1 << 17);
    /// Out of its queue for a moment, because it is passed over; clear outside of an operation.
    pub(crate) const ASIDE: Self = Self(1 << 20);
}

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum Place {
    /// Its slot has no memory yet, or nobody has asked for it yet.
    Absent = 0,
    /// In its tier's eviction queues.
    Queued = 1,
    /// It came up for eviction while blocks that follow it were cached. It waits for their end.
    Shadowed = 2,
    /// In the list of released blocks whose epoch is not complete.
    Retiring = 3,
    /// Held by one owner.
    Claimed = 4,
    /// Referenced.
    Pinned = 5,
    /// The content is on its way to another tier; held by one `Offload`.
    Moving = 6,
    /// Released while a copy reads its slot. It waits for the end of the copy.
    Draining = 7,
}

/// What decides how a block is pinned and released.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Kind {
    pub(crate) tier: Tier,
    /// The class of its queue, as [`EvictionQueues`](crate::eviction::EvictionQueues) numbers them.
    pub(crate) class: usize,
    /// Its place, and whether there is more to it than a name.
    state: u32,
}

impl Kind {
    const STATE: u32 = PLACE_MASK | Flag::NAMED.0 | Flag::COPYING.0 | Flag::TIMED.0;

    /// In a queue, with content, and nothing else.
    #[inline]
    pub(crate) fn is_only_cached(self) -> bool {
        self.state == Place::Queued as u32 | Flag::NAMED.0
    }

    /// Referenced, with content, and nothing else.
    #[inline]
    pub(crate) fn is_only_pinned(self) -> bool {
        self.state == Place::Pinned as u32 | Flag::NAMED.0
    }
}

impl Place {
    pub(crate) const COUNT: usize = 8;

    #[inline]
    fn of(meta: u32) -> Self {
        match meta & PLACE_MASK {
            0 => Self::Absent,
            1 => Self::Queued,
            2 => Self::Shadowed,
            3 => Self::Retiring,
            4 => Self::Claimed,
            5 => Self::Pinned,
            6 => Self::Moving,
            _ => Self::Draining,
        }
    }
}

/// Where a block was in the list that it has left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unlinked {
    pub(crate) tier: Tier,
    pub(crate) class: usize,
    pub(crate) before: u32,
    pub(crate) after: u32,
}

/// The list of its tier that a block with this word is queued in; see [`Class`](crate::eviction::Class).
#[inline]
fn class_of(meta: u32) -> usize {
    if meta & Flag::NAMED.0 == 0 {
        0
    } else {
        1 + ((meta & PRIORITY_MASK) >> PRIORITY_SHIFT) as usize
    }
}

/// The records of all blocks.
///
/// # Invariants
///
/// - `BEFORE` and `AFTER` are links while the block is in a list, and zero otherwise, except that
///   `BEFORE` is the number of references while it is pinned: a block is never in a list and
///   referenced at once (H9), because there is one word for both.
/// - `PARENT` is a block's index plus one, or zero. It is meant only if `PARENT_GENERATION` is that
///   block's `GENERATION`, which changes when content that has children loses its name.
#[derive(Debug)]
pub(crate) struct Blocks(Vec<[u32; WORDS]>);

impl Blocks {
    pub(crate) fn new(blocks: usize) -> Result<Self, TryReserveError> {
        // Asks whether there are as many addresses; the zeros themselves are then not refused.
        Vec::<[u32; WORDS]>::new().try_reserve_exact(blocks)?;
        Ok(Self(vec![[0; WORDS]; blocks]))
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.0.len() as u32).map(BlockId)
    }

    #[inline]
    fn record(&self, id: BlockId) -> &[u32; WORDS] {
        &self.0[id.index()]
    }

    #[inline]
    fn record_mut(&mut self, id: BlockId) -> &mut [u32; WORDS] {
        &mut self.0[id.index()]
    }

    #[inline]
    pub(crate) fn before(&self, id: BlockId) -> u32 {
        self.record(id)[BEFORE]
    }

    #[inline]
    pub(crate) fn after(&self, id: BlockId) -> u32 {
        self.record(id)[AFTER]
    }

    #[inline]
    pub(crate) fn set_before(&mut self, id: BlockId, to: u32) {
        self.record_mut(id)[BEFORE] = to;
    }

    #[inline]
    pub(crate) fn set_after(&mut self, id: BlockId, to: u32) {
        self.record_mut(id)[AFTER] = to;
    }

    #[inline]
    pub(crate) fn set_links(&mut self, id: BlockId, before: u32, after: u32) {
        let record = self.record_mut(id);
        record[BEFORE] = before;
        record[AFTER] = after;
    }

    /// References to a pinned block; meaningless for one that is in a list.
    #[inline]
    pub(crate) fn references(&self, id: BlockId) -> u32 {
        self.record(id)[BEFORE]
    }

    #[inline]
    pub(crate) fn set_references(&mut self, id: BlockId, references: u32) {
        self.record_mut(id)[BEFORE] = references;
    }

    /// Pins a block that is in its tier's own queue, in one pass over its record, and says where it
    /// was. `None`, and nothing has changed, if it is elsewhere or has a duration.
    #[inline]
    pub(crate) fn pin_queued(&mut self, id: BlockId) -> Option<Unlinked> {
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & (PLACE_MASK | Flag::TIMED.0) != Place::Queued as u32 {
            return None;
        }
        let unlinked = Unlinked {
            tier: Tier::from_bits(meta >> TIER_SHIFT),
            class: class_of(meta),
            before: record[BEFORE],
            after: record[AFTER],
        };
        record[BEFORE] = 1;
        record[AFTER] = 0;
        record[META] = meta & !PLACE_MASK | Place::Pinned as u32;
        Some(unlinked)
    }

    /// Makes a block queued whose last reference goes, if it has content, no duration, and nothing
    /// copies from it; the caller puts it into the list of the tier and class that this returns.
    #[inline]
    pub(crate) fn unpin_last(&mut self, id: BlockId, stamp: u32) -> Option<(Tier, usize)> {
        const WATCHED: u32 = PLACE_MASK | Flag::TIMED.0 | Flag::COPYING.0 | Flag::NAMED.0;
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & WATCHED != Place::Pinned as u32 | Flag::NAMED.0 || record[BEFORE] != 1 {
            return None;
        }
        record[STAMP] = stamp;
        record[META] = meta & !PLACE_MASK | Place::Queued as u32;
        Some((Tier::from_bits(meta >> TIER_SHIFT), class_of(meta)))
    }

    #[inline]
    pub(crate) fn kind(&self, id: BlockId) -> Kind {
        let meta = self.record(id)[META];
        let tier = Tier::from_bits(meta >> TIER_SHIFT);
        Kind { tier, class: class_of(meta), state: meta & Kind::STATE }
    }

    /// Takes the first reference to a block in a queue, and says what lay before it there. Queue and
    /// counts are the caller's to change.
    #[inline]
    pub(crate) fn pin_first(&mut self, id: BlockId) -> u32 {
        let record = self.record_mut(id);
        record[AFTER] = 0;
        record[META] = record[META] & !PLACE_MASK | Place::Pinned as u32;
        std::mem::replace(&mut record[BEFORE], 1)
    }

    /// Makes a block queued; the caller puts it into its queue, and counts.
    #[inline]
    pub(crate) fn queue(&mut self, id: BlockId, stamp: u32) {
        let record = self.record_mut(id);
        record[STAMP] = stamp;
        record[META] = record[META] & !PLACE_MASK | Place::Queued as u32;
    }

    /// Makes a block the claimant's, in one pass over its record. Returns the place and the tier
    /// where it was, and its slot.
    #[inline]
    pub(crate) fn claim(&mut self, id: BlockId, tenant: u16) -> (Place, Tier, SlotIndex) {
        const DEFAULT: u32 = (Priority::DEFAULT.get() as u32) << PRIORITY_SHIFT;
        let record = self.record_mut(id);
        let meta = record[META];
        record[META] = meta & !(PLACE_MASK | PRIORITY_MASK) | Place::Claimed as u32 | DEFAULT;
        record[ORIGIN] = tenant.into();
        (Place::of(meta), Tier::from_bits(meta >> TIER_SHIFT), SlotIndex(record[SLOT]))
    }

    /// The hash in the record, whether the index leads there or not.
    #[inline]
    pub(crate) fn hash(&self, id: BlockId) -> BlockHash {
        let [a, b, c, d, ..] = *self.record(id);
        let low = u64::from(a) | u64::from(b) << 32;
        let high = u64::from(c) | u64::from(d) << 32;
        BlockHash::from_u128(u128::from(low) | u128::from(high) << 64)
    }

    /// Whether there is such a block, and the hash is in its record.
    #[inline]
    pub(crate) fn has_hash(&self, id: BlockId, hash: BlockHash) -> bool {
        id.index() < self.0.len() && self.hash(id) == hash
    }

    #[inline]
    pub(crate) fn set_hash(&mut self, id: BlockId, hash: BlockHash) {
        let hash = hash.to_u128();
        let record = self.record_mut(id);
        record[0] = hash as u32;
        record[1] = (hash >> 32) as u32;
        record[2] = (hash >> 64) as u32;
        record[3] = (hash >> 96) as u32;
    }

    /// The name by which lookups find the block.
    #[inline]
    pub(crate) fn name(&self, id: BlockId) -> Option<BlockHash> {
        self.is(id, Flag::NAMED).then(|| self.hash(id))
    }

    #[inline]
    pub(crate) fn is(&self, id: BlockId, flag: Flag) -> bool {
        self.record(id)[META] & flag.0 != 0
    }

    #[inline]
    pub(crate) fn set(&mut self, id: BlockId, flag: Flag) {
        self.record_mut(id)[META] |= flag.0;
    }

    #[inline]
    pub(crate) fn clear(&mut self, id: BlockId, flag: Flag) {
        self.record_mut(id)[META] &= !flag.0;
    }

    #[inline]
    pub(crate) fn place(&self, id: BlockId) -> Place {
        Place::of(self.record(id)[META])
    }

    /// To be called by [`State::put`](crate::state::State::put) alone, which counts.
    #[inline]
    pub(crate) fn set_place(&mut self, id: BlockId, place: Place) {
        let meta = &mut self.record_mut(id)[META];
        *meta = *meta & !PLACE_MASK | place as u32;
    }

    #[inline]
    pub(crate) fn tier(&self, id: BlockId) -> Tier {
        Tier::from_bits(self.record(id)[META] >> TIER_SHIFT)
    }

    #[inline]
    pub(crate) fn location(&self, id: BlockId) -> Location {
        let record = self.record(id);
        Location {
            tier: Tier::from_bits(record[META] >> TIER_SHIFT),
            slot: SlotIndex(record[SLOT]),
        }
    }

    #[inline]
    pub(crate) fn set_location(&mut self, id: BlockId, location: Location) {
        let record = self.record_mut(id);
        record[SLOT] = location.slot.0;
        record[META] = record[META] & !TIER_MASK | (location.tier as u32) << TIER_SHIFT;
    }

    #[inline]
    pub(crate) fn priority(&self, id: BlockId) -> Priority {
        Priority::from_bits(self.record(id)[META] >> PRIORITY_SHIFT)
    }

    /// Of a block that is in no queue, for its queue is named by the priority.
    #[inline]
    pub(crate) fn set_priority(&mut self, id: BlockId, priority: Priority) {
        let meta = &mut self.record_mut(id)[META];
        *meta = *meta & !PRIORITY_MASK | (u32::from(priority.get())) << PRIORITY_SHIFT;
    }

    /// The block that holds the content before this one's, as long as it does.
    #[inline]
    pub(crate) fn parent(&self, id: BlockId) -> Option<BlockId> {
        let record = self.record(id);
        let parent = BlockId(record[PARENT].checked_sub(1)?);
        (self.record(parent)[GENERATION] == record[PARENT_GENERATION]).then_some(parent)
    }

    #[inline]
    pub(crate) fn set_parent(&mut self, id: BlockId, parent: Option<BlockId>) {
        let generation = parent.map_or(0, |parent| self.record(parent)[GENERATION]);
        let record = self.record_mut(id);
        record[PARENT] = parent.map_or(0, |parent| parent.0 + 1);
        record[PARENT_GENERATION] = generation;
    }

    #[inline]
    pub(crate) fn children(&self, id: BlockId) -> u32 {
        self.record(id)[CHILDREN]
    }

    #[inline]
    pub(crate) fn set_children(&mut self, id: BlockId, children: u32) {
        self.record_mut(id)[CHILDREN] = children;
    }

    /// Cuts off all children: they have no parent from now on. Whether there can be a next time; if
    /// not, the block must be given no children any more.
    #[inline]
    pub(crate) fn disown(&mut self, id: BlockId) {
        let record = self.record_mut(id);
        record[CHILDREN] = 0;
        record[GENERATION] = record[GENERATION].saturating_add(1);
    }

    /// Whether children of this block can still be told from those of its former contents.
    #[inline]
    pub(crate) fn may_have_children(&self, id: BlockId) -> bool {
        self.record(id)[GENERATION] != u32::MAX
    }

    /// Blocks before this one in its chain, at most 65,535.
    #[inline]
    pub(crate) fn depth(&self, id: BlockId) -> u16 {
        (self.record(id)[ORIGIN] >> 16) as u16
    }

    #[inline]
    pub(crate) fn tenant(&self, id: BlockId) -> u16 {
        self.record(id)[ORIGIN] as u16
    }

    #[inline]
    pub(crate) fn set_origin(&mut self, id: BlockId, tenant: u16, depth: u16) {
        self.record_mut(id)[ORIGIN] = u32::from(tenant) | u32::from(depth) << 16;
    }

    /// The low half of an epoch while retiring, of a time in milliseconds while queued.
    #[inline]
    pub(crate) fn stamp(&self, id: BlockId) -> u32 {
        self.record(id)[STAMP]
    }

    #[inline]
    pub(crate) fn set_stamp(&mut self, id: BlockId, stamp: u32) {
        self.record_mut(id)[STAMP] = stamp;
    }
}
