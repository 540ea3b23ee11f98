//! The pipeline of two hops: a kernel between the pages and a buffer, the copy engine between a buffer and
//! the host, each buffer handed from one to the other.

use cuda_driver::{DeviceError, Fence, Stream, guard};

use super::host_order::{HostOrder, HostReady};
use super::pieces::Pace;
use super::ring::Ring;
use super::{HostArrival, HostDirection, HostLink, Transport, TransportError};

/// What goes in pieces through the ring.
pub(super) trait Carried {
    /// What one buffer holds.
    type Piece;

    fn direction(&self) -> HostDirection;

    /// Bytes that are left of all, and of what the next piece begins with.
    fn bytes_left(&self) -> (u64, u64);

    /// Takes the next piece, of at most `budget` bytes, which is at most a buffer; with its bytes.
    fn take(&mut self, budget: u64) -> Option<(Self::Piece, u64)>;

    /// Enqueues the kernel between the pages and the buffer.
    fn walk(
        &self,
        link: &HostLink,
        stream: &Stream,
        piece: &Self::Piece,
        buffer: u64,
    ) -> Result<(), TransportError>;

    /// Enqueues the copies between the buffer and the host.
    fn copy(
        &self,
        link: &HostLink,
        copies: &Stream,
        piece: &Self::Piece,
        buffer: u64,
    ) -> Result<(), TransportError>;

    /// Notes on `stream` that the piece has arrived when what is enqueued there has completed.
    fn arrived(&self, stream: &Stream, piece: &Self::Piece) -> Result<(), DeviceError>;
}

impl HostLink {
    /// The stream of the copies of a direction: the link is duplex, and so is the ring.
    pub(super) fn copies(&self, direction: HostDirection) -> &Stream {
        match direction {
            HostDirection::ToHost => &self.copies_to_host,
            HostDirection::ToPages => &self.copies_to_pages,
        }
    }

    /// Carries everything, and returns the stream of the last step; the caller has made sure that there is
    /// a ring.
    pub(super) fn carry_in_two_hops(
        &mut self,
        stream: &Stream,
        carried: &mut impl Carried,
        pace: Pace,
        order: HostOrder<'_>,
    ) -> Result<Stream, TransportError> {
        let Some(mut ring) = self.ring.take() else { return Ok(stream.clone()) };
        let outcome = self.pump(&mut ring, stream, carried, pace, order);
        self.ring = Some(ring);
        outcome
    }

    fn pump(
        &self,
        ring: &mut Ring,
        stream: &Stream,
        carried: &mut impl Carried,
        pace: Pace,
        order: HostOrder<'_>,
    ) -> Result<Stream, TransportError> {
        let direction = carried.direction();
        let copies = self.copies(direction);
        let to_host = direction == HostDirection::ToHost;
        self.begin(stream, direction, order)?;
        let (filler, emptier) = if to_host { (stream, copies) } else { (copies, stream) };
        let mut before = 0;
        loop {
            let (left, left_here) = carried.bytes_left();
            let budget = pace.next(before, left, left_here).min(ring.ring_buffer_bytes());
            let Some((piece, bytes)) = carried.take(budget) else { break };
            before = bytes;
            let turn = ring.turn();
            guard!("kernels.fills-what-is-empty", filler.wait(&turn.buffer.emptied)?);
            if to_host {
                carried.walk(self, filler, &piece, turn.address)?;
            } else {
                carried.copy(self, filler, &piece, turn.address)?;
            }
            turn.buffer.filled.record(filler)?;
            guard!("kernels.empties-what-is-filled", emptier.wait(&turn.buffer.filled)?);
            if to_host {
                carried.copy(self, emptier, &piece, turn.address)?;
            } else {
                carried.walk(self, emptier, &piece, turn.address)?;
            }
            turn.buffer.emptied.record(emptier)?;
            carried.arrived(emptier, &piece)?;
        }
        if to_host && matches!(order, HostOrder::Strict) {
            self.join.record(copies)?;
            guard!("kernels.stream-joins-copies", stream.wait(&self.join)?);
        }
        Ok(guard!("kernels.arrival-behind-copies", emptier, else filler).clone())
    }

