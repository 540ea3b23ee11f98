//! What the tests of the pool share: pools, names and content.

#![allow(dead_code, unused_imports, unreachable_pub, reason = "each test program uses a part")]

pub mod memory;
pub mod one;

pub use self::one::{Moved, One, OneClaimed, OneMove, Registration};
use kv_pool::{BlockHash, BlockPool, Claimed, Pinned, PoolConfig, Priority, moves::Offload};

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

pub fn claim(pool: &BlockPool) -> Claimed {
    pool.claim_one().unwrap()
}

/// Names the content of a claimed block, which nobody has named before.
#[track_caller]
pub fn named(block: Claimed, content: u32, priority: Priority) -> Pinned {
    match block.register_one(name(content), priority) {
        Registration::New(pin) => pin,
        duplicate => panic!("{duplicate:?}"),
    }
}

/// Content in a new block, pinned.
#[track_caller]
pub fn write(pool: &BlockPool, content: u32) -> Pinned {
    named(claim(pool), content, Priority::DEFAULT)
}

/// Content in a new block that nobody uses any more.
#[track_caller]
pub fn cache(pool: &BlockPool, content: u32, priority: Priority) {
    drop(named(claim(pool), content, priority));
}

/// Claims a block whose content goes to the secondary tier, and begins that.
#[track_caller]
pub fn displace(pool: &BlockPool) -> (Claimed, Offload) {
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
pub fn find(pool: &BlockPool, content: u32) -> Option<Pinned> {
    pool.match_prefix(&[name(content)]).pin(0)
}

pub fn checked(pool: &BlockPool) {
    pool.check_integrity().unwrap();
}
