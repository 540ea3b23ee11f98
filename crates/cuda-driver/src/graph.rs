//! Graphs of launches that a stream captured.

use crate::guard;

use crate::close::once;
use crate::device::Object;
use crate::{Device, DeviceError, Driver, DriverResult, Stream};

/// Launches that were captured once, to be enqueued together many times: an instance of a CUDA graph.
#[derive(Debug)]
pub struct CapturedGraph {
    pub(crate) device: Device,
    /// # Invariants
    /// A live instance of a graph of `device`, until this struct is dropped.
    pub(crate) exec: u64,
}

impl Stream {
    /// Captures what `enqueue` launches on this stream, which runs when the graph is launched, and not
    /// now.
    ///
    /// Within `enqueue`, this thread is refused calls that cannot be captured, and those that may wait:
    /// allocating, freeing and pinning memory, queries of and waits for events, streams and the device.
    /// The capture then fails. So does the capture of a device that another thread waits for as a whole
    /// ([`Device::synchronize`]). On the simulated device only launches of kernels can be captured.
    /// Launches of other threads are no part of the graph.
    ///
    /// # Errors
    /// What `enqueue` answers; `STREAM_CAPTURE_UNSUPPORTED` for the default stream, `ILLEGAL_STATE` for a
    /// stream that is captured already, `STREAM_CAPTURE_INVALIDATED` for a capture that failed. The
    /// stream can be used again, unless the driver has refused twice to end the capture, which
    /// [`Device::close`] reports.
    #[track_caller]
    pub fn capture<E: From<DeviceError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<CapturedGraph, E> {
        let device = self.device();
        // SAFETY: the stream is live (invariant of `raw`).
        device.run(|driver| unsafe { driver.stream_begin_capture(self.raw()) })?;
        // Ended when `enqueue` panics too, so that the stream can be used again.
        let capturing = Capturing { stream: self };
        enqueue()?;
        std::mem::forget(capturing);
        // SAFETY: the graph is the caller's, who uses it no more.
        let exec = self.end_capture(|driver, graph| unsafe { instance(device, driver, graph) })?;
        Ok(CapturedGraph { device: device.clone(), exec })
    }

    /// Ends the capture, and hands its graph to `take`, with the context bound for both: a graph that
    /// waits for another binding could be lost. A call that certainly did nothing is made once more.
    #[track_caller]
    fn end_capture<T>(
        &self,
        take: impl Fn(&dyn Driver, u64) -> DriverResult<T>,
    ) -> Result<T, DeviceError> {
        let mut ended = false;
        let mut answer = self.try_end_capture(&take, &mut ended);
        if guard!("driver.capture-ended-again", !ended, else false) {
            answer = self.try_end_capture(&take, &mut ended);
        }
        if let (false, Err(error)) = (ended, &answer) {
            let error = error.driver_error();
            guard!(
                "driver.capture-told",
                self.device().give_up(error, "a stream may still be captured")
            );
        }
        answer
    }

    #[track_caller]
    fn try_end_capture<T>(
        &self,
        take: impl Fn(&dyn Driver, u64) -> DriverResult<T>,
        ended: &mut bool,
    ) -> Result<T, DeviceError> {
        self.device().clean_up(|driver| {
            // SAFETY: the stream is live (invariant of `raw`).
            let graph = unsafe { driver.stream_end_capture(self.raw()) };
            *ended = !graph.is_err_and(|error| error.code.is_of_call_not_made());
            take(driver, graph?)
        })
    }
}

/// A capture that is given up when this is dropped.
struct Capturing<'a> {
    stream: &'a Stream,
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        let ended = self.stream.end_capture(|driver, graph| {
            // SAFETY: the graph is the caller's, who uses it no more.
            unsafe { destroy(self.stream.device(), driver, graph) };
            Ok(())
        });
        // A capture that failed has no graph, and its error is the one to return.
        if let Err(error) = ended {
            tracing::debug!(%error, "a capture was given up");
        }
    }
}

/// Instantiates a graph and destroys it. The instance lives on.
///
/// # Safety
/// - `graph` is live, and used no more.
pub(crate) unsafe fn instance(
    device: &Device,
    driver: &dyn Driver,
    graph: u64,
) -> DriverResult<u64> {
    // SAFETY: the caller's promise.
    let exec = unsafe { driver.graph_instantiate(graph) };
    // SAFETY: the caller's promise.
    unsafe { destroy(device, driver, graph) };
    exec
}

/// Destroys a graph.
///
/// # Safety
/// - `graph` is live, and used no more.
pub(crate) unsafe fn destroy(device: &Device, driver: &dyn Driver, graph: u64) {
    // SAFETY: the caller's promise.
    if let Err(error) = once(|| unsafe { driver.graph_destroy(graph) }) {
        device.give_up(error, "a graph may not have been destroyed");
    }
}

impl CapturedGraph {
    /// Enqueues the launches on `stream`.
    ///
    /// # Ordering
    /// Runs after what was enqueued on `stream` before, in the order of the capture, and after earlier
    /// launches of this object, whatever their streams. Memory is read when the kernels run.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`]; `INVALID_HANDLE` for a stream of another driver object. A fault
    /// inside a kernel shows at a later call.
    ///
    /// # Safety
    /// - modules of the captured kernels are loaded, and memory that the kernels access is allocated, until
    ///   they have completed;
    /// - host memory that they write is not accessed by the host until they have completed.
    #[track_caller]
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        let device = &self.device;
        device.check_stream(stream, "cuGraphLaunch")?;
        // SAFETY: both handles are live (their invariants) and of this driver object; the rest is the
        // caller's.
        device.run(|driver| unsafe { driver.graph_launch(self.exec, stream.raw()) })
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        // SAFETY: this is its only handle; launches already enqueued still run.
        let _ = unsafe { self.device.destroy(Object::GraphExec(self.exec)) };
    }
}
