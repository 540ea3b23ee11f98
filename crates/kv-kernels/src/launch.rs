//! The raw transfer: what its kernels take, and a launch that checks no memory.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use cuda_driver::{KernelArgs, LaunchConfig, Stream};
use smallvec::SmallVec;

use crate::kernels::TransferKernel;
use crate::layout::alignment_of;
use crate::narrow::Narrow;
use crate::{DeviceReport, Direction, KernelError, KvKernels, PagedKv};

/// Most chunks of one launch: `KV_TRANSFER_CHUNKS` of `kernels/kv.cuh`.
pub const CHUNKS_MAX: usize = 16;
/// Most threads of a block: `KV_TRANSFER_THREADS` of `kernels/kv.cuh`.
const THREADS_MAX: u32 = 1024;
/// Vectors that a thread has in flight: `KV_TRANSFER_UNROLL` of `kernels/kv.cuh`.
const UNROLL: u64 = 4;
/// Threads of a block where nothing else is asked for.
const THREADS: u32 = 256;
/// Most tokens of a chunk and most vectors of a row: kernels count on from a tile's start in 32 bits.
pub(crate) const COUNT_MAX: u64 = i32::MAX as u64;

/// How much of the device a launch may take.
///
/// Blocks stay on a multiprocessor until they end, so at most `blocks` multiprocessors work for the
/// transfer, and what runs beside it keeps the others.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LaunchLimits {
    /// Blocks of the grid, at most; 0 for as many as fill the device.
    pub blocks: u32,
    /// Threads of a block, a multiple of 32 and at most 1,024; 0 for the default.
    pub threads: u32,
}

/// Where the tokens of a chunk lie in the pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RawMapping {
    /// Address of a slot (`i64`) for each token.
    Slots(u64),
    /// Address of a block id (`i32`) for each `block_tokens` tokens.
    Blocks(u64),
}

impl RawMapping {
    pub(crate) fn address(self) -> u64 {
        match self {
            Self::Slots(address) | Self::Blocks(address) => address,
        }
    }

    pub(crate) fn kind(self) -> u32 {
        u32::from(matches!(self, Self::Blocks(_)))
    }
}

/// One chunk of a [`RawTransfer`]: tokens of a range of layers, `[kv, layer, token, row]`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RawChunk {
    /// Address of row 0. It may lie outside of any memory, when `rows` leaves row 0 out: sums wrap.
    pub address: u64,
    /// Where its tokens lie. All chunks of a launch have the same kind of mapping.
    pub mapping: RawMapping,
    /// Tokens of the chunk, at most `i32::MAX`.
    pub tokens: u64,
    /// How many of the first tokens stay untouched.
    pub skip_prefix_n_tokens: u64,
    /// The rows to move, of all `kv_count * layers * tokens` in the order `[kv, layer, token]`. Row `r`
    /// lies at `address + r * row_bytes`. Rows of skipped tokens in it are passed over.
    pub rows: Range<u64>,
}

/// What [`KvKernels::multi_layer_transfer_raw`] moves.
#[derive(Clone, Debug)]
pub struct RawTransfer<'a> {
    /// The pages.
    pub paged: &'a PagedKv,
    /// At most [`CHUNKS_MAX`] chunks.
    pub chunks: &'a [RawChunk],
    /// The layers of the paged memory that the chunks hold.
    pub layers: Range<u32>,
    /// Which way.
    pub direction: Direction,
    /// Blocks that are ready, the first of the paged memory; rows of others are passed over.
    pub num_blocks: u64,
    /// How much of the device the launch may take.
    pub limits: LaunchLimits,
    /// Where the device tells of slots and ids that are out of range, if anywhere; places are those of
    /// the mapping, and a place counts once for each plane.
    pub report: Option<&'a DeviceReport>,
}

