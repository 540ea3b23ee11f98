//! From the name of content to its block: an open-addressed table of four bytes a place.
//!
//! Places come in lines of eight, two to a cache line: seven blocks, and the number of blocks that
//! belong here or before but found no room. A search looks at all seven at once, without a branch
//! for each, and goes on to the next line only if that number is not zero. The names themselves lie
//! in the blocks' records. A place has as many bits of the name as the number of the block leaves
//! over: 15 of them in a pool of 65,536 blocks, so that a search meets a foreign record once in some
//! thousand times.

use std::collections::TryReserveError;

use crate::blocks::Blocks;
use crate::{BlockHash, RecordId};

/// How many names are looked up together.
pub(crate) const TOGETHER: usize = 16;

const LINE: usize = 8;
const LINE_BYTES: usize = 32;
/// The place of a line that counts.
const OVERFLOW: usize = LINE - 1;

/// Named blocks by name. There are never more than six sevenths as many as places.
#[derive(Debug)]
pub(crate) struct Index {
    /// Zeros until they are written. Lines begin at `start`, on the boundary of a cache line.
    words: Vec<u32>,
    start: usize,
    lines: usize,
    /// How far a mixed hash is shifted to become a line.
    shift: u32,
    /// The part of a place that is the block's number, counted from 1; the rest is the name's tag.
    id_mask: u32,
    /// Which bits of [`alike`] are those of places that blocks may lie in: all but the last. Not a
    /// constant, or the compiler would compare seven places, with a vector less.
    places_mask: u32,
    len: usize,
}

/// A name as the table is searched by it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mixed(u64);

