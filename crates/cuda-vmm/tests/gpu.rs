//! The scenarios of every device on a GPU, and tests that need a GPU or two.
//!
//! Without a device every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails. The trial
//! that needs two devices is listed as ignored without a second one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "what happened, for a human reader")]

#[path = "it/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::{pattern, recorded, scenarios, stress};
use cuda_driver::{CudaDriver, Device, Stream, interop};
use cuda_vmm::pages::{PagePool, PagePoolOptions, Reservation, ReservationOptions};
use cuda_vmm::{ElasticPool, ElasticPoolOptions, GrowError, Worker, WorkerOptions};
use cudarc::driver::CudaContext;
use libtest_mimic::{Arguments, Failed, Trial};

/// Needs one device.
const SINGLE: &[(&str, scenarios::Scenario)] = &[
    ("memory_runs_out_and_comes_back", memory_runs_out_and_comes_back),
    ("larger_pages", larger_pages),
    ("addresses_beyond_four_gib", addresses_beyond_four_gib),
    ("cudarc_works_on_mapped_pages", cudarc_works_on_mapped_pages),
    ("sequences_grow_shrink_and_finish_at_once", sequences_grow_shrink_and_finish_at_once),
];

fn main() {
    let required = std::env::var_os("KV_REQUIRE_GPU").is_some_and(|value| value == "1");
    let single = scenarios::ALL.iter().chain(SINGLE).map(|&(name, scenario)| {
        let trial = Trial::test(name, move || {
            scenario(&open(0).map_err(Failed::from)?);
            Ok(())
        });
        trial.with_ignored_flag(open(0).is_err() && !required)
    });
    let pair = Trial::test("peers_named_in_the_reservation_have_access", || {
        let (owner, peer) = pair().map_err(Failed::from)?;
        peers_have_access(&owner, &peer);
        Ok(())
    });
    // One device is required, a second one is optional.
    let pair = pair.with_ignored_flag(self::pair().is_err());
    let mut arguments = Arguments::from_args();
    // One trial fills the memory of the device that all of them share.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, single.chain([pair]).collect()).exit();
}

fn open(ordinal: i32) -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), ordinal).map_err(|error| format!("{error}: {error:?}"))
}

