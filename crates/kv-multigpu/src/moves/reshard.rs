//! KV from one number of tensor-parallel shards to another: which heads go from where to where.

use std::ops::Range;

use super::{BlockGrid, BlockMove, BlockPair};
use crate::placement::HeadShards;

/// How a block's heads lie in a plane.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum HeadOrder {
    /// `[token, head, element]`: each token has a row of heads.
    TokensFirst,
    /// `[head, token, element]`: each head has all tokens.
    HeadsFirst,
}

/// What one block holds in a plane.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockOfHeads {
    /// Tokens of a block.
    pub tokens: u32,
    /// One head of one token, in bytes.
    pub head_bytes: u64,
    /// How they lie.
    pub order: HeadOrder,
}

/// Some neighbouring heads of every block, from one GPU's shard to another's.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct HeadTransfer {
    /// Position of the GPU among those of the old shards.
    pub from: usize,
    /// Position of the GPU among those of the new shards.
    pub to: usize,
    /// The heads, as the model counts them.
    pub heads: Range<u64>,
}

/// Which heads go where when KV that lies in shards is to lie in others.
///
/// Every head of every new shard comes once. Of a head that several old shards have, the one on the
/// same GPU is taken, and else the one that sends least so far.
///
/// ```
/// use kv_multigpu::moves::{BlockOfHeads, HeadOrder, ReshardPlan};
/// use kv_multigpu::placement::{HeadShards, KvReplication};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let shards = |gpus| HeadShards::new(64, 8, gpus, KvReplication::Refuse);
/// let block = BlockOfHeads { tokens: 16, head_bytes: 256, order: HeadOrder::TokensFirst };
/// // Two GPUs take over from four, of which they are the first two.
/// let plan = ReshardPlan::new(&shards(4)?, &shards(2)?, block, |old, new| old == new)
///     .ok_or("both are of one model")?;
/// assert_eq!(plan.transfers().len(), 4);
/// let first = &plan.transfers()[0];
/// assert_eq!((first.from, first.to, first.heads.clone()), (0, 0, 0..2));
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
    /// The plan from `from` to `to`; `is_same_gpu` says whether an old and a new position are one GPU.
    ///
    /// None when they are of different numbers of KV heads, or a block's bytes exceed 64 bits.
    #[must_use]
    pub fn new(
        from: &HeadShards,
        to: &HeadShards,
        block: BlockOfHeads,
        is_same_gpu: impl Fn(usize, usize) -> bool,
    ) -> Option<Self> {
        if from.kv_heads() != to.kv_heads() {
            return None;
        }
        from.kv_heads().checked_mul(u64::from(block.tokens))?.checked_mul(block.head_bytes)?;
        let mut sent = vec![0_u64; from.gpus()];
        let mut transfers: Vec<HeadTransfer> = Vec::new();
        for new in 0..to.gpus() {
            for head in to.kv_heads_of(new) {
                let holders = (0..from.gpus()).filter(|&old| from.kv_heads_of(old).contains(&head));
                let old = holders.min_by_key(|&old| (!is_same_gpu(old, new), sent[old], old))?;
                sent[old] += u64::from(!is_same_gpu(old, new));
                match transfers.last_mut() {
                    Some(last) if (last.from, last.to, last.heads.end) == (old, new, head) => {
                        last.heads.end += 1;
                    }
                    _ => transfers.push(HeadTransfer { from: old, to: new, heads: head..head + 1 }),
                }
            }
        }
        Some(Self { from: *from, to: *to, block, transfers })
    }

    /// What goes where. Each is one [`Mover::move_blocks`](super::Mover::move_blocks) from its old GPU
    /// to its new one, with [`block_move`](ReshardPlan::block_move).
    #[must_use]
    pub fn transfers(&self) -> &[HeadTransfer] {
        &self.transfers
    }

    /// How blocks lie in the planes of an old shard.
    #[must_use]
    pub fn old_grid(&self, blocks: u32) -> BlockGrid {
        self.grid(&self.from, blocks)
    }

    /// How blocks lie in the planes of a new shard.
    #[must_use]
    pub fn new_grid(&self, blocks: u32) -> BlockGrid {
        self.grid(&self.to, blocks)
    }

    fn grid(&self, shards: &HeadShards, blocks: u32) -> BlockGrid {
        let BlockOfHeads { tokens, head_bytes, .. } = self.block;
        let row_stride = shards.kv_heads_each() * head_bytes;
        BlockGrid { blocks, block_stride: row_stride * u64::from(tokens), row_stride }
    }

    /// What a transfer moves of each block, in every plane of keys and of values.
    #[must_use]
    pub fn block_move<'a>(&self, transfer: &HeadTransfer, pairs: &'a [BlockPair]) -> BlockMove<'a> {
        let BlockOfHeads { tokens, head_bytes, order } = self.block;
        let (rows, each) = match order {
            HeadOrder::TokensFirst => (tokens, head_bytes),
            HeadOrder::HeadsFirst => (1, head_bytes * u64::from(tokens)),
        };
        let HeadTransfer { from, to, heads } = transfer;
        let offset = |shard: Range<u64>| heads.start.saturating_sub(shard.start) * each;
        BlockMove {
            pairs,
            rows,
            row_bytes: (heads.end - heads.start) * each,
            source_offset: offset(self.from.kv_heads_of(*from)),
            destination_offset: offset(self.to.kv_heads_of(*to)),
        }
    }

    /// Bytes that a transfer moves of one block in one plane.
    #[must_use]
    pub fn block_bytes(&self, transfer: &HeadTransfer) -> u64 {
        let what = self.block_move(transfer, &[]);
        what.row_bytes * u64::from(what.rows)
    }
}
