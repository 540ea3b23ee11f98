//! Cost of staging on a GPU, compared with one copy of the same bytes and with what other systems
//! do, in one run.
//!
//! `cargo bench -p kv-stage --bench stage_gpu`. The table has 256 rows of 2,048 entries. A step
//! also carries sequence lengths (256 of `u32`) and a slot mapping (256 of `i64`). Stream times are
//! measured by events around one submission, behind fills that keep the stream busy until
//! everything is enqueued. Host times are those of the calls. All figures are medians. Then follow
//! the phases of a decode step with its driver calls, and the cost of each such call. `KV_DEVICE=sim` runs it on the simulated device, only to
//! check that it runs: the times mean nothing then.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::{
    CountingDriver, CudaDriver, Device, DeviceBuffer, DeviceSpan, Driver, Event, HostAllocFlags,
    PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::GatherRows;
use kv_kernels::KvKernels;
use kv_stage::{
    BatchOptions, BatchTable, BlockId, DeviceBatch, Row, StagingOptions, StagingPool, TableEntry,
};
use kv_testkit::alloc;

const ROWS: usize = 256;
const COLUMNS: usize = 2048;
const TABLE_BYTES: u64 = (ROWS * COLUMNS * size_of::<i32>()) as u64;
/// Number of rows to which a decode step adds a block.
const CHANGED: usize = 16;
/// Enough bytes for the table and the arrays.
const DEVICE_BYTES: u64 = TABLE_BYTES + (16 << 10);
/// Number of fills of the scratch memory. Together they take longer than any submission takes the
/// host: a millisecond.
const FILLS: usize = 16;
/// Number of buffers of a pool: one more than the depth.
const BUFFERS: usize = 3;

kv_testkit::allocator!(i64::MAX);

