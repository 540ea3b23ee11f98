//! Prompts of the engine.

use kv_pool::BlockHash;

/// A prompt: tokens whose KV depends on all tokens before them, as a model's does.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
}

impl Prompt {
    /// `count` tokens that no prompt with another `seed` has.
    pub(crate) fn new(seed: u32, count: u64) -> Self {
        Self { tokens: (0..count as u32).map(|t| seed.wrapping_mul(0x9E37_79B9) ^ t).collect() }
    }

    /// This prompt with `count` tokens of `seed` after it.
    pub(crate) fn then(&self, seed: u32, count: u64) -> Self {
        let mut tokens = self.tokens.clone();
        tokens.extend(Self::new(seed, count).tokens);
        Self { tokens }
    }

    pub(crate) fn len(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// The key of each token's KV.
    pub(crate) fn keys(&self) -> Vec<u64> {
        let chained = |key: &mut u64, token: &u32| {
            *key = (*key ^ u64::from(*token)).wrapping_add(1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            *key ^= *key >> 29;
            Some(*key)
        };
        self.tokens.iter().scan(0x1234_5678_9ABC_DEF1, chained).collect()
    }

    /// The names of its full blocks.
    pub(crate) fn hashes(&self, block_tokens: u64) -> Vec<BlockHash> {
        let chained = |parent: &mut BlockHash, block: &[u32]| {
            *parent = BlockHash::chain(*parent, block);
            Some(*parent)
        };
        self.tokens.chunks_exact(block_tokens as usize).scan(BlockHash::ROOT, chained).collect()
    }
}
