//! What the pattern and its checksums are: the host knows what every block must read, without holding a
//! byte of it.

use crate::{KvShape, layout::LayoutError};
use cuda_driver::guard;

/// 2^64 divided by the golden ratio, odd.
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

const MIX: u64 = 0xD6E8_FEB8_6659_FD93;

/// What `paged_checksum` answers for an entry that names no block.
pub const BAD_BLOCK: u64 = 0xBADB_10C0_BADB_10C0;

/// What a word of KV adds to the sum of its block, where it is the word with this index.
///
/// Of each index it is a mixing that can be undone, so that no two words add the same, a word of zeros adds a number
/// of its place, and what is lost or exchanged in one place is not made up for by another. `mixed` of
/// `kernels/mix.cuh`.
#[must_use]
#[inline]
pub fn word_share(word: u64, index: u64) -> u64 {
    mixed(word, word_key(index))
}

/// The key of the word with this index; the next one's is [`GOLDEN`] more.
#[inline]
pub(crate) fn word_key(index: u64) -> u64 {
    index.wrapping_add(1).wrapping_mul(GOLDEN)
}

#[inline]
pub(crate) fn mixed(word: u64, key: u64) -> u64 {
    let x = word ^ key;
    let x = (x ^ (x >> 32)).wrapping_mul(MIX);
    let x = (x ^ (x >> 32)).wrapping_mul(MIX);
    guard!("kernels.sums-mix-words", x ^ (x >> 32), else word.wrapping_mul(key | 1))
}

/// What the pattern adds to a token's key in word `plane * row_words + word`.
pub(crate) fn plane_word(index: u64) -> u64 {
    let mut x = index.wrapping_add(1).wrapping_mul(MIX);
    x ^= x >> 32;
    x = x.wrapping_mul(MIX);
    x ^ (x >> 32)
}

/// The pattern's word `plane * row_words + word` of a token with this key.
#[must_use]
pub fn token_word(key: u64, index: u64) -> u64 {
    key.wrapping_add(plane_word(index))
}

/// The checksums of blocks that hold the pattern, from the keys of their tokens alone.
#[derive(Clone, Debug)]
pub struct Expected {
    block_tokens: usize,
    /// Words of a token, in all planes.
    words: u64,
}

/// Most bytes of a block whose sums are computed.
const BLOCK_BYTES_MAX: u64 = 1 << 30;
/// Most tokens of it.
const BLOCK_TOKENS_MAX: u32 = 1 << 20;

impl Expected {
    /// Prepares for blocks of `shape`.
    ///
    /// # Errors
    /// [`LayoutError::Sums`] for blocks of more than 1 GiB or 2^20 tokens.
    pub fn new(shape: &KvShape) -> Result<Self, LayoutError> {
        let (block_bytes, block_tokens) = (shape.block_bytes(), shape.block_tokens());
        if block_bytes > BLOCK_BYTES_MAX || block_tokens > BLOCK_TOKENS_MAX {
            return Err(LayoutError::Sums { block_bytes, block_tokens });
        }
        let words = shape.planes() * shape.row_words();
        Ok(Self { block_tokens: block_tokens as usize, words })
    }

    /// The checksum of a block whose first tokens have these keys, and of which no more is read. Takes as long as
    /// summing their bytes.
    ///
    /// `None` for more keys than a block has tokens.
    #[must_use]
    pub fn checksum(&self, keys: &[u64]) -> Option<u64> {
        (0..).zip(keys).try_fold(0, |sum, (token, key)| self.add(sum, token, *key))
    }

    /// The checksum of a block after token `token`, with key `key`, was added to it; `sum` is the
    /// checksum of the `token` tokens before it, 0 for none.
    ///
    /// `None` for a token beyond the block.
    #[must_use]
    pub fn add(&self, sum: u64, token: usize, key: u64) -> Option<u64> {
        if token >= self.block_tokens {
            return None;
        }
        // No overflow: a block's words are counted.
        let first = token as u64 * self.words;
        let share = |word| word_share(token_word(key, word), first + word);
        Some((0..self.words).map(share).fold(sum, u64::wrapping_add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvShapeOptions;

    #[test]
    fn a_checksum_is_the_sum_over_all_words() {
        for (layers, kv_count, row_bytes, block_tokens) in
            [(1, 1, 16, 5), (3, 2, 24, 7), (2, 1, 128, 16)]
        {
            let options = KvShapeOptions { layers, kv_count, row_bytes, block_tokens };
            let shape = KvShape::new(options).unwrap();
            let expected = Expected::new(&shape).unwrap();
            let keys: Vec<u64> =
                (0..u64::from(block_tokens)).map(|t| plane_word(t << 20)).collect();
            let words = shape.planes() * shape.row_words();
            let mut growing = 0;
            for n in 0..=keys.len() {
                let naive = (0..n as u64 * words).fold(0u64, |sum, index| {
                    let word = token_word(keys[(index / words) as usize], index % words);
                    sum.wrapping_add(word_share(word, index))
                });
                assert_eq!(expected.checksum(&keys[..n]), Some(naive));
                assert_eq!(growing, naive);
                if let Some(key) = keys.get(n) {
                    growing = expected.add(growing, n, *key).unwrap();
                }
            }
            assert_eq!(expected.add(0, keys.len(), 1), None);
            assert_eq!(expected.checksum(&vec![0; keys.len() + 1]), None);
        }
    }
}
