//! A device that is steps behind, as in practice. Every driver call is refused once at every
//! position, and a long run must not accumulate resources.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "support/rows.rs"]
mod rows;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use cuda_driver::{Device, DeviceBuffer, ErrorCode, Event, Stream};
use cuda_sim::{Pace, SimConfig, SimDriver};
use kv_stage::{
    BlockTable, PoolOptions, StagingOptions, StagingPool, StepStager, error::AcquireError,
};
use rows::{row_at, rows_at};

/// Number of allocated bytes.
static BYTES: AtomicI64 = AtomicI64::new(0);

struct Counted;

// SAFETY: every call is passed to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const SLOTS: usize = 4;
const COLUMNS: usize = 32;
const DEVICE_BYTES: u64 = 4096;
const NOTE_BYTES: usize = 64;

/// Sends tables by a stager and notes by a pool, `depth` steps ahead of a device as slow as is
/// legal. A refused step is sent again with the next one.
struct Run {
    device: Device,
    compute: Stream,
    /// The stream that also reads notes.
    side: Stream,
    pool: StagingPool,
    notes: StagingPool,
    stager: StepStager,
    table: BlockTable,
    /// The contents of the last sent steps, copied by work on their streams.
    seen: [DeviceBuffer; 3],
    expected: [Option<Vec<u8>>; 3],
    ahead: VecDeque<[Event; 2]>,
    spare: Vec<[Event; 2]>,
    depth: usize,
    step: u64,
}

/// Events and streams belong to the test itself. Only refusals of this crate's calls matter.
fn keep_trying<T, E: std::fmt::Debug>(mut call: impl FnMut() -> Result<T, E>) -> T {
    match call() {
        Ok(done) => done,
        Err(_) => call().unwrap(),
    }
}

impl Run {
    fn new(sim: &SimDriver, depth: usize) -> Self {
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let [compute, side] = [0; 2].map(|_| Stream::new(&device).unwrap());
        let buffer_bytes = StepStager::buffer_bytes(DEVICE_BYTES);
        let pool =
            StagingPool::new(&device, StagingOptions::overlapped(buffer_bytes, depth)).unwrap();
        let small = StagingOptions::overlapped(NOTE_BYTES as u64, depth);
        let options = PoolOptions { slab_bytes: 256, ..PoolOptions::new(vec![small]) };
        let notes = StagingPool::with_classes(&device, &options).unwrap();
        let stager = StepStager::with_scatter(pool.device(), &pool, DEVICE_BYTES).unwrap();
        let table = BlockTable::new(SLOTS, COLUMNS).unwrap();
        let bytes = [(SLOTS * COLUMNS * 4) as u64, NOTE_BYTES as u64, NOTE_BYTES as u64];
        let seen = bytes.map(|bytes| DeviceBuffer::alloc(&device, bytes).unwrap());
        let event = || Event::new(&device).unwrap();
        let spare = (0..=depth).map(|_| [event(), event()]).collect();
        let ahead = VecDeque::new();
        let expected = [None, None, None];
        Self {
            device,
            compute,
            side,
            pool,
            notes,
            stager,
            table,
            seen,
            expected,
            ahead,
            spare,
            depth,
            step: 0,
        }
    }

    /// One step; returns whether nothing was refused.
    fn step(&mut self) -> bool {
        self.step += 1;
        let step = self.step;
        if self.ahead.len() == self.depth
            && let Some(events) = self.ahead.pop_front()
        {
            events.iter().for_each(|event| keep_trying(|| event.synchronize()));
            self.spare.push(events);
        }
        let slot = (step % SLOTS as u64) as usize;
        if self.table.len(row_at(slot)).unwrap() == COLUMNS {
            self.table.clear_row(row_at(slot)).unwrap();
        }
        self.table.append(row_at(slot), step as i32).unwrap();
        // One of the two is enough to continue.
        let sent = [self.send_table(), self.send_note(step)];
        if let Some(events) = self.spare.pop() {
            for (event, stream) in events.iter().zip([&self.compute, &self.side]) {
                keep_trying(|| event.record(stream));
            }
            self.ahead.push_back(events);
        }
        sent == [true; 2]
    }

    fn send_table(&mut self) -> bool {
        let mut step = match self.stager.begin_wait() {
            Ok(step) => step,
            Err(AcquireError::Exhausted { .. } | AcquireError::Device(_)) => return false,
            Err(error) => panic!("{error}"),
        };
        let rows = step.block_rows(&self.table, &rows_at(&[0, 1, 2, 3]), COLUMNS).unwrap();
        let Ok(staged) = step.submit(&self.compute) else { return false };
        assert_eq!(staged.row_entries(rows), Ok(COLUMNS));
        let rows = staged.span(rows).unwrap();
        if self.compute.copy_on_device(self.seen[0].span(), rows).is_err() {
            return false;
        }
        self.expected[0] = Some(bytemuck::cast_slice(self.table.as_slice()).to_vec());
        true
    }

    /// A note that two streams read.
    fn send_note(&mut self, step: u64) -> bool {
        let Ok(mut buffer) = self.notes.acquire_wait() else { return false };
        let note = [step as u8; NOTE_BYTES];
        buffer.bytes_mut().copy_from_slice(&note);
        let [_, near, far] = &self.seen;
        let mut read = [false; 2];
        let submitted = buffer.submit(&self.compute, |view| {
            view.copy_to_device(near.span(), 0)?;
            read[0] = true;
            view.copy_to_device_on(&self.side, far.span(), 0)?;
            read[1] = true;
            Ok::<_, cuda_driver::CopyError>(())
        });
        // Enqueued work runs, whatever else was refused.
        for (place, read) in read.into_iter().enumerate() {
            if read {
                self.expected[1 + place] = Some(note.to_vec());
            }
        }
        submitted.is_ok()
    }

