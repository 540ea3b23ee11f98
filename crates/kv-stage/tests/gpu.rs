//! Staging on a real GPU: two steps behind a stalled stream, and long overlapped runs.
//!
//! Needs one device. Without one every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{
    CopyError, CudaDriver, Device, DeviceBuffer, DeviceSpan, Event, Kernel, KernelArgs,
    LaunchConfig, Module, Stream,
};
use kv_stage::{
    BlockTable, StagingOptions, StagingPool, StepStager, StepStagerOptions, SubmittedView,
};
use libtest_mimic::{Arguments, Failed, Trial};

type Run = fn(&Gpu);

fn main() {
    let trials: &[(&str, Run)] = &[
        ("stalled_copies_arrive_intact", |gpu| stalled_steps_arrive(gpu, Reader::Copy)),
        ("stalled_kernel_reads_arrive_intact", |gpu| stalled_steps_arrive(gpu, Reader::Kernel)),
        ("every_table_of_a_long_overlapped_run_arrives", every_table_arrives),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        ("without_events_stalled_copies_are_overwritten", |gpu| {
            stalled_steps_are_overwritten(gpu, Reader::Copy);
        }),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        ("without_events_stalled_kernel_reads_are_overwritten", |gpu| {
            stalled_steps_are_overwritten(gpu, Reader::Kernel);
        }),
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
    // They share a device, and its memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn open() -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), 0).map_err(|error| format!("{error}: {error:?}"))
}

struct Gpu {
    device: Device,
    stream: Stream,
    kernel: Kernel,
    /// Memory that a stall keeps writing.
    scratch: DeviceBuffer,
}

#[derive(Clone, Copy)]
enum Reader {
    Copy,
    Kernel,
}

/// Most fills of a stall: seconds of work for any card.
const FILLS_MAX: usize = 1 << 16;
const BYTES: usize = 64 << 10;

impl Gpu {
    fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            stream: Stream::new(device).unwrap(),
            kernel: Module::load(device, include_str!("copy_bytes.ptx"))
                .unwrap()
                .kernel("copy_bytes")
                .unwrap(),
            scratch: DeviceBuffer::alloc(device, 64 << 20).unwrap(),
        }
    }

    fn launch_copy(&self, destination: DeviceSpan, source: u64) -> Result<(), CopyError> {
        let bytes = destination.bytes();
        let config = LaunchConfig::linear(bytes.div_ceil(128) as u32, 128);
        let args = KernelArgs::new().arg(destination.address()).arg(source).arg(bytes);
        // SAFETY: three 64-bit parameters, as declared; host sources are staging buffers, which
        // their pool keeps until the kernel has run; the destination is device memory.
        unsafe { self.kernel.launch(&self.stream, &config, &args) }?;
        Ok(())
    }

    fn read(&self, span: DeviceSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        self.stream.download(&mut bytes, span).unwrap();
        bytes
    }

    /// Stages A and B while the stream is busy with `fills` fills; what arrived, or nothing when
    /// the stream was done before B was staged, so that there was no stall.
    fn stage_two(&self, pool: &StagingPool, reader: Reader, fills: usize) -> Option<[Vec<u8>; 2]> {
        let targets = [0; 2].map(|_| DeviceBuffer::alloc(&self.device, BYTES as u64).unwrap());
        for _ in 0..fills {
            self.stream.fill(self.scratch.span(), 0x5A).unwrap();
        }
        let stalled = Event::new(&self.device).unwrap();
        stalled.record(&self.stream).unwrap();
        for (number, target) in targets.iter().enumerate() {
            let mut buffer = pool.acquire().unwrap();
            buffer.bytes_mut().copy_from_slice(&pattern(number as u64));
            let read = |view: &SubmittedView<'_>| match reader {
                Reader::Copy => view.copy_to_device(target.span(), 0),
                Reader::Kernel => self.launch_copy(target.span(), view.address()),
            };
            buffer.submit(&self.stream, read).unwrap();
        }
        // Not the end of A's read, but its start, must come after B was written.
        let was_stalled = !stalled.is_complete().unwrap();
        let arrived = targets.map(|target| self.read(target.span()));
        was_stalled.then_some(arrived)
    }

    /// As `stage_two`, with as many fills as it takes for the stream to stand still long enough.
    fn stage_two_stalled(&self, pool: &StagingPool, reader: Reader) -> [Vec<u8>; 2] {
        let mut fills = 64;
        while fills <= FILLS_MAX {
            if let Some(arrived) = self.stage_two(pool, reader, fills) {
                return arrived;
            }
            pool.drain().unwrap();
            fills *= 2;
        }
        panic!("the stream never stood still while two steps were staged");
    }

    fn pool(&self) -> StagingPool {
        let options = StagingOptions { buffer_bytes: BYTES as u64, buffers_max: 2 };
        StagingPool::new(&self.device, options).unwrap()
    }
}

