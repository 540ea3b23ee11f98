//! The seam under the store: one file, whose reads and writes are begun and end later.
//!
//! The store knows a file through `FileIo` alone: `RingFile` over io_uring, or `ThreadFile` over a few threads. Tests have a
//! third one, which is memory and does everything wrong that a disk can.

mod body;
mod buffer;
pub(crate) mod memory;
mod ring;
mod ring_calls;
mod thread_calls;
mod threads;

use std::fmt;
use std::io;
use std::time::Duration;

pub use body::Body;
pub use buffer::{Buffer, PAGE_BYTES};
pub use ring::RingFile;
pub use threads::ThreadFile;

/// What is done with a part of a file.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Act {
    /// Fills the buffer from the file.
    Read,
    /// Writes the buffer to the file.
    Write,
    /// Gives the file system its blocks back. The part reads as zeros. Needs no buffer.
    Punch,
    /// Makes everything durable that was written. Needs no buffer.
    Sync,
}

/// One operation on a part of a file.
#[derive(Debug)]
pub struct Io {
    /// A number of the caller's, by which it knows the operation when it has ended.
    pub token: u64,
    /// What is done.
    pub act: Act,
    /// Where the part begins, a multiple of [`PAGE_BYTES`].
    pub offset: u64,
    /// Bytes of the part, a multiple of [`PAGE_BYTES`], at most those of the buffer and the body.
    pub bytes: usize,
    /// The memory of a read or write. It belongs to the file until the operation has ended.
    pub buffer: Option<Buffer>,
    /// The memory of the last bytes of a read or write; those before are the buffer's first ones. It belongs to the file
    /// as the buffer does.
    pub body: Option<Body>,
}

impl Io {
    /// Bytes of the part that are the buffer's.
    #[must_use]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.bytes.saturating_sub(self.body.as_ref().map_or(0, Body::len))
    }
}

/// An operation that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The operation, with its buffer.
    pub io: Io,
    /// Bytes that were read or written, which may be fewer than asked for.
    pub result: io::Result<usize>,
}

/// Which way a file is reached.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Backend {
    /// io_uring, with registered files.
    Ring {
        /// Whether the kernel has taken the buffers too. It refuses if they are more than the process may lock.
        registered_buffers: bool,
    },
    /// Threads that call `pread` and `pwrite`.
    Threads {
        /// How many.
        threads: usize,
    },
    /// No file: memory.
    Memory,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring { registered_buffers: true } => f.write_str("io_uring"),
            Self::Ring { registered_buffers: false } => f.write_str("io_uring (own buffers)"),
            Self::Threads { threads } => write!(f, "{threads} threads"),
            Self::Memory => f.write_str("memory"),
        }
    }
}

/// A file whose operations end later, in any order.
///
/// # Ordering
/// Operations that overlap in the file and are open together have no order. A write that has ended is read by every
/// read that begins after that.
pub trait FileIo: fmt::Debug + Send {
    /// Which way the file is reached.
    fn backend(&self) -> Backend;

    /// Makes buffers of so many bytes each, of a kind that this file is quick with. To be called once, with no operation
    /// open.
    fn buffers(&mut self, count: usize, bytes: usize) -> Vec<Buffer> {
        (0..count).map(|_| Buffer::new(bytes)).collect()
    }

    /// Begins an operation. Never waits: what cannot begin ends with an error.
    fn begin(&mut self, io: Io);

    /// Appends operations that have ended. If none has and some are open, waits for one, at most `wait`.
    fn ended(&mut self, wait: Duration, ended: &mut Vec<Ended>);

    /// Operations that have begun and were not appended by [`ended`](Self::ended).
    fn open(&self) -> usize;
}

/// The error of an operation whose buffer does not hold its bytes, or whose place is not aligned.
pub(crate) fn check(io: &Io) -> io::Result<()> {
    let buffer = io.buffer.as_ref().map_or(0, Buffer::len);
    let moves = matches!(io.act, Act::Read | Act::Write);
    let body = io.body.as_ref().map_or(0, Body::len);
    // A body is behind at least a page of the buffer.
    let behind = body == 0 || io.bytes > body && body.is_multiple_of(PAGE_BYTES);
    let fits = !moves || io.buffer_bytes() <= buffer && behind && u32::try_from(io.bytes).is_ok();
    let aligned = io.bytes.is_multiple_of(PAGE_BYTES)
        && io.offset.is_multiple_of(PAGE_BYTES as u64)
        && i64::try_from(io.offset).is_ok();
    if fits && aligned { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_beyond_its_memory_is_refused() {
        let io = |offset, bytes, buffer| Io {
            token: 0,
            act: Act::Write,
            offset,
            bytes,
            buffer,
            body: None,
        };
        let buffer = || Some(Buffer::new(8192));
        assert!(check(&io(4096, 8192, buffer())).is_ok());
        assert!(check(&io(4096, 12_288, buffer())).is_err(), "more than the buffer has");
        assert!(check(&io(4096, 4096, None)).is_err(), "no buffer");
        assert!(check(&io(4096, 100, buffer())).is_err() && check(&io(1, 4096, buffer())).is_err());
        assert!(check(&io(1 << 63, 4096, buffer())).is_err(), "no place in a file");
    }
}
