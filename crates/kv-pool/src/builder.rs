//! A pool with more than the usual: a clock of the caller's, a log of events, other policies.

use crate::clock::{Clock, SystemClock};
use crate::policy::EvictionPolicy;
use crate::state::{PoolState, Watch};
use crate::store::StorePolicy;
use crate::{BlockPool, ConfigError, PoolConfig, Tier};

/// Puts a [`BlockPool`] together; see [`BlockPool::builder`].
#[derive(Debug)]
#[must_use = "a builder does nothing before build is called"]
pub struct PoolBuilder {
    config: PoolConfig,
    clock: Box<dyn Clock>,
    events: Option<usize>,
    policies: [Option<Box<dyn EvictionPolicy>>; Tier::COUNT],
    store: Option<Box<dyn StorePolicy>>,
    granules: [Option<u32>; Tier::COUNT],
}

impl PoolBuilder {
    /// The clock that durations and deadlines are measured by, instead of the system's.
    pub fn clock(self, clock: impl Clock + 'static) -> Self {
        Self { clock: Box::new(clock), ..self }
    }

    /// Keeps the latest `capacity` events for [readers](crate::PoolView::events), rounded up to a power of
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

    /// Lets `policy` decide which evicted content of the configured
    /// [priority](PoolConfig::offload_min_priority) moves to the secondary tier. Without one, all of it does.
    pub fn store_policy(self, policy: Box<dyn StorePolicy>) -> Self {
        Self { store: Some(policy), ..self }
    }

    /// Divides a tier into granules of `blocks` block ids each, the last of which may have fewer. The tier
    /// begins without any, and is [given](BlockPool::grant) its memory granule by granule.
    pub fn granules(mut self, tier: Tier, blocks: u32) -> Self {
        self.granules[tier.index()] = Some(blocks);
        self
    }

    /// A pool in which no block has content.
    ///
    /// # Errors
    /// [`ConfigError`] names the number that cannot be.
    pub fn build(self) -> Result<BlockPool, ConfigError> {
        let Self { config, clock, events, policies, store, granules } = self;
        config.check()?;
        let divided = || Tier::ALL.into_iter().zip(granules);
        if let Some((tier, _)) = divided().find(|(_, granules)| *granules == Some(0)) {
            return Err(ConfigError::EmptyGranules { tier });
        }
        let blocks = config.blocks().iter().sum::<u64>();
        let refused = |_| ConfigError::OutOfMemory { blocks };
        let watch = Watch::new(clock, events, policies, store, blocks as usize).map_err(refused)?;
        let mut state = PoolState::new(&config, watch).map_err(refused)?;
        for (tier, blocks) in divided().filter_map(|(tier, blocks)| Some((tier, blocks?))) {
            state.divide(tier, blocks).map_err(refused)?;
        }
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
            store: None,
            granules: [None; Tier::COUNT],
        }
    }
}
