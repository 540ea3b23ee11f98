//! The state of a pool: what is mapped, what of it is ready, and what is parked behind that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{PollReport, Shrink};
use crate::pages::{Closing, MapError, MapRefusal, PageError, PagePool, Reservation, UnmapReport};
use crate::rest::{AtRest, Covered, Quiescence};
use crate::{Fence, GrowError, Unrest, UsersUnknown};

/// What the pool's handle and the thread that works ahead share.
///
/// From the start of the reservation on lie, in this order: the pages of ready blocks, the pages of
/// parked ones, and addresses without memory.
#[derive(Debug)]
pub(super) struct PoolCore {
    /// Dropped before `pages`: what it unmaps while dropping is released, not given back.
    pub(super) reservation: Reservation,
    pub(super) pages: PagePool,
    pub(super) block_bytes: u64,
    pub(super) capacity_blocks: u64,
    /// Blocks whose bytes are all mapped and neither retired nor parked. Stored with `Release` after
    /// access was granted, under `size`; loaded with `Acquire`: who reads a number may use that many
    /// blocks.
    ready: AtomicU64,
    /// Serialises mapping and unmapping, and is held across driver calls. Taken before `size`; the
    /// step path never takes it.
    growing: Mutex<()>,
    /// Never held across a driver call.
    size: Mutex<Size>,
    /// Blocks in use, as the owner last said, and blocks to keep ready beyond them. Stored before the
    /// worker is woken and loaded after its step has cleared the flag of that. All four are `SeqCst`,
    /// so that a step either sees the new number or finds itself woken again.
    pub(super) demand: AtomicU64,
    pub(super) ahead: AtomicU64,
    pub(super) counters: Counters,
    /// Set when a step ended in a way from which there is no going on.
    pub(super) failed: AtomicBool,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(super) unmap_at_once: AtomicBool,
}

/// What happened so far. All are counters for people, so `Relaxed`.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) stalls: AtomicU64,
    pub(super) adopted_blocks: AtomicU64,
    pub(super) ahead_pages: AtomicU64,
    pub(super) inline_pages: AtomicU64,
}

#[derive(Debug)]
struct Size {
    /// Pages from the start of the reservation on that are mapped and not retired.
    mapped_pages: u64,
    /// What lies mapped behind the ready blocks, to be used again.
    parked: Option<Parked>,
    closed: bool,
}

/// Blocks from the ready ones up to `end`, taken out of use but still mapped.
#[derive(Debug)]
struct Parked {
    end: u64,
    rest: Rest,
}

#[derive(Debug)]
enum Rest {
    /// They may have users still.
    Waiting(Arc<Quiescence>),
    /// They have none.
    Proven(Arc<AtRest>),
}

/// Where a growth failed.
enum GrowFailure {
    Page(PageError),
    Map(MapRefusal),
}

