//! What the narrow transfers take, and when they serve.

use bytemuck::{Pod, Zeroable};
use cuda_driver::{KernelArgs, LaunchConfig};
use smallvec::SmallVec;

use crate::kernels::GRID_Y_MAX;
use crate::launch::{CHUNKS_MAX, Chunk, Divider32, Divider64, LaunchLimits, Pages, Part};

/// Threads of a block of the narrow transfer where nothing else is asked for.
const THREADS: u32 = 128;
/// Most threads of a block of the narrow transfer: `KV_NARROW_THREADS` of `kernels/kv.cuh`.
const THREADS_MAX: u32 = 256;
/// Threads of a block of the narrow walk where nothing else is asked for: the most there can be, because
/// few multiprocessors need many loads in flight.
const WALK_THREADS: u32 = 1024;
/// Vectors that a thread of the narrow walk has in flight: `KV_WALK_UNROLL` of `kernels/kv.cuh`.
const WALK_UNROLL: u64 = 4;
/// Numbers below it are narrow.
const NARROW: u64 = 1 << 31;

/// Which of the kernels a launch takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NarrowKernel {
    /// One chunk, a block of threads for each tile, on all of the device.
    One,
    /// The same for several chunks.
    Several,
    /// Blocks of threads that walk, as few as are asked for.
    Walk,
}

/// A divisor with its magic number, for numbers below 2^31: `Divider31` of `kernels/kv.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Divider31 {
    pub(crate) divisor: u32,
    pub(crate) magic: u32,
    pub(crate) shift: u32,
}

impl Divider31 {
    /// `divisor` is 1 to 2^31.
    pub(crate) fn new(divisor: u32) -> Self {
        let power = u64::from(divisor).next_power_of_two();
        // At most 2^32 times (1 - 1 / divisor), plus 1.
        let magic = ((power - u64::from(divisor)) << 32) / u64::from(divisor) + 1;
        Self { divisor, magic: magic as u32, shift: power.trailing_zeros() }
    }
}

/// `NarrowPages` of `kernels/narrow.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct NarrowPages {
    plane_ptrs: u64,
    report: u64,
    row_vectors: Divider31,
    segment_vectors: Divider31,
    block_tokens: Divider31,
    layers: Divider31,
    places: u32,
    block_stride: u32,
    token_stride: u32,
    segment_stride: u32,
    layers_left_out: u32,
    direction: u32,
    mapping_kind: u32,
    pub(crate) chunks: u32,
    vector_bytes: u32,
    reserved: u32,
}

/// `NarrowChunk` of `kernels/narrow.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct NarrowChunk {
    address: u64,
    mapping: u64,
    moved: Divider31,
    skip: u32,
    skip_bytes: u32,
    first_row: u32,
    items: u32,
    reserved: u32,
}

/// `NarrowChunks` of `kernels/narrow.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct NarrowChunks(pub(crate) [NarrowChunk; CHUNKS_MAX]);

const _: () = assert!(size_of::<NarrowPages>() == 104 && size_of::<NarrowChunk>() == 48);

/// A launch of one of the narrow kernels.
#[derive(Debug)]
pub(crate) struct Narrow {
    pub(crate) kernel: NarrowKernel,
    pub(crate) args: KernelArgs,
    pub(crate) config: LaunchConfig,
}

/// `number` if it is below 2^31.
fn narrow(number: u64) -> Option<u32> {
    (number < NARROW).then_some(number as u32)
}

