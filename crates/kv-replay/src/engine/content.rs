//! The content that every token of every request must have, as a unique key.

use kv_pool::BlockHash;

use crate::rng::SplitMix64;
use crate::trace::Request;

/// Converts trace blocks to KV blocks, and tokens to keys.
///
/// The key of a prompt token follows from the hash of its block, which covers all tokens before it.
/// So two requests hold equal bytes exactly where their prompts are equal from the start. The key
/// of a generated token follows from its request and position, so it is unique.
#[derive(Clone, Copy, Debug)]
pub(super) struct Content {
    seed: u64,
    block_tokens: u64,
    /// Prompt tokens of a hash id: a divisor or a multiple of `block_tokens`.
    trace_block_tokens: u64,
}

/// The blocks and keys of one request, or of one branch of it.
#[derive(Clone, Debug)]
pub(super) struct RequestContent {
    /// One hash for each block of the prompt. The last block may be partly full.
    hashes: Vec<BlockHash>,
    /// Names of the full blocks, as far as they were asked for.
    names: Vec<BlockHash>,
    prompt_tokens: u64,
    block_tokens: u64,
    /// From which token on the answer has which base, in ascending order.
    answers: Vec<(u64, u64)>,
    seed: u64,
}

impl Content {
    /// Content of KV blocks of `block_tokens` tokens, for a trace with a hash id for each `trace_block_tokens`.
    pub(super) fn new(seed: u64, block_tokens: u32, trace_block_tokens: u64) -> Self {
        let trace_block_tokens = trace_block_tokens.max(1);
        Self { seed: mix(seed, 0), block_tokens: block_tokens.into(), trace_block_tokens }
    }

    /// KV blocks that are smaller than trace blocks subdivide them; larger ones are made of several.
    pub(super) fn of(&self, number: usize, request: &Request) -> RequestContent {
        let blocks = request.input_length.div_ceil(self.block_tokens);
        let mut hashes = Vec::with_capacity(blocks as usize);
        let (mut parent, mut tokens) = (BlockHash::ROOT, Vec::new());
        for block in 0..blocks {
            let start = block * self.block_tokens;
            let first = start / self.trace_block_tokens;
            let end = (start + self.block_tokens).min(request.input_length);
            tokens.clear();
            for index in first..end.div_ceil(self.trace_block_tokens) {
                let id = request.hash_ids.get(index as usize).copied().unwrap_or(0);
                tokens.extend([id as u32, (id >> 32) as u32]);
            }
            let part = (start % self.trace_block_tokens) / self.block_tokens;
            tokens.push(part as u32);
            parent = BlockHash::chain(parent, &tokens);
            hashes.push(parent);
        }
        RequestContent {
            hashes,
            names: Vec::new(),
            prompt_tokens: request.input_length,
            block_tokens: self.block_tokens,
            answers: vec![(request.input_length, mix(!self.seed, number as u64))],
            seed: self.seed,
        }
    }
}

impl RequestContent {
    /// The names of the blocks that the first `tokens` tokens fill, as other requests would find them.
    pub(super) fn names(&mut self, tokens: u64) -> &[BlockHash] {
        let full = (tokens / self.block_tokens) as usize;
        for block in self.names.len()..full {
            let end = (block as u64 + 1) * self.block_tokens;
            let name = match end <= self.prompt_tokens {
                true => self.hashes[block],
                false => {
                    let parent = self.names.last().copied().unwrap_or(BlockHash::ROOT);
                    let base = self.answer_at(end - 1);
                    BlockHash::chain(parent, &[base as u32, (base >> 32) as u32, block as u32])
                }
            };
            self.names.push(name);
        }
        &self.names[..full]
    }

    /// A branch whose tokens from `from` on are others. `number` tells it from other branches.
    pub(super) fn branch(&self, from: u64, number: u64) -> Self {
        let mut branch = self.clone();
        branch.names.truncate((from / self.block_tokens) as usize);
        branch.answers.push((from, mix(self.answer_at(from) ^ from, number)));
        branch
    }

    pub(super) fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    /// The key of token `position`, counted through prompt and answer.
    pub(super) fn key(&self, position: u64) -> u64 {
        if position >= self.prompt_tokens {
            return mix(self.answer_at(position), position);
        }
        let hash = self.hashes[(position / self.block_tokens) as usize].to_u128() as u64;
        mix(self.seed ^ hash, position % self.block_tokens)
    }

    /// The key of a state behind `tokens` tokens, at least one.
    pub(super) fn state_key(&self, tokens: u64) -> u64 {
        // The last key follows from all tokens before it.
        mix(!self.key(tokens - 1), !tokens)
    }

    /// The key of a draft for token `position` that is rejected in `step`.
    pub(super) fn rejected_key(&self, position: u64, step: u64) -> u64 {
        mix(!self.key(position), step)
    }

    fn answer_at(&self, position: u64) -> u64 {
        let before = self.answers.partition_point(|(from, _)| *from <= position);
        self.answers[before.saturating_sub(1)].1
    }
}

fn mix(base: u64, index: u64) -> u64 {
    SplitMix64::new(base.wrapping_add(index.wrapping_mul(0xD134_2543_DE82_EF95))).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(input_length: u64, hash_ids: Vec<u64>) -> Request {
        Request { timestamp_ms: 0, input_length, output_length: 10, hash_ids, tenant: None }
    }

    #[test]
    fn prompts_share_keys_and_hashes_exactly_as_far_as_they_are_equal() {
        let content = Content::new(1, 64, 512);
        let mut one = content.of(0, &request(1500, vec![7, 8, 9]));
        let mut two = content.of(1, &request(1500, vec![7, 8, 10]));
        let mut other = content.of(2, &request(1024, vec![6, 8]));
        assert_eq!(one.names(1500).len(), 23);
        assert_eq!(one.names(1024), two.names(1024));
        assert_ne!(one.names(1500)[16], two.names(1500)[16]);
        assert_eq!(one.key(1023), two.key(1023));
        assert_ne!(one.key(1024), two.key(1024));
        // An equal id after a different prefix is different content.
        assert_ne!(one.names(1024)[8], other.names(1024)[8]);
        assert_ne!(one.key(600), other.key(600));
    }

    #[test]
    fn no_two_tokens_of_a_run_have_one_key() {
        let content = Content::new(3, 16, 512);
        let requests =
            [content.of(0, &request(1000, vec![0, 1])), content.of(1, &request(600, vec![2, 3]))];
        let mut keys = std::collections::HashSet::new();
        for (request, tokens) in requests.iter().zip([1010, 610]) {
            for position in 0..tokens {
                assert!(keys.insert(request.key(position)), "position {position}");
            }
        }
    }

    #[test]
    fn a_branch_differs_from_where_it_begins() {
        let mut one = Content::new(1, 16, 512).of(0, &request(40, vec![7]));
        let mut two = one.branch(50, 1);
        let mut three = one.branch(50, 2);
        assert_eq!(one.key(49), two.key(49));
        assert!(one.key(50) != two.key(50) && two.key(50) != three.key(50));
        // The block with the last token of the prompt is the same, and the one after it is not.
        assert_eq!(one.names(64)[..3], two.names(64)[..3]);
        assert!(one.names(64)[3] != two.names(64)[3] && two.names(64)[3] != three.names(64)[3]);
        assert_ne!(one.rejected_key(50, 1), one.key(50));
        assert_ne!(one.rejected_key(50, 1), one.rejected_key(50, 2));
    }
}
