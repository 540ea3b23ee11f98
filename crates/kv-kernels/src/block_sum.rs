//! Sums of whole blocks, the same wherever and however a block lies.

use bytemuck::{Pod, Zeroable};
use cuda_driver::{DeviceSpan, KernelArgs, LaunchConfig, OutOfBounds, Stream, guard};
use kv_pool::BlockId;

use crate::block_units::counted;
use crate::divider::Divider31;
use crate::launcher::{GRID_Y_MAX, Launcher, ROW_THREADS, WARP_THREADS};
use crate::layout::RowPart;
use crate::lazy::LazyModule;
use crate::operand::{check_array, check_disjoint};
use crate::paged_layout::alignment_of;
use crate::shape::WORD_BYTES;
use crate::{
    Blocks, DeviceReport, HostBlocks, KernelError, KernelSource, entry,
    error::{Operand, Side},
    verify::word_share,
};

const PTX: &str = include_str!("../ptx/block_sum.compute_80.ptx");

/// What [`KvKernels::sum_blocks`](crate::KvKernels::sum_blocks) sums.
#[derive(Clone, Copy, Debug)]
pub struct BlockSums<'a> {
    /// The memory that is read.
    pub blocks: Blocks<'a>,
    /// `count` block ids (`i32`).
    pub ids: KernelSource<'a>,
    /// How many.
    pub count: u64,
    /// The host's copy of the ids, which is checked before the launch; `None` where only the device
    /// has them.
    pub host_ids: Option<&'a [BlockId]>,
    /// Blocks that are ready, the first ones; others are refused.
    pub num_blocks: u64,
    /// Where the sums (`u64`) go.
    pub sums: DeviceSpan,
    /// Where to tell of ids that the device had to pass over.
    pub report: Option<&'a DeviceReport>,
}

/// The parameters of a launch of `sum_blocks`, unchecked; see `kernels/block_sum.cu`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawBlockSums {
    /// Address of the table of plane addresses, in the order `layer * kv_count + kv`.
    pub(crate) plane_ptrs: u64,
    /// Planes.
    pub(crate) planes: u64,
    /// Tokens of a plane; 1 where the tokens of a plane make up one row.
    pub(crate) tokens: u64,
    /// What rows of keys are made of, one part or two: of rows of all planes where `values` has none.
    pub(crate) keys: [Option<RowPart>; 2],
    /// What rows of values are made of where they lie differently, which are those of every second plane.
    pub(crate) values: [Option<RowPart>; 2],
    /// Bytes from a block to the next.
    pub(crate) block_stride: u64,
    /// Blocks that may be named.
    pub(crate) num_blocks: u64,
    /// Address of the ids.
    pub(crate) ids: u64,
    /// How many.
    pub(crate) count: u64,
    /// Address of the sums, to which the launch adds.
    pub(crate) sums: u64,
    /// Address of a report, or 0.
    pub(crate) report: u64,
    /// Bytes that a thread reads at once: 16, 8, 4, 2 or 1. A block has fewer than 2^31 times as many.
    pub(crate) vector_bytes: u64,
    /// Blocks of the grid for each id, of at most 256 threads that take 4 vectors each: at most 2^20.
    pub(crate) slices: u32,
}

/// `BlockRows` of `kernels/block_sum.cu`, in vectors.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct BlockRows {
    pub(crate) plane_ptrs: u64,
    pub(crate) block_stride: u64,
    pub(crate) num_blocks: u64,
    keys: [VectorsOfRow; 2],
    values: [VectorsOfRow; 2],
    pub(crate) row: Divider31,
    pub(crate) tokens: Divider31,
    kinds: u32,
    vectors: u32,
}

/// `RowPart` there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct VectorsOfRow {
    pub(crate) offset: u64,
    pub(crate) token_stride: u64,
    pub(crate) segment_stride: u64,
    pub(crate) first: u32,
    pub(crate) segment: Divider31,
}

const _: () = assert!(size_of::<BlockRows>() == 216, "BlockRows of kernels/block_sum.cu");

