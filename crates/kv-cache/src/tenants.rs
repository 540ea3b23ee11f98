//! Tenants: who may hold how many of the cache's blocks.

use kv_pool::{TenantError, TenantId, TenantQuota, Tier};

use crate::{KvCache, QuotaError};

impl KvCache {
    /// Counts one more tenant apart, at first without bounds. Requests name it as
    /// [`Request::tenant`](crate::Request::tenant); counts are those of the [pool](KvCache::pool).
    ///
    /// # Errors
    /// [`TenantError::TooMany`].
    pub fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        self.pool.add_tenant()
    }

    /// Bounds what a tenant may hold and keep cached in one tier, and keeps blocks for it. Blocks on
    /// the device that are kept get their memory now, so that what is promised is there.
    ///
    /// # Errors
    /// [`QuotaError`]; the quota is then as it was.
    pub fn set_quota(
        &mut self,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), QuotaError> {
        match self.pool.set_quota(tenant, tier, quota) {
            Err(TenantError::OverReserved { reserved, .. })
                if tier == Tier::Primary && reserved <= self.options.device_blocks.into() =>
            {
                self.grow_to(reserved)?;
                Ok(self.pool.set_quota(tenant, tier, quota)?)
            }
            set => Ok(set?),
        }
    }
}
