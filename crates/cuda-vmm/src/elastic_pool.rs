//! A pool of equal blocks on one reservation, whose memory can grow and shrink.

mod ahead;
mod core;
mod error;

use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use ahead::{AheadError, AheadStats};
use cuda_driver::{Device, DeviceSpan, Fence, guard};
pub use error::{BlockNotReady, GrowError};

use self::ahead::{AtWorker, WakesWorker};
use self::core::PoolCore;
use crate::background::{Health, Waker};
use crate::memory_limit::Holder;
use crate::pages::{
    CloseError, Closing, PageError, PagePool, PagePoolOptions, Reservation, ReservationOptions,
};
use crate::{EpochGate, MemoryRules, SpaceError, Worker, gate::UsersUnknown};

/// The size of a pool and of its blocks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ElasticPoolOptions {
    /// Bytes of a block; any size, even one that does not divide a page.
    pub block_bytes: u64,
    /// Maximum number of blocks. Addresses are reserved for all of them, memory for none.
    pub capacity_blocks: u64,
    /// Bytes of a page, a multiple of the device's granularity; `None` means the granularity.
    pub page_bytes: Option<u64>,
    /// Number of blocks that are ready from the start.
    pub initial_blocks: u64,
}

/// The memory of a pool at one moment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ElasticPoolStats {
    /// Number of blocks that may be used.
    pub ready_blocks: u64,
    /// Bytes of reserved addresses.
    pub reserved_bytes: u64,
    /// Mapped and not retired bytes.
    pub mapped_bytes: u64,
    /// Bytes retired by shrinking and still mapped.
    pub retiring_bytes: u64,
    /// Bytes that stay mapped because the driver refused to unmap them.
    pub quarantined_bytes: u64,
    /// Bytes of unmapped pages, kept for the next growth; see [`ElasticPool::trim`].
    pub idle_bytes: u64,
    /// Mapped bytes that belong to no ready block.
    pub waste_bytes: u64,
}

/// The result of starting to shrink.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Shrink {
    /// Number of blocks that are still ready.
    pub ready_blocks: u64,
    /// Number of pages that will be unmapped once they are at rest.
    pub retiring_pages: u64,
}

/// The result of [`ElasticPool::poll_retired`].
#[derive(Debug, Default)]
pub struct PollReport {
    /// Number of pages that were unmapped and are idle now.
    pub unmapped_pages: u64,
    /// Pages that the driver refused to unmap. They are in quarantine, and the next growth tries
    /// again.
    pub failed: Vec<CloseError>,
}

/// Equal blocks, numbered from 0 and contiguous from the start of one reservation.
///
/// The first [`ready_blocks`](ElasticPool::ready_blocks) blocks have memory. Growing maps whole
/// pages, all or none. [Shrinking](ElasticPool::shrink_to) unmaps pages once nothing uses them. Blocks
/// that share a page with ready ones are parked: growing takes them back without a driver call. Blocks
/// never move. This type does not know which sequence a block belongs to.
///
/// # Ahead of need
/// A pool with a [`Worker`] grows on its own. The step path reports the number of used blocks with
/// [`demand`](ElasticPool::demand). The worker keeps [`set_ahead`](ElasticPool::set_ahead) more
/// blocks ready, within the capacity, the limit and the device's memory. The worker also detects
/// when parked blocks are at rest, and releases memory when the limit is lowered.
///
/// # Ordering
/// As for [`Reservation`]: unmapping waits for the fences passed to
/// [`shrink_to`](ElasticPool::shrink_to), and for the leases of [`gate`](ElasticPool::gate). Reusing
/// blocks that it took out of use waits for the same. Dropping a pool that may be in use leaks its
/// memory. [`close`](ElasticPool::close) leaks nothing.
#[derive(Debug)]
pub struct ElasticPool {
    /// Dropped first, so that the worker starts no further step.
    place: Option<AtWorker>,
    core: Arc<PoolCore>,
}

impl ElasticPool {
    /// Reserves addresses for all blocks and makes the first ones ready.
    ///
    /// # Errors
    /// [`SpaceError`].
    #[track_caller]
    pub fn new(device: &Device, options: ElasticPoolOptions) -> Result<Self, SpaceError> {
        Self::with_rules(device, options, EpochGate::new(), MemoryRules::default())
    }

