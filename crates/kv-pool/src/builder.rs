//! A pool with more than the usual: a clock of the caller's, a log of events, other policies.

use crate::clock::{Clock, SystemClock};
use crate::policy::EvictionPolicy;
use crate::state::{BlockIds, PoolState, Watch};
use crate::{BlockPool, ConfigError, PoolConfig, Tier};

/// Puts a [`BlockPool`] together; see [`BlockPool::builder`].
#[derive(Debug)]
#[must_use = "a builder does nothing before build is called"]
pub struct PoolBuilder {
    config: PoolConfig,
    clock: Box<dyn Clock>,
    events: Option<usize>,
    policies: [Option<Box<dyn EvictionPolicy>>; Tier::COUNT],
    ids: BlockIds,
}

impl PoolBuilder {
    /// Numbers the block ids of every tier in steps of `step`, from `first` on.
    pub(crate) fn every_id(self, step: u32, first: u32) -> Self {
        Self { ids: BlockIds { step, first }, ..self }
    }

    /// The clock that durations and deadlines are measured by, instead of the system's.
    pub fn clock(self, clock: impl Clock + 'static) -> Self {
        Self { clock: Box::new(clock), ..self }
    }

    /// Keeps the latest `capacity` events for [readers](BlockPool::events), rounded up to a power of
    /// two. Without this there are none.
    pub fn events(self, capacity: usize) -> Self {
        Self { events: Some(capacity), ..self }
    }

    /// Lets `policy` choose the victims of a tier, instead of priority LRU. It must have been made
    /// for as many blocks as the pool has in all tiers: one that knows fewer is called no more once it
    /// has lost one.
    pub fn policy(mut self, tier: Tier, policy: Box<dyn EvictionPolicy>) -> Self {
        self.policies[tier.index()] = Some(policy);
        self
    }

    /// A pool in which no block has content.
    ///
    /// # Errors
    /// [`ConfigError`] names the number that cannot be.
    pub fn build(self) -> Result<BlockPool, ConfigError> {
        let Self { config, clock, events, policies, ids } = self;
        config.check()?;
        let blocks = config.blocks().iter().sum::<u64>();
        let refused = |_| ConfigError::OutOfMemory { blocks };
        let watch = Watch::new(clock, events, policies, blocks as usize).map_err(refused)?;
        let state = PoolState::new(&config, watch, ids).map_err(refused)?;
        Ok(BlockPool::with_state(&config, state))
    }
}

impl BlockPool {
    /// Begins to put a pool together that has more than [`new`](BlockPool::new) gives it.
    pub fn builder(config: &PoolConfig) -> PoolBuilder {
        PoolBuilder {
            config: config.clone(),
            clock: Box::new(SystemClock::new()),
            events: None,
            policies: [const { None }; Tier::COUNT],
            ids: BlockIds::ALL,
        }
    }
}
