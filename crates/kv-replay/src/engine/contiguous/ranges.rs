//! The device side: the ranges, their view as blocks for the kernels, and the work of an iteration.

use std::ops::Range;

use cuda_driver::{
    DeviceBuffer, DeviceError, DeviceSpan, Event, Fence, HostAllocFlags, PinnedBuffer, Stream,
    guard,
};
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::{Worker, WorkerOptions};
use kv_kernels::layout::Strides;
use kv_kernels::verify::ChecksumArgs;
use kv_kernels::{KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout};
use kv_pool::Slot;
use kv_stage::error::StagingError;
use kv_stage::{StagingOptions, StagingPool};

use super::RunError;
use crate::config::RunConfig;
use crate::device::OpenDevices;
use crate::engine::OVERLAP_DEPTH;
use crate::engine::work::store;
use crate::report::RangesReport;
use crate::shape::KV_COUNT;
use crate::trace::Trace;

/// Number of iterations whose buffers are in use: those in flight, and the one being prepared.
const RING: usize = OVERLAP_DEPTH as usize + 1;

/// The ranges of a run on one device, with all buffers that its iterations use.
#[derive(Debug)]
pub struct Ranges {
    space: SequenceSpace,
    worker: Worker,
    size: Size,
    kernels: KvKernels,
    /// The ranges as blocks: block `b` of seat `s` is block `s * size.seat_blocks + b`.
    view: PagedKv,
    /// Tokens are written here.
    writes: Stream,
    /// And read here, after the writes of the same iteration.
    reads: Stream,
    staging: StagingPool,
    /// The tokens of an iteration, as a model's forward pass would leave them.
    chunk: DeviceBuffer,
    /// The blocks of every seat, in order: written once.
    table: DeviceBuffer,
    /// The keys, slots and lengths of an iteration.
    arrays: Vec<DeviceBuffer>,
    /// A checksum for each entry of the table.
    checksums: DeviceBuffer,
    arrivals: Vec<PinnedBuffer>,
    /// Recorded after the writes of the last iteration.
    written: Event,
    /// Recorded after all work of the last iteration.
    last: Fence,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Number of ranges of addresses for each plane: the maximum number of requests at once.
    pub(super) seats: u64,
    /// Number of blocks in a plane of a seat.
    seat_blocks: u64,
    /// Number of blocks of the longest request: entries in a row of the table.
    pub(super) width: u64,
    pub(super) block_tokens: u64,
    pub(super) token_bytes: u64,
    row_bytes: u64,
    page_bytes: u64,
    planes: u64,
    /// Number of tokens behind the present ones for which memory is mapped ahead of need.
    look_ahead: u64,
    /// Pages of a plane that fit into the limit of memory, in all planes.
    pub(super) rows_max: u64,
}

/// The tokens that an iteration writes, and the length of every seat that it reads.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) slots: Vec<Slot>,
    pub(super) keys: Vec<u64>,
    /// Number of tokens of each seat; 0 for one that is not read.
    pub(super) lengths: Vec<u32>,
}

impl Size {
    /// Pages of each plane that `tokens` tokens take, with those ahead of need.
    pub(super) fn rows_for(&self, tokens: u64) -> u64 {
        let tokens = tokens.saturating_add(self.look_ahead);
        tokens.saturating_mul(self.row_bytes).div_ceil(self.page_bytes)
    }

    pub(super) fn slots(&self, seat: u64, tokens: Range<u64>) -> impl Iterator<Item = Slot> {
        // All are slots: `new` has seen that there are fewer blocks than 2^31, of at most 512 tokens.
        let first = seat * self.seat_blocks * self.block_tokens;
        tokens.filter_map(move |token| Slot::new((first + token) as i64))
    }

    /// The block of the view that holds block `block` of a seat.
    pub(super) fn block_of(&self, seat: u64, block: u64) -> u64 {
        seat * self.seat_blocks + block
    }

