//! Redistributes KV from one number of tensor-parallel shards to another: which heads go where.

use std::ops::Range;

use super::{BlockGrid, BlockMove, BlockPairs};
use crate::place::{HeadShards, PlacementError};

/// The order of a block's heads in a plane.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum HeadOrder {
    /// `[token, head, element]`: each token has a row of heads.
    TokensFirst,
    /// `[head, token, element]`: each head has all tokens.
    HeadsFirst,
}

/// The contents of one block in a plane.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockOfHeads {
    /// Number of tokens of a block.
    pub tokens: u32,
    /// Size of one head of one token, in bytes.
    pub head_bytes: u64,
    /// The order of the heads.
    pub order: HeadOrder,
}

/// Maximum number of heads, and of GPUs of the old or the new shards, in a plan.
const COUNT_MAX: u64 = 4096;

/// A range of neighbouring heads of every block, moved from one GPU's shard to another's. A
/// [`ReshardPlan`] creates it, for blocks in the grids of that plan.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct HeadTransfer {
    from: usize,
    to: usize,
    heads: Range<u64>,
    rows: u32,
    row_bytes: u64,
    source_offset: u64,
    destination_offset: u64,
}

impl HeadTransfer {
    fn new(ends: [(usize, &HeadShards); 2], heads: Range<u64>, block: BlockOfHeads) -> Self {
        let BlockOfHeads { tokens, head_bytes, order } = block;
        let (rows, each) = match order {
            HeadOrder::TokensFirst => (tokens, head_bytes),
            HeadOrder::HeadsFirst => (1, head_bytes * u64::from(tokens)),
        };
        let offset = |(gpu, shards): (usize, &HeadShards)| {
            (heads.start - shards.kv_heads_of(gpu).start) * each
        };
        Self {
            from: ends[0].0,
            to: ends[1].0,
            rows,
            row_bytes: (heads.end - heads.start) * each,
            source_offset: offset(ends[0]),
            destination_offset: offset(ends[1]),
            heads,
        }
    }

    /// Index of the GPU among those of the old shards.
    #[must_use]
    pub fn from(&self) -> usize {
        self.from
    }

    /// Index of the GPU among those of the new shards.
    #[must_use]
    pub fn to(&self) -> usize {
        self.to
    }

    /// The heads, numbered as in the model.
    #[must_use]
    pub fn heads(&self) -> Range<u64> {
        self.heads.clone()
    }

    /// The part of each block that moves, in every plane of keys and of values.
    #[must_use]
    pub fn block_move<'a>(&self, pairs: BlockPairs<'a>) -> BlockMove<'a> {
        let Self { rows, row_bytes, source_offset, destination_offset, .. } = *self;
        BlockMove { pairs, rows, row_bytes, source_offset, destination_offset }
    }

    /// Number of moved bytes of one block in one plane.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.row_bytes * u64::from(self.rows)
    }
}

/// Which heads go from which old shard to which new one.
///
/// Every head of every new shard comes from one old shard. If several old shards have the head, the
/// shard on the same GPU is used, otherwise the one that sends the fewest heads so far.
///
/// ```
/// use kv_multigpu::moves::{BlockOfHeads, HeadOrder, ReshardPlan};
/// use kv_multigpu::place::{HeadShards, KvReplication};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let shards = |gpus| HeadShards::new(64, 8, gpus, KvReplication::Refuse);
/// let block = BlockOfHeads { tokens: 16, head_bytes: 256, order: HeadOrder::TokensFirst };
/// // Two GPUs take over from four. They are the first two of the four.
/// let plan = ReshardPlan::new(&shards(4)?, &shards(2)?, block, |old, new| old == new)
/// ?;
/// assert_eq!(plan.transfers().len(), 4);
/// let first = &plan.transfers()[0];
/// assert_eq!((first.from(), first.to(), first.heads()), (0, 0, 0..2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ReshardPlan {
    from: HeadShards,
    to: HeadShards,
    block: BlockOfHeads,
    transfers: Vec<HeadTransfer>,
}

impl ReshardPlan {
    /// The plan from `from` to `to`. `is_same_gpu` tells whether an old and a new index refer to
    /// one GPU.
    ///
    /// # Errors
    /// [`PlacementError`], for shards of different models and for invalid numbers.
    pub fn new(
        from: &HeadShards,
        to: &HeadShards,
        block: BlockOfHeads,
        is_same_gpu: impl Fn(usize, usize) -> bool,
    ) -> Result<Self, PlacementError> {
        check(from, to, block)?;
        let mut sent = vec![0_u64; from.gpus()];
        let mut runs: Vec<(usize, usize, Range<u64>)> = Vec::new();
        for new in 0..to.gpus() {
            for head in to.kv_heads_of(new) {
                let holders = (0..from.gpus()).filter(|&old| from.kv_heads_of(old).contains(&head));
                // Every head has a holder.
                let old = holders.min_by_key(|&old| (!is_same_gpu(old, new), sent[old], old));
                let old = old.unwrap_or_default();
                sent[old] += u64::from(!is_same_gpu(old, new));
                match runs.last_mut() {
                    Some((before, to, heads)) if (*before, *to, heads.end) == (old, new, head) => {
                        heads.end += 1;
                    }
                    _ => runs.push((old, new, head..head + 1)),
                }
            }
        }
        let transfer =
            |(old, new, heads)| HeadTransfer::new([(old, from), (new, to)], heads, block);
        let transfers = runs.into_iter().map(transfer).collect();
        Ok(Self { from: *from, to: *to, block, transfers })
    }

    /// The transfers. Each is one [`Mover::move_blocks`](super::Mover::move_blocks) from its old GPU
    /// to its new one, with [`block_move`](HeadTransfer::block_move).
    #[must_use]
    pub fn transfers(&self) -> &[HeadTransfer] {
        &self.transfers
    }

    /// The layout of blocks in the planes of an old shard.
    #[must_use]
    pub fn old_grid(&self, blocks: u32) -> BlockGrid {
        self.grid(&self.from, blocks)
    }

    /// The layout of blocks in the planes of a new shard.
    #[must_use]
    pub fn new_grid(&self, blocks: u32) -> BlockGrid {
        self.grid(&self.to, blocks)
    }

    fn grid(&self, shards: &HeadShards, blocks: u32) -> BlockGrid {
        let BlockOfHeads { tokens, head_bytes, .. } = self.block;
        let row_stride = shards.kv_heads_each() * head_bytes;
        BlockGrid { blocks, block_stride: row_stride * u64::from(tokens), row_stride }
    }
}

fn check(from: &HeadShards, to: &HeadShards, block: BlockOfHeads) -> Result<(), PlacementError> {
    let kv_heads = from.kv_heads();
    if kv_heads != to.kv_heads() {
        return Err(PlacementError::OtherHeads { from: kv_heads, to: to.kv_heads() });
    }
    for (what, count) in [
        ("KV heads", kv_heads),
        ("GPUs of the old shards", from.gpus() as u64),
        ("GPUs of the new shards", to.gpus() as u64),
    ] {
        if count > COUNT_MAX {
            return Err(PlacementError::TooMany { what, count, most: COUNT_MAX });
        }
    }
    let BlockOfHeads { tokens, head_bytes, .. } = block;
    // At most 12 + 32 + 64 bits.
    let bytes = u128::from(kv_heads) * u128::from(tokens) * u128::from(head_bytes);
    if bytes == 0 || bytes > i64::MAX as u128 {
        return Err(PlacementError::Block { tokens, head_bytes, kv_heads });
    }
    Ok(())
}
