//! KV of one degree of tensor parallelism and order of dimensions as that of another.

use std::ops::Range;

/// Heads and ranks, at most.
const HEADS_MAX: u32 = 1 << 16;

/// The order of the dimensions of a layer of a block: keys and values, tokens, heads, and the bytes of a head.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum HeadOrder {
    /// Of each token, all heads (`NHD`).
    TokensFirst,
    /// Of each head, all tokens (`HND`).
    HeadsFirst,
}

/// How one layer of a block lies in the memory of the ranks of a tensor-parallel group. Keys come before values.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct HeadLayout {
    /// Heads of keys and values of the model.
    pub kv_heads: u32,
    /// The degree: it divides `kv_heads`, or is a multiple of it; then each head is on neighbouring ranks.
    pub shards: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of the key, or of the value, of one head of one token.
    pub head_bytes: u32,
    /// The order of the dimensions.
    pub order: HeadOrder,
}

/// Why one layout is not another one.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A number is 0, there are more than 65,536 heads or ranks, or the product of all does not fit.
    #[error("a layout has no bytes, or more than can be counted: {layout:?}")]
    Size {
        /// The layout.
        layout: HeadLayout,
    },
    /// The degree and the heads do not divide each other.
    #[error("{kv_heads} heads are not divided among {shards} ranks")]
    Shards {
        /// Heads.
        kv_heads: u32,
        /// The degree.
        shards: u32,
    },
    /// The two sides are of different models or blocks.
    #[error("the two sides have different heads, tokens or bytes")]
    Differs,
    /// There is no such rank.
    #[error("rank {rank} is none of {shards}")]
    Rank {
        /// The rank.
        rank: u32,
        /// The degree.
        shards: u32,
    },
    /// The memory has another length than the layout.
    #[error("{bytes} bytes are given, and a layer of a block has {expected}")]
    Bytes {
        /// Bytes given.
        bytes: usize,
        /// Bytes of a layer of a block.
        expected: usize,
    },
}

kv_pool::one_line_debug!(LayoutError);

impl HeadLayout {
    fn check(&self) -> Result<(), LayoutError> {
        let Self { kv_heads, shards, block_tokens, head_bytes, .. } = *self;
        let sizes = [kv_heads, shards, block_tokens, head_bytes];
        let product = [2, kv_heads, block_tokens, head_bytes]
            .iter()
            .try_fold(1_usize, |product, &of| product.checked_mul(of as usize));
        if sizes.contains(&0) || product.is_none() || kv_heads.max(shards) > HEADS_MAX {
            return Err(LayoutError::Size { layout: *self });
        }
        if !kv_heads.is_multiple_of(shards) && !shards.is_multiple_of(kv_heads) {
            return Err(LayoutError::Shards { kv_heads, shards });
        }
        Ok(())
    }

    /// The heads of a rank.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn heads_of(&self, rank: u32) -> Result<Range<u32>, LayoutError> {
        self.check()?;
        let Self { kv_heads, shards, .. } = *self;
        if rank >= shards {
            return Err(LayoutError::Rank { rank, shards });
        }
        Ok(match kv_heads.is_multiple_of(shards) {
            true => rank * (kv_heads / shards)..(rank + 1) * (kv_heads / shards),
            false => {
                let head = rank / (shards / kv_heads);
                head..head + 1
            }
        })
    }

    /// Bytes of one layer of a block of one rank.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn part_bytes(&self) -> Result<usize, LayoutError> {
        let heads = self.heads_of(0)?.len();
        Ok(2 * heads * self.block_tokens as usize * self.head_bytes as usize)
    }

    /// The ranks that are needed for rank `rank` of `here`: of heads that several have, one.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn ranks_for(&self, here: &Self, rank: u32) -> Result<Vec<u32>, LayoutError> {
        let wanted = here.heads_of(rank)?;
        self.check()?;
        if (self.kv_heads, self.block_tokens, self.head_bytes)
            != (here.kv_heads, here.block_tokens, here.head_bytes)
        {
            return Err(LayoutError::Differs);
        }
        let mut ranks = Vec::new();
        for head in wanted {
            let there = match self.kv_heads.is_multiple_of(self.shards) {
                true => head / (self.kv_heads / self.shards),
                false => head * (self.shards / self.kv_heads),
            };
            if ranks.last() != Some(&there) {
                ranks.push(there);
            }
        }
        Ok(ranks)
    }

    /// Where the key or value of a head of a token begins; the head is counted within its rank.
    fn offset(&self, heads: usize, (which, token, head): (usize, usize, usize)) -> usize {
        let (tokens, bytes) = (self.block_tokens as usize, self.head_bytes as usize);
        match self.order {
            HeadOrder::TokensFirst => ((which * tokens + token) * heads + head) * bytes,
            HeadOrder::HeadsFirst => ((which * heads + head) * tokens + token) * bytes,
        }
    }
}

/// Copies to a layer of a block of rank `here.1` what rank `there.1` has of its heads, and leaves the other heads as they are.
///
/// # Errors
/// [`LayoutError`]; nothing was copied.
pub fn copy_heads(
    (there, rank_there): (&HeadLayout, u32),
    from: &[u8],
    (here, rank_here): (&HeadLayout, u32),
    to: &mut [u8],
) -> Result<(), LayoutError> {
    // Checks that both are of one model.
    there.ranks_for(here, rank_here)?;
    let (theirs, ours) = (there.heads_of(rank_there)?, here.heads_of(rank_here)?);
    for (bytes, expected) in [(from.len(), there.part_bytes()?), (to.len(), here.part_bytes()?)] {
        if bytes != expected {
            return Err(LayoutError::Bytes { bytes, expected });
        }
    }
    let bytes = here.head_bytes as usize;
    let both = theirs.start.max(ours.start)..theirs.end.min(ours.end);
    for which in 0..2 {
        for token in 0..here.block_tokens as usize {
            for head in both.clone() {
                let at = |heads: &Range<u32>| (which, token, (head - heads.start) as usize);
                let source = there.offset(theirs.len(), at(&theirs));
                let target = here.offset(ours.len(), at(&ours));
                let (source, target) =
                    (from.get(source..source + bytes), to.get_mut(target..target + bytes));
                if let (Some(source), Some(target)) = (source, target) {
                    target.copy_from_slice(source);
                }
            }
        }
    }
    Ok(())
}
