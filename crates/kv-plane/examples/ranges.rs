//! Sequences on contiguous addresses that grow page by page, written and read by the kernels, with every byte compared.
//!
//! `cargo run -p kv-plane --example ranges`
//!
//! Tokens are written on one stream and read on another, and the host is one iteration ahead: an iteration writes while the one
//! before it is still read. Only the fence that a sequence leaves with keeps its pages from the next one until then.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Event, Fence, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use cuda_vmm::Worker;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{RoomError, Sequence, SequenceSpace, SpaceOptions};
use kv_kernels::chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits};
use kv_kernels::layout::Strides;
use kv_kernels::verify::{ChecksumArgs, Expected, FillPattern};
use kv_kernels::{Direction, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout};
use kv_pool::Slot;

type Failed = Box<dyn Error>;

const LAYERS: u32 = 2;
const PLANES: u64 = 2 * LAYERS as u64;
const ROW_BYTES: u64 = 24;
const BLOCK_TOKENS: u64 = 16;
const SEATS: u64 = 4;
/// A whole number of pages and of blocks.
const TOKENS_MAX: u64 = 2048;
const BLOCKS_MAX: u64 = TOKENS_MAX / BLOCK_TOKENS;
/// Iterations whose buffers are in use: the one that is prepared, and the one before it.
const RING: usize = 2;

/// Tokens of a prompt and of its answer.
type Request = (u64, u64);

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Outcome {
    finished: usize,
    preempted: u64,
    blocks_read: u64,
    blocks_wrong: u64,
    adopted_bytes: u64,
}

struct Running {
    number: usize,
    sequence: Sequence,
    written: u64,
    /// The checksum of each block so far.
    sums: Vec<u64>,
}

