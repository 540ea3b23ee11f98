//! Growth ahead of need: the demand of the step path, and the worker's reaction.

use cuda_driver::guard;
use cuda_driver::messages::one_line_debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cuda_driver::Device;

use super::core::{By, PoolCore};
use crate::GrowError;
use crate::background::{Fault, Health, Progress, Waker, WorkSource};
use crate::memory_limit::Holder;

/// Maximum number of pages that one step of the worker maps. It bounds how long another caller
/// waits for the step.
const STEP_PAGES_MAX: u64 = 8;

/// The state of growth ahead of need.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct AheadStats {
    /// Number of blocks in use, as last reported.
    pub demand_blocks: u64,
    /// Number of blocks to keep ready beyond those.
    pub ahead_blocks: u64,
    /// Number of times that blocks were needed before they were ready.
    pub stalls: u64,
    /// Number of parked blocks that were taken back into use.
    pub adopted_blocks: u64,
    /// Number of pages that the worker mapped.
    pub ahead_pages: u64,
    /// Number of pages that callers of [`grow_to`](crate::ElasticPool::grow_to) mapped themselves.
    pub inline_pages: u64,
    /// The worker's state for this pool; healthy without a worker.
    pub health: Health,
}

/// The pool does not grow ahead of need, so waiting does not help.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("the pool does not grow ahead of need, {ready_blocks} blocks are ready")]
pub struct AheadError {
    /// Number of ready blocks.
    pub ready_blocks: u64,
    /// The cause.
    #[source]
    pub cause: Fault,
}

impl AheadError {
    /// Whether the worker has given up. If so, only [`grow_to`](crate::ElasticPool::grow_to)
    /// enlarges the pool.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !self.cause.is_fatal()
    }
}

impl PoolCore {
    /// Number of blocks that should be ready.
    pub(super) fn target(&self) -> u64 {
        // SeqCst: see the fields.
        let demand = self.demand.load(Ordering::SeqCst);
        demand.saturating_add(self.ahead.load(Ordering::SeqCst)).min(self.capacity_blocks)
    }

    /// See [`ElasticPool::demand`](crate::ElasticPool::demand).
    pub(super) fn demand(&self, used: u64, waker: Option<&Waker>) -> Result<u64, AheadError> {
        // SeqCst: see the field.
        self.demand.store(used, Ordering::SeqCst);
        let target = self.target();
        let mut ready_blocks = self.ready_blocks();
        if ready_blocks < target {
            ready_blocks = self.adopt(target);
        }
        let failed = self.failed.load(Ordering::Relaxed);
        if ready_blocks >= target && !failed {
            return Ok(ready_blocks);
        }
        let Some(waker) = waker else {
            self.counters.stalls.fetch_add(u64::from(ready_blocks < used), Ordering::Relaxed);
            return Ok(ready_blocks);
        };
        let short = ready_blocks < used;
        if short {
            self.counters.stalls.fetch_add(1, Ordering::Relaxed);
            waker.wake_now();
        } else {
            waker.wake();
        }
        match waker.health() {
            Health::Failed { cause } => Err(AheadError { ready_blocks, cause }),
            Health::Degraded { cause } if short => Err(AheadError { ready_blocks, cause }),
            _ => Ok(ready_blocks),
        }
    }

    /// One bounded piece of work. The caller holds `growing`.
    fn work(&self) -> Result<Progress, Fault> {
        let retiring = self.reservation.stats().retiring_bytes > 0;
        if retiring {
            self.poll_retired();
        }
        let restless = self.settle();
        let target = self.target();
        self.relieve();
        let ready = self.adopt(target);
        if ready < target && !restless {
            let next = self.blocks_in(self.pages_for(ready).saturating_add(STEP_PAGES_MAX));
            // A block may be larger than a step's pages. Then a step maps one block.
            let next = next.clamp(ready + 1, target);
            match self.grow_as_far(ready, next) {
                Ok(grown) if grown < target => return Ok(Progress::More),
                Ok(_) => {}
                // Retired memory or a parked block is in the way. Its users will be done later.
                Err(GrowError::Retiring { .. }) => return Ok(Progress::Waiting),
                Err(error) => return Err(self.as_fault(error)),
            }
        }
        let waits = restless || self.reservation.stats().retiring_bytes > 0;
        Ok(if waits { Progress::Waiting } else { Progress::Done })
    }

