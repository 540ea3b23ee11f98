//! The pool: a bounded number of pinned buffers of a few sizes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::host_pages::{HostMemory, HostPages, HostPagesOptions, PinError};
use cuda_driver::{Device, DeviceError, Fence, HostAllocFlags, guard};
use parking_lot::Mutex;

use crate::pinning::{self, Backlog};
use crate::retire::{PoolLists, PoolShared, SizeClass};
use crate::slab::{SlabMemory, UnpinnedSlab};
use crate::{
    Pinning, StagingBuffer,
    error::{AcquireError, StagingError},
};

/// Size and number of buffers of one size class.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StagingOptions {
    /// Bytes of each buffer: the maximum of one submission.
    pub buffer_bytes: u64,
    /// Number of buffers. A host that runs `depth` submissions ahead of the device needs `depth +
    /// 1`.
    pub buffers_max: usize,
}

impl StagingOptions {
    /// Buffers for a host that runs `depth` submissions ahead of the device: `depth + 1`.
    #[must_use]
    pub fn overlapped(buffer_bytes: u64, depth: usize) -> Self {
        Self { buffer_bytes, buffers_max: depth.saturating_add(1) }
    }
}

/// The options of a pool with buffers of several sizes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PoolOptions {
    /// The sizes, in any order.
    pub classes: Vec<StagingOptions>,
    /// Approximate bytes of each pinned allocation, which holds at least one buffer. Small
    /// allocations block other driver calls for a shorter time; large ones are fewer.
    pub slab_bytes: u64,
    /// The source of the memory. The driver's memory is always shared by all contexts and visible
    /// to kernels, whatever its flags say. Write-combined memory is faster for some devices to
    /// read, and very slow for the host to read.
    pub memory: HostMemory,
    /// When the memory is pinned.
    pub pinning: Pinning,
}

impl PoolOptions {
    /// Default size of a slab, pinned in about 10 ms.
    pub const SLAB_BYTES: u64 = 32 << 20;

    /// Default memory: huge pages on the device's memory node, as far as available.
    pub const MEMORY: HostMemory = HostMemory::Pages(HostPagesOptions::HUGE_BESIDE_DEVICE);

    /// [`MEMORY`](PoolOptions::MEMORY), pinned at once, in slabs of
    /// [`SLAB_BYTES`](PoolOptions::SLAB_BYTES).
    #[must_use]
    pub fn new(classes: Vec<StagingOptions>) -> Self {
        Self {
            classes,
            slab_bytes: Self::SLAB_BYTES,
            memory: Self::MEMORY,
            pinning: Pinning::AtOnce,
        }
    }

    /// The slabs to pin, starting with one of each class.
    fn slabs(&self) -> Result<(Box<[SizeClass]>, VecDeque<UnpinnedSlab>), StagingError> {
        let mut sizes = self.classes.clone();
        sizes.sort_by_key(|class| class.buffer_bytes);
        let (mut classes, mut first, mut later) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let (mut all_bytes, mut all_buffers) = (0u64, 0usize);
        for (class, StagingOptions { buffer_bytes, buffers_max }) in sizes.into_iter().enumerate() {
            let impossible = || StagingError::Options { buffer_bytes, buffers_max };
            let stride =
                UnpinnedSlab::stride(buffer_bytes).filter(|_| buffer_bytes > 0 && buffers_max > 0);
            let bytes = stride.and_then(|stride| stride.checked_mul(buffers_max as u64));
            all_bytes =
                bytes.and_then(|bytes| bytes.checked_add(all_bytes)).ok_or_else(impossible)?;
            all_buffers = all_buffers.saturating_add(buffers_max);
            let possible = all_bytes <= isize::MAX as u64
                && guard!(
                    "stage.buffers-are-bounded",
                    all_buffers <= StagingPool::BUFFERS_MAX,
                    else true
                );
            let Some(stride) = stride.filter(|_| possible) else {
                return Err(impossible());
            };
            let per_slab = usize::try_from(self.slab_bytes / stride).unwrap_or(usize::MAX).max(1);
            let mut left = buffers_max;
            while left > 0 {
                let buffers = left.min(per_slab);
                let list = if left == buffers_max { &mut first } else { &mut later };
                list.push_back(UnpinnedSlab { class, buffer_bytes, buffers });
                left -= buffers;
            }
            classes.push(SizeClass { buffer_bytes, free: Vec::new(), live: 0, circulating: 0 });
        }
        if classes.is_empty() {
            return Err(StagingError::Options { buffer_bytes: 0, buffers_max: 0 });
        }
        // Without this check, pinning slab by slab would continue until the system kills the
        // process.
        let host_bytes = guard!("stage.pools-fit-the-host", HostPages::host_bytes(), else None);
        if let Some(host_bytes) = host_bytes.filter(|&most| all_bytes > most) {
            return Err(StagingError::Memory { bytes: all_bytes, host_bytes });
        }
        first.append(&mut later);
        Ok((classes.into_boxed_slice(), first))
    }
}

