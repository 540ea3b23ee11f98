//! What the transfer kernels take, which of them serves, and how transfers that are too large are cut.

use bytemuck::{Pod, Zeroable};
use cuda_driver::{KernelArgs, LaunchConfig};
use smallvec::SmallVec;

use crate::block_units::Planes;
use crate::divider::{Divider31, Divider64};
use crate::launch::{CHUNKS_MAX, RawTransfer};
use crate::launcher::GRID_Y_MAX;
use crate::layout::RowPart;
use crate::{DeviceReport, Direction, KernelError, chunks::LaunchLimits};

/// Threads of a block of the transfer where nothing else is asked for, and of one that is `SHORT`.
const THREADS: u32 = 128;
const SHORT_THREADS: u32 = 256;
/// Fewer bytes than this stay in the second cache on both sides, and of so many as `LONG` hardly any do. Loads are
/// streamed from `SHORT` on, and those from a chunk up to `LONG`. Measured on an H200, whose second cache
/// has 60 MB (`kernels/README.md`).
const SHORT: u64 = 24 << 20;
const LONG: u64 = 96 << 20;
/// Most threads of a block of the transfer: `KV_TRANSFER_THREADS` of `kernels/kv.cuh`.
const THREADS_MAX: u32 = 256;
/// Threads of a block of the walk where nothing else is asked for: the most there can be, because few
/// multiprocessors need many loads in flight.
const WALK_THREADS: u32 = 1024;
/// Vectors that a thread of the walk has in flight: `KV_WALK_UNROLL` of `kernels/kv.cuh`; and those of wide
/// rows, which also walk on all of the device, in blocks of these threads.
const WALK_UNROLL: u64 = 4;
const WIDE_UNROLL: u64 = 2;
const WIDE_THREADS: u32 = 128;
/// Rows with their skip, slots and vectors of a launch are fewer.
const COUNTED: u64 = 1 << 31;
/// Most vectors that a cut launch moves of a chunk: those of a grid's last tiles are counted too.
const CUT_VECTORS: u64 = COUNTED - (WALK_THREADS as u64 * WALK_UNROLL);

/// Which of the kernels a launch takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum TransferKernel {
    /// One chunk, a block of threads for each tile, on all of the device.
    One,
    /// The same for several chunks.
    Several,
    /// Blocks of threads that walk, as few as are asked for, and rows of every kind.
    Walk,
}

/// `TransferPages` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct TransferPages {
    pub(crate) plane_ptrs: u64,
    pub(crate) report: u64,
    pub(crate) row_vectors: Divider31,
    pub(crate) segment_vectors: Divider31,
    pub(crate) block_tokens: Divider31,
    pub(crate) layers: Divider31,
    pub(crate) places: u32,
    pub(crate) block_stride: u32,
    pub(crate) token_stride: u32,
    pub(crate) segment_stride: u32,
    pub(crate) layers_left_out: u32,
    pub(crate) direction: u32,
    pub(crate) mapping_kind: u32,
    pub(crate) chunks: u32,
    pub(crate) vector_bytes: u32,
    /// Whether loads are streamed.
    pub(crate) streams: u32,
}

/// `WidePart` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WidePart {
    pub(crate) offset: u64,
    pub(crate) token_stride: u64,
    pub(crate) segment_stride: u64,
    pub(crate) segment_vectors: Divider31,
    pub(crate) reserved: u32,
}

/// `WideRows` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WideRows {
    pub(crate) block_stride: u64,
    pub(crate) places: u64,
    pub(crate) block_tokens: Divider64,
    pub(crate) parts: [WidePart; 2],
    pub(crate) first_vectors: u32,
    pub(crate) reserved: u32,
}

/// `TransferChunk` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct TransferChunk {
    pub(crate) address: u64,
    pub(crate) mapping: u64,
    pub(crate) moved: Divider31,
    pub(crate) skip: u32,
    pub(crate) skip_bytes: u32,
    pub(crate) first_row: u32,
    pub(crate) items: u32,
    pub(crate) reserved: u32,
}

/// `TransferChunks` of `kernels/transfer.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct TransferChunks(pub(crate) [TransferChunk; CHUNKS_MAX]);

const _: () = assert!(size_of::<TransferPages>() == 104 && size_of::<TransferChunk>() == 48);
const _: () = assert!(size_of::<WideRows>() == 120);
// The parameters of a kernel have 4 KiB on every device.
const _: () = assert!(size_of::<TransferChunks>() + 104 + 120 <= 4096);

