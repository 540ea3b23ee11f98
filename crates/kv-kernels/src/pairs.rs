//! Pairs of blocks, looked through once, for any number of launches.

use bytemuck::{NoUninit, Zeroable};
use cuda_driver::guard;
use kv_pool::BlockId;

use crate::error::{KernelError, Side};
use crate::places::{Places, first_repeat};
use crate::stored::Kept;

/// Which block goes where.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Hash, NoUninit, PartialEq, Zeroable)]
pub struct BlockPair {
    /// Block of the source.
    pub source: BlockId,
    /// Block of the destination.
    pub destination: BlockId,
}

/// Pairs of blocks that were checked: no block is written twice.
///
/// Made once, in one pass over the pairs, and good for any number of launches and moves: of each layer,
/// of each GPU's heads. A launch only compares the greatest ids with the blocks of its memory.
///
/// ```
/// use kv_kernels::error::KernelError;
/// use kv_kernels::{BlockId, BlockPair, BlockPairs};
///
/// let block = BlockId::from(7);
/// let [first, second] = [0, 1].map(|id| BlockPair { source: BlockId::from(id), destination: block });
/// assert_eq!(BlockPairs::new(&[first])?.as_slice(), [first]);
/// let refused = BlockPairs::new(&[first, second]).unwrap_err();
/// assert_eq!(refused, KernelError::PairTwice { block, first: 0, second: 1 });
/// # Ok::<(), KernelError>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockPairs<'a> {
    /// # Invariants
    /// No destination is there twice.
    pairs: &'a [BlockPair],
    /// # Invariants
    /// One past the greatest id of each side, or 0 without pairs.
    source_end: u64,
    destination_end: u64,
}

impl<'a> BlockPairs<'a> {
    /// Checks `pairs`.
    ///
    /// # Errors
    /// [`KernelError`], for the first pair that writes a block again.
    pub fn new(pairs: &'a [BlockPair]) -> Result<Self, KernelError> {
        let (mut source_end, mut destination_end) = (0, 0);
        let destinations = pairs.iter().map(|pair| {
            source_end = source_end.max(end_of(pair.source));
            destination_end = destination_end.max(end_of(pair.destination));
            pair.destination.index() as u64
        });
        let is_twice = Kept::take().any_twice(u64::MAX, destinations);
        if !guard!("kernels.pairs-write-once", is_twice, else false) {
            return Ok(Self { pairs, source_end, destination_end });
        }
        // Only a "not twice" is sure, and is known before all ends are.
        let place = |pair: usize| Some(pairs[pair].destination.index() as u64);
        if let Some((first, second)) = first_repeat(pairs.len(), place) {
            return Err(KernelError::PairTwice { block: pairs[second].destination, first, second });
        }
        let greatest = |id: fn(&BlockPair) -> BlockId| pairs.iter().map(id).map(end_of).max();
        Ok(Self {
            pairs,
            source_end: greatest(|pair| pair.source).unwrap_or(0),
            destination_end: greatest(|pair| pair.destination).unwrap_or(0),
        })
    }

    /// How many pairs.
    pub(crate) const fn len(self) -> usize {
        self.pairs.len()
    }

    /// The pairs.
    #[must_use]
    pub const fn as_slice(self) -> &'a [BlockPair] {
        self.pairs
    }

    /// Refuses ids beyond the blocks of either side. Looks at the pairs only to name one that is wrong.
    ///
    /// # Errors
    /// [`KernelError::BlockOutOfRange`], for the first pair whose source is out of range, or else for the
    /// first whose destination is.
    pub fn check_within(
        self,
        source_blocks: u64,
        destination_blocks: u64,
    ) -> Result<(), KernelError> {
        let ids: [fn(&BlockPair) -> BlockId; 2] = [|pair| pair.source, |pair| pair.destination];
        let sides = [
            (Side::Source, self.source_end, source_blocks, ids[0]),
            (Side::Destination, self.destination_end, destination_blocks, ids[1]),
        ];
        for (side, end, blocks, id) in sides {
            let are_there = end <= blocks;
            if guard!("kernels.pairs-name-blocks", are_there, else true) {
                continue;
            }
            let is_out = |block: &(u64, BlockId)| end_of(block.1) > blocks;
            if let Some((place, block)) = (0..).zip(self.pairs.iter().map(id)).find(is_out) {
                return Err(KernelError::BlockOutOfRange { place, side, block, blocks });
            }
        }
        Ok(())
    }

    /// Refuses a source that a pair writes, for copies within one memory.
    pub(crate) fn check_sources_unwritten(self) -> Result<(), KernelError> {
        let pairs = self.pairs;
        let mut writers = Places::new(pairs.len(), |pair| pairs[pair].destination.index() as u64);
        for pair in 0..pairs.len() {
            writers.take(pair);
        }
        for (reader, pair) in (0..).zip(pairs) {
            if let Some(writer) = writers.who_took(pair.source.index() as u64) {
                let (writer, block) = (writer as u64, pair.source);
                return Err(KernelError::SourceWritten { reader, writer, block });
            }
        }
        Ok(())
    }
}

/// One past an id.
fn end_of(id: BlockId) -> u64 {
    id.index() as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(source: u32, destination: u32) -> BlockPair {
        let [source, destination] = [source, destination].map(|id| BlockId::new(id).unwrap());
        BlockPair { source, destination }
    }

    /// What is wrong with pairs, found in the plainest way.
    fn pairs_as_listed(pairs: &[BlockPair]) -> Result<(), KernelError> {
        for (second, pair) in pairs.iter().enumerate() {
            let block = pair.destination;
            let earlier = pairs[..second].iter().rposition(|earlier| earlier.destination == block);
            if let Some(first) = earlier {
                return Err(KernelError::PairTwice { block, first, second });
            }
        }
        Ok(())
    }

    /// Few blocks and many, ids close together and as far apart as there are.
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
            let mut id = || below(spread) as u32;
            let pairs: Vec<_> = (0..round % 12).map(|_| pair(id(), id())).collect();
            let checked = BlockPairs::new(&pairs);
            *if checked.is_ok() { &mut good } else { &mut bad } += 1;
            assert_eq!(
                checked.map(|checked| assert_eq!(checked.as_slice(), pairs)),
                pairs_as_listed(&pairs)
            );
        }
        assert!(good > 500 && bad > 500, "{good} {bad}");
        // The greatest id, beyond every count of bits.
        let far = [5, i32::MAX as u32, 5].map(|destination| pair(0, destination));
        assert_eq!(BlockPairs::new(&far[..2]).map(BlockPairs::len), Ok(2));
        let twice = BlockPairs::new(&far).unwrap_err();
        assert_eq!(twice, KernelError::PairTwice { block: BlockId::from(5), first: 0, second: 2 });
        assert_eq!(format!("{twice:?}"), "block 5 is the destination of pair 0 and of pair 2");
    }

    #[test]
    fn the_first_pair_beyond_the_blocks_of_a_side_is_named() {
        let pairs = [pair(1, 5), pair(7, 2), pair(9, 8)];
        let pairs = BlockPairs::new(&pairs).unwrap();
        assert_eq!(pairs.check_within(10, 9), Ok(()));
        let out = |place, side, block: u16, blocks| {
            let block = BlockId::from(block);
            Err(KernelError::BlockOutOfRange { place, side, block, blocks })
        };
        assert_eq!(pairs.check_within(7, 9), out(1, Side::Source, 7, 7));
        assert_eq!(pairs.check_within(10, 8), out(2, Side::Destination, 8, 8));
    }
}