/// A bounded set of pinned host buffers, which are reused only after their last reader has
/// finished.
///
/// The handle is cheap: clones share the pool, and any thread may use it. Buffers are cut from a
/// few pinned slabs. They are cached by the host by default, visible to kernels, and shared by all
/// contexts of the process. After [pinning](Pinning) has finished, nothing more is allocated, except
/// an event where a buffer has more readers at a time than before, where its record was refused, or where another
/// thread still looks at the buffer's last fence when it is submitted again.
/// Dropping the last handle does not wait and is safe with pending work: the memory is freed later,
/// by a call that waits for the device. [`close`](StagingPool::close) frees it at once and reports
/// errors.
///
/// # Losing the device
/// When the pool's device is lost, every submitted buffer counts as read, and
/// [`acquire`](StagingPool::acquire) returns the cause.
#[derive(Clone, Debug)]
pub struct StagingPool {
    pub(crate) shared: Arc<PoolShared>,
}

impl StagingPool {
    /// Maximum number of buffers of a pool, over all sizes: each has an event and an entry in the
    /// pool's lists.
    pub const BUFFERS_MAX: usize = 1 << 20;

    /// Pins buffers of one size. Slow (about 0.4 s per GiB): call it at start-up, not on the step
    /// path.
    ///
    /// # Ordering
    /// May wait for the device, like every allocation.
    ///
    /// # Errors
    /// Like [`with_classes`](StagingPool::with_classes).
    #[track_caller]
    pub fn new(device: &Device, options: StagingOptions) -> Result<Self, StagingError> {
        Self::with_classes(device, &PoolOptions::new(vec![options]))
    }

    /// Creates a pool with buffers of several sizes.
    ///
    /// # Ordering
    /// May wait for the device, like every allocation.
    ///
    /// # Errors
    /// [`StagingError::Options`] and [`StagingError::Memory`]; [`StagingError::Device`] if memory
    /// cannot be pinned (memory pinned so far is released); [`StagingError::Thread`].
    #[track_caller]
    pub fn with_classes(device: &Device, options: &PoolOptions) -> Result<Self, StagingError> {
        let _site = cuda_driver::site::enter();
        let (classes, slabs) = options.slabs()?;
        let at_once = match options.pinning {
            Pinning::AtOnce => slabs.len(),
            Pinning::Background | Pinning::OnCall => classes.len(),
        };
        let memory = match options.memory {
            HostMemory::Driver(flags) => HostMemory::Driver(HostAllocFlags {
                write_combined: flags.write_combined,
                ..HostAllocFlags::CACHED
            }),
            pages => pages,
        };
        let largest_bytes = classes.last().map_or(0, |class| class.buffer_bytes);
        let state = PoolLists {
            classes,
            submitted: Vec::new(),
            held: 0,
            live_peak: 0,
            sequence_next: 0,
            closed: false,
            memory: SlabMemory::default(),
        };
        let shared = Arc::new(PoolShared {
            device: device.clone(),
            memory,
            state: Mutex::new(state),
            backlog: Backlog::new(slabs),
            largest_bytes,
            pinned_bytes: Arc::new(AtomicU64::new(0)),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            reuse_before_event: std::sync::atomic::AtomicBool::new(false),
        });
        let prepared = (0..at_once).try_for_each(|_| shared.pin_next().map(drop));
        if let Err(error) = prepared {
            drop(shared);
            // An error here would hide the original one. The driver crate logs it.
            let _ = device.free_retired();
            return Err(error.into());
        }
        if options.pinning == Pinning::Background && shared.backlog.outlook().0 > 0 {
            pinning::spawn(&shared).map_err(|error| StagingError::Thread(error.kind()))?;
        }
        Ok(Self { shared })
    }

