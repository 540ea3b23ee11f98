//! Sums of whole blocks, the same wherever and however a block lies.

use cuda_driver::{DeviceSpan, KernelArgs, LaunchConfig, OutOfBounds, Stream};

use crate::block_units::{Planes, RawBlockSide, RawBlockUnits, RowSide, UnitRun, counted, runs};
use crate::kernels::{GRID_Y_MAX, ROW_THREADS, WARP_THREADS};
use crate::layout::{RowPart, alignment_of};
use crate::operand::{check_array, check_disjoint};
use crate::{
    Blocks, DeviceReport, HostBlocks, KernelError, KernelSource, KvKernels,
    error::{BlocksError, Operand, Side},
    verify::weight,
};

/// What [`KvKernels::sum_blocks`] sums.
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
    pub host_ids: Option<&'a [i32]>,
    /// Blocks that are ready, the first ones; others are refused.
    pub num_blocks: u64,
    /// Where the sums (`u64`) go.
    pub sums: DeviceSpan,
    /// Where to tell of ids that the device had to pass over.
    pub report: Option<&'a DeviceReport>,
}

/// The parameters of one launch of `sum_blocks`, unchecked; see `kernels/block_sum.cu`.
#[derive(Clone, Copy, Debug)]
pub struct RawBlockSums {
    /// The blocks.
    pub from: RawBlockSide,
    /// Where units lie in a block without gaps that begins at 0.
    pub dense: RawBlockSide,
    /// What a block is made of, fewer than 2^31 vectors.
    pub units: RawBlockUnits,
    /// Address of the ids.
    pub ids: u64,
    /// How many.
    pub count: u64,
    /// Address of the sums, to which the launch adds.
    pub sums: u64,
    /// Whether ids out of range are told of.
    pub first: u32,
    /// Address of a report, or 0.
    pub report: u64,
    /// Bytes of a vector: 16, 8, 4, 2 or 1.
    pub vector_bytes: u64,
    /// Blocks of the grid for each id, of at most 256 threads that take 4 vectors each: at most 2^20.
    pub slices: u32,
}

