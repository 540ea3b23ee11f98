//! A point in a stream's work that stays where it was recorded: what proves that uses of memory are over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_driver::{Device, DeviceError, Event, Stream};

/// The end of the work that a stream had when the fence was recorded. A cheap handle: clones are the
/// same fence.
///
/// An [`Event`] says nothing until it is recorded, and something else when it is recorded again. A fence
/// is recorded when it is made and never again while anybody holds it, so it completes once and stays
/// complete.
///
/// ```compile_fail
/// # use std::sync::Arc;
/// # use cuda_driver::Event;
/// # fn shrink(pool: &cuda_vmm::ElasticPool) -> Result<(), Box<dyn std::error::Error>> {
/// // An event that was never recorded is no proof of anything.
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
    /// Whether the work before the event is known to be over.
    over: AtomicBool,
}

impl Fence {
    /// A fence after all work that is enqueued on `stream` now. Creates an event.
    ///
    /// # Errors
    /// What the device answers.
    #[track_caller]
    pub fn record(stream: &Stream) -> Result<Self, DeviceError> {
        Self::record_as(Event::new(stream.device())?, stream)
    }

    /// A fence as by [`record`](Fence::record), on the event of this one if nobody else holds that: for
    /// a step path that creates no events. An [`EpochGate`](crate::EpochGate) lets go of fences that are
    /// known to be complete when the next lease is taken.
    ///
    /// # Errors
    /// What the device answers.
    #[track_caller]
    pub fn renew(self, stream: &Stream) -> Result<Self, DeviceError> {
        match Arc::into_inner(self.inner) {
            Some(Inner { event, .. }) if event.device() == stream.device() => {
                Self::record_as(event, stream)
            }
            _ => Self::record(stream),
        }
    }

    #[track_caller]
    fn record_as(event: Event, stream: &Stream) -> Result<Self, DeviceError> {
        event.record(stream)?;
        Ok(Self { inner: Arc::new(Inner { event, over: AtomicBool::new(false) }) })
    }

    /// The device whose work it stands for.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.inner.event.device()
    }

    /// The raw `CUevent`, for a wait by other code. It must not be recorded again.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.inner.event.raw()
    }

    /// Whether the work before it has completed. Calls the driver until that was seen once.
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
    /// What the device answers.
    #[track_caller]
    pub fn hold_back(&self, stream: &Stream) -> Result<(), DeviceError> {
        stream.wait(&self.inner.event)
    }

    /// Whether the work before it can touch memory no more. On a lost device no work goes on.
    pub(crate) fn is_at_rest(&self) -> Result<bool, DeviceError> {
        self.at_rest_if_lost(self.is_complete(), true)
    }

    /// Waits on the host until the work before it can touch memory no more.
    pub(crate) fn wait_for_rest(&self) -> Result<(), DeviceError> {
        self.at_rest_if_lost(self.wait(), ())
    }

    /// Whether the work was seen to be over. Calls no driver.
    pub(crate) fn is_known_over(&self) -> bool {
        // Acquire: partner of the store, so that what the device wrote is there for who reads it.
        self.inner.over.load(Ordering::Acquire)
    }

    fn note_over(&self) {
        self.inner.over.store(true, Ordering::Release);
    }

    /// A sticky error ends all work of its context, so nothing is left to wait for.
    fn at_rest_if_lost<T>(
        &self,
        answer: Result<T, DeviceError>,
        at_rest: T,
    ) -> Result<T, DeviceError> {
        // That is not noted: whoever waits for the result of the work must meet its error.
        match answer {
            Err(_) if self.device().poison().is_some() => Ok(at_rest),
            answer => answer,
        }
    }
}
