//! What is used by device work is free when the work before a fence is over.

use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::{Device, DeviceError, ErrorCode, Event, Stream, guard};

/// The end of the work that a stream had when the fence was made. The handle is cheap: clones share
/// the fence, and are equal.
///
/// An [`Event`] has no meaning before it is recorded, and a new meaning when it is recorded again.
/// A fence is recorded when it is made, and never again while a handle exists. So it completes once
/// and stays complete. Any thread may ask, and dropping a handle neither waits nor cancels anything.
///
/// Two questions have two answers when the device is lost. [`is_complete`](Fence::is_complete) and
/// [`wait`](Fence::wait) are for the result of the work, and return the error.
/// [`is_at_rest`](Fence::is_at_rest) and [`wait_for_rest`](Fence::wait_for_rest) are for what the
/// work used: on a lost device no work runs, so it is free. Any other refused call proves nothing,
/// and is an error of both.
///
/// ```compile_fail,E0423
/// # fn unrecorded(event: cuda_driver::Event) -> cuda_driver::Fence {
/// // An event that was never recorded proves nothing.
/// cuda_driver::Fence(event)
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Fence {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    mark: Mark,
    /// Whether the work is known to be complete.
    over: AtomicBool,
}

#[derive(Debug)]
enum Mark {
    /// # Invariants
    /// Recorded after the work, and not again before the last handle outside of a [`FencePool`] is gone.
    Event(Event),
    /// The stream of the work: when it has nothing left to do, the work is complete.
    Stream {
        stream: Stream,
        /// The event to go by once the stream was found busy.
        ///
        /// # Invariants
        /// Recorded once, after the work, and by no capture: it has answered.
        later: OnceLock<Event>,
    },
}

impl Mark {
    /// The event to go by, or the stream to ask and the place of its event.
    fn event(&self) -> Result<&Event, (&Stream, &OnceLock<Event>)> {
        match self {
            Self::Event(event) => Ok(event),
            Self::Stream { stream, later } => later.get().ok_or((stream, later)),
        }
    }
}

impl Fence {
    /// Records a fence after all work that is enqueued on `stream` now. Creates an event.
    ///
    /// # Errors
    /// The device's error.
    #[track_caller]
    pub fn record(stream: &Stream) -> Result<Self, DeviceError> {
        let fence = Self::unrecorded(stream.device())?;
        fence.record_on(stream)?;
        Ok(fence)
    }

    /// A fence after all work that is enqueued on `stream` now, for work after which no event can be
    /// recorded. It completes when the stream is first seen without work, which may be later.
    ///
    /// Makes no driver call. A call of [`is_complete`](Fence::is_complete) that finds the stream busy
    /// tries to record an event, which the fence then goes by: a stream that always gets more work
    /// never is without.
    /// The fence keeps a handle of the stream until its own last handle is dropped.
    #[must_use]
    pub fn without_event(stream: &Stream) -> Self {
        Self::new(Mark::Stream { stream: stream.clone(), later: OnceLock::new() })
    }

    fn new(mark: Mark) -> Self {
        Self { inner: Arc::new(Inner { mark, over: AtomicBool::new(false) }) }
    }

    /// Records a fence like [`record`](Fence::record), with the event of this one if nobody else has a
    /// handle: for step paths that create no events and allocate nothing.
    ///
    /// # Errors
    /// The device's error.
    #[track_caller]
    pub fn renew(mut self, stream: &Stream) -> Result<Self, DeviceError> {
        if !self.is_spare_of(stream.device()) {
            return Self::record(stream);
        }
        self.record_on(stream)?;
        Ok(self)
    }

    /// Not a fence before it is recorded, so it does not leave this module.
    #[track_caller]
    fn unrecorded(device: &Device) -> Result<Self, DeviceError> {
        Ok(Self::new(Mark::Event(Event::new(device)?)))
    }

    /// The caller has the only handle.
    #[track_caller]
    fn record_on(&self, stream: &Stream) -> Result<(), DeviceError> {
        // Relaxed: the handle is handed to other threads later, by means that order this.
        self.inner.over.store(false, Ordering::Relaxed);
        match &self.inner.mark {
            Mark::Event(event) => event.record(stream),
            Mark::Stream { .. } => Ok(()),
        }
    }

    /// Whether its event can be recorded on streams of `device`'s context, because nobody else has a handle.
    fn is_spare_of(&mut self, device: &Device) -> bool {
        let is_own = self.device().shares_context(device);
        let is_sole = Arc::get_mut(&mut self.inner).is_some();
        matches!(self.inner.mark, Mark::Event(_))
            && guard!("driver.fence-own-device", is_own, else true)
            && guard!("driver.fence-not-shared", is_sole, else true)
    }

    /// The device of the fence's work.
    #[must_use]
    pub fn device(&self) -> &Device {
        match &self.inner.mark {
            Mark::Event(event) => event.device(),
            Mark::Stream { stream, .. } => stream.device(),
        }
    }

    /// Whether the work was already seen to be complete. Makes no driver call.
    #[must_use]
    pub fn is_known_complete(&self) -> bool {
        // Acquire: partner of the store, so that the reader sees what the device wrote.
        self.inner.over.load(Ordering::Acquire)
    }

