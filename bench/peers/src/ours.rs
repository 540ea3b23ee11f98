//! `kv-pool` as a caller uses it: one tier, the default policy, no epochs.

use kv_pool::{BlockHash, BlockPin, BlockPool, ClaimedBlock, Naming, PoolConfig, Registration};

use crate::contender::Contender;

/// `kv-pool` with its default policy.
pub struct Ours {
    pool: BlockPool,
}

/// What follows `parent`, which this pool is told, for its names do not tell it.
#[inline]
fn following(parent: Option<BlockHash>) -> Naming {
    parent.map_or_else(Naming::default, Naming::after)
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
    fn store_one(&self, parent: Option<BlockHash>, hash: BlockHash) -> usize {
        let block = self.pool.claim_one().expect("nothing is held");
        match block.register(hash, following(parent)) {
            Registration::New(pin) => pin.slot().index(),
            Registration::Duplicate { .. } => unreachable!("every name is new"),
        }
    }

    #[inline]
    fn store_one_shortly(&self, parent: Option<BlockHash>, hash: BlockHash) -> usize {
        let block = self.pool.claim_one().expect("nothing is held");
        let slot = block.slot().index();
        block.cache(hash, following(parent));
        slot
    }

    #[inline]
    fn store_batch(&self, hashes: &[BlockHash]) -> usize {
        let mut blocks = self.pool.claim(hashes.len()).expect("there is room");
        let pins = blocks.register(hashes, Naming::default()).expect("a block for each name");
        pins.slots().last().map_or(0, |slot| slot.index())
    }

    #[inline]
    fn hit(&self, hashes: &[BlockHash]) -> usize {
        self.pool.match_prefix(hashes).len()
    }

    fn store_and_hold(&self, parent: Option<BlockHash>, hashes: &[BlockHash]) -> Vec<BlockPin> {
        let mut blocks = self.pool.claim(hashes.len()).expect("there is room");
        let pins = blocks.register(hashes, following(parent)).expect("a block for each name");
        pins.into_iter().collect()
    }

    fn release(&self, pins: Vec<BlockPin>) {
        self.pool.release(pins);
    }

    #[inline]
    fn pin_cheaply(pin: &BlockPin) -> BlockPin {
        pin.clone()
    }

    fn claim(&self) -> ClaimedBlock {
        self.pool.claim_one().expect("not all is held")
    }
}
