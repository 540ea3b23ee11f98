//! What each pool is asked to do, and the content names that all of them are given.

/// Blocks of one chain of the workload: a cached prefix.
pub const CHAIN: usize = 64;

/// A pool under test. Each operation is written the way that pool's documentation shows it.
pub trait Contender: Send + Sync + Sized + 'static {
    /// How reports call it.
    const NAME: &'static str;
    /// The name of a block's content.
    type Hash: Copy + Send + Sync + 'static;
    /// A reference that keeps cached content from being evicted.
    type Pin: Clone + Send + Sync + 'static;
    /// The cheapest further reference to what is pinned already.
    type CheapPin;
    /// An allocated block without content.
    type Claim;

    /// A pool of `blocks` empty blocks.
    fn with_blocks(blocks: usize) -> Self;

    /// The name of a block at `position` of its chain; `own` and `parent` are 64-bit hashes.
    fn hash(own: u64, parent: u64, position: usize) -> Self::Hash;

    /// Allocates one block, evicting if there is no empty one, registers it under `hash` as what
    /// follows `parent` and releases it. Returns the block's number.
    fn store_one(&self, parent: Option<Self::Hash>, hash: Self::Hash) -> usize;

    /// The same by the fewest calls that the pool has for it.
    #[inline]
    fn store_one_shortly(&self, parent: Option<Self::Hash>, hash: Self::Hash) -> usize {
        self.store_one(parent, hash)
    }

    /// The same as [`store_one`](Self::store_one) for a batch of consecutive blocks, the first of a chain. Returns the last's number.
    fn store_batch(&self, hashes: &[Self::Hash]) -> usize;

    /// Looks up the longest cached prefix of `hashes`, holds it and releases it. Returns its length.
    fn hit(&self, hashes: &[Self::Hash]) -> usize;

    /// Allocates and registers consecutive blocks that follow `parent`, and keeps them.
    fn store_and_hold(&self, parent: Option<Self::Hash>, hashes: &[Self::Hash]) -> Vec<Self::Pin>;

    /// Releases what was held, as the blocks of one request.
    fn release(&self, pins: Vec<Self::Pin>);

    /// A further reference, of the cheapest kind that the pool offers.
    fn pin_cheaply(pin: &Self::Pin) -> Self::CheapPin;

    /// Allocates one block and keeps it; in a full pool this evicts one.
    fn claim(&self) -> Self::Claim;
}

/// The hash of block `n` of stream `stream`: the same numbers for every contender.
#[must_use]
#[inline]
pub const fn own_hash(stream: u64, n: u64) -> u64 {
    let mut z = (stream << 40).wrapping_add(n).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The name of block `n` of a stream whose blocks form chains of [`CHAIN`].
#[must_use]
#[inline]
pub fn name<C: Contender>(stream: u64, n: u64) -> C::Hash {
    let position = n as usize % CHAIN;
    let parent = if position == 0 { 0 } else { own_hash(stream, n - 1) };
    C::hash(own_hash(stream, n), parent, position)
}

/// The name of the block before block `n` in its chain, if there is one.
#[must_use]
#[inline]
pub fn parent<C: Contender>(stream: u64, n: u64) -> Option<C::Hash> {
    (!n.is_multiple_of(CHAIN as u64)).then(|| name::<C>(stream, n - 1))
}

/// The names of the chain number `chain` of a stream.
#[must_use]
#[inline]
pub fn chain<C: Contender>(stream: u64, chain: u64) -> [C::Hash; CHAIN] {
    let first = chain * CHAIN as u64;
    std::array::from_fn(|position| name::<C>(stream, first + position as u64))
}
