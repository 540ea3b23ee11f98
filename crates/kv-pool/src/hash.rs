//! Names of content: chained 128-bit hashes of token blocks.

use std::fmt;
use std::hash::Hasher;
use std::num::NonZeroU32;

use siphasher::sip128::{Hasher128, SipHasher24};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

const SALT_SEED: u64 = 0x73_61_6c_74;
const KEYS_SEED: u64 = 0x6b_65_79_73;

/// Blocks of at most so many tokens are hashed in one piece, longer ones in pieces of that size.
const PIECE_TOKENS: usize = 64;
const PARENT_BYTES: usize = 16;
const TOKEN_BYTES: usize = 4;

/// The name of a block's content: its own tokens and all tokens before them.
///
/// Each hash is chained from the one of the block before, so equal hashes mean equal prefixes and
/// one lookup a block finds the longest cached one. Two different prefixes share a hash with a
/// probability of about n²/2^129 among n blocks.
///
/// [`chain`](Self::chain) and [`salted`](Self::salted) are those of [`BlockHasher::FAST`]: fast
/// and not cryptographic. Where somebody who chooses tokens freely would gain from a collision,
/// use [`BlockHasher::keyed`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The start of a chain: the parent of a first block.
    pub const ROOT: Self = Self(0);

    /// A start of a chain of its own, for content that must not be shared with other chains: a
    /// tenant's, an adapter's, another model's.
    #[must_use]
    pub fn salted(salt: &[u8]) -> Self {
        BlockHasher::FAST.salted(salt)
    }

    /// The hash of a block of `tokens` that follows the block named `parent`.
    #[must_use]
    pub fn chain(parent: Self, tokens: &[u32]) -> Self {
        BlockHasher::FAST.chain(parent, tokens)
    }

    /// A hash that was computed elsewhere. Its low 64 bits must differ as those of a good hash do,
    /// for names are spread by them; the others may be the same for all names, or follow from the low ones.
    #[must_use]
    pub const fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// The 128 bits.
    #[must_use]
    pub const fn to_u128(self) -> u128 {
        self.0
    }

    /// All bits in 64, well mixed at both ends even if names are small numbers, or if one half follows from the
    /// other: what tables spread names by.
    #[inline]
    pub(crate) fn mixed(self) -> u64 {
        // Halves that are equal, or rotations of each other, must not cancel: so they are made different, and
        // multiplied.
        let low = self.0 as u64 ^ 0x9E37_79B9_7F4A_7C15;
        let high = (self.0 >> 64) as u64 ^ 0xD6E8_FEB8_6659_FD93;
        let product = crate::guard!(
            "pool.halves-of-a-name-do-not-cancel",
            u128::from(low) * u128::from(high),
            else u128::from(low ^ high)
        );
        (product as u64) ^ ((product >> 64) as u64)
    }
}

