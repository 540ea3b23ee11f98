//! Memory under device blocks: mapped ahead of need, or by the call that needs it.

use cuda_vmm::limit::LimitStats;
use cuda_vmm::{GrowError, MemoryLimit};
use kv_pool::{ClaimError, Tier, tenants::TenantError};

use crate::part::Part;
use crate::{AdmitError, DemandError, KvCache};

/// Most calls without memory between two that ask for it again.
const PAUSE_CALLS_MAX: u32 = 1024;

/// Memory has run out. It may come back unannounced: another user of the device frees memory, or a
/// limit has room again.
///
/// Every call that lacks memory looks at the limit. The device is asked less often, because a
/// refusal is a driver call on the step's path: by the first such call, and after each refusal only
/// after twice as many calls as before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shortage {
    /// The limit when memory was asked for last.
    limit: Option<LimitStats>,
    /// Calls that lack memory until one asks the device, whatever the limit says.
    calls_left: u32,
    /// The value at which `calls_left` began.
    pause_calls: u32,
}

impl Shortage {
    /// A refusal under `limit`. `before` is the refusal before it, if no memory came since.
    fn after(before: Option<Self>, limit: Option<LimitStats>) -> Self {
        let pause_calls =
            before.map_or(1, |before| before.pause_calls.saturating_mul(2).min(PAUSE_CALLS_MAX));
        Self { limit, calls_left: pause_calls, pause_calls }
    }

    /// Counts a call that lacks memory, and says whether it is to ask for memory.
    fn is_over(&mut self, now: Option<LimitStats>) -> bool {
        self.calls_left = self.calls_left.saturating_sub(1);
        let has_room = self.limit.zip(now).is_some_and(|(then, now)| {
            now.revision != then.revision || now.used_bytes < then.used_bytes
        });
        has_room || self.calls_left == 0
    }
}

impl KvCache {
    /// Makes `count` blocks empty, as far as there is memory. Calls the driver only if too few
    /// blocks are ready.
    pub(crate) fn grow_for(&mut self, count: usize) -> Result<(), AdmitError> {
        self.take_mapped();
        let used = self.stats.ready_blocks.saturating_sub(self.pool.empty() as u64);
        Ok(self.grow_to(used.saturating_add(count as u64))?)
    }

    /// Whether there are device blocks without memory.
    pub(crate) fn can_grow(&self) -> bool {
        self.stats.ready_blocks < self.options.device_blocks.into()
    }

    /// After a refusal because of other tenants' reserved blocks: makes enough more blocks ready,
    /// and says whether it could.
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

    /// Grows the pool to `blocks` blocks with memory, or as many as there can be.
    pub(crate) fn grow_to(&mut self, blocks: u64) -> Result<(), DemandError> {
        self.take_mapped();
        let ready = self.stats.ready_blocks;
        let mut wanted = blocks.min(self.options.device_blocks.into());
        let limit = self.limit_now();
        if wanted > ready && self.shortage.as_mut().is_some_and(|short| !short.is_over(limit)) {
            wanted = ready;
        }
        // A worker with a larger demand may take the shared memory for one device.
        let told = if self.shares_a_limit() { wanted.min(ready) } else { wanted };
        for part in &self.parts {
            part.demand(told)?;
        }
        if wanted <= ready {
            return Ok(());
        }
        self.stats.growth_stalls += 1;
        let mut reached = wanted;
        if self.shortage.is_some() {
            // Ask for one block first: a search would be refused many times.
            reached = self.grow_parts(ready + 1)?;
        }
        if reached > ready {
            reached = self.grow_parts(wanted)?;
        }
        self.take_mapped();
        if reached < wanted {
            let before = self.shortage.filter(|_| reached <= ready);
            self.shortage = Some(Shortage::after(before, limit));
            for part in &self.parts {
                part.stop_growing();
                part.demand(self.stats.ready_blocks)?;
            }
        } else if self.shortage.take().is_some() {
            for part in &self.parts {
                part.resume_growing(&self.options.growth);
            }
        }
        Ok(())
    }

    /// Makes `blocks` blocks ready on every device, or as many as all have memory for.
    ///
    /// Under one limit the devices grow a page at a time, in turn. Otherwise the first device would
    /// take the memory that the others need, and no block would become ready on all of them.
    fn grow_parts(&self, blocks: u64) -> Result<u64, GrowError> {
        let grow = |blocks: u64| {
            self.parts.iter().try_fold(blocks, |most, part| Ok(part.grow_towards(most)?.min(most)))
        };
        if !self.shares_a_limit() {
            return grow(blocks);
        }
        let page_blocks = self.parts.iter().map(Part::page_blocks).max().unwrap_or(1);
        let mut level = self.mapped_blocks();
        while level < blocks {
            let next = blocks.min(level.saturating_add(page_blocks));
            let reached = grow(next)?;
            if reached < next {
                return Ok(reached);
            }
            level = next;
        }
        Ok(blocks)
    }

    /// Whether several devices take their memory from one limit.
    fn shares_a_limit(&self) -> bool {
        self.parts.len() > 1 && self.options.memory.limit.is_some()
    }

    fn limit_now(&self) -> Option<LimitStats> {
        self.options.memory.limit.as_ref().map(MemoryLimit::stats)
    }

    /// Gives the pool the blocks that have memory by now. The devices' pages may hold different
    /// numbers of blocks, so the blocks that all devices have count.
    pub(crate) fn take_mapped(&mut self) {
        let mapped = self.mapped_blocks();
        if mapped <= self.stats.ready_blocks {
            return;
        }
        match self.pool.set_budget(Tier::Primary, mapped) {
            Ok(_) => self.stats.ready_blocks = mapped,
            Err(error) => tracing::error!(%error, "the pool has fewer blocks than there is memory"),
        }
    }
}
