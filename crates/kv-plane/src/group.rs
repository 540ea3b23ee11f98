//! One group's blocks on one device: their memory on the device and on the host, and the copies between.

use std::ops::Range;
use std::sync::Arc;

use cuda_driver::host_pages::PinError;
use cuda_driver::{CopyError, Device, DeviceSpan, Stream, guard};
use cuda_vmm::worker::Fault;
use cuda_vmm::{
    ElasticPool, ElasticPoolOptions, EpochGate, GrowError,
    elastic::{AheadError, AheadStats},
};
use kv_kernels::{BlockPair, KvKernels, KvShape, PagedKv, PagedLayout, link::HostDirection};
use kv_manager::GroupId;
use kv_pool::BlockId;
use kv_stage::error::{AcquireError, StagingError};

use crate::carrier::{Carrier, lacks_kernel};
use crate::granules::{Granules, GroupRange};
use crate::growth::Shortage;
use crate::host_tier::HostTier;
use crate::order::CopyOrder;
use crate::pieces::Pieces;
use crate::runs::{COMPUTE, Kind, LANES, Run};
use crate::shares::Share;
use crate::streams::Streams;
use crate::tiers::PinnedPart;
use crate::transport::Carried;
use crate::{
    BuildError, CloseError, GranuleError, GroupOptions, Growth, HostCopyError, HostPinning,
    KvCacheOptions, OptionsError, TransportChoice, TransportStats,
};

/// One device's share of the blocks of a group: layers, or heads of all layers.
///
/// Block ids are the same on all devices of a cache. In memory of the cache's own, block `b` lies at
/// `b * block_bytes` from the start of the group's memory on each device, in the layout `[plane, token, row]`. In an
/// engine's tensors it lies where their [layout](kv_kernels::PagedKv::layout) says.
#[derive(Debug)]
pub struct GroupPart {
    share: Share,
    /// Which copies of one lane wait for which of another.
    order: CopyOrder,
    memory: Memory,
    /// Whether memory stays as it is.
    pub(crate) fixed: bool,
    paged: PagedKv,
    kernels: Arc<KvKernels>,
    /// Changes blocks that lie in several pieces.
    pieces: Pieces,
    pub(crate) host: HostTier,
    /// One for each direction; none where blocks are copied one by one.
    carriers: Option<[Carrier; 2]>,
    /// Which of the cache's runs this device has been sent.
    pub(crate) sent: Vec<bool>,
    /// Slabs of host memory that the carriers could not take, when they tried last.
    untaken: Option<Shortage>,
    /// Runs of each lane that are to be enqueued together: their places in the order, and their numbers.
    lanes: [Vec<(u64, usize)>; LANES],
    /// Empty; kept for its memory.
    numbers: Vec<usize>,
    pub(crate) transports: TransportStats,
}

/// What lies under the blocks.
#[derive(Debug)]
enum Memory {
    /// Mapped page by page.
    Elastic(ElasticPool),
    /// Tensors of the engine.
    Adopted,
    /// Granules that groups share.
    Shared(GroupRange),
}

/// What the groups of a part are made with.
pub(crate) struct Making<'a> {
    pub(crate) compute: &'a Stream,
    pub(crate) options: &'a KvCacheOptions,
    pub(crate) gate: &'a EpochGate,
    pub(crate) kernels: &'a Arc<KvKernels>,
    pub(crate) pinning: HostPinning,
}

/// The memory that a group is given.
pub(crate) enum Given {
    /// None: it makes its own.
    Nothing,
    /// Tensors of the engine.
    Tensors(Box<PagedKv>),
    /// Addresses for shared granules.
    Range(GroupRange),
}

impl Memory {
    fn elastic(&self) -> Option<&ElasticPool> {
        match self {
            Self::Elastic(memory) => Some(memory),
            Self::Adopted | Self::Shared(_) => None,
        }
    }

    fn ready_blocks(&self, paged: &PagedKv) -> u64 {
        self.elastic().map_or(paged.blocks(), ElasticPool::ready_blocks)
    }
}

