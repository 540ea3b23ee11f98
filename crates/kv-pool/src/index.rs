//! From the name of content to its block: an open-addressed table of four bytes a place.
//!
//! The names themselves lie in the blocks' records. A place holds the block, how far it lies from
//! where it should, and as many bits of the name as are left over: 11 of them in a pool of 65,536
//! blocks, so that a lookup of what is not there reads a foreign record once in 2,048 places. Places
//! are kept in the order of their distance (Robin Hood hashing), which ends a search early and lets
//! a removal close its gap without reading a record.

use std::collections::TryReserveError;

use crate::blocks::Blocks;
use crate::{BlockHash, BlockId};

const DISTANCE_BITS: u32 = 4;

/// Named blocks by name. There are never more than three quarters as many as places.
#[derive(Debug)]
pub(crate) struct Index {
    places: Vec<u32>,
    /// How far a mixed hash is shifted to become a place.
    shift: u32,
    id_mask: u32,
    id_bits: u32,
    distance_max: u32,
    tag_shift: u32,
    len: usize,
}

impl Index {
    /// A table for blocks with indices below `blocks`.
    pub(crate) fn new(blocks: usize) -> Result<Self, TryReserveError> {
        let places = (blocks + blocks.div_ceil(3)).max(8).next_power_of_two();
        // Blocks are counted from 1; 0 is an empty place.
        let id_bits = usize::BITS - blocks.leading_zeros();
        let distance_bits = DISTANCE_BITS.min(32 - id_bits);
        Vec::<u32>::new().try_reserve_exact(places)?;
        Ok(Self {
            places: vec![0; places],
            shift: 64 - places.trailing_zeros(),
            id_mask: ((1_u64 << id_bits) - 1) as u32,
            id_bits,
            distance_max: (1 << distance_bits) - 1,
            tag_shift: id_bits + distance_bits,
            len: 0,
        })
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The block that bears the name.
    #[inline]
    pub(crate) fn get(&self, blocks: &Blocks, hash: BlockHash) -> Option<BlockId> {
        let mixed = mix(hash);
        let tag = self.tag(mixed);
        let (mut at, mut distance) = (self.home(mixed), 0);
        loop {
            let place = self.places[at];
            if place == 0 || self.distance(place) < distance {
                return None;
            }
            if self.tag_of(place) == tag {
                let id = self.block(place);
                if blocks.hash(id) == hash {
                    return Some(id);
                }
            }
            at = self.next(at);
            distance = (distance + 1).min(self.distance_max);
        }
    }

    /// Adds a name that nobody bears. The block's record has the name already.
    #[inline]
    pub(crate) fn insert(&mut self, blocks: &Blocks, hash: BlockHash, id: BlockId) {
        let mixed = mix(hash);
        let (mut at, mut distance) = (self.home(mixed), 0);
        let mut carried = (id.0 + 1, self.tag(mixed));
        self.len += 1;
        loop {
            let place = self.places[at];
            if place == 0 {
                self.places[at] = self.place(carried, distance);
                return;
            }
            let resident = self.true_distance(blocks, at, place);
            if resident < distance {
                self.places[at] = self.place(carried, distance);
                carried = (place & self.id_mask, self.tag_of(place));
                distance = resident;
            }
            at = self.next(at);
            distance += 1;
        }
    }

    /// Removes the name of a block, whose record has it still.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &Blocks, id: BlockId) {
        let wanted = id.0 + 1;
        let mut at = self.home(mix(blocks.hash(id)));
        // The block is there, so the search ends.
        while self.places[at] & self.id_mask != wanted {
            if self.places[at] == 0 {
                debug_assert!(false, "block {} is not in the index", id.0);
                return;
            }
            at = self.next(at);
        }
        self.len -= 1;
        loop {
            let next = self.next(at);
            let place = self.places[next];
            let distance = if place == 0 { 0 } else { self.true_distance(blocks, next, place) };
            if distance == 0 {
                self.places[at] = 0;
                return;
            }
            self.places[at] = self.place((place & self.id_mask, self.tag_of(place)), distance - 1);
            at = next;
        }
    }

    /// Every block in the table, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.places.iter().filter(|&&place| place != 0).map(|&place| self.block(place))
    }

    #[inline]
    fn home(&self, mixed: u64) -> usize {
        (mixed >> self.shift) as usize
    }

    /// The bits of a mixed hash that the home has not used.
    #[inline]
    fn tag(&self, mixed: u64) -> u32 {
        (u64::from(mixed as u32) >> self.tag_shift) as u32
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }

    #[inline]
    fn block(&self, place: u32) -> BlockId {
        BlockId((place & self.id_mask).wrapping_sub(1))
    }

    #[inline]
    fn tag_of(&self, place: u32) -> u32 {
        (u64::from(place) >> self.tag_shift) as u32
    }

    /// At most `distance_max`.
    #[inline]
    fn distance(&self, place: u32) -> u32 {
        (u64::from(place) >> self.id_bits) as u32 & self.distance_max
    }

    #[inline]
    fn true_distance(&self, blocks: &Blocks, at: usize, place: u32) -> u32 {
        let distance = self.distance(place);
        if distance < self.distance_max {
            return distance;
        }
        let home = self.home(mix(blocks.hash(self.block(place))));
        (at.wrapping_sub(home) & (self.places.len() - 1)) as u32
    }

    #[inline]
    fn place(&self, (id, tag): (u32, u32), distance: u32) -> u32 {
        let distance = u64::from(distance.min(self.distance_max)) << self.id_bits;
        (u64::from(id) | distance | u64::from(tag) << self.tag_shift) as u32
    }

    #[cfg(test)]
    pub(crate) fn forget_all(&mut self) {
        self.places.fill(0);
        self.len = 0;
    }
}

/// All bits of a name in 64, well mixed at both ends even if names are small numbers.
#[inline]
fn mix(hash: BlockHash) -> u64 {
    let hash = hash.to_u128();
    let folded = (hash as u64) ^ ((hash >> 64) as u64).rotate_left(32);
    let product = u128::from(folded) * u128::from(0x9E37_79B9_7F4A_7C15_u64);
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Names that come and go at random, against a map; many share a home.
    fn agree(blocks: u32, steps: u32, name: impl Fn(u64) -> u128) {
        let mut records = Blocks::new(blocks as usize).unwrap();
        let mut index = Index::new(blocks as usize).unwrap();
        let mut map: HashMap<BlockHash, BlockId> = HashMap::new();
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
                    index.insert(&records, hash, id);
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
        // The mixing sees the exclusive or of the halves: all of these are alike to it.
        let alike = |at: u64| u128::from(at) << 64 | u128::from(at.rotate_left(32));
        agree(48, 20_000, alike);
    }
}