impl Narrow {
    /// The same launch as of these chunks, if its numbers allow: rows of one part, and nothing that 31
    /// bits do not count. There is at least one chunk, and each has rows to move.
    pub(crate) fn of(pages: &Pages, chunks: &[Chunk], limits: LaunchLimits) -> Option<Self> {
        let row_vectors = pages.row_vectors.divisor;
        let row_bytes = u64::from(row_vectors) * u64::from(pages.vector_bytes);
        let mut narrow_pages = NarrowPages::of(pages)?;
        narrow_pages.chunks = chunks.len() as u32;
        let mut narrow_chunks = SmallVec::<[NarrowChunk; 1]>::new();
        let mut items = 0;
        let mut one_kv = true;
        for chunk in chunks {
            let narrow = NarrowChunk::of(chunk, row_vectors, row_bytes)?;
            items = items.max(narrow.items);
            narrow_chunks.push(narrow);
            let end = chunk.first_row + chunk.items / u64::from(row_vectors);
            one_kv &= end <= u64::from(chunk.moved.divisor) * u64::from(pages.layers.divisor);
        }
        if one_kv {
            narrow_pages.layers_left_out = 0;
        }
        let (kernel, config) = geometry(&narrow_pages, items.into(), limits)?;
        let args = KernelArgs::new().arg(narrow_pages);
        let args = match (kernel, &narrow_chunks[..]) {
            (NarrowKernel::One, [one]) => args.arg(*one),
            (_, several) => args.arg(NarrowChunks::of(several)),
        };
        Some(Self { kernel, args, config })
    }
}

impl NarrowChunks {
    /// At most [`CHUNKS_MAX`].
    fn of(chunks: &[NarrowChunk]) -> Self {
        let mut all = Self::zeroed();
        all.0[..chunks.len()].copy_from_slice(chunks);
        all
    }
}

/// The kernel and its launch, for chunks of at most `items` items, which are narrow: the numbers of all
/// threads of a grid fit in 32 bits then, those of the last block's too.
fn geometry(
    pages: &NarrowPages,
    items: u64,
    limits: LaunchLimits,
) -> Option<(NarrowKernel, LaunchConfig)> {
    let threads = if limits.threads == 0 { THREADS } else { limits.threads };
    let blocks = items.div_ceil(threads.into());
    let most = if limits.blocks == 0 { u64::MAX } else { limits.blocks.into() };
    let chunks = pages.chunks;
    if threads <= THREADS_MAX
        && chunks <= GRID_Y_MAX
        && blocks.saturating_mul(chunks.into()) <= most
    {
        let grid = [blocks as u32, chunks, 1];
        let config = LaunchConfig { grid, block: [threads, 1, 1], shared_bytes: 0 };
        let kernel = if chunks == 1 { NarrowKernel::One } else { NarrowKernel::Several };
        return Some((kernel, config));
    }
    if pages.mapping_kind != 0 || pages.layers_left_out != 0 {
        return None;
    }
    let threads = if limits.threads == 0 { WALK_THREADS } else { limits.threads };
    let tile = u64::from(threads) * WALK_UNROLL;
    let blocks = items.div_ceil(tile).min(most);
    narrow(blocks.checked_mul(tile)?)?;
    Some((NarrowKernel::Walk, LaunchConfig::linear(blocks as u32, threads)))
}

impl NarrowPages {
    fn of(pages: &Pages) -> Option<Self> {
        let part = &pages.parts[0];
        let whole = pages.first_part_vectors == pages.row_vectors.divisor;
        if !whole || part.offset != 0 {
            return None;
        }
        let divider = |divisor: u64| narrow(divisor).map(Divider31::new);
        let stride = |bytes: u64| u32::try_from(bytes).ok();
        let slots = pages.num_blocks.checked_mul(pages.block_tokens.divisor)?;
        let layers = pages.layers.divisor;
        Some(Self {
            plane_ptrs: pages.plane_ptrs + u64::from(pages.first_layer) * size_of::<u64>() as u64,
            report: pages.report,
            row_vectors: divider(pages.row_vectors.divisor.into())?,
            segment_vectors: divider(part.segment_vectors.divisor.into())?,
            block_tokens: divider(pages.block_tokens.divisor)?,
            layers: divider(layers.into())?,
            // Where the slots are narrow, the blocks are.
            places: narrow(slots).map(|slots| match pages.mapping_kind {
                0 => slots,
                _ => pages.num_blocks as u32,
            })?,
            block_stride: stride(pages.block_stride)?,
            token_stride: stride(part.token_stride)?,
            segment_stride: stride(part.segment_stride)?,
            // The layers of a chunk lie in the paged memory.
            layers_left_out: pages.plane_layers - layers,
            direction: pages.direction,
            mapping_kind: pages.mapping_kind,
            chunks: 0,
            vector_bytes: pages.vector_bytes,
            reserved: 0,
        })
    }