impl KvKernels {
    /// Moves windows of chunks to or from pages, in one launch, and checks no memory.
    ///
    /// For each chunk, row `r` of `rows`, counted in the order `[kv, layer, token]` over
    /// `kv_count * layers.len() * tokens` rows, moves between `address + r * row_bytes` (wrapping) and
    /// the place that the mapping gives its token in its plane. So a ring that holds rows `a..b` from
    /// its start on is a chunk with `address = ring - a * row_bytes` and `rows = a..b`. Chunks lie in
    /// device memory, or in pinned host memory by its device address. Nothing is launched when no row
    /// is left.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. Mappings are read when the kernel runs.
    ///
    /// # Errors
    /// [`KernelError`] for numbers that do not fit each other, another device, and what the driver
    /// refuses; nothing was enqueued then.
    ///
    /// # Safety
    /// - every row of every window lies in device memory, or in pinned memory that stays allocated until
    ///   the launch has completed and that the host does not access meanwhile where it is written;
    /// - mappings are memory of that kind, and hold an entry for each token of the windows;
    /// - no window overlaps the paged memory, nor, where chunks are written, another window.
    #[track_caller]
    pub unsafe fn multi_layer_transfer_raw(
        &self,
        stream: &Stream,
        transfer: &RawTransfer<'_>,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.check_stream(stream)?;
        self.check_paged(transfer.paged, transfer.num_blocks)?;
        if let Some(report) = transfer.report {
            self.check_report(report)?;
        }
        let Some(launch) = self.plan(transfer)? else { return Ok(()) };
        let kernel = self.transfer(launch.vector_bytes, launch.kernel)?;
        // SAFETY: the arguments are the parameters of the entries of `kernels/narrow_*.cu`, or else of
        // `kernels/transfer_*.cu`, whose sizes both sides assert. Chunks and mappings are the caller's,
        // a report is a live buffer's. The plane table has an address for each plane (invariant of
        // `PagedKv`), the layers lie in it (`plan`), and rows of blocks below `num_blocks`, to which the
        // kernel keeps, lie in the tensors (invariant of `PagedKv`, and `check_paged`).
        Ok(unsafe { kernel.launch(stream, &launch.config, &launch.args) }?)
    }

    /// The parameters of a launch; `None` where no row is left.
    fn plan(&self, transfer: &RawTransfer<'_>) -> Result<Option<Planned>, KernelError> {
        let RawTransfer { paged, chunks, layers, direction, num_blocks, limits, .. } = transfer;
        let shape = paged.shape();
        if layers.start > layers.end || layers.end > shape.layers() {
            let (start, end) = (layers.start, layers.end);
            return Err(KernelError::Layers { start, end, layers: shape.layers() });
        }
        if chunks.len() > CHUNKS_MAX {
            return Err(KernelError::Chunks { chunks: chunks.len(), most: CHUNKS_MAX });
        }
        let threads = limits.threads()?;
        let row_bytes = shape.row_bytes();
        let bits = chunks.iter().fold(row_bytes, |bits, chunk| bits | chunk.address);
        let vector_bytes = paged.alignment().min(alignment_of(bits));
        let row_vectors = row_bytes / vector_bytes;
        if row_vectors > COUNT_MAX {
            return Err(KernelError::RowTooLong { row_bytes, vector_bytes });
        }
        let mut planned = SmallVec::<[Chunk; 1]>::new();
        let mut tiles = 0;
        let mut mapping_kind = None;
        let tile_items = u64::from(threads) * UNROLL;
        for chunk in *chunks {
            let counted = CountedRows::of(chunk, layers.len() as u64, paged)?;
            if *mapping_kind.get_or_insert(chunk.mapping.kind()) != chunk.mapping.kind() {
                return Err(KernelError::MixedMappings);
            }
            if counted.rows == 0 {
                continue;
            }
            // No overflow: an item is at least a byte of rows that can be addressed.
            let items = counted
                .rows
                .checked_mul(row_vectors)
                .ok_or(KernelError::RowTooLong { row_bytes, vector_bytes })?;
            let first_tile = tiles;
            let new = Chunk::new(chunk, &counted, row_bytes, layers.len() as u64, items);
            planned.push(Chunk { first_tile, ..new });
            tiles += items.div_ceil(tile_items);
        }
        if planned.is_empty() {
            return Ok(None);
        }
        let pages = Pages::new(transfer, vector_bytes, row_vectors as u32).with(
            *direction,
            mapping_kind.unwrap_or(0),
            planned.len() as u32,
            *num_blocks,
        );
        let most =
            if limits.blocks == 0 { i32::MAX as u32 } else { limits.blocks.min(i32::MAX as u32) };
        let vector_bytes = u64::from(pages.vector_bytes);
        if let Some(Narrow { kernel, args, config }) = Narrow::of(&pages, &planned, *limits) {
            let kernel = TransferKernel::Narrow(kernel);
            return Ok(Some(Planned { vector_bytes, kernel, args, config }));
        }
        // A block for each tile is quickest; blocks that walk several tiles are for limits.
        let config = LaunchConfig::linear(tiles.min(most.into()) as u32, threads);
        let args = KernelArgs::new().arg(pages).arg(Chunks::of(&planned));
        let kernel = TransferKernel::General;
        Ok(Some(Planned { vector_bytes, kernel, args, config }))
    }
}

impl LaunchLimits {
    fn threads(self) -> Result<u32, KernelError> {
        match self.threads {
            0 => Ok(THREADS),
            threads if threads.is_multiple_of(32) && threads <= THREADS_MAX => Ok(threads),
            threads => Err(KernelError::Threads { threads, most: THREADS_MAX }),
        }
    }
}

