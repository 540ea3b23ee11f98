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

/// Computes all requests in memory of so many pages. Changes a byte of the first seat's first token behind iteration `spoil`.
fn play(
    device: &Device,
    (requests, pages): (&[Request], u64),
    spoil: Option<u64>,
) -> Result<Outcome, Failed> {
    let pages = PagePool::new(device, PagePoolOptions { page_bytes: None, capacity_pages: pages })?;
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
    // The kernels find a range as blocks that follow each other: block `b` of seat `s` is `s * BLOCKS_MAX + b`.
    let strides = space.strides();
    let block_bytes = BLOCK_TOKENS * strides.token;
    let strides = Strides { plane_bytes: strides.plane, block_bytes, token_bytes: strides.token };
    let layout = PagedLayout::custom(&shape, strides)?;
    let kv = PagedKv::new(&reads, shape, layout, space.span(), SEATS * BLOCKS_MAX)?;
    let (kernels, expected) = (KvKernels::load(device)?, Expected::new(&shape)?);
    let table = DeviceBuffer::alloc(device, SEATS * BLOCKS_MAX * 4)?;
    let ids: Vec<i32> = (0..(SEATS * BLOCKS_MAX) as i32).collect();
    reads.upload(table.span(), bytemuck::cast_slice(&ids))?;
    // What an iteration computes, as a forward pass would leave it; and the keys and slots of its tokens, and the lengths.
    let most = SEATS * TOKENS_MAX;
    let chunk = DeviceBuffer::alloc(device, most * shape.token_bytes())?;
    let arrays = DeviceBuffer::alloc(device, most * 16)?;
    let lengths =
        [DeviceBuffer::alloc(device, SEATS * 4)?, DeviceBuffer::alloc(device, SEATS * 4)?];
    let sums_bytes = SEATS * BLOCKS_MAX * 8;
    let sums = DeviceBuffer::alloc(device, sums_bytes)?;
    let arrive = || PinnedBuffer::alloc(device, sums_bytes, HostAllocFlags::CACHED);
    let arrivals = [arrive()?, arrive()?];
    let written = Event::new(device)?;
    let mut last = Fence::record(&reads)?;

    let mut outcome = Outcome::default();
    let mut waiting: VecDeque<usize> = (0..requests.len()).collect();
    let mut running: Vec<Running> = Vec::new();
    // Of the iterations that were not compared yet: the fence, and the checksums that each seat must have.
    let mut in_flight: VecDeque<(Fence, usize, Vec<(u64, Vec<u64>)>)> = VecDeque::new();
    // Whether a sequence has made room since the last one has ended.
    let mut is_full = false;
    let mut iteration = 0;
    while !waiting.is_empty() || !running.is_empty() || !in_flight.is_empty() {
        while worker.poll() {}
        while in_flight.len() >= RING || (running.is_empty() && !in_flight.is_empty()) {
            let Some((fence, at, rows)) = in_flight.pop_front() else { break };
            fence.wait()?;
            let mut found = vec![0_u64; (SEATS * BLOCKS_MAX) as usize];
            arrivals[at].read_at(0, bytemuck::cast_slice_mut(&mut found))?;
            for (seat, rows) in rows {
                let found = &found[(seat * BLOCKS_MAX) as usize..];
                outcome.blocks_read += rows.len() as u64;
                outcome.blocks_wrong +=
                    rows.iter().zip(found).filter(|(row, found)| row != found).count() as u64;
            }
        }
        // As many as there are seats; a seat is free when all work of its last sequence is done.
        while let Some(&number) = waiting.front().filter(|_| !is_full) {
            match space.admit(requests[number].0) {
                Ok(sequence) => {
                    waiting.pop_front();
                    running.push(Running { number, sequence, written: 0, sums: Vec::new() });
                }
                Err(RoomError::NoSeat { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let (mut slots, mut keys) = (Vec::new(), Vec::new());
        let (mut seats, mut rows) = (vec![0_u32; SEATS as usize], Vec::new());
        let mut at = 0;
        while at < running.len() {
            let one = &mut running[at];
            let from = one.written;
            let to = (from + 1).max(requests[one.number].0);
            let mut room = one.sequence.extend_blocking(to);
            if let Err(RoomError::NotReady { .. }) = room {
                // Pages are at rest when the work of those that left is done.
                last.wait()?;
                room = one.sequence.extend_blocking(to);
            }
            match room {
                Ok(()) => {}
                Err(RoomError::NotReady { .. }) if running.len() > 1 => {
                    // Whoever came last makes room, and is computed again later.
                    let Some(one) = running.pop() else { break };
                    one.sequence.finish(std::slice::from_ref(&last));
                    waiting.push_front(one.number);
                    outcome.preempted += 1;
                    is_full = true;
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            let seat = one.sequence.seat();
            for token in from..to {
                let key = key(one.number, token);
                if token % BLOCK_TOKENS == 0 {
                    one.sums.push(0);
                }
                let sum = one.sums.last_mut().ok_or("a block for each token")?;
                let place = (token % BLOCK_TOKENS) as usize;
                *sum = expected.add(*sum, place, key).ok_or("a place in a block")?;
                keys.push(key);
                slots.extend(Slot::new((seat * TOKENS_MAX + token) as i64));
            }
            one.written = to;
            seats[seat as usize] = to as u32;
            rows.push((seat, one.sums.clone()));
            at += 1;
        }
        if keys.is_empty() {
            // Seats, too.
            last.wait()?;
            continue;
        }
        let (tokens, ring) = (keys.len() as u64, iteration as usize % RING);
        let [keys_at, slots_at] = [0, most * 8].map(|at| arrays.span().slice(at, tokens * 8));
        let (keys_at, slots_at, to_store) =
            (keys_at?, slots_at?, chunk.span().slice(0, tokens * shape.token_bytes())?);
        writes.upload(keys_at, bytemuck::cast_slice(&keys))?;
        writes.upload(slots_at, bytemuck::cast_slice(&slots))?;
        writes.upload(lengths[ring].span(), bytemuck::cast_slice(&seats))?;
        let fill = FillPattern { chunk: to_store, token_keys: keys_at, tokens };
        kernels.fill_pattern(&writes, &shape, fill)?;
        let mapping = ChunkMapping::Slots { slots: slots_at.into(), host: Some(&slots) };
        let chunks = &[Chunk { memory: to_store.into(), mapping, tokens, skip_prefix_n_tokens: 0 }];
        let transfer = ChunkTransfer {
            chunks,
            layers: 0..LAYERS,
            direction: Direction::ChunkToPaged,
            num_blocks: kv.blocks(),
            limits: LaunchLimits::default(),
            report: None,
        };
        kernels.transfer_chunks(&writes, &kv, &transfer)?;
        written.record(&writes)?;
        reads.wait(&written)?;
        let args = ChecksumArgs {
            block_table: table.span(),
            table_stride: BLOCKS_MAX,
            seq_lens: lengths[ring].span(),
            sequences: SEATS as u32,
            checksums: sums.span(),
            num_blocks: kv.blocks(),
        };
        kernels.paged_checksum(&reads, &kv, args)?;
        reads.copy_to_host(&arrivals[ring], 0, sums.span())?;
        last = Fence::record(&reads)?;
        in_flight.push_back((last.clone(), ring, rows));
        iteration += 1;
        if spoil == Some(iteration) {
            // The work in flight is waited for: no race, only a wrong byte.
            last.wait()?;
            let (byte, mut found) = (space.span().slice(3, 1)?, [0]);
            writes.download(&mut found, byte)?;
            writes.fill(byte, !found[0])?;
            writes.synchronize()?;
        }
        for one in running.extract_if(.., |one| {
            let (prompt, answer) = requests[one.number];
            one.written >= prompt + answer
        }) {
            one.sequence.finish(std::slice::from_ref(&last));
            outcome.finished += 1;
            is_full = false;
        }
    }
    outcome.adopted_bytes = space.stats().adopted_bytes;
    drop(kv);
    space.close(&[]).map_err(|refused| format!("{} sequences are live", refused.live))?.wait()?;
    worker.close();
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
