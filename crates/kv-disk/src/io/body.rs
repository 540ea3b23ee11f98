//! The memory of a block in the host tier, which reads and writes go to without a copy.

use std::fmt;
use std::sync::Arc;

use cuda_driver::PinnedBuffer;
use kv_tier::LentBlock;

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

#[cfg(test)]
mod tests {
    use std::any::Any;

    use cuda_driver::{Device, HostAllocFlags};
    use cuda_sim::{SimConfig, SimDriver};
    use kv_pool::{BlockHash, BlockId, GroupId, Tier};
    use kv_tier::{
        Batch, BlockSink, BlockSource, Direction, HostBlocks, HostPiece, LowerTier, TicketId,
        Transfer,
    };

    use super::*;

    /// One host block.
    #[derive(Debug)]
    struct Host(HostPiece);

    impl HostBlocks for Host {
        fn block_bytes(&self) -> usize {
            self.0.bytes
        }
        fn read(&self, _: BlockId, _: usize, into: &mut [u8]) -> bool {
            into.fill(0);
            true
        }
        fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
            true
        }
        fn pieces(&self, _: BlockId) -> Vec<HostPiece> {
            vec![self.0.clone()]
        }
    }

    #[derive(Debug, Default)]
    struct Keeper(Vec<BlockSource>);

    impl LowerTier for Keeper {
        fn store(&mut self, blocks: Vec<BlockSource>) {
            self.0.extend(blocks);
        }
        fn load(&mut self, _: Vec<BlockSink>) {}
        fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
        fn clear(&mut self) {}
        fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
    }

    /// Bytes of the body of a block in this memory. The memory is back when that is gone.
    fn body(memory: Arc<dyn Any + Send + Sync>, offset: u64, bytes: usize) -> Option<usize> {
        let host: Arc<dyn HostBlocks> = Arc::new(Host(HostPiece { memory, offset, bytes }));
        let (ticket, tier, group) = (TicketId(1), Tier::Third, GroupId(0));
        let blocks = vec![(BlockHash::ROOT, BlockId::from(0))];
        let transfer = Transfer { ticket, tier, group, direction: Direction::Store, blocks };
        let mut kept = Keeper::default();
        let batch = Batch::begin(&transfer, &host, 1, &mut kept);
        let body = Body::new(kept.0[0].lend().unwrap(), false).map(|body| body.len());
        assert!(!batch.is_lent(), "it is back");
        body
    }

    #[test]
    fn memory_that_is_not_pinned_or_not_of_whole_pages_is_given_back() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let pinned = PinnedBuffer::alloc(&device, 5 * 4096, HostAllocFlags::CACHED).unwrap();
        let first = pinned.host_address().next_multiple_of(4096) - pinned.host_address();
        let pinned: Arc<dyn Any + Send + Sync> = Arc::new(pinned);
        let of = |offset, bytes| body(Arc::clone(&pinned), offset, bytes);
        assert_eq!(of(first, 8192), Some(8192));
        assert_eq!(of(first + 4096, 4096), Some(4096));
        assert_eq!(of(first + 512, 4096), None, "it begins within a page");
        assert_eq!(of(first, 5000), None, "it ends within one");
        assert_eq!(of(first, 0), None, "nothing");
        assert_eq!(of(first + 4096, 5 * 4096), None, "beyond the end");
        assert_eq!(of(u64::MAX, 4096), None);
        let other: Arc<dyn Any + Send + Sync> = Arc::new(vec![0_u8; 8192]);
        assert_eq!(body(other, 0, 4096), None, "memory of an unknown type");
    }
}