/// What a block's content depends on beside its tokens and those before them.
///
/// A key is part of the hash of its block, and through the chain of all blocks after it. So an
/// adapter or a salt belongs to the first block only, or to the start of the chain; the content
/// that stands behind placeholder tokens belongs to the block that its first token is in.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ExtraKey<'a> {
    /// The name of an adapter that the block was computed with.
    Adapter(&'a [u8]),
    /// Content other than text, an image for instance, behind placeholder tokens of the block.
    Modality {
        /// The first of its tokens, counted from the start of the block.
        offset: u32,
        /// What tells the content from other content, such as a hash of it.
        content: &'a [u8],
    },
    /// What keeps a tenant's content apart from that of others.
    TenantSalt(&'a [u8]),
    /// Anything else that an engine distinguishes.
    Other(&'a [u8]),
}

impl<'a> ExtraKey<'a> {
    /// The kind, the part of fixed length and the rest.
    fn fields(self) -> (u8, Option<u32>, &'a [u8]) {
        match self {
            Self::Adapter(value) => (1, None, value),
            Self::Modality { offset, content } => (2, Some(offset), content),
            Self::TenantSalt(value) => (3, None, value),
            Self::Other(value) => (4, None, value),
        }
    }
}

/// How blocks are named. All who share a pool, or exchange hashes, use the same.
///
/// Hashes may be stored and sent: what they are computed from is part of the interface. Numbers
/// are little-endian.
///
/// | hash | of | seed (fast) | domain (keyed) |
/// | --- | --- | --- | --- |
/// | [`chain`](Self::chain) | parent (16 bytes), tokens (4 bytes each) | 0 | 0 |
/// | [`salted`](Self::salted) | the salt | `0x73616c74` | 1 |
/// | [`chain_with`](Self::chain_with), if there are keys | parent, number of tokens (8 bytes), tokens, then for each key its kind (1 byte), the length of its value (8 bytes) and the value | `0x6b657973` | 2 |
///
/// The kinds are 1 for an adapter, 2 for a modality, whose value is the offset (4 bytes) and the
/// content, 3 for a tenant's salt and 4 for others. The fast hash is XXH3 with 128 bits and that
/// seed; the keyed one is SipHash-2-4 with 128 bits, whose first byte of input is the domain. In
/// both, what differs in any field differs in the input: no two fields can run into each other.
///
/// # Examples
///
/// ```
/// use std::num::NonZeroU32;
///
/// use kv_pool::{BlockHash, BlockHasher, ExtraKey};
///
/// // The key is drawn at random when the pool is made, and told to nobody.
/// let hasher = BlockHasher::keyed([7; 16]);
/// let start = hasher.salted(b"tenant 7");
/// let block_tokens = NonZeroU32::new(4).unwrap();
/// let names: Vec<_> = hasher.prefix(start, &[1, 2, 3, 4, 5, 6, 7, 8, 9], block_tokens).collect();
/// assert_eq!(names.len(), 2, "the last block is not full");
///
/// let image = ExtraKey::Modality { offset: 1, content: b"hash of an image" };
/// assert_ne!(hasher.chain_with(start, &[1, 2, 3, 4], &[image]), names[0]);
/// assert_ne!(BlockHash::chain(start, &[1, 2, 3, 4]), names[0], "another hasher, other names");
/// ```
#[derive(Clone, Copy, Default)]
pub struct BlockHasher {
    key: Option<[u8; 16]>,
}

impl BlockHasher {
    /// XXH3: a few nanoseconds a block. Whoever chooses tokens freely can construct two blocks
    /// with one name.
    pub const FAST: Self = Self { key: None };

    /// SipHash-2-4 with a secret key: without it nobody can construct two blocks with one name,
    /// nor tell from a name what was cached. For pools that are shared by tenants who must not
    /// trust each other.
    #[must_use]
    pub const fn keyed(key: [u8; 16]) -> Self {
        Self { key: Some(key) }
    }

    /// A start of a chain of its own.
    #[must_use]
    pub fn salted(&self, salt: &[u8]) -> BlockHash {
        self.hash((SALT_SEED, 1), |put| put(salt))
    }

    /// The hash of a block of `tokens` that follows the block named `parent`.
    #[must_use]
    pub fn chain(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        if self.key.is_none() && tokens.len() <= PIECE_TOKENS {
            // In one piece and on the stack: much faster than a hasher that is fed by and by.
            let mut bytes = [0; PARENT_BYTES + PIECE_TOKENS * TOKEN_BYTES];
            bytes[..PARENT_BYTES].copy_from_slice(&parent.0.to_le_bytes());
            let len = encode(tokens, &mut bytes[PARENT_BYTES..]);
            return BlockHash(xxh3_128(&bytes[..PARENT_BYTES + len]));
        }
        self.hash((0, 0), |put| {
            put(&parent.0.to_le_bytes());
            in_pieces(tokens, put);
        })
    }

    /// Like [`chain`](Self::chain), for a block that depends on more than tokens. The order of the
    /// keys matters; without keys it is [`chain`](Self::chain).
    #[must_use]
    pub fn chain_with(
        &self,
        parent: BlockHash,
        tokens: &[u32],
        keys: &[ExtraKey<'_>],
    ) -> BlockHash {
        if keys.is_empty() {
            return self.chain(parent, tokens);
        }
        self.hash((KEYS_SEED, 2), |put| with_keys(parent, tokens, keys, put))
    }

    /// The hash of what `feed` puts, with the seed of the fast hash and the domain of the keyed one.
    fn hash(
        &self,
        (seed, domain): (u64, u8),
        feed: impl FnOnce(&mut dyn FnMut(&[u8])),
    ) -> BlockHash {
        BlockHash(match self.key {
            None => {
                let mut hasher = Xxh3::with_seed(seed);
                feed(&mut |bytes| hasher.update(bytes));
                hasher.digest128()
            }
            Some(key) => {
                let mut hasher = SipHasher24::new_with_key(&key);
                hasher.write(&[domain]);
                feed(&mut |bytes| hasher.write(bytes));
                let hash = hasher.finish128();
                u128::from(hash.h2) << 64 | u128::from(hash.h1)
            }
        })
    }

    /// The hashes of the full blocks of a sequence, chained from `start`.
    ///
    /// A prompt's last token must be computed for its output, so look a prompt up without it.
    pub fn prefix<'a>(
        &self,
        start: BlockHash,
        tokens: &'a [u32],
        block_tokens: NonZeroU32,
    ) -> impl ExactSizeIterator<Item = BlockHash> + use<'a> {
        let hasher = *self;
        let mut parent = start;
        tokens.chunks_exact(block_tokens.get() as usize).map(move |block| {
            parent = hasher.chain(parent, block);
            parent
        })
    }
}

impl fmt::Debug for BlockHasher {
    /// Without the key, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.key.is_some() { "BlockHasher::keyed(..)" } else { "BlockHasher::FAST" })
    }
}

