//! What the pattern and its checksums are, in closed form: the host knows what every block must
//! read, without holding a byte of it.

use crate::{KvShape, error::ShapeError};

/// 2^64 divided by the golden ratio, odd.
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

const MIX: u64 = 0xD6E8_FEB8_6659_FD93;

/// What `paged_checksum` answers for an entry that names no block.
pub const BAD_BLOCK: u64 = 0xBADB_10C0_BADB_10C0;

/// The weight in a checksum of the word with index `(token * planes + plane) * row_words + word`.
///
/// Odd, so that a change of any one bit of the word changes the checksum.
#[must_use]
pub fn weight(index: u64) -> u64 {
    index.wrapping_add(1).wrapping_mul(GOLDEN) | 1
}

/// What the pattern adds to a token's key in word `plane * row_words + word`.
#[must_use]
pub fn plane_word(index: u64) -> u64 {
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
///
/// A word of the pattern is its token's key plus a constant of its place, so a checksum is a sum of
/// one product for each token, plus a constant for each number of tokens.
#[derive(Clone, Debug)]
pub struct Expected {
    /// For each token of a block, the sum of its words' weights, and of weights times constants.
    tokens: Box<[TokenSums]>,
}

#[derive(Clone, Copy, Debug)]
struct TokenSums {
    key_weight: u64,
    constant: u64,
}

/// Most bytes of a block whose sums are prepared.
const BLOCK_BYTES_MAX: u64 = 1 << 30;
/// Most tokens of it, of which each takes memory.
const BLOCK_TOKENS_MAX: u32 = 1 << 20;

impl Expected {
    /// Prepares for blocks of `shape`. Takes as long as hashing one block.
    ///
    /// # Errors
    /// [`ShapeError::Sums`] for blocks of more than 1 GiB or 2^20 tokens.
    pub fn new(shape: &KvShape) -> Result<Self, ShapeError> {
        let (block_bytes, block_tokens) = (shape.block_bytes(), shape.block_tokens());
        if block_bytes > BLOCK_BYTES_MAX || block_tokens > BLOCK_TOKENS_MAX {
            return Err(ShapeError::Sums { block_bytes, block_tokens });
        }
        let words = shape.planes() * shape.row_words();
        let tokens = (0..u64::from(shape.block_tokens()))
            .map(|token| {
                let first = token * words;
                let mut sums = TokenSums { key_weight: 0, constant: 0 };
                for (index, constant) in (first..).zip((0..words).map(plane_word)) {
                    let weight = weight(index);
                    sums.key_weight = sums.key_weight.wrapping_add(weight);
                    sums.constant = sums.constant.wrapping_add(weight.wrapping_mul(constant));
                }
                sums
            })
            .collect();
        Ok(Self { tokens })
    }

    /// Most tokens of a block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The checksum of a block whose first tokens have these keys, and of which no more is read.
    ///
    /// `None` for more keys than a block has tokens.
    #[must_use]
    pub fn checksum(&self, keys: &[u64]) -> Option<u64> {
        let tokens = self.tokens.get(..keys.len())?;
        Some(tokens.iter().zip(keys).fold(0, |sum, (token, key)| token.add_to(sum, *key)))
    }

    /// The checksum of a block after token `token`, with key `key`, was added to it; `sum` is the
    /// checksum of the `token` tokens before it, 0 for none.
    ///
    /// `None` for a token beyond the block.
    #[must_use]
    pub fn add(&self, sum: u64, token: usize, key: u64) -> Option<u64> {
        Some(self.tokens.get(token)?.add_to(sum, key))
    }
}

impl TokenSums {
    fn add_to(&self, sum: u64, key: u64) -> u64 {
        sum.wrapping_add(key.wrapping_mul(self.key_weight)).wrapping_add(self.constant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvShapeOptions;

    #[test]
    fn the_closed_form_is_the_sum_over_all_words() {
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
                    sum.wrapping_add(word.wrapping_mul(weight(index)))
                });
                assert_eq!(expected.checksum(&keys[..n]), Some(naive));
                assert_eq!(growing, naive);
                if let Some(key) = keys.get(n) {
                    growing = expected.add(growing, n, *key).unwrap();
                }
            }
            assert_eq!(expected.block_tokens(), keys.len());
            assert_eq!(expected.add(0, keys.len(), 1), None);
            assert_eq!(expected.checksum(&vec![0; keys.len() + 1]), None);
        }
    }
}