struct Planned {
    vector_bytes: u64,
    kernel: TransferKernel,
    args: KernelArgs,
    config: LaunchConfig,
}

/// The rows of a window that move, of those that move in the whole chunk.
struct CountedRows {
    first: u64,
    rows: u64,
    /// Tokens that move in each plane.
    moved: u64,
}

impl CountedRows {
    fn of(chunk: &RawChunk, layers: u64, paged: &PagedKv) -> Result<Self, KernelError> {
        let RawChunk { tokens, skip_prefix_n_tokens: skip, rows, .. } = chunk;
        let (tokens, skip) = (*tokens, *skip);
        if skip > tokens {
            return Err(KernelError::Skip { skip_prefix_n_tokens: skip, tokens });
        }
        if tokens > COUNT_MAX {
            return Err(KernelError::TooManyTokens { tokens, most: COUNT_MAX });
        }
        // No overflow: 2^31 tokens of 2^32 planes at most, and `planes` refuses more.
        let planes = u64::from(paged.shape().kv_count()) * layers;
        let planes = u64::from(u32::try_from(planes).map_err(|_| KernelError::Planes { planes })?);
        let all = planes * tokens;
        if rows.start > rows.end || rows.end > all {
            return Err(KernelError::Window { start: rows.start, end: rows.end, rows: all });
        }
        let moved = tokens - skip;
        // How many rows before row `r` move.
        let before = |row: u64| match tokens {
            0 => 0,
            _ => row / tokens * moved + (row % tokens).saturating_sub(skip),
        };
        let first = before(rows.start);
        Ok(Self { first, rows: before(rows.end) - first, moved })
    }
}

/// A divisor with its magic number: `Divider32` of `kernels/kv.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Divider32 {
    pub(crate) divisor: u32,
    pub(crate) magic: u32,
}

/// The same in 64 bits: `Divider64` of `kernels/kv.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Divider64 {
    pub(crate) divisor: u64,
    pub(crate) magic: u64,
}

impl Divider32 {
    /// `divisor` is at least 1.
    pub(crate) fn new(divisor: u32) -> Self {
        Self { divisor, magic: u32::MAX / divisor }
    }
}

impl Divider64 {
    /// `divisor` is at least 1.
    pub(crate) fn new(divisor: u64) -> Self {
        Self { divisor, magic: u64::MAX / divisor }
    }
}

/// `TransferPart` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) token_stride: u64,
    pub(crate) segment_stride: u64,
    pub(crate) segment_vectors: Divider32,
}

/// `TransferPages` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Pages {
    pub(crate) plane_ptrs: u64,
    pub(crate) report: u64,
    pub(crate) num_blocks: u64,
    pub(crate) block_stride: u64,
    pub(crate) block_tokens: Divider64,
    pub(crate) parts: [Part; 2],
    pub(crate) row_vectors_wide: Divider64,
    pub(crate) row_vectors: Divider32,
    pub(crate) layers: Divider32,
    pub(crate) first_part_vectors: u32,
    pub(crate) plane_layers: u32,
    pub(crate) first_layer: u32,
    pub(crate) direction: u32,
    pub(crate) mapping_kind: u32,
    pub(crate) chunks: u32,
    pub(crate) vector_bytes: u32,
    pub(crate) reserved: u32,
}

/// `TransferChunk` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Chunk {
    pub(crate) address: u64,
    pub(crate) mapping: u64,
    pub(crate) first_row: u64,
    pub(crate) items: u64,
    pub(crate) first_tile: u64,
    pub(crate) kv_stride: u64,
    pub(crate) layer_stride: u64,
    pub(crate) token_stride: u64,
    pub(crate) moved_wide: Divider64,
    pub(crate) moved: Divider32,
    pub(crate) skip: u32,
    pub(crate) reserved: u32,
}

/// `TransferChunks` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Chunks(pub(crate) [Chunk; CHUNKS_MAX]);

const _: () = assert!(size_of::<Pages>() == 176 && size_of::<Chunk>() == 96);
// The parameters of a kernel have 4 KiB on every device.
const _: () = assert!(size_of::<Pages>() + size_of::<Chunks>() <= 4096);

