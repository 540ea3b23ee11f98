//! Changes of blocks whose layers lie in several pieces, as in an engine's tensors.

use cuda_driver::{DeviceBuffer, Stream};
use kv_kernels::{BlockCopy, BlockPair, BlockPairs, Blocks, KvKernels, PagedKv, PagedLayout};
use kv_pool::BlockId;
use kv_stage::error::StagingError;

use crate::carrier::{Lists, part_of};
use crate::runs::{Kind, RUN_BLOCKS_MAX, Run};
use crate::{BuildError, HostCopyError};

/// Copies and scrubs blocks by a kernel, which reads a list of ids from pinned memory.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// None where blocks lie in one piece each.
    parts: Option<Parts>,
}

#[derive(Debug)]
struct Parts {
    lists: Lists,
    /// A block of zeros, which a scrub copies.
    zeros: PagedKv,
    _memory: DeviceBuffer,
}

impl Pieces {
    /// Lists for as many steps as may be in flight, and one more.
    pub(crate) fn new(
        stream: &Stream,
        paged: &PagedKv,
        overlap_depth: u32,
    ) -> Result<Self, BuildError> {
        let shape = *paged.shape();
        if paged.layout().has_whole_blocks(&shape) {
            return Ok(Self { parts: None });
        }
        let lists = Lists::new(stream.device(), overlap_depth as usize + 1)?;
        let memory = DeviceBuffer::alloc(stream.device(), shape.block_bytes())?;
        stream.fill(memory.span(), 0)?;
        let layout = PagedLayout::block_major(&shape);
        let zeros = PagedKv::new(stream, shape, layout, memory.span(), 1)?;
        Ok(Self { parts: Some(Parts { lists, zeros, _memory: memory }) })
    }

    pub(crate) fn are_several(&self) -> bool {
        self.parts.is_some()
    }

    /// Enqueues runs of copies within the device and of scrubs, in their order, and marks them as sent. All of
    /// a step take one list, unless they change more blocks than it has room for.
    pub(crate) fn change(
        &self,
        stream: &Stream,
        (paged, kernels): (&PagedKv, &KvKernels),
        (runs, mut numbers): (&[Run], &[usize]),
        sent: &mut [bool],
    ) -> Result<(), HostCopyError> {
        // Only blocks in several pieces come here.
        let Some(Parts { lists, zeros, .. }) = &self.parts else { return Ok(()) };
        while !numbers.is_empty() {
            let (mut list, mut taken) = (Vec::new(), 0);
            for &number in numbers {
                let Run { kind, pairs, .. } = &runs[number];
                // A run is no longer than a list.
                if list.len() + pairs.len() > RUN_BLOCKS_MAX {
                    break;
                }
                let scrubs = *kind == Kind::Scrub;
                let source = |pair: &BlockPair| if scrubs { BlockId::from(0) } else { pair.source };
                list.extend(pairs.iter().map(|pair| BlockPair { source: source(pair), ..*pair }));
                taken += 1;
            }
            let (here, rest) = numbers.split_at(taken);
            numbers = rest;
            lists.submit(stream, &list, |view| {
                let mut first = 0;
                for &number in here {
                    let Run { kind, pairs, .. } = &runs[number];
                    let from = if *kind == Kind::Scrub { zeros } else { paged };
                    let places = first..first + pairs.len();
                    let pairs = &list[places.clone()];
                    let copy = BlockCopy {
                        from: Blocks::Device(from),
                        to: Blocks::Device(paged),
                        pairs: part_of(view, places)?.into(),
                        count: pairs.len() as u64,
                        host_pairs: Some(BlockPairs::new(pairs)?),
                        from_blocks: from.blocks(),
                        to_blocks: paged.blocks(),
                        report: None,
                        multiprocessors: None,
                    };
                    kernels.copy_blocks(stream, copy)?;
                    sent[number] = true;
                    first += pairs.len();
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    pub(crate) fn close(self) -> Result<(), StagingError> {
        self.parts.map_or(Ok(()), |parts| parts.lists.close())
    }
}