/// A carrier for each direction, with the host memory that is usable; none where blocks are copied one by
/// one, or where there is no host tier.
fn carriers(
    with: &Making<'_>,
    paged: &PagedKv,
    host: &HostTier,
    host_blocks: u32,
) -> Result<Option<[Carrier; 2]>, BuildError> {
    if host_blocks == 0 {
        return Ok(None);
    }
    let rules = (&with.options.transport, with.options.overlap_depth);
    let carrier = || -> Result<Option<Carrier>, BuildError> {
        let made = Carrier::new(with.compute, paged, with.kernels, host, rules)?;
        let Some(mut carrier) = made else { return Ok(None) };
        carrier.take_slabs(with.compute, host)?;
        Ok(Some(carrier))
    };
    Ok(carrier()?.zip(carrier()?).map(<[Carrier; 2]>::from))
}

/// Checks that an engine's tensors are those of this share (H31).
fn check_adopted(
    group: GroupId,
    paged: &PagedKv,
    (shape, blocks): (&KvShape, u64),
) -> Result<(), OptionsError> {
    let (given, expected) = (*paged.shape(), *shape);
    if given != expected {
        return Err(OptionsError::AdoptedShape { group, given, expected });
    }
    let (given, expected) = (paged.blocks(), blocks);
    if given < expected {
        return Err(OptionsError::AdoptedBlocks { group, given, expected });
    }
    Ok(())
}

impl GroupPart {
    pub(crate) fn new(
        with: &Making<'_>,
        (id, group): (GroupId, &GroupOptions),
        share: Share,
        given: Given,
    ) -> Result<Self, BuildError> {
        let &Making { compute, options, gate, kernels, pinning } = with;
        let device = compute.device();
        let shape = share.shape(&group.shape)?;
        let (block_bytes, device_blocks) =
            (shape.block_bytes(), options.memory_blocks(group).into());
        let describe = |span: DeviceSpan| -> Result<PagedKv, BuildError> {
            let layout = PagedLayout::block_major(&shape);
            let extent = layout.extent_bytes(&shape, device_blocks);
            let extent = extent.map_err(kv_kernels::error::PagedKvError::from)?;
            let span = span.slice(0, extent).map_err(CopyError::from)?;
            Ok(PagedKv::new(compute, shape, layout, span, device_blocks)?)
        };
        let (memory, paged) = match given {
            Given::Tensors(paged) => {
                check_adopted(id, &paged, (&shape, device_blocks))?;
                (Memory::Adopted, *paged)
            }
            Given::Nothing => {
                let capacity_blocks = device_blocks;
                let (page_bytes, initial_blocks) = (None, 0);
                let pool =
                    ElasticPoolOptions { block_bytes, capacity_blocks, page_bytes, initial_blocks };
                let rules = options.memory.clone();
                let memory = ElasticPool::with_rules(device, pool, gate.clone(), rules)?;
                let paged = describe(memory.span())?;
                (Memory::Elastic(memory), paged)
            }
            Given::Range(range) => {
                let paged = describe(range.span())?;
                (Memory::Shared(range), paged)
            }
        };
        if group.host_blocks > 0
            && !paged.layout().has_whole_blocks(&shape)
            && options.transport.choice == TransportChoice::EachBlock
        {
            return Err(OptionsError::BlocksInPieces.into());
        }
        let host = HostTier::new(device, group.host_blocks.into(), block_bytes, pinning)?;
        Ok(Self {
            share,
            order: CopyOrder::new(group.device_blocks as usize, group.host_blocks as usize),
            memory,
            fixed: false,
            pieces: Pieces::new(compute, &paged, options.overlap_depth)?,
            carriers: carriers(with, &paged, &host, group.host_blocks)?,
            paged,
            kernels: Arc::clone(kernels),
            host,
            sent: Vec::new(),
            untaken: None,
            lanes: Default::default(),
            numbers: Vec::new(),
            transports: TransportStats::default(),
        })
    }

    /// The memory, if it grows and shrinks.
    fn growing(&self) -> Option<&ElasticPool> {
        self.memory.elastic().filter(|_| !self.fixed)
    }

    pub(crate) fn start_growing(&mut self, growth: &Growth) {
        if let (Memory::Elastic(memory), Growth::Ahead { blocks, worker }) =
            (&mut self.memory, growth)
        {
            memory.set_ahead(u64::from(*blocks));
            memory.work_on(worker);
        }
    }