    /// Takes a buffer of the largest size. It contains data of an earlier use.
    ///
    /// If none is free, asks whether the readers of the oldest submitted buffer of each stream have finished,
    /// by an event query each, until there is one. Allocates nothing. A pool with as many buffers as a
    /// [depth of overlap](StagingOptions::overlapped) needs is never exhausted within that depth.
    ///
    /// # Ordering
    /// Does not wait.
    ///
    /// # Errors
    /// [`AcquireError::Exhausted`] if all buffers are in use, which is an expected outcome;
    /// [`AcquireError::Closed`]; [`AcquireError::Device`] if the device is lost.
    #[track_caller]
    pub fn acquire(&self) -> Result<StagingBuffer, AcquireError> {
        self.acquire_bytes(self.buffer_bytes())
    }

    /// Like [`acquire`](StagingPool::acquire), for the smallest size with at least `bytes` bytes
    /// that has a free buffer.
    ///
    /// # Errors
    /// Like `acquire`; [`AcquireError::TooLarge`].
    #[track_caller]
    pub fn acquire_bytes(&self, bytes: u64) -> Result<StagingBuffer, AcquireError> {
        let _site = cuda_driver::site::enter();
        let pooled = self.shared.take(bytes)?;
        Ok(StagingBuffer::new(self.shared.clone(), pooled))
    }

    /// Like [`acquire`](StagingPool::acquire), but waits for the oldest submitted buffer if none is
    /// free.
    ///
    /// # Ordering
    /// May wait on the host for that buffer's readers, even if readers on another stream finish
    /// earlier.
    ///
    /// # Errors
    /// Like `acquire`; [`AcquireError::Exhausted`] only if callers hold all buffers, so that no
    /// device work will free one.
    #[track_caller]
    pub fn acquire_wait(&self) -> Result<StagingBuffer, AcquireError> {
        self.acquire_bytes_wait(self.buffer_bytes())
    }

    /// Like [`acquire_wait`](StagingPool::acquire_wait), for at least `bytes` bytes.
    ///
    /// # Ordering
    /// Like `acquire_wait`.
    ///
    /// # Errors
    /// Like `acquire_wait`; [`AcquireError::TooLarge`].
    #[track_caller]
    pub fn acquire_bytes_wait(&self, bytes: u64) -> Result<StagingBuffer, AcquireError> {
        let _site = cuda_driver::site::enter();
        loop {
            match self.acquire_bytes(bytes) {
                Err(AcquireError::Exhausted { live, max }) => {
                    let Some(awaited) = self.shared.oldest_submitted(u64::MAX, bytes) else {
                        return Err(AcquireError::Exhausted { live, max });
                    };
                    awaited.iter().try_for_each(Fence::wait_for_rest)?;
                }
                other => return other,
            }
        }
    }

    /// Pins one more slab on this thread; returns whether there was one left.
    ///
    /// # Ordering
    /// May wait for the device, like every allocation.
    ///
    /// # Errors
    /// [`StagingError::Device`] if the driver refuses. The pool continues with its present buffers,
    /// and the slab can be tried again.
    #[track_caller]
    pub fn pin_next(&self) -> Result<bool, StagingError> {
        let _site = cuda_driver::site::enter();
        Ok(self.shared.pin_next()?)
    }

