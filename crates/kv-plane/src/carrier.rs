//! Carries runs of blocks between one device and the host tier by few calls.

use std::ops::Range;
use std::sync::Arc;

use cuda_driver::{CopyError, Device, PinnedSpan, Stream};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, HostBlocks, KernelError, KvKernels, KvShape, PagedKv,
    PagedLayout,
    error::PagedKvError,
    link::{HostDirection, HostLink, HostLinkOptions, TransportError},
};
use kv_stage::{StagingOptions, StagingPool, SubmittedView, error::StagingError};

use crate::host_tier::HostTier;
use crate::runs::{Kind, RUN_BLOCKS_MAX, Run};
use crate::transport::{Carried, TransportRules, TransportStats};
use crate::{BuildError, HostCopyError};

/// Lists beside one for each step in flight: pieces of one step's copies that wait for others.
const LISTS: usize = 32;

/// Bytes of a pair of ids, as kernels read it.
const PAIR_BYTES: usize = size_of::<BlockPair>();

/// A link, and the lists of blocks that kernels read when they run.
#[derive(Debug)]
pub(crate) struct Carrier {
    link: HostLink,
    /// The shape and layout of a block in host memory.
    format: (KvShape, PagedLayout),
    /// The usable slabs of the host tier, as the link takes them.
    slabs: Vec<HostBlocks>,
    blocks_per_slab: usize,
    lists: Lists,
    list: Vec<BlockPair>,
    legs: Vec<Leg>,
}

/// Pairs of one run in one slab, as a part of the list.
#[derive(Clone, Debug)]
struct Leg {
    direction: HostDirection,
    slab: usize,
    pairs: Range<usize>,
    /// Its run, if it is the last of it.
    ends_run: Option<usize>,
}

impl Carrier {
    /// A carrier for a host tier; `None` where blocks are to be copied one by one. It carries blocks of the
    /// slabs that are [taken](Self::take_slabs).
    pub(crate) fn new(
        stream: &Stream,
        paged: &PagedKv,
        kernels: &Arc<KvKernels>,
        host: &HostTier,
        (rules, overlap_depth): (&TransportRules, u32),
    ) -> Result<Option<Self>, BuildError> {
        let device = stream.device();
        let (shape, layout) = (*paged.shape(), paged.layout());
        let is_whole = layout.has_whole_blocks(&shape);
        let piece = if is_whole { shape.block_bytes() } else { shape.block_plane_bytes() };
        let Some(profile) = rules.profile(device, piece)? else { return Ok(None) };
        let options = rules.link_options(&profile);
        let link = match HostLink::new(Arc::clone(kernels), options) {
            Err(error) if error.is_out_of_memory() && options.ring_buffers > 0 => {
                tracing::warn!(%error, "no memory for the ring of two hops, which are done without");
                HostLink::new(Arc::clone(kernels), HostLinkOptions { ring_buffers: 0, ..options })?
            }
            made => made?,
        };
        let link = link.with_profile(profile);
        Ok(Some(Self {
            link,
            // What no change of layout is needed for, as far as a block in one piece can be that.
            format: (shape, layout.packed(&shape)),
            slabs: Vec::new(),
            blocks_per_slab: host.blocks_per_slab(),
            lists: Lists::new(device, overlap_depth as usize + LISTS)?,
            list: Vec::with_capacity(RUN_BLOCKS_MAX),
            legs: Vec::new(),
        }))
    }

    /// Takes in the slabs of the host tier that are usable and not taken yet.
    pub(crate) fn take_slabs(
        &mut self,
        stream: &Stream,
        host: &HostTier,
    ) -> Result<(), PagedKvError> {
        let blocks = self.blocks_per_slab as u64;
        for slab in host.slabs().iter().skip(self.slabs.len()) {
            let (shape, layout) = self.format;
            let slab = HostBlocks::new(stream, shape, layout, (Arc::clone(slab), 0), blocks)?;
            self.slabs.push(slab);
        }
        Ok(())
    }

    /// Blocks of the slabs that are taken.
    pub(crate) fn blocks(&self) -> u64 {
        (self.slabs.len() * self.blocks_per_slab) as u64
    }

    /// Lets go of the slabs from number `slabs` on, which no run names any more.
    pub(crate) fn drop_slabs(&mut self, slabs: usize) {
        self.slabs.truncate(slabs);
    }

