//! Long overlapped runs: the number of live buffers, allocations, and the received data.

use std::collections::VecDeque;

use crate::rows::{row_at, rows_at};
use cuda_driver::{DeviceBuffer, Event, Stream};
use cuda_sim::Pace;
use kv_stage::{BlockTable, StagingPool, StepStager, error::AcquireError};

use crate::machine::{Machine, Random, pattern};

/// Number of steps of each run; `KV_STAGE_ITERATIONS` sets another number.
const ITERATIONS: usize = 100_000;
const SLOTS: usize = 6;
const COLUMNS: usize = 16;
/// Number of steps between two checks of the received data.
const LOG: usize = 64;
const DEVICE_BYTES: u64 = 4096;

fn iterations() -> usize {
    match std::env::var("KV_STAGE_ITERATIONS") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => ITERATIONS,
    }
}

/// Lets a sequence arrive, grow or leave.
fn edit(table: &mut BlockTable, random: &mut Random) {
    let slot = random.below(SLOTS as u64) as usize;
    if table.len(row_at(slot)).unwrap() == COLUMNS || random.below(8) == 0 {
        table.clear_row(row_at(slot)).unwrap();
    } else {
        table.append(row_at(slot), random.below(1 << 30) as i32).unwrap();
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sends {
    Everything,
    Changes,
}

/// Number of buffers that a pool has beyond those that the depth needs.
const MORE: usize = 3;

/// Number of buffers that are submitted and still read. Asked with every free buffer taken, so that
/// the pool queries all events.
fn read_still(pool: &StagingPool) -> usize {
    let mut held = Vec::new();
    loop {
        match pool.acquire() {
            Ok(buffer) => held.push(buffer),
            Err(AcquireError::Exhausted { live, .. }) => return live - held.len(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Runs many steps with the host `depth` steps ahead; a kernel logs each staged table.
///
/// A pool of `depth + 1` buffers finds one for every step. One that has `more` must not need them.
fn run_at(depth: usize, sends: Sends, more: usize) {
    let machine = Machine::new(depth as u64);
    let pool = machine.pool(StepStager::buffer_bytes(DEVICE_BYTES), depth + 1 + more);
    let mut stager = match sends {
        Sends::Everything => StepStager::new(&machine.device, &pool, DEVICE_BYTES).unwrap(),
        Sends::Changes => StepStager::with_scatter(pool.device(), &pool, DEVICE_BYTES).unwrap(),
    };
    let mut table = BlockTable::new(SLOTS, COLUMNS).unwrap();
    let address = table.as_slice().as_ptr();
    let log = machine.memory((LOG * SLOTS * COLUMNS * 4) as u64);
    let row_bytes = (SLOTS * COLUMNS * 4) as u64;
    let mut random = Random(depth as u64);
    let mut spare: Vec<Event> = (0..=depth).map(|_| Event::new(&machine.device).unwrap()).collect();
    let mut ahead = VecDeque::new();
    let mut expected: Vec<i32> = Vec::new();
    let mut changes_only = 0;
    let allocating = ["cuMemHostRegister", "cuMemAlloc", "cuEventCreate"];
    let before = allocating.map(|call| machine.calls(call));
    let pinned_bytes = pool.pinned_bytes();

    // Checking all buffers takes long.
    let iterations = if more > 0 { iterations() / 10 } else { iterations() };
    for iteration in 0..iterations {
        if ahead.len() == depth {
            let event: Event = ahead.pop_front().unwrap();
            event.synchronize().unwrap();
            spare.push(event);
        }
        edit(&mut table, &mut random);
        let mut step = stager.begin().unwrap();
        let rows = step.block_rows(&table, &rows_at(&[0, 1, 2, 3, 4, 5]), COLUMNS).unwrap();
        let staged = step.submit(&machine.stream).unwrap();
        changes_only += usize::from(staged.words() > 0);
        expected.extend_from_slice(table.as_slice());
        let entry = log.span().slice((iteration % LOG) as u64 * row_bytes, row_bytes).unwrap();
        let source = staged.span(rows).unwrap().address();
        machine.launch_copy(&machine.stream, entry, source).unwrap();
        let event = spare.pop().unwrap();
        event.record(&machine.stream).unwrap();
        ahead.push_back(event);
        if more > 0 {
            let live = read_still(&pool);
            assert!(live <= depth + 1, "{live} live at depth {depth}, at {iteration}");
        }
        if expected.len() == LOG * SLOTS * COLUMNS {
            let arrived = machine.read(log.span());
            assert_eq!(arrived, bytemuck::cast_slice::<i32, u8>(&expected), "at {iteration}");
            expected.clear();
        }
    }
    assert_eq!(allocating.map(|call| machine.calls(call)), before);
    assert_eq!((pool.pinned_bytes(), machine.sim.pinned_bytes()), (pinned_bytes, pinned_bytes));
    assert_eq!(table.as_slice().as_ptr(), address);
    // Edits of an empty row that change nothing send nothing.
    let least = if sends == Sends::Changes { iterations / 2 } else { 0 };
    assert!(changes_only >= least, "{changes_only} steps sent changes only");
    assert!(machine.sim.findings().is_empty());
}

#[test]
fn depth_plus_one_buffers_serve_every_step_and_every_table_arrives() {
    for depth in 1..=4 {
        run_at(depth, Sends::Everything, 0);
    }
}

#[test]
fn the_same_holds_where_changes_only_are_sent() {
    for depth in 1..=4 {
        run_at(depth, Sends::Changes, 0);
    }
}

#[test]
fn no_more_than_depth_plus_one_buffers_live_though_there_are_more() {
    for depth in 1..=4 {
        run_at(depth, Sends::Everything, MORE);
    }
}

#[test]
fn one_buffer_less_than_the_depth_needs_is_too_few() {
    for depth in 1..=4 {
        let machine = Machine::new(depth as u64);
        machine.sim.set_pace(Pace::Slowest);
        let pool = machine.pool(DEVICE_BYTES, depth);
        let mut stager = StepStager::new(&machine.device, &pool, DEVICE_BYTES).unwrap();
        for _ in 0..depth {
            let mut step = stager.begin().unwrap();
            step.array(&[1u32]).unwrap();
            step.submit(&machine.stream).unwrap();
        }
        let refused = stager.begin().map(drop);
        assert_eq!(refused, Err(AcquireError::Exhausted { live: depth, max: depth }));
    }
}

#[test]
fn threads_with_streams_of_their_own_share_a_pool() {
    const BYTES: usize = 128;
    const ROUNDS: u64 = 2_000;
    let machine = Machine::new(11);
    let pool = machine.pool(BYTES as u64, 6);
    let send = |number: u64, stream: &Stream, target: &DeviceBuffer| {
        let mut buffer = loop {
            match pool.acquire() {
                Ok(buffer) => break buffer,
                Err(AcquireError::Exhausted { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        buffer.bytes_mut().copy_from_slice(&pattern(number, BYTES));
        buffer.submit(stream, |view| view.copy_to_device(target.span(), 0)).unwrap();
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (send, device) = (&send, &machine.device);
            scope.spawn(move || {
                let stream = Stream::new(device).unwrap();
                let targets = [0; 3].map(|_| DeviceBuffer::alloc(device, BYTES as u64).unwrap());
                let mut arrived = vec![0; BYTES];
                for round in 0..ROUNDS {
                    let first = (thread * ROUNDS + round) * 3;
                    for (number, target) in (first..).zip(&targets) {
                        send(number, &stream, target);
                    }
                    for (number, target) in (first..).zip(&targets) {
                        stream.download(&mut arrived, target.span()).unwrap();
                        assert_eq!(arrived, pattern(number, BYTES), "thread {thread}");
                    }
                }
            });
        }
    });
    pool.drain().unwrap();
    assert_eq!((pool.live(), pool.leaked()), (0, 0));
    assert!(pool.peak_live() <= 6);
    assert!(machine.sim.findings().is_empty());
}