fn main() -> ExitCode {
    match open() {
        Ok((device, counting)) => {
            println!("{}, host node {:?}\n", device.info().name, device.host_node());
            // The device's context is always current, as on an engine's threads.
            let all = device.run(|_| {
                Bench::new(&device, counting).all();
                Ok(())
            });
            all.unwrap();
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn simulated() -> bool {
    std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim")
}

fn open() -> Result<(Device, Arc<CountingDriver>), String> {
    let driver: Arc<dyn Driver> = if simulated() {
        let driver = SimDriver::new(SimConfig::default()).map_err(|error| error.to_string())?;
        driver.register_kernels(kv_kernels::references());
        driver.register_kernels(kv_stage::references());
        Arc::new(driver)
    } else {
        Arc::new(CudaDriver::load().map_err(|error| error.to_string())?)
    };
    let counting = Arc::new(CountingDriver::new(driver));
    let device = Device::open(counting.clone(), 0);
    let device = device.map_err(|error| format!("{error}: {error:?}"))?;
    Ok((device, counting))
}

/// The cost of one way of sending.
#[derive(Clone, Copy, Debug)]
struct Cost {
    stream: Duration,
    host: Duration,
}

struct Bench {
    device: Device,
    counting: Arc<CountingDriver>,
    stream: Stream,
    kernels: KvKernels,
    /// Memory that keeps the stream busy while a submission is enqueued.
    scratch: DeviceBuffer,
    start: Event,
    end: Event,
    timings: usize,
}

impl Bench {
    fn new(device: &Device, counting: Arc<CountingDriver>) -> Self {
        let scratch_bytes = if simulated() { 64 } else { 256 << 20 };
        Self {
            device: device.clone(),
            counting,
            stream: Stream::new(device).unwrap(),
            kernels: KvKernels::load(device).unwrap(),
            scratch: DeviceBuffer::alloc(device, scratch_bytes).unwrap(),
            start: Event::with_timing(device).unwrap(),
            end: Event::with_timing(device).unwrap(),
            timings: if simulated() { 5 } else { 301 },
        }
    }

    fn all(&self) {
        println!("| what | sends | stream, µs | of one copy | host, µs |");
        println!("|---|---|---|---|---|");
        let nothing = self.cost(|| {}, || {});
        row("two events and nothing between them", "-", nothing, None);
        let full_bytes = format!("{} KiB", TABLE_BYTES >> 10);
        let copy = self.one_copy(TABLE_BYTES);
        row("full table: one `cuMemcpyHtoDAsync`", &full_bytes, copy, Some(copy));
        let written = self.one_written_copy();
        row("full table: the host writes it, then one copy", &full_bytes, written, Some(copy));
        row(
            "full table: plain gather kernel, pinned source",
            &full_bytes,
            self.gather(),
            Some(copy),
        );
        let full = self.full(1);
        row(
            "full table, lengths and slot mapping: a pool's buffer, one copy",
            &full_bytes,
            full,
            Some(copy),
        );
        row("the same, a copy for each of the three", &full_bytes, self.full(3), Some(copy));
        let fresh = self.pinned_per_call();
        row("the same, pinned memory allocated by each call", &full_bytes, fresh, Some(copy));
        for sequences in [8, ROWS] {
            let (cost, bytes) = self.batch(sequences, true);
            let name = format!(
                "16 entries changed, {sequences} sequences with slots and lengths made on the device: `DeviceBatch`"
            );
            row(&name, &format!("{bytes} B"), cost, Some(copy));
        }
        let (cost, bytes) = self.batch(ROWS, false);
        row(
            "the same without the gather, which a graph has",
            &format!("{bytes} B"),
            cost,
            Some(copy),
        );
        let scattered = self.copy_per_entry();
        row("16 entries changed: a copy for each", "64 B", scattered, Some(copy));
        self.acquire_and_retire();
        self.batch_phases();
        self.driver_calls();
    }

    /// Times `enqueue`, which runs after `prepare`, behind a busy stream.
    fn cost(&self, mut prepare: impl FnMut(), mut enqueue: impl FnMut()) -> Cost {
        let (mut streams, mut hosts) = (Vec::new(), Vec::new());
        for timing in 0..=self.timings {
            prepare();
            self.stream.synchronize().unwrap();
            for _ in 0..FILLS {
                self.stream.fill(self.scratch.span(), 0).unwrap();
            }
            self.start.record(&self.stream).unwrap();
            let begun = Instant::now();
            enqueue();
            let host = begun.elapsed();
            self.end.record(&self.stream).unwrap();
            self.end.synchronize().unwrap();
            // The first round warms up.
            if timing > 0 {
                let ms = self.end.elapsed_ms_since(&self.start).unwrap();
                streams.push(Duration::from_secs_f64(f64::from(ms) / 1e3));
                hosts.push(host);
            }
        }
        Cost { stream: median(streams), host: median(hosts) }
    }

    fn pinned(&self, bytes: u64) -> PinnedBuffer {
        PinnedBuffer::alloc(&self.device, bytes, HostAllocFlags::CACHED).unwrap()
    }

    fn memory(&self, bytes: u64) -> DeviceBuffer {
        DeviceBuffer::alloc(&self.device, bytes).unwrap()
    }

    fn one_copy(&self, bytes: u64) -> Cost {
        let (source, target) = (self.pinned(bytes), self.memory(bytes));
        self.cost(|| {}, || self.stream.copy_to_device(target.span(), &source, 0).unwrap())
    }

    /// One copy of bytes that the host has just written, as before every step: they come from the
    /// processor's caches.
    fn one_written_copy(&self) -> Cost {
        let (mut source, target) = (self.pinned(TABLE_BYTES), self.memory(TABLE_BYTES));
        let (table, ..) = arrays();
        let enqueue = || {
            source.write_at(0, bytemuck::cast_slice(&table)).unwrap();
            self.stream.copy_to_device(target.span(), &source, 0).unwrap();
        };
        self.cost(|| {}, enqueue)
    }

    /// What other engines do: a kernel reads the rows from a persistent pinned table.
    fn gather(&self) -> Cost {
        let source = self.pinned(TABLE_BYTES);
        let (out, index) = (self.memory(TABLE_BYTES), self.memory(ROWS as u64 * 4));
        let rows: Vec<u32> = (0..ROWS as u32).rev().collect();
        self.stream.upload(index.span(), bytemuck::cast_slice(&rows)).unwrap();
        // SAFETY: the range is a live pinned allocation that kernels may read. The kernel only
        // reads it, and no other code writes it. It outlives the launches, each of which is waited
        // for.
        let table = unsafe { DeviceSpan::from_raw(source.device_address(), TABLE_BYTES) }.unwrap();
        let gather = GatherRows {
            out: out.span(),
            out_stride: COLUMNS as u64,
            table,
            table_stride: COLUMNS as u64,
            row_index: index.span(),
            rows: ROWS as u32,
            width: COLUMNS as u32,
            table_rows: ROWS as u32,
        };
        self.cost(|| {}, || self.kernels.gather_rows(&self.stream, gather).unwrap())
    }

    fn pool(&self) -> StagingPool {
        let options = StagingOptions { buffer_bytes: DEVICE_BYTES, buffers_max: BUFFERS };
        StagingPool::new(&self.device, options).unwrap()
    }

    /// The whole table and the arrays from a buffer of a pool, from writing them to the event, in that many copies.
    fn full(&self, copies: usize) -> Cost {
        let pool = self.pool();
        let target = self.memory(DEVICE_BYTES);
        let (table, lens, slots) = arrays();
        let parts: [&[u8]; 3] = [
            bytemuck::cast_slice(&table),
            bytemuck::cast_slice(&lens),
            bytemuck::cast_slice(&slots),
        ];
        let bytes: Vec<u64> = parts.iter().map(|part| part.len() as u64).collect();
        let sent = if copies == 1 { vec![bytes.iter().sum()] } else { bytes };
        self.cost(
            || {},
            || {
                let mut buffer = pool.acquire().unwrap();
                let mut offset = 0;
                for part in parts {
                    buffer.write_at(offset, part).unwrap();
                    offset += part.len() as u64;
                }
                let copies = |view: &kv_stage::SubmittedView<'_>| {
                    let mut offset = 0;
                    for &bytes in &sent {
                        view.copy_to_device(target.span().slice(offset, bytes)?, offset)?;
                        offset += bytes;
                    }
                    Ok::<_, cuda_driver::CopyError>(())
                };
                buffer.submit(&self.stream, copies).unwrap();
            },
        )
    }

    /// The same bytes from pinned memory that each call allocates. The time does not include
    /// freeing it.
    fn pinned_per_call(&self) -> Cost {
        let target = self.memory(DEVICE_BYTES);
        let (table, lens, slots) = arrays();
        let lens_at = TABLE_BYTES;
        let slots_at = lens_at + ROWS as u64 * 4;
        let all = target.span().slice(0, slots_at + ROWS as u64 * 8).unwrap();
        let kept = std::cell::Cell::new(None);
        self.cost(
            || {
                kept.set(None);
                self.device.free_retired().unwrap();
            },
            || {
                let mut buffer = self.pinned(all.bytes());
                buffer.write_at(0, bytemuck::cast_slice(&table)).unwrap();
                buffer.write_at(lens_at, bytemuck::cast_slice(&lens)).unwrap();
                buffer.write_at(slots_at, bytemuck::cast_slice(&slots)).unwrap();
                self.stream.copy_to_device(all, &buffer, 0).unwrap();
                kept.set(Some(buffer));
            },
        )
    }

    fn batch_of(&self, pool: &mut Option<StagingPool>) -> DeviceBatch {
        let table = BatchTable {
            width: COLUMNS as u32,
            block_tokens: 16,
            null_block: BlockId::from(0),
            is_state: false,
        };
        let options = BatchOptions {
            rows: ROWS as u32,
            sequences_max: ROWS as u32,
            tokens_max: ROWS as u32,
            tables: vec![table],
            arrays: Vec::new(),
        };
        let staging = StagingOptions { buffer_bytes: options.buffer_bytes(), buffers_max: BUFFERS };
        let pool = pool.insert(StagingPool::new(&self.device, staging).unwrap());
        let mut batch = DeviceBatch::new(pool, options).unwrap();
        for row in 0..ROWS as u32 {
            let ids: Vec<_> = (0..COLUMNS as u16).map(TableEntry::from).collect();
            batch.edit(0, Row::new(row), 0, &ids).unwrap();
        }
        batch.step_wait(&self.stream).unwrap().submit().unwrap();
        batch
    }

    /// A decode step of that many sequences whose rows are full but for one token. 16 rows get a block.
    fn batch(&self, sequences: usize, gathers: bool) -> (Cost, u64) {
        let mut pool = None;
        let mut batch = self.batch_of(&mut pool);
        let (mut number, mut sent) = (0, 0);
        let cost = self.cost(
            || {},
            || {
                number += 1;
                for change in 0..CHANGED {
                    let row = Row::new(((change * (ROWS / CHANGED) + number) % ROWS) as u32);
                    batch.edit(0, row, (number % COLUMNS) as u32, &[entry(number)]).unwrap();
                }
                let mut step = batch.step(&self.stream).unwrap();
                for row in 0..sequences as u32 {
                    let tokens = COLUMNS as u64 * 16 - 1;
                    step.row(Row::new(row), tokens, tokens, 1).unwrap();
                }
                let staged = if gathers { step.submit() } else { step.submit_inputs() };
                sent = staged.unwrap().bytes;
            },
        );
        (cost, sent)
    }

    /// The parts of the host's time of a batch's step, its driver calls and allocations.
    fn batch_phases(&self) {
        let mut pool = None;
        let mut batch = self.batch_of(&mut pool);
        let (mut number, mut times) = (0, [const { Vec::new() }; 4]);
        let (mut calls, mut steps) = (std::collections::BTreeMap::new(), 0);
        let mut allocations = 0;
        self.cost(
            || {},
            || {
                let before = self.counting.calls();
                let allocated = alloc::allocations();
                number += 1;
                let mut laps = [Instant::now(); 5];
                for change in 0..CHANGED {
                    let row = Row::new(((change * (ROWS / CHANGED) + number) % ROWS) as u32);
                    batch.edit(0, row, (number % COLUMNS) as u32, &[entry(number)]).unwrap();
                }
                laps[1] = Instant::now();
                let mut step = batch.step(&self.stream).unwrap();
                laps[2] = Instant::now();
                for row in 0..ROWS as u32 {
                    let tokens = COLUMNS as u64 * 16 - 1;
                    step.row(Row::new(row), tokens, tokens, 1).unwrap();
                }
                laps[3] = Instant::now();
                step.submit().unwrap();
                laps[4] = Instant::now();
                let allocated = alloc::allocations() - allocated;
                for (times, lap) in times.iter_mut().zip(laps.windows(2)) {
                    times.push(lap[1] - lap[0]);
                }
                // The first steps fill the pool's lists.
                if number > 2 * BUFFERS {
                    steps += 1;
                    allocations += allocated;
                    for (call, count) in self.counting.calls() {
                        let made = count - before.get(call).copied().unwrap_or(0);
                        *calls.entry(call).or_insert(0) += made;
                    }
                }
            },
        );
        println!("\n| phase of a batch's step, 256 sequences | host, µs |");
        println!("|---|---|");
        let names = ["16 edits", "acquire a buffer", "256 rows", "submit"];
        for (name, times) in names.into_iter().zip(times) {
            println!("| {name} | {:.2} |", micros(median(times)));
        }
        calls.retain(|_, count| *count > 0);
        let each =
            |(call, count): (&str, u64)| format!("{call} {:.2}", count as f64 / f64::from(steps));
        println!(
            "\nA step: {:.2} allocations; driver calls {}",
            allocations as f64 / f64::from(steps),
            calls.into_iter().map(each).collect::<Vec<_>>().join(", ")
        );
    }

    /// The cost of a step's calls on the host, behind a busy stream, through the handles.
    fn driver_calls(&self) {
        println!("\n| call through the handles, behind a busy stream | stream, µs | host, µs |");
        println!("|---|---|---|");
        let show = |name: &str, cost: Cost| {
            println!("| {name} | {:.1} | {:.2} |", micros(cost.stream), micros(cost.host));
        };
        let nothing = || {};
        show("read the clock twice", self.cost(nothing, || {}));
        show("bind the context", self.cost(nothing, || self.device.run(|_| Ok(())).unwrap()));
        let done = Event::new(&self.device).unwrap();
        show("record an event", self.cost(nothing, || done.record(&self.stream).unwrap()));
        let record = || done.record(&self.stream).unwrap();
        show(
            "ask for a complete event",
            self.cost(record, || assert!(done.is_complete().unwrap())),
        );
        let pending = Event::new(&self.device).unwrap();
        let late = self.cost(nothing, || {
            pending.record(&self.stream).unwrap();
            let _ = pending.is_complete().unwrap();
        });
        show("record an event and ask for it, pending", late);
        let (source, target) = (self.pinned(8 << 10), self.memory(DEVICE_BYTES));
        let out = target.span();
        let part = out.slice(0, 320).unwrap();
        let copy = || self.stream.copy_to_device(part, &source, 0).unwrap();
        show("copy 320 B", self.cost(nothing, copy));
    }

    /// The 16 entries with 16 copies from one buffer.
    fn copy_per_entry(&self) -> Cost {
        let pool = self.pool();
        let target = self.memory(TABLE_BYTES);
        self.cost(
            || {},
            || {
                let mut buffer = pool.acquire().unwrap();
                buffer.write_at(0, &[7; CHANGED * 4]).unwrap();
                let copies = |view: &kv_stage::SubmittedView<'_>| {
                    (0..CHANGED as u64).try_for_each(|entry| {
                        let row = TABLE_BYTES / CHANGED as u64;
                        view.copy_to_device(target.span().slice(entry * row, 4)?, entry * 4)
                    })
                };
                buffer.submit(&self.stream, copies).unwrap();
            },
        )
    }

    /// Taking and retiring a buffer: the event recorded by the submission, and the later query.
    fn acquire_and_retire(&self) {
        let pool = self.pool();
        let rounds = if simulated() { 100 } else { 20_000 };
        let mut times = Vec::new();
        for _ in 0..rounds {
            let begun = Instant::now();
            let buffer = pool.acquire().unwrap();
            buffer.submit(&self.stream, |_| Ok::<_, std::convert::Infallible>(())).unwrap();
            times.push(begun.elapsed());
            self.stream.synchronize().unwrap();
        }
        let cost = Cost { stream: Duration::ZERO, host: median(times) };
        row("acquire, submit without a reader, retire", "-", cost, None);
        pool.close().unwrap();
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn entry(number: usize) -> TableEntry {
    TableEntry::from(number as u16)
}

fn row(what: &str, sends: &str, cost: Cost, copy: Option<Cost>) {
    let ratio = copy
        .map_or("-".to_owned(), |copy| format!("{:.3}", micros(cost.stream) / micros(copy.stream)));
    let stream = match cost.stream {
        Duration::ZERO => "-".to_owned(),
        stream => format!("{:.1}", micros(stream)),
    };
    println!("| {what} | {sends} | {stream} | {ratio} | {:.2} |", micros(cost.host));
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

/// A full block table, lengths and a slot mapping.
fn arrays() -> (Vec<i32>, Vec<u32>, Vec<i64>) {
    ((0..(ROWS * COLUMNS) as i32).collect(), vec![30_000; ROWS], (0..ROWS as i64).collect())
}
