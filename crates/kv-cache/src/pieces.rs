//! Changes of blocks whose layers lie in several pieces, as in an engine's tensors.

use cuda_driver::{CopyError, DeviceBuffer, Stream};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, KvKernels, PagedKv, PagedLayout, error::BlocksError,
    link::TransportError,
};
use kv_stage::{
    StagingOptions, StagingPool,
    error::{AcquireError, StagingError, SubmitError},
};

use crate::runs::Kind;
use crate::{BuildError, HostCopyError};

/// Changes that may be enqueued before the host waits for the first of them.
const LISTS: usize = 64;

/// Copies and scrubs blocks by a kernel, which reads its pair of ids from pinned memory.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// None where blocks lie in one piece each.
    parts: Option<Parts>,
}

#[derive(Debug)]
struct Parts {
    lists: StagingPool,
    /// A block of zeros, which a scrub copies.
    zeros: PagedKv,
    _memory: DeviceBuffer,
}

impl Pieces {
    pub(crate) fn new(stream: &Stream, paged: &PagedKv) -> Result<Self, BuildError> {
        let shape = *paged.shape();
        if paged.layout().has_whole_blocks(&shape) {
            return Ok(Self { parts: None });
        }
        let bytes = size_of::<BlockPair>() as u64;
        let lists = StagingPool::new(stream.device(), StagingOptions::overlapped(bytes, LISTS))?;
        let memory = DeviceBuffer::alloc(stream.device(), shape.block_bytes())?;
        stream.fill(memory.span(), 0)?;
        let layout = PagedLayout::block_major(&shape);
        let zeros = PagedKv::new(stream, shape, layout, memory.span(), 1)?;
        Ok(Self { parts: Some(Parts { lists, zeros, _memory: memory }) })
    }

    /// Enqueues the copy of a block to another, or the scrub of one.
    pub(crate) fn change(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        kernels: &KvKernels,
        kind: Kind,
        pair: BlockPair,
    ) -> Result<(), HostCopyError> {
        // Only blocks in several pieces come here.
        let Some(Parts { lists, zeros, .. }) = &self.parts else { return Ok(()) };
        let (from, pair) = match kind {
            Kind::Scrub => (zeros, BlockPair { source: 0, destination: pair.destination }),
            _ => (paged, pair),
        };
        let mut buffer = lists.acquire_wait()?;
        let place = buffer.range_mut(0, size_of::<BlockPair>() as u64).map_err(CopyError::from)?;
        place[..4].copy_from_slice(&pair.source.to_ne_bytes());
        place[4..].copy_from_slice(&pair.destination.to_ne_bytes());
        let pairs = [pair];
        let submitted = buffer.submit(stream, |view| {
            kernels.copy_blocks(
                stream,
                BlockCopy {
                    from: Blocks::Device(from),
                    to: Blocks::Device(paged),
                    pairs: view.span().into(),
                    count: 1,
                    host_pairs: Some(BlockPairs::new(&pairs)?),
                    from_blocks: from.blocks(),
                    to_blocks: paged.blocks(),
                    report: None,
                    multiprocessors: None,
                },
            )
        });
        submitted.map_err(|error: SubmitError<BlocksError>| match error {
            SubmitError::Enqueue(error) => HostCopyError::Blocks(TransportError::Blocks(error)),
            SubmitError::Event(error) | SubmitError::Retire(error) => error.into(),
            error => {
                tracing::error!(%error, "an unknown refusal of a staging buffer");
                HostCopyError::List(AcquireError::Closed)
            }
        })
    }

    /// Waits for the readers of the lists, and frees them.
    pub(crate) fn close(self) -> Result<(), StagingError> {
        self.parts.map_or(Ok(()), |parts| parts.lists.close())
    }
}
