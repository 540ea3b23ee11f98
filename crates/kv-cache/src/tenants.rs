//! Tenants, with their own block counts and bounds.

use kv_pool::{
    Tier,
    tenants::{TenantError, TenantId, TenantQuota},
};

use crate::{KvCache, QuotaError};

impl KvCache {
    /// Adds a tenant, with its own block counts and at first without bounds. Requests name it as
    /// [`Request::tenant`](crate::Request::tenant); counts are those of the [pool](KvCache::pool).
    ///
    /// # Errors
    /// [`TenantError::TooMany`].
    pub fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        self.pool.add_tenant()
    }

    /// Bounds the blocks that a tenant may hold and have cached in one tier, and reserves blocks
    /// for it. Reserved device blocks get their memory now.
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