/// Writes tokens to the front of `bytes`, which is long enough; how many bytes they take.
fn encode(tokens: &[u32], bytes: &mut [u8]) -> usize {
    for (token, bytes) in tokens.iter().zip(bytes.chunks_exact_mut(TOKEN_BYTES)) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    tokens.len() * TOKEN_BYTES
}

fn in_pieces(tokens: &[u32], put: &mut dyn FnMut(&[u8])) {
    let mut bytes = [0; PIECE_TOKENS * TOKEN_BYTES];
    for piece in tokens.chunks(PIECE_TOKENS) {
        let len = encode(piece, &mut bytes);
        put(&bytes[..len]);
    }
}

fn with_keys(parent: BlockHash, tokens: &[u32], keys: &[ExtraKey<'_>], put: &mut dyn FnMut(&[u8])) {
    put(&parent.0.to_le_bytes());
    put(&(tokens.len() as u64).to_le_bytes());
    in_pieces(tokens, put);
    for key in keys {
        let (kind, fixed, value) = key.fields();
        let fixed = fixed.map(u32::to_le_bytes);
        let fixed = fixed.as_ref().map_or(&[][..], |bytes| &bytes[..]);
        put(&[kind]);
        put(&((fixed.len() + value.len()) as u64).to_le_bytes());
        put(fixed);
        put(value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const HASHERS: [BlockHasher; 2] = [BlockHasher::FAST, BlockHasher::keyed([7; 16])];

    #[test]
    fn hashes_do_not_change_between_versions() {
        // Hashes may be stored and sent, so they are part of the interface. The answers are those
        // of other implementations of both hashes, given the bytes that the documentation says.
        let keys = [
            ExtraKey::Adapter(b"a"),
            ExtraKey::Modality { offset: 3, content: b"image" },
            ExtraKey::TenantSalt(b"t"),
            ExtraKey::Other(b""),
        ];
        let root = BlockHash::ROOT;
        let long: Vec<u32> = (0..200).collect();
        let mut key = [0; 16];
        key.iter_mut().zip(0..).for_each(|(byte, value)| *byte = value);
        let answers = [BlockHasher::FAST, BlockHasher::keyed(key)].map(|hasher| {
            [
                hasher.chain(root, &[1, 2, 3]),
                hasher.chain(root, &long),
                hasher.salted(b"tenant 7"),
                hasher.chain_with(root, &[1, 2, 3], &keys),
            ]
            .map(BlockHash::to_u128)
        });
        assert_eq!(answers, KNOWN);
        let keyed = BlockHasher::keyed(key);
        assert_eq!(keyed.chain_with(root, &[1, 2, 3], &[]), keyed.chain(root, &[1, 2, 3]));
        assert_eq!(format!("{keyed:?}"), "BlockHasher::keyed(..)", "the key is a secret");
    }

    const KNOWN: [[u128; 4]; 2] = [
        [
            65_525_807_384_547_430_850_685_627_908_465_599_989,
            234_990_282_670_850_947_548_063_371_778_178_445_966,
            261_016_239_528_431_266_309_188_861_561_281_679_990,
            242_937_130_925_145_544_119_184_677_751_518_548_950,
        ],
        [
            23_683_153_021_888_021_747_542_924_389_596_802_950,
            90_209_502_497_482_656_650_256_621_634_328_850_645,
            264_708_905_077_195_744_961_543_556_311_831_166_601,
            85_925_455_741_338_928_419_941_632_894_776_551_865,
        ],
    ];

    #[test]
    fn blocks_of_any_length_are_hashed_the_same_in_one_piece_and_in_many() {
        let tokens: Vec<u32> = (0..300_u32).map(|token| token.wrapping_mul(0x9E37_79B9)).collect();
        for len in 0..tokens.len() {
            let tokens = &tokens[..len];
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let parent = BlockHash(9);
            for hasher in HASHERS {
                let whole = hasher.hash((0, 0), |put| {
                    put(&parent.0.to_le_bytes());
                    put(&bytes);
                });
                assert_eq!(hasher.chain(parent, tokens), whole, "{len} tokens");
            }
        }
    }

    /// What a careless encoding would write for these fields: everything, one after the other.
    fn run_together(parent: u128, tokens: &[u32], keys: &[ExtraKey<'_>]) -> Vec<u8> {
        let mut bytes = parent.to_le_bytes().to_vec();
        in_pieces(tokens, &mut |piece| bytes.extend(piece));
        for key in keys {
            let (_, fixed, value) = key.fields();
            bytes.extend(fixed.map(u32::to_le_bytes).iter().flatten());
            bytes.extend(value);
        }
        bytes
    }

    /// Inputs in which the same bytes are divided between the fields in other ways.
    fn ambiguous() -> Vec<(u128, Vec<u32>, Vec<ExtraKey<'static>>)> {
        const BYTES: &[u8] = &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0];
        let token = |at: usize| BYTES[4 * at].into();
        let mut inputs = Vec::new();
        for tokens in 0..=3 {
            let rest = &BYTES[4 * tokens..];
            let tokens: Vec<u32> = (0..tokens).map(token).collect();
            let whole: [fn(&'static [u8]) -> ExtraKey<'static>; 3] =
                [ExtraKey::Adapter, ExtraKey::TenantSalt, ExtraKey::Other];
            for kind in whole {
                inputs.push((0, tokens.clone(), vec![kind(rest)]));
                for cut in 0..=rest.len() {
                    for second in whole {
                        let keys = vec![kind(&rest[..cut]), second(&rest[cut..])];
                        inputs.push((0, tokens.clone(), keys));
                    }
                }
            }
            if let Some((offset, content)) = rest.split_first_chunk() {
                let offset = u32::from_le_bytes(*offset);
                inputs.push((0, tokens.clone(), vec![ExtraKey::Modality { offset, content }]));
            }
        }
        inputs.push((0, vec![1, 2, 3], Vec::new()));
        inputs
    }

    #[test]
    fn no_field_runs_into_the_next() {
        let inputs = ambiguous();
        let (parent, tokens, keys) = &inputs[0];
        let same = run_together(*parent, tokens, keys);
        for hasher in HASHERS {
            let mut names = HashMap::new();
            for input in &inputs {
                let (parent, tokens, keys) = input;
                assert_eq!(run_together(*parent, tokens, keys), same, "{input:?}");
                let name = hasher.chain_with(BlockHash(*parent), tokens, keys);
                assert_eq!(names.insert(name, input), None, "{input:?}");
            }
        }
    }
}