    fn new(config: &RunConfig, trace: &Trace, page_bytes: u64) -> Result<Self, RunError> {
        let row_bytes = config.shape.row_bytes().unwrap_or(0).max(1);
        let planes = u64::from(config.shape.layers) * KV_COUNT;
        let block_tokens = u64::from(config.block_tokens);
        let limit_bytes = config.device_blocks.saturating_mul(config.block_bytes().unwrap_or(0));
        let rows_max = limit_bytes / page_bytes / planes;
        let mut longest = 1;
        for (request, entry) in trace.requests.iter().enumerate() {
            let tokens = entry.input_length.saturating_add(entry.output_length);
            longest = longest.max(tokens);
            let rows = tokens.saturating_mul(row_bytes).div_ceil(page_bytes);
            if rows > rows_max {
                return Err(RunError::RangeTooLarge {
                    request,
                    tokens,
                    pages: rows.saturating_mul(planes),
                    page_bytes,
                    limit_pages: rows_max * planes,
                });
            }
        }
        // Every range ends with a page and with a block, so that blocks count on from seat to seat.
        let block_bytes = block_tokens * row_bytes;
        let unit_tokens = page_bytes / gcd(page_bytes, block_bytes) * block_tokens;
        let tokens_max = longest.div_ceil(unit_tokens).saturating_mul(unit_tokens);
        let seat_blocks = tokens_max / block_tokens;
        let seats = u64::from(config.max_batch);
        let blocks = seat_blocks.saturating_mul(seats);
        if blocks > i32::MAX as u64 {
            let &RunConfig { max_batch, block_tokens, .. } = config;
            return Err(RunError::TooManyRangeBlocks {
                max_batch,
                tokens_max,
                block_tokens,
                blocks,
            });
        }
        Ok(Self {
            seats,
            seat_blocks,
            width: longest.div_ceil(block_tokens),
            block_tokens,
            token_bytes: row_bytes * planes,
            row_bytes,
            page_bytes,
            planes,
            look_ahead: block_tokens,
            rows_max,
        })
    }

