//! What the tests of the pool share: pools, names and content.

#![allow(dead_code, unused_imports, unreachable_pub, reason = "each test program uses a part")]

pub mod memory;
pub mod mirror;
pub mod one;
pub mod order;
pub mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use self::one::{Moved, One, OneClaimed, OneMove, Registration};
pub use self::order::Order;
use kv_pool::clock::{Clock, ManualClock};
use kv_pool::policy::PolicyKind;
use kv_pool::{
    BlockHash, BlockPool, Claimed, Pinned, PoolBuilder, PoolConfig, Priority, Tier, moves::Offload,
};

/// A clock that is moved by hand and counts how often it is read.
#[derive(Clone, Debug, Default)]
pub struct CountedClock {
    hand: ManualClock,
    reads: Arc<AtomicU64>,
}

impl CountedClock {
    pub fn advance(&self, by: Duration) {
        self.hand.advance(by);
    }

    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Clock for CountedClock {
    fn now(&self) -> Duration {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.hand.now()
    }
}

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

/// The name that lookups find the block of a list of one by.
pub fn name_of(pool: &BlockPool, pin: &Pinned) -> Option<BlockHash> {
    let blocks = pool.snapshot().blocks;
    blocks.into_iter().find(|view| view.block == pin.block())?.hash
}

/// A pool with the policy of a kind, if it is one.
pub fn with_policy(builder: PoolBuilder, tier: Tier, kind: PolicyKind, blocks: u64) -> PoolBuilder {
    match kind.make(blocks).unwrap() {
        Some(policy) => builder.policy(tier, policy),
        None => builder,
    }
}