/// One launch.
#[derive(Debug)]
pub(crate) struct TransferLaunch {
    pub(crate) kernel: TransferKernel,
    pub(crate) args: KernelArgs,
    pub(crate) config: LaunchConfig,
}

/// The rows of a chunk that move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct MovedRows {
    /// Address of row 0, moved or not.
    pub(crate) address: u64,
    pub(crate) mapping: u64,
    /// The first, of all that would move in the whole chunk, and how many; at least one.
    pub(crate) first: u64,
    pub(crate) rows: u64,
    /// Tokens that move in each plane, and those that are skipped before them; fewer than 2^31 together.
    pub(crate) moved: u64,
    pub(crate) skip: u64,
}

/// What all chunks of a transfer have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferRows<'a> {
    pub(crate) transfer: &'a RawTransfer<'a>,
    /// Of these planes all rows have the same parts.
    pub(crate) planes: Planes,
    /// Of a vector, which divides everything in the layout. A row has fewer than 2^31.
    pub(crate) vector_bytes: u64,
    pub(crate) mapping_kind: u32,
}

/// `number` if it is below 2^31.
fn counted(number: u64) -> Option<u32> {
    (number < COUNTED).then_some(number as u32)
}

impl TransferRows<'_> {
    /// One launch for all chunks; none where numbers are too large for it. There is at least one chunk.
    pub(crate) fn together(&self, chunks: &[MovedRows]) -> Option<TransferLaunch> {
        let mut taken = SmallVec::<[TransferChunk; 1]>::new();
        let plane_rows = |chunk: &MovedRows| chunk.moved * self.transfer.layers.len() as u64;
        let one_kv = chunks.iter().all(|chunk| chunk.first + chunk.rows <= plane_rows(chunk));
        for chunk in chunks {
            taken.push(self.chunk(chunk)?);
        }
        self.launch(&taken, 0, one_kv)
    }

    /// Launches for a chunk that is too large for one: each moves rows of one plane.
    pub(crate) fn apart(
        &self,
        chunk: MovedRows,
    ) -> impl Iterator<Item = Result<TransferLaunch, KernelError>> {
        let row_bytes = self.transfer.paged.shape().row_bytes();
        let planes = self.transfer.layers.len() as u64;
        cuts(chunk, row_bytes, CUT_VECTORS / self.row_vectors()).map(move |(plane, rows)| {
            // Rows of one plane are fewer than 2^31 with their skip, and so are their vectors.
            let launch = self.chunk(&rows).and_then(|rows| self.launch(&[rows], plane, true));
            launch.ok_or(KernelError::Planes { planes })
        })
    }

    /// What the rows in the pages are made of.
    fn parts(&self) -> &[RowPart] {
        self.planes.parts(self.transfer.paged.into())
    }

    fn row_vectors(&self) -> u64 {
        self.transfer.paged.shape().row_bytes() / self.vector_bytes
    }

    fn chunk(&self, chunk: &MovedRows) -> Option<TransferChunk> {
        let row_bytes = self.transfer.paged.shape().row_bytes();
        let MovedRows { first, rows, moved, skip, .. } = *chunk;
        // The row after the last must not wrap either, nor that with the skip.
        counted(first.checked_add(rows)?.checked_add(skip)?)?;
        // Of rows in the first plane it does not count.
        let skip_bytes = if first + rows <= moved { Some(0) } else { skip.checked_mul(row_bytes) };
        let skipped = (first + skip).wrapping_mul(row_bytes);
        Some(TransferChunk {
            address: chunk.address.wrapping_add(skipped),
            mapping: chunk.mapping,
            moved: Divider31::new(counted(moved)?),
            skip: counted(skip)?,
            skip_bytes: u32::try_from(skip_bytes?).ok()?,
            first_row: counted(first)?,
            items: counted(rows.checked_mul(self.row_vectors())?)?,
            reserved: 0,
        })
    }

    /// A launch for chunks whose first plane is `plane` of those of the transfer.
    fn launch(&self, chunks: &[TransferChunk], plane: u64, one_kv: bool) -> Option<TransferLaunch> {
        let pages = self.pages(chunks.len() as u32, plane, one_kv)?;
        let bytes: u64 =
            chunks.iter().map(|chunk| u64::from(chunk.items) * self.vector_bytes).sum();
        let most = if self.transfer.direction == Direction::ChunkToPaged { LONG } else { u64::MAX };
        let streams = (SHORT..most).contains(&bytes).into();
        let narrow = self.narrow(&pages).map(|pages| TransferPages { streams, ..pages });
        let items = chunks.iter().map(|chunk| u64::from(chunk.items)).max()?;
        let threads = if bytes < SHORT { SHORT_THREADS } else { THREADS };
        let of_chunk = (chunks.len() as u32, items);
        let (kernel, config) = geometry(narrow.as_ref(), of_chunk, threads, self.transfer.limits)?;
        let args = KernelArgs::new();
        let args = match (kernel, chunks) {
            (TransferKernel::One, [one]) => args.arg(narrow?).arg(*one),
            (TransferKernel::Walk, several) => {
                let walked = narrow.filter(TransferPages::can_walk);
                let wide = if walked.is_some() { WideRows::zeroed() } else { self.wide() };
                args.arg(walked.unwrap_or(pages)).arg(wide).arg(TransferChunks::of(several))
            }
            (_, several) => args.arg(narrow?).arg(TransferChunks::of(several)),
        };
        Some(TransferLaunch { kernel, args, config })
    }

    /// What wide rows and others have in common.
    fn pages(&self, chunks: u32, plane: u64, one_kv: bool) -> Option<TransferPages> {
        let RawTransfer { paged, layers, direction, report, .. } = self.transfer;
        let shape = paged.shape();
        // Only chunks with rows are moved, and they have layers.
        let of_chunk = layers.len().max(1) as u64;
        let left_out = u64::from(shape.layers()) - of_chunk;
        let first = u64::from(layers.start) + plane + plane / of_chunk * left_out;
        let segment_vectors = self.parts()[0].segment_bytes / self.vector_bytes;
        Some(TransferPages {
            plane_ptrs: paged.chunk_planes_address() + first * size_of::<u64>() as u64,
            report: report.map_or(0, DeviceReport::address),
            row_vectors: Divider31::new(counted(self.row_vectors())?),
            segment_vectors: Divider31::new(counted(segment_vectors)?),
            // Of mappings by blocks, whose tokens are fewer.
            block_tokens: Divider31::new(shape.block_tokens().min(COUNTED as u32)),
            layers: Divider31::new(counted(of_chunk)?),
            places: 0,
            block_stride: 0,
            token_stride: 0,
            segment_stride: 0,
            layers_left_out: if one_kv { 0 } else { left_out as u32 },
            direction: *direction as u32,
            mapping_kind: self.mapping_kind,
            chunks,
            vector_bytes: self.vector_bytes as u32,
            streams: 0,
        })
    }

    /// The pages for rows whose numbers 32 bits count; none for others, and for rows of two parts.
    fn narrow(&self, pages: &TransferPages) -> Option<TransferPages> {
        let RawTransfer { paged, num_blocks, .. } = self.transfer;
        let (shape, layout) = (paged.shape(), paged.layout());
        let [part] = self.parts() else { return None };
        if part.offset_bytes != 0 {
            return None;
        }
        let stride = |bytes: u64| u32::try_from(bytes).ok();
        let slots = counted(num_blocks.checked_mul(shape.block_tokens().into())?)?;
        counted(shape.block_tokens().into())?;
        Some(TransferPages {
            // Where the slots are counted, the blocks are.
            places: if self.mapping_kind == 0 { slots } else { *num_blocks as u32 },
            block_stride: stride(layout.block_stride_bytes())?,
            token_stride: stride(part.token_stride_bytes)?,
            segment_stride: stride(part.segment_stride_bytes)?,
            ..*pages
        })
    }

    fn wide(&self) -> WideRows {
        let RawTransfer { paged, num_blocks, .. } = self.transfer;
        let block_tokens = u64::from(paged.shape().block_tokens());
        let slots = num_blocks.saturating_mul(block_tokens);
        let layout = paged.layout();
        let mut parts = [WidePart::zeroed(); 2];
        for (part, given) in parts.iter_mut().zip(self.parts()) {
            // A segment is not longer than a row, whose vectors have been counted.
            let segment_vectors = (given.segment_bytes / self.vector_bytes) as u32;
            *part = WidePart {
                offset: given.offset_bytes,
                token_stride: given.token_stride_bytes,
                segment_stride: given.segment_stride_bytes,
                segment_vectors: Divider31::new(segment_vectors),
                reserved: 0,
            };
        }
        let first = self.parts()[0];
        let first_bytes = first.segment_bytes * u64::from(first.segments);
        WideRows {
            block_stride: layout.block_stride_bytes(),
            places: if self.mapping_kind == 0 { slots } else { *num_blocks },
            block_tokens: Divider64::new(block_tokens),
            parts,
            first_vectors: (first_bytes / self.vector_bytes) as u32,
            reserved: 0,
        }
    }
}

