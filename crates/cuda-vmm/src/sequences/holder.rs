//! A space under a memory limit: the memory that it releases when the limit asks.

use std::sync::Arc;

use cuda_driver::Device;

use super::book::Seat;
use super::core::SpaceCore;
use crate::background::{Fault, Waker};
use crate::memory_limit::Holder;

/// Represents a space in the limit of its pool.
#[derive(Debug)]
pub(super) struct SpaceHolder {
    core: Arc<SpaceCore>,
    waker: Waker,
}

impl SpaceHolder {
    /// Registers the space if its pool has a limit. The limit forgets it when the result is
    /// dropped.
    pub(super) fn enroll(core: &Arc<SpaceCore>, waker: &Waker) -> Option<Arc<Self>> {
        let limit = core.pages.limit()?;
        let holder = Arc::new(Self { core: Arc::clone(core), waker: waker.clone() });
        let weak = Arc::downgrade(&holder);
        limit.enroll(weak);
        Some(holder)
    }
}

impl Holder for SpaceHolder {
    fn device(&self) -> &Device {
        self.core.device()
    }

    fn unused_bytes(&self) -> u64 {
        // The pool's idle pages are registered separately. A space at work may be the caller.
        let rows = self.waker.try_run(|| Ok::<_, Fault>(self.core.rows_at_rest()));
        self.core.shape.row_bytes(rows.and_then(Result::ok).unwrap_or(0))
    }

    fn release_refused(&self) -> u64 {
        let retry = || {
            self.core.retry_quarantined();
            Ok::<_, Fault>(())
        };
        let _ = self.waker.try_run(retry);
        0
    }

    fn release_parked(&self, bytes: u64) -> u64 {
        // Skipped if the space is at work, because the space may be the caller.
        let released = self.waker.try_run(|| Ok::<_, Fault>(self.core.release_parked(bytes)));
        released.and_then(Result::ok).unwrap_or(0)
    }

    fn limit_moved(&self) {
        self.waker.wake();
    }
}

impl SpaceCore {
    /// Number of rows that no sequence wants and nobody uses.
    fn rows_at_rest(&self) -> u64 {
        self.settle();
        let book = self.book.lock();
        let rows = |(seat, shared): (&Seat, _)| self.free_rows(shared, seat);
        book.seats.iter().zip(&self.lengths).map(rows).sum()
    }

    /// Unmaps unused memory and releases the pages, until `bytes` are released or nothing is left;
    /// returns the released bytes.
    fn release_parked(&self, bytes: u64) -> u64 {
        self.settle();
        let mut released = 0;
        while released < bytes {
            let Some(unmapped) = self.unmap_unneeded_row() else { break };
            released += self.pages.release_idle(unmapped.pages * self.shape.page_bytes);
        }
        released
    }

    /// Releases memory while the pool's limit is exceeded; returns whether any was released.
    pub(super) fn relieve(&self) -> bool {
        let over = self.pages.over_limit_by();
        over > 0
            && (self.pages.release_idle(over) > 0
                || self.release_parked(self.shape.row_bytes(1)) > 0)
    }
}