    /// Number of entries of the table, which has a checksum for each.
    pub(super) fn entries(&self) -> u64 {
        self.seats * self.width
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Ranges {
    pub(super) fn new(
        config: &RunConfig,
        trace: &Trace,
        devices: &OpenDevices,
    ) -> Result<Self, RunError> {
        let device = &devices.devices[0];
        let limit = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
        let page_bytes = PagePool::new(device, limit)?.page_bytes();
        let size = Size::new(config, trace, page_bytes)?;
        let capacity_pages = size.rows_max * size.planes;
        let pages = PagePool::new(device, PagePoolOptions { page_bytes: None, capacity_pages })?;
        // As over blocks: on simulated devices it works between iterations, so that runs are alike.
        let worker = match devices.sim {
            Some(_) => Worker::manual(),
            None => Worker::spawn(WorkerOptions::default())?,
        };
        let options = SpaceOptions {
            sequences: size.seats,
            planes: size.planes,
            token_bytes: size.row_bytes,
            tokens_max: size.seat_blocks * size.block_tokens,
            look_ahead_tokens: size.look_ahead,
            prepared_pages: size.planes,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::new(&pages, &worker, options)?;
        let shape = KvShape::new(KvShapeOptions {
            layers: config.shape.layers,
            kv_count: KV_COUNT as u32,
            row_bytes: size.row_bytes,
            block_tokens: config.block_tokens,
        })?;
        let (writes, reads) = (Stream::new(device)?, Stream::new(device)?);
        let view = view(&reads, shape, &space, &size)?;
        let tokens = u64::from(config.step_tokens);
        let chunk_bytes =
            tokens.checked_mul(size.token_bytes).ok_or(RunError::ChunkOverflow { tokens })?;
        let arrays_bytes = 16 * tokens + 4 * size.seats;
        let table = allocate(&reads, "the blocks of --max-batch ranges", size.entries() * 4)?;
        let ids: Vec<i32> = (0..size.seats)
            .flat_map(|seat| (0..size.width).map(move |block| size.block_of(seat, block) as i32))
            .collect();
        reads.upload(table.span(), bytemuck::cast_slice(&ids))?;
        let sums = ("a checksum for each block of --max-batch ranges", size.entries() * 8);
        let arrays =
            |_| allocate(&reads, "the arrays of an iteration (--step-tokens)", arrays_bytes);
        let arrival = |_| {
            PinnedBuffer::alloc(device, sums.1, HostAllocFlags::CACHED)
                .map_err(|source| RunError::Buffers { what: sums.0, bytes: sums.1, source })
        };
        Ok(Self {
            worker,
            kernels: KvKernels::load(device)?,
            view,
            staging: StagingPool::new(
                device,
                StagingOptions { buffer_bytes: arrays_bytes, buffers_max: RING },
            )?,
            chunk: allocate(&reads, "the tokens of an iteration (--step-tokens)", chunk_bytes)?,
            table,
            arrays: (0..RING).map(arrays).collect::<Result<_, _>>()?,
            checksums: allocate(&reads, sums.0, sums.1)?,
            arrivals: (0..RING).map(arrival).collect::<Result<_, _>>()?,
            written: Event::new(device)?,
            last: Fence::record(&reads)?,
            space,
            size,
            writes,
            reads,
        })
    }

    pub fn space(&self) -> &SequenceSpace {
        &self.space
    }

    pub(super) fn size(&self) -> &Size {
        &self.size
    }

    pub(super) fn shape(&self) -> &KvShape {
        self.view.shape()
    }

    /// Lets a worker without a thread do everything that it can.
    pub(super) fn work(&self, devices: &OpenDevices) {
        if devices.sim.is_some() {
            while self.worker.poll() {}
        }
    }

    /// The figures of a run that has not begun.
    pub(super) fn report(&self) -> RangesReport {
        let Size { page_bytes, planes, rows_max, .. } = self.size;
        RangesReport { page_bytes, limit_pages: rows_max * planes, ..RangesReport::default() }
    }

    /// Ends a request's use of its range. The next request gets it when the last iteration, which
    /// may read it, has completed.
    pub(super) fn leave(&self, sequence: Sequence) {
        sequence.finish(std::slice::from_ref(&self.last));
    }

    /// Enqueues an iteration: writes the batch's tokens, and then, if `read`, reads all tokens of
    /// the seats with a length. Returns a fence after all of it.
    pub(super) fn enqueue(
        &mut self,
        step: u64,
        batch: &Batch,
        read: bool,
    ) -> Result<Fence, RunError> {
        let at = (step % RING as u64) as usize;
        let tokens = batch.keys.len() as u64;
        let (keys, slots) = (0, 8 * tokens);
        let lengths = slots + 8 * tokens;
        let bytes = lengths + 4 * self.size.seats;
        let mut staged = self.staging.acquire_wait()?;
        let outside = cuda_driver::CopyError::from;
        staged.write_at(keys, bytemuck::cast_slice(&batch.keys)).map_err(outside)?;
        staged.write_at(slots, bytemuck::cast_slice(&batch.slots)).map_err(outside)?;
        staged.write_at(lengths, bytemuck::cast_slice(&batch.lengths)).map_err(outside)?;
        let arrays = self.arrays[at].span();
        let part = |first, bytes| arrays.slice(first, bytes).map_err(outside);
        let all = part(0, bytes)?;
        staged.submit(&self.writes, |view| view.copy_to_device(all, 0))?;
        self.write(batch, part(keys, 8 * tokens)?, part(slots, 8 * tokens)?)?;
        self.written.record(&self.writes)?;
        guard!("replay.ranges-read-after-write", self.reads.wait(&self.written)?);
        if read {
            self.read(part(lengths, 4 * self.size.seats)?, at)?;
        }
        let last = guard!("replay.ranges-end-after-reads", &self.reads, else &self.writes);
        self.last = Fence::record(last)?;
        Ok(self.last.clone())
    }

    /// Fills a chunk with the batch's tokens, and stores them into their ranges.
    fn write(&self, batch: &Batch, keys: DeviceSpan, slots: DeviceSpan) -> Result<(), RunError> {
        let tokens = batch.keys.len() as u64;
        let chunk = self.chunk.span().slice(0, tokens * self.size.token_bytes);
        let chunk = chunk.map_err(cuda_driver::CopyError::from)?;
        let what = (chunk, keys, (slots, Some(&batch.slots[..])));
        store((&self.kernels, &self.writes), &self.view, what, [tokens, 0, self.view.blocks()])
    }

    fn read(&self, lengths: DeviceSpan, at: usize) -> Result<(), RunError> {
        let args = ChecksumArgs {
            block_table: self.table.span(),
            table_stride: self.size.width,
            seq_lens: lengths,
            sequences: self.size.seats as u32,
            checksums: self.checksums.span(),
            num_blocks: self.view.blocks(),
        };
        self.kernels.paged_checksum(&self.reads, &self.view, args)?;
        Ok(self.reads.copy_to_host(&self.arrivals[at], 0, self.checksums.span())?)
    }

    /// Copies out the checksums of a completed iteration: a row of them for each seat.
    pub(super) fn arrived(&self, step: u64, checksums: &mut Vec<u64>) -> Result<(), RunError> {
        checksums.resize(self.size.entries() as usize, 0);
        let at = (step % RING as u64) as usize;
        let copied = self.arrivals[at].read_at(0, bytemuck::cast_slice_mut(checksums));
        Ok(copied.map_err(cuda_driver::CopyError::from)?)
    }

    /// Waits for all work, also for that of an iteration that was enqueued in part.
    pub(super) fn settle(&self) -> Result<(), DeviceError> {
        let written = self.writes.synchronize();
        self.reads.synchronize().and(written)
    }

    /// Releases everything. All sequences have left.
    pub(super) fn close(self) -> Result<(), RunError> {
        let Self { space, worker, staging, view, .. } = self;
        drop(view);
        let freed = staging.close();
        let closing = space.close(&[]);
        worker.close();
        let closing = closing.map_err(|refused| RunError::LiveRanges { live: refused.live })?;
        let report = closing.wait().map_err(|refused| RunError::RangesNotAtRest(refused.reason))?;
        let (count, leaked_bytes) = (report.errors.len(), report.leaked_bytes);
        if let Some(first) = report.errors.into_iter().next() {
            return Err(RunError::CloseRanges { count, leaked_bytes, source: Box::new(first) });
        }
        freed.map_err(|error| match error {
            StagingError::Device(source) => RunError::Device(source),
            other => other.into(),
        })
    }
}

/// Describes the ranges to the kernels: block `b` of seat `s` is block `s * seat_blocks + b`.
fn view(
    stream: &Stream,
    shape: KvShape,
    space: &SequenceSpace,
    size: &Size,
) -> Result<PagedKv, RunError> {
    let strides = space.strides();
    let strides = Strides {
        plane_bytes: strides.plane,
        block_bytes: size.block_tokens * strides.token,
        token_bytes: strides.token,
    };
    let layout = PagedLayout::custom(&shape, strides)?;
    Ok(PagedKv::new(stream, shape, layout, space.span(), size.seats * size.seat_blocks)?)
}

fn allocate(stream: &Stream, what: &'static str, bytes: u64) -> Result<DeviceBuffer, RunError> {
    DeviceBuffer::alloc(stream.device(), bytes).map_err(|source| RunError::Buffers {
        what,
        bytes,
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{Dtype, KvModelShape};
    use crate::trace::Request;

    fn config(kv_heads: u32, block_tokens: u32) -> RunConfig {
        let shape = KvModelShape { layers: 2, kv_heads, head_size: 8, dtype: Dtype::Fp8 };
        RunConfig { shape, block_tokens, device_blocks: 1 << 20, ..RunConfig::default() }
    }

    fn size(config: &RunConfig, input_length: u64) -> Result<Size, RunError> {
        let hash_ids = Vec::new();
        let request =
            Request { timestamp_ms: 0, input_length, output_length: 1, hash_ids, tenant: None };
        Size::new(config, &Trace::new(vec![request]), 2 << 20)
    }

    #[test]
    fn a_range_ends_with_a_page_and_with_a_block_whatever_the_row() {
        for kv_heads in [1, 3, 7, 64] {
            for block_tokens in [1, 64, 512] {
                let size = size(&config(kv_heads, block_tokens), 5000).unwrap();
                let bytes = size.seat_blocks * size.block_tokens * size.row_bytes;
                assert!(bytes.is_multiple_of(2 << 20), "{kv_heads} {block_tokens}");
                assert!(size.seat_blocks * size.block_tokens >= 5001);
                assert_eq!(size.width, 5001u64.div_ceil(block_tokens.into()));
                let first = size.block_of(2, 0) * u64::from(block_tokens);
                assert_eq!(size.slots(2, 0..1).next(), Slot::new(first as i64));
            }
        }
    }

    #[test]
    fn ranges_that_a_table_cannot_name_and_requests_beyond_the_limit_are_refused() {
        // A page has 262,144 tokens, and a block one.
        let many = RunConfig { max_batch: 1 << 16, ..config(1, 1) };
        let refused = size(&many, 5000).unwrap_err();
        let RunError::TooManyRangeBlocks { tokens_max, blocks, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((tokens_max, blocks), (1 << 18, 1 << 34));
        let refused = size(&config(1, 512), 1 << 40).unwrap_err();
        assert!(matches!(refused, RunError::RangeTooLarge { request: 0, .. }), "{refused}");
    }
}
