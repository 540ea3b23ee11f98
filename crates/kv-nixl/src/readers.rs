//! The readers of one peer: one that reads, and those whose last read is late.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use cuda_driver::guard;
use kv_remote::message::Span;
use kv_remote::{Peer, PeerError, Refusal};

use crate::landing::{Came, Home};
use crate::reader::{Failure, Reader};
use crate::{Library, NixlError};

/// Reads of one peer that are open past their time, at most. Beyond them the peer is not read.
const OPEN_MAX: usize = 4;

/// Bytes of the longest span, which decides how much memory is registered for it.
const SPAN_MAX: u64 = 64 << 20;

/// How bytes come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    /// They have come, from the peer's memory.
    Memory,
    /// They have to come over the connection.
    Connection,
}

#[derive(Debug)]
pub(crate) struct Readers {
    library: Library,
    home: Home,
    pub(crate) emulated: bool,
    /// What a peer has said of its memory that cannot be read without it.
    by_connection: Option<Arc<[u8]>>,
    reader: Option<Reader>,
    /// Readers of which a read is open past its time, or what has come is still used.
    late: Vec<Reader>,
}

impl Readers {
    pub(crate) fn new(library: Library, home: Home) -> Self {
        let late = Vec::new();
        Self { library, home, emulated: false, by_connection: None, reader: None, late }
    }

    /// Readers of which a read is open past its time.
    pub(crate) fn late(&self) -> usize {
        self.late.iter().filter(|reader| reader.is_open()).count()
    }

    /// A reader of the memory that the peer has told of.
    fn reader_of(&mut self, said: Arc<[u8]>, bytes: u64) -> Result<Reader, PeerError> {
        let (reader, former) = match self.reader.take() {
            Some(reader) if guard!("nixl.peer-is-met-anew", reader.is_of(&said), else true) => {
                (Some(reader), None)
            }
            former => (None, former),
        };
        self.late.extend(former);
        self.late.retain_mut(|reader| !reader.is_idle());
        if let Some(reader) = reader {
            return Ok(reader);
        }
        if self.late.len() >= guard!("nixl.late-reads-are-few", OPEN_MAX, else OPEN_MAX + 1) {
            // If nothing is open, what has come is still used.
            let (open, late) = (self.late(), PeerError::Late);
            return Err(if open > 0 { failed(NixlError::Open { open }) } else { late });
        }
        Reader::new(&self.library, said, bytes, (self.home.clone(), self.emulated)).map_err(failed)
    }

    /// Reads spans of the peer's memory, and says each once it has come, unless they have to come over the connection.
    pub(crate) fn read(
        &mut self,
        peer: &mut Peer,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, Came<'_>),
    ) -> Result<Way, PeerError> {
        let said = peer.describe(deadline)?;
        if said.is_empty() || self.by_connection.as_ref() == Some(&said) {
            return Ok(Way::Connection);
        }
        // As of bytes that come over the connection.
        let bytes_max = guard!("nixl.spans-are-short", SPAN_MAX, else u64::MAX);
        if spans.iter().any(|span| u64::from(span.bytes) > bytes_max) {
            return Err(Refusal::Length.into());
        }
        let mut reader = self.reader_of(Arc::clone(&said), peer.memory_bytes())?;
        let is_reached = reader.reaches(spans);
        if !guard!("nixl.unregistered-by-connection", is_reached, else true) {
            // Such as memory of a host tier that came after it was registered.
            self.reader = Some(reader);
            return Ok(Way::Connection);
        }
        if Instant::now() >= deadline {
            // Making it took all the time. It is kept, and nothing was begun.
            self.reader = Some(reader);
            return Err(PeerError::Late);
        }
        let read = reader.read(spans, deadline, each);
        let is_over = matches!(read, Ok(()) | Err(Failure::Unused));
        let is_late = matches!(read, Err(Failure::Late));
        if guard!("nixl.late-reader-is-kept", is_over, else is_over || is_late) {
            self.reader = Some(reader);
        } else if is_late || !reader.is_idle() {
            // An agent of which a read has failed or is late is not used again: its connection is in a state that nobody knows.
            self.late.push(reader);
        }
        match read {
            Ok(()) => Ok(Way::Memory),
            Err(Failure::Late | Failure::Unused) => Err(PeerError::Late),
            Err(Failure::NotBegun(reason)) if !self.emulated => {
                tracing::debug!(%reason, "a peer's memory cannot be read without it");
                self.by_connection = Some(said);
                Ok(Way::Connection)
            }
            Err(Failure::NotBegun(error) | Failure::Failed(error)) => Err(failed(error)),
        }
    }
}

pub(crate) fn failed(error: impl std::error::Error + Send + Sync + 'static) -> PeerError {
    PeerError::Io { operation: "reading a peer's memory", error: io::Error::other(error) }
}