    /// Grows to `blocks`, halving the growth while memory is short.
    fn grow_as_far(&self, ready: u64, mut blocks: u64) -> Result<u64, GrowError> {
        loop {
            match self.grow_alone(blocks, By::Worker) {
                Err(error) if error.is_out_of_memory() && blocks - ready > 1 => {
                    blocks = ready + (blocks - ready) / 2;
                }
                grown => return self.noted(grown),
            }
        }
    }

    /// Releases unused memory, as far as the limit asks.
    fn relieve(&self) {
        let over_by = self.pages.over_limit_by();
        if over_by > 0 {
            self.pages.release_idle(over_by);
        }
    }

    fn as_fault(&self, error: GrowError) -> Fault {
        let bytes = self.pages.page_bytes();
        match error {
            GrowError::OutOfMemory { .. } => Fault::OutOfMemory { bytes },
            GrowError::OverLimit { .. } | GrowError::NoHeadroom { .. } => Fault::Limit { bytes },
            GrowError::Quarantined { index, .. } => Fault::Quarantined { index },
            GrowError::Device { source, .. } => {
                Fault::of_device(self.reservation.device(), source, bytes)
            }
            GrowError::OverCapacity { .. } | GrowError::Retiring { .. } => {
                unreachable!("the target is within the capacity, and waiting is no fault: {error}")
            }
        }
    }
}

impl WorkSource for PoolCore {
    fn device(&self) -> Option<&Device> {
        Some(self.reservation.device())
    }

    fn step(&self) -> Result<Progress, Fault> {
        let outcome = Marked { core: self, fatal: true };
        let stepped = self.alone(|| self.work()).unwrap_or(Ok(Progress::Done));
        outcome.end(stepped.as_ref().is_err_and(Fault::is_fatal));
        stepped
    }
}

/// Marks the pool as failed when a step ends for good, even by a panic.
struct Marked<'a> {
    core: &'a PoolCore,
    fatal: bool,
}

impl Marked<'_> {
    fn end(mut self, fatal: bool) {
        self.fatal = fatal;
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        if self.fatal {
            // Relaxed: the health, read under its own lock, says what happened.
            self.core.failed.store(true, Ordering::Relaxed);
        }
    }
}

impl Holder for PoolCore {
    fn device(&self) -> &Device {
        self.reservation.device()
    }

    fn unused_bytes(&self) -> u64 {
        // The idle pages of the pool of pages are registered separately.
        self.try_alone(|| self.reservation.inner.retired_at_rest()).unwrap_or(0)
            * self.pages.page_bytes()
    }

    fn release_refused(&self) -> u64 {
        self.try_alone(|| self.retry_quarantined());
        0
    }

    fn release_parked(&self, bytes: u64) -> u64 {
        let retired =
            || guard!("vmm.retired-released-first", self.poll_retired().unmapped_pages, else 0);
        match self.try_alone(retired) {
            Some(unmapped) if unmapped > 0 => self.pages.release_idle(bytes),
            _ => 0,
        }
    }
}

/// Wakes the worker when the limit changes.
#[derive(Debug)]
pub(super) struct WakesWorker {
    pub(super) device: Device,
    pub(super) waker: Waker,
}

impl Holder for WakesWorker {
    fn device(&self) -> &Device {
        &self.device
    }

    fn limit_moved(&self) {
        self.waker.wake_now();
    }
}

/// A pool's registration with its worker, and with the limit on the worker's behalf.
#[derive(Debug)]
pub(super) struct AtWorker {
    pub(super) handle: crate::background::WorkHandle,
    pub(super) _wakes: Option<Arc<WakesWorker>>,
}

one_line_debug!(AheadError);