impl From<PageError> for GrowFailure {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

/// Who does the driver calls of a growth.
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
            size: Mutex::new(Size { mapped_pages: 0, parked: None, closed: false }),
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
        self.grow_alone(blocks, By::Caller)
    }

    /// Runs `work` while nobody else maps or unmaps; nothing once the pool is closed.
    pub(super) fn alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let _growing = self.growing.lock();
        self.is_open().then(work)
    }

    /// As [`alone`](PoolCore::alone), unless somebody is at it: for callers who hold another pool's lock.
    pub(super) fn try_alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let _growing = self.growing.try_lock()?;
        self.is_open().then(work)
    }

    fn is_open(&self) -> bool {
        !self.size.lock().closed
    }

    /// Waits for whoever maps or unmaps; nobody does afterwards.
    pub(super) fn shut(&self) {
        let _growing = self.growing.lock();
        self.size.lock().closed = true;
    }

    /// Makes `blocks` blocks ready, with `growing` held. `blocks` is within the capacity.
    pub(super) fn grow_alone(&self, blocks: u64, by: By) -> Result<u64, GrowError> {
        self.settle();
        let ready_blocks = self.adopt(blocks);
        if ready_blocks >= blocks {
            return Ok(ready_blocks);
        }
        let (from, parked) = {
            let size = self.size.lock();
            (size.mapped_pages, size.parked.is_some())
        };
        if parked {
            // What lies behind blocks that are in use cannot be ready before they are.
            return Err(GrowError::Retiring { index: self.pages_for(ready_blocks), ready_blocks });
        }
        let to = self.pages_for(blocks).max(from);
        if to > from {
            self.collect_retired();
            self.map_pages(from, to).map_err(|error| self.as_grow_error(blocks, error))?;
            let counter = match by {
                By::Caller => &self.counters.inline_pages,
                By::Worker => &self.counters.ahead_pages,
            };
            counter.fetch_add(to - from, Ordering::Relaxed);
        }
        let mut size = self.size.lock();
        size.mapped_pages = to;
        let end = self.blocks_in(to);
        match &mut size.parked {
            // Somebody parked blocks meanwhile: as if it had been right after this growth.
            Some(parked) => parked.end = end,
            None => self.ready.store(end, Ordering::Release),
        }
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
        self.reservation.inner.check_covers(fences)?;
        // Before the pages are retired, so that nobody who takes a lease after that finds them.
        self.ready.store(blocks, Ordering::Release);
        let users = self.users(fences, size.parked.as_ref());
        let keep = self.pages_for(blocks);
        let retired: Vec<u64> = (keep..size.mapped_pages).collect();
        let retiring_pages = retired.len() as u64;
        if retiring_pages > 0 {
            // The reservation keeps the retirement: `poll_retired` completes it.
            self.reservation.inner.retire_at(&retired, Arc::clone(&users));
            size.mapped_pages = keep;
        }
        // Blocks that lie whole on the last page that stays have the same users as those that go.
        let end = self.blocks_in(keep);
        let parked = (end > blocks).then_some(Parked { end, rest: Rest::Waiting(users) });
        let before = std::mem::replace(&mut size.parked, parked);
        drop(size);
        // Outside the lock: it may hold the last reference to an event.
        drop(before);
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.unmap_at_once.load(Ordering::Relaxed) {
            self.take_back(self.reservation.sabotage_unmap_retired());
        }
        Ok(Shrink { ready_blocks: blocks, retiring_pages })
    }

    /// See [`ElasticPool::park_to`](super::ElasticPool::park_to).
    pub(super) fn park_to(&self, blocks: u64, fences: &[Fence]) -> Result<u64, UsersUnknown> {
        let (before, count) = {
            let mut size = self.size.lock();
            let ready_blocks = self.ready_blocks();
            if blocks >= ready_blocks {
                return Ok(0);
            }
            self.reservation.inner.check_covers(fences)?;
            let end = size.parked.as_ref().map_or(ready_blocks, |parked| parked.end);
            // First, so that nobody who takes a lease after this finds the blocks.
            self.ready.store(blocks, Ordering::Release);
            let users = self.users(fences, size.parked.as_ref());
            let parked = Parked { end, rest: Rest::Waiting(users) };
            (size.parked.replace(parked), ready_blocks - blocks)
        };
        // Outside the lock: it may hold the last reference to an event.
        drop(before);
        Ok(count)
    }

    /// Whoever may use blocks that are not ready any more: `fences` speak for them, or the gate's leases.
    fn users(&self, fences: &[Fence], parked: Option<&Parked>) -> Arc<Quiescence> {
        let fences = union(fences, parked);
        Arc::new(Quiescence::new(self.reservation.gate(), &fences, Covered::Yes))
    }

    /// Takes parked blocks that are known to be at rest back into use, up to `blocks`; returns how
    /// many are ready. No driver call.
    pub(super) fn adopt(&self, blocks: u64) -> u64 {
        let mut size = self.size.lock();
        let ready = self.ready_blocks();
        let Some(Parked { end, rest: Rest::Proven(_) }) = &size.parked else { return ready };
        let (end, now) = (*end, blocks.min(*end));
        if now <= ready {
            return ready;
        }
        self.ready.store(now, Ordering::Release);
        if now == end {
            size.parked = None;
        }
        self.counters.adopted_blocks.fetch_add(now - ready, Ordering::Relaxed);
        now
    }

    /// Asks whether the parked blocks are at rest; returns whether they may have users still. Makes
    /// driver calls.
    pub(super) fn settle(&self) -> bool {
        let users = match &self.size.lock().parked {
            Some(Parked { rest: Rest::Waiting(users), .. }) => Arc::clone(users),
            _ => return false,
        };
        let proof = match users.check() {
            Ok(proof) => proof,
            Err(reason) => {
                if let Unrest::Device(error) = reason {
                    tracing::warn!(%error, "a fence cannot be queried: its blocks stay parked");
                }
                return true;
            }
        };
        let mut size = self.size.lock();
        match &mut size.parked {
            Some(Parked { rest, .. }) if rest.is_waiting_for(&users) => {
                *rest = Rest::Proven(Arc::new(proof));
                false
            }
            // Others were parked meanwhile.
            parked => parked.is_some(),
        }
        // `users` outlives the lock: it may hold the last reference to an event.
    }

    /// Unmaps up to `pages` of the parked pages, if they are known to be at rest, with `growing`
    /// held; returns how many are idle now.
    pub(super) fn unmap_parked(&self, pages: u64) -> u64 {
        let (gone, proof) = {
            let mut size = self.size.lock();
            let Some(Parked { rest: Rest::Proven(proof), .. }) = &size.parked else { return 0 };
            let proof = Arc::clone(proof);
            let first = self.pages_for(self.ready_blocks());
            let keep = first.max(size.mapped_pages.saturating_sub(pages));
            let gone: Vec<u64> = (keep..size.mapped_pages).collect();
            // A proof needs no driver call when it is dropped.
            self.cut(&mut size, keep);
            (gone, proof)
        };
        // Out of the book above, so that nobody adopts them, and made mapped under `growing`.
        self.take_back(self.reservation.inner.unmap_at_rest(&gone, &proof)).unmapped_pages
    }

    /// Retires all parked pages, to be unmapped when their users are done, with `growing` held.
    pub(super) fn retire_parked(&self) {
        let before = {
            let mut size = self.size.lock();
            let keep = self.pages_for(self.ready_blocks());
            let Some(parked) = &size.parked else { return };
            let users = match &parked.rest {
                Rest::Waiting(users) => Arc::clone(users),
                Rest::Proven(_) => self.users(&[], None),
            };
            let pages: Vec<u64> = (keep..size.mapped_pages).collect();
            if !pages.is_empty() {
                self.reservation.inner.retire_at(&pages, users);
            }
            self.cut(&mut size, keep)
        };
        drop(before);
    }

    /// The book after the parked pages from `keep` on were retired; what it has no use for any more.
    fn cut(&self, size: &mut Size, keep: u64) -> Option<Parked> {
        size.mapped_pages = keep;
        let end = self.blocks_in(keep);
        if end <= self.ready_blocks() {
            return size.parked.take();
        }
        if let Some(parked) = &mut size.parked {
            parked.end = end;
        }
        None
    }

    /// Begins to close the reservation: whoever uses ready blocks is covered by `fences` or leases, and
    /// whoever uses parked ones was when they were parked.
    pub(super) fn close(&self, fences: &[Fence]) -> Closing {
        let covered = match self.ready_blocks() {
            0 => Covered::Yes,
            _ => self.reservation.inner.covers(fences),
        };
        let fences = union(fences, self.size.lock().parked.as_ref());
        let reservation = Reservation { inner: Arc::clone(&self.reservation.inner) };
        reservation.close_after(&fences, covered)
    }

    /// Pages that are mapped behind those of ready blocks.
    pub(super) fn parked_pages(&self) -> u64 {
        let size = self.size.lock();
        match size.parked {
            Some(_) => size.mapped_pages.saturating_sub(self.pages_for(self.ready_blocks())),
            None => 0,
        }
    }

    pub(super) fn poll_retired(&self) -> PollReport {
        self.take_back(self.reservation.poll_retired())
    }

    /// Frees what may stand in the way of growth.
    pub(super) fn collect_retired(&self) {
        if self.reservation.stats().retiring_bytes > 0 {
            self.poll_retired();
        }
        if self.reservation.stats().quarantined_bytes > 0 {
            self.take_back(self.reservation.retry_quarantined());
        }
    }

    /// Maps the pages from `from` up to `to`. On failure everything is as before.
    fn map_pages(&self, from: u64, to: u64) -> Result<(), GrowFailure> {
        // Before any page is created in vain; nobody else maps here while `growing` is locked.
        self.reservation.check_free(from..to).map_err(GrowFailure::Map)?;
        let pages = self.pages.take_many(to - from)?;
        match self.reservation.map_range(from, pages) {
            Ok(_) => Ok(()),
            Err(MapError { reason, pages, .. }) => {
                self.give_back(pages);
                Err(GrowFailure::Map(reason))
            }
        }
    }

    fn take_back(&self, report: UnmapReport) -> PollReport {
        let unmapped_pages = report.pages.len() as u64;
        self.give_back(report.pages);
        PollReport { unmapped_pages, failed: report.failed }
    }

    fn give_back(&self, pages: Vec<crate::pages::Page>) {
        for page in pages {
            let returned = self.pages.give_back(page);
            debug_assert!(returned.is_ok(), "a page of the pool came from elsewhere");
        }
    }

    /// Pages that the first `blocks` blocks lie on; at most those of the reservation.
    pub(super) fn pages_for(&self, blocks: u64) -> u64 {
        (blocks * self.block_bytes).div_ceil(self.pages.page_bytes())
    }

    /// Blocks that lie wholly on the first `pages` pages.
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

impl Rest {
    fn is_waiting_for(&self, users: &Arc<Quiescence>) -> bool {
        matches!(self, Self::Waiting(waiting) if Arc::ptr_eq(waiting, users))
    }
}

/// The fences of those who may use blocks that are parked now or were before.
fn union(fences: &[Fence], parked: Option<&Parked>) -> Vec<Fence> {
    let before = match parked {
        Some(Parked { rest: Rest::Waiting(users), .. }) => users.fences(),
        _ => &[],
    };
    fences.iter().chain(before).cloned().collect()
}
