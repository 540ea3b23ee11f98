//! `kv-pool` as a caller uses it: one tier, the default policy, no epochs.

use kv_pool::{BlockHash, BlockPool, Claimed, Naming, Pinned, PoolConfig};

use crate::contender::Contender;

/// `kv-pool` with its default policy.
pub struct Ours {
    pool: BlockPool,
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
        Self { pool }
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
