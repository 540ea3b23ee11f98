//! A pool of equal blocks on one reservation, under which memory comes and goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::{Device, DeviceSpan, Event};
use parking_lot::Mutex;

use crate::close::release_pages;
use crate::{
    BlockNotReady, CloseReport, Closing, EpochGate, GrowError, MapError, MapRefusal, MemoryRules,
    NotAtRest, NotMapped, PageError, PagePool, PagePoolOptions, PoolError, Reservation,
    ReservationOptions, UnmapFailure, UnmapReport,
};

/// The shape of a pool.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ElasticPoolOptions {
    /// Bytes of a block; any size, also one that does not divide a page.
    pub block_bytes: u64,
    /// Most blocks; addresses are reserved for all of them, memory for none.
    pub capacity_blocks: u64,
    /// Bytes of a page, a multiple of the device's granularity; `None` is the granularity itself.
    pub page_bytes: Option<u64>,
    /// Blocks that are ready from the start.
    pub initial_blocks: u64,
}

/// A look at a pool's memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ElasticPoolStats {
    /// Blocks that may be used.
    pub ready_blocks: u64,
    /// Addresses reserved.
    pub reserved_bytes: u64,
    /// Mapped and in use.
    pub mapped_bytes: u64,
    /// Retired by shrinking, still mapped.
    pub retiring_bytes: u64,
    /// Mapped because the driver would not unmap them.
    pub quarantined_bytes: u64,
    /// Not mapped, kept for the next growth; see [`ElasticPool::trim`].
    pub idle_bytes: u64,
    /// Of the mapped bytes, those that no ready block covers.
    pub waste_bytes: u64,
}

/// What a shrinking began.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Shrink {
    /// Blocks that are still ready.
    pub ready_blocks: u64,
    /// Pages that will be unmapped once at rest.
    pub retiring_pages: u64,
}

/// What [`ElasticPool::poll_retired`] did.
#[derive(Debug, Default)]
pub struct PollReport {
    /// Pages that were unmapped and are idle now.
    pub unmapped_pages: u64,
    /// Pages that the driver would not unmap: in quarantine, tried again by the next growth.
    pub failed: Vec<UnmapFailure>,
}

/// Equal blocks, numbered from 0 and laid end to end from the start of one reservation.
///
/// The first [`ready_blocks`](ElasticPool::ready_blocks) blocks have memory. Growing maps whole
/// pages, all or none; shrinking takes blocks out of use at once and unmaps their pages when nothing
/// uses them any more. Blocks never move. Which block belongs to whom is not this type's concern.
///
/// # Ordering
/// As for [`Reservation`]: unmapping waits for the events given to
/// [`shrink_to`](ElasticPool::shrink_to) and for the leases of [`gate`](ElasticPool::gate), and
/// dropping a pool that may be in use leaks it. [`close`](ElasticPool::close) leaks nothing.
#[derive(Debug)]
pub struct ElasticPool {
    /// Dropped before `pages`: what it unmaps while dropping is released, not given back.
    reservation: Reservation,
    pages: PagePool,
    block_bytes: u64,
    capacity_blocks: u64,
    /// Blocks whose bytes are all mapped and not retired. Stored with `Release` after access was
    /// granted, loaded with `Acquire`: who reads a number may use that many blocks.
    ready: AtomicU64,
    /// Serialises growing and shrinking. Held across driver calls; reading `ready` takes no lock.
    size: Mutex<Size>,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    unmap_at_once: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct Size {
    /// Pages from the start of the reservation on that are mapped and not retired.
    mapped_pages: u64,
}

impl ElasticPool {
    /// Reserves addresses for all blocks and makes the first ones ready.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn new(device: &Device, options: ElasticPoolOptions) -> Result<Self, PoolError> {
        Self::with_gate(device, options, EpochGate::new())
    }