impl Index {
    /// A table for blocks with indices below `blocks`.
    pub(crate) fn new(blocks: usize) -> Result<Self, TryReserveError> {
        let lines = (blocks + blocks.div_ceil(3)).div_ceil(LINE).next_power_of_two().max(2);
        let words = (lines + 1) * LINE;
        // Asks whether there are as many addresses; the zeros themselves are then not refused.
        Vec::<u32>::new().try_reserve_exact(words)?;
        let words = vec![0_u32; words];
        let start = words.as_ptr().align_offset(LINE_BYTES);
        Ok(Self {
            words,
            // Where nobody can say, lines lie across the boundaries and all else is the same.
            start: if start < LINE { start } else { 0 },
            lines,
            shift: 64 - lines.trailing_zeros(),
            // Blocks are counted from 1; 0 is an empty place.
            id_mask: u32::MAX.checked_shr((blocks as u32).leading_zeros()).unwrap_or(0),
            places_mask: ((1 << OVERFLOW) - 1) << 1,
            len: 0,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The block that bears the name.
    #[inline]
    pub(crate) fn get(&self, blocks: &Blocks, hash: BlockHash) -> Option<RecordId> {
        self.search(blocks, hash, hash.mixed())
    }

    /// The block that bears the name, or what [`insert_new`](Self::insert_new) needs to know of it.
    #[inline]
    pub(crate) fn get_or_mixed(&self, blocks: &Blocks, hash: BlockHash) -> Result<RecordId, Mixed> {
        let mixed = hash.mixed();
        self.search(blocks, hash, mixed).ok_or(Mixed(mixed))
    }

    #[inline]
    fn search(&self, blocks: &Blocks, hash: BlockHash, mixed: u64) -> Option<RecordId> {
        let (tag, id_mask) = (self.tag(mixed), self.id_mask);
        let mut line = self.home(mixed);
        for _ in 0..self.lines {
            let places = self.line(line)?;
            let mut alike = alike(places, !id_mask, tag) & self.places_mask;
            while alike != 0 {
                let place = places[first(alike)];
                alike &= alike - 1;
                // Empty places are alike where numbers leave no bits for tags.
                if let Some(id) = self.block(place)
                    && blocks.has_hash(id, hash)
                {
                    return Some(id);
                }
            }
            if places[OVERFLOW] == 0 {
                return None;
            }
            line = self.next(line);
        }
        None
    }

    /// The blocks that bear the first of `hashes`, up to a name that nobody bears, to the end of
    /// `found`, or to the end; how many.
    ///
    /// Each step is done for all names before the next one, so that the processor waits for all
    /// lines at once, and then for all records at once.
    pub(crate) fn get_many(
        &self,
        blocks: &Blocks,
        hashes: &[BlockHash],
        found: &mut [RecordId; TOGETHER],
    ) -> usize {
        let count = hashes.len().min(TOGETHER);
        let hashes = &hashes[..count];
        for (&hash, id) in hashes.iter().zip(found.iter_mut()) {
            *id = self.likely(hash.mixed());
        }
        let mut right = [false; TOGETHER];
        for ((&hash, &id), right) in hashes.iter().zip(&*found).zip(&mut right) {
            *right = blocks.has_hash(id, hash);
        }
        for (at, &hash) in hashes.iter().enumerate() {
            if !right[at] {
                let Some(id) = self.get(blocks, hash) else { return at };
                found[at] = id;
            }
        }
        count
    }

    /// The first block with the tag of a mixed hash in its line, which is the right one but for one
    /// name in hundreds; or none of the pool's blocks.
    #[inline]
    fn likely(&self, mixed: u64) -> RecordId {
        let Some(places) = self.line(self.home(mixed)) else { return RecordId(u32::MAX) };
        let (tag, id_mask) = (self.tag(mixed), self.id_mask);
        let alike = alike(places, !id_mask, tag) & self.places_mask;
        // Only what a place leads to counts: a record keeps its hash when the name is gone.
        let place = if alike == 0 { 0 } else { places[first(alike)] };
        RecordId((place & self.id_mask).wrapping_sub(1))
    }

    /// Reads the line of a name, so that it is at hand when it is needed. Of many names the reads
    /// overlap, as the operations on them do not.
    #[inline]
    pub(crate) fn warm(&self, hash: BlockHash) -> u32 {
        self.words[self.start + self.home(hash.mixed()) * LINE]
    }

    /// Adds a name that was looked for and not found. The block's record has the name already.
    #[inline]
    pub(crate) fn insert_new(&mut self, Mixed(mixed): Mixed, id: RecordId) {
        let places_mask = self.places_mask;
        let place = (id.0 + 1) | self.tag(mixed);
        let mut line = self.home(mixed);
        self.len += 1;
        // There is an empty place somewhere, so the search ends.
        for _ in 0..self.lines {
            let Some(places) = self.line_mut(line) else { return };
            let empty = alike(places, u32::MAX, 0) & places_mask;
            if empty != 0 {
                places[first(empty)] = place;
                return;
            }
            places[OVERFLOW] += 1;
            line = self.next(line);
        }
        debug_assert!(false, "the index is full");
    }

    /// Removes the name of a block, whose record has it still.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &Blocks, id: RecordId) {
        let home = self.home(blocks.hash(id).mixed());
        let (wanted, id_mask, places_mask) = (id.0 + 1, self.id_mask, self.places_mask);
        let mut line = home;
        for _ in 0..self.lines {
            let Some(places) = self.line_mut(line) else { return };
            let found = alike(places, id_mask, wanted) & places_mask;
            if found != 0 {
                places[first(found)] = 0;
                self.len -= 1;
                return self.passed_no_more(home, line);
            }
            line = self.next(line);
        }
        debug_assert!(false, "block {} is not in the index", id.0);
    }

    /// Every block in the table, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RecordId> + '_ {
        (0..self.lines)
            .filter_map(|line| self.line(line))
            .flat_map(|places| places[..OVERFLOW].iter())
            .filter_map(|&place| self.block(place))
    }

    /// A block that lay at `line` is gone, and with it the reason to go on at the lines before.
    #[inline]
    fn passed_no_more(&mut self, home: usize, line: usize) {
        let mut at = home;
        while at != line {
            if let Some(places) = self.line_mut(at) {
                places[OVERFLOW] -= 1;
            }
            at = self.next(at);
        }
    }

    #[inline]
    fn line(&self, line: usize) -> Option<&[u32; LINE]> {
        #[cfg(test)]
        crate::steps::step();
        self.words.get(self.start + line * LINE..)?.first_chunk()
    }

    #[inline]
    fn line_mut(&mut self, line: usize) -> Option<&mut [u32; LINE]> {
        #[cfg(test)]
        crate::steps::step();
        self.words.get_mut(self.start + line * LINE..)?.first_chunk_mut()
    }

    #[inline]
    fn home(&self, mixed: u64) -> usize {
        (mixed >> self.shift) as usize
    }

    #[inline]
    fn next(&self, line: usize) -> usize {
        (line + 1) & (self.lines - 1)
    }

    /// Bits of a mixed hash that the home has not used; never all zero, as those of empty places.
    #[inline]
    fn tag(&self, mixed: u64) -> u32 {
        let tag = mixed as u32 & !self.id_mask;
        // The lowest bit of a tag, if there is room for any.
        if tag == 0 { self.id_mask.wrapping_add(1) } else { tag }
    }

    #[inline]
    fn block(&self, place: u32) -> Option<RecordId> {
        (place & self.id_mask).checked_sub(1).map(RecordId)
    }

    #[cfg(test)]
    pub(crate) fn forget_all(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }
}

/// Which places of a line are `wanted` under a mask: bit `n + 1` for place `n`.
///
/// Two halves, whose bits begin at 1 and at 5, are what compilers make two vectors of.
#[inline]
fn alike(places: &[u32; LINE], mask: u32, wanted: u32) -> u32 {
    let half = |places: &[u32], begin: usize| {
        (0..LINE / 2)
            .fold(0, |bits, at| bits | u32::from(places[at] & mask == wanted) << (at + begin))
    };
    let (low, high) = places.split_at(LINE / 2);
    half(low, 1) | half(high, 1 + LINE / 2)
}

/// The first place of those that are [`alike`].
#[inline]
fn first(alike: u32) -> usize {
    (alike.trailing_zeros() as usize).wrapping_sub(1) % LINE
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn names_that_are_gone_are_not_found_though_records_keep_them() {
        for blocks in 1..40_u32 {
            let mut records = Blocks::new(blocks as usize).unwrap();
            let mut index = Index::new(blocks as usize).unwrap();
            // All of one home, so that lines overflow and count.
            let names =
                (0..).map(BlockHash::from_u128).filter(|&hash| index.home(hash.mixed()) == 0);
            let names: Vec<_> = names.take(blocks as usize).collect();
            for (n, &hash) in names.iter().enumerate() {
                records.set_hash(RecordId(n as u32), hash);
                index.insert_new(Mixed(hash.mixed()), RecordId(n as u32));
            }
            for gone in 0..blocks {
                index.remove(&records, RecordId(gone));
                for start in 0..names.len() {
                    let mut found = [RecordId(0); TOGETHER];
                    let names = &names[start..];
                    let count = index.get_many(&records, names, &mut found);
                    let single = names.iter().map_while(|&hash| index.get(&records, hash));
                    let single: Vec<_> = single.take(TOGETHER).collect();
                    assert_eq!(found[..count], single, "{blocks} blocks, {gone} gone");
                }
            }
        }
    }

    /// Names that come and go at random, against a map; many share a home.
    fn agree(blocks: u32, steps: u32, name: impl Fn(u64) -> u128) {
        let mut records = Blocks::new(blocks as usize).unwrap();
        let mut index = Index::new(blocks as usize).unwrap();
        let mut map: HashMap<BlockHash, RecordId> = HashMap::new();
        let mut random = 1_u64;
        for step in 0..steps {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let hash = BlockHash::from_u128(name((random >> 33) % u64::from(blocks) * 2));
            assert_eq!(index.get(&records, hash), map.get(&hash).copied(), "step {step}");
            match map.remove(&hash) {
                Some(id) => index.remove(&records, id),
                None => {
                    let Some(id) = records.ids().find(|id| !map.values().any(|at| at == id)) else {
                        continue;
                    };
                    records.set_hash(id, hash);
                    index.insert_new(Mixed(hash.mixed()), id);
                    map.insert(hash, id);
                }
            }
            assert_eq!(index.len(), map.len());
        }
        assert_eq!(index.iter().count(), map.len());
        for (&hash, &id) in &map {
            assert_eq!(index.get(&records, hash), Some(id));
        }
    }

    #[test]
    fn the_index_agrees_with_a_map() {
        for blocks in [1, 2, 3, 6, 48, 96] {
            agree(blocks, 20_000, |at| u128::from(at) << 64 | u128::from(at * at));
        }
    }

    #[test]
    fn names_that_all_have_one_home_are_told_apart() {
        // A product with this low half is 0, whatever the high half is.
        let low = 0x9E37_79B9_7F4A_7C15_u64;
        let alike = |at: u64| u128::from(at) << 64 | u128::from(low);
        assert_eq!(BlockHash::from_u128(alike(7)).mixed(), 0);
        agree(48, 20_000, alike);
    }

    /// The most names that have one home in a table with a line for each, of names whose halves depend on each
    /// other as `name` says.
    fn crowd(name: impl Fn(u64) -> [u64; 2]) -> usize {
        const NAMES: u64 = 1 << 14;
        let index = Index::new(6 * NAMES as usize).unwrap();
        let mut homes = vec![0; index.lines];
        for number in 1..=NAMES {
            let [low, high] = name(number);
            let hash = BlockHash::from_u128(u128::from(low) | u128::from(high) << 64);
            homes[index.home(hash.mixed())] += 1;
        }
        homes.into_iter().max().unwrap_or(0)
    }

    #[test]
    fn names_have_homes_of_their_own_whatever_their_halves_have_in_common() {
        let good =
            |number: u64| BlockHash::chain(BlockHash::ROOT, &[number as u32]).to_u128() as u64;
        let chance = crowd(|number| [good(number), good(number + (1 << 20))]);
        assert!(chance <= 16, "{chance} of good hashes");
        for turn in 0..64 {
            let most = crowd(|number| [good(number), good(number).rotate_left(turn)]);
            assert!(most <= 16, "{most} names have one home, turned by {turn}");
        }
        let others: [fn(u64) -> u64; 6] = [
            |_| 0,
            |_| u64::MAX,
            |low| !low,
            |low| low + 1,
            |low| low.swap_bytes(),
            |low| low >> 32,
        ];
        for (kind, high) in others.into_iter().enumerate() {
            let most = crowd(|number| [good(number), high(good(number))]);
            assert!(most <= 16, "{most} names have one home, of kind {kind}");
        }
        // Small numbers, in either half.
        assert!(crowd(|number| [number, 0]) <= 32);
        assert!(crowd(|number| [0, number]) <= 32);
    }
}
