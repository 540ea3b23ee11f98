//! The peer: `kvbm-logical`, with its LRU backend and with the backend that it uses by default.

use std::marker::PhantomData;

use kvbm_logical::manager::BlockManagerConfigBuilder;
use kvbm_logical::{
    BlockManager, BlockRegistry, ImmutableBlock, LifecyclePinRef, MutableBlock, SequenceHash,
};

use crate::contender::Contender;

const BLOCK_TOKENS: usize = 16;

/// The tier marker that the peer asks for.
#[derive(Clone)]
pub struct Marker;

/// Which backend keeps the blocks that nobody holds.
pub trait Backend: Send + Sync + 'static {
    /// How reports call the peer with this backend.
    const NAME: &'static str;
    /// Chooses the backend.
    fn choose(builder: BlockManagerConfigBuilder<Marker>) -> BlockManagerConfigBuilder<Marker>;
}

/// Least recently used first.
pub struct Lru;

impl Backend for Lru {
    const NAME: &'static str = "kvbm LRU";

    fn choose(builder: BlockManagerConfigBuilder<Marker>) -> BlockManagerConfigBuilder<Marker> {
        builder.with_lru_backend()
    }
}

/// The backend of a manager that is told nothing: leaves of the lineage first.
pub struct Default;

impl Backend for Default {
    const NAME: &'static str = "kvbm default";

    fn choose(builder: BlockManagerConfigBuilder<Marker>) -> BlockManagerConfigBuilder<Marker> {
        builder
    }
}

/// The peer with one of its backends.
pub struct Kvbm<B> {
    manager: BlockManager<Marker>,
    backend: PhantomData<B>,
}

impl<B: Backend> Contender for Kvbm<B> {
    const NAME: &'static str = B::NAME;
    type Hash = SequenceHash;
    type Pin = ImmutableBlock<Marker>;
    type CheapPin = LifecyclePinRef;
    type Claim = MutableBlock<Marker>;

    fn with_blocks(blocks: usize) -> Self {
        let builder = BlockManager::<Marker>::builder()
            .block_count(blocks)
            .block_size(BLOCK_TOKENS)
            .registry(BlockRegistry::builder().build());
        let manager = B::choose(builder).build().expect("the configuration is valid");
        Self { manager, backend: PhantomData }
    }

    #[inline]
    fn hash(own: u64, parent: u64, position: usize) -> SequenceHash {
        SequenceHash::new(own, (position > 0).then_some(parent), position as u64)
    }

    // A name of this pool tells its parent.
    #[inline]
    fn store_one(&self, _parent: Option<SequenceHash>, hash: SequenceHash) -> usize {
        let mut blocks = self.manager.allocate_blocks(1).expect("nothing is held");
        let block = blocks.pop().expect("one was asked for");
        let complete = block.stage(hash, BLOCK_TOKENS).expect("the size is the manager's");
        self.manager.register_block(complete).block_id()
    }

    #[inline]
    fn store_batch(&self, hashes: &[SequenceHash]) -> usize {
        let pins = self.store_and_hold(None, hashes);
        pins.last().map_or(0, ImmutableBlock::block_id)
    }

    #[inline]
    fn hit(&self, hashes: &[SequenceHash]) -> usize {
        self.manager.match_blocks(hashes).len()
    }

    fn store_and_hold(
        &self,
        _parent: Option<SequenceHash>,
        hashes: &[SequenceHash],
    ) -> Vec<Self::Pin> {
        let blocks = self.manager.allocate_blocks(hashes.len()).expect("there is room");
        let complete = blocks
            .into_iter()
            .zip(hashes)
            .map(|(block, &hash)| block.stage(hash, BLOCK_TOKENS).expect("the manager's size"))
            .collect();
        self.manager.register_blocks(complete)
    }

    fn release(&self, pins: Vec<Self::Pin>) {
        drop(pins);
    }

    #[inline]
    fn pin_cheaply(pin: &Self::Pin) -> LifecyclePinRef {
        pin.pin()
    }

    fn claim(&self) -> Self::Claim {
        let mut blocks = self.manager.allocate_blocks(1).expect("not all is held");
        blocks.pop().expect("one was asked for")
    }
}
