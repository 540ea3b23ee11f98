//! Staging on a real GPU: steps behind a stalled stream, and long overlapped runs.
//!
//! Needs one device. Without one every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it
//! fails. `KV_DEVICE=sim` runs the trials on the simulated device, to check that they run.
//! `KV_STAGE_ITERATIONS` is the number of steps of a long run at each depth (100,000 by default).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "of the other tests the simulated machine alone is used here")]
#[path = "it/machine.rs"]
mod machine;
#[allow(dead_code, reason = "the tests of batches compare more")]
#[path = "it/batch/model.rs"]
mod model;
#[path = "it/batch/replay.rs"]
mod replay;
#[allow(dead_code, reason = "the tests of batches compare more")]
#[path = "it/tables.rs"]
mod tables;

use std::sync::Arc;

use cuda_driver::{
    CopyError, CudaDriver, Device, DeviceBuffer, DeviceSpan, Event, HostAllocFlags, PinnedBuffer,
    Stream,
};
use kv_stage::{BatchOptions, BatchTable, DeviceBatch, StagingOptions, StagingPool, SubmittedView};
use kv_testkit::machine::CopyKernel;
use libtest_mimic::{Arguments, Failed, Trial};
use replay::{Gathers, Replay};
use tables::{PATHS, Run, Sends, dense, iterations, log_paths, path_logs, paths, stage_paths};

type Test = fn(&Gpu);

fn main() {
    let trials: &[(&str, Test)] = &[
        ("stalled_copies_arrive_intact", |gpu| stalled_steps_arrive(gpu, Reader::Copy)),
        ("stalled_kernel_reads_arrive_intact", |gpu| stalled_steps_arrive(gpu, Reader::Kernel)),
        ("stalled_tables_of_every_path_arrive_intact", stalled_paths_arrive),
        ("a_fresh_buffer_under_a_kernel_is_overwritten", fresh_buffers_are_overwritten),
        ("every_table_of_a_long_overlapped_run_arrives", |gpu| long_runs(gpu, Sends::Everything)),
        ("every_change_of_a_long_overlapped_run_arrives", |gpu| long_runs(gpu, Sends::Changes)),
        ("a_captured_gather_gives_every_replay_its_step", |gpu| {
            captured_steps_arrive(gpu, Gathers::InTheGraph);
        }),
        ("a_captured_reader_reads_every_step", |gpu| {
            captured_steps_arrive(gpu, Gathers::BeforeTheGraph);
        }),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        ("without_events_stalled_copies_are_overwritten", |gpu| {
            stalled_steps_are_overwritten(gpu, Reader::Copy);
        }),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        ("without_events_stalled_kernel_reads_are_overwritten", |gpu| {
            stalled_steps_are_overwritten(gpu, Reader::Kernel);
        }),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        (
            "without_events_stalled_tables_of_every_path_are_overwritten",
            stalled_paths_are_overwritten,
        ),
    ];
    let required = std::env::var_os("KV_REQUIRE_GPU").is_some_and(|value| value == "1");
    let missing = open().err();
    let trials = trials.iter().map(|&(name, run)| {
        let trial = Trial::test(name, move || {
            run(&Gpu::new(&open().map_err(Failed::from)?));
            Ok(())
        });
        trial.with_ignored_flag(missing.is_some() && !required)
    });
    let mut arguments = Arguments::from_args();
    // The trials share a device and its memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn open() -> Result<Device, String> {
    if std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim") {
        let machine = machine::Machine::new(0);
        machine.sim.register_kernels(kv_stage::references());
        return Ok(machine.device);
    }
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), 0).map_err(|error| format!("{error}: {error:?}"))
}

struct Gpu {
    device: Device,
    stream: Stream,
    kernel: CopyKernel,
    /// Memory that a stall keeps writing.
    scratch: DeviceBuffer,
}

#[derive(Clone, Copy)]
enum Reader {
    Copy,
    Kernel,
}

/// Maximum number of fills of a stall: seconds of work for any GPU.
const FILLS_MAX: usize = 1 << 16;
const BYTES: usize = 64 << 10;

