//! A device that is steps behind, as in practice. Every driver call is refused once at every
//! position, and a long run must not accumulate resources.

use std::collections::{BTreeMap, VecDeque};

use crate::prelude::*;
use kv_testkit::{alloc, machine::calls};

const ROWS: usize = 4;
const COLUMNS: usize = 32;
const NOTE_BYTES: usize = 64;

/// Sends block tables by a batch and notes by a pool, `depth` steps ahead of a device as slow as is
/// legal. A refused step is sent again with the next one.
struct Run {
    device: Device,
    compute: Stream,
    /// The stream that also reads notes.
    side: Stream,
    pool: StagingPool,
    notes: StagingPool,
    batch: DeviceBatch,
    /// The blocks of each row, of one token each, and behind them null block 0.
    table: [[i32; COLUMNS]; ROWS],
    lens: [usize; ROWS],
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
        let table = BatchTable {
            width: COLUMNS as u32,
            block_tokens: 1,
            null_block: BlockId::from(0),
            is_state: false,
        };
        let rows = ROWS as u32;
        let options = BatchOptions {
            rows,
            sequences_max: rows,
            tokens_max: rows,
            tables: vec![table],
            arrays: vec![],
        };
        let packets = StagingOptions::overlapped(options.buffer_bytes(), depth);
        let pool = StagingPool::new(&device, packets).unwrap();
        let small = StagingOptions::overlapped(NOTE_BYTES as u64, depth);
        let notes = StagingPool::new(&device, small).unwrap();
        let batch = DeviceBatch::new(&pool, options).unwrap();
        let bytes = [(ROWS * COLUMNS * 4) as u64, NOTE_BYTES as u64, NOTE_BYTES as u64];
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
            batch,
            table: [[0; COLUMNS]; ROWS],
            lens: [0; ROWS],
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
        let row = (step % ROWS as u64) as usize;
        if self.lens[row] == COLUMNS {
            (self.table[row], self.lens[row]) = ([0; COLUMNS], 0);
        }
        let last = self.lens[row];
        self.table[row][last] = step as i32;
        self.lens[row] += 1;
        self.batch.edit(0, Row::new(row as u32), last as u32, &entries(&[step as i32])).unwrap();
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
        let mut step = match self.batch.step_wait(&self.compute) {
            Ok(step) => step,
            Err(BatchError::Acquire(AcquireError::Closed)) => panic!("nobody closed the pool"),
            Err(BatchError::Acquire(_)) => return false,
            Err(error) => panic!("{error}"),
        };
        for (row, &len) in (0..).zip(&self.lens) {
            let tokens = len.min(1);
            let start = (len - tokens) as u64;
            step.row(Row::new(row), start, start, tokens as u32).unwrap();
        }
        let Ok(staged) = step.submit() else { return false };
        let table = staged.buffers.tables[0].block_table;
        if self.compute.copy_on_device(self.seen[0].span(), table).is_err() {
            return false;
        }
        self.expected[0] = Some(bytemuck::cast_slice(&self.table).to_vec());
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
        drop((self.batch, self.seen, self.spare, self.ahead, self.compute, self.side));
        let closed = [pool.close().is_ok(), notes.close().is_ok()];
        // The last handle tries a temporarily refused call again.
        drop(device);
        closed == [true; 2]
    }
}

const STEPS: u64 = 10;

fn machine(pace: Pace) -> SimDriver {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    sim.register_kernels(kv_stage::references());
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

#[test]
fn a_long_run_asks_keeps_and_allocates_no_more_at_its_end() {
    const LONG: u64 = 100_000;
    for depth in [1, 2] {
        let sim = machine(Pace::Slowest);
        let mut run = Run::new(&sim, depth);
        let mut settled = None;
        for _ in 0..LONG {
            let before = calls(&sim, "cuEventQuery");
            assert!(run.step());
            // Each pool queries the oldest buffer of each stream, and the next one after each
            // completed buffer.
            let asked = calls(&sim, "cuEventQuery") - before;
            assert!(asked <= 8 * (depth as u64 + 1), "{asked} queries in step {}", run.step);
            assert!(run.pool.live() + run.notes.live() <= 2 * (depth + 1));
            if run.step == LONG / 10 {
                settled = Some(alloc::bytes());
            }
        }
        let grown = alloc::bytes() - settled.unwrap();
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