    /// Whether the work is complete. Calls the driver until the first "yes".
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        let complete = self.is_known_complete()
            || match self.inner.mark.event() {
                Ok(event) => event.is_complete()?,
                Err((stream, later)) => {
                    let is_over = || is_over_by_event(stream, later);
                    stream.is_idle()? || guard!("driver.busy-fence-recorded", is_over(), else false)
                }
            };
        if complete {
            self.note_complete();
        }
        Ok(complete)
    }

    /// Waits on the host until the work is complete.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn wait(&self) -> Result<(), DeviceError> {
        if !self.is_known_complete() {
            match self.inner.mark.event() {
                Ok(event) => event.synchronize()?,
                Err((stream, _)) => stream.synchronize()?,
            }
            self.note_complete();
        }
        Ok(())
    }

    /// Makes the work that is enqueued on `stream` from now on wait for the work before the fence.
    ///
    /// # Ordering
    /// Waits on the device, not on the host. Enqueues nothing if the work is known to be complete.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for a stream of another driver object; the device's error.
    #[track_caller]
    pub fn hold_back(&self, stream: &Stream) -> Result<(), DeviceError> {
        // A stream that waited nevertheless might wait for later work.
        if guard!("driver.complete-holds-nothing", self.is_known_complete(), else false) {
            let (ours, call) = (self.device(), "cuStreamWaitEvent");
            return Ok(stream.device().check_driver(ours, call, ErrorCode::INVALID_HANDLE)?);
        }
        match self.inner.mark.event() {
            Ok(event) => stream.wait(event),
            Err((other, _)) => stream.wait_for(other, &Event::new(other.device())?),
        }
    }

    /// Whether the work can no longer touch memory.
    ///
    /// # Errors
    /// The driver's error, for a device that is not lost.
    #[track_caller]
    pub fn is_at_rest(&self) -> Result<bool, DeviceError> {
        self.at_rest_if_lost(self.is_complete(), true)
    }

    /// Whether the work of all `fences` can no longer touch memory. Asks up to the first that can.
    ///
    /// # Errors
    /// As of [`is_at_rest`](Fence::is_at_rest).
    #[track_caller]
    pub fn are_at_rest(fences: &[Self]) -> Result<bool, DeviceError> {
        for fence in fences {
            if !fence.is_at_rest()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits on the host until the work can no longer touch memory.
    ///
    /// # Errors
    /// As of [`is_at_rest`](Fence::is_at_rest).
    #[track_caller]
    pub fn wait_for_rest(&self) -> Result<(), DeviceError> {
        self.at_rest_if_lost(self.wait(), ())
    }

    fn note_complete(&self) {
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
            Err(_) if guard!("driver.lost-is-at-rest", is_lost(self.device()), else false) => {
                Ok(at_rest)
            }
            answer => answer,
        }
    }
}

/// Records an event for a fence whose stream is busy; returns whether it is complete already. After a
/// refusal the stream is asked again next time.
#[track_caller]
fn is_over_by_event(stream: &Stream, later: &OnceLock<Event>) -> bool {
    let recorded = Event::new(stream.device()).and_then(|event| {
        event.record(stream)?;
        // A capture that began meanwhile has taken the record for itself. Such an event answers with an
        // error for ever.
        Ok((event.is_complete()?, event))
    });
    let Ok((is_complete, event)) = recorded else { return false };
    // Where another thread has set one meanwhile, either will do.
    let _ = later.set(event);
    is_complete
}

impl PartialEq for Fence {
    /// Whether both are handles of one fence.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Fence {}

impl Hash for Fence {
    fn hash<H: Hasher>(&self, state: &mut H) {
        ptr::hash(Arc::as_ptr(&self.inner), state);
    }
}

/// Events for fences, each recorded again when nobody holds its last fence any more: for paths that
/// create no events and allocate nothing.
///
/// It has as many events as fences of it were held at once, on any devices. Handles of one context
/// share them.
#[derive(Debug, Default)]
pub struct FencePool {
    /// The one recorded longest ago first.
    fences: SmallVec<[Fence; 2]>,
}

impl FencePool {
    /// Makes sure that the next `count` fences on streams of `device` create no event.
    ///
    /// # Errors
    /// The device's error. The events that were created are kept.
    #[track_caller]
    pub fn prepare(&mut self, device: &Device, count: usize) -> Result<(), DeviceError> {
        let spare = self.fences.iter_mut().map(|fence| fence.is_spare_of(device));
        for _ in spare.filter(|is_spare| *is_spare).take(count).count()..count {
            self.fences.push(Fence::unrecorded(device)?);
        }
        Ok(())
    }

    /// Records a fence like [`Fence::record`]. Creates an event if none is left.
    ///
    /// # Errors
    /// The device's error.
    #[track_caller]
    pub fn record(&mut self, stream: &Stream) -> Result<Fence, DeviceError> {
        let device = stream.device();
        let fence = match self.fences.iter_mut().position(|fence| fence.is_spare_of(device)) {
            Some(at) => self.fences.remove(at),
            None => Fence::unrecorded(device)?,
        };
        self.fences.push(fence.clone());
        fence.record_on(stream)?;
        Ok(fence)
    }
}