    pub(crate) fn map_granule(
        &mut self,
        granules: &Granules,
        granule: u32,
    ) -> Result<(), GranuleError> {
        match &mut self.memory {
            Memory::Shared(range) => range.map(granules, granule),
            Memory::Elastic(_) | Memory::Adopted => Ok(()),
        }
    }

    /// The group's layers on this device, in their order.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        &self.share.layers
    }

    /// The bytes of each row of K and of V on this device: all of the row, unless the layers are
    /// divided by heads.
    #[must_use]
    pub fn row(&self) -> Range<u64> {
        self.share.row.clone()
    }

    /// The shape of the group's blocks on this device: the group's shape with these layers and bytes of rows.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        self.paged.shape()
    }

    /// The memory as kernels see it. Only the first [`ready_blocks`](Self::ready_blocks) are mapped.
    #[must_use]
    pub fn paged(&self) -> &PagedKv {
        &self.paged
    }

    /// Blocks that have memory, from block 0 on.
    #[must_use]
    pub fn ready_blocks(&self) -> u64 {
        self.memory.ready_blocks(&self.paged)
    }

    fn device(&self) -> &Device {
        self.paged.device()
    }

    pub(crate) fn pinned_host(&self) -> PinnedPart {
        PinnedPart {
            slabs: self.host.slabs().to_vec(),
            blocks_per_slab: self.host.blocks_per_slab(),
            block_bytes: self.shape().block_bytes() as usize,
            layers: self.share.layers.len(),
        }
    }

    /// What the bytes of a host block mean, as a text that is the same in every process.
    pub(crate) fn host_format(&self) -> String {
        let (shape, layout) = (self.shape(), self.paged.layout());
        format!("{shape:?} {:?} {:?} {:?}", layout.packed(shape), self.share.layers, self.share.row)
    }

    /// Takes over the host memory that was pinned since the last call, or, if it `waits`, all that will be.
    ///
    /// # Errors
    /// A refusal, once: the tier then stays as it is.
    pub(crate) fn take_host(&mut self, compute: &Stream, waits: bool) -> Result<(), PinError> {
        let taken = self.host.take(waits);
        if waits || self.untaken.as_mut().is_none_or(|refusal| refusal.is_over(None)) {
            let before = self.untaken.take();
            let carriers = self.carriers.iter_mut().flatten();
            let refused = carriers.filter_map(|of| of.take_slabs(compute, &self.host).err());
            if let Some(error) = refused.last() {
                // Each takes device memory, which may be there later.
                tracing::warn!(%error, "the host tier stays smaller than it was to be");
                self.untaken = Some(Shortage::after(before, None));
                guard!("cache.slabs-are-taken-again", {}, else self.carriers = None);
            }
        }
        taken
    }

    /// Usable host blocks, from block 0 on.
    pub(crate) fn host_blocks(&self) -> u64 {
        let usable = self.host.usable();
        let carried = self.carriers.iter().flatten().map(Carrier::blocks);
        guard!("cache.host-blocks-can-be-carried", carried.fold(usable, u64::min), else usable)
    }

    /// Wants `blocks` host blocks, and gives back the memory beyond that nothing uses. Whether none is left
    /// beyond. A block beyond is named by no plan any more.
    pub(crate) fn resize_host(&mut self, blocks: u64) -> Result<bool, StagingError> {
        let kept = self.host.resize(blocks)?;
        self.carriers.iter_mut().flatten().for_each(|carrier| carrier.drop_slabs(kept));
        Ok(self.host.give_back())
    }

    /// Tells the worker that `blocks` blocks are in use. Makes no driver call.
    ///
    /// A refusal of the worker is no error here: a call that lacks blocks maps them itself and
    /// returns the refusal. A closed worker is no error either: every call then maps its own
    /// blocks.
    pub(crate) fn demand(&self, blocks: u64) -> Result<(), AheadError> {
        let Some(memory) = self.growing() else { return Ok(()) };
        match memory.demand(blocks) {
            Err(error) if !error.is_retryable() && error.cause != Fault::Stopped => Err(error),
            _ => Ok(()),
        }
    }

    /// Has nothing mapped beyond `blocks` blocks, unless a call needs it.
    pub(crate) fn hold_growth(&self, blocks: u64) {
        self.stop_growing();
        // A refusal of the worker is told by the next call that lacks blocks.
        drop(self.demand(blocks.min(self.ready_blocks())));
    }

    /// Stops growth ahead of need, and keeps the ready blocks.
    pub(crate) fn stop_growing(&self) {
        if let Some(memory) = self.growing() {
            memory.set_ahead(0);
        }
    }

    /// Unmaps the blocks from `blocks` on, which nothing uses any more, and gives their memory back as far as
    /// the steps before are complete. Whether all of it is back.
    pub(crate) fn shrink_to(&self, blocks: u64) -> bool {
        let Some(memory) = self.growing() else { return true };
        // Padding names block 0: a captured graph may read it at any time.
        let blocks = guard!("cache.the-padding-block-stays", blocks.max(1), else blocks);
        self.hold_growth(blocks);
        if memory.ready_blocks() > blocks
            && let Err(error) = memory.shrink_to(blocks, &[])
        {
            // The next step tries again.
            tracing::debug!(%error, "memory beyond the budget stays mapped for now");
            return false;
        }
        memory.poll_retired();
        memory.trim(0);
        memory.stats().retiring_bytes == 0
    }

    pub(crate) fn resume_growing(&self, growth: &Growth) {
        if let (Some(memory), Growth::Ahead { blocks, .. }) = (self.growing(), growth) {
            memory.set_ahead(u64::from(*blocks));
        }
    }

    /// Makes `blocks` blocks ready, or as many as there is memory for, and returns the number of
    /// ready blocks.
    pub(crate) fn grow_towards(&self, blocks: u64) -> Result<u64, GrowError> {
        let Some(memory) = self.growing() else { return Ok(self.ready_blocks()) };
        match memory.grow_to(blocks) {
            // No memory, or pages of an earlier budget that steps in flight still use.
            Err(error) if error.is_retryable() => {}
            grown => return grown,
        }
        // Growth is all or nothing, so the largest possible number is searched for. The search runs
        // once, because the cache does not ask for more afterwards.
        let (mut ready, mut refused) = (self.ready_blocks(), blocks);
        while ready + 1 < refused {
            let middle = ready + (refused - ready) / 2;
            match memory.grow_to(middle) {
                Ok(_) => ready = middle,
                Err(error) if error.is_retryable() => refused = middle,
                Err(error) => return Err(error),
            }
        }
        Ok(self.ready_blocks())
    }

    /// Enqueues runs of copies, except those that this device was sent before.
    pub(crate) fn send(
        &mut self,
        streams: &mut Streams,
        runs: &[Run],
    ) -> Result<(), HostCopyError> {
        self.sent.resize(runs.len(), false);
        self.lanes.iter_mut().for_each(Vec::clear);
        for (number, run) in runs.iter().enumerate() {
            if self.sent[number] {
                continue;
            }
            let here = run.kind.lane();
            let mut waits = [false; LANES];
            for there in (0..LANES).filter(|&lane| lane != here) {
                let found = self.order.conflict(run, there);
                if let Some(conflict) = guard!("cache.copies-wait-for-copies", found, else None) {
                    guard!(
                        "cache.awaited-copies-go-first",
                        self.send_lane(streams, runs, there, conflict)?
                    );
                    waits[there] = true;
                }
            }
            let behind_work = guard!("cache.copies-wait-for-work", run.behind_work, else false);
            waits[COMPUTE] |= behind_work && here != COMPUTE;
            if waits.contains(&true) {
                // What is before it in its lane does not wait for what it waits for.
                self.send_lane(streams, runs, here, u64::MAX)?;
            }
            for there in (0..LANES).filter(|&lane| waits[lane]) {
                streams.wait_for(here, there)?;
                let left = self.lanes[there].first().map_or(u64::MAX, |&(place, _)| place);
                self.order.ordered(here, there, left);
            }
            let place = self.order.touch(run);
            self.lanes[here].push((place, number));
        }
        (0..LANES).try_for_each(|lane| self.send_lane(streams, runs, lane, u64::MAX))
    }

    /// Makes copies of blocks that arrive layer by layer come after the copies so far that touch one of them, all of
    /// which are enqueued.
    pub(crate) fn order_layers(
        &mut self,
        streams: &mut Streams,
        run: &Run,
    ) -> Result<(), HostCopyError> {
        let here = run.kind.lane();
        for there in (0..LANES).filter(|&lane| lane != here) {
            let conflict = self.order.conflict(run, there);
            if guard!("cache.layers-wait-for-copies", conflict, else None).is_some() {
                streams.wait_for(here, there)?;
                self.order.ordered(here, there, u64::MAX);
            }
        }
        self.order.touch(run);
        Ok(())
    }

    /// Enqueues copies of the bytes `range` of a host block to a device block, as far as they are whole layers; the
    /// end of what is enqueued, or 0. Where layers lie otherwise on the device than in host memory, the block is
    /// copied when all of it is there.
    pub(crate) fn send_layers(
        &mut self,
        streams: &mut Streams,
        (from, to): (BlockId, BlockId),
        range: Range<u64>,
    ) -> Result<u64, HostCopyError> {
        let (shape, here) = (*self.shape(), HostDirection::ToPages);
        let lane = Kind::Carry(here).lane();
        let block_bytes = shape.block_bytes();
        if *self.paged.layout() != PagedLayout::block_major(&shape) {
            if range.end < block_bytes {
                return Ok(0);
            }
            let pair = BlockPair { source: from, destination: to };
            let run = Run { kind: Kind::Carry(here), behind_work: false, pairs: vec![pair] };
            streams.use_lane(lane);
            self.sent.clear();
            self.sent.resize(1, false);
            let sent = self.carry_runs(streams, &[run], lane, &[0]);
            self.sent.clear();
            return sent.map(|()| block_bytes);
        }
        let layer_bytes = block_bytes / u64::from(shape.layers());
        let end = range.end / layer_bytes * layer_bytes;
        if end <= range.start {
            return Ok(0);
        }
        let bytes = end - range.start;
        let block = self.whole_block(to.index())?;
        let span = block.slice(range.start, bytes).map_err(CopyError::from)?;
        streams.use_lane(lane);
        self.host.load(streams.lane(lane), (from.index(), range.start), span)?;
        self.transports.count(None, Carried { batches: 1, blocks: 0 });
        Ok(end)
    }

    /// Enqueues the waiting runs of a lane up to the place `last`, by few calls.
    fn send_lane(
        &mut self,
        streams: &mut Streams,
        runs: &[Run],
        here: usize,
        last: u64,
    ) -> Result<(), HostCopyError> {
        let count = self.lanes[here].partition_point(|&(place, _)| place <= last);
        if count == 0 {
            return Ok(());
        }
        streams.use_lane(here);
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.clear();
        numbers.extend(self.lanes[here].drain(..count).map(|(_, number)| number));
        let sent = match here {
            COMPUTE => self.change_blocks(&streams.compute, runs, &numbers),
            _ => self.carry_runs(streams, runs, here, &numbers),
        };
        self.numbers = numbers;
        sent
    }

    /// Enqueues copies within the device and scrubs before the engine's work.
    fn change_blocks(
        &mut self,
        compute: &Stream,
        runs: &[Run],
        numbers: &[usize],
    ) -> Result<(), HostCopyError> {
        if self.pieces.are_several() {
            let memory = (&self.paged, &*self.kernels);
            return self.pieces.change(compute, memory, (runs, numbers), &mut self.sent);
        }
        for &number in numbers {
            let Run { kind, pairs, .. } = &runs[number];
            if *kind == Kind::Scrub {
                // A granule is one piece.
                let follows = |one: &BlockPair, next: &BlockPair| {
                    next.destination.index() == one.destination.index() + 1
                };
                for piece in pairs.chunk_by(follows) {
                    let first = self.whole_block(piece[0].destination.index())?;
                    let start = first.address() - self.paged.span().address();
                    let bytes = first.bytes() * piece.len() as u64;
                    let piece = self.paged.span().slice(start, bytes).map_err(CopyError::from)?;
                    compute.fill(piece, 0)?;
                }
            } else {
                for pair in pairs {
                    // Ids of the pool are not negative.
                    let to = self.whole_block(pair.destination.index())?;
                    let from = self.whole_block(pair.source.index())?;
                    compute.copy_on_device(to, from)?;
                }
            }
            self.sent[number] = true;
        }
        Ok(())
    }

    /// The memory of a block that lies in one piece.
    fn whole_block(&self, block: usize) -> Result<DeviceSpan, HostCopyError> {
        let span = self.paged.block_span(block as u64).map_err(CopyError::from)?;
        span.ok_or(HostCopyError::BlockInPieces { block })
    }

    fn carry_runs(
        &mut self,
        streams: &Streams,
        runs: &[Run],
        here: usize,
        numbers: &[usize],
    ) -> Result<(), HostCopyError> {
        if let Some(carriers) = &mut self.carriers {
            let memory = (&self.paged, self.memory.ready_blocks(&self.paged));
            let (sent, stats) = (&mut self.sent[..], &mut self.transports);
            let (carrier, stream) = (&mut carriers[here], streams.lane(here));
            // Blocks in several pieces wait for what was refused: no call copies one of them.
            let is_whole =
                guard!("cache.pieces-wait-for-kernels", !self.pieces.are_several(), else true);
            match carrier.carry(stream, memory, (runs, numbers), sent, stats) {
                // Lists without a recorded event are lost: go on without them.
                Err(HostCopyError::List(AcquireError::Exhausted { .. })) if is_whole => {}
                Err(error) if is_whole && lacks_kernel(&error) => {
                    tracing::warn!(%error, "blocks are copied one by one from now on");
                    self.carriers = None;
                }
                carried => return carried,
            }
        }
        for &number in numbers {
            if self.sent[number] {
                continue;
            }
            let Run { kind: Kind::Carry(direction), pairs, .. } = &runs[number] else { continue };
            let stream = streams.lane(here);
            for pair in pairs {
                // Ids of the pool are not negative.
                let (source, destination) = (pair.source.index(), pair.destination.index());
                let block = match direction {
                    HostDirection::ToHost => source,
                    HostDirection::ToPages => destination,
                };
                let span = self.whole_block(block)?;
                match direction {
                    HostDirection::ToHost => self.host.store(stream, destination, span)?,
                    HostDirection::ToPages => self.host.load(stream, (source, 0), span)?,
                }
            }
            let count = pairs.len() as u64;
            self.transports.count(None, Carried { batches: count, blocks: count });
            self.sent[number] = true;
        }
        Ok(())
    }

    /// Notes that the engine's work comes after all copies of a direction so far.
    pub(crate) fn work_waits_for(&mut self, lane: usize) {
        self.order.ordered(COMPUTE, lane, u64::MAX);
    }

    /// Blocks on a page, at least 1.
    pub(crate) fn page_blocks(&self) -> u64 {
        let pages = self.memory.elastic().map(|memory| memory.page_bytes() / memory.block_bytes());
        pages.unwrap_or(1).max(1)
    }

    pub(crate) fn ahead_stats(&self) -> AheadStats {
        self.memory.elastic().map(ElasticPool::ahead_stats).unwrap_or_default()
    }

    /// Releases everything. The device is at rest, and no lease of the gate is open.
    pub(crate) fn close(self) -> Vec<CloseError> {
        let ordinal = self.device().ordinal();
        let Self { memory, host, carriers, paged, pieces, .. } = self;
        let mut errors = Vec::new();
        let closed = match memory {
            Memory::Elastic(memory) => Some(memory.close(&[]).wait().map_err(drop)),
            Memory::Shared(range) => Some(range.close()),
            Memory::Adopted => None,
        };
        match closed {
            Some(Ok(report)) => {
                let leaked_bytes = report.leaked_bytes;
                let first = report.errors.into_iter().next();
                errors.extend(first.map(|source| CloseError::Refused {
                    ordinal,
                    leaked_bytes,
                    source,
                }));
            }
            Some(Err(_)) => errors.push(CloseError::NotAtRest { ordinal }),
            None => {}
        }
        drop(paged);
        errors.extend(pieces.close().err().map(CloseError::from));
        let lists = carriers.into_iter().flatten().map(Carrier::close);
        errors.extend(lists.filter_map(Result::err).map(CloseError::from));
        // After the carriers, which share its memory.
        errors.extend(host.close().err().map(StagingError::from).map(CloseError::from));
        errors
    }
}
