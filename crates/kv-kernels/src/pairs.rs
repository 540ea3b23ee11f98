//! Pairs of blocks, looked through once, for any number of launches.

use bytemuck::{Pod, Zeroable};
use cuda_driver::guard;

use crate::error::{BlocksError, PairsError, Side};
use crate::places::{Places, first_repeat};
use crate::stored::Kept;

/// Which block goes where.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Hash, Pod, PartialEq, Zeroable)]
pub struct BlockPair {
    /// Block of the source.
    pub source: i32,
    /// Block of the destination.
    pub destination: i32,
}

/// Pairs of blocks that were checked: no id is negative, and no block is written twice.
///
/// Made once, in one pass over the pairs, and good for any number of launches and moves: of each layer,
/// of each GPU's heads. A launch only compares the greatest ids with the blocks of its memory.
///
/// ```
/// use kv_kernels::error::PairsError;
/// use kv_kernels::{BlockPair, BlockPairs};
///
/// let [first, second] = [0, 1].map(|source| BlockPair { source, destination: 7 });
/// assert_eq!(BlockPairs::new(&[first])?.len(), 1);
/// let refused = BlockPairs::new(&[first, second]).unwrap_err();
/// assert_eq!(refused, PairsError::WrittenTwice { block: 7, first: 0, second: 1 });
/// # Ok::<(), PairsError>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockPairs<'a> {
    /// # Invariants
    /// No id is negative, and no destination is there twice.
    pairs: &'a [BlockPair],
    /// # Invariants
    /// One past the greatest id of each side, or 0 without pairs.
    source_end: u32,
    destination_end: u32,
}

impl<'a> BlockPairs<'a> {
    /// Checks `pairs`.
    ///
    /// # Errors
    /// [`PairsError`], for the first negative id, or else for the first pair that writes a block again.
    pub fn new(pairs: &'a [BlockPair]) -> Result<Self, PairsError> {
        // A negative id has the upper bit, and so a greater end than any other.
        let (mut source_end, mut destination_end) = (0, 0);
        let destinations = pairs.iter().map(|pair| {
            source_end = source_end.max(end_of(pair.source));
            destination_end = destination_end.max(end_of(pair.destination));
            i64::from(pair.destination)
        });
        let is_twice = Kept::take().any_twice(u64::MAX, destinations);
        let is_unsure = guard!("kernels.pairs-write-once", is_twice, else false);
        let is_negative = source_end.max(destination_end) > end_of(i32::MAX);
        if !is_unsure && !is_negative {
            return Ok(Self { pairs, source_end, destination_end });
        }
        find_wrong(pairs)?;
        let greatest = |id: fn(&BlockPair) -> i32| pairs.iter().map(id).map(end_of).max();
        Ok(Self {
            pairs,
            source_end: greatest(|pair| pair.source).unwrap_or(0),
            destination_end: greatest(|pair| pair.destination).unwrap_or(0),
        })
    }

    /// How many pairs.
    #[must_use]
    pub const fn len(self) -> usize {
        self.pairs.len()
    }

    /// Whether there is no pair.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.pairs.is_empty()
    }

    /// The pairs.
    #[must_use]
    pub const fn as_slice(self) -> &'a [BlockPair] {
        self.pairs
    }

    /// Refuses ids beyond the blocks of either side. Looks at the pairs only to name one that is wrong.
    ///
    /// # Errors
    /// [`BlocksError::BlockOutOfRange`], for the first pair whose source is out of range, or else for the
    /// first whose destination is.
    pub fn check_within(
        self,
        source_blocks: u64,
        destination_blocks: u64,
    ) -> Result<(), BlocksError> {
        let ids: [fn(&BlockPair) -> i32; 2] = [|pair| pair.source, |pair| pair.destination];
        let sides = [
            (Side::Source, self.source_end, source_blocks, ids[0]),
            (Side::Destination, self.destination_end, destination_blocks, ids[1]),
        ];
        for (side, end, blocks, id) in sides {
            let are_there = u64::from(end) <= blocks;
            if guard!("kernels.pairs-name-blocks", are_there, else true) {
                continue;
            }
            let is_out = |block: &(u64, i32)| u64::from(end_of(block.1)) > blocks;
            if let Some((place, block)) = (0..).zip(self.pairs.iter().map(id)).find(is_out) {
                return Err(BlocksError::BlockOutOfRange { place, side, block, blocks });
            }
        }
        Ok(())
    }

    /// Refuses a source that a pair writes, for copies within one memory.
    pub(crate) fn check_sources_unwritten(self) -> Result<(), BlocksError> {
        let pairs = self.pairs;
        let mut writers = Places::new(pairs.len(), |pair| pairs[pair].destination as u64);
        for pair in 0..pairs.len() {
            writers.take(pair);
        }
        for (reader, pair) in (0..).zip(pairs) {
            if let Some(writer) = writers.who_took(pair.source as u64) {
                let (writer, block) = (writer as u64, pair.source);
                return Err(BlocksError::SourceWritten { reader, writer, block });
            }
        }
        Ok(())
    }
}