/// The sum of a block in one piece: its bytes in the order `[plane][token][byte of the row]`, padded
/// with zeros to words `w` of 64 bits (little-endian), each times [`weight`]`(w)`, added up with
/// wrapping.
///
/// [`KvKernels::sum_blocks`] gives the same for a block that lies in any layout. The sum finds bytes
/// that are lost, torn or misplaced; it is no defence against anyone who forges them.
#[must_use]
pub fn block_sum(block: &[u8]) -> u64 {
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let shares = (0..).zip(block.chunks(8)).map(|(w, bytes)| word(bytes).wrapping_mul(weight(w)));
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

impl KvKernels {
    /// Writes the sum of each block: `sums[n]` becomes [`block_sum`] of the bytes of block `ids[n]` in
    /// the order `[plane][token][byte of the row]`, and [`BAD_BLOCK`](crate::verify::BAD_BLOCK) where the id
    /// names no ready block, which is then not read.
    ///
    /// The order is that of no layout in particular, so a block that was copied to another layout, to
    /// the host or to another machine has the same sum. Nothing is enqueued without ids.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The sums are cleared and then added to, by several
    /// launches where rows are in two parts or values lie differently from keys: they are there when an event recorded after this call has
    /// completed.
    ///
    /// # Errors
    /// [`BlocksError`]; nothing was enqueued then, except where the device refuses a later launch.
    #[track_caller]
    pub fn sum_blocks(&self, stream: &Stream, sums: BlockSums<'_>) -> Result<(), BlocksError> {
        let _site = cuda_driver::site::enter();
        self.check_stream(stream)?;
        self.check_sums(&sums)?;
        if sums.count == 0 {
            return Ok(());
        }
        let launches = self.block_sums(stream, &sums)?;
        let written = sums.sums.slice(0, sums.count * 8).map_err(|_| too_many(sums.count))?;
        stream.fill(written, 0).map_err(KernelError::from_copy)?;
        for raw in &launches {
            // SAFETY: `check_sums` has found room for each id and each sum, which is device memory;
            // blocks below `num_blocks`, to which the kernel keeps, lie in their memory (invariants of
            // `PagedKv` and `HostBlocks`). Pinned memory is only read, and is not freed before the
            // device has finished (a dropped buffer is only retired).
            unsafe { self.sum_blocks_raw(stream, raw) }?;
        }
        Ok(())
    }

    /// Launches the kernel with these parameters, unchecked.
    ///
    /// # Errors
    /// [`BlocksError::TooMany`] for more vectors than the kernel counts, [`KernelError::Module`] and
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// - every address is of memory that the kernels' device can access, and stays allocated until
    ///   the kernel has completed; all of what the head of `kernels/block_sum.cu` names as read or
    ///   written lies there, and is aligned to `vector_bytes`, which is 16, 8, 4, 2 or 1;
    /// - no host memory is written.
    #[track_caller]
    pub unsafe fn sum_blocks_raw(
        &self,
        stream: &Stream,
        raw: &RawBlockSums,
    ) -> Result<(), BlocksError> {
        let _site = cuda_driver::site::enter();
        let vectors = counted("vectors of a block", Some(raw.units.vectors()?))?;
        let args = KernelArgs::new()
            .arg(raw.from)
            .arg(raw.dense)
            .arg(raw.units.dividers())
            .arg(raw.ids)
            .arg(raw.count)
            .arg(raw.sums)
            .arg(raw.first)
            .arg(raw.report);
        let kernel = self.by_vector(&self.sum_blocks, raw.vector_bytes)?;
        let config = LaunchConfig {
            grid: [raw.slices.max(1), raw.count.clamp(1, GRID_Y_MAX.into()) as u32, 1],
            block: [threads_for(vectors.into()) as u32, 1, 1],
            shared_bytes: 0,
        };
        // SAFETY: the 8 arguments are the parameters of `sum_blocks_*` in `kernels/block_sum.cu`, in
        // order and size (asserted in `block_units.rs`); the rest is the caller's promise.
        Ok(unsafe { kernel.launch(stream, &config, &args) }?)
    }

    fn check_sums(&self, sums: &BlockSums<'_>) -> Result<(), BlocksError> {
        let BlockSums { blocks, ids, count, num_blocks, .. } = *sums;
        self.check_blocks(blocks, num_blocks)?;
        if let Some(report) = sums.report {
            self.check_report(report)?;
        }
        check_array(Operand::BlockIds, ids, count, 4)?;
        check_array(Operand::Checksums, sums.sums, count, 8)?;
        check_disjoint((Operand::Checksums, sums.sums), (Operand::BlockIds, ids))?;
        for extent in blocks.extents() {
            check_disjoint((Operand::Checksums, sums.sums), (blocks.operand(), extent))?;
        }
        let Some(host_ids) = sums.host_ids else { return Ok(()) };
        if host_ids.len() as u64 != count {
            return Err(BlocksError::Count { count, given: host_ids.len() as u64 });
        }
        for (place, &block) in (0..).zip(host_ids) {
            if u64::try_from(block).is_err() || block as u64 >= num_blocks {
                let (side, blocks) = (Side::Source, num_blocks);
                return Err(BlocksError::BlockOutOfRange { place, side, block, blocks });
            }
        }
        Ok(())
    }

    /// One launch for each run of a row.
    fn block_sums(
        &self,
        stream: &Stream,
        sums: &BlockSums<'_>,
    ) -> Result<Vec<RawBlockSums>, BlocksError> {
        let BlockSums { blocks, num_blocks, .. } = *sums;
        let ids = sums.ids.address(stream).map_err(KernelError::from)?;
        let shape = blocks.shape();
        let (row_bytes, plane_bytes) = (shape.row_bytes(), shape.block_plane_bytes());
        let row = [RowPart {
            segment_bytes: row_bytes,
            segments: 1,
            segment_stride_bytes: row_bytes,
            token_stride_bytes: row_bytes,
            offset_bytes: 0,
        }];
        let side = |parts| RowSide { parts, first: 0, element_bytes: 1 };
        let launch = |planes: Planes, run: UnitRun| {
            let first = planes.are_first() && run.first == 0;
            let run = run.merged();
            let plane_bits = if shape.planes() > 1 { plane_bytes } else { 0 };
            let bits = run.source_bits()
                | run.destination_bits()
                | run.unit
                | plane_bits
                | blocks.alignment_bits();
            let vector_bytes = alignment_of(bits);
            let units = RawBlockUnits {
                planes: planes.count(shape),
                tokens: run.tokens,
                segments: run.segments,
                unit_vectors: run.unit / vector_bytes,
            };
            let items = u64::from(counted("vectors of a block", Some(units.vectors()?))?);
            // The kernel numbers vectors and words of the whole block in 32 bits.
            let numbers = shape.block_bytes() / vector_bytes.min(8);
            if u32::try_from(numbers).is_err() {
                return Err(BlocksError::TooMany { what: "words of a block", count: numbers });
            }
            let dense = RawBlockSide {
                base: planes.kv() * plane_bytes + run.to.offset,
                plane_stride: planes.step(shape) * plane_bytes,
                token_stride: run.to.token,
                segment_stride: run.to.segment,
                ..RawBlockSide::default()
            };
            // Some waves of slices, so that the last is short, and none with less than a round of loads.
            let threads = threads_for(items);
            let resident = self.multiprocessors * THREADS_OF_MULTIPROCESSOR / threads;
            let slices = (resident * WAVES).div_ceil(sums.count);
            let most = items.div_ceil(threads * UNROLL);
            Ok(RawBlockSums {
                from: RawBlockSide::of((blocks, planes), &run.from, num_blocks),
                dense,
                units,
                ids,
                count: sums.count,
                sums: sums.sums.address(),
                first: first.into(),
                report: sums.report.map_or(0, DeviceReport::address),
                vector_bytes,
                slices: slices.clamp(1, most.max(1)) as u32,
            })
        };
        let rows = (u64::from(shape.block_tokens()), row_bytes);
        let mut launches = Vec::new();
        for &planes in Planes::of(&[blocks]) {
            for run in runs(side(planes.parts(blocks)), side(&row), rows, u64::MAX) {
                launches.push(launch(planes, run)?);
            }
        }
        Ok(launches)
    }
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

fn too_many(count: u64) -> BlocksError {
    BlocksError::TooMany { what: "sums", count }
}
