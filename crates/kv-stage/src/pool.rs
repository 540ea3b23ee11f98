//! The pool: a bounded number of pinned buffers of one size.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::host_pages::HostPages;
use cuda_driver::{Device, DeviceError, Fence, guard};
use parking_lot::Mutex;

use crate::retire::{PoolLists, PoolShared};
use crate::slab::{self, BUFFER_ALIGNMENT};
use crate::{
    StagingBuffer,
    error::{AcquireError, StagingError},
};

/// Size and number of the buffers of a pool.
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

impl StagingOptions {
    /// Bytes from one buffer to the next.
    fn stride(self) -> Result<u64, StagingError> {
        let Self { buffer_bytes, buffers_max } = self;
        let impossible = StagingError::Options { buffer_bytes, buffers_max };
        let is_bounded = guard!("stage.buffers-are-bounded", buffers_max <= BUFFERS_MAX, else true);
        let stride = buffer_bytes.checked_next_multiple_of(BUFFER_ALIGNMENT);
        let Some(stride) = stride.filter(|_| buffer_bytes > 0 && buffers_max > 0 && is_bounded)
        else {
            return Err(impossible);
        };
        let bytes = stride.checked_mul(buffers_max as u64);
        let bytes = bytes.filter(|&bytes| bytes <= isize::MAX as u64).ok_or(impossible)?;
        // The system promises more than it has, and kills the process that uses it.
        let host_bytes = guard!("stage.pools-fit-the-host", HostPages::host_bytes(), else None);
        match host_bytes.filter(|&most| bytes > most) {
            Some(host_bytes) => Err(StagingError::Memory { bytes, host_bytes }),
            None => Ok(stride),
        }
    }
}

/// Maximum number of buffers of a pool: each has an event and an entry in the pool's lists.
const BUFFERS_MAX: usize = 1 << 20;

/// A bounded set of pinned host buffers, which are reused only after their last reader has
/// finished.
///
/// The handle is cheap: clones share the pool, and any thread may use it. Buffers are cut from a
/// one pinned slab, which is cached by the host, visible to kernels, and shared by all contexts of the
/// process. Once the pool is made, nothing more is allocated, except an event where a buffer has more readers at a time than before, where its record was refused, or where another
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
    /// Pins all buffers, in huge pages on the device's memory node as far as the system has both. Slow
    /// (about 0.4 s per GiB): call it at start-up, not on the step path.
    ///
    /// # Ordering
    /// May wait for the device, like every allocation.
    ///
    /// # Errors
    /// [`StagingError::Options`], [`StagingError::Memory`]; [`StagingError::Device`] or
    /// [`StagingError::Pages`] if the memory cannot be pinned.
    #[track_caller]
    pub fn new(device: &Device, options: StagingOptions) -> Result<Self, StagingError> {
        let _site = cuda_driver::site::enter();
        let stride = options.stride()?;
        let pinned_bytes = Arc::new(AtomicU64::new(0));
        let cut = slab::cut(device, options, stride, &pinned_bytes);
        let free = cut.inspect_err(|_| {
            // An error here would hide the original one. The driver crate logs it.
            let _ = device.free_retired();
        })?;
        let state = PoolLists {
            // Enough capacity for all buffers, so that no submission allocates.
            submitted: Vec::with_capacity(free.len()),
            free,
            held: 0,
            live_peak: 0,
            sequence_next: 0,
            closed: false,
        };
        let shared = PoolShared {
            device: device.clone(),
            options,
            state: Mutex::new(state),
            pinned_bytes,
            #[cfg(all(feature = "sabotage", debug_assertions))]
            reuse_before_event: std::sync::atomic::AtomicBool::new(false),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Takes a buffer. It contains data of an earlier use.
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
        let _site = cuda_driver::site::enter();
        let pooled = self.shared.take()?;
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
        let _site = cuda_driver::site::enter();
        loop {
            match self.acquire() {
                Err(AcquireError::Exhausted { live, max }) => {
                    let Some(awaited) = self.shared.oldest_submitted(u64::MAX) else {
                        return Err(AcquireError::Exhausted { live, max });
                    };
                    awaited.iter().try_for_each(Fence::wait_for_rest)?;
                }
                other => return other,
            }
        }
    }

    /// Bytes of each buffer.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.shared.options.buffer_bytes
    }

    /// The device that the memory was pinned for.
    pub(crate) fn device(&self) -> &Device {
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

    /// Bytes of the pool's pinned memory, in whole pages: constant up to `close`.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.shared.pinned_bytes.load(Ordering::Relaxed)
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
            let Some(awaited) = self.shared.oldest_submitted(until) else { break };
            awaited.iter().try_for_each(Fence::wait_for_rest)?;
        }
        match self.shared.device.poison() {
            Some(first) => Err(StagingError::Device(DeviceError::Poisoned { first })),
            None => Ok(()),
        }
    }

    /// Takes back every submitted buffer and frees the pinned memory, for all handles of the pool.
    ///
    /// Buffers that callers still hold can be submitted. The memory is then freed with the last of them.
    ///
    /// # Ordering
    /// Waits on the host for all readers, and for the device.
    ///
    /// # Errors
    /// [`StagingError::Device`] if the device refuses. A lost device is not an error here: nothing
    /// reads the memory any more, and the loss was reported where it occurred.
    #[track_caller]
    pub fn close(self) -> Result<(), StagingError> {
        let _site = cuda_driver::site::enter();
        self.shared.state.lock().closed = true;
        let drained = self.drain();
        let given_up = std::mem::take(&mut self.shared.state.lock().free);
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