    /// The same as what the general kernels take, for the CPU reference.
    pub(crate) fn general(&self) -> Pages {
        let row_vectors = Divider32::new(self.row_vectors.divisor.max(1));
        let block_tokens = u64::from(self.block_tokens.divisor);
        let part = Part {
            offset: 0,
            token_stride: self.token_stride.into(),
            segment_stride: self.segment_stride.into(),
            segment_vectors: Divider32::new(self.segment_vectors.divisor.max(1)),
        };
        let num_blocks = match self.mapping_kind {
            0 => u64::from(self.places) / block_tokens.max(1),
            _ => self.places.into(),
        };
        Pages {
            plane_ptrs: self.plane_ptrs,
            report: self.report,
            num_blocks,
            block_stride: self.block_stride.into(),
            block_tokens: Divider64 { divisor: block_tokens, ..Zeroable::zeroed() },
            parts: [part, Part::zeroed()],
            row_vectors,
            layers: Divider32::new(self.layers.divisor.max(1)),
            first_part_vectors: row_vectors.divisor,
            plane_layers: self.layers.divisor + self.layers_left_out,
            direction: self.direction,
            mapping_kind: self.mapping_kind,
            chunks: self.chunks,
            vector_bytes: self.vector_bytes,
            ..Pages::zeroed()
        }
    }
}

impl NarrowChunk {
    fn of(chunk: &Chunk, row_vectors: u32, row_bytes: u64) -> Option<Self> {
        let first_row = narrow(chunk.first_row)?;
        // The row after the last must not wrap either, nor that with the skip.
        narrow(chunk.first_row + chunk.items / u64::from(row_vectors) + u64::from(chunk.skip))?;
        let skip_bytes = u64::from(chunk.skip).checked_mul(row_bytes)?;
        let skipped = (chunk.first_row + u64::from(chunk.skip)).wrapping_mul(row_bytes);
        Some(Self {
            address: chunk.address.wrapping_add(skipped),
            mapping: chunk.mapping,
            moved: Divider31::new(narrow(chunk.moved.divisor.into())?),
            skip: chunk.skip,
            skip_bytes: u32::try_from(skip_bytes).ok()?,
            first_row,
            items: narrow(chunk.items)?,
            reserved: 0,
        })
    }

    /// The same as what the general kernels take, for the CPU reference.
    pub(crate) fn general(&self, pages: &Pages) -> Chunk {
        let row_bytes = u64::from(pages.row_vectors.divisor) * u64::from(pages.vector_bytes);
        let skipped = (u64::from(self.first_row) + u64::from(self.skip)).wrapping_mul(row_bytes);
        let tokens = u64::from(self.moved.divisor) + u64::from(self.skip);
        let layer_stride = tokens.wrapping_mul(row_bytes);
        Chunk {
            address: self.address.wrapping_sub(skipped),
            mapping: self.mapping,
            first_row: self.first_row.into(),
            items: self.items.into(),
            kv_stride: layer_stride.wrapping_mul(pages.layers.divisor.into()),
            layer_stride,
            token_stride: row_bytes,
            moved: Divider32::new(self.moved.divisor.max(1)),
            skip: self.skip,
            ..Chunk::zeroed()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels' own arithmetic, which must not wrap.
    fn quotient(divider: Divider31, n: u32) -> u32 {
        let product = ((u64::from(n) * u64::from(divider.magic)) >> 32) as u32;
        product.checked_add(n).unwrap() >> divider.shift
    }

    #[test]
    fn magic_numbers_divide_exactly_at_every_edge() {
        let top = NARROW - 1;
        let mut edges: Vec<u64> = (1..70).collect();
        for power in 6..31 {
            edges.extend([(1 << power) - 1, 1 << power, (1 << power) + 1]);
        }
        edges.extend([top - 1, top, top / 3, top / 7, 0x1234_5678, 1_000_000_007]);
        for &divisor in &edges {
            let divider = Divider31::new(divisor as u32);
            for &n in &edges {
                let whole = n / divisor * divisor;
                for n in [0, n, whole, whole.saturating_sub(1), top, top / divisor * divisor] {
                    assert_eq!(
                        u64::from(quotient(divider, n as u32)),
                        n / divisor,
                        "{n} / {divisor}"
                    );
                }
            }
        }
    }
}