impl Gpu {
    fn new(device: &Device) -> Self {
        // A simulated device is held instead of kept busy.
        let scratch_bytes = if device.virtual_now().is_some() { 64 } else { 64 << 20 };
        Self {
            device: device.clone(),
            stream: Stream::new(device).unwrap(),
            kernel: CopyKernel::load(device),
            scratch: DeviceBuffer::alloc(device, scratch_bytes).unwrap(),
        }
    }

    fn launch_copy(&self, destination: DeviceSpan, source: u64) -> Result<(), CopyError> {
        // SAFETY: host sources are pinned buffers that outlive the kernel.
        unsafe { self.kernel.launch(&self.stream, destination, source) }?;
        Ok(())
    }

    fn memory(&self, bytes: u64) -> DeviceBuffer {
        DeviceBuffer::alloc(&self.device, bytes).unwrap()
    }

    fn read(&self, span: DeviceSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        self.stream.download(&mut bytes, span).unwrap();
        bytes
    }

    /// Runs `work` while the stream is busy with `fills` fills. Returns the result of `work`, or
    /// `None` if the stream finished before `work` did, so that there was no stall.
    fn while_busy<T>(&self, fills: usize, work: impl FnOnce() -> T) -> Option<T> {
        for _ in 0..fills {
            self.stream.fill(self.scratch.span(), 0x5A).unwrap();
        }
        let stalled = Event::new(&self.device).unwrap();
        stalled.record(&self.stream).unwrap();
        let done = work();
        // The start, not the end, of the first read must come after the last write.
        (!stalled.is_complete().unwrap()).then_some(done)
    }

    /// Calls `work` with enough fills to keep the stream busy for long enough.
    fn stalled<T>(&self, pool: &StagingPool, mut work: impl FnMut(usize) -> Option<T>) -> T {
        let mut fills = 64;
        while fills <= FILLS_MAX {
            if let Some(done) = work(fills) {
                return done;
            }
            pool.drain().unwrap();
            fills *= 2;
        }
        panic!("the stream never stood still while two steps were staged");
    }

    /// Stages A and B behind a stall; returns the received bytes.
    fn stage_two(&self, pool: &StagingPool, reader: Reader) -> [Vec<u8>; 2] {
        let targets = [0; 2].map(|_| self.memory(BYTES as u64));
        self.stalled(pool, |fills| {
            self.while_busy(fills, || {
                for (number, target) in (0..).zip(&targets) {
                    let mut buffer = pool.acquire().unwrap();
                    buffer.bytes_mut().copy_from_slice(&pattern(number));
                    let read = |view: &SubmittedView<'_>| match reader {
                        Reader::Copy => view.copy_to_device(target.span(), 0),
                        Reader::Kernel => self.launch_copy(target.span(), view.address()),
                    };
                    buffer.submit(&self.stream, read).unwrap();
                }
            })
        });
        targets.map(|target| self.read(target.span()))
    }

    fn pool(&self, buffers_max: usize) -> StagingPool {
        let options = StagingOptions { buffer_bytes: BYTES as u64, buffers_max };
        StagingPool::new(&self.device, options).unwrap()
    }
}

/// Graphs over a batch, replayed for many steps of other sequences, tables and lengths.
fn captured_steps_arrive(gpu: &Gpu, gathers: Gathers) {
    let steps = if gpu.device.virtual_now().is_some() { 40 } else { 4000 };
    let table = |width, block_tokens, null_block: u16| BatchTable {
        width,
        block_tokens,
        null_block: null_block.into(),
        is_state: false,
    };
    let large = BatchOptions {
        rows: 300,
        sequences_max: 70,
        tokens_max: 1500,
        tables: vec![table(129, 16, 0), table(40, 48, 7)],
        arrays: vec![6000, 37],
    };
    for (number, options) in (0..).zip([model::small(), large]) {
        Replay::new(&gpu.device, &gpu.kernel, &options, gathers, 11 + number).run(steps);
    }
}

fn pattern(number: u64) -> Vec<u8> {
    kv_testkit::pattern(number, BYTES)
}

