//! Whole blocks between pages and a tier of blocks in pinned memory, by pairs of ids.

use std::ops::Range;

use cuda_driver::{BatchCopy, Stream, guard};
use kv_pool::BlockId;

use super::decision::{Decision, Question};
use super::fragments::{Fragments, plane_place};
use super::{HostDirection, HostLink, Load, Transport, TransportError};
use crate::block_copy::{BlockCopy, RawBlockCopy, check_copy};
use crate::block_units::{Planes, RawBlockSide, RawBlockUnits, UnitStrides};
use crate::paged_layout::alignment_of;
use crate::pairs::BlockPair;
use crate::{Blocks, PagedKv, error::Side};

/// Fewest bytes of runs, on average, that two hops are thought of for: each piece of a run has its
/// hand-overs.
const TWO_HOP_RUN_BYTES: u64 = 1 << 20;
/// Threads of a block of the kernel between pages and ring: a multiprocessor takes one such block.
const WALK_THREADS: u64 = 1024;
/// Most bytes of a launch, whose vectors are counted in 31 bits.
const WALK_BYTES_MAX: u64 = 1 << 30;

/// A copy that engines can make: the host has each block in one piece, and the pages have it so too, or each of
/// its planes.
pub(super) struct Whole<'a> {
    copy: BlockCopy<'a>,
    pairs: &'a [BlockPair],
    direction: HostDirection,
    paged: &'a PagedKv,
    /// Host address of the host's blocks.
    host: u64,
    block_bytes: u64,
    /// Bytes of a piece in the pages.
    piece_bytes: u64,
    /// Pieces of a block.
    pieces: u64,
}

impl HostLink {
    /// Copies blocks between pages and host memory, by the cheapest transport of the profile; returns
    /// which.
    ///
    /// The result is that of [`KvKernels::copy_blocks`](crate::KvKernels::copy_blocks), which is the
    /// direct kernel here. The others are for pairs that the host knows, and for blocks that the pages have
    /// in one piece or plane by plane, and the host [packed](crate::PagedLayout::packed) in the same order.
    /// Two hops carry blocks that follow each other in the host's memory, run by run, and are for runs of
    /// some length.
    ///
    /// # Ordering
    /// One operation of `stream`; see [`HostLink`].
    ///
    /// # Errors
    /// [`TransportError`].
    #[track_caller]
    pub fn copy_blocks(
        &mut self,
        stream: &Stream,
        copy: BlockCopy<'_>,
    ) -> Result<Transport, TransportError> {
        let _site = cuda_driver::site::enter();
        let multiprocessors = Some(copy.multiprocessors.unwrap_or(self.options.multiprocessors));
        let copy = BlockCopy { multiprocessors, ..copy };
        let whole = whole(copy);
        let decision = whole.as_ref().map(|whole| {
            let load = self.load_of_blocks(whole);
            self.decide(Question { direction: whole.direction, load })
        });
        let transport = decision.map_or(Transport::DirectKernel, |decision| decision.transport);
        if transport != Transport::DirectKernel {
            // What the kernel's launch checks by itself.
            self.kernels.launcher().check_stream(stream)?;
            check_copy(self.kernels.launcher(), &copy)?;
        }
        self.wait_for_unordered()?;
        match (decision, &whole) {
            (Some(Decision { transport: Transport::TwoHop, pace }), Some(whole)) => {
                self.carry_in_two_hops(stream, Runs::new(whole), pace)?;
            }
            (Some(Decision { transport: Transport::CopyEngine, .. }), Some(whole)) => {
                self.blocks_by_engine(stream, whole)?;
            }
            _ => self.kernels.copy_blocks(stream, copy)?,
        }
        Ok(transport)
    }

    fn load_of_blocks(&self, whole: &Whole<'_>) -> Load {
        let Whole { pairs, block_bytes, .. } = *whole;
        let runs = 1 + pairs.windows(2).filter(|two| !whole.follows(two[0], two[1])).count() as u64;
        let bytes = pairs.len() as u64 * block_bytes;
        let window_bytes = bytes / runs;
        let is_forced = self.profile.forced == Some(Transport::TwoHop);
        let through_ring = block_bytes <= self.ring_buffer_bytes().min(WALK_BYTES_MAX)
            && (window_bytes >= TWO_HOP_RUN_BYTES.min(bytes) || is_forced);
        Load {
            bytes,
            fragment_bytes: whole.fragment_bytes(),
            window_bytes,
            // A piece is of one run.
            ring_buffer_bytes: if through_ring {
                self.ring_buffer_bytes().min(window_bytes)
            } else {
                0
            },
            ring_buffers: self.options.ring_buffers,
        }
    }

