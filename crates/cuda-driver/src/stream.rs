//! Streams and events, which order a device's work.

use std::sync::Arc;

use crate::guard;

use crate::alive::{Held, Kind};
use crate::device::{Object, Owner, Retired};
use crate::{
    CopyError, Device, DeviceError, DeviceSpan, Driver, DriverError, DriverResult, ErrorCode,
    HostAccess, PinnedBuffer,
};

/// `CU_STREAM_PER_THREAD`, which is another stream on every thread.
const STREAM_PER_THREAD: u64 = 2;

/// A stream: work enqueued on it runs in order. A cheap handle; clones are the same stream.
#[derive(Clone, Debug)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

#[derive(Debug)]
struct StreamInner {
    device: Held,
    /// # Invariants
    /// A live stream of `device`'s context until this struct is dropped, the same one on every thread.
    raw: u64,
    owned: bool,
    /// The owner of an adopted stream.
    owner: Owner,
}

impl Stream {
    /// Creates a stream that does not synchronise with the legacy default stream.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        let raw = device.run(|driver| driver.stream_create(false))?;
        Ok(Self::from_parts(device, raw, true, Owner::ELSEWHERE))
    }

    /// Uses a stream that the host program already has, such as cudarc's `CudaStream`; 0 is the
    /// legacy default stream.
    ///
    /// `CU_STREAM_PER_THREAD` (2) is refused: it is another stream on every thread, and a
    /// [`Stream`] must be the same one on all threads.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with `INVALID_CONTEXT` when the stream is of another context, and with
    /// `INVALID_HANDLE` for 2.
    ///
    /// # Safety
    /// - `raw` is 0 or a live `CUstream`, and stays so until the last clone is dropped.
    #[track_caller]
    pub unsafe fn adopt(device: &Device, raw: u64) -> Result<Self, DeviceError> {
        // SAFETY: the caller promises the same.
        unsafe { Self::adopt_of(device, raw, Owner::ELSEWHERE) }
    }

    /// # Safety
    /// - As [`adopt`](Stream::adopt), as long as `owner` is held.
    #[track_caller]
    pub(crate) unsafe fn adopt_of(
        device: &Device,
        raw: u64,
        owner: Owner,
    ) -> Result<Self, DeviceError> {
        if guard!("driver.no-stream-per-thread", raw == STREAM_PER_THREAD, else false) {
            return Err(DriverError::new("cuStreamGetCtx", ErrorCode::INVALID_HANDLE).into());
        }
        if raw != 0 {
            // SAFETY: the caller passes a live stream.
            let context = device.run(|driver| unsafe { driver.stream_get_ctx(raw) })?;
            if context != device.context() {
                return Err(DriverError::new("cuStreamGetCtx", ErrorCode::INVALID_CONTEXT).into());
            }
        }
        Ok(Self::from_parts(device, raw, false, owner))
    }

    fn from_parts(device: &Device, raw: u64, owned: bool, owner: Owner) -> Self {
        let device = Held::new(device, Kind::Stream, 0);
        Self { inner: Arc::new(StreamInner { device, raw, owned, owner }) }
    }

    /// The device of this stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The raw `CUstream`, to hand to other libraries.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.inner.raw
    }

    /// Whether both are handles of one stream, adopted or not.
    pub(crate) fn is_same(&self, other: &Stream) -> bool {
        self.raw() == other.raw() && self.device().shares_context(other.device())
    }

    /// Makes later work of this stream wait for the last record of `event`.
    ///
    /// # Ordering
    /// Waits on the device, not on the host. An event without a record does not wait.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an event of another driver object; [`DeviceError::Poisoned`] when the device of the
    /// event is lost, which does not lose this stream's; what the driver answers.
    #[track_caller]
    pub fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        let device = &self.inner.device;
        device.check_driver(&event.device, "cuStreamWaitEvent", ErrorCode::INVALID_HANDLE)?;
        // SAFETY: both handles are live (invariants of `raw`), and of this driver object.
        let call = |driver: &dyn Driver| unsafe { driver.stream_wait_event(self.raw(), event.raw) };
        device.run_with(&[&event.device], call)
    }

    /// Waits on the host until all work enqueued here has completed.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is live (invariant of `raw`).
        self.inner.device.run(|driver| unsafe { driver.stream_synchronize(self.raw()) })
    }

    /// Whether all work enqueued here has completed.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn is_idle(&self) -> Result<bool, DeviceError> {
        // SAFETY: the stream is live (invariant of `raw`).
        self.inner.device.run(|driver| unsafe { driver.stream_query(self.raw()) })
    }

    /// Enqueues a copy from pinned host memory, filling `destination`.
    ///
    /// # Ordering
    /// The source is read when the copy runs, not now: its bytes must not change before an event
    /// recorded after this call has completed. Device-side order is the caller's.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] when the source has fewer than `offset + destination` bytes;
    /// `INVALID_VALUE` for memory of another driver object.
    #[track_caller]
    pub fn copy_to_device(
        &self,
        destination: DeviceSpan,
        source: &PinnedBuffer,
        offset: u64,
    ) -> Result<(), CopyError> {
        let host = source.host_range(offset, destination.bytes())?;
        guard!("driver.pinned-of-own-driver", self.check_pinned(source, "cuMemcpyHtoDAsync")?);
        let _use = destination.used_by(self)?;
        self.enqueue(destination.bytes(), |driver, stream| {
            // SAFETY: the range lies inside the pinned buffer, whose memory is not freed before
            // the device has finished (a drop only retires it; `cuMemFreeHost` waits). The host
            // writes it through `write_at` and `slice_mut` only, whose callers wait for readers.
            // The destination is device memory, whose owner waits for this call (`DeviceSpan`).
            unsafe {
                driver.memcpy_htod_async(destination.address(), host, destination.bytes(), stream)
            }
        })
    }

    /// Enqueues a copy of `source` into pinned host memory at `offset`.
    ///
    /// # Ordering
    /// The bytes have arrived when an event recorded after this call has completed.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] when the buffer has fewer than `offset + source` bytes;
    /// `INVALID_VALUE` for memory of another driver object.
    #[track_caller]
    pub fn copy_to_host(
        &self,
        destination: &PinnedBuffer,
        offset: u64,
        source: DeviceSpan,
    ) -> Result<(), CopyError> {
        let host = destination.host_range(offset, source.bytes())?;
        self.check_pinned(destination, "cuMemcpyDtoHAsync")?;
        let _use = source.used_by(self)?;
        self.enqueue(source.bytes(), |driver, stream| {
            // SAFETY: the range lies inside the pinned buffer, which is not freed before the
            // device has finished and hands out no references to its bytes except through
            // `slice_mut`, whose caller rules out device access; `read_at` and `write_at` leave
            // the wait to their callers.
            unsafe { driver.memcpy_dtoh_async(host, source.address(), source.bytes(), stream) }
        })
    }

    /// Enqueues a copy within the device, or between peers that have access.
    ///
    /// # Errors
    /// [`CopyError::Lengths`] when the spans differ in length.
    #[track_caller]
    pub fn copy_on_device(
        &self,
        destination: DeviceSpan,
        source: DeviceSpan,
    ) -> Result<(), CopyError> {
        if destination.bytes() != source.bytes() {
            return Err(CopyError::Lengths {
                destination: destination.bytes(),
                source_bytes: source.bytes(),
            });
        }
        let _uses = (destination.used_by(self)?, source.used_by(self)?);
        self.enqueue(source.bytes(), |driver, stream| {
            // SAFETY: both spans are device memory, whose owners wait for this call (`DeviceSpan`).
            unsafe {
                driver.memcpy_dtod_async(
                    destination.address(),
                    source.address(),
                    source.bytes(),
                    stream,
                )
            }
        })
    }

    /// Enqueues filling `destination` with `byte`.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn fill(&self, destination: DeviceSpan, byte: u8) -> Result<(), CopyError> {
        let _use = destination.used_by(self)?;
        self.enqueue(destination.bytes(), |driver, stream| {
            // SAFETY: the span is device memory, whose owner waits for this call (`DeviceSpan`).
            unsafe {
                driver.memset_d8_async(destination.address(), byte, destination.bytes(), stream)
            }
        })
    }

    /// Copies `data` to the device and waits until it has arrived. For set-up and tests.
    ///
    /// The copy uses memory of this crate, in pieces of 4 MiB, and never the borrowed bytes.
    /// Otherwise a refused wait would end the borrow while the copy is pending.
    ///
    /// # Ordering
    /// Waits on the host for all work enqueued here.
    ///
    /// # Errors
    /// [`CopyError::Lengths`] when the lengths differ; [`CopyError::Device`], after which a part of the
    /// bytes may have arrived or may yet arrive.
    #[track_caller]
    pub fn upload(&self, destination: DeviceSpan, data: &[u8]) -> Result<(), CopyError> {
        if destination.bytes() != data.len() as u64 {
            return Err(CopyError::Lengths {
                destination: destination.bytes(),
                source_bytes: data.len() as u64,
            });
        }
        if guard!("driver.no-bytes-wait", data.is_empty(), else false) {
            return Ok(self.synchronize()?);
        }
        let mut own = OwnBytes::new(data.len());
        for (place, data) in (0..).zip(data.chunks(OWN_BYTES_MAX)) {
            let piece = destination.slice(place * OWN_BYTES_MAX as u64, data.len() as u64)?;
            own.at(&self.inner.device, data.len(), true).copy_from_slice(data);
            let used = piece.used_by(self)?;
            self.carry(&mut own, |driver, own, stream| {
                let host = guard!("driver.upload-own-memory", own, else data.as_ptr() as u64);
                // For the call alone: the owner's end waits for no stream.
                let _used = used;
                // SAFETY: `carry` keeps the memory until the copy is over; it is as long as the
                // piece, which is device memory, whose owner waits for this call (`DeviceSpan`).
                unsafe { driver.memcpy_htod_async(piece.address(), host, piece.bytes(), stream) }
            })?;
        }
        Ok(())
    }

    /// Copies `source` from the device and waits until it has arrived. For set-up and tests.
    ///
    /// As in [`upload`](Stream::upload), the copy does not use the borrowed bytes.
    ///
    /// # Ordering
    /// Waits on the host for all work enqueued here.
    ///
    /// # Errors
    /// [`CopyError::Lengths`] when the lengths differ; [`CopyError::Device`], after which a part of the
    /// bytes has been written.
    #[track_caller]
    pub fn download(&self, destination: &mut [u8], source: DeviceSpan) -> Result<(), CopyError> {
        if source.bytes() != destination.len() as u64 {
            return Err(CopyError::Lengths {
                destination: destination.len() as u64,
                source_bytes: source.bytes(),
            });
        }
        if destination.is_empty() {
            return Ok(self.synchronize()?);
        }
        let mut own = OwnBytes::new(destination.len());
        for (place, data) in (0..).zip(destination.chunks_mut(OWN_BYTES_MAX)) {
            let piece = source.slice(place * OWN_BYTES_MAX as u64, data.len() as u64)?;
            let used = piece.used_by(self)?;
            self.carry(&mut own, |driver, own, stream| {
                let host = guard!("driver.download-own-memory", own, else data.as_mut_ptr() as u64);
                let _used = used;
                // SAFETY: `carry` keeps the memory until the copy is over, and no code reads it
                // before; it is as long as the piece.
                unsafe { driver.memcpy_dtoh_async(host, piece.address(), piece.bytes(), stream) }
            })?;
            data.copy_from_slice(own.at(&self.inner.device, data.len(), false));
        }
        Ok(())
    }

    /// Enqueues a copy from or to memory of this crate, and waits for it. If the wait is refused,
    /// the memory goes to the device's retired memory, which is freed after a wait.
    #[track_caller]
    fn carry(
        &self,
        own: &mut OwnBytes,
        call: impl FnOnce(&dyn Driver, u64, u64) -> DriverResult<()>,
    ) -> Result<(), CopyError> {
        let host = own.bytes.as_mut_ptr().expose_provenance() as u64;
        let device = &self.inner.device;
        device.run(|driver| call(driver, host, self.raw()))?;
        Ok(self.synchronize().inspect_err(|_| {
            guard!(
                "driver.unwaited-memory-kept",
                device.retire(Retired::Lent(std::mem::take(&mut own.bytes)))
            );
        })?)
    }

    /// Refuses memory of another driver object, because that one would free it without waiting for
    /// this stream.
    fn check_pinned(&self, memory: &PinnedBuffer, call: &'static str) -> Result<(), DeviceError> {
        let device = &self.inner.device;
        Ok(device.check_driver(memory.device(), call, ErrorCode::INVALID_VALUE)?)
    }

    /// Enqueues one operation of `bytes` bytes, or none for no bytes.
    #[track_caller]
    fn enqueue(
        &self,
        bytes: u64,
        call: impl FnOnce(&dyn Driver, u64) -> DriverResult<()>,
    ) -> Result<(), CopyError> {
        if bytes == 0 {
            return Ok(());
        }
        Ok(self
            .inner
            .device
            .run(|driver| call(driver, self.raw()).map_err(|error| error.of_bytes(bytes)))?)
    }
}