impl BlockRows {
    /// Of parameters whose counts fit.
    fn of(raw: &RawBlockSums) -> Result<Self, KernelError> {
        let vector_bytes = raw.vector_bytes.max(1);
        let row_bytes = bytes_of_row(&raw.keys);
        let row = counted("vectors of a row", row_bytes.map(|bytes| bytes / vector_bytes))?;
        let tokens = counted("tokens", Some(raw.tokens))?;
        let rows = raw.planes.checked_mul(u64::from(tokens));
        let vectors = rows.and_then(|rows| rows.checked_mul(u64::from(row)));
        let vectors = counted("vectors of a block", vectors)?;
        let kinds = if raw.values == [None; 2] { 1 } else { 2 };
        let parts = |parts: &[Option<RowPart>; 2]| {
            let mut first = Some(0);
            parts.map(|part| {
                let before = first;
                let Some(part) = part.filter(|_| before.is_some()) else {
                    return VectorsOfRow::NONE;
                };
                let RowPart { segment_bytes, segments, .. } = part;
                // No overflow: the row's bytes have been counted, or the part is of no row.
                first = segment_bytes
                    .checked_mul(segments.into())
                    .and_then(|bytes| u32::try_from(bytes / vector_bytes).ok())
                    .and_then(|vectors| vectors.checked_add(before?));
                VectorsOfRow {
                    offset: part.offset_bytes,
                    token_stride: part.token_stride_bytes,
                    segment_stride: part.segment_stride_bytes,
                    first: before.unwrap_or(u32::MAX),
                    segment: Divider31::new(
                        u32::try_from(segment_bytes / vector_bytes).unwrap_or(row).max(1),
                    ),
                }
            })
        };
        Ok(Self {
            plane_ptrs: raw.plane_ptrs,
            block_stride: raw.block_stride,
            num_blocks: raw.num_blocks,
            keys: parts(&raw.keys),
            values: parts(&raw.values),
            row: Divider31::new(row.max(1)),
            tokens: Divider31::new(tokens.max(1)),
            kinds,
            vectors,
        })
    }

    /// Planes of the block.
    pub(crate) fn planes(&self) -> u64 {
        let of_plane = u64::from(self.row.divisor) * u64::from(self.tokens.divisor);
        u64::from(self.vectors).checked_div(of_plane).unwrap_or(0)
    }

    /// What the rows of a plane are made of.
    pub(crate) fn parts(&self, plane: usize) -> [VectorsOfRow; 2] {
        if self.kinds == 2 && plane % 2 == 1 { self.values } else { self.keys }
    }

    /// What threads take one by one: vectors, or the words that smaller ones make up.
    fn items(&self, vector_bytes: u64) -> u64 {
        (u64::from(self.vectors) * vector_bytes.min(WORD_BYTES)).div_ceil(WORD_BYTES)
    }
}

impl VectorsOfRow {
    /// A part that no row has: it begins behind all of them.
    const NONE: Self = Self {
        offset: 0,
        token_stride: 0,
        segment_stride: 0,
        first: u32::MAX,
        segment: Divider31 { divisor: 1, magic: 1, shift: 0 },
    };
}

/// Bytes of a row of these parts; `None` where 64 bits do not count them.
fn bytes_of_row(parts: &[Option<RowPart>; 2]) -> Option<u64> {
    parts.iter().flatten().try_fold(0u64, |sum, part| {
        sum.checked_add(part.segment_bytes.checked_mul(part.segments.into())?)
    })
}

/// The sum of a block in one piece: its bytes in the order `[plane][token][byte of the row]`, padded
/// with zeros to words `w` of 64 bits (little-endian), of each of which [`word_share`]`(word, w)`, added up
/// with wrapping.
///
/// [`KvKernels::sum_blocks`](crate::KvKernels::sum_blocks) gives the same for a block that lies in any layout. The sum finds bytes
/// that are lost, torn, exchanged or misplaced; it is no defence against anyone who forges them.
#[must_use]
pub fn block_sum(block: &[u8]) -> u64 {
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let shares = (0..).zip(block.chunks(8)).map(|(w, bytes)| word_share(word(bytes), w));
    shares.fold(0, u64::wrapping_add)
}