/// A chunk cut into rows of one plane each, at most `most` at once: the plane, and the rows as those of a
/// chunk that begins with it.
fn cuts(chunk: MovedRows, row_bytes: u64, most: u64) -> impl Iterator<Item = (u64, MovedRows)> {
    let end = chunk.first + chunk.rows;
    let mut next = chunk.first;
    std::iter::from_fn(move || {
        let plane = next / chunk.moved;
        let first = next % chunk.moved;
        let rows = (end - next).min(chunk.moved - first).min(most);
        next += rows;
        // Addresses wrap, so what lies before the plane may.
        let before = plane.wrapping_mul(chunk.moved + chunk.skip).wrapping_mul(row_bytes);
        let address = chunk.address.wrapping_add(before);
        (rows > 0).then_some((plane, MovedRows { address, first, rows, ..chunk }))
    })
}

impl TransferChunks {
    /// At most [`CHUNKS_MAX`].
    fn of(chunks: &[TransferChunk]) -> Self {
        let mut all = Self::zeroed();
        all.0[..chunks.len()].copy_from_slice(chunks);
        all
    }
}

impl TransferPages {
    /// Whether the walk takes these pages as rows that are not wide.
    fn can_walk(&self) -> bool {
        self.mapping_kind == 0 && self.layers_left_out == 0
    }
}

