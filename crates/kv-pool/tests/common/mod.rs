//! What the tests of the pool share: pools, names and content.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod memory;

use kv_pool::{
    BlockHash, BlockPin, BlockPool, ClaimedBlock, Offload, PoolConfig, Priority, Registration,
};

pub fn pool(primary: u64, secondary: u64) -> BlockPool {
    let config = PoolConfig { secondary_blocks: secondary, ..PoolConfig::primary_only(primary) };
    BlockPool::new(&config).unwrap()
}

pub fn priority(value: u8) -> Priority {
    Priority::new(value).unwrap()
}

/// The name of one content.
pub fn name(content: u32) -> BlockHash {
    BlockHash::chain(BlockHash::ROOT, &[content])
}

pub fn claim(pool: &BlockPool) -> ClaimedBlock {
    pool.claim_one().unwrap()
}

/// Names the content of a claimed block, which nobody has named before.
#[track_caller]
pub fn named(block: ClaimedBlock, content: u32, priority: Priority) -> BlockPin {
    match block.register(name(content), priority) {
        Registration::New(pin) => pin,
        duplicate => panic!("{duplicate:?}"),
    }
}

/// Content in a new block, pinned.
#[track_caller]
pub fn write(pool: &BlockPool, content: u32) -> BlockPin {
    named(claim(pool), content, Priority::DEFAULT)
}

/// Content in a new block that nobody uses any more.
#[track_caller]
pub fn cache(pool: &BlockPool, content: u32, priority: Priority) {
    drop(named(claim(pool), content, priority));
}

/// Claims a block whose content goes to the secondary tier, and begins that.
#[track_caller]
pub fn displace(pool: &BlockPool) -> (ClaimedBlock, Offload) {
    let mut block = claim(pool);
    let offload = block.take_offload().unwrap();
    (block, offload)
}

/// Brings content to the secondary tier of a pool with one primary block, which is free after it.
#[track_caller]
pub fn cache_secondary(pool: &BlockPool, content: u32) {
    cache(pool, content, Priority::DEFAULT);
    let (block, offload) = displace(pool);
    offload.commit();
    drop(block);
}

/// The one content that is cached under this name, pinned.
pub fn find(pool: &BlockPool, content: u32) -> Option<BlockPin> {
    pool.match_prefix(&[name(content)]).pin(0)
}

pub fn checked(pool: &BlockPool) {
    pool.check_integrity().unwrap();
}