    /// Like [`new`](ElasticPool::new), with a gate that other memory may share, under a limit that
    /// several pools share, and with a check of the device's free memory.
    ///
    /// # Errors
    /// [`SpaceError`].
    #[track_caller]
    pub fn with_rules(
        device: &Device,
        options: ElasticPoolOptions,
        gate: EpochGate,
        rules: MemoryRules,
    ) -> Result<Self, SpaceError> {
        let _site = cuda_driver::site::enter();
        let ElasticPoolOptions { block_bytes, capacity_blocks, page_bytes, initial_blocks } =
            options;
        if block_bytes == 0 || capacity_blocks == 0 {
            return Err(SpaceError::EmptyPool { block_bytes, capacity_blocks });
        }
        let limits = PagePoolOptions { page_bytes, capacity_pages: u64::MAX };
        let pages = PagePool::with_rules(device, limits, rules).map_err(as_reserve_error)?;
        let page_bytes = pages.page_bytes();
        let bytes = block_bytes
            .checked_mul(capacity_blocks)
            .and_then(|bytes| bytes.checked_next_multiple_of(page_bytes))
            .ok_or(SpaceError::PoolOverflow { block_bytes, capacity_blocks, page_bytes })?;
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

    /// Lets `worker` grow the pool ahead of need from now on, in place of the previous worker.
    /// Waits for a running step of the previous worker.
    pub fn work_on(&mut self, worker: &Worker) {
        if let Some(place) = self.place.take() {
            place.handle.detach();
        }
        // Relaxed: no step is running. A new worker tries again.
        self.core.failed.store(false, Ordering::Relaxed);
        let source = Arc::clone(&self.core);
        let handle = worker.attach(source);
        let wakes = self.core.pages.limit().map(|limit| {
            let (device, waker) = (self.core.reservation.device().clone(), handle.waker().clone());
            let wakes = Arc::new(WakesWorker { device, waker });
            let holder: Arc<dyn Holder> = wakes.clone();
            limit.enroll(Arc::downgrade(&holder));
            wakes
        });
        self.place = Some(AtWorker { handle, _wakes: wakes });
    }

    /// The gate whose leases batches take before they use blocks.
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
        self.core.pages.page_bytes()
    }

    /// Maximum number of blocks.
    #[must_use]
    pub fn capacity_blocks(&self) -> u64 {
        self.core.capacity_blocks
    }

    /// Number of blocks, counted from block 0, that may be used now. Takes no lock.
    #[must_use]
    pub fn ready_blocks(&self) -> u64 {
        self.core.ready_blocks()
    }

    /// The addresses of all blocks, ready or not. Kernels index from this base.
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

    /// Reports the number of blocks in use, and returns the number of ready blocks. The step path
    /// calls it whenever the number changes. Fewer ready blocks than `used_blocks` count as a
    /// stall.
    ///
    /// In a pool without a worker this only takes back parked blocks that are known to be at rest.
    ///
    /// # Ordering
    /// Makes no driver call, and waits for no thread that makes one. In the steady state, with
    /// enough ready blocks, it costs two atomic loads and a store. Otherwise it takes parked blocks
    /// back, under a lock held for a few instructions, and wakes the worker. A caller that needs
    /// the blocks now calls [`grow_to`](ElasticPool::grow_to), which does make driver calls.
    ///
    /// # Errors
    /// [`AheadError`] once the worker has failed, and, while blocks are missing, with the reason of
    /// the last refusal: waiting does not help then. The demand is recorded in any case.
    pub fn demand(&self, used_blocks: u64) -> Result<u64, AheadError> {
        self.core.demand(used_blocks, self.waker())
    }

    /// Sets the number of blocks to keep ready beyond those in use.
    pub fn set_ahead(&self, blocks: u64) {
        // SeqCst: see the field.
        self.core.ahead.store(blocks, Ordering::SeqCst);
        if self.ready_blocks() < self.core.target()
            && let Some(waker) = self.waker()
        {
            waker.wake();
        }
    }

    /// The state of growth ahead of need.
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

    /// Makes at least `blocks` blocks ready, and returns the number of ready blocks. Growth is by
    /// whole pages, so the number may be larger. Parked blocks at rest are taken first. A pool that
    /// is large enough does not change.
    ///
    /// # Ordering
    /// New blocks may be used at once; their contents are undefined. Waits for a running step of
    /// the worker. Driver calls cost about 75 µs a page, less for pages created by
    /// [`prepare`](PagePool::prepare). Do not call it on the step path.
    ///
    /// # Errors
    /// [`GrowError`]; the pool is unchanged. Pages created by this call may be idle now. If memory
    /// ran short, they were released.
    #[track_caller]
    pub fn grow_to(&self, blocks: u64) -> Result<u64, GrowError> {
        let _site = cuda_driver::site::enter();
        self.core.grow_to(blocks)
    }

