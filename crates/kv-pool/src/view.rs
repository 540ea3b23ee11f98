//! What may be asked of a pool that somebody else runs.

use std::time::Duration;

use crate::{
    BlockHash, BlockPool, EventReader, EvictionAges, IntegrityError, Pinned, PoolCounters,
    PoolSnapshot, PoolStats, TenantCounts, TenantError, TenantId, TenantQuota, Tier,
};

/// A view of a pool that belongs to another owner, such as a cache: statistics, events, and lookups that
/// pin what they find. Clones are views of the same pool.
///
/// Nothing can be claimed, named, removed or given back through a view, no epoch begun or completed and
/// no memory added: what the owner has in use stays in use. A pin that was taken through a view keeps its
/// blocks from being evicted, as every pin does, until it is dropped.
///
/// ```compile_fail,E0599
/// use kv_pool::{BlockPool, PoolConfig};
///
/// let pool = BlockPool::new(&PoolConfig::primary_only(8))?;
/// let view = pool.view();
/// let epoch = view.begin_epoch();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```compile_fail,E0308
/// use kv_pool::{BlockPool, PoolConfig, PoolView};
///
/// fn pool_of(view: &PoolView) -> &BlockPool {
///     view
/// }
/// ```
#[derive(Clone, Debug)]
pub struct PoolView {
    pool: BlockPool,
}

impl BlockPool {
    /// A view for those who may look at this pool and not change it.
    #[must_use]
    pub fn view(&self) -> PoolView {
        PoolView { pool: self.clone() }
    }
}

impl PoolView {
    /// [`BlockPool::match_prefix`].
    #[must_use]
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> Pinned {
        self.pool.match_prefix(hashes)
    }

    /// [`BlockPool::find_and_pin`].
    #[must_use]
    pub fn find_and_pin(&self, hash: BlockHash, tier: Tier) -> Option<Pinned> {
        self.pool.find_and_pin(hash, tier)
    }

    /// [`BlockPool::claimable`].
    #[must_use]
    pub fn claimable(&self) -> usize {
        self.pool.claimable()
    }

    /// [`BlockPool::empty`].
    #[must_use]
    pub fn empty(&self) -> usize {
        self.pool.empty()
    }

    /// [`BlockPool::stats`].
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// [`BlockPool::counters`].
    #[must_use]
    pub fn counters(&self) -> PoolCounters {
        self.pool.counters()
    }

    /// [`BlockPool::eviction_ages`].
    #[must_use]
    pub fn eviction_ages(&self) -> EvictionAges {
        self.pool.eviction_ages()
    }

    /// [`BlockPool::next_expiry`].
    #[must_use]
    pub fn next_expiry(&self) -> Option<Duration> {
        self.pool.next_expiry()
    }

    /// [`BlockPool::loans`].
    #[must_use]
    pub fn loans(&self) -> usize {
        self.pool.loans()
    }

    /// [`BlockPool::snapshot`].
    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        self.pool.snapshot()
    }

    /// [`BlockPool::events`].
    #[must_use]
    pub fn events(&self) -> Option<EventReader> {
        self.pool.events()
    }

    /// [`BlockPool::quota`].
    ///
    /// # Errors
    /// As there.
    pub fn quota(&self, tenant: TenantId, tier: Tier) -> Result<TenantQuota, TenantError> {
        self.pool.quota(tenant, tier)
    }

    /// [`BlockPool::tenant_counts`].
    ///
    /// # Errors
    /// As there.
    pub fn tenant_counts(&self, tenant: TenantId, tier: Tier) -> Result<TenantCounts, TenantError> {
        self.pool.tenant_counts(tenant, tier)
    }

    /// [`BlockPool::check_integrity`].
    ///
    /// # Errors
    /// As there.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        self.pool.check_integrity()
    }

    /// [`BlockPool::sabotage_peek_then_claim`], for tests of the owner.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_peek_then_claim(&self) {
        self.pool.sabotage_peek_then_claim();
    }
}
