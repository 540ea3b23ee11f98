//! Memory under device blocks: mapped ahead of need, or by the call that needs it.

use cuda_vmm::limit::LimitStats;
use cuda_vmm::{GrowError, MemoryLimit};
use kv_pool::{BlockPool, ClaimError, TenantError};

use crate::part::Part;
use crate::{AdmitError, DemandError, KvCache};

/// Calls that go without memory, at most, between two that ask for it again.
const PAUSE_CALLS_MAX: u32 = 1024;

/// Memory has run out. It may come back without a word: other users of the device free theirs, or a limit
/// has room again.
///
/// A limit is looked at by every call that misses memory. The device is asked by the first such call, and
/// then, as long as it refuses, by one in twice as many each time: a refusal is a driver call on the
/// step's path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shortage {
    /// The limit when memory was asked for last.
    limit: Option<LimitStats>,
    /// Calls that miss memory until one asks for it whatever the limit says.
    calls_left: u32,
    /// As many calls, when they began.
    pause_calls: u32,
}

impl Shortage {
    /// A refusal under `limit`, `before` which there was another with nothing got since, if any.
    fn after(before: Option<Self>, limit: Option<LimitStats>) -> Self {
        let pause_calls =
            before.map_or(1, |before| before.pause_calls.saturating_mul(2).min(PAUSE_CALLS_MAX));
        Self { limit, calls_left: pause_calls, pause_calls }
    }

    /// Counts a call that misses memory; whether it is to ask for it.
    fn is_over(&mut self, now: Option<LimitStats>) -> bool {
        self.calls_left = self.calls_left.saturating_sub(1);
        let has_room = self.limit.zip(now).is_some_and(|(then, now)| {
            now.revision != then.revision || now.used_bytes < then.used_bytes
        });
        has_room || self.calls_left == 0
    }
}

impl KvCache {
    /// Sees to it that `count` blocks are empty, as far as there is memory. Makes a driver call for memory
    /// only if too few are ready.
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
        let ready = self.stats.ready_blocks;
        let mut wanted = blocks.min(self.options.device_blocks.into());
        let limit = self.limit_now();
        if wanted > ready && self.shortage.as_mut().is_some_and(|short| !short.is_over(limit)) {
            wanted = ready;
        }
        // A worker that is told more may take for one device what all have to share.
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
            // One block tells whether memory is back, where a search would be refused many times.
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
    /// Under one limit the devices grow a page at a time, each in turn: the first would else take what the
    /// others need as well, and no block would ever be ready on all.
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
