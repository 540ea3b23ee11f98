//! Staging on a real GPU: steps behind a stalled stream, and long overlapped runs.
//!
//! Needs one device. Without one every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it
//! fails. `KV_DEVICE=sim` runs the trials on the simulated device, to check that they run.
//! `KV_STAGE_ITERATIONS` is the number of steps of a long run at each depth (100,000 by default).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "of the staging tests the simulated machine alone is used here")]
#[path = "staging/machine.rs"]
mod machine;

#[allow(dead_code, reason = "the tests of batches compare more")]
#[path = "batch/model.rs"]
mod model;

#[path = "batch/replay.rs"]
mod replay;

#[path = "support/rows.rs"]
mod rows;

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{
    CopyError, CudaDriver, Device, DeviceBuffer, DeviceSpan, Event, HostAllocFlags, Kernel,
    KernelArgs, LaunchConfig, Module, PinnedBuffer, Stream,
};
use kv_stage::{
    BatchOptions, BatchTable, BlockTable, StagingOptions, StagingPool, StepStager, SubmittedView,
};
use libtest_mimic::{Arguments, Failed, Trial};
use machine::Random;
use replay::{Gathers, Replay};
use rows::{row_at, rows_at};

type Run = fn(&Gpu);

fn main() {
    let trials: &[(&str, Run)] = &[
        ("stalled_copies_arrive_intact", |gpu| stalled_steps_arrive(gpu, Reader::Copy)),
        ("stalled_kernel_reads_arrive_intact", |gpu| stalled_steps_arrive(gpu, Reader::Kernel)),
        ("stalled_tables_of_every_path_arrive_intact", |gpu| {
            stalled_paths_arrive(gpu, Sends::Everything);
        }),
        ("stalled_changes_of_every_path_arrive_intact", |gpu| {
            stalled_paths_arrive(gpu, Sends::Changes);
        }),
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
        ("without_events_stalled_tables_of_every_path_are_overwritten", |gpu| {
            stalled_paths_are_overwritten(gpu, Sends::Everything);
        }),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        ("without_events_stalled_changes_of_every_path_are_overwritten", |gpu| {
            stalled_paths_are_overwritten(gpu, Sends::Changes);
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
    // The trials share a device and its memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn open() -> Result<Device, String> {
    if std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim") {
        return Ok(machine::Machine::new(0).device);
    }
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

/// How a stager sends a step.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Sends {
    Everything,
    Changes,
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
            kernel: Module::load(device, machine::COPY_PTX).unwrap().kernel("copy_bytes").unwrap(),
            scratch: DeviceBuffer::alloc(device, scratch_bytes).unwrap(),
        }
    }

    fn launch_copy(&self, destination: DeviceSpan, source: u64) -> Result<(), CopyError> {
        let bytes = destination.bytes();
        let config = LaunchConfig::linear(bytes.div_ceil(128) as u32, 128);
        let args = KernelArgs::new().arg(destination.address()).arg(source).arg(bytes);
        // SAFETY: three 64-bit parameters, as declared; host sources are pinned buffers that outlive
        // the kernel; the destination is device memory.
        unsafe { self.kernel.launch(&self.stream, &config, &args) }?;
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

    fn stager(&self, pool: &StagingPool, sends: Sends) -> StepStager {
        let device_bytes = BYTES as u64 / 2;
        match sends {
            Sends::Everything => StepStager::new(&self.device, pool, device_bytes).unwrap(),
            Sends::Changes => StepStager::with_scatter(pool.device(), pool, device_bytes).unwrap(),
        }
    }
}

/// Graphs over a batch, replayed for many steps of other sequences, tables and lengths.
fn captured_steps_arrive(gpu: &Gpu, gathers: Gathers) {
    let steps = if gpu.device.virtual_now().is_some() { 40 } else { 4000 };
    let table = |width, block_tokens, null_block| BatchTable {
        width,
        block_tokens,
        null_block,
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
    machine::pattern(number, BYTES)
}

fn stalled_steps_arrive(gpu: &Gpu, reader: Reader) {
    let pool = gpu.pool(2);
    for _ in 0..50 {
        let arrived = gpu.stage_two(&pool, reader);
        // `assert_eq!` would print both buffers.
        assert!(arrived == [pattern(0), pattern(1)], "a step was overwritten");
        pool.drain().unwrap();
    }
    assert_eq!((pool.live(), pool.leaked()), (0, 0));
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

/// Rows of the tables of each path: self-attention, cross-attention, beams (two per sequence),
/// draft.
const PATHS: [usize; 4] = [4, 4, 8, 4];
const PATH_COLUMNS: usize = 64;

/// The received data of each path, and the expected data.
type Paths = Vec<(Vec<i32>, Vec<i32>)>;

/// Edits and stages the tables of every path, and lets a kernel log them; returns the expected
/// data.
fn stage_paths(
    gpu: &Gpu,
    stager: &mut StepStager,
    tables: &mut [BlockTable; 4],
    logs: &[DeviceBuffer; 4],
) -> [Vec<i32>; 4] {
    for table in tables.iter_mut() {
        for slot in 0..table.rows() {
            let block = table.len(row_at(slot)).unwrap() as i32 * 100 + slot as i32;
            table.append(row_at(slot), block).unwrap();
        }
    }
    let mut step = stager.begin().unwrap();
    let parts = tables.each_ref().map(|table| {
        let slots: Vec<usize> = (0..table.rows()).collect();
        step.block_rows(table, &rows_at(&slots), PATH_COLUMNS).unwrap()
    });
    let staged = step.submit(&gpu.stream).unwrap();
    for (part, log) in parts.into_iter().zip(logs) {
        gpu.launch_copy(log.span(), staged.span(part).unwrap().address()).unwrap();
    }
    tables.each_ref().map(|table| table.as_slice().to_vec())
}

/// Stages every path twice behind a stall.
fn stage_paths_stalled(gpu: &Gpu, pool: &StagingPool, sends: Sends) -> [Paths; 2] {
    let mut stager = gpu.stager(pool, sends);
    let mut tables = PATHS.map(|slots| BlockTable::new(slots, PATH_COLUMNS).unwrap());
    // Allocated beforehand, because an allocation may wait for the device.
    let logs = [0; 2].map(|_| PATHS.map(|slots| gpu.memory((slots * PATH_COLUMNS * 4) as u64)));
    let right = gpu.stalled(pool, |fills| {
        // The very first step is sent completely.
        stage_paths(gpu, &mut stager, &mut tables, &logs[0]);
        gpu.stream.synchronize().unwrap();
        gpu.while_busy(fills, || {
            logs.each_ref().map(|logs| stage_paths(gpu, &mut stager, &mut tables, logs))
        })
    });
    let read = |log: &DeviceBuffer| bytemuck::pod_collect_to_vec(&gpu.read(log.span()));
    let arrived = logs.each_ref().map(|logs| logs.each_ref().map(read));
    let mut steps = arrived.into_iter().zip(right);
    [0; 2].map(|_| {
        let (arrived, right) = steps.next().unwrap();
        arrived.into_iter().zip(right).collect()
    })
}

fn stalled_paths_arrive(gpu: &Gpu, sends: Sends) {
    for _ in 0..10 {
        let pool = gpu.pool(2);
        for (step, paths) in stage_paths_stalled(gpu, &pool, sends).into_iter().enumerate() {
            for (path, (arrived, right)) in paths.into_iter().enumerate() {
                assert!(arrived == right, "path {path} of step {step} was overwritten");
            }
        }
        pool.close().unwrap();
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
fn stalled_paths_are_overwritten(gpu: &Gpu, sends: Sends) {
    let pool = gpu.pool(2);
    pool.sabotage_reuse_before_event();
    let [first, _] = stage_paths_stalled(gpu, &pool, sends);
    for (path, (arrived, right)) in first.into_iter().enumerate() {
        assert!(arrived != right, "path {path}: the test would not see the bug it is for");
    }
}

const SLOTS: usize = 16;
const COLUMNS: usize = 128;
/// Bytes of the largest table of a step.
const TABLE_BYTES: u64 = (SLOTS * COLUMNS * size_of::<i32>()) as u64;
/// Number of steps between two checks of the received data.
const LOG: usize = 256;

fn iterations() -> usize {
    match std::env::var("KV_STAGE_ITERATIONS") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => 100_000,
    }
}

fn long_runs(gpu: &Gpu, sends: Sends) {
    for depth in 1..=4 {
        run_at(gpu, depth, sends);
    }
}

/// Sequences that arrive, grow and leave, each with a row of the table.
struct Batch {
    table: BlockTable,
    rows: Vec<usize>,
    free: Vec<usize>,
    random: Random,
}

impl Batch {
    fn new(seed: usize) -> Self {
        let table = BlockTable::new(SLOTS, COLUMNS).unwrap();
        let free = (0..SLOTS).collect();
        Self { table, rows: Vec::new(), free, random: Random(seed as u64) }
    }

    fn advance(&mut self) {
        if self.random.below(8) == 0
            && let Some(slot) = self.free.pop()
        {
            self.rows.push(slot);
            for _ in 0..self.random.below(COLUMNS as u64 / 2) {
                self.grow(slot);
            }
        }
        for _ in 0..self.random.below(4) {
            let row = self.random.below(SLOTS as u64) as usize;
            let Some(&slot) = self.rows.get(row) else { continue };
            if self.table.len(row_at(slot)).unwrap() == COLUMNS || self.random.below(16) == 0 {
                self.table.clear_row(row_at(slot)).unwrap();
                self.free.push(self.rows.swap_remove(row));
            } else {
                self.grow(slot);
            }
        }
    }

    fn grow(&mut self, slot: usize) {
        self.table.append(row_at(slot), self.random.below(1 << 30) as i32).unwrap();
    }

    fn width(&self) -> usize {
        self.rows.iter().map(|&slot| self.table.len(row_at(slot)).unwrap()).max().unwrap_or(0)
    }

    /// The rows as the device should see them.
    fn expected(&self, row_entries: usize) -> Vec<i32> {
        let row = |&slot: &usize| &self.table.row(row_at(slot)).unwrap()[..row_entries];
        self.rows.iter().flat_map(row).copied().collect()
    }
}

/// Runs many steps with the host `depth` steps ahead; a kernel logs each staged table.
fn run_at(gpu: &Gpu, depth: usize, sends: Sends) {
    // Exactly as many buffers as the depth needs: if one more were live, a step would find none.
    let pool = gpu.pool(depth + 1);
    let mut stager = gpu.stager(&pool, sends);
    let mut batch = Batch::new(depth);
    let log = gpu.memory(LOG as u64 * TABLE_BYTES);
    let mut spare: Vec<Event> = (0..=depth).map(|_| Event::new(&gpu.device).unwrap()).collect();
    let mut ahead: VecDeque<Event> = VecDeque::new();
    let mut expected: Vec<Vec<i32>> = Vec::new();
    let mut changes_only = 0;
    let pinned_bytes = pool.pinned_bytes();
    let iterations = iterations();
    for iteration in 0..iterations {
        if ahead.len() == depth {
            let event = ahead.pop_front().unwrap();
            event.synchronize().unwrap();
            spare.push(event);
        }
        batch.advance();
        let mut step = stager.begin().unwrap();
        let rows = step.block_rows(&batch.table, &rows_at(&batch.rows), batch.width()).unwrap();
        step.array(&[iteration as u64]).unwrap();
        let staged = step.submit(&gpu.stream).unwrap();
        changes_only += usize::from(staged.words() > 0);
        expected.push(batch.expected(staged.row_entries(rows).unwrap()));
        let span = staged.span(rows).unwrap();
        let place = (iteration % LOG) as u64 * TABLE_BYTES;
        if span.bytes() > 0 {
            gpu.launch_copy(log.span().slice(place, span.bytes()).unwrap(), span.address())
                .unwrap();
        }
        let event = spare.pop().unwrap();
        event.record(&gpu.stream).unwrap();
        ahead.push_back(event);
        if expected.len() == LOG || iteration + 1 == iterations {
            check(&gpu.read(log.span()), &mut expected, iteration);
        }
    }
    assert_eq!(pool.pinned_bytes(), pinned_bytes);
    let least = if sends == Sends::Changes { iterations / 2 } else { 0 };
    assert!(changes_only >= least, "{changes_only} steps sent changes only");
    pool.close().unwrap();
}

/// Compares the tables logged since the last check.
fn check(logged: &[u8], expected: &mut Vec<Vec<i32>>, iteration: usize) {
    for (entry, right) in logged.chunks_exact(TABLE_BYTES as usize).zip(expected.drain(..)) {
        let right: &[u8] = bytemuck::cast_slice(&right);
        assert!(entry[..right.len()] == *right, "a table was wrong, by iteration {iteration}");
    }
}