impl HostBlocks {
    /// Copies a block out, without gaps and in the order `[plane][token][byte of the row]`, whatever
    /// the layout.
    ///
    /// # Ordering
    /// Device operations that write the block must have completed: otherwise the bytes are a mixture.
    ///
    /// # Errors
    /// [`OutOfBounds`] for a block that is not there, or room of another length than
    /// [`block_bytes`](crate::KvShape::block_bytes).
    #[track_caller]
    pub fn read_block(&self, block: u64, dense: &mut [u8]) -> Result<(), OutOfBounds> {
        let _site = cuda_driver::site::enter();
        let shape = *self.shape();
        let (bytes, capacity) = (shape.block_bytes(), self.buffer().bytes());
        if block >= self.blocks() || dense.len() as u64 != bytes {
            let offset = block.saturating_mul(bytes);
            return Err(OutOfBounds { offset, bytes: dense.len() as u64, capacity });
        }
        let start = self.offset() + block * self.layout().block_stride_bytes();
        let mut at = 0;
        for plane in 0..shape.planes() {
            let start = start + self.plane_offset(plane);
            let parts = self.layout().parts_of(plane % u64::from(shape.kv_count()));
            for token in 0..u64::from(shape.block_tokens()) {
                for part in parts {
                    let start = start + part.offset_bytes + token * part.token_stride_bytes;
                    for segment in 0..u64::from(part.segments) {
                        let end = at + part.segment_bytes as usize;
                        let from = start + segment * part.segment_stride_bytes;
                        self.buffer().read_at(from, &mut dense[at..end])?;
                        at = end;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The kernels that sum blocks, by the logarithm of the bytes of a vector.
#[derive(Debug)]
pub(crate) struct SumKernels(LazyModule<5>);

impl SumKernels {
    pub(crate) const fn new() -> Self {
        Self(LazyModule::new(PTX, entry::SUM_BLOCKS))
    }

    /// See [`KvKernels::sum_blocks`](crate::KvKernels::sum_blocks).
    pub(crate) fn sum(
        &self,
        on: &Launcher,
        stream: &Stream,
        sums: &BlockSums<'_>,
    ) -> Result<(), KernelError> {
        on.check_stream(stream)?;
        check_sums(on, sums)?;
        if sums.count == 0 {
            return Ok(());
        }
        let raw = block_sums(on, stream, sums)?;
        let written = sums.sums.slice(0, sums.count * 8).map_err(|_| too_many(sums.count))?;
        stream.fill(written, 0)?;
        // SAFETY: `check_sums` has found room for each id and each sum, which is device memory;
        // blocks below `num_blocks`, to which the kernel keeps, lie in their memory (invariants of
        // `PagedKv` and `HostBlocks`). Pinned memory is only read, and is not freed before the
        // device has finished (a dropped buffer is only retired).
        unsafe { self.launch(on, stream, &raw) }
    }

    /// Launches the kernel with these parameters, unchecked.
    ///
    /// # Errors
    /// [`KernelError::TooMany`] for more vectors than the kernel counts, [`KernelError::Module`] and
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// - every address is of memory that the kernels' device can access, and stays allocated until
    ///   the kernel has completed; all of what the head of `kernels/block_sum.cu` names as read or
    ///   written lies there, and is aligned to `vector_bytes`, which is 16, 8, 4, 2 or 1;
    /// - no host memory is written.
    pub(crate) unsafe fn launch(
        &self,
        on: &Launcher,
        stream: &Stream,
        raw: &RawBlockSums,
    ) -> Result<(), KernelError> {
        let rows = BlockRows::of(raw)?;
        let args =
            KernelArgs::new().arg(rows).arg(raw.ids).arg(raw.count).arg(raw.sums).arg(raw.report);
        let kernel = on.by_vector(&self.0, raw.vector_bytes)?;
        let config = LaunchConfig {
            grid: [raw.slices.max(1), raw.count.clamp(1, GRID_Y_MAX.into()) as u32, 1],
            block: [threads_for(rows.items(raw.vector_bytes)) as u32, 1, 1],
            shared_bytes: 0,
        };
        // SAFETY: the 5 arguments are the parameters of `sum_blocks_*` in `kernels/block_sum.cu`, in
        // order and size (asserted above); the rest is the caller's promise.
        Ok(unsafe { kernel.launch(stream, &config, &args) }?)
    }
}

fn check_sums(on: &Launcher, sums: &BlockSums<'_>) -> Result<(), KernelError> {
    let BlockSums { blocks, ids, count, num_blocks, .. } = *sums;
    on.check_blocks(blocks, num_blocks)?;
    if let Some(report) = sums.report {
        on.check_report(report)?;
    }
    check_array(Operand::BlockIds, ids, count, 4)?;
    check_array(Operand::Checksums, sums.sums, count, 8)?;
    check_disjoint((Operand::Checksums, sums.sums), (Operand::BlockIds, ids))?;
    for extent in blocks.extents() {
        check_disjoint((Operand::Checksums, sums.sums), (blocks.operand(), extent))?;
    }
    let Some(host_ids) = sums.host_ids else { return Ok(()) };
    if host_ids.len() as u64 != count {
        return Err(KernelError::BlockCount { count, given: host_ids.len() as u64 });
    }
    for (place, &block) in (0..).zip(host_ids) {
        if block.index() as u64 >= num_blocks {
            let (side, blocks) = (Side::Source, num_blocks);
            return Err(KernelError::BlockOutOfRange { place, side, block, blocks });
        }
    }
    Ok(())
}

fn block_sums(
    on: &Launcher,
    stream: &Stream,
    sums: &BlockSums<'_>,
) -> Result<RawBlockSums, KernelError> {
    let BlockSums { blocks, num_blocks, .. } = *sums;
    let (shape, layout) = (blocks.shape(), blocks.layout());
    let mut tokens = u64::from(shape.block_tokens());
    let parts = |kv| {
        let mut parts = layout.parts_of(kv).iter().map(|part| in_one_segment(*part));
        [parts.next(), parts.next()]
    };
    let mut keys = parts(0);
    let values = if layout.has_like_planes() { [None; 2] } else { parts(1) };
    if layout.has_like_planes()
        && layout.has_whole_planes(shape)
        && let [Some(part @ RowPart { segments: 1, .. }), None] = &mut keys
    {
        // The tokens of a plane follow each other: they make up one row.
        part.segment_bytes = shape.block_plane_bytes();
        tokens = 1;
    }
    let bits = keys.iter().chain(&values).flatten().fold(blocks.alignment_bits(), |bits, part| {
        let of_tokens = if tokens > 1 { part.token_stride_bytes } else { 0 };
        let of_segments = if part.segments > 1 { part.segment_stride_bytes } else { 0 };
        let apart = guard!("kernels.sums-read-aligned", part.offset_bytes | of_segments, else 0);
        bits | part.segment_bytes | of_tokens | apart
    });
    let raw = RawBlockSums {
        plane_ptrs: blocks.planes_address(),
        planes: shape.planes(),
        tokens,
        keys,
        values,
        block_stride: layout.block_stride_bytes(),
        num_blocks,
        ids: sums.ids.address(stream)?,
        count: sums.count,
        sums: sums.sums.address(),
        report: sums.report.map_or(0, DeviceReport::address),
        vector_bytes: alignment_of(bits),
        slices: 1,
    };
    // Some waves of slices, so that the last is short, and none with less than a round of loads.
    let items = BlockRows::of(&raw)?.items(raw.vector_bytes);
    let threads = threads_for(items);
    let resident = on.multiprocessors() * THREADS_OF_MULTIPROCESSOR / threads;
    let slices = (resident * WAVES).div_ceil(sums.count);
    let most = items.div_ceil(threads * UNROLL);
    Ok(RawBlockSums { slices: slices.clamp(1, most.max(1)) as u32, ..raw })
}

/// The same part with segments that follow each other taken for one.
fn in_one_segment(part: RowPart) -> RowPart {
    if part.segment_stride_bytes != part.segment_bytes {
        return part;
    }
    // No overflow: it is a part of a row's bytes.
    let segment_bytes = part.segment_bytes * u64::from(part.segments);
    RowPart { segment_bytes, segments: 1, segment_stride_bytes: segment_bytes, ..part }
}

/// Threads of a block of the grid, for KV blocks of `items` vectors: as many as have a round of loads each.
fn threads_for(items: u64) -> u64 {
    items.div_ceil(UNROLL).next_multiple_of(WARP_THREADS).clamp(WARP_THREADS, ROW_THREADS)
}

/// Vectors that a thread reads at once: `KV_SUM_UNROLL` of `kernels/kv.cuh`.
const UNROLL: u64 = 4;
/// Threads that a multiprocessor holds at once.
const THREADS_OF_MULTIPROCESSOR: u64 = 2048;
/// How many times over the slices fill the device.
const WAVES: u64 = 4;

fn too_many(count: u64) -> KernelError {
    KernelError::TooMany { what: "sums", count }
}
