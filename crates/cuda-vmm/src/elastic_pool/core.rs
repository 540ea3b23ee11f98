//! The state of a pool: its mapped, ready and parked blocks.

use cuda_driver::{Fence, guard};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{PollReport, Shrink};
use crate::pages::close::ThenPages;
use crate::pages::{Closing, MapError, MapRefusal, PageError, PagePool, Reservation, UnmapReport};
use crate::rest::{Covered, Done, Look, Quiescence, Users};
use crate::{GrowError, gate::UsersUnknown};

/// The state shared by the pool's handle and the worker's thread.
///
/// From the start of the reservation lie, in this order: the pages of ready blocks, of which the last may
/// hold parked blocks as well, and addresses without memory or with retired pages.
#[derive(Debug)]
pub(super) struct PoolCore {
    /// Dropped before `pages`: pages that it unmaps on drop are released, not returned to the pool.
    pub(super) reservation: Reservation,
    pub(super) pages: PagePool,
    pub(super) block_bytes: u64,
    pub(super) capacity_blocks: u64,
    /// Number of blocks whose bytes are all mapped and neither retired nor parked. Stored with
    /// `Release` under `size` after access was granted, loaded with `Acquire`: a reader of the
    /// number may use that many blocks.
    ready: AtomicU64,
    /// Serialises mapping and unmapping. Held across driver calls. Taken before `size`. The step
    /// path never takes it.
    growing: Mutex<()>,
    /// Never held across a driver call.
    size: Mutex<Size>,
    /// Number of blocks in use, as last reported, and of blocks to keep ready beyond them. Stored
    /// before the worker is woken, and loaded after the step has cleared the wake flag. All four
    /// accesses are `SeqCst`, so that a step either sees the new number or is woken again.
    pub(super) demand: AtomicU64,
    pub(super) ahead: AtomicU64,
    pub(super) counters: Counters,
    /// Set when a step ended in a way that forbids further steps.
    pub(super) failed: AtomicBool,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(super) unmap_at_once: AtomicBool,
}

/// Statistics. They order nothing, so all accesses are `Relaxed`.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) stalls: AtomicU64,
    pub(super) adopted_blocks: AtomicU64,
    pub(super) ahead_pages: AtomicU64,
    pub(super) inline_pages: AtomicU64,
}

/// What is known beside the number of ready blocks. Blocks on their pages that are not ready are parked, to
/// be reused.
#[derive(Debug, Default)]
struct Size {
    /// The possible users of parked blocks.
    users: Users,
    closed: bool,
}

/// The step at which a growth failed.
enum GrowFailure {
    Page(PageError),
    Map(MapRefusal),
}

impl From<PageError> for GrowFailure {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

/// The thread that makes the driver calls of a growth.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum By {
    Caller,
    Worker,
}

impl PoolCore {
    pub(super) fn new(
        reservation: Reservation,
        pages: PagePool,
        block_bytes: u64,
        capacity_blocks: u64,
    ) -> Self {
        Self {
            reservation,
            pages,
            block_bytes,
            capacity_blocks,
            ready: AtomicU64::new(0),
            growing: Mutex::new(()),
            size: Mutex::default(),
            demand: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            counters: Counters::default(),
            failed: AtomicBool::new(false),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            unmap_at_once: AtomicBool::new(false),
        }
    }

    pub(super) fn ready_blocks(&self) -> u64 {
        self.ready.load(Ordering::Acquire)
    }

    /// See [`ElasticPool::grow_to`](super::ElasticPool::grow_to).
    pub(super) fn grow_to(&self, blocks: u64) -> Result<u64, GrowError> {
        let capacity_blocks = self.capacity_blocks;
        if blocks > capacity_blocks {
            return Err(GrowError::OverCapacity { asked_blocks: blocks, capacity_blocks });
        }
        let _growing = self.growing.lock();
        self.noted(self.grow_alone(blocks, By::Caller))
    }

    /// Counts a refusal by the limit, once for each request.
    pub(super) fn noted(&self, grown: Result<u64, GrowError>) -> Result<u64, GrowError> {
        if let (Err(GrowError::OverLimit { .. }), Some(limit)) = (&grown, self.pages.limit()) {
            limit.note_refusal();
        }
        grown
    }

