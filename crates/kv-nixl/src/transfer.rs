//! Reads of a peer's memory by NIXL.

use std::time::Instant;

use kv_remote::message::{LeaseId, Span};
use kv_remote::{Peer, PeerError, SocketTransfer, Transfer};

use crate::Library;
use crate::landing::{Came, Home};
use crate::readers::{Readers, Way};

/// Reads one peer's memory by NIXL, without the peer: what a [`RemoteTier`](kv_remote::RemoteTier) has for each member, by
/// [`RemoteOptions::set_transfer`](kv_remote::RemoteOptions::set_transfer).
///
/// Only where a peer's memory can be read without the peer: from another process of the same machine, or by RDMA. Bytes of any other
/// peer, and of one whose memory is not registered, come over its connection, as with [`SocketTransfer`].
///
/// A read whose time is over may still arrive. So its memory is not used again and not freed until the read has ended, or the
/// agent that reads was destroyed (H10): each such read keeps its agent, four at most, and the next one has a new agent. Each
/// agent takes a few MiB, and some hundred milliseconds to be made for the first time.
#[derive(Debug)]
pub struct NixlTransfer {
    readers: Readers,
}

impl NixlTransfer {
    /// Reads a peer by this library. Nothing is opened before the first read.
    #[must_use]
    pub fn new(library: Library) -> Self {
        Self { readers: Readers::new(library, Home::Host) }
    }

    /// Reads also where UCX has the peer's process copy what is read, as over TCP, which is faster than the connection.
    ///
    /// **A reader that dies or gives up while it reads so may end the peer's process**: UCX (of NIXL 1.5.1) takes an answer that it
    /// cannot deliver for fatal. Choose it where all processes die together.
    #[must_use]
    pub fn emulated(mut self) -> Self {
        self.readers.emulated = true;
        self
    }

    /// Reads that have not ended though their time was over.
    #[must_use]
    pub fn late(&self) -> usize {
        self.readers.late()
    }
}

impl Transfer for NixlTransfer {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        let way = self.readers.read(peer, spans, deadline, &mut |place, came| {
            // Landings of the host are where the host sees what has come.
            if let Came::Host(bytes) = came {
                each(place, bytes);
            }
        })?;
        match way {
            Way::Memory => Ok(()),
            Way::Connection => SocketTransfer.read(peer, lease, spans, deadline, each),
        }
    }
}
