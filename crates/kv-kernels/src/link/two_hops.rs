//! The pipeline of two hops: a kernel between the pages and a buffer, the copy engine between a buffer and
//! the host, each buffer handed from one to the other.

use cuda_driver::{DeviceError, Fence, Stream, guard};

use super::blocks::Runs;
use super::pieces::Pace;
use super::ring::Ring;
use super::{HostDirection, HostLink, TransportError};

impl HostLink {
    /// The stream of the copies of a direction: the link is duplex, and so is the ring.
    fn copies(&self, direction: HostDirection) -> &Stream {
        match direction {
            HostDirection::ToHost => &self.copies_to_host,
            HostDirection::ToPages => &self.copies_to_pages,
        }
    }

    /// Carries everything; the caller has made sure that there is a ring.
    pub(super) fn carry_in_two_hops(
        &mut self,
        stream: &Stream,
        runs: Runs<'_>,
        pace: Pace,
    ) -> Result<(), TransportError> {
        let Some(mut ring) = self.ring.take() else { return Ok(()) };
        let direction = runs.direction();
        let outcome = self.pump(&mut ring, stream, runs, pace);
        self.ring = Some(ring);
        outcome.map_err(|error| self.rejoin(stream, direction, error))
    }

    fn pump(
        &self,
        ring: &mut Ring,
        stream: &Stream,
        mut runs: Runs<'_>,
        pace: Pace,
    ) -> Result<(), TransportError> {
        let copies = self.copies(runs.direction());
        let to_host = runs.direction() == HostDirection::ToHost;
        if !to_host {
            // Copies to the host come after kernels of the stream as it is.
            self.fork.record(stream)?;
            guard!("kernels.copies-wait-for-stream", copies.wait(&self.fork)?);
        }
        let (filler, emptier) = if to_host { (stream, copies) } else { (copies, stream) };
        let mut before = 0;
        loop {
            let (left, left_here) = runs.bytes_left();
            let budget = pace.next(before, left, left_here).min(ring.ring_buffer_bytes());
            let Some((piece, bytes)) = runs.take(budget) else { break };
            before = bytes;
            let turn = ring.turn();
            guard!("kernels.fills-what-is-empty", filler.wait(&turn.buffer.emptied)?);
            if to_host {
                runs.walk(self, filler, piece.clone(), turn.address)?;
            } else {
                runs.copy(self, filler, piece.clone(), turn.address)?;
            }
            turn.buffer.filled.record(filler)?;
            guard!("kernels.empties-what-is-filled", emptier.wait(&turn.buffer.filled)?);
            if to_host {
                runs.copy(self, emptier, piece, turn.address)?;
            } else {
                runs.walk(self, emptier, piece, turn.address)?;
            }
            turn.buffer.emptied.record(emptier)?;
        }
        if to_host {
            self.join.record(copies)?;
            guard!("kernels.stream-joins-copies", stream.wait(&self.join)?);
        }
        Ok(())
    }

    /// After a refusal halfway: makes `stream` wait for everything that was enqueued, and the next
    /// users of buffers for `stream`; or, where that is refused as well, waits on the host. The error to
    /// answer.
    fn rejoin(
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