    /// Runs `work` while no other thread maps or unmaps. Does not run it once the pool is closed.
    pub(super) fn alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let _growing = self.growing.lock();
        self.is_open().then(work)
    }

    /// Like [`alone`](PoolCore::alone), but gives up if another thread holds the lock: for callers
    /// that hold another pool's lock.
    pub(super) fn try_alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let _growing = self.growing.try_lock()?;
        self.is_open().then(work)
    }

    fn is_open(&self) -> bool {
        !self.size.lock().closed
    }

    /// Waits for a running mapping or unmapping. None starts afterwards.
    pub(super) fn shut(&self) {
        let _growing = self.growing.lock();
        self.size.lock().closed = true;
    }

    /// Makes `blocks` blocks ready. The caller holds `growing`, and `blocks` is within the
    /// capacity. Counts no refusal, since the caller may ask for less.
    pub(super) fn grow_alone(&self, blocks: u64, by: By) -> Result<u64, GrowError> {
        self.settle();
        let ready_blocks = self.adopt(blocks);
        if ready_blocks >= blocks {
            return Ok(ready_blocks);
        }
        let from = self.pages_for(ready_blocks);
        if self.blocks_in(from) > ready_blocks {
            // Blocks behind those that are parked cannot become ready before them.
            return Err(GrowError::Retiring { index: from, ready_blocks });
        }
        let to = self.pages_for(blocks);
        self.collect_retired();
        self.map_pages(from, to).map_err(|error| self.as_grow_error(blocks, error))?;
        let counter = match by {
            By::Caller => &self.counters.inline_pages,
            By::Worker => &self.counters.ahead_pages,
        };
        counter.fetch_add(to - from, Ordering::Relaxed);
        let end = self.blocks_in(to);
        self.ready.store(end, Ordering::Release);
        Ok(end)
    }

    /// See [`ElasticPool::shrink_to`](super::ElasticPool::shrink_to).
    pub(super) fn shrink_to(&self, blocks: u64, fences: &[Fence]) -> Result<Shrink, UsersUnknown> {
        let _growing = self.growing.lock();
        let mut size = self.size.lock();
        let ready_blocks = self.ready_blocks();
        if blocks >= ready_blocks {
            return Ok(Shrink { ready_blocks, retiring_pages: 0 });
        }
        guard!("vmm.shrink-needs-cover", self.reservation.inner.check_covers(fences)?);
        // Before the pages are retired, so that no thread that takes a lease afterwards finds them.
        self.ready.store(blocks, Ordering::Release);
        guard!("vmm.shrink-names-users", size.users.add(ready_blocks, self.users(fences)));
        let pages = self.pages_for(blocks)..self.pages_for(ready_blocks);
        let retiring_pages = pages.end - pages.start;
        // The reservation keeps the retirement. `poll_retired` completes it. Blocks entirely on the
        // last kept page have the same users.
        let before = self.retire(&mut size, pages);
        let many = size.users.are_many();
        drop(size);
        // Dropped outside the lock, because it may hold the last reference to an event.
        drop(before);
        if many {
            self.settle();
        }
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.unmap_at_once.load(Ordering::Relaxed) {
            self.take_back(self.reservation.sabotage_unmap_retired());
        }
        Ok(Shrink { ready_blocks: blocks, retiring_pages })
    }

    /// The possible users of blocks that are no longer ready, as covered by `fences` or the gate's
    /// leases.
    fn users(&self, fences: &[Fence]) -> Quiescence {
        Quiescence::new(self.reservation.gate(), fences, Covered::Yes)
    }

    /// Takes parked blocks that are known to be at rest back into use, up to `blocks`; returns the
    /// number of ready blocks. Makes no driver call.
    pub(super) fn adopt(&self, blocks: u64) -> u64 {
        let size = self.size.lock();
        let ready = self.ready_blocks();
        let now = blocks.min(self.blocks_in(self.pages_for(ready)));
        let used = size.users.rest_from(ready).is_none();
        if now <= ready || guard!("vmm.adopt-needs-rest", used, else false) {
            return ready;
        }
        self.ready.store(now, Ordering::Release);
        self.counters.adopted_blocks.fetch_add(now - ready, Ordering::Relaxed);
        now
    }

    /// Forgets the users of parked blocks that are done; returns whether others are left. Makes
    /// driver calls.
    pub(super) fn settle(&self) -> bool {
        let pending: Vec<_> = self.size.lock().users.pending().collect();
        let mut look = Look::default();
        for done in pending.into_iter().filter_map(|users| Done::check(users, &mut look)) {
            self.size.lock().users.forget(&done);
        }
        !self.size.lock().users.are_none()
    }

    /// Retires pages behind those of ready blocks, with the users of the blocks that are not ready. Returns
    /// those users if none of these blocks lies on a page that is kept, not even in part.
    fn retire(&self, size: &mut Size, pages: Range<u64>) -> Option<Users> {
        let users = size.users.joined()?;
        let kept_pages = pages.start;
        if !pages.is_empty() {
            let pages: Vec<u64> = pages.collect();
            self.reservation.inner.retire_at(&pages, Arc::new(users));
        }
        let ready_bytes = self.ready_blocks() * self.block_bytes;
        let is_apart = ready_bytes >= kept_pages * self.pages.page_bytes();
        is_apart.then(|| std::mem::take(&mut size.users))
    }

    /// Starts to close the reservation. `fences` or leases cover the users of ready blocks. The
    /// users of parked blocks were covered when the blocks were parked.
    pub(super) fn close(&self, fences: &[Fence]) -> Closing {
        let covered = match self.ready_blocks() {
            0 => Covered::Yes,
            _ => self.reservation.inner.covers(fences),
        };
        let mut fences = fences.to_vec();
        let size = self.size.lock();
        guard!("vmm.pool-close-waits-parked", fences.extend(size.users.fences().cloned()));
        drop(size);
        let reservation = Reservation { inner: Arc::clone(&self.reservation.inner) };
        reservation.close_after(&fences, covered, ThenPages::Released(self.pages.clone()))
    }

    pub(super) fn poll_retired(&self) -> PollReport {
        self.take_back(self.reservation.poll_retired())
    }

    /// Unmaps retired pages, which may be in the way of growth.
    pub(super) fn collect_retired(&self) {
        if self.reservation.stats().retiring_bytes > 0 {
            self.poll_retired();
        }
        self.retry_quarantined();
    }

    /// Tries again to unmap pages in quarantine.
    pub(super) fn retry_quarantined(&self) {
        if self.reservation.stats().quarantined_bytes > 0 {
            self.take_back(self.reservation.retry_quarantined());
        }
    }

    /// Maps the pages from `from` up to `to`. On failure nothing changes.
    fn map_pages(&self, from: u64, to: u64) -> Result<(), GrowFailure> {
        // Checked before any page is created. No other thread maps here while `growing` is locked.
        self.reservation.check_free(from..to).map_err(GrowFailure::Map)?;
        let pages = self.pages.take_all(to - from)?;
        match self.reservation.map_range(from, pages) {
            Ok(_) => Ok(()),
            Err(MapError { reason, pages, .. }) => {
                self.pages.take_back(pages);
                Err(GrowFailure::Map(reason))
            }
        }
    }

    fn take_back(&self, report: UnmapReport) -> PollReport {
        let unmapped_pages = report.pages.len() as u64;
        self.pages.take_back(report.pages);
        PollReport { unmapped_pages, failed: report.failed }
    }

    /// Number of pages that hold the first `blocks` blocks, at most all pages of the reservation.
    pub(super) fn pages_for(&self, blocks: u64) -> u64 {
        (blocks * self.block_bytes).div_ceil(self.pages.page_bytes())
    }

    /// Number of blocks entirely on the first `pages` pages.
    pub(super) fn blocks_in(&self, pages: u64) -> u64 {
        (pages * self.pages.page_bytes() / self.block_bytes).min(self.capacity_blocks)
    }

    fn as_grow_error(&self, asked_blocks: u64, failure: GrowFailure) -> GrowError {
        let ready_blocks = self.ready_blocks();
        let source = match failure {
            GrowFailure::Page(PageError::OutOfMemory { .. }) => {
                return GrowError::OutOfMemory { asked_blocks, ready_blocks };
            }
            GrowFailure::Page(PageError::OverLimit(source)) => {
                return GrowError::OverLimit { asked_blocks, ready_blocks, source };
            }
            GrowFailure::Page(PageError::NoHeadroom(source)) => {
                return GrowError::NoHeadroom { asked_blocks, ready_blocks, source };
            }
            GrowFailure::Map(MapRefusal::Retiring { index }) => {
                return GrowError::Retiring { index, ready_blocks };
            }
            GrowFailure::Map(MapRefusal::Quarantined { index }) => {
                return GrowError::Quarantined { index, ready_blocks };
            }
            GrowFailure::Page(PageError::Device(source))
            | GrowFailure::Map(MapRefusal::Device { source, .. }) => source,
            GrowFailure::Page(error) => {
                unreachable!("the pool's pages fit and have no limit: {error}")
            }
            GrowFailure::Map(error) => unreachable!("growth maps its own pages in order: {error}"),
        };
        if source.is_out_of_memory() {
            return GrowError::OutOfMemory { asked_blocks, ready_blocks };
        }
        GrowError::Device { ready_blocks, source }
    }
}