impl Pages {
    fn new(transfer: &RawTransfer<'_>, vector_bytes: u64, row_vectors: u32) -> Self {
        let (paged, layers) = (transfer.paged, &transfer.layers);
        let (shape, layout) = (paged.shape(), paged.layout());
        let mut parts = [Part::zeroed(); 2];
        for (part, given) in parts.iter_mut().zip(layout.parts()) {
            // A segment is not longer than a row, whose vectors have been counted.
            let segment_vectors = (given.segment_bytes / vector_bytes) as u32;
            *part = Part {
                offset: given.offset_bytes,
                token_stride: given.token_stride_bytes,
                segment_stride: given.segment_stride_bytes,
                segment_vectors: Divider32::new(segment_vectors),
            };
        }
        let first = layout.parts()[0];
        let first_bytes = first.segment_bytes * u64::from(first.segments);
        Self {
            plane_ptrs: paged.chunk_planes_address(),
            report: transfer.report.map_or(0, DeviceReport::address),
            num_blocks: 0,
            block_stride: layout.block_stride_bytes(),
            block_tokens: Divider64::new(u64::from(shape.block_tokens())),
            parts,
            row_vectors_wide: Divider64::new(row_vectors.into()),
            row_vectors: Divider32::new(row_vectors),
            // Only chunks with rows are planned, and they have layers.
            layers: Divider32::new((layers.end - layers.start).max(1)),
            first_part_vectors: (first_bytes / vector_bytes) as u32,
            plane_layers: shape.layers(),
            first_layer: layers.start,
            direction: 0,
            mapping_kind: 0,
            chunks: 0,
            vector_bytes: vector_bytes as u32,
            reserved: 0,
        }
    }

    /// Whether rows are one piece in the pages too.
    pub(crate) fn is_plain(&self) -> bool {
        let first = &self.parts[0];
        first.offset == 0 && first.segment_vectors.divisor == self.row_vectors.divisor
    }

    fn with(self, direction: Direction, mapping_kind: u32, chunks: u32, num_blocks: u64) -> Self {
        Self { direction: direction as u32, mapping_kind, chunks, num_blocks, ..self }
    }
}

impl Chunks {
    /// At most [`CHUNKS_MAX`].
    fn of(chunks: &[Chunk]) -> Self {
        let mut all = Self::zeroed();
        all.0[..chunks.len()].copy_from_slice(chunks);
        all
    }
}

impl Chunk {
    fn new(
        chunk: &RawChunk,
        counted: &CountedRows,
        row_bytes: u64,
        layers: u64,
        items: u64,
    ) -> Self {
        // Addresses wrap, so strides may.
        let layer_stride = chunk.tokens.wrapping_mul(row_bytes);
        Self {
            address: chunk.address,
            mapping: chunk.mapping.address(),
            first_row: counted.first,
            items,
            first_tile: 0,
            kv_stride: layer_stride.wrapping_mul(layers),
            layer_stride,
            token_stride: row_bytes,
            // Rows move, so tokens do; and they are counted in 31 bits.
            moved_wide: Divider64::new(counted.moved),
            moved: Divider32::new(counted.moved as u32),
            skip: chunk.skip_prefix_n_tokens as u32,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels' own arithmetic.
    fn quotient32(divider: Divider32, n: u32) -> u32 {
        let estimate = ((u64::from(n) * u64::from(divider.magic)) >> 32) as u32;
        estimate
            + u32::from(n.wrapping_sub(estimate.wrapping_mul(divider.divisor)) >= divider.divisor)
    }

    fn quotient64(divider: Divider64, n: u64) -> u64 {
        let estimate = ((u128::from(n) * u128::from(divider.magic)) >> 64) as u64;
        estimate
            + u64::from(n.wrapping_sub(estimate.wrapping_mul(divider.divisor)) >= divider.divisor)
    }

    #[test]
    fn magic_numbers_divide_exactly_at_every_edge() {
        let edges = |top: u64| {
            let mut all: Vec<u64> = (1..40).collect();
            for power in 5..64 {
                let power = 1u64 << power;
                all.extend([power - 1, power, power + 1].into_iter().filter(|n| *n <= top));
            }
            all.extend([top - 1, top, top / 3, top / 7, 0x1234_5678 & top, 1_000_000_007 & top]);
            all
        };
        for divisor in edges(u64::from(u32::MAX)) {
            let divider = Divider32::new(divisor as u32);
            for n in edges(u64::from(u32::MAX)) {
                for n in [n, n / divisor * divisor, (n / divisor * divisor).wrapping_sub(1)] {
                    let n = n as u32;
                    assert_eq!(quotient32(divider, n), n / divisor as u32, "{n} / {divisor}");
                }
            }
        }
        for divisor in edges(u64::MAX) {
            let divider = Divider64::new(divisor);
            for n in edges(u64::MAX) {
                for n in [0, n, n / divisor * divisor, (n / divisor * divisor).wrapping_sub(1)] {
                    assert_eq!(quotient64(divider, n), n / divisor, "{n} / {divisor}");
                }
            }
        }
    }
}
