//! What is worth storing in a tier below: a trait, and a rule that learns it.
//!
//! A pool asks a [`StorePolicy`] before evicted content moves to host memory. `kv-manager` asks the same trait before
//! content is stored below host memory. Content that is not stored is dropped.
//!
//! | implementation | stores |
//! | --- | --- |
//! | [`StoreAll`] | everything; a pool without a policy does the same, at no cost |
//! | [`StoreByEvidence`] | what is likely to be asked for again while the tier has it, if that saves more than a store costs |
//!
//! [`StoreKind`] names them for configurations.
//!
//! ```
//! use kv_pool::store::{StoreByEvidence, StoreRules};
//! use kv_pool::{BlockPool, PoolConfig};
//!
//! let config = PoolConfig { secondary_blocks: 512, ..PoolConfig::primary_only(64) };
//! let policy = StoreByEvidence::new(StoreRules::new(512))?;
//! let pool = BlockPool::builder(&config).store_policy(Box::new(policy)).build()?;
//! assert_eq!(pool.stats().counters.refused, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod evidence;
mod kind;

use std::fmt;

pub use evidence::{StoreByEvidence, StoreRules};
pub use kind::StoreKind;

use crate::{BlockHash, Priority, Tier};

/// Content that is about to leave a tier, or that could be stored in one further below.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Its name.
    pub name: BlockHash,
    /// Blocks before it in its chain: 0 for the first block of a prompt.
    pub depth: u32,
    /// How often a lookup found it since it was computed.
    pub found: u32,
    /// How often a lookup found the block before it; 0 if that is not cached.
    pub parent_found: u32,
    /// Whether blocks that follow it are cached, in any tier. They cannot be found without it.
    pub followed: bool,
    /// Its priority.
    pub priority: Priority,
    /// Milliseconds of the pool's clock.
    pub now_ms: u64,
}

/// Decides what is stored in a tier below.
///
/// A pool calls it under its lock: no operation may block, or take time that grows with the number of blocks, other
/// than amortised. One that panics is called no more, and everything is stored from then on; the pool counts a
/// [policy fault](crate::stats::PoolCounters::policy_faults).
pub trait StorePolicy: fmt::Debug + Send {
    /// The name that reports give the policy, such as `evidence`.
    fn name(&self) -> &'static str;

    /// Whether content is to be stored in a tier.
    fn stores(&mut self, tier: Tier, content: &Candidate) -> bool;

    /// A request uses content of this name: a lookup has found it, or it was computed, for the first time or again.
    /// 1 if it was [refused](Self::stores) before, and the tier would have it still had it been stored: a regret. More
    /// if the policy remembers a sample, of which each name stands for so many.
    fn used(&mut self, name: BlockHash) -> u32 {
        let _ = name;
        0
    }
}

/// Stores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreAll;

impl StorePolicy for StoreAll {
    fn name(&self) -> &'static str {
        StoreKind::All.name()
    }

    fn stores(&mut self, _: Tier, _: &Candidate) -> bool {
        true
    }
}
