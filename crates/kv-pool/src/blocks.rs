//! What is known of each block: 56 bytes, all zero until the block first appears.
//!
//! They lie in three tables. A lookup that pins and releases a prefix reads the names of its blocks
//! and changes their use, 36 bytes a block that lie side by side with those of their neighbours; who
//! follows whom is elsewhere, and neither loaded nor sent from processor to processor with them.
//!
//! A record is an array of words, so that the tables are asked of the operating system as zeros and
//! memory is touched block by block, as blocks come into use: a pool of a million blocks is made in
//! the time of a few system calls.

mod family;

use std::collections::TryReserveError;

use crate::eviction::EMPTY;
use crate::hold::BlockAt;
use crate::{BlockHash, BlockId, Location, Priority, RecordId, Tier};

/// What changes with every use.
type Use = [u32; 5];
const BEFORE: usize = 0;
const AFTER: usize = 1;
const META: usize = 2;
const BLOCK_ID: usize = 3;
const STAMP: usize = 4;

/// Who follows whom, and whose it is.
type Kin = [u32; 5];
const PARENT: usize = 0;
const PARENT_GENERATION: usize = 1;
const GENERATION: usize = 2;
const CHILDREN: usize = 3;
/// Tenant in the low half, depth in the high one.
const ORIGIN: usize = 4;

const TIER_SHIFT: u32 = 3;
const PRIORITY_SHIFT: u32 = 5;
const PLACE_MASK: u32 = 0b111;
const TIER_MASK: u32 = 0b11 << TIER_SHIFT;
const PRIORITY_MASK: u32 = 0x7F << PRIORITY_SHIFT;
const DEFAULT: u32 = (Priority::DEFAULT.get() as u32) << PRIORITY_SHIFT;

/// Facts about a block that are true or false, as bits of one word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flag(u32);

impl Flag {
    /// Lookups find the block: the index leads to it, under the hash in its record.
    pub(crate) const NAMED: Self = Self(1 << 12);
    /// The content was named as the successor of other content.
    pub(crate) const CHAINED: Self = Self(1 << 13);
    /// A copy of evicted content may still read at this block id: that of its
    /// [partner](Blocks::partner). The flag goes with the block id.
    pub(crate) const COPYING: Self = Self(1 << 14);
    /// The name is to come back when the copy has been made. The index leads to the block, under the
    /// hash in its record, and lookups do not find it yet.
    pub(crate) const EXPECTED: Self = Self(1 << 15);
    /// The priority is to end some time after the release.
    pub(crate) const TIMED: Self = Self(1 << 16);
    /// Counted for its tenant as in use.
    pub(crate) const COUNTED_HELD: Self = Self(1 << 18);
    /// Counted for its tenant as cached.
    pub(crate) const COUNTED_CACHED: Self = Self(1 << 19);
    /// Met before in the operation under way; clear outside of one.
    pub(crate) const MARK: Self = Self(1 << 17);
    /// In its tenant's queue of blocks that were passed over, and not in that of its tier.
    pub(crate) const PASSED: Self = Self(1 << 22);
    /// Said to be looked up no more: the lowest priority, until somebody takes a reference. `TIMED`, too.
    pub(crate) const OVER: Self = Self(1 << 23);
    /// In its tenant's list of cached blocks that others follow.
    pub(crate) const FOLLOWED: Self = Self(1 << 24);
    /// Counted for its tenant as on its way.
    pub(crate) const COUNTED_COMING: Self = Self(1 << 25);
    /// Of blocks whose order is a policy's: in its tier's list of those that others follow there.
    pub(crate) const HELD_BACK: Self = Self(1 << 26);
    /// The record names a parent, which may have lost its children since.
    const LINKED: Self = Self(1 << 21);
}

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum BlockPhase {
    /// Its block id has no memory yet, or nobody has asked for it yet.
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
    /// The content is on its way to the block id; held by one `Offload`. Also when the content is
    /// not wanted any more: the copy may still write there.
    Moving = 6,
    /// Released while a copy reads at its block id. It waits for the end of the copy.
    Draining = 7,
}