/// Most bytes that [`Stream::upload`] and [`Stream::download`] copy at once.
const OWN_BYTES_MAX: usize = 4 << 20;

/// Memory of this crate, for copies to and from borrowed bytes.
struct OwnBytes {
    bytes: Box<[u8]>,
}

impl OwnBytes {
    /// Memory for copying `bytes` bytes, one piece after the other.
    fn new(bytes: usize) -> Self {
        Self { bytes: vec![0; bytes.min(OWN_BYTES_MAX)].into_boxed_slice() }
    }

    /// The first `bytes` bytes, for the host to access now.
    #[track_caller]
    fn at(&mut self, device: &Device, bytes: usize, writes: bool) -> &mut [u8] {
        let place = &mut self.bytes[..bytes];
        let address = place.as_ptr().addr() as u64;
        let access = HostAccess { address, bytes: bytes as u64, writes };
        guard!("driver.lent-access-told", device.host_access(access));
        place
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: this is the last handle of a stream that `new` created.
            let _ = unsafe { self.device.destroy(Object::Stream(self.raw)) };
        }
        self.owner.let_go(&**self.device.driver());
    }
}

/// A point in a stream's work that the host and other streams can wait for.
#[derive(Debug)]
pub struct Event {
    device: Held,
    /// # Invariants
    /// A live event of `device`'s context until this struct is dropped.
    raw: u64,
}

