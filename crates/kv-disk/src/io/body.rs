//! The memory of a block in the host tier, which reads and writes go to without a copy.

use std::fmt;
use std::sync::Arc;

use cuda_driver::PinnedBuffer;
use kv_manager::tiers::LentBlock;

use super::{Buffer, PAGE_BYTES};

/// The memory of a block in the host tier, which a read or write goes to directly: pinned memory, of whole pages. A
/// file that cannot do that ends the operation with `EFAULT`, and it begins again without a body.
pub struct Body {
    lent: LentBlock,
    pieces: Vec<Piece>,
    /// The parts of the open operation. The first one is of its buffer.
    parts: Vec<Part>,
    bytes: usize,
}

struct Piece {
    memory: Arc<PinnedBuffer>,
    offset: u64,
    bytes: usize,
}

/// A part of an operation's memory, laid out as the system's `iovec` is.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Part {
    address: usize,
    bytes: usize,
}

const _: () = assert!(
    size_of::<Part>() == size_of::<libc::iovec>()
        && std::mem::offset_of!(Part, address) == std::mem::offset_of!(libc::iovec, iov_base)
        && std::mem::offset_of!(Part, bytes) == std::mem::offset_of!(libc::iovec, iov_len)
);

impl Body {
    /// Memory that was lent, for an operation that writes it, or reads it. `None`, and it is given back, if it is not pinned
    /// memory of whole pages.
    pub(crate) fn new(lent: LentBlock, writes: bool) -> Option<Self> {
        let mut pieces = Vec::with_capacity(lent.pieces().len());
        let mut parts = vec![Part { address: 0, bytes: 0 }];
        for piece in lent.pieces() {
            let memory = Arc::clone(&piece.memory).downcast::<PinnedBuffer>().ok()?;
            let (offset, bytes) = (piece.offset, piece.bytes);
            let address = memory.host_address().checked_add(offset)?;
            if !address.is_multiple_of(PAGE_BYTES as u64) || !bytes.is_multiple_of(PAGE_BYTES) {
                return None;
            }
            let address = memory.lend(offset, bytes as u64, writes).ok()?;
            parts.push(Part { address: usize::try_from(address).ok()?, bytes });
            pieces.push(Piece { memory, offset, bytes });
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        (bytes > 0).then_some(Self { lent, pieces, parts, bytes })
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the worker has asked for its memory back.
    pub(crate) fn is_fenced(&self) -> bool {
        self.lent.is_fenced()
    }

    /// Ends its use: nothing of an operation touches it any more.
    pub(crate) fn into_lent(self) -> LentBlock {
        self.lent
    }

    /// Copies its first bytes into `into`, as a file does that is no file of the system's. False if there are not so many.
    pub(crate) fn read(&self, into: &mut [u8]) -> bool {
        let mut left = into;
        for piece in &self.pieces {
            let (part, rest) = left.split_at_mut(left.len().min(piece.bytes));
            if piece.memory.read_at(piece.offset, part).is_err() {
                return false;
            }
            left = rest;
        }
        left.is_empty()
    }

    /// Copies `from` into its first bytes. False if there are not so many.
    pub(crate) fn write(&mut self, from: &[u8]) -> bool {
        let mut left = from;
        for piece in &self.pieces {
            let (part, rest) = left.split_at(left.len().min(piece.bytes));
            if piece.memory.write_shared(piece.offset, part).is_err() {
                return false;
            }
            left = rest;
        }
        left.is_empty()
    }

    /// The parts of an operation with the first `bytes` of a buffer, and then this memory. They stay where they are as long
    /// as this lives and is not asked again.
    pub(super) fn parts(&mut self, buffer: &mut Buffer, bytes: usize) -> &[Part] {
        let address = buffer.bytes_mut().as_mut_ptr().expose_provenance();
        self.parts[0] = Part { address, bytes };
        &self.parts
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
