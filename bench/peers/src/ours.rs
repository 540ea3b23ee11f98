//! `kv-pool` as a caller uses it: one tier, the default policy, no epochs.

use std::num::NonZeroUsize;

use kv_pool::{
    BlockHash, BlockPool, Claimed, Naming, Pinned, PoolConfig, ShardedPool,
};

use crate::contender::Contender;

/// Shards of a pool that is meant for many threads.
const SHARDS: NonZeroUsize = NonZeroUsize::new(32).unwrap();

/// `kv-pool` with its default policy.
pub struct Ours {
    pool: BlockPool,
    /// Used instead, where a chain's root is known.
    shards: Option<ShardedPool>,
}

impl Ours {
    /// The shard of a chain, or the pool.
    #[inline]
    fn of(&self, root: u64) -> &BlockPool {
        match &self.shards {
            Some(shards) => shards.shard(BlockHash::from_u128(root.into())),
            None => &self.pool,
        }
    }
}

#[inline]
fn store_one(pool: &BlockPool, parent: Option<BlockHash>, hash: BlockHash) -> usize {
    let mut block = pool.claim_one().expect("nothing is held");
    let pins = block.register(&[hash], following(parent)).expect("a block for the name");
    pins.ids().next().map_or(0, |id| id.index())
}

#[inline]
fn store_batch(pool: &BlockPool, hashes: &[BlockHash]) -> usize {
    let mut blocks = pool.claim(hashes.len()).expect("there is room");
    let pins = blocks.register(hashes, Naming::default()).expect("a block for each name");
    pins.ids().last().map_or(0, |id| id.index())
}

/// What follows `parent`, which this pool is told, for its names do not tell it.
#[inline]
fn following(parent: Option<BlockHash>) -> Naming {
    parent.map_or_else(Naming::default, Naming::after)
}

impl Contender for Ours {
    const NAME: &'static str = "kv-pool";
    type Hash = BlockHash;
    type Pin = Pinned;
    type CheapPin = Pinned;
    type Claim = Claimed;

    fn with_blocks(blocks: usize) -> Self {
        let config = PoolConfig::primary_only(blocks as u64);
        let pool = BlockPool::new(&config).expect("the configuration is valid");
        Self { pool, shards: None }
    }

    fn for_threads(blocks: usize) -> Self {
        let config = PoolConfig::primary_only(blocks as u64);
        let shards = ShardedPool::new(&config, SHARDS).expect("the configuration is valid");
        Self { shards: Some(shards), ..Self::with_blocks(1) }
    }

    #[inline]
    fn hash(own: u64, _parent: u64, _position: usize) -> BlockHash {
        let high = own.wrapping_mul(0xd6e8_feb8_6659_fd93);
        BlockHash::from_u128(u128::from(high) << 64 | u128::from(own))
    }

    #[inline]
    fn store_one(&self, parent: Option<BlockHash>, hash: BlockHash) -> usize {
        store_one(&self.pool, parent, hash)
    }

    #[inline]
    fn store_one_of(&self, root: u64, parent: Option<BlockHash>, hash: BlockHash) -> usize {
        store_one(self.of(root), parent, hash)
    }

    #[inline]
    fn store_one_shortly(&self, parent: Option<BlockHash>, hash: BlockHash) -> usize {
        let block = self.pool.claim_one().expect("nothing is held");
        let id = block.ids().next().map_or(0, |id| id.index());
        block.cache(&[hash], following(parent)).expect("a block for the name");
        id
    }

    #[inline]
    fn store_batch(&self, hashes: &[BlockHash]) -> usize {
        store_batch(&self.pool, hashes)
    }

    #[inline]
    fn store_batch_of(&self, root: u64, hashes: &[BlockHash]) -> usize {
        store_batch(self.of(root), hashes)
    }

    #[inline]
    fn hit_of(&self, root: u64, hashes: &[BlockHash]) -> usize {
        self.of(root).match_prefix(hashes).len()
    }

    #[inline]
    fn hit(&self, hashes: &[BlockHash]) -> usize {
        self.pool.match_prefix(hashes).len()
    }

    fn store_and_hold(&self, parent: Option<BlockHash>, hashes: &[BlockHash]) -> Vec<Pinned> {
        let mut blocks = self.pool.claim(hashes.len()).expect("there is room");
        let pins = blocks.register(hashes, following(parent)).expect("a block for each name");
        pins.into_iter().collect()
    }

    fn release(&self, pins: Vec<Pinned>) {
        self.pool.release(pins);
    }

    #[inline]
    fn pin_cheaply(pin: &Pinned) -> Pinned {
        pin.clone()
    }

    fn claim(&self) -> Claimed {
        self.pool.claim_one().expect("not all is held")
    }
}
