//! Memory under device blocks: mapped ahead of need, or by the call that needs it.

use cuda_vmm::MemoryLimit;
use kv_pool::{BlockPool, ClaimError, TenantError};

use crate::{AdmitError, DemandError, KvCache};

impl KvCache {
    /// Sees to it that `count` blocks are empty, as far as there is memory. Makes a driver call only
    /// if too few are ready.
    pub(crate) fn grow_for(&mut self, count: usize) -> Result<(), AdmitError> {
        self.take_mapped();
        let used = self.stats.ready_blocks.saturating_sub(self.pool.empty() as u64);
        Ok(self.grow_to(used.saturating_add(count as u64))?)
    }

    /// The same for as many blocks as `count` says, which is asked only while the pool can still grow.
    pub(crate) fn grow_if_short(
        &mut self,
        count: impl FnOnce(&BlockPool) -> usize,
    ) -> Result<(), AdmitError> {
        if self.stats.ready_blocks >= self.options.device_blocks.into() {
            return Ok(());
        }
        self.grow_for(count(&self.pool))
    }

    /// After a refusal because blocks are kept for other tenants: makes more, if there can be enough
    /// more; whether it did.
    pub(crate) fn grow_beside_kept(&mut self, error: &ClaimError) -> Result<bool, AdmitError> {
        let &ClaimError::Tenant(TenantError::KeptForOthers { requested, unheld, kept, .. }) = error
        else {
            return Ok(false);
        };
        let before = self.stats.ready_blocks;
        let missing = requested.saturating_add(kept).saturating_sub(unheld);
        self.grow_to(before.saturating_add(missing))?;
        Ok(self.stats.ready_blocks >= before.saturating_add(missing))
    }

    /// Sees to it that the pool has `blocks` blocks with memory, or as many as there can be.
    pub(crate) fn grow_to(&mut self, blocks: u64) -> Result<(), DemandError> {
        self.take_mapped();
        self.heed_limit();
        let ready = self.stats.ready_blocks;
        let most = if self.memory_exhausted { ready } else { self.options.device_blocks.into() };
        let wanted = blocks.min(most);
        for part in &self.parts {
            part.demand(wanted)?;
        }
        if wanted <= ready {
            return Ok(());
        }
        self.stats.growth_stalls += 1;
        // Before the attempt: a move that comes during it is heeded next time.
        self.limit_revision = self.limit_revision();
        let mut reachable = wanted;
        for part in &self.parts {
            let ready = part.grow_towards(reachable)?;
            if ready < reachable {
                self.memory_exhausted = true;
                reachable = ready;
            }
        }
        self.take_mapped();
        if self.memory_exhausted {
            for part in &self.parts {
                part.stop_growing();
                part.demand(self.stats.ready_blocks)?;
            }
        }
        Ok(())
    }

    /// Lets a cache that had run out of memory grow again when the limit was moved since.
    fn heed_limit(&mut self) {
        if self.memory_exhausted && !self.is_exhausted() {
            self.memory_exhausted = false;
            for part in &self.parts {
                part.resume_growing(&self.options.growth);
            }
        }
    }

    /// Whether memory ran out, under the limit that there still is.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.memory_exhausted && self.limit_revision() == self.limit_revision
    }

    fn limit_revision(&self) -> u64 {
        self.options.memory.limit.as_ref().map_or(0, MemoryLimit::revision)
    }

    /// Tells the pool of blocks that have memory by now. Pages hold whole numbers of blocks on no two
    /// devices alike: what all have counts.
    fn take_mapped(&mut self) {
        let mapped = self.mapped_blocks();
        if mapped <= self.stats.ready_blocks {
            return;
        }
        match self.pool.add_primary_slots(mapped) {
            Ok(_) => self.stats.ready_blocks = mapped,
            Err(error) => tracing::error!(%error, "the pool has fewer slots than there is memory"),
        }
    }
}
