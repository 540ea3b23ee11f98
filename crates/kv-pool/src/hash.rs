//! Names of content: chained 128-bit hashes of token blocks.

use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::Xxh3;

const SALT_SEED: u64 = 0x73_61_6c_74;

/// The name of a block's content: its own tokens and all tokens before them.
///
/// Each hash is chained from the one of the block before, so equal hashes mean equal prefixes and
/// one lookup a block finds the longest cached one. Two different prefixes share a hash with a
/// probability of about n²/2^129 among n blocks. The hash is fast and not cryptographic: whoever
/// can choose tokens freely and gains from a collision needs a salt that they don't know, as the
/// start of the chain.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The start of a chain: the parent of a first block.
    pub const ROOT: Self = Self(0);

    /// A start of a chain of its own, for content that must not be shared with other chains: a
    /// tenant's, an adapter's, another model's.
    #[must_use]
    pub fn salted(salt: &[u8]) -> Self {
        // Seeded apart from `chain`, or a salt would be the name of the tokens with the same bytes.
        let mut hasher = Xxh3::with_seed(SALT_SEED);
        hasher.update(salt);
        Self(hasher.digest128())
    }

    /// The hash of a block of `tokens` that follows the block named `parent`.
    #[must_use]
    pub fn chain(parent: Self, tokens: &[u32]) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&parent.0.to_le_bytes());
        for &token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(hasher.digest128())
    }

    /// A hash that was computed elsewhere. Its low 64 bits must differ as those of a good hash do,
    /// for the index spreads names by them.
    #[must_use]
    pub const fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// The 128 bits.
    #[must_use]
    pub const fn to_u128(self) -> u128 {
        self.0
    }
}

/// Takes the low half of a [`BlockHash`] as it is: it is a good hash already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HashOfHash(u64);

impl Hasher for HashOfHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}

pub(crate) type BuildHashOfHash = BuildHasherDefault<HashOfHash>;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_hash_names_tokens_order_and_prefix() {
        let root = BlockHash::ROOT;
        let other_root = BlockHash::salted(b"tenant 7");
        let all = [
            root,
            other_root,
            BlockHash::chain(root, &[1, 2]),
            BlockHash::chain(root, &[2, 1]),
            BlockHash::chain(root, &[1]),
            BlockHash::chain(root, &[]),
            BlockHash::chain(other_root, &[1, 2]),
            BlockHash::chain(BlockHash::chain(root, &[1]), &[2]),
        ];
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        assert_eq!(BlockHash::chain(root, &[1, 2]), all[2]);
    }

    #[test]
    fn a_salt_never_names_tokens_with_the_same_bytes() {
        let salt = [1_u32, 2].map(u32::to_le_bytes).concat();
        assert_ne!(BlockHash::salted(&salt), BlockHash::chain(BlockHash::ROOT, &[1, 2]));
        let whole = [&[0; 16], &salt[..]].concat();
        assert_ne!(BlockHash::salted(&whole), BlockHash::chain(BlockHash::ROOT, &[1, 2]));
    }

    #[test]
    fn hashes_do_not_change_between_versions() {
        // Hashes may be stored and sent, so they are part of the interface.
        let hash = BlockHash::chain(BlockHash::ROOT, &[1, 2, 3]);
        assert_eq!(BlockHash::from_u128(hash.to_u128()), hash);
        assert_eq!(hash.to_u128(), 65_525_807_384_547_430_850_685_627_908_465_599_989);
    }
}
