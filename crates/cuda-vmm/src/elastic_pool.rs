//! A pool of equal blocks on one reservation, under which memory comes and goes.

mod ahead;
mod closing;
mod core;
mod error;

use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use ahead::{AheadError, AheadStats};
pub use closing::PoolClosing;
use cuda_driver::{Device, DeviceSpan};
pub use error::{BlockNotReady, GrowError, PoolError};

use self::ahead::{AtWorker, WakesWorker};
use self::core::PoolCore;
use crate::limit::Holder;
use crate::pages::{
    PageError, PagePool, PagePoolOptions, Reservation, ReservationOptions, UnmapFailure,
};
use crate::worker::{Health, Waker};
use crate::{EpochGate, Fence, MemoryRules, UsersUnknown, Worker};

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
    /// Mapped and not retired: in use or parked.
    pub mapped_bytes: u64,
    /// Of the mapped bytes, those of pages that only parked blocks lie on.
    pub parked_bytes: u64,
    /// Retired by shrinking, still mapped.
    pub retiring_bytes: u64,
    /// Mapped because the driver would not unmap them.
    pub quarantined_bytes: u64,
    /// Not mapped, kept for the next growth; see [`ElasticPool::trim`].
    pub idle_bytes: u64,
    /// Of the mapped bytes, those that neither a ready block covers nor a parked one will.
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

/// What a parking did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Park {
    /// Blocks that are still ready.
    pub ready_blocks: u64,
    /// Blocks that were ready before and are parked now.
    pub parked_blocks: u64,
}

/// Equal blocks, numbered from 0 and laid end to end from the start of one reservation.
///
/// The first [`ready_blocks`](ElasticPool::ready_blocks) blocks have memory. Growing maps whole
/// pages, all or none. There are two ways to become smaller: [parking](ElasticPool::park_to) takes
/// blocks out of use and leaves their pages mapped, so that growing again costs nothing;
/// [shrinking](ElasticPool::shrink_to) has the pages unmapped when nothing uses them any more. Blocks
/// never move. Which block belongs to whom is not this type's concern.
///
/// # Ahead of need
/// A pool that is given a [`Worker`] grows by itself: the step path says with
/// [`demand`](ElasticPool::demand) how many blocks it uses, and the worker sees to it that
/// [`set_ahead`](ElasticPool::set_ahead) more are ready, as far as the capacity, the limit and the
/// device's memory go. The worker also finds out when parked blocks are at rest, and gives memory
/// back when the limit is lowered.
///
/// # Ordering
/// As for [`Reservation`]: unmapping waits for the fences given to
/// [`shrink_to`](ElasticPool::shrink_to) or [`park_to`](ElasticPool::park_to) and for the leases of
/// [`gate`](ElasticPool::gate), and so does using blocks again that one of them took out of use. Dropping a pool that may be in
/// use leaks it. [`close`](ElasticPool::close) leaks nothing.
#[derive(Debug)]
pub struct ElasticPool {
    /// Dropped first, so that the worker begins no step any more.
    place: Option<AtWorker>,
    core: Arc<PoolCore>,
}

impl ElasticPool {
    /// Reserves addresses for all blocks and makes the first ones ready.
    ///
    /// # Errors
    /// [`PoolError`].
    #[track_caller]
    pub fn new(device: &Device, options: ElasticPoolOptions) -> Result<Self, PoolError> {
        Self::with_gate(device, options, EpochGate::new())
    }

    /// As [`new`](ElasticPool::new), with a gate that other memory uses too.
    ///
    /// # Errors
    /// [`PoolError`].
    #[track_caller]
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
    #[track_caller]
    pub fn with_rules(
        device: &Device,
        options: ElasticPoolOptions,
        gate: EpochGate,
        rules: MemoryRules,
    ) -> Result<Self, PoolError> {
        let _site = cuda_driver::site::enter();
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
        let reservation = Reservation::with_gate(device, reserve, gate)?;
        let core = Arc::new(PoolCore::new(reservation, pages, block_bytes, capacity_blocks));
        if let Some(limit) = core.pages.limit() {
            let holder = Arc::downgrade(&core);
            limit.enroll(holder);
        }
        let pool = Self { place: None, core };
        pool.grow_to(initial_blocks)?;
        Ok(pool)
    }

    /// Has `worker` grow the pool ahead of need from now on, in the place of the one before. It waits
    /// for a step of that one.
    pub fn work_on(&mut self, worker: &Worker) {
        if let Some(place) = self.place.take() {
            place.handle.detach();
        }
        // Relaxed: no step runs. Another worker is another try.
        self.core.failed.store(false, Ordering::Relaxed);
        let source = Arc::clone(&self.core);
        let handle = worker.attach(source);
        let wakes = self.core.pages.limit().map(|limit| {
            let wakes = Arc::new(WakesWorker(handle.waker().clone()));
            let holder: Arc<dyn Holder> = wakes.clone();
            limit.enroll(Arc::downgrade(&holder));
            wakes
        });
        self.place = Some(AtWorker { handle, _wakes: wakes });
    }