    /// Takes the blocks from `blocks` on out of use at once, and retires the pages that hold no
    /// other block. A later [`poll_retired`](ElasticPool::poll_retired) or
    /// the worker unmaps them, once the work before `fences` has completed and the leases of the
    /// gate taken so far are closed. Blocks that share a page with ready ones are parked. A pool
    /// that is small enough does not change.
    ///
    /// # Ordering
    /// Waits for a running growth.
    ///
    /// # Errors
    /// [`UsersUnknown`]; the pool is unchanged.
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

    /// Unmaps retired pages that are at rest, and keeps them idle. Does not wait for the device.
    #[track_caller]
    pub fn poll_retired(&self) -> PollReport {
        let _site = cuda_driver::site::enter();
        self.core.poll_retired()
    }

    /// Releases idle pages until at most `keep_pages` are left, so that other users can have the
    /// memory. Returns the number of released pages.
    ///
    /// # Ordering
    /// Does not wait for the device.
    #[track_caller]
    pub fn trim(&self, keep_pages: u64) -> u64 {
        let _site = cuda_driver::site::enter();
        let (released, errors) = self.core.pages.trim(keep_pages);
        for error in errors {
            tracing::warn!(%error, source = %error.error, "the driver refused a step of trimming a pool");
        }
        released
    }

    /// The pool's physical pages, for creating some ahead of need and for statistics.
    #[must_use]
    pub fn pages(&self) -> &PagePool {
        &self.core.pages
    }

    /// The pool's memory. All figures are of one moment if no thread resizes the pool meanwhile.
    #[must_use]
    pub fn stats(&self) -> ElasticPoolStats {
        let bytes = self.core.reservation.stats();
        let ready_blocks = self.ready_blocks();
        let used_bytes = ready_blocks * self.block_bytes();
        ElasticPoolStats {
            ready_blocks,
            reserved_bytes: bytes.reserved_bytes,
            mapped_bytes: bytes.mapped_bytes,
            retiring_bytes: bytes.retiring_bytes,
            quarantined_bytes: bytes.quarantined_bytes,
            idle_bytes: self.core.pages.stats().idle * self.page_bytes(),
            waste_bytes: bytes.mapped_bytes.saturating_sub(used_bytes),
        }
    }

    /// Takes every block out of use, as the first step of clean-up. [`Closing`] does the rest
    /// once the work before `fences` has completed and the leases of the gate are closed.
    ///
    /// # Ordering
    /// Waits for a running step of the worker. No step starts afterwards.
    #[track_caller]
    pub fn close(self, fences: &[Fence]) -> Closing {
        let _site = cuda_driver::site::enter();
        let Self { place, core } = self;
        if let Some(place) = place {
            place.handle.detach();
        }
        guard!("vmm.closing-pool-shuts", core.shut());
        core.close(fences)
    }

    /// Disables the protection: from now on [`shrink_to`](ElasticPool::shrink_to) unmaps at once,
    /// as if nothing could use the memory. For tests that must see the harm; absent from release
    /// builds.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_unmap_at_once(&self) {
        self.core.unmap_at_once.store(true, Ordering::Relaxed);
    }

    fn waker(&self) -> Option<&Waker> {
        self.place.as_ref().map(|place| place.handle.waker())
    }
}

fn as_reserve_error(error: PageError) -> SpaceError {
    match error {
        PageError::PageBytes { page_bytes, granularity } => {
            SpaceError::PageBytes { page_bytes, granularity }
        }
        PageError::Device(error) => SpaceError::Device(error),
        error => unreachable!("an empty pool creates no page: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn a_limit_that_asks_while_a_pool_closes_takes_none_of_its_pages() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let options = ElasticPoolOptions {
            block_bytes: 1 << 21,
            capacity_blocks: 4,
            page_bytes: None,
            initial_blocks: 4,
        };
        let pool = ElasticPool::new(&device, options).unwrap();
        assert_eq!(pool.shrink_to(1, &[]).unwrap().retiring_pages, 3);
        // The limit has found the pool just before it closes.
        let found = Arc::clone(&pool.core);
        let closing = pool.close(&[]);
        assert_eq!(found.release_parked(u64::MAX), 0);
        let report = closing.try_complete().unwrap();
        assert_eq!((report.unmapped, report.released), (4, 4));
    }
}
