//! Reads of a peer's memory by NIXL.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use kv_remote::message::{LeaseId, Span};
use kv_remote::{Peer, PeerError, SocketTransfer, Transfer};

use crate::reader::{Failure, Reader};
use crate::{Library, NixlError};

/// Reads of one peer that are open past their time, at most. Beyond them the peer is not read.
const OPEN_MAX: usize = 4;

/// Reads one peer's memory by NIXL, without the peer: what a [`RemoteTier`](kv_remote::RemoteTier) has for each member, by
/// [`RemoteOptions::set_transfer`](kv_remote::RemoteOptions::set_transfer).
///
/// Bytes of a peer whose memory is not registered come over its connection, as with [`SocketTransfer`].
///
/// A read whose time is over may still arrive. So its memory is not used again and not freed until the read has ended, or the
/// agent that reads was destroyed (H10): each such read keeps its agent, four at most, and the next one has a new agent. Each
/// agent takes a few MiB, and some hundred milliseconds to be made for the first time.
#[derive(Debug)]
pub struct NixlTransfer {
    library: Library,
    reader: Option<Reader>,
    /// Readers whose last read is open past its time.
    late: Vec<Reader>,
}

impl NixlTransfer {
    /// Reads a peer by this library. Nothing is opened before the first read.
    #[must_use]
    pub fn new(library: Library) -> Self {
        Self { library, reader: None, late: Vec::new() }
    }

    /// Reads that have not ended though their time was over.
    #[must_use]
    pub fn late(&self) -> usize {
        self.late.len()
    }

    /// A reader of the memory that the peer has told of.
    fn reader_of(&mut self, said: Arc<[u8]>) -> Result<Reader, NixlError> {
        self.late.retain_mut(|reader| !reader.has_ended());
        if let Some(reader) = self.reader.take().filter(|reader| reader.is_of(&said)) {
            return Ok(reader);
        }
        if self.late.len() >= OPEN_MAX {
            return Err(NixlError::Open { open: self.late.len() });
        }
        Reader::new(&self.library, said)
    }
}

fn failed(error: NixlError) -> PeerError {
    PeerError::Io { operation: "reading a peer's memory", error: io::Error::other(error) }
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
        let said = peer.describe(deadline)?;
        if said.is_empty() {
            return SocketTransfer.read(peer, lease, spans, deadline, each);
        }
        let mut reader = self.reader_of(said).map_err(failed)?;
        // An agent of which a read has failed or is late is not used again: its connection is in a state that nobody knows.
        match reader.read(spans, deadline, each) {
            Ok(()) => {
                self.reader = Some(reader);
                Ok(())
            }
            Err(Failure::Late) => {
                self.late.push(reader);
                Err(PeerError::Late)
            }
            Err(Failure::Failed(error)) => Err(failed(error)),
        }
    }
}
