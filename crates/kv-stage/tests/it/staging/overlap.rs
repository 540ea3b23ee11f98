//! Long overlapped runs: the number of live buffers, allocations, and the received data.

use crate::prelude::*;
use crate::tables::{Run, Sends, iterations};

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

/// Runs many steps with the host `depth` steps ahead.
///
/// A pool of `depth + 1` buffers finds one for every step. One that has `more` must not need them.
fn run_at(depth: usize, sends: Sends, more: usize) {
    let machine = Machine::new(depth as u64);
    machine.sim.register_kernels(kv_stage::references());
    let mut run = Run::new(&machine.stream, machine.copy_kernel(), sends, depth + 1 + more);
    let allocating = ["cuMemHostRegister", "cuMemAlloc"];
    let before = allocating.map(|call| machine.calls(call));
    let (pinned_bytes, events) = (run.pool.pinned_bytes(), machine.calls("cuEventCreate"));

    // Checking all buffers takes long.
    let steps = if more > 0 { iterations() / 10 } else { iterations() };
    run.steps(depth, steps, |pool| {
        if more > 0 {
            let live = read_still(pool);
            assert!(live <= depth + 1, "{live} live at depth {depth}");
        }
    });
    assert_eq!(allocating.map(|call| machine.calls(call)), before);
    assert_eq!(machine.calls("cuEventCreate"), events + depth as u64 + 1, "the run's own alone");
    assert_eq!((run.pool.pinned_bytes(), machine.sim.pinned_bytes()), (pinned_bytes, pinned_bytes));
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
    const BYTES: u64 = 64;
    for depth in 1..=4 {
        let machine = Machine::new(depth as u64);
        machine.sim.set_pace(Pace::Slowest);
        let (pool, target) = (machine.pool(BYTES, depth), machine.memory(BYTES));
        for _ in 0..depth {
            let buffer = pool.acquire().unwrap();
            buffer.submit(&machine.stream, |view| view.copy_to_device(target.span(), 0)).unwrap();
        }
        let refused = pool.acquire().map(drop);
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
        let mut buffer = pool.acquire_wait().unwrap();
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
    assert_eq!(pool.live(), 0);
    assert!(pool.peak_live() <= 6);
    assert!(machine.sim.findings().is_empty());
}
