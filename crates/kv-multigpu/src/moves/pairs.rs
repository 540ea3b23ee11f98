//! Pairs of blocks that a move may take.

use kv_kernels::BlockPair;
use kv_kernels::error::Side;

use super::MoveError;

/// Which block goes where, checked: no id is negative, and no block is written twice.
///
/// Made once, and good for any number of moves: of each layer, of keys and of values, of each GPU's heads. A move only
/// compares the greatest ids with the blocks of its memory.
///
/// ```
/// use kv_multigpu::moves::{BlockPair, BlockPairs, MoveError};
///
/// let [first, second] = [0, 1].map(|source| BlockPair { source, destination: 7 });
/// assert_eq!(BlockPairs::new(&[first])?.len(), 1);
/// let refused = BlockPairs::new(&[first, second]).unwrap_err();
/// assert_eq!(refused, MoveError::WrittenTwice { block: 7, first: 0, second: 1 });
/// # Ok::<(), MoveError>(())
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

/// One bit for each block that could be written costs less than sorting, up to so many bits for each pair.
const BITS_PER_PAIR_MAX: usize = 64;
/// And up to so many in any case.
const BITS_MAX: usize = 1 << 16;

impl<'a> BlockPairs<'a> {
    /// Checks `pairs`.
    ///
    /// # Errors
    /// [`MoveError::NegativeBlock`], [`MoveError::WrittenTwice`], each for the first such pair.
    pub fn new(pairs: &'a [BlockPair]) -> Result<Self, MoveError> {
        let mut ends = [0; 2];
        for (pair, &BlockPair { source, destination }) in pairs.iter().enumerate() {
            let sides = [(Side::Source, source), (Side::Destination, destination)];
            for (end, (side, block)) in ends.iter_mut().zip(sides) {
                let Ok(id) = u32::try_from(block) else {
                    return Err(MoveError::NegativeBlock { side, pair, block });
                };
                *end = id.saturating_add(1).max(*end);
            }
        }
        let [source_end, destination_end] = ends;
        if is_written_twice(pairs, destination_end as usize) {
            return Err(written_twice(pairs));
        }
        Ok(Self { pairs, source_end, destination_end })
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

    /// Refuses ids beyond the blocks of either side.
    pub(super) fn check_within(
        self,
        source_blocks: u32,
        destination_blocks: u32,
    ) -> Result<(), MoveError> {
        let sides = [
            (Side::Source, self.source_end, source_blocks),
            (Side::Destination, self.destination_end, destination_blocks),
        ];
        for (side, end, blocks) in sides {
            if end > blocks {
                return Err(MoveError::NoSuchBlock { side, block: end - 1, blocks });
            }
        }
        Ok(())
    }
}

/// Whether two pairs have one destination, all of which are below `end`.
fn is_written_twice(pairs: &[BlockPair], end: usize) -> bool {
    if end <= BITS_MAX.max(pairs.len().saturating_mul(BITS_PER_PAIR_MAX)) {
        let mut written = vec![0_u64; end.div_ceil(64)];
        return pairs.iter().any(|pair| {
            let (word, bit) = (pair.destination as usize / 64, 1 << (pair.destination % 64));
            let before = written[word];
            written[word] |= bit;
            before & bit != 0
        });
    }
    let mut destinations: Vec<i32> = pairs.iter().map(|pair| pair.destination).collect();
    destinations.sort_unstable();
    destinations.windows(2).any(|two| two[0] == two[1])
}

/// The first pair whose destination an earlier pair has. There is one.
fn written_twice(pairs: &[BlockPair]) -> MoveError {
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_unstable_by_key(|&pair| (pairs[pair].destination, pair));
    let twins = order.windows(2).filter(|two| {
        let [first, second] = [two[0], two[1]].map(|pair| pairs[pair].destination);
        first == second
    });
    let (first, second) =
        twins.map(|two| (two[0], two[1])).min_by_key(|&(_, second)| second).unwrap_or_default();
    MoveError::WrittenTwice { block: pairs[second].destination, first, second }
}