    /// Enqueues the runs with these numbers on `stream`, in their order, and marks those that it enqueued in
    /// full as sent.
    ///
    /// A run that was enqueued in part can be enqueued again, because a run never writes what it
    /// reads.
    pub(crate) fn carry(
        &mut self,
        stream: &Stream,
        (paged, ready_blocks): (&PagedKv, u64),
        (runs, mut numbers): (&[Run], &[usize]),
        sent: &mut [bool],
        stats: &mut TransportStats,
    ) -> Result<(), HostCopyError> {
        while !numbers.is_empty() {
            let count = self.lay_out(runs, numbers);
            numbers = &numbers[count..];
            let (link, slabs) = (&mut self.link, &self.slabs);
            let (list, legs) = (&self.list, &self.legs);
            self.lists.submit(stream, list, |view| {
                for leg in legs {
                    let slab = &slabs[leg.slab];
                    let pairs = &list[leg.pairs.clone()];
                    let copy = copy_of(leg, (paged, ready_blocks), slab, pairs, view)?;
                    let transport = link.copy_blocks(stream, copy)?;
                    stats.count(Some(transport), Carried { batches: 1, blocks: copy.count });
                    if let Some(run) = leg.ends_run {
                        sent[run] = true;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Lays out as many of the runs with these numbers as fit in one list, at least one; how many.
    fn lay_out(&mut self, runs: &[Run], numbers: &[usize]) -> usize {
        self.list.clear();
        self.legs.clear();
        for (laid_out, &number) in numbers.iter().enumerate() {
            let Run { kind: Kind::Carry(direction), pairs, .. } = &runs[number] else { continue };
            // A run is no longer than a list.
            if self.list.len() + pairs.len() > RUN_BLOCKS_MAX {
                return laid_out;
            }
            let (direction, first) = (*direction, self.list.len());
            let per_slab = self.blocks_per_slab;
            let host_id = |pair: &BlockPair| match direction {
                HostDirection::ToHost => pair.destination,
                HostDirection::ToPages => pair.source,
            };
            self.list.extend_from_slice(pairs);
            // Sorted by host block: neighbours in host memory can go in one piece.
            self.list[first..].sort_unstable_by_key(host_id);
            let mut begin = first;
            let slab = |pair: &BlockPair| host_id(pair).in_slabs(per_slab).0;
            for chunk in self.list[first..].chunk_by(|a, b| slab(a) == slab(b)) {
                let (slab, end) = (slab(&chunk[0]), begin + chunk.len());
                let ends_run = (end == self.list.len()).then_some(number);
                self.legs.push(Leg { direction, slab, pairs: begin..end, ends_run });
                begin = end;
            }
            // Ids of host blocks count from the start of their slab.
            for pair in &mut self.list[first..] {
                let id = match direction {
                    HostDirection::ToHost => &mut pair.destination,
                    HostDirection::ToPages => &mut pair.source,
                };
                *id = id.in_slabs(per_slab).1;
            }
        }
        numbers.len()
    }

    /// Waits for the lists' readers and frees the lists. The host tier may be freed afterwards.
    pub(crate) fn close(self) -> Result<(), StagingError> {
        let Self { link, slabs, lists, .. } = self;
        drop((link, slabs));
        lists.close()
    }
}

/// Lists of pairs in pinned memory. A kernel reads one when it runs, so none is written again before its event.
#[derive(Debug)]
pub(crate) struct Lists(StagingPool);

impl Lists {
    /// Lists for as many submissions in flight, and one more.
    pub(crate) fn new(device: &Device, in_flight: usize) -> Result<Self, StagingError> {
        let buffer_bytes = (RUN_BLOCKS_MAX * PAIR_BYTES) as u64;
        let options = StagingOptions::overlapped(buffer_bytes, in_flight);
        Ok(Self(StagingPool::new(device, options)?))
    }

    /// Writes a list, no longer than a run, and has `enqueue` enqueue what reads it. Waits only if all lists
    /// are in use.
    pub(crate) fn submit(
        &self,
        stream: &Stream,
        list: &[BlockPair],
        enqueue: impl FnOnce(&SubmittedView<'_>) -> Result<(), TransportError>,
    ) -> Result<(), HostCopyError> {
        let mut buffer = self.0.acquire_wait()?;
        let places = buffer.range_mut(0, size_of_val(list) as u64).map_err(CopyError::from)?;
        places.copy_from_slice(bytemuck::cast_slice(list));
        buffer.submit(stream, enqueue).map_err(HostCopyError::from_submit)?;
        Ok(())
    }

    pub(crate) fn close(self) -> Result<(), StagingError> {
        self.0.close()
    }
}

pub(crate) fn part_of<'a>(
    view: &'a SubmittedView<'_>,
    pairs: Range<usize>,
) -> Result<PinnedSpan<'a>, TransportError> {
    let (first, bytes) = (pairs.start * PAIR_BYTES, pairs.len() * PAIR_BYTES);
    view.span().slice(first as u64, bytes as u64).map_err(TransportError::HostRange)
}

fn copy_of<'a>(
    leg: &Leg,
    (paged, ready_blocks): (&'a PagedKv, u64),
    slab: &'a HostBlocks,
    pairs: &'a [BlockPair],
    view: &'a SubmittedView<'_>,
) -> Result<BlockCopy<'a>, TransportError> {
    let device = (Blocks::Device(paged), ready_blocks);
    let host = (Blocks::Host(slab), slab.blocks());
    let ((from, from_blocks), (to, to_blocks)) = match leg.direction {
        HostDirection::ToHost => (device, host),
        HostDirection::ToPages => (host, device),
    };
    Ok(BlockCopy {
        from,
        to,
        pairs: part_of(view, leg.pairs.clone())?.into(),
        count: pairs.len() as u64,
        host_pairs: Some(BlockPairs::new(pairs)?),
        from_blocks,
        to_blocks,
        report: None,
        multiprocessors: None,
    })
}

/// Whether a transport's kernel could not be loaded on this device.
pub(crate) fn lacks_kernel(error: &HostCopyError) -> bool {
    matches!(error, HostCopyError::Blocks(TransportError::Kernel(KernelError::Module(_))))
}