    fn blocks_by_engine(
        &mut self,
        stream: &Stream,
        whole: &Whole<'_>,
    ) -> Result<(), TransportError> {
        let mut copies = std::mem::take(&mut self.copies);
        copies.clear();
        let mut fragments = Fragments::new(&mut copies);
        let bytes = whole.piece_bytes;
        for (place, pair) in whole.pairs.iter().enumerate() {
            for piece in 0..whole.pieces {
                let on_host = whole.host_place(place) + piece * bytes;
                // Ids have been checked to be below the blocks of their side.
                let (tensor, destination, source) = match whole.direction {
                    HostDirection::ToHost => {
                        let (tensor, in_pages) = whole.page_place(pair.source, piece);
                        (tensor, on_host, in_pages)
                    }
                    HostDirection::ToPages => {
                        let (tensor, in_pages) = whole.page_place(pair.destination, piece);
                        (tensor, in_pages, on_host)
                    }
                };
                fragments.push(tensor, BatchCopy { destination, source, bytes });
            }
        }
        // SAFETY: blocks of ids below the blocks of a side lie in its memory (invariants of `PagedKv`
        // and `HostBlocks`). Pinned memory is not freed before the device has finished (a dropped buffer
        // is only retired), and the host, which shares it (`HostBlocks`), does not write it.
        let outcome = unsafe { self.copy_all(stream, whole.direction, &copies) };
        self.copies = copies;
        outcome
    }

    /// Launches the copy of a run of blocks between the pages and a buffer.
    fn launch_blocks(
        &self,
        stream: &Stream,
        whole: &Whole<'_>,
        piece: Range<usize>,
        buffer: u64,
    ) -> Result<(), TransportError> {
        let Whole { copy, block_bytes, piece_bytes, direction, .. } = *whole;
        // The ring has the blocks of the piece in the order of their pairs, whatever ids the device reads.
        let blocks = piece.len() as u64;
        let ring = RawBlockSide {
            plane_stride: piece_bytes,
            ..RawBlockSide::whole(buffer, block_bytes, blocks)
        };
        let (from, to, by_place) = match direction {
            HostDirection::ToHost => (whole.pages(copy.from_blocks), ring, Side::Destination),
            HostDirection::ToPages => (ring, whole.pages(copy.to_blocks), Side::Source),
        };
        let of_pages = match whole.pieces {
            1 => whole.first_block() | whole.block_stride_bytes(),
            _ => Blocks::Device(whole.paged).alignment_bits(),
        };
        let vector_bytes = alignment_of(buffer | piece_bytes | of_pages);
        let unit_vectors = piece_bytes / vector_bytes;
        let items = blocks * whole.pieces * unit_vectors;
        let pairs = copy.pairs.address(stream)?;
        let blocks = items.div_ceil(WALK_THREADS).clamp(1, self.options.multiprocessors.into());
        let raw = RawBlockCopy {
            to,
            from,
            units: RawBlockUnits { planes: whole.pieces, tokens: 1, segments: 1, unit_vectors },
            pairs: pairs + (piece.start * size_of::<BlockPair>()) as u64,
            items,
            by_place: guard!("kernels.ring-numbers-by-place", Some(by_place), else None),
            first_pair: 0,
            vector_bytes,
            report: 0,
            grid: blocks as u32,
            threads: WALK_THREADS as u32,
            batched: false,
        };
        // SAFETY: `check_copy` has found the pairs in their memory. Of the pages, the kernel touches the pieces
        // of blocks below `from_blocks` or `to_blocks` only, which they hold (invariant of `PagedKv`, and
        // `check_copy`). Of the ring, blocks are numbered by place, and there are as many as pairs in the
        // piece, for which the buffer is long enough (`Runs::take`): whatever ids the device's pairs have,
        // nothing else is touched.
        Ok(unsafe { self.kernels.copies().launch(stream, &raw) }?)
    }
}

impl Whole<'_> {
    fn host_id(&self, pair: BlockPair) -> u64 {
        let id = match self.direction {
            HostDirection::ToHost => pair.destination,
            HostDirection::ToPages => pair.source,
        };
        id.index() as u64
    }

    fn host_place(&self, place: usize) -> u64 {
        self.host + self.host_id(self.pairs[place]) * self.block_bytes
    }

    /// The tensor that holds a piece of a block, and where the piece lies.
    fn page_place(&self, block: BlockId, piece: u64) -> (u64, u64) {
        let kv_count = u64::from(self.paged.shape().kv_count());
        let (tensor, plane) = plane_place(self.paged, piece / kv_count, piece % kv_count);
        (tensor, plane + block.index() as u64 * self.block_stride_bytes())
    }

    /// Where the first block begins, of blocks of one piece.
    fn first_block(&self) -> u64 {
        self.page_place(BlockId::from(0), 0).1
    }

    /// From a block to the next in the pages: more than its bytes where the pages have room behind blocks.
    fn block_stride_bytes(&self) -> u64 {
        self.paged.layout().block_stride_bytes()
    }

    /// The pages, over the first `num_blocks` blocks.
    fn pages(&self, num_blocks: u64) -> RawBlockSide {
        if self.pieces == 1 {
            let stride = guard!(
                "kernels.hops-keep-strides",
                self.block_stride_bytes(),
                else self.block_bytes
            );
            return RawBlockSide::whole(self.first_block(), stride, num_blocks);
        }
        let start = UnitStrides { offset: 0, token: 0, segment: 0 };
        RawBlockSide::of((Blocks::Device(self.paged), Planes::All), &start, num_blocks)
    }

    /// Bytes that lie together on both sides, on average: neighbouring pieces are copied as one.
    fn fragment_bytes(&self) -> u64 {
        let follows = |piece: &u64| {
            let first = BlockId::from(0);
            let (tensor, before) = self.page_place(first, *piece - 1);
            self.page_place(first, *piece) == (tensor, before + self.piece_bytes)
        };
        let joined = (1..self.pieces).filter(follows).count() as u64;
        self.block_bytes / (self.pieces - joined)
    }

    /// Whether a pair's block follows the other's in the host's memory.
    fn follows(&self, first: BlockPair, second: BlockPair) -> bool {
        self.host_id(first) + 1 == self.host_id(second)
    }
}

