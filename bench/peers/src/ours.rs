//! `kv-pool` as a caller uses it: one tier, the default policy, no epochs.

use kv_pool::{BlockHash, BlockPin, BlockPool, ClaimedBlock, PoolConfig, Priority, Registration};

use crate::contender::Contender;

/// `kv-pool` with its default policy.
pub struct Ours {
    pool: BlockPool,
}

fn named(block: ClaimedBlock, hash: BlockHash) -> BlockPin {
    match block.register(hash, Priority::DEFAULT) {
        Registration::New(pin) => pin,
        Registration::Duplicate { existing, .. } => existing,
    }
}

impl Contender for Ours {
    const NAME: &'static str = "kv-pool";
    type Hash = BlockHash;
    type Pin = BlockPin;
    type CheapPin = BlockPin;
    type Claim = ClaimedBlock;

    fn with_blocks(blocks: usize) -> Self {
        let config = PoolConfig::primary_only(blocks as u64);
        Self { pool: BlockPool::new(&config).expect("the configuration is valid") }
    }

    #[inline]
    fn hash(own: u64, _parent: u64, _position: usize) -> BlockHash {
        let high = own.wrapping_mul(0xd6e8_feb8_6659_fd93);
        BlockHash::from_u128(u128::from(high) << 64 | u128::from(own))
    }

    #[inline]
    fn store_one(&self, _parent: Option<BlockHash>, hash: BlockHash) -> usize {
        let block = self.pool.claim(1).expect("nothing is held").remove(0);
        named(block, hash).slot().index()
    }

    #[inline]
    fn store_batch(&self, hashes: &[BlockHash]) -> usize {
        let pins = self.store_and_hold(None, hashes);
        let last = pins.last().map_or(0, |pin| pin.slot().index());
        self.pool.release(pins);
        last
    }

    #[inline]
    fn hit(&self, hashes: &[BlockHash]) -> usize {
        let pins = self.pool.match_prefix(hashes);
        let found = pins.len();
        self.pool.release(pins);
        found
    }

    fn store_and_hold(&self, _parent: Option<BlockHash>, hashes: &[BlockHash]) -> Vec<BlockPin> {
        let blocks = self.pool.claim(hashes.len()).expect("there is room");
        blocks.into_iter().zip(hashes).map(|(block, &hash)| named(block, hash)).collect()
    }

    fn release(&self, pins: Vec<BlockPin>) {
        self.pool.release(pins);
    }

    #[inline]
    fn pin_cheaply(pin: &BlockPin) -> BlockPin {
        pin.clone()
    }

    fn claim(&self) -> ClaimedBlock {
        self.pool.claim(1).expect("not all is held").remove(0)
    }
}