/// What decides how a block is pinned and released: its place, tier and priority, and whether there
/// is more to it than a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Kind(u32);

impl Kind {
    const STATE: u32 = PLACE_MASK | Flag::NAMED.0 | Flag::COPYING.0 | Flag::TIMED.0;
    const ALL: u32 = Self::STATE | TIER_MASK | PRIORITY_MASK;

    #[inline]
    pub(crate) fn tier(self) -> Tier {
        Tier::from_bits(self.0 >> TIER_SHIFT)
    }

    #[inline]
    pub(crate) fn class(self) -> usize {
        class_of(self.0)
    }

    /// In this phase, with content, and nothing else.
    #[inline]
    pub(crate) fn is_only(self, phase: BlockPhase) -> bool {
        self.0 & Self::STATE == phase as u32 | Flag::NAMED.0
    }

    #[inline]
    pub(crate) fn phase(self) -> BlockPhase {
        BlockPhase::of(self.0)
    }
}

impl BlockPhase {
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

#[inline]
fn class_of(meta: u32) -> usize {
    if meta & Flag::NAMED.0 == 0 {
        EMPTY
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
///   referenced at once (H9), because there is one word for both. And `AFTER` is the other one of a
///   [pair](Self::pair) for a block that is moving and for the one at the block id that it left.
/// - `PARENT` is a block's index plus one, or zero, and then `LINKED` is clear. It is meant only if
///   `PARENT_GENERATION` is that block's `GENERATION`, which changes when content that has children
///   loses its name; `orphans` counts the blocks that name a parent of another generation.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// The low half, then the high one.
    hashes: Vec<[u64; 2]>,
    uses: Vec<Use>,
    kin: Vec<Kin>,
    orphans: usize,
}

impl Blocks {
    pub(crate) fn new(blocks: usize) -> Result<Self, TryReserveError> {
        // Asks whether there are as many addresses; the zeros themselves are then not refused. For all
        // tables at once: what the allocator gets back it would clear itself before it gives it out.
        Vec::<([u64; 2], Use, Kin)>::new().try_reserve_exact(blocks)?;
        let (hashes, uses, kin) =
            (vec![[0; 2]; blocks], vec![[0; 5]; blocks], vec![[0; 5]; blocks]);
        Ok(Self { hashes, uses, kin, orphans: 0 })
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.uses.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = RecordId> + use<> {
        (0..self.uses.len() as u32).map(RecordId)
    }

    #[inline]
    fn record(&self, id: RecordId) -> &Use {
        #[cfg(test)]
        crate::steps::step();
        &self.uses[id.index()]
    }

    #[inline]
    fn record_mut(&mut self, id: RecordId) -> &mut Use {
        #[cfg(test)]
        crate::steps::step();
        &mut self.uses[id.index()]
    }

    #[inline]
    fn kin(&self, id: RecordId) -> &Kin {
        #[cfg(test)]
        crate::steps::step();
        &self.kin[id.index()]
    }

    #[inline]
    fn kin_mut(&mut self, id: RecordId) -> &mut Kin {
        &mut self.kin[id.index()]
    }

    #[inline]
    pub(crate) fn before(&self, id: RecordId) -> u32 {
        self.record(id)[BEFORE]
    }

    #[inline]
    pub(crate) fn after(&self, id: RecordId) -> u32 {
        self.record(id)[AFTER]
    }

    #[inline]
    pub(crate) fn set_before(&mut self, id: RecordId, to: u32) {
        self.record_mut(id)[BEFORE] = to;
    }

    #[inline]
    pub(crate) fn set_after(&mut self, id: RecordId, to: u32) {
        self.record_mut(id)[AFTER] = to;
    }

    #[inline]
    pub(crate) fn set_links(&mut self, id: RecordId, before: u32, after: u32) {
        let record = self.record_mut(id);
        record[BEFORE] = before;
        record[AFTER] = after;
    }

    /// Of a block whose content is on its way, the block at the id that the copy reads; of
    /// that one, the block whose content the copy brings away.
    #[inline]
    pub(crate) fn partner(&self, id: RecordId) -> RecordId {
        RecordId(self.after(id))
    }

    /// Has the block id of `holder` wait for the copy of the content that block `moving` gets.
    #[inline]
    pub(crate) fn pair(&mut self, moving: RecordId, holder: RecordId) {
        self.set(holder, Flag::COPYING);
        self.set_after(holder, moving.0);
        self.set_after(moving, holder.0);
    }

    /// Ends what [`pair`](Self::pair) began: nothing reads the block id of `holder` any more.
    #[inline]
    pub(crate) fn part(&mut self, moving: RecordId, holder: RecordId) {
        self.clear(holder, Flag::COPYING);
        self.set_after(holder, 0);
        self.set_after(moving, 0);
    }

    /// Gives each of two blocks that are in no list the copies that read the other's block id.
    #[inline]
    pub(crate) fn swap_readers(&mut self, one: RecordId, other: RecordId) {
        let reader = |id| self.is(id, Flag::COPYING).then(|| self.partner(id));
        let (of_one, of_other) = (reader(one), reader(other));
        if let Some(reader) = of_one {
            self.part(reader, one);
        }
        if let Some(reader) = of_other {
            self.part(reader, other);
            self.pair(reader, one);
        }
        if let Some(reader) = of_one {
            self.pair(reader, other);
        }
    }

    /// References to a pinned block; meaningless for one that is in a list.
    #[inline]
    pub(crate) fn references(&self, id: RecordId) -> u32 {
        self.record(id)[BEFORE]
    }

    #[inline]
    pub(crate) fn set_references(&mut self, id: RecordId, references: u32) {
        self.record_mut(id)[BEFORE] = references;
    }

    /// Pins a block that is in its tier's own queue, in one pass over its record, and says where it
    /// was. `None`, and nothing has changed, if it is elsewhere or has a duration.
    #[inline]
    pub(crate) fn pin_queued(&mut self, id: RecordId) -> Option<Unlinked> {
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & (PLACE_MASK | Flag::TIMED.0) != BlockPhase::Queued as u32 {
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
        record[META] = meta & !PLACE_MASK | BlockPhase::Pinned as u32;
        Some(unlinked)
    }

    /// Makes a block queued whose last reference goes, if it has content, no duration, and nothing
    /// copies from it; the caller puts it into the list of the tier and class that this returns.
    #[inline]
    pub(crate) fn unpin_last(&mut self, id: RecordId, stamp: u32) -> Option<(Tier, usize)> {
        const WATCHED: u32 = PLACE_MASK | Flag::TIMED.0 | Flag::COPYING.0 | Flag::NAMED.0;
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & WATCHED != BlockPhase::Pinned as u32 | Flag::NAMED.0 || record[BEFORE] != 1 {
            return None;
        }
        record[STAMP] = stamp;
        record[META] = meta & !PLACE_MASK | BlockPhase::Queued as u32;
        Some((Tier::from_bits(meta >> TIER_SHIFT), class_of(meta)))
    }

    /// The class that a block is queued by, as [`EvictionQueues`](crate::eviction::EvictionQueues) numbers them.
    #[inline]
    pub(crate) fn class(&self, id: RecordId) -> usize {
        class_of(self.record(id)[META])
    }

    #[inline]
    pub(crate) fn kind(&self, id: RecordId) -> Kind {
        Kind(self.record(id)[META] & Kind::ALL)
    }

    /// Takes the first reference to a block in a queue if it is of this kind, and says what lay before
    /// it there. Queue and counts are the caller's to change.
    #[inline]
    pub(crate) fn pin_first(&mut self, id: RecordId, kind: Kind) -> Option<u32> {
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & Kind::ALL != kind.0 {
            return None;
        }
        record[AFTER] = 0;
        record[META] = meta & !PLACE_MASK | BlockPhase::Pinned as u32;
        Some(std::mem::replace(&mut record[BEFORE], 1))
    }

    /// Takes a further reference to a block; `false`, and nothing has changed, if there is none.
    #[inline]
    pub(crate) fn pin_again(&mut self, id: RecordId) -> bool {
        let record = self.record_mut(id);
        let plainly = record[META] & (PLACE_MASK | Flag::OVER.0) == BlockPhase::Pinned as u32;
        if plainly {
            // A count that ever got this high stays there: better held for good than given away
            // early.
            record[BEFORE] = record[BEFORE].saturating_add(1);
        }
        plainly
    }

    /// Takes a reference from a block that has others; `false`, and nothing has changed, if not.
    #[inline]
    pub(crate) fn unpin_one_of_many(&mut self, id: RecordId) -> bool {
        let record = self.record_mut(id);
        let pinned = record[META] & PLACE_MASK == BlockPhase::Pinned as u32;
        let many = pinned && record[BEFORE] > 1;
        if many && crate::guard!("pool.full-count-stays", record[BEFORE] < u32::MAX, else true) {
            record[BEFORE] -= 1;
        }
        many
    }

    /// Takes the last reference from a block if it is of this kind, and makes it the last of the list of a
    /// phase behind `back`; counts, and the links that lead to it, are the caller's to change.
    #[inline]
    pub(crate) fn rest_last(
        &mut self,
        id: RecordId,
        kind: Kind,
        (phase, stamp): (BlockPhase, u32),
        back: u32,
    ) -> bool {
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & Kind::ALL != kind.0 || record[BEFORE] != 1 {
            return false;
        }
        record[BEFORE] = back;
        record[AFTER] = u32::MAX;
        record[META] = meta & !PLACE_MASK | phase as u32;
        record[STAMP] = stamp;
        true
    }

    /// Makes a block of this kind, which waits for an epoch up to `completed`, the last of a queue behind `back`, and
    /// says what lay behind it; counts, and the links that lead to it, are the caller's to change.
    #[inline]
    pub(crate) fn queue_last(
        &mut self,
        id: RecordId,
        kind: Kind,
        (completed, stamp): (u64, u32),
        back: u32,
    ) -> Option<u32> {
        if !self.is_over(id, completed) {
            return None;
        }
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & Kind::ALL != kind.0 {
            return None;
        }
        record[BEFORE] = back;
        record[META] = meta & !PLACE_MASK | BlockPhase::Queued as u32;
        record[STAMP] = stamp;
        Some(std::mem::replace(&mut record[AFTER], u32::MAX))
    }

    /// Whether the epoch that a released block waits for is one up to `completed`.
    #[inline]
    pub(crate) fn is_over(&self, id: RecordId, completed: u64) -> bool {
        // Fewer than 2^31 epochs are ever open at once, so half of the number tells them apart.
        let ahead = self.stamp(id).wrapping_sub(completed as u32) as i32;
        crate::guard!("pool.release-waits-for-its-epoch", ahead <= 0, else true)
    }

    /// Makes a block the claimant's, in one pass over its record. Returns the place and the tier
    /// where it was, and its block id.
    #[inline]
    pub(crate) fn claim(&mut self, id: RecordId, tenant: u16) -> (BlockPhase, Tier, BlockId) {
        let record = self.record_mut(id);
        let meta = record[META];
        record[META] = meta & !(PLACE_MASK | PRIORITY_MASK) | BlockPhase::Claimed as u32 | DEFAULT;
        let block_id = BlockId(record[BLOCK_ID]);
        self.kin_mut(id)[ORIGIN] = tenant.into();
        (BlockPhase::of(meta), Tier::from_bits(meta >> TIER_SHIFT), block_id)
    }

    /// Takes the name, the parent and the duration's absence from a queued block without children, and
    /// makes it the claimant's, in one pass over its records; it has left its queue and the index.
    /// Returns its parent, its block id, and since when it was unused.
    #[inline]
    pub(crate) fn evict(&mut self, id: RecordId, tenant: u16) -> (Option<RecordId>, BlockId, u32) {
        const LEFT: u32 = TIER_MASK;
        let record = self.record_mut(id);
        record[META] = record[META] & LEFT | BlockPhase::Claimed as u32 | DEFAULT;
        (record[BEFORE], record[AFTER]) = (0, 0);
        let (block_id, stamp) = (BlockId(record[BLOCK_ID]), record[STAMP]);
        let kin = self.kin_mut(id);
        let (parent, generation) = (kin[PARENT], kin[PARENT_GENERATION]);
        (kin[PARENT], kin[PARENT_GENERATION], kin[ORIGIN]) = (0, 0, tenant.into());
        let Some(parent) = parent.checked_sub(1).map(RecordId) else {
            return (None, block_id, stamp);
        };
        if self.kin(parent)[GENERATION] == generation {
            return (Some(parent), block_id, stamp);
        }
        self.orphans -= 1;
        (None, block_id, stamp)
    }

    /// Gives content in a queue the place of a block of another tier that has none and is in no list, and
    /// makes that block the claimant's at the place where the content was, in one pass over each record.
    /// The content is on its way from here on, and its name is to come back. Returns where it goes from
    /// and to, and since when it was unused.
    #[inline]
    pub(crate) fn displace(
        &mut self,
        content: RecordId,
        target: RecordId,
        tenant: u16,
    ) -> (BlockId, BlockId, u32) {
        let [from, meta, stamp] = {
            let record = self.record(content);
            [record[BLOCK_ID], record[META], record[STAMP]]
        };
        let record = self.record_mut(target);
        let (to, far) = (record[BLOCK_ID], record[META] & TIER_MASK);
        record[BLOCK_ID] = from;
        record[META] = meta & TIER_MASK | BlockPhase::Claimed as u32 | DEFAULT | Flag::COPYING.0;
        (record[BEFORE], record[AFTER]) = (0, content.0);
        let record = self.record_mut(content);
        record[BLOCK_ID] = to;
        record[META] = meta & !(PLACE_MASK | TIER_MASK | Flag::NAMED.0)
            | far
            | BlockPhase::Moving as u32
            | Flag::EXPECTED.0;
        (record[BEFORE], record[AFTER]) = (0, target.0);
        self.kin_mut(target)[ORIGIN] = tenant.into();
        (BlockId(from), BlockId(to), stamp)
    }

    /// Makes a block that appears for the first time the claimant's.
    #[inline]
    pub(crate) fn claim_new(&mut self, id: RecordId, tier: Tier, block_id: BlockId, tenant: u16) {
        let record = self.record_mut(id);
        record[BLOCK_ID] = block_id.0;
        record[META] = (tier as u32) << TIER_SHIFT | BlockPhase::Claimed as u32 | DEFAULT;
        if tenant != 0 {
            self.kin_mut(id)[ORIGIN] = tenant.into();
        }
    }

    /// Makes a queued block without content the claimant's, in one pass over its record. Returns its block id
    /// and what lay behind it in its queue; `None`, and nothing has changed, if there is more to it.
    #[inline]
    pub(crate) fn claim_empty(&mut self, id: RecordId, tenant: u16) -> Option<(BlockId, u32)> {
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & !(TIER_MASK | PRIORITY_MASK) != BlockPhase::Queued as u32 {
            return None;
        }
        record[META] = meta & TIER_MASK | BlockPhase::Claimed as u32 | DEFAULT;
        let (block_id, after) = (BlockId(record[BLOCK_ID]), record[AFTER]);
        (record[BEFORE], record[AFTER]) = (0, 0);
        self.kin_mut(id)[ORIGIN] = tenant.into();
        Some((block_id, after))
    }

    /// Makes a claimed block of a tier without content the first of a queue before `front`; whether there
    /// was nothing else to it. Counts, and the link that leads to it, are the caller's to change.
    #[inline]
    pub(crate) fn release_empty(&mut self, id: RecordId, tier: Tier, front: u32) -> bool {
        let record = self.record_mut(id);
        let meta = record[META];
        let plain = (tier as u32) << TIER_SHIFT | BlockPhase::Claimed as u32;
        if meta & !PRIORITY_MASK != plain {
            return false;
        }
        record[META] = meta & !PLACE_MASK | BlockPhase::Queued as u32;
        (record[BEFORE], record[AFTER]) = (u32::MAX, front);
        true
    }

    /// Whether [`evict`](Self::evict) is all that there is to do when content in a queue goes.
    #[inline]
    pub(crate) fn is_plain_content(&self, id: RecordId) -> bool {
        const SPECIAL: u32 = Kind::STATE | Flag::EXPECTED.0 | Flag::MARK.0;
        self.record(id)[META] & SPECIAL == BlockPhase::Queued as u32 | Flag::NAMED.0
    }

    /// Gives a claimed block without a name its name, its priority and its first reference, in one
    /// pass over its record, and says in which tier; `None`, and nothing has changed, of another.
    #[inline]
    pub(crate) fn name_claimed(
        &mut self,
        id: RecordId,
        hash: BlockHash,
        priority: Priority,
        chained: bool,
    ) -> Option<Tier> {
        const KEPT: u32 = !(PLACE_MASK | PRIORITY_MASK);
        let record = self.record_mut(id);
        let meta = record[META];
        if meta & (PLACE_MASK | Flag::NAMED.0 | Flag::TIMED.0) != BlockPhase::Claimed as u32 {
            return None;
        }
        let chained = if chained { Flag::CHAINED.0 } else { 0 };
        let priority = u32::from(priority.get()) << PRIORITY_SHIFT;
        record[META] = meta & KEPT | BlockPhase::Pinned as u32 | Flag::NAMED.0 | chained | priority;
        record[BEFORE] = 1;
        self.set_hash(id, hash);
        Some(Tier::from_bits(meta >> TIER_SHIFT))
    }

    /// The hash in the record, whether the index leads there or not.
    #[inline]
    pub(crate) fn hash(&self, id: RecordId) -> BlockHash {
        let [low, high] = self.hashes[id.index()];
        BlockHash::from_u128(u128::from(low) | u128::from(high) << 64)
    }

    /// Whether there is such a block, and the hash is in its record.
    #[inline]
    pub(crate) fn has_hash(&self, id: RecordId, hash: BlockHash) -> bool {
        let hash = hash.to_u128();
        let halves = [hash as u64, (hash >> 64) as u64];
        self.hashes.get(id.index()).is_some_and(|own| *own == halves)
    }

    /// Whether there is such a block, and lookups find it by this name.
    #[inline]
    pub(crate) fn bears(&self, id: RecordId, hash: BlockHash) -> bool {
        self.has_hash(id, hash) && self.is(id, Flag::NAMED)
    }

    /// The same, with what [`found`](Self::found) says of it.
    #[inline]
    pub(crate) fn bearing(&self, id: RecordId, hash: BlockHash) -> Option<(BlockAt, bool)> {
        if self.has_hash(id, hash) { self.found(id) } else { None }
    }

    /// A block that lookups find, and whether its content was named as a successor and the record names
    /// no parent. `None` of content on its way.
    #[inline]
    pub(crate) fn found(&self, id: RecordId) -> Option<(BlockAt, bool)> {
        const BOTH: u32 = Flag::CHAINED.0 | Flag::LINKED.0;
        let record = self.record(id);
        let meta = record[META];
        if crate::guard!("pool.prefix-ends-at-what-moves", meta & Flag::NAMED.0 == 0, else false) {
            return None;
        }
        let tier = Tier::from_bits(meta >> TIER_SHIFT);
        let at = BlockAt::new(id, Location { tier, id: BlockId(record[BLOCK_ID]) });
        Some((at, meta & BOTH == Flag::CHAINED.0))
    }

    /// Whether the index leads to the block: lookups find it, or will.
    #[inline]
    pub(crate) fn bears_a_name(&self, id: RecordId) -> bool {
        const EITHER: u32 = Flag::NAMED.0 | Flag::EXPECTED.0;
        self.record(id)[META] & EITHER != 0
    }

    #[inline]
    pub(crate) fn set_hash(&mut self, id: RecordId, hash: BlockHash) {
        let hash = hash.to_u128();
        self.hashes[id.index()] = [hash as u64, (hash >> 64) as u64];
    }

    #[inline]
    pub(crate) fn is(&self, id: RecordId, flag: Flag) -> bool {
        self.record(id)[META] & flag.0 != 0
    }

    #[inline]
    pub(crate) fn set(&mut self, id: RecordId, flag: Flag) {
        self.record_mut(id)[META] |= flag.0;
    }

    #[inline]
    pub(crate) fn clear(&mut self, id: RecordId, flag: Flag) {
        self.record_mut(id)[META] &= !flag.0;
    }

    #[inline]
    pub(crate) fn place(&self, id: RecordId) -> BlockPhase {
        BlockPhase::of(self.record(id)[META])
    }

    /// To be called by [`PoolState::put`](crate::state::PoolState::put) alone, which counts.
    #[inline]
    pub(crate) fn set_place(&mut self, id: RecordId, place: BlockPhase) {
        let meta = &mut self.record_mut(id)[META];
        *meta = *meta & !PLACE_MASK | place as u32;
    }

    #[inline]
    pub(crate) fn tier(&self, id: RecordId) -> Tier {
        Tier::from_bits(self.record(id)[META] >> TIER_SHIFT)
    }

    #[inline]
    pub(crate) fn location(&self, id: RecordId) -> Location {
        let record = self.record(id);
        Location {
            tier: Tier::from_bits(record[META] >> TIER_SHIFT),
            id: BlockId(record[BLOCK_ID]),
        }
    }

    /// The block with its [`location`](Self::location).
    #[inline]
    pub(crate) fn at(&self, id: RecordId) -> BlockAt {
        BlockAt::new(id, self.location(id))
    }

    #[inline]
    pub(crate) fn set_location(&mut self, id: RecordId, location: Location) {
        let record = self.record_mut(id);
        record[BLOCK_ID] = location.id.0;
        record[META] = record[META] & !TIER_MASK | (location.tier as u32) << TIER_SHIFT;
    }

    #[inline]
    pub(crate) fn priority(&self, id: RecordId) -> Priority {
        Priority::from_bits(self.record(id)[META] >> PRIORITY_SHIFT)
    }

    /// Of a block that is in no queue, for its queue is named by the priority.
    #[inline]
    pub(crate) fn set_priority(&mut self, id: RecordId, priority: Priority) {
        let meta = &mut self.record_mut(id)[META];
        *meta = *meta & !PRIORITY_MASK | (u32::from(priority.get())) << PRIORITY_SHIFT;
    }

    /// Blocks before this one in its chain, at most 65,535.
    #[inline]
    pub(crate) fn depth(&self, id: RecordId) -> u16 {
        (self.kin(id)[ORIGIN] >> 16) as u16
    }

    #[inline]
    pub(crate) fn tenant(&self, id: RecordId) -> u16 {
        self.kin(id)[ORIGIN] as u16
    }

    #[inline]
    pub(crate) fn set_origin(&mut self, id: RecordId, tenant: u16, depth: u16) {
        self.kin_mut(id)[ORIGIN] = u32::from(tenant) | u32::from(depth) << 16;
    }

    /// The low half of an epoch while retiring, of a time in milliseconds while queued.
    #[inline]
    pub(crate) fn stamp(&self, id: RecordId) -> u32 {
        self.record(id)[STAMP]
    }

    #[inline]
    pub(crate) fn set_stamp(&mut self, id: RecordId, stamp: u32) {
        self.record_mut(id)[STAMP] = stamp;
    }
}