    /// Orders the host's end behind what must come before it.
    fn begin(
        &self,
        stream: &Stream,
        direction: HostDirection,
        order: HostOrder<'_>,
    ) -> Result<(), DeviceError> {
        let copies = self.copies(direction);
        let ready = match order {
            HostOrder::Strict => HostReady::InStream,
            HostOrder::Started(ready) => ready,
        };
        match (ready, direction) {
            (HostReady::After(fence), _) => {
                guard!("kernels.copies-wait-until-ready", fence.hold_back(copies), else Ok(()))
            }
            (HostReady::InStream, HostDirection::ToPages) => {
                self.fork.record(stream)?;
                guard!("kernels.copies-wait-for-stream", copies.wait(&self.fork), else Ok(()))
            }
            // Copies to the host come after kernels of the stream as it is.
            (HostReady::InStream, HostDirection::ToHost) | (HostReady::Now, _) => Ok(()),
        }
    }

    /// Carries by work of the stream alone, which is the stream of the last step.
    pub(super) fn in_stream(
        &mut self,
        stream: &Stream,
        order: HostOrder<'_>,
        carry: impl FnOnce(&mut Self) -> Result<(), TransportError>,
    ) -> Result<Stream, TransportError> {
        if let HostOrder::Started(HostReady::After(fence)) = order {
            guard!("kernels.stream-waits-until-ready", fence.hold_back(stream)?);
        }
        carry(self)?;
        Ok(stream.clone())
    }

    /// The arrival of a transfer that was started, and whose last step is on `last`.
    pub(super) fn arrival(
        &mut self,
        stream: &Stream,
        direction: HostDirection,
        (transport, bytes, last): (Transport, u64, Stream),
    ) -> Result<HostArrival, TransportError> {
        let recorded = self.fences.record(&last);
        let fence = recorded.map_err(|error| self.rejoin(stream, direction, error.into()))?;
        if direction == HostDirection::ToHost {
            self.last_to_host = Some(fence.clone());
        }
        Ok(HostArrival { fence, transport, bytes })
    }

    /// After a refusal halfway: makes `stream` wait for everything that was enqueued, and the next
    /// users of buffers for `stream`; or, where that is refused as well, waits on the host. The error to
    /// answer.
    pub(super) fn rejoin(
        &mut self,
        stream: &Stream,
        direction: HostDirection,
        error: TransportError,
    ) -> TransportError {
        let copies = self.copies(direction);
        let join = || self.join.record(copies).and_then(|()| stream.wait(&self.join));
        let joined = guard!("kernels.refusal-joins-copies", join(), else Ok(()));
        let settled = joined.and_then(|()| match &self.ring {
            Some(ring) => ring.settle(stream),
            None => Ok(()),
        });
        if settled.is_ok() || Self::comes_to_rest([copies, stream]) {
            return error;
        }
        self.is_unordered = true;
        TransportError::Unordered { error: Box::new(error) }
    }

    /// Waits on the host for streams; false where that is refused. On a lost device nothing runs any more.
    fn comes_to_rest(streams: [&Stream; 2]) -> bool {
        let rests = |stream: &Stream| {
            let fence = Fence::without_event(stream);
            (0..WAITS).any(|_| {
                let is_over = fence.wait_for_rest().is_ok();
                guard!("kernels.refused-wait-is-no-rest", is_over, else true)
            })
        };
        streams.into_iter().all(rests)
    }

    /// Waits for what a refused transfer has left without an order, if one has.
    ///
    /// # Errors
    /// What the driver answers; nothing may be enqueued then.
    pub(super) fn wait_for_unordered(&mut self) -> Result<(), DeviceError> {
        if self.is_unordered {
            guard!("kernels.unordered-is-waited-for", self.device().synchronize()?);
            self.is_unordered = false;
        }
        Ok(())
    }
}

/// Waits that are tried before a refused one is believed.
const WAITS: usize = 4;
