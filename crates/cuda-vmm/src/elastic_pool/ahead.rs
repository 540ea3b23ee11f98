//! Growth ahead of need: what the step path says, and what the worker does about it.

use cuda_driver::messages::one_line_debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cuda_driver::Device;

use super::core::{By, PoolCore};
use crate::GrowError;
use crate::limit::Holder;
use crate::worker::{Fault, Health, Progress, Waker, WorkSource};

/// Most pages that one step of the worker maps: how long somebody who runs out may have to wait for it.
const STEP_PAGES_MAX: u64 = 8;

/// How growth ahead of need is doing.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct AheadStats {
    /// Blocks in use, as last said.
    pub demand_blocks: u64,
    /// Blocks to be ready beyond those.
    pub ahead_blocks: u64,
    /// Times that blocks were needed before they were ready.
    pub stalls: u64,
    /// Parked blocks that were taken back into use.
    pub adopted_blocks: u64,
    /// Pages that the worker mapped.
    pub ahead_pages: u64,
    /// Pages that callers of [`grow_to`](crate::ElasticPool::grow_to) mapped themselves.
    pub inline_pages: u64,
    /// How the worker fares with this pool; healthy without one.
    pub health: Health,
}

/// Growth ahead of need does not come, so waiting for it is no use.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("the pool does not grow ahead of need, {ready_blocks} blocks are ready")]
pub struct AheadError {
    /// Blocks that are ready.
    pub ready_blocks: u64,
    /// What stands in the way.
    #[source]
    pub cause: Fault,
}

impl AheadError {
    /// Whether the worker goes on trying. If not, only [`grow_to`](crate::ElasticPool::grow_to) makes
    /// the pool larger.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !self.cause.is_fatal()
    }
}

impl PoolCore {
    /// Blocks that should be ready.
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

    /// One bounded piece of work, with `growing` held.
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
            // A block may be larger than a step's pages: then one block is a step.
            let next = next.clamp(ready + 1, target);
            match self.grow_as_far(ready, next) {
                Ok(grown) if grown < target => return Ok(Progress::More),
                Ok(_) => {}
                // Retired or parked memory lies there, and its users will be done some time.
                Err(GrowError::Retiring { .. }) => return Ok(Progress::Waiting),
                Err(error) => return Err(self.as_fault(error)),
            }
        }
        let waits = restless || self.reservation.stats().retiring_bytes > 0;
        Ok(if waits { Progress::Waiting } else { Progress::Done })
    }

    /// Grows to `blocks`, or by half as much as long as memory is short.
    fn grow_as_far(&self, ready: u64, mut blocks: u64) -> Result<u64, GrowError> {
        loop {
            match self.grow_alone(blocks, By::Worker) {
                Err(error) if error.is_out_of_memory() && blocks - ready > 1 => {
                    blocks = ready + (blocks - ready) / 2;
                }
                grown => return grown,
            }
        }
    }

    /// Gives memory back that nobody needs, as far as the limit asks.
    fn relieve(&self) {
        let over_by = || self.pages.limit().map_or(0, crate::MemoryLimit::over_by);
        if over_by() > 0 {
            self.pages.release_idle(over_by());
            let pages = over_by().div_ceil(self.pages.page_bytes());
            if pages > 0 && self.unmap_parked(pages) > 0 {
                self.pages.release_idle(over_by());
            }
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

/// Tells the step path that a step ended for good, also if it did by a panic.
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
    fn release_idle(&self, _bytes: u64) -> u64 {
        // The pool of pages is asked for itself.
        0
    }

    fn release_parked(&self, bytes: u64) -> u64 {
        let pages = bytes.div_ceil(self.pages.page_bytes());
        let unmap = || {
            self.settle();
            self.unmap_parked(pages)
        };
        match self.try_alone(unmap) {
            Some(unmapped) if unmapped > 0 => self.pages.release_idle(bytes),
            _ => 0,
        }
    }
}

/// Wakes the worker when the limit was moved.
#[derive(Debug)]
pub(super) struct WakesWorker(pub(super) Waker);

impl Holder for WakesWorker {
    fn release_idle(&self, _bytes: u64) -> u64 {
        0
    }

    fn limit_moved(&self) {
        self.0.wake_now();
    }
}

/// A pool's place at its worker, and what keeps the worker told of the limit.
#[derive(Debug)]
pub(super) struct AtWorker {
    pub(super) handle: crate::worker::WorkHandle,
    pub(super) _wakes: Option<Arc<WakesWorker>>,
}

one_line_debug!(AheadError);