/// Two devices of which the second can access the first one's memory.
fn pair() -> Result<(Device, Device), String> {
    let owner = open(0)?;
    let count = owner.run(|driver| driver.device_get_count()).map_err(|error| error.to_string())?;
    if count < 2 {
        return Err("there is one device".to_owned());
    }
    let peer = Device::open(Arc::clone(owner.driver()), 1).map_err(|error| error.to_string())?;
    match owner.run(|driver| driver.device_can_access_peer(1, 0)) {
        Ok(true) => Ok((owner, peer)),
        Ok(false) => Err("device 1 cannot access device 0".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Requests more memory than the GPU has: no block is lost, no memory is kept, and growth works
/// again afterwards.
fn memory_runs_out_and_comes_back(device: &Device) {
    let (free, total) = device.memory_info().unwrap();
    let page_bytes = Some(64 << 20);
    let pool = ElasticPool::new(
        device,
        ElasticPoolOptions {
            block_bytes: 96 << 20,
            capacity_blocks: 2 * total / (96 << 20),
            page_bytes,
            initial_blocks: 10,
        },
    )
    .unwrap();
    let stream = Stream::new(device).unwrap();
    let bytes = pattern(3, 1 << 20);
    let head = pool.block_span(9).unwrap().slice(0, 1 << 20).unwrap();
    stream.upload(head, &bytes).unwrap();
    let ready_blocks = pool.ready_blocks();
    let asked_blocks = pool.capacity_blocks();
    let refused = GrowError::OutOfMemory { asked_blocks, ready_blocks };
    assert_eq!(pool.grow_to(asked_blocks), Err(refused));
    let (free_now, _) = device.memory_info().unwrap();
    assert!(free_now + (2 << 30) > free, "{} bytes are kept", free - free_now);
    assert!(pool.grow_to(20).unwrap() >= 20);
    let mut seen = vec![0; bytes.len()];
    stream.download(&mut seen, head).unwrap();
    assert!(seen == bytes, "a growth that failed changed a block");
    assert!(pool.close(&[]).wait().unwrap().is_clean());
}

fn larger_pages(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for page_bytes in [16 << 20, 64 << 20] {
        let options = PagePoolOptions { page_bytes: Some(page_bytes), capacity_pages: 3 };
        let pages = PagePool::new(device, options).unwrap();
        let options = ReservationOptions {
            bytes: 4 * page_bytes,
            page_bytes: Some(page_bytes),
            peers: Vec::new(),
        };
        let space = Reservation::new(device, options).unwrap();
        space.map_range(1, pages.take_many(3).unwrap()).unwrap();
        let seam = space.span().slice(2 * page_bytes - 512, 1024).unwrap();
        let bytes = pattern(page_bytes, 1024);
        stream.upload(seam, &bytes).unwrap();
        let mut seen = vec![0; bytes.len()];
        stream.download(&mut seen, seam).unwrap();
        assert!(seen == bytes, "bytes were lost across the seam of two pages");
        assert!(space.close(&[]).wait().unwrap().is_clean());
    }
}

/// The last block of a pool that is larger than 32 bits can address.
fn addresses_beyond_four_gib(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let options = ElasticPoolOptions {
        block_bytes: 100 << 20,
        capacity_blocks: 90,
        page_bytes: Some(64 << 20),
        initial_blocks: 90,
    };
    let pool = ElasticPool::new(device, options).unwrap();
    let tail = |block| {
        let span = pool.block_span(block).unwrap();
        span.slice(span.bytes() - 4096, 4096).unwrap()
    };
    for block in [0, 44, 89] {
        stream.upload(tail(block), &pattern(block, 4096)).unwrap();
    }
    let mut seen = vec![0; 4096];
    for block in [0, 44, 89] {
        stream.download(&mut seen, tail(block)).unwrap();
        assert!(seen == pattern(block, 4096), "block {block} lost its bytes");
    }
    assert!(pool.close(&[]).wait().unwrap().is_clean());
}

/// 64 sequences, 2,048 steps. A kernel reads every byte at every step. `KV_STRESS_STEPS` shortens
/// the run, for a checker that slows kernels down.
fn sequences_grow_shrink_and_finish_at_once(device: &Device) {
    let steps = std::env::var("KV_STRESS_STEPS").map_or(2_048, |text| text.parse().unwrap());
    let plan = stress::Plan {
        threads: 4,
        sequences: 16,
        steps,
        planes: 4,
        token_bytes: 2_048,
        tokens_max: 4_096,
        look_ahead_tokens: 256,
        pages_percent: 70,
        check_every: 1,
        parts: 8,
        seed: 5,
    };
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    let outcome = stress::run(device, &worker, &plan, &|_| ());
    worker.close();
    println!("{outcome:?}");
    assert_eq!(outcome.wrong, [""; 0]);
    // A shorter run has lower thresholds.
    assert!(outcome.finished >= 64 * steps / 2_048 && outcome.checked_bytes > 0, "{outcome:?}");
}

/// A program with a context and a stream of cudarc: our device adopts the context, its copies use
/// our pages through the stream, and an unmapping waits for them.
fn cudarc_works_on_mapped_pages(_: &Device) {
    let program = || {
        let theirs = CudaContext::new(0).unwrap();
        let their_stream = theirs.new_stream().unwrap();
        let device = interop::device(Arc::new(CudaDriver::load().unwrap()), &theirs).unwrap();
        let lane = interop::stream(&device, &their_stream).unwrap();
        let options = PagePoolOptions { page_bytes: None, capacity_pages: 2 };
        let pages = PagePool::new(&device, options).unwrap();
        let options = ReservationOptions { bytes: 2 * pages.page_bytes(), ..Default::default() };
        let space = Reservation::new(&device, options).unwrap();
        space.map_range(0, pages.take_many(2).unwrap()).unwrap();

        let lease = space.gate().lease();
        let span = space.mapped_span(0..2).unwrap();
        // SAFETY: the range stays mapped until the event below, and any bytes are valid `u16`s.
        let mut lent = unsafe { interop::lend::<u16>(&their_stream, span) }.unwrap();
        let count = lent.len();
        assert_eq!(count as u64, pages.page_bytes());
        their_stream.memcpy_htod(&vec![0x1234u16; count], &mut lent.view_mut()).unwrap();
        let kept = their_stream.clone_dtod(&lent.slice(count / 2 - 8..count / 2 + 8)).unwrap();
        drop(lent);
        lease.submitted(&[recorded(&lane)]).unwrap();

        let report = space.close(&[]).wait().unwrap();
        assert!(report.is_clean(), "{:?}", report.errors);
        assert_eq!(their_stream.clone_dtoh(&kept).unwrap(), [0x1234; 16]);
        theirs.check_err().unwrap();
    };
    // On a separate thread, because cudarc leaves its context bound.
    std::thread::scope(|scope| scope.spawn(program).join().unwrap());
}

fn peers_have_access(owner: &Device, peer: &Device) {
    let pages =
        PagePool::new(owner, PagePoolOptions { page_bytes: None, capacity_pages: 2 }).unwrap();
    let peers = vec![peer.ordinal()];
    let bytes = 2 * pages.page_bytes();
    let space =
        Reservation::new(owner, ReservationOptions { bytes, page_bytes: None, peers }).unwrap();
    space.map_range(0, pages.take_many(2).unwrap()).unwrap();
    let span = space.mapped_span(0..2).unwrap();
    let data = pattern(21, span.bytes());
    let (writer, reader) = (Stream::new(peer).unwrap(), Stream::new(owner).unwrap());
    writer.upload(span, &data).unwrap();
    let mut seen = vec![0; data.len()];
    reader.download(&mut seen, span).unwrap();
    assert!(seen == data, "the owner does not see what the peer wrote");
    // Waiting only for the owner's device would not cover the peer's work.
    let done = [&writer, &reader].map(recorded);
    assert!(space.close(&done).wait().unwrap().is_clean());
}
