//! Events by which each layer of a model waits for its own KV alone.

use cuda_driver::{Device, DeviceError, Event, Stream};

use super::TransportError;

/// One event a layer, made once and recorded by transfer after transfer.
///
/// # Ordering
/// After a transfer that was given these has returned, event `layer` completes when every byte of that
/// layer has arrived: in the pages, or in the host's memory. Layers complete in rising order. What is
/// enqueued behind [`wait`](LayerEvents::wait) runs after that, while later layers still travel; it
/// belongs on another stream than the transfer's, which goes on only when the transfer is over.
///
/// A record is overwritten by the next transfer's: whoever waits must have enqueued the wait before.
#[derive(Debug)]
pub struct LayerEvents {
    events: Box<[Event]>,
}

impl LayerEvents {
    /// Most layers.
    pub const LAYERS_MAX: u32 = 1 << 16;

    /// Makes an event for each of `layers` layers.
    ///
    /// # Errors
    /// [`TransportError::TooMany`] for more than [`LAYERS_MAX`](Self::LAYERS_MAX), and what the driver
    /// answers.
    #[track_caller]
    pub fn new(device: &Device, layers: u32) -> Result<Self, TransportError> {
        let _site = cuda_driver::site::enter();
        if layers > Self::LAYERS_MAX {
            let (what, count, most) = ("layers", layers.into(), Self::LAYERS_MAX.into());
            return Err(TransportError::TooMany { what, count, most });
        }
        let events: Result<_, DeviceError> = (0..layers).map(|_| Event::new(device)).collect();
        Ok(Self { events: events? })
    }

    /// How many layers there are.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.events.len() as u32
    }

    /// The event of a layer; none for a layer that there is not.
    #[must_use]
    pub fn event(&self, layer: u32) -> Option<&Event> {
        self.events.get(layer as usize)
    }

    /// Makes work enqueued on `stream` from now on wait for a layer. For a layer that there is not it
    /// does nothing.
    ///
    /// # Errors
    /// As [`Stream::wait`].
    #[track_caller]
    pub fn wait(&self, stream: &Stream, layer: u32) -> Result<(), DeviceError> {
        match self.event(layer) {
            Some(event) => stream.wait(event),
            None => Ok(()),
        }
    }

    /// Records the events of layers `from..to`.
    pub(crate) fn record(&self, stream: &Stream, from: u64, to: u64) -> Result<(), DeviceError> {
        self.events[from as usize..to as usize].iter().try_for_each(|event| event.record(stream))
    }
}
