//! Where the host's end of a transfer stands in the order of device work.

use std::fmt;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError, Event, Stream, guard};

use super::Transport;

/// From when on the host's chunks of a transfer may be accessed, by
/// [`HostLink::start_chunks`](super::HostLink::start_chunks).
///
/// It is the caller's word about chunks alone: pages are always accessed in the order of the stream.
#[derive(Clone, Copy, Debug, Default)]
pub enum HostReady<'a> {
    /// When what was enqueued on the stream before has completed.
    #[default]
    InStream,
    /// At once. Chunks to read were written by the host, or by device work that has completed; nothing
    /// on the device still uses chunks that are to be written. Transfers that were started before count
    /// as device work until they have arrived.
    Now,
    /// When the last record of an event has completed, such as that of an earlier
    /// [`HostArrival::event`]. Later transfers of the same direction wait for it too.
    After(&'a Event),
}

/// The end of a transfer that was started: it completes when every byte has arrived.
///
/// Of a transfer to the host, the bytes are in the host's memory then; of one to the pages, they are in
/// the pages, and the host's memory may be written again. It is complete, too, when the transfer had
/// nothing to move and the stream's earlier work has completed.
///
/// A handle, whose clones are of the same transfer. Nothing waits when it is dropped, and nothing is
/// cancelled: it is the only way to learn that bytes have arrived at the host.
#[derive(Clone)]
#[must_use = "without it nothing tells when the bytes have arrived"]
pub struct HostArrival {
    event: Arc<Event>,
    transport: Transport,
    bytes: u64,
}

impl HostArrival {
    /// Makes work that is enqueued on `stream` from now on wait for the arrival.
    ///
    /// # Errors
    /// As [`Stream::wait`].
    #[track_caller]
    pub fn wait(&self, stream: &Stream) -> Result<(), DeviceError> {
        stream.wait(&self.event)
    }

    /// Waits on the host for the arrival.
    ///
    /// # Errors
    /// The sticky error of the device, if work on it failed.
    #[track_caller]
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.event.synchronize()
    }

    /// Whether every byte has arrived.
    ///
    /// # Errors
    /// The sticky error of the device, if work on it failed.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        self.event.is_complete()
    }

    /// The event, for [`HostReady::After`] and for other libraries. Nobody but the link records it, and
    /// the link not before the last clone of this handle is dropped.
    #[must_use]
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// The way that the bytes go.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Bytes that move; skipped tokens, and tokens without a slot, are not among them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for HostArrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArrival")
            .field("transport", &self.transport)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Events of arrivals, used again when nobody holds them any more.
#[derive(Debug)]
pub(super) struct Arrivals {
    device: Device,
    events: Vec<Arc<Event>>,
    next: usize,
    /// That of the last transfer to the host that was started.
    last: Option<Arc<Event>>,
}

/// Events that are made beforehand: as many arrivals can be held before another is made.
const ARRIVALS: usize = 32;

impl Arrivals {
    pub(super) fn new(device: &Device) -> Result<Self, DeviceError> {
        let event = |_| Event::new(device).map(Arc::new);
        let events: Result<_, _> = (0..ARRIVALS).map(event).collect();
        Ok(Self { device: device.clone(), events: events?, next: 0, last: None })
    }

    /// An event that no arrival holds.
    pub(super) fn free(&mut self) -> Result<Arc<Event>, DeviceError> {
        let count = self.events.len();
        // The one after the last that was given out is the likeliest to be free.
        let free = (0..count).map(|step| (self.next + step) % count).find(|&index| {
            let is_free = Arc::strong_count(&self.events[index]) == 1;
            guard!("kernels.arrivals-are-not-shared", is_free, else true)
        });
        let index = match free {
            Some(index) => index,
            None => {
                self.events.push(Arc::new(Event::new(&self.device)?));
                count
            }
        };
        self.next = (index + 1) % self.events.len();
        Ok(Arc::clone(&self.events[index]))
    }

    /// Whether the last transfer to the host that was started has arrived.
    pub(super) fn last_is_complete(&self) -> bool {
        // A device that answers with an error has nothing on its way.
        self.last.as_ref().is_none_or(|event| event.is_complete().unwrap_or(true))
    }

    pub(super) fn note_last(&mut self, event: &Arc<Event>) {
        self.last = Some(Arc::clone(event));
    }

    /// The end of a transfer after whose last step `event` was recorded.
    pub(super) fn arrival(event: Arc<Event>, transport: Transport, bytes: u64) -> HostArrival {
        HostArrival { event, transport, bytes }
    }
}

/// How a transfer stands in the order of its stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum HostOrder<'a> {
    /// As one operation.
    Strict,
    /// The pages in the order of the stream; the host's end from `ready` on, and until an event is
    /// recorded after the last step.
    Started { ready: HostReady<'a>, arrived: &'a Event },
}
