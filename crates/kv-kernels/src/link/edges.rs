//! The waits that order the streams of a transfer, by name, so that tests can leave each one out.

use cuda_driver::{DeviceError, Event, Stream};

use super::HostLink;

/// A wait of one stream for another.
#[cfg_attr(
    not(all(feature = "sabotage", debug_assertions)),
    allow(unreachable_pub, reason = "only tests that leave edges out name them")
)]
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum LinkEdge {
    /// Who fills a buffer of the ring waits until its last user has emptied it.
    BufferEmpty,
    /// Who empties a buffer waits until it has been filled.
    BufferFilled,
    /// Copies from the host wait for the stream's earlier work.
    Fork,
    /// The host's end waits for the event that the caller named.
    Ready,
    /// The stream goes on when copies to the host have been made.
    Join,
    /// An arrival is recorded behind the last copy to the host.
    Arrival,
    /// After a refusal, buffers count as used until all of the transfer that was refused is over.
    Settle,
}

impl LinkEdge {
    /// Every one.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub const ALL: [Self; 7] = [
        Self::BufferEmpty,
        Self::BufferFilled,
        Self::Fork,
        Self::Ready,
        Self::Join,
        Self::Arrival,
        Self::Settle,
    ];
}

impl HostLink {
    /// Makes `stream` wait for `event`.
    pub(super) fn order(
        &self,
        edge: LinkEdge,
        stream: &Stream,
        event: &Event,
    ) -> Result<(), DeviceError> {
        if self.leaves_out(edge) { Ok(()) } else { stream.wait(event) }
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(super) fn leaves_out(&self, edge: LinkEdge) -> bool {
        self.left_out == Some(edge)
    }

    #[cfg(not(all(feature = "sabotage", debug_assertions)))]
    pub(super) fn leaves_out(&self, _: LinkEdge) -> bool {
        false
    }

    /// Leaves an edge out of transfers from now on; `None` for none.
    ///
    /// Tests use it to show that they would notice.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_leave_out(&mut self, edge: Option<LinkEdge>) {
        self.left_out = edge;
    }
}