    /// Pins the rest, together with the pool's own thread if it has one.
    ///
    /// # Ordering
    /// Returns when everything is pinned; may wait for the device.
    ///
    /// # Errors
    /// Like [`pin_next`](StagingPool::pin_next).
    #[track_caller]
    pub fn finish_pinning(&self) -> Result<(), StagingError> {
        loop {
            while self.pin_next()? {}
            self.shared.backlog.wait();
            // A slab that the other thread failed to pin is back on the list.
            if self.unpinned() == 0 {
                return Ok(());
            }
        }
    }

    /// Number of buffers that are not pinned yet.
    #[must_use]
    pub fn unpinned(&self) -> usize {
        self.shared.backlog.outlook().0
    }

    /// The error that stopped the pinning, if the last attempt was refused.
    #[must_use]
    pub fn pinning_refused(&self) -> Option<PinError> {
        self.shared.backlog.outlook().1
    }

    /// Bytes of the largest buffers.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.shared.largest_bytes
    }

    /// The device that the memory was pinned for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Number of buffers being written, or submitted and not yet seen to be read.
    ///
    /// Events are queried only by `drain`, `close`, and `acquire` without a free buffer, so this
    /// may be more than the device still needs.
    #[must_use]
    pub fn live(&self) -> usize {
        self.shared.state.lock().live()
    }

    /// The largest number of buffers that were live at once.
    #[must_use]
    pub fn peak_live(&self) -> usize {
        self.shared.state.lock().live_peak
    }

    /// Bytes of the pool's pinned memory: constant from the end of pinning to `close`.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.shared.pinned_bytes.load(Ordering::Relaxed)
    }

    /// The kinds of pages of the slabs pinned so far.
    #[must_use]
    pub fn memory(&self) -> SlabMemory {
        self.shared.state.lock().memory
    }

    /// Takes back every buffer submitted before this call.
    ///
    /// # Ordering
    /// Waits on the host for all their readers. Does not wait for buffers that callers hold.
    ///
    /// # Errors
    /// [`StagingError::Device`] if the device is lost. Its buffers are taken back nevertheless.
    #[track_caller]
    pub fn drain(&self) -> Result<(), StagingError> {
        let _site = cuda_driver::site::enter();
        let until = self.shared.state.lock().sequence_next;
        loop {
            self.shared.retire_completed()?;
            let Some(awaited) = self.shared.oldest_submitted(until, 0) else { break };
            awaited.iter().try_for_each(Fence::wait_for_rest)?;
        }
        match self.shared.device.poison() {
            Some(first) => Err(StagingError::Device(DeviceError::Poisoned { first })),
            None => Ok(()),
        }
    }

    /// Takes back every submitted buffer and frees the pinned memory, for all handles of the pool.
    ///
    /// Buffers that callers still hold can be submitted. The slab of such a buffer is freed with
    /// the last buffer of the slab.
    ///
    /// # Ordering
    /// Waits on the host for all readers, for a slab that is being pinned, and for the device.
    ///
    /// # Errors
    /// [`StagingError::Device`] if the device refuses. A lost device is not an error here: nothing
    /// reads the memory any more, and the loss was reported where it occurred.
    #[track_caller]
    pub fn close(self) -> Result<(), StagingError> {
        let _site = cuda_driver::site::enter();
        self.shared.backlog.give_up();
        self.shared.state.lock().closed = true;
        let drained = self.drain();
        guard!("stage.close-waits-for-pinning", self.shared.backlog.wait());
        // A slab that was refused meanwhile is back on the list.
        self.shared.backlog.give_up();
        let given_up = self.shared.state.lock().take_all();
        // Dropped outside the lock, because dropping events calls the driver.
        drop(given_up);
        let freed = self.shared.device.free_retired();
        if self.shared.device.poison().is_some() {
            return Ok(());
        }
        drained?;
        freed?;
        Ok(())
    }

    /// Makes `submit` return buffers to the pool at once, without waiting for their readers.
    ///
    /// This is the mistake that the pool prevents. Tests use it to check that they would detect it.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_reuse_before_event(&self) {
        self.shared.reuse_before_event.store(true, Ordering::Relaxed);
    }
}