    /// As [`new`](ElasticPool::new), with a gate that other memory uses too.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn with_gate(
        device: &Device,
        options: ElasticPoolOptions,
        gate: EpochGate,
    ) -> Result<Self, PoolError> {
        Self::with_rules(device, options, gate, MemoryRules::default())
    }

    /// As [`with_gate`](ElasticPool::with_gate), under a limit that others share and with regard to
    /// what the device has free.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn with_rules(
        device: &Device,
        options: ElasticPoolOptions,
        gate: EpochGate,
        rules: MemoryRules,
    ) -> Result<Self, PoolError> {
        let ElasticPoolOptions { block_bytes, capacity_blocks, page_bytes, initial_blocks } =
            options;
        if block_bytes == 0 || capacity_blocks == 0 {
            return Err(PoolError::Empty { block_bytes, capacity_blocks });
        }
        let limits = PagePoolOptions { page_bytes, capacity_pages: u64::MAX };
        let pages = PagePool::with_rules(device, limits, rules).map_err(as_reserve_error)?;
        let page_bytes = pages.page_bytes();
        let bytes = block_bytes
            .checked_mul(capacity_blocks)
            .and_then(|bytes| bytes.checked_next_multiple_of(page_bytes))
            .ok_or(PoolError::Overflow { block_bytes, capacity_blocks, page_bytes })?;
        let reserve = ReservationOptions { bytes, page_bytes: Some(page_bytes), peers: Vec::new() };
        let pool = Self {
            reservation: Reservation::with_gate(device, reserve, gate)?,
            pages,
            block_bytes,
            capacity_blocks,
            ready: AtomicU64::new(0),
            size: Mutex::new(Size { mapped_pages: 0 }),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            unmap_at_once: std::sync::atomic::AtomicBool::new(false),
        };
        pool.grow_to(initial_blocks)?;
        Ok(pool)
    }

    /// The device that holds the blocks.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.reservation.device()
    }

    /// The gate at which batches take leases before they use blocks.
    #[must_use]
    pub fn gate(&self) -> &EpochGate {
        self.reservation.gate()
    }

    /// Bytes of each block.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes of each page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.reservation.page_bytes()
    }

    /// Most blocks.
    #[must_use]
    pub fn capacity_blocks(&self) -> u64 {
        self.capacity_blocks
    }

    /// How many blocks, from block 0 on, may be used now. Takes no lock.
    #[must_use]
    pub fn ready_blocks(&self) -> u64 {
        self.ready.load(Ordering::Acquire)
    }

    /// The addresses of all blocks, ready or not: the base that kernels index from.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.reservation.span()
    }

    /// The addresses of one ready block.
    ///
    /// # Errors
    /// [`BlockNotReady`].
    pub fn block_span(&self, block: u64) -> Result<DeviceSpan, BlockNotReady> {
        let ready_blocks = self.ready_blocks();
        let refused = BlockNotReady { block, ready_blocks };
        if block >= ready_blocks {
            return Err(refused);
        }
        // Cannot overflow: the product of capacity and block size does not.
        self.span().slice(block * self.block_bytes, self.block_bytes).map_err(|_| refused)
    }

    /// Makes at least `blocks` blocks ready and returns how many are: growth is by whole pages, so
    /// there may be more. A pool that is large enough already stays as it is.
    ///
    /// # Ordering
    /// New blocks may be used at once; their contents are undefined. Costs about 75 µs a page of
    /// driver calls, less for pages that were [prepared](PagePool::prepare): not for the step path.
    ///
    /// # Errors
    /// [`GrowError`]; nothing changed, except that pages created for this call may be idle now. If
    /// memory ran short, they were released.
    pub fn grow_to(&self, blocks: u64) -> Result<u64, GrowError> {
        let capacity_blocks = self.capacity_blocks;
        if blocks > capacity_blocks {
            return Err(GrowError::OverCapacity { asked_blocks: blocks, capacity_blocks });
        }
        let mut size = self.size.lock();
        if blocks <= self.ready_blocks() {
            return Ok(self.ready_blocks());
        }
        let wanted_pages = self.pages_for(blocks);
        if wanted_pages > size.mapped_pages {
            self.collect_retired();
            self.map_pages(size.mapped_pages, wanted_pages)
                .map_err(|error| self.as_grow_error(blocks, error))?;
            size.mapped_pages = wanted_pages;
        }
        let ready = self.blocks_in(size.mapped_pages);
        self.ready.store(ready, Ordering::Release);
        Ok(ready)
    }

    /// Takes the blocks from `blocks` on out of use, at once, and retires the pages that no other
    /// block lies on: they are unmapped by a later [`poll_retired`](ElasticPool::poll_retired), when
    /// the work before `events` has completed and the gate's leases taken so far are closed. A pool
    /// that is small enough already stays as it is.
    ///
    /// # Errors
    /// [`NotMapped`], when pages were unmapped behind the pool's back; nothing is retired then.
    pub fn shrink_to(&self, blocks: u64, events: &[Arc<Event>]) -> Result<Shrink, NotMapped> {
        let mut size = self.size.lock();
        let ready_blocks = self.ready_blocks();
        if blocks >= ready_blocks {
            return Ok(Shrink { ready_blocks, retiring_pages: 0 });
        }
        // Before the pages are retired, so that nobody who takes a lease after that finds them.
        self.ready.store(blocks, Ordering::Release);
        let keep = self.pages_for(blocks);
        let retired = keep..size.mapped_pages;
        let retiring_pages = retired.end - retired.start;
        if retiring_pages > 0 {
            // The reservation keeps the retirement: `poll_retired` completes it.
            drop(self.reservation.retire(retired, events)?);
            size.mapped_pages = keep;
        }
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.unmap_at_once.load(Ordering::Relaxed) {
            self.take_back(self.reservation.sabotage_unmap_retired());
        }
        Ok(Shrink { ready_blocks: blocks, retiring_pages })
    }

    /// Unmaps retired pages that are at rest and keeps them idle. Does not wait for the device.
    pub fn poll_retired(&self) -> PollReport {
        self.take_back(self.reservation.poll_retired())
    }

    /// Releases idle pages until at most `keep_pages` are left, so that others can have the memory;
    /// returns how many were released.
    pub fn trim(&self, keep_pages: u64) -> u64 {
        let (released, errors) = self.pages.trim(keep_pages);
        for error in errors {
            tracing::warn!(%error, source = %error.error, "trimming a pool met a refusal");
        }
        released
    }

    /// The pool's physical pages: to create some ahead of need, and for the accounts.
    #[must_use]
    pub fn pages(&self) -> &PagePool {
        &self.pages
    }

    /// A look at the pool's memory, at one instant for a pool that nobody resizes meanwhile.
    #[must_use]
    pub fn stats(&self) -> ElasticPoolStats {
        let size = self.size.lock();
        let bytes = self.reservation.stats();
        let ready_blocks = self.ready_blocks();
        drop(size);
        ElasticPoolStats {
            ready_blocks,
            reserved_bytes: bytes.reserved_bytes,
            mapped_bytes: bytes.mapped_bytes,
            retiring_bytes: bytes.retiring_bytes,
            quarantined_bytes: bytes.quarantined_bytes,
            idle_bytes: self.pages.stats().idle * self.page_bytes(),
            waste_bytes: bytes.mapped_bytes.saturating_sub(ready_blocks * self.block_bytes),
        }
    }

    /// Takes every block out of use, as a first step of clean-up; the rest happens in
    /// [`PoolClosing`] when the work before `events` has completed and the gate's leases are closed.
    pub fn close(self, events: &[Arc<Event>]) -> PoolClosing {
        PoolClosing { closing: self.reservation.close(events), pages: self.pages }
    }

    /// Takes the protection out: from now on [`shrink_to`](ElasticPool::shrink_to) unmaps at once,
    /// as if nothing could be in use. For a test that the harm is seen; not in release builds.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_unmap_at_once(&self) {
        self.unmap_at_once.store(true, Ordering::Relaxed);
    }

    /// Maps the pages from `from` up to `to`. On failure everything is as before.
    fn map_pages(&self, from: u64, to: u64) -> Result<(), GrowFailure> {
        // Before any page is created in vain; nobody else maps here while `size` is locked.
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

    /// Frees what may stand in the way of growth.
    fn collect_retired(&self) {
        let stats = self.reservation.stats();
        if stats.retiring_bytes > 0 {
            self.poll_retired();
        }
        if self.reservation.stats().quarantined_bytes > 0 {
            self.take_back(self.reservation.retry_quarantined());
        }
    }

    fn take_back(&self, report: UnmapReport) -> PollReport {
        let unmapped_pages = report.pages.len() as u64;
        self.give_back(report.pages);
        PollReport { unmapped_pages, failed: report.failed }
    }

    fn give_back(&self, pages: Vec<crate::Page>) {
        for page in pages {
            let returned = self.pages.give_back(page);
            debug_assert!(returned.is_ok(), "a page of the pool came from elsewhere");
        }
    }

    /// Pages that the first `blocks` blocks lie on; at most those of the reservation.
    fn pages_for(&self, blocks: u64) -> u64 {
        (blocks * self.block_bytes).div_ceil(self.page_bytes())
    }

    /// Blocks that lie wholly on the first `pages` pages.
    fn blocks_in(&self, pages: u64) -> u64 {
        (pages * self.page_bytes() / self.block_bytes).min(self.capacity_blocks)
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

fn as_reserve_error(error: PageError) -> crate::ReserveError {
    match error {
        PageError::PageBytes { page_bytes, granularity } => {
            crate::ReserveError::PageBytes { page_bytes, granularity }
        }
        PageError::Device(error) => crate::ReserveError::Device(error),
        error => unreachable!("an empty pool creates no page: {error}"),
    }
}

/// A pool that is being closed; see [`ElasticPool::close`].
///
/// Dropping it instead follows the rule for dropping a [`Reservation`].
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct PoolClosing {
    closing: Closing,
    pages: PagePool,
}

impl PoolClosing {
    /// Finishes if everything is at rest: unmaps every page, frees the addresses, releases the
    /// physical pages. Does not wait for the device.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request; nothing was unmapped.
    pub fn try_complete(self) -> Result<CloseReport, NotAtRest<Self>> {
        let Self { closing, pages } = self;
        Self::finish(closing.try_complete(), pages)
    }

    /// Waits on the host until everything is at rest, and finishes.
    ///
    /// # Ordering
    /// Waits for the leases and for the events. Never call it while holding a lease of the same
    /// gate: it would wait for itself.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request, when an event cannot be waited for.
    pub fn wait(self) -> Result<CloseReport, NotAtRest<Self>> {
        let Self { closing, pages } = self;
        Self::finish(closing.wait(), pages)
    }

    fn finish(
        closed: Result<CloseReport, NotAtRest<Closing>>,
        pages: PagePool,
    ) -> Result<CloseReport, NotAtRest<Self>> {
        match closed {
            Ok(mut report) => {
                release_pages(&mut report);
                let (released, errors) = pages.trim(0);
                report.released += released;
                report.errors.extend(errors);
                Ok(report)
            }
            Err(NotAtRest { request, reason }) => {
                Err(NotAtRest { request: Self { closing: request, pages }, reason })
            }
        }
    }
}