/// Pairs on their way, run by run.
pub(super) struct Runs<'a> {
    whole: &'a Whole<'a>,
    done: usize,
    /// The end of the run of blocks that follow each other on the host, from `done` on.
    run_end: usize,
}

impl<'a> Runs<'a> {
    fn new(whole: &'a Whole<'a>) -> Self {
        let mut runs = Self { whole, done: 0, run_end: 0 };
        runs.go_on(0);
        runs
    }

    fn go_on(&mut self, done: usize) {
        self.done = done;
        if done >= self.run_end {
            let left = &self.whole.pairs[done..];
            let follows = |two: &&[BlockPair]| self.whole.follows(two[0], two[1]);
            let more = left.windows(2).take_while(follows).count();
            self.run_end = done + left.len().min(1 + more);
        }
    }

    pub(super) fn direction(&self) -> HostDirection {
        self.whole.direction
    }

    /// Bytes that are left of all, and of the run that the next piece is of.
    pub(super) fn bytes_left(&self) -> (u64, u64) {
        let bytes = |until: usize| (until - self.done) as u64 * self.whole.block_bytes;
        (bytes(self.whole.pairs.len()), bytes(self.run_end))
    }

    /// Takes the next piece, with its bytes: pairs whose blocks follow each other on the host, of at most
    /// `budget` bytes, which is at most a buffer, and one at least.
    pub(super) fn take(&mut self, budget: u64) -> Option<(Range<usize>, u64)> {
        let budget = budget.min(WALK_BYTES_MAX);
        let most = (budget / self.whole.block_bytes).max(1) as usize;
        let piece = self.done..self.run_end.min(self.done.saturating_add(most));
        let bytes = piece.len() as u64 * self.whole.block_bytes;
        self.go_on(piece.end);
        (bytes > 0).then_some((piece, bytes))
    }

    /// Enqueues the kernel between the pages and the buffer.
    pub(super) fn walk(
        &self,
        link: &HostLink,
        stream: &Stream,
        piece: Range<usize>,
        buffer: u64,
    ) -> Result<(), TransportError> {
        link.launch_blocks(stream, self.whole, piece, buffer)
    }

    /// Enqueues the copy between the buffer and the host.
    pub(super) fn copy(
        &self,
        link: &HostLink,
        copies: &Stream,
        piece: Range<usize>,
        buffer: u64,
    ) -> Result<(), TransportError> {
        let bytes = piece.len() as u64 * self.whole.block_bytes;
        let host = self.whole.host_place(piece.start);
        let copies = copies.raw();
        Ok(link.device().run(|driver| match self.whole.direction {
            // SAFETY: the blocks of the run lie one after the other (`take`) in the pinned memory, of
            // which the same holds as in `blocks_by_engine`; the buffer is device memory of the link, and
            // as long; the stream is live.
            HostDirection::ToHost => unsafe {
                driver.memcpy_dtoh_async(host, buffer, bytes, copies)
            },
            // SAFETY: likewise.
            HostDirection::ToPages => unsafe {
                driver.memcpy_htod_async(buffer, host, bytes, copies)
            },
        })?)
    }
}

/// The copy, if engines can make it.
fn whole(copy: BlockCopy<'_>) -> Option<Whole<'_>> {
    let pairs = copy.host_pairs.filter(|pairs| pairs.len() > 0)?.as_slice();
    let (direction, paged, host) = match (copy.from, copy.to) {
        (Blocks::Device(paged), Blocks::Host(host)) => (HostDirection::ToHost, paged, host),
        (Blocks::Host(host), Blocks::Device(paged)) => (HostDirection::ToPages, paged, host),
        _ => return None,
    };
    let shape = paged.shape();
    let layout = paged.layout();
    let is_packed = *host.layout() == layout.packed(shape);
    if shape != host.shape() || !guard!("kernels.host-packs-as-pages", is_packed, else true) {
        return None;
    }
    let (block_bytes, plane_bytes) = (shape.block_bytes(), shape.block_plane_bytes());
    let (piece_bytes, pieces) = if layout.has_whole_blocks(shape) {
        (block_bytes, 1)
    } else if layout.has_whole_planes(shape) {
        (plane_bytes, shape.planes())
    } else {
        return None;
    };
    let host = host.buffer().host_address() + host.offset();
    Some(Whole { copy, pairs, direction, paged, host, block_bytes, piece_bytes, pieces })
}
