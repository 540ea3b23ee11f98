//! A point in a stream's work that is recorded once. It proves that uses of memory are complete.

use cuda_driver::guard;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_driver::{Device, DeviceError, Event, Stream};

/// The end of the work that a stream had when the fence was recorded. The handle is cheap: clones
/// share the fence.
///
/// An [`Event`] has no meaning before it is recorded, and a new meaning when it is recorded again.
/// A fence is recorded when it is made, and never again while a handle exists. So it completes once
/// and stays complete.
///
/// ```compile_fail
/// # use std::sync::Arc;
/// # use cuda_driver::Event;
/// # fn shrink(pool: &cuda_vmm::ElasticPool) -> Result<(), Box<dyn std::error::Error>> {
/// // An event that was never recorded proves nothing.
/// pool.shrink_to(1, &[Arc::new(Event::new(pool.device())?)])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Fence {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    event: Event,
    /// Whether the work before the event is known to be complete.
    over: AtomicBool,
}

impl Fence {
    /// Records a fence after all work that is enqueued on `stream` now. Creates an event.
    ///
    /// # Errors
    /// The device's error.
    #[track_caller]
    pub fn record(stream: &Stream) -> Result<Self, DeviceError> {
        let event = Event::new(stream.device())?;
        event.record(stream)?;
        Ok(Self { inner: Arc::new(Inner { event, over: AtomicBool::new(false) }) })
    }

    /// Records a fence like [`record`](Fence::record), reusing the event of this one if it has no
    /// other holder: for step paths that create no events and allocate nothing. An [`EpochGate`](crate::EpochGate) drops
    /// completed fences when the next lease is taken.
    ///
    /// # Errors
    /// The device's error.
    #[track_caller]
    pub fn renew(mut self, stream: &Stream) -> Result<Self, DeviceError> {
        let is_own = |event: &Event| event.device() == stream.device();
        match Arc::get_mut(&mut self.inner) {
            Some(Inner { event, over }) if guard!("vmm.renew-own", is_own(event), else true) => {
                event.record(stream)?;
                *over.get_mut() = false;
                Ok(self)
            }
            _ => Self::record(stream),
        }
    }

    /// The device of the fence's work.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.inner.event.device()
    }

    /// The raw `CUevent`, so that other code can wait for it. Do not record it again.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.inner.event.raw()
    }

    /// Whether the work before it has completed. Calls the driver until the first "yes".
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        let complete = self.is_known_over() || self.inner.event.is_complete()?;
        if complete {
            self.note_over();
        }
        Ok(complete)
    }

    /// Waits on the host until the work before it has completed.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn wait(&self) -> Result<(), DeviceError> {
        if !self.is_known_over() {
            self.inner.event.synchronize()?;
            self.note_over();
        }
        Ok(())
    }

    /// Makes the work that is enqueued on `stream` from now on wait for the work before the fence.
    ///
    /// # Errors
    /// The device's error.
    #[track_caller]
    pub fn hold_back(&self, stream: &Stream) -> Result<(), DeviceError> {
        stream.wait(&self.inner.event)
    }

    /// Whether the work before it can no longer touch memory. On a lost device no work runs.
    pub(crate) fn is_at_rest(&self) -> Result<bool, DeviceError> {
        self.at_rest_if_lost(self.is_complete(), true)
    }

    /// Waits on the host until the work before it can no longer touch memory.
    pub(crate) fn wait_for_rest(&self) -> Result<(), DeviceError> {
        self.at_rest_if_lost(self.wait(), ())
    }

    /// Equal for clones only, while one of them exists.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// Whether the work was already seen to be complete. Makes no driver call.
    pub(crate) fn is_known_over(&self) -> bool {
        // Acquire: partner of the store, so that the reader sees what the device wrote.
        self.inner.over.load(Ordering::Acquire)
    }

    fn note_over(&self) {
        self.inner.over.store(true, Ordering::Release);
    }

    /// A sticky error ends all work of its context, so no work is left to wait for.
    fn at_rest_if_lost<T>(
        &self,
        answer: Result<T, DeviceError>,
        at_rest: T,
    ) -> Result<T, DeviceError> {
        // This is not stored: a caller that waits for the result of the work must get its error.
        let is_lost = |device: &Device| device.poison().is_some();
        match answer {
            Err(_) if guard!("vmm.lost-is-at-rest", is_lost(self.device()), else false) => {
                Ok(at_rest)
            }
            answer => answer,
        }
    }
}