    /// The device that holds the blocks.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.core.reservation.device()
    }

    /// The gate at which batches take leases before they use blocks.
    #[must_use]
    pub fn gate(&self) -> &EpochGate {
        self.core.reservation.gate()
    }

    /// Bytes of each block.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.core.block_bytes
    }

    /// Bytes of each page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.core.reservation.page_bytes()
    }

    /// Most blocks.
    #[must_use]
    pub fn capacity_blocks(&self) -> u64 {
        self.core.capacity_blocks
    }

    /// How many blocks, from block 0 on, may be used now. Takes no lock.
    #[must_use]
    pub fn ready_blocks(&self) -> u64 {
        self.core.ready_blocks()
    }

    /// The addresses of all blocks, ready or not: the base that kernels index from.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.core.reservation.span()
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
        let bytes = self.block_bytes();
        self.span().slice(block * bytes, bytes).map_err(|_| refused)
    }

    /// Says how many blocks are in use, and returns how many are ready. To be called whenever it
    /// changes, from the step path: fewer ready blocks than `used_blocks` are counted as a stall.
    ///
    /// In a pool without a worker it only takes parked blocks back that are known to be at rest.
    ///
    /// # Ordering
    /// Makes no driver call and waits for nobody that does. In the steady state, with enough blocks
    /// ready, it is two atomic loads and a store; otherwise it takes parked blocks back, under a lock
    /// that is held for a few instructions, and wakes the worker. Who must have the blocks now calls
    /// [`grow_to`](ElasticPool::grow_to), which does.
    ///
    /// # Errors
    /// [`AheadError`] once the worker has failed, and, while blocks are missing, with what it was
    /// refused: waiting for it is no use then. The demand is noted all the same.
    pub fn demand(&self, used_blocks: u64) -> Result<u64, AheadError> {
        self.core.demand(used_blocks, self.waker())
    }

    /// How many blocks are to be ready beyond those in use.
    pub fn set_ahead(&self, blocks: u64) {
        // SeqCst: see the field.
        self.core.ahead.store(blocks, Ordering::SeqCst);
        if self.ready_blocks() < self.core.target()
            && let Some(waker) = self.waker()
        {
            waker.wake();
        }
    }

    /// How growth ahead of need is doing.
    #[must_use]
    pub fn ahead_stats(&self) -> AheadStats {
        let PoolCore { demand, ahead, counters, .. } = &*self.core;
        AheadStats {
            demand_blocks: demand.load(Ordering::Relaxed),
            ahead_blocks: ahead.load(Ordering::Relaxed),
            stalls: counters.stalls.load(Ordering::Relaxed),
            adopted_blocks: counters.adopted_blocks.load(Ordering::Relaxed),
            ahead_pages: counters.ahead_pages.load(Ordering::Relaxed),
            inline_pages: counters.inline_pages.load(Ordering::Relaxed),
            health: self.waker().map_or(Health::Healthy, Waker::health),
        }
    }

    /// Makes at least `blocks` blocks ready and returns how many are: growth is by whole pages, so
    /// there may be more. A pool that is large enough already stays as it is. Parked blocks that are
    /// at rest come first.
    ///
    /// # Ordering
    /// New blocks may be used at once; their contents are undefined. Waits for a step of the worker,
    /// and costs about 75 µs a page of driver calls, less for pages that were
    /// [prepared](PagePool::prepare): not for the step path.
    ///
    /// # Errors
    /// [`GrowError`]; nothing changed, except that pages created for this call may be idle now. If
    /// memory ran short, they were released.
    #[track_caller]
    pub fn grow_to(&self, blocks: u64) -> Result<u64, GrowError> {
        let _site = cuda_driver::site::enter();
        self.core.grow_to(blocks)
    }

    /// Takes the blocks from `blocks` on out of use, at once, and keeps their pages mapped. Growing
    /// again takes them back with no driver call when the work before `fences` has completed and the
    /// gate's leases taken so far are closed. They are unmapped only when a limit asks for memory, or
    /// by [`trim`](ElasticPool::trim). A pool that is small enough already stays as it is.
    ///
    /// # Ordering
    /// Waits for nothing and makes no driver call, unless it drops the last reference to an event.
    ///
    /// # Errors
    /// [`UsersUnknown`]; nothing changed.
    #[track_caller]
    pub fn park_to(&self, blocks: u64, fences: &[Fence]) -> Result<Park, UsersUnknown> {
        let _site = cuda_driver::site::enter();
        let parked_blocks = self.core.park_to(blocks, fences)?;
        if parked_blocks > 0
            && let Some(waker) = self.waker()
        {
            waker.wake();
        }
        Ok(Park { ready_blocks: self.ready_blocks(), parked_blocks })
    }

    /// Takes the blocks from `blocks` on out of use, at once, and retires the pages that no other
    /// block lies on, parked ones included: they are unmapped by a later
    /// [`poll_retired`](ElasticPool::poll_retired) or by the worker, when the work before `fences` has
    /// completed and the gate's leases taken so far are closed. Blocks that share a page with ready ones
    /// are parked. A pool that is small enough already stays as it is.
    ///
    /// # Ordering
    /// Waits for a growth that is under way.
    ///
    /// # Errors
    /// [`UsersUnknown`]; nothing changed.
    #[track_caller]
    pub fn shrink_to(&self, blocks: u64, fences: &[Fence]) -> Result<Shrink, UsersUnknown> {
        let _site = cuda_driver::site::enter();
        let shrink = self.core.shrink_to(blocks, fences)?;
        if shrink.retiring_pages > 0
            && let Some(waker) = self.waker()
        {
            waker.wake();
        }
        Ok(shrink)
    }

    /// Unmaps retired pages that are at rest and keeps them idle. Does not wait for the device.
    #[track_caller]
    pub fn poll_retired(&self) -> PollReport {
        let _site = cuda_driver::site::enter();
        self.core.poll_retired()
    }

    /// Unmaps parked pages, and releases idle ones until at most `keep_pages` are left, so that others
    /// can have the memory; returns how many were released. Parked pages that are not at rest are
    /// retired, as by [`shrink_to`](ElasticPool::shrink_to).
    ///
    /// # Ordering
    /// Waits for a growth that is under way, not for the device.
    #[track_caller]
    pub fn trim(&self, keep_pages: u64) -> u64 {
        let _site = cuda_driver::site::enter();
        self.core.alone(|| {
            self.core.settle();
            self.core.unmap_parked(u64::MAX);
            self.core.retire_parked();
        });
        let (released, errors) = self.core.pages.trim(keep_pages);
        for error in errors {
            tracing::warn!(%error, source = %error.error, "trimming a pool met a refusal");
        }
        released
    }

    /// The pool's physical pages: to create some ahead of need, and for the accounts.
    #[must_use]
    pub fn pages(&self) -> &PagePool {
        &self.core.pages
    }

    /// A look at the pool's memory, at one instant for a pool that nobody resizes meanwhile.
    #[must_use]
    pub fn stats(&self) -> ElasticPoolStats {
        let bytes = self.core.reservation.stats();
        let ready_blocks = self.ready_blocks();
        let parked_bytes = self.core.parked_pages() * self.page_bytes();
        let used_bytes = ready_blocks * self.block_bytes() + parked_bytes;
        ElasticPoolStats {
            ready_blocks,
            reserved_bytes: bytes.reserved_bytes,
            mapped_bytes: bytes.mapped_bytes,
            parked_bytes,
            retiring_bytes: bytes.retiring_bytes,
            quarantined_bytes: bytes.quarantined_bytes,
            idle_bytes: self.core.pages.stats().idle * self.page_bytes(),
            waste_bytes: bytes.mapped_bytes.saturating_sub(used_bytes),
        }
    }

    /// Takes every block out of use, as a first step of clean-up; the rest happens in
    /// [`PoolClosing`] when the work before `fences` has completed and the gate's leases are closed.
    ///
    /// # Ordering
    /// Waits for a step of the worker; none begins afterwards.
    #[track_caller]
    pub fn close(self, fences: &[Fence]) -> PoolClosing {
        let _site = cuda_driver::site::enter();
        let Self { place, core } = self;
        if let Some(place) = place {
            place.handle.detach();
        }
        core.shut();
        PoolClosing { closing: core.close(fences), pages: core.pages.clone() }
    }

    /// Takes the protection out: from now on [`shrink_to`](ElasticPool::shrink_to) unmaps at once,
    /// as if nothing could be in use. For a test that the harm is seen; not in release builds.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_unmap_at_once(&self) {
        self.core.unmap_at_once.store(true, Ordering::Relaxed);
    }

    fn waker(&self) -> Option<&Waker> {
        self.place.as_ref().map(|place| place.handle.waker())
    }
}

fn as_reserve_error(error: PageError) -> crate::pages::ReserveError {
    match error {
        PageError::PageBytes { page_bytes, granularity } => {
            crate::pages::ReserveError::PageBytes { page_bytes, granularity }
        }
        PageError::Device(error) => crate::pages::ReserveError::Device(error),
        error => unreachable!("an empty pool creates no page: {error}"),
    }
}