fn stalled_steps_arrive(gpu: &Gpu, reader: Reader) {
    let pool = gpu.pool(2);
    for _ in 0..50 {
        let arrived = gpu.stage_two(&pool, reader);
        // `assert_eq!` would print both buffers.
        assert!(arrived == [pattern(0), pattern(1)], "a step was overwritten");
        pool.drain().unwrap();
    }
    assert_eq!(pool.live(), 0);
    pool.close().unwrap();
}

#[cfg(all(feature = "sabotage", debug_assertions))]
fn stalled_steps_are_overwritten(gpu: &Gpu, reader: Reader) {
    let pool = gpu.pool(2);
    pool.sabotage_reuse_before_event();
    let arrived = gpu.stage_two(&pool, reader);
    assert!(arrived == [pattern(1), pattern(1)], "the test would not see the bug it is for");
}

/// A caching allocator gives each step a fresh buffer and learns only of copies. It does not know
/// of the kernel, so the next buffer is the same one.
fn fresh_buffers_are_overwritten(gpu: &Gpu) {
    let pool = gpu.pool(1);
    let targets = [0; 2].map(|_| gpu.memory(BYTES as u64));
    let mut cache =
        vec![PinnedBuffer::alloc(&gpu.device, BYTES as u64, HostAllocFlags::CACHED).unwrap()];
    gpu.stalled(&pool, |fills| {
        let staged = gpu.while_busy(fills, || {
            for (number, target) in (0..).zip(&targets) {
                let mut fresh = cache.pop().unwrap();
                fresh.write_at(0, &pattern(number)).unwrap();
                gpu.launch_copy(target.span(), fresh.device_address()).unwrap();
                cache.push(fresh);
            }
        });
        gpu.stream.synchronize().unwrap();
        staged
    });
    let arrived = targets.map(|target| gpu.read(target.span()));
    assert!(arrived == [pattern(1), pattern(1)], "it should have gone wrong");
}

/// Stages the tables of every path twice behind a stall. Answers what a kernel has read in each round, of each path.
fn stage_paths_stalled(gpu: &Gpu, sabotaged: bool) -> [[Vec<u8>; PATHS]; 2] {
    let options = paths();
    let pool = StagingOptions { buffer_bytes: options.buffer_bytes(), buffers_max: 2 };
    let pool = StagingPool::new(&gpu.device, pool).unwrap();
    #[cfg(all(feature = "sabotage", debug_assertions))]
    if sabotaged {
        pool.sabotage_reuse_before_event();
    }
    assert!(!sabotaged || cfg!(all(feature = "sabotage", debug_assertions)));
    let mut batch = DeviceBatch::new(&pool, options).unwrap();
    // Allocated beforehand, because an allocation may wait for the device.
    let logs = [0; 2].map(|_| path_logs(&gpu.device));
    gpu.stalled(&pool, |fills| {
        gpu.while_busy(fills, || {
            for (round, logs) in (0..).zip(&logs) {
                stage_paths(&gpu.stream, &mut batch, round);
                log_paths(&gpu.stream, &gpu.kernel, &batch, logs);
            }
        })
    });
    logs.each_ref().map(|logs| logs.each_ref().map(|log| gpu.read(log.span())))
}

fn stalled_paths_arrive(gpu: &Gpu) {
    for _ in 0..10 {
        for (round, found) in (0..).zip(stage_paths_stalled(gpu, false)) {
            for (path, found) in found.into_iter().enumerate() {
                assert!(found == dense(round, path), "path {path} of round {round}");
            }
        }
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
fn stalled_paths_are_overwritten(gpu: &Gpu) {
    let [first, _] = stage_paths_stalled(gpu, true);
    for (path, found) in first.into_iter().enumerate() {
        assert!(found != dense(0, path), "path {path}: the test would not see the bug it is for");
    }
}

/// Runs many steps with the host 1 to 4 steps ahead.
fn long_runs(gpu: &Gpu, sends: Sends) {
    for depth in 1..=4 {
        // Exactly as many buffers as the depth needs: if one more were live, a step would find none.
        let mut run = Run::new(&gpu.stream, &gpu.kernel, sends, depth + 1);
        let pinned_bytes = run.pool.pinned_bytes();
        run.steps(depth, iterations(), |_| {});
        assert_eq!(run.pool.pinned_bytes(), pinned_bytes);
    }
}