/// The kernel and its launch, for so many chunks of at most so many items, in blocks of `threads` threads where
/// nothing else is asked for: the numbers of all threads of a grid fit in 32 bits, those of the last
/// block's too.
fn geometry(
    narrow: Option<&TransferPages>,
    (chunks, items): (u32, u64),
    threads: u32,
    limits: LaunchLimits,
) -> Option<(TransferKernel, LaunchConfig)> {
    let threads = if limits.threads == 0 { threads } else { limits.threads };
    let blocks = items.div_ceil(threads.into());
    let most = if limits.blocks == 0 { u64::MAX } else { limits.blocks.into() };
    if narrow.is_some()
        && threads <= THREADS_MAX
        && chunks <= GRID_Y_MAX
        && blocks.saturating_mul(chunks.into()) <= most
    {
        let grid = [blocks as u32, chunks, 1];
        let config = LaunchConfig { grid, block: [threads, 1, 1], shared_bytes: 0 };
        let kernel = if chunks == 1 { TransferKernel::One } else { TransferKernel::Several };
        return Some((kernel, config));
    }
    let wide = narrow.is_none_or(|pages| !pages.can_walk());
    let threads = match limits {
        LaunchLimits { threads: 0, blocks: 0 } if wide => WIDE_THREADS,
        LaunchLimits { threads: 0, .. } => WALK_THREADS,
        LaunchLimits { threads, .. } => threads,
    };
    let unroll = if wide { WIDE_UNROLL } else { WALK_UNROLL };
    let tile = u64::from(threads) * unroll;
    let blocks = items.div_ceil(tile).min(most);
    counted(blocks.checked_mul(tile)?)?;
    Some((TransferKernel::Walk, LaunchConfig::linear(blocks as u32, threads)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row once, in its plane, at its address.
    #[test]
    fn cuts_cover_every_row_once() {
        for (first, rows, most) in [(0, 40, 3), (7, 33, 8), (39, 1, 5), (9, 2, 100), (12, 17, 8)] {
            let chunk = MovedRows { address: 1000, mapping: 5, first, rows, moved: 8, skip: 2 };
            let mut next = first;
            for (plane, cut) in cuts(chunk, 16, most) {
                assert_eq!((plane * 8 + cut.first, cut.mapping), (next, 5));
                assert!(cut.rows > 0 && cut.rows <= most && cut.first + cut.rows <= 8, "{cut:?}");
                assert_eq!(cut.address, 1000 + plane * 10 * 16);
                assert_eq!((cut.moved, cut.skip), (8, 2));
                next += cut.rows;
            }
            assert_eq!(next, first + rows);
        }
    }
}