fn pattern(number: u64) -> Vec<u8> {
    let mut random = Random(number * 2 + 1);
    (0..BYTES).map(|_| random.below(256) as u8).collect()
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }
}

fn stalled_steps_arrive(gpu: &Gpu, reader: Reader) {
    let pool = gpu.pool();
    for _ in 0..50 {
        let arrived = gpu.stage_two_stalled(&pool, reader);
        // `assert_eq!` would print both buffers.
        assert!(arrived == [pattern(0), pattern(1)], "a step was overwritten");
        pool.drain().unwrap();
    }
    assert_eq!((pool.live(), pool.leaked()), (0, 0));
    pool.close().unwrap();
}

#[cfg(all(feature = "sabotage", debug_assertions))]
fn stalled_steps_are_overwritten(gpu: &Gpu, reader: Reader) {
    let pool = gpu.pool();
    pool.sabotage_reuse_before_event();
    let arrived = gpu.stage_two_stalled(&pool, reader);
    assert!(arrived == [pattern(1), pattern(1)], "the test would not see the bug it is for");
}

const SLOTS: usize = 8;
const COLUMNS: usize = 256;
/// Steps between two looks at what arrived.
const LOG: usize = 256;
const ITERATIONS: usize = 4 * LOG;

fn every_table_arrives(gpu: &Gpu) {
    for depth in 1..=4 {
        run_at(gpu, depth);
    }
}

/// Runs `ITERATIONS` steps with the host `depth` steps ahead; a kernel logs each staged table.
fn run_at(gpu: &Gpu, depth: usize) {
    let options = StagingOptions { buffer_bytes: BYTES as u64, buffers_max: depth + 4 };
    let pool = StagingPool::new(&gpu.device, options).unwrap();
    let device_bytes = BYTES as u64;
    let mut stager =
        StepStager::new(&gpu.device, &pool, StepStagerOptions { device_bytes }).unwrap();
    let mut table = BlockTable::new(SLOTS, COLUMNS).unwrap();
    let rows_bytes = (SLOTS * COLUMNS * size_of::<i32>()) as u64;
    let log = DeviceBuffer::alloc(&gpu.device, LOG as u64 * rows_bytes).unwrap();
    let slots: Vec<usize> = (0..SLOTS).collect();
    let mut random = Random(depth as u64);
    let mut ahead: VecDeque<Event> = VecDeque::new();
    let mut expected: Vec<i32> = Vec::new();
    for iteration in 0..ITERATIONS {
        if ahead.len() == depth {
            ahead.pop_front().unwrap().synchronize().unwrap();
        }
        edit(&mut table, &mut random);
        let mut step = stager.begin().unwrap();
        let rows = step.block_rows(&table, &slots, COLUMNS).unwrap();
        let staged = step.submit(&gpu.stream).unwrap();
        expected.extend_from_slice(table.as_slice());
        let entry = log.span().slice((iteration % LOG) as u64 * rows_bytes, rows_bytes).unwrap();
        gpu.launch_copy(entry, staged.span(rows).unwrap().address()).unwrap();
        let event = Event::new(&gpu.device).unwrap();
        event.record(&gpu.stream).unwrap();
        ahead.push_back(event);
        if (iteration + 1) % LOG == 0 {
            let arrived = gpu.read(log.span());
            let expected = std::mem::take(&mut expected);
            assert!(arrived == bytemuck::cast_slice::<i32, u8>(&expected), "at {iteration}");
        }
    }
    assert!(pool.peak_live() <= depth + 1, "{} live at depth {depth}", pool.peak_live());
    pool.close().unwrap();
}

/// Lets a sequence arrive, grow or leave.
fn edit(table: &mut BlockTable, random: &mut Random) {
    let slot = random.below(SLOTS as u64) as usize;
    if table.len(slot).unwrap() + 8 > COLUMNS || random.below(16) == 0 {
        table.clear_row(slot).unwrap();
    } else {
        for _ in 0..8 {
            table.append(slot, random.below(1 << 30) as i32).unwrap();
        }
    }
}
