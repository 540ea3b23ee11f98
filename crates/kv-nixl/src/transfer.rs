//! Reads of a peer's memory by NIXL.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use kv_remote::message::{LeaseId, Span};
use kv_remote::{Peer, PeerError, Refusal, SocketTransfer, Transfer};

use crate::reader::{Failure, Reader};
use crate::{Library, NixlError};

/// Reads of one peer that are open past their time, at most. Beyond them the peer is not read.
const OPEN_MAX: usize = 4;

/// Bytes of the longest span, which decides how much memory is registered for it.
const SPAN_MAX: u64 = 64 << 20;

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
    library: Library,
    emulated: bool,
    /// What a peer has said of its memory that cannot be read without it.
    by_connection: Option<Arc<[u8]>>,
    reader: Option<Reader>,
    /// Readers whose last read is open past its time.
    late: Vec<Reader>,
}

impl NixlTransfer {
    /// Reads a peer by this library. Nothing is opened before the first read.
    #[must_use]
    pub fn new(library: Library) -> Self {
        Self { library, emulated: false, by_connection: None, reader: None, late: Vec::new() }
    }

    /// Reads also where UCX has the peer's process copy what is read, as over TCP, which is faster than the connection.
    ///
    /// **A reader that dies or gives up while it reads so may end the peer's process**: UCX (of NIXL 1.5.1) takes an answer that it
    /// cannot deliver for fatal. Choose it where all processes die together.
    #[must_use]
    pub fn emulated(self) -> Self {
        Self { emulated: true, ..self }
    }

    /// Reads that have not ended though their time was over.
    #[must_use]
    pub fn late(&self) -> usize {
        self.late.len()
    }

    /// A reader of the memory that the peer has told of.
    fn reader_of(&mut self, said: Arc<[u8]>, bytes: u64) -> Result<Reader, NixlError> {
        self.late.retain_mut(|reader| !reader.has_ended());
        if let Some(reader) = self.reader.take().filter(|reader| reader.is_of(&said)) {
            return Ok(reader);
        }
        if self.late.len() >= OPEN_MAX {
            return Err(NixlError::Open { open: self.late.len() });
        }
        Reader::new(&self.library, said, bytes, self.emulated)
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
        if said.is_empty() || self.by_connection.as_ref() == Some(&said) {
            return SocketTransfer.read(peer, lease, spans, deadline, each);
        }
        // As of bytes that come over the connection.
        if spans.iter().any(|span| u64::from(span.bytes) > SPAN_MAX) {
            return Err(Refusal::Length.into());
        }
        let mut reader = self.reader_of(Arc::clone(&said), peer.memory_bytes()).map_err(failed)?;
        if Instant::now() >= deadline {
            // Making it took all the time. It is kept, and nothing was begun.
            self.reader = Some(reader);
            return Err(PeerError::Late);
        }
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
            Err(Failure::NotBegun(reason)) if !self.emulated => {
                tracing::debug!(%reason, "a peer's memory cannot be read without it");
                self.by_connection = Some(said);
                SocketTransfer.read(peer, lease, spans, deadline, each)
            }
            Err(Failure::NotBegun(error) | Failure::Failed(error)) => Err(failed(error)),
        }
    }
}