/// One past an id.
fn end_of(id: i32) -> u32 {
    (id as u32).saturating_add(1)
}

fn find_wrong(pairs: &[BlockPair]) -> Result<(), PairsError> {
    for (pair, &BlockPair { source, destination }) in pairs.iter().enumerate() {
        for (side, block) in [(Side::Source, source), (Side::Destination, destination)] {
            if block < 0 {
                return Err(PairsError::NegativeBlock { side, pair, block });
            }
        }
    }
    match first_repeat(pairs.len(), |pair| Some(pairs[pair].destination as u64)) {
        None => Ok(()),
        Some((first, second)) => {
            let block = pairs[second].destination;
            Err(PairsError::WrittenTwice { block, first, second })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs as they are listed: what is wrong with them, found in the plainest way.
    fn pairs_as_listed(pairs: &[BlockPair]) -> Result<(), PairsError> {
        for (pair, &BlockPair { source, destination }) in pairs.iter().enumerate() {
            for (side, block) in [(Side::Source, source), (Side::Destination, destination)] {
                if block < 0 {
                    return Err(PairsError::NegativeBlock { side, pair, block });
                }
            }
        }
        for (second, pair) in pairs.iter().enumerate() {
            let block = pair.destination;
            let earlier = pairs[..second].iter().rposition(|earlier| earlier.destination == block);
            if let Some(first) = earlier {
                return Err(PairsError::WrittenTwice { block, first, second });
            }
        }
        Ok(())
    }

    /// Few blocks and many, ids close together and as far apart as an `i32` has them.
    #[test]
    fn pairs_are_checked_as_they_are_listed() {
        let mut random = 1_u64;
        let mut below = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % most
        };
        let (mut good, mut bad) = (0, 0);
        for round in 0..4000 {
            let spread = [8, 40, 1 << 10, 1 << 20, i32::MAX as u64 + 1][round % 5];
            let pairs: Vec<_> = (0..below(12))
                .map(|_| {
                    let mut id = || match below(60) {
                        0 => -1 - below(9) as i32,
                        _ => below(spread) as i32,
                    };
                    BlockPair { source: id(), destination: id() }
                })
                .collect();
            let checked = BlockPairs::new(&pairs);
            *if checked.is_ok() { &mut good } else { &mut bad } += 1;
            assert_eq!(
                checked.map(|checked| assert_eq!(checked.as_slice(), pairs)),
                pairs_as_listed(&pairs)
            );
        }
        assert!(good > 500 && bad > 500, "{good} {bad}");
        // The greatest id, beyond every count of bits.
        let far = [5, i32::MAX, 5].map(|destination| BlockPair { source: 0, destination });
        assert_eq!(BlockPairs::new(&far[..2]).map(BlockPairs::len), Ok(2));
        let twice = PairsError::WrittenTwice { block: 5, first: 0, second: 2 };
        assert_eq!(BlockPairs::new(&far).unwrap_err(), twice);
    }

    #[test]
    fn errors_are_one_line_with_the_numbers() {
        let says = |pairs: &[BlockPair]| format!("{:?}", BlockPairs::new(pairs).unwrap_err());
        let negative = BlockPair { source: -4, destination: 0 };
        assert_eq!(says(&[negative]), "pair 0 names block -4 of the source");
        let twice = [BlockPair { source: 4, destination: 1 }; 2];
        assert_eq!(says(&twice), "block 1 is the destination of pair 0 and of pair 1");
    }

    #[test]
    fn the_first_pair_beyond_the_blocks_of_a_side_is_named() {
        let pairs =
            [(1, 5), (7, 2), (9, 8)].map(|(source, destination)| BlockPair { source, destination });
        let pairs = BlockPairs::new(&pairs).unwrap();
        assert_eq!(pairs.check_within(10, 9), Ok(()));
        let out = |place, side, block, blocks| {
            Err(BlocksError::BlockOutOfRange { place, side, block, blocks })
        };
        assert_eq!(pairs.check_within(7, 9), out(1, Side::Source, 7, 7));
        assert_eq!(pairs.check_within(10, 8), out(2, Side::Destination, 8, 8));
    }
}