impl Event {
    /// Creates an event for ordering, without a time.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        let raw = device.run(|driver| driver.event_create(false))?;
        Ok(Self { device: Held::new(device, Kind::Event, 0), raw })
    }

    /// Creates an event that also records the time of its completion.
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn with_timing(device: &Device) -> Result<Self, DeviceError> {
        let raw = device.run(|driver| driver.event_create(true))?;
        Ok(Self { device: Held::new(device, Kind::Event, 0), raw })
    }

    /// The raw `CUevent`.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.raw
    }

    /// The device that the event belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Records the event: it completes when the work enqueued on `stream` so far has.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`]; `INVALID_HANDLE` for a stream of another driver object.
    #[track_caller]
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.device.check_stream(stream, "cuEventRecord")?;
        // SAFETY: both handles are live (invariants of `raw`), and of this driver object.
        self.device.run(|driver| unsafe { driver.event_record(self.raw, stream.raw()) })
    }

    /// Whether the last record has completed; true if there was none.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event is live (invariant of `raw`).
        self.device.run(|driver| unsafe { driver.event_query(self.raw) })
    }

    /// Waits on the host until the last record has completed.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    #[track_caller]
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is live (invariant of `raw`).
        self.device.run(|driver| unsafe { driver.event_synchronize(self.raw) })
    }

    /// Milliseconds from `earlier` to this event. Both must record times and have completed.
    ///
    /// # Errors
    /// `NOT_READY` before both have completed, `INVALID_HANDLE` for events without time.
    #[track_caller]
    pub fn elapsed_ms_since(&self, earlier: &Event) -> Result<f32, DeviceError> {
        let other = &earlier.device;
        self.device.check_driver(other, "cuEventElapsedTime", ErrorCode::INVALID_HANDLE)?;
        // SAFETY: both events are live (invariants of `raw`), and of this driver object.
        self.device.run(|driver| unsafe { driver.event_elapsed_time(earlier.raw, self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this is the only handle of the event.
        let _ = unsafe { self.device.destroy(Object::Event(self.raw)) };
    }
}