/// A number that no other token of the run has.
fn key(request: usize, token: u64) -> u64 {
    ((request as u64) << 32 | (token + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The tokens that an iteration writes, and the length of each seat that it reads; 0 for one that it does not.
#[derive(Default)]
struct Batch {
    keys: Vec<u64>,
    slots: Vec<Slot>,
    lengths: [u32; SEATS as usize],
}

/// The ranges, and what the device has beside them.
struct Ranges {
    space: SequenceSpace,
    worker: Worker,
    kernels: KvKernels,
    /// The ranges as blocks that follow each other: block `b` of seat `s` is block `s * BLOCKS_MAX + b`.
    kv: PagedKv,
    writes: Stream,
    reads: Stream,
    table: DeviceBuffer,
    /// What an iteration computes, as a forward pass would leave it.
    chunk: DeviceBuffer,
    keys: DeviceBuffer,
    slots: DeviceBuffer,
    lengths: [DeviceBuffer; RING],
    sums: DeviceBuffer,
    arrivals: [PinnedBuffer; RING],
    written: Event,
    /// Behind all work of the last iteration.
    last: Fence,
}

impl Ranges {
    fn new(device: &Device, capacity_pages: u64) -> Result<Self, Failed> {
        let pages = PagePool::new(device, PagePoolOptions { page_bytes: None, capacity_pages })?;
        let worker = Worker::manual();
        let options = SpaceOptions {
            sequences: SEATS,
            planes: PLANES,
            token_bytes: ROW_BYTES,
            tokens_max: TOKENS_MAX,
            look_ahead_tokens: BLOCK_TOKENS,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::new(&pages, &worker, options)?;
        let shape = KvShape::new(KvShapeOptions {
            layers: LAYERS,
            kv_count: 2,
            row_bytes: ROW_BYTES,
            block_tokens: BLOCK_TOKENS as u32,
        })?;
        let (writes, reads) = (Stream::new(device)?, Stream::new(device)?);
        let of = space.strides();
        let block_bytes = BLOCK_TOKENS * of.token;
        let strides = Strides { plane_bytes: of.plane, block_bytes, token_bytes: of.token };
        let layout = PagedLayout::custom(&shape, strides)?;
        let blocks = SEATS * BLOCKS_MAX;
        let kv = PagedKv::new(&reads, shape, layout, space.span(), blocks)?;
        let table = DeviceBuffer::alloc(device, blocks * 4)?;
        let ids: Vec<i32> = (0..blocks as i32).collect();
        reads.upload(table.span(), bytemuck::cast_slice(&ids))?;
        let most = SEATS * TOKENS_MAX;
        let lengths = || DeviceBuffer::alloc(device, SEATS * 4);
        let arrive = || PinnedBuffer::alloc(device, blocks * 8, HostAllocFlags::CACHED);
        Ok(Self {
            kernels: KvKernels::load(device)?,
            chunk: DeviceBuffer::alloc(device, most * shape.token_bytes())?,
            keys: DeviceBuffer::alloc(device, most * 8)?,
            slots: DeviceBuffer::alloc(device, most * 8)?,
            lengths: [lengths()?, lengths()?],
            sums: DeviceBuffer::alloc(device, blocks * 8)?,
            arrivals: [arrive()?, arrive()?],
            written: Event::new(device)?,
            last: Fence::record(&reads)?,
            space,
            worker,
            kv,
            writes,
            reads,
            table,
        })
    }

    /// Enqueues an iteration: writes the tokens, and then reads all seats with a length.
    fn enqueue(&mut self, ring: usize, batch: &Batch) -> Result<(), Failed> {
        let (kv, tokens) = (&self.kv, batch.keys.len() as u64);
        let chunk = self.chunk.span().slice(0, tokens * kv.shape().token_bytes())?;
        let [keys, slots] = [&self.keys, &self.slots].map(|of| of.span().slice(0, tokens * 8));
        let (keys, slots, lengths) = (keys?, slots?, self.lengths[ring].span());
        self.writes.upload(keys, bytemuck::cast_slice(&batch.keys))?;
        self.writes.upload(slots, bytemuck::cast_slice(&batch.slots))?;
        self.writes.upload(lengths, bytemuck::cast_slice(&batch.lengths))?;
        let fill = FillPattern { chunk, token_keys: keys, tokens };
        self.kernels.fill_pattern(&self.writes, kv.shape(), fill)?;
        let mapping = ChunkMapping::Slots { slots: slots.into(), host: Some(&batch.slots) };
        let chunk = Chunk { memory: chunk.into(), mapping, tokens, skip_prefix_n_tokens: 0 };
        let transfer = ChunkTransfer {
            chunks: &[chunk],
            layers: 0..LAYERS,
            direction: Direction::ChunkToPaged,
            num_blocks: kv.blocks(),
            limits: LaunchLimits::default(),
            report: None,
        };
        self.kernels.transfer_chunks(&self.writes, kv, &transfer)?;
        self.written.record(&self.writes)?;
        self.reads.wait(&self.written)?;
        let args = ChecksumArgs {
            block_table: self.table.span(),
            table_stride: BLOCKS_MAX,
            seq_lens: lengths,
            sequences: SEATS as u32,
            checksums: self.sums.span(),
            num_blocks: kv.blocks(),
        };
        self.kernels.paged_checksum(&self.reads, kv, args)?;
        self.reads.copy_to_host(&self.arrivals[ring], 0, self.sums.span())?;
        self.last = Fence::record(&self.reads)?;
        Ok(())
    }

    /// Changes a byte of the first seat's first token. The work in flight is waited for: no race, only a wrong byte.
    fn spoil(&self) -> Result<(), Failed> {
        self.last.wait()?;
        let (byte, mut found) = (self.space.span().slice(3, 1)?, [0]);
        self.writes.download(&mut found, byte)?;
        self.writes.fill(byte, !found[0])?;
        Ok(self.writes.synchronize()?)
    }

    fn leave(&self, sequence: Sequence) {
        sequence.finish(std::slice::from_ref(&self.last));
    }

    fn close(self) -> Result<(), Failed> {
        drop(self.kv);
        let closing = self.space.close(&[]);
        closing.map_err(|refused| format!("{} sequences are live", refused.live))?.wait()?;
        self.worker.close();
        Ok(())
    }
}

/// An iteration that was not compared yet: its buffers, and the checksums that each seat must have.
struct InFlight {
    fence: Fence,
    ring: usize,
    rows: Vec<(u64, Vec<u64>)>,
}

impl InFlight {
    fn compare(self, ranges: &Ranges, outcome: &mut Outcome) -> Result<(), Failed> {
        self.fence.wait()?;
        let mut found = vec![0_u64; (SEATS * BLOCKS_MAX) as usize];
        ranges.arrivals[self.ring].read_at(0, bytemuck::cast_slice_mut(&mut found))?;
        for (seat, rows) in self.rows {
            let found = &found[(seat * BLOCKS_MAX) as usize..];
            outcome.blocks_read += rows.len() as u64;
            outcome.blocks_wrong +=
                rows.iter().zip(found).filter(|(row, found)| row != found).count() as u64;
        }
        Ok(())
    }
}

impl Running {
    /// Adds the next tokens, up to `to`, to the batch.
    fn write(&mut self, to: u64, expected: &Expected, batch: &mut Batch) -> Result<(), Failed> {
        let seat = self.sequence.seat();
        for token in self.written..to {
            let key = key(self.number, token);
            if token % BLOCK_TOKENS == 0 {
                self.sums.push(0);
            }
            let sum = self.sums.last_mut().ok_or("a block for each token")?;
            let place = (token % BLOCK_TOKENS) as usize;
            *sum = expected.add(*sum, place, key).ok_or("a place in a block")?;
            batch.keys.push(key);
            batch.slots.extend(Slot::new((seat * TOKENS_MAX + token) as i64));
        }
        self.written = to;
        batch.lengths[seat as usize] = to as u32;
        Ok(())
    }
}

/// Computes all requests in memory of so many pages. Changes a byte behind iteration `spoil`.
fn play(
    device: &Device,
    (requests, pages): (&[Request], u64),
    spoil: Option<usize>,
) -> Result<Outcome, Failed> {
    let mut ranges = Ranges::new(device, pages)?;
    let expected = Expected::new(ranges.kv.shape())?;
    let mut outcome = Outcome::default();
    let mut waiting: VecDeque<usize> = (0..requests.len()).collect();
    let mut running: Vec<Running> = Vec::new();
    let mut in_flight: VecDeque<InFlight> = VecDeque::new();
    // Whether a sequence has made room since the last one has ended.
    let mut is_full = false;
    let mut iteration = 0;
    while !waiting.is_empty() || !running.is_empty() || !in_flight.is_empty() {
        while ranges.worker.poll() {}
        while in_flight.len() >= RING || running.is_empty() {
            let Some(oldest) = in_flight.pop_front() else { break };
            oldest.compare(&ranges, &mut outcome)?;
        }
        // As many as there are seats; a seat is free when all work of its last sequence is done.
        while let Some(&number) = waiting.front().filter(|_| !is_full) {
            let sequence = match ranges.space.admit(requests[number].0) {
                Ok(sequence) => sequence,
                Err(RoomError::NoSeat { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            waiting.pop_front();
            running.push(Running { number, sequence, written: 0, sums: Vec::new() });
        }
        let (mut batch, mut rows, mut at) = (Batch::default(), Vec::new(), 0);
        while let Some(one) = running.get_mut(at) {
            let to = (one.written + 1).max(requests[one.number].0);
            let mut room = one.sequence.extend_blocking(to);
            if let Err(RoomError::NotReady { .. }) = room {
                // Pages are at rest when the work of those that left is done.
                ranges.last.wait()?;
                room = one.sequence.extend_blocking(to);
            }
            match room {
                Ok(()) => {
                    one.write(to, &expected, &mut batch)?;
                    rows.push((one.sequence.seat(), one.sums.clone()));
                    at += 1;
                }
                Err(RoomError::NotReady { .. }) if running.len() > 1 => {
                    // Whoever came last makes room, and is computed again later.
                    let Some(last) = running.pop() else { break };
                    ranges.leave(last.sequence);
                    waiting.push_front(last.number);
                    outcome.preempted += 1;
                    is_full = true;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if batch.keys.is_empty() {
            // Seats, too.
            ranges.last.wait()?;
            continue;
        }
        let ring = iteration % RING;
        ranges.enqueue(ring, &batch)?;
        in_flight.push_back(InFlight { fence: ranges.last.clone(), ring, rows });
        iteration += 1;
        if spoil == Some(iteration) {
            ranges.spoil()?;
        }
        let total = |number: usize| requests[number].0 + requests[number].1;
        for one in running.extract_if(.., |one| one.written >= total(one.number)) {
            ranges.leave(one.sequence);
            outcome.finished += 1;
            is_full = false;
        }
    }
    outcome.adopted_bytes = ranges.space.stats().adopted_bytes;
    ranges.close()?;
    Ok(outcome)
}

fn requests(count: u64) -> Vec<Request> {
    (0..count).map(|one| (1 + one * 397 % 1200, 1 + one * 61 % 300)).collect()
}

fn main() -> Result<(), Failed> {
    // On a GPU: `CudaDriver::load()?`, and memory for 64 pages of 2 MiB.
    let sim = SimDriver::new(SimConfig { granularity: 4096, ..SimConfig::default() })?;
    sim.register_kernels(kv_kernels::references());
    let device = Device::open(Arc::new(sim), 0)?;
    let outcome = play(&device, (&requests(24), 96), None)?;
    assert_eq!((outcome.finished, outcome.blocks_wrong), (24, 0));
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use cuda_sim::{Pace, RaceCheck};

    fn run(
        (pace, pages): (Pace, u64),
        requests: &[Request],
        set: impl FnOnce(&SimDriver),
    ) -> Outcome {
        let config =
            SimConfig { granularity: 4096, pace, races: RaceCheck::Report, ..SimConfig::default() };
        let sim = Arc::new(SimDriver::new(config).unwrap());
        sim.register_kernels(kv_kernels::references());
        set(&sim);
        let device = Device::open(sim.clone(), 0).unwrap();
        let outcome = play(&device, (requests, pages), None).unwrap();
        drop(device);
        assert_eq!(sim.findings(), []);
        assert!(sim.check_leaks().is_clean(), "{:?}", sim.check_leaks());
        assert_eq!((outcome.finished, outcome.blocks_wrong), (requests.len(), 0), "{pace:?}");
        outcome
    }

    #[test]
    fn a_range_grows_page_by_page_and_every_block_is_read_in_every_iteration() {
        let outcome = run((Pace::Slowest, 64), &[(100, 1000)], |_| ());
        let blocks: u64 = (100..=1100_u64).map(|tokens| tokens.div_ceil(BLOCK_TOKENS)).sum();
        assert_eq!((outcome.blocks_read, outcome.preempted), (blocks, 0));
    }

    #[test]
    fn sequences_that_outgrow_the_memory_together_make_room_and_take_over_pages() {
        for pace in [Pace::Slowest, Pace::Random, Pace::Fastest] {
            let outcome = run((pace, 48), &requests(24), |_| ());
            assert!(outcome.preempted > 0 && outcome.adopted_bytes > 0, "{pace:?}: {outcome:?}");
        }
    }

    #[test]
    fn the_kernels_of_a_gpu_read_ranges_as_their_references_do() {
        run((Pace::Random, 64), &[(700, 3), (90, 3)], |sim| sim.prefer_ptx(true));
    }

    #[test]
    fn one_changed_byte_is_noticed_where_it_is_read() {
        let sim = SimDriver::new(SimConfig { granularity: 4096, ..SimConfig::default() }).unwrap();
        sim.register_kernels(kv_kernels::references());
        let device = Device::open(Arc::new(sim), 0).unwrap();
        // The tenth iteration has read it before; the other eleven have not.
        let outcome = play(&device, (&[(100, 20)], 64), Some(10)).unwrap();
        assert_eq!((outcome.finished, outcome.blocks_wrong), (1, 11));
    }
}