    /// Runs everything, compares the received data, and closes; returns whether no close was
    /// refused.
    fn end(mut self) -> bool {
        for stream in [&self.compute, &self.side] {
            keep_trying(|| stream.synchronize());
        }
        for (seen, expected) in self.seen.iter().zip(&self.expected) {
            let Some(expected) = expected else { continue };
            let mut arrived = vec![0; expected.len()];
            keep_trying(|| self.compute.download(&mut arrived, seen.span()));
            assert!(arrived == *expected, "wrong bytes at step {}", self.step);
        }
        assert_eq!(self.device.poison(), None);
        let Self { device, pool, notes, .. } = self;
        self.ahead.clear();
        drop((self.stager, self.seen, self.spare, self.ahead, self.compute, self.side));
        let closed = [pool.close().is_ok(), notes.close().is_ok()];
        // The last handle tries a temporarily refused call again.
        drop(device);
        closed == [true; 2]
    }
}

const STEPS: u64 = 10;

fn machine(pace: Pace) -> SimDriver {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    sim.set_pace(pace);
    sim
}

/// Number of calls of a run after its set-up.
fn calls_of_a_run(depth: usize) -> BTreeMap<&'static str, u64> {
    let sim = machine(Pace::Slowest);
    let mut run = Run::new(&sim, depth);
    let before = sim.calls();
    assert!((0..STEPS).all(|_| run.step()), "a step was refused");
    assert!(run.end());
    let made =
        |(call, count): (&'static str, u64)| (call, count - before.get(call).copied().unwrap_or(0));
    sim.calls().into_iter().map(made).filter(|(_, count)| *count > 0).collect()
}

/// The error codes with which `call` may be refused. A call that ends an object is refused only with
/// a code that says that it had no effect: after any other code the object may be gone, so the crate
/// does not repeat the call, and the driver may leak.
fn codes(call: &str) -> &'static [ErrorCode] {
    match ["Destroy", "Free", "Release", "Unload"].iter().any(|end| call.contains(end)) {
        true => &[ErrorCode::OUT_OF_MEMORY],
        false => &[ErrorCode::UNKNOWN, ErrorCode::OUT_OF_MEMORY],
    }
}

#[test]
fn a_refusal_of_any_call_at_any_place_harms_nothing_and_the_run_goes_on() {
    let mut tried = 0;
    for depth in [1, 2] {
        for (call, count) in calls_of_a_run(depth) {
            for nth in 1..=count {
                for &code in codes(call) {
                    let sim = machine(Pace::Slowest);
                    let mut run = Run::new(&sim, depth);
                    sim.fail_nth(call, nth, code);
                    let refused = (0..STEPS).filter(|_| !run.step()).count();
                    assert!(refused <= 1, "{call} {nth} at depth {depth}: {refused} steps");
                    let step = run.step;
                    run.end();
                    let at = format!("{call} {nth}, {code}, at depth {depth}");
                    assert_eq!((sim.findings(), step), (vec![], STEPS), "{at}");
                    let leaks = sim.check_leaks();
                    assert!(leaks.is_clean(), "{at}: {leaks}");
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 1_000, "{tried}");
}

/// Number of event queries of the machine so far.
fn queries(sim: &SimDriver) -> u64 {
    sim.calls().get("cuEventQuery").copied().unwrap_or(0)
}

#[test]
fn a_long_run_asks_keeps_and_allocates_no_more_at_its_end() {
    const LONG: u64 = 100_000;
    for depth in [1, 2] {
        let sim = machine(Pace::Slowest);
        let mut run = Run::new(&sim, depth);
        let mut settled = None;
        for _ in 0..LONG {
            let before = queries(&sim);
            assert!(run.step());
            // Each pool queries the oldest buffer of each stream, and the next one after each
            // completed buffer.
            let asked = queries(&sim) - before;
            assert!(asked <= 8 * (depth as u64 + 1), "{asked} queries in step {}", run.step);
            assert!(run.pool.live() + run.notes.live() <= 2 * (depth + 1));
            // Tables remember a bounded number of edits, and buffers have prepared launches.
            if run.step == LONG / 10 {
                settled = Some((BYTES.load(Ordering::Relaxed), sim.calls().len()));
            }
        }
        let (bytes, _) = settled.unwrap();
        let grown = BYTES.load(Ordering::Relaxed) - bytes;
        assert!(grown < 1 << 16, "{grown} bytes more");
        assert_eq!(sim.pinned_bytes(), run.pool.pinned_bytes() + run.notes.pinned_bytes());
        assert!(run.end());
        assert_eq!(sim.findings(), []);
        assert!(sim.check_leaks().is_clean());
    }
}

#[test]
fn a_query_that_is_refused_frees_no_buffer() {
    let sim = machine(Pace::Slowest);
    let run = Run::new(&sim, 1);
    let far = DeviceBuffer::alloc(&run.device, NOTE_BYTES as u64).unwrap();
    for byte in [1, 2] {
        let mut buffer = run.notes.acquire().unwrap();
        buffer.bytes_mut().fill(byte);
        buffer.submit(&run.side, |view| view.copy_to_device(far.span(), 0)).unwrap();
    }
    // Both are still read, and one of them cannot be queried.
    sim.fail_nth("cuEventQuery", 1, ErrorCode::UNKNOWN);
    let Err(AcquireError::Device(error)) = run.notes.acquire().map(drop) else {
        panic!("a buffer was recycled under its reader")
    };
    assert_eq!(error.driver_error().code, ErrorCode::UNKNOWN);
    assert_eq!(run.notes.live(), 2);
    drop(run.notes.acquire_wait().unwrap());
    drop(far);
    assert!(run.end());
    assert_eq!(sim.findings(), []);
}
