//! Captured graphs over a batch, on the simulated device.

use cuda_sim::RaceCheck;
use kv_stage::DeviceBatch;

use super::model::{Model, Sends, pool, read, small};
use super::replay::{Gathers, Replay};
use super::steps::machine;

#[test]
fn a_graph_replayed_for_hundreds_of_steps_reads_each_step() {
    for gathers in [Gathers::InTheGraph, Gathers::BeforeTheGraph] {
        for (ptx, steps, seed) in [(true, 16, 0), (false, 400, 1), (false, 200, 2), (false, 200, 3)]
        {
            let machine = machine(seed, ptx);
            let kernel = machine.copy_kernel();
            let mut replay = Replay::new(&machine.device, kernel, &small(), gathers, seed);
            replay.run(steps);
            assert_eq!(machine.sim.findings(), [], "{gathers:?}, ptx {ptx}, seed {seed}");
        }
    }
}

/// Stages two steps behind a stalled stream, each with a reader. Returns how the first was read, and how
/// it was staged.
fn read_behind_a_stall(sabotaged: bool) -> (Vec<i32>, Vec<i32>) {
    let machine = machine(7, false);
    machine.sim.set_race_check(RaceCheck::Report);
    let pool = pool(&machine.device, &small(), 2);
    #[cfg(all(feature = "sabotage", debug_assertions))]
    if sabotaged {
        pool.sabotage_reuse_before_event();
    }
    assert!(!sabotaged || cfg!(all(feature = "sabotage", debug_assertions)));
    let mut model = Model::over(DeviceBatch::new(&pool, small()).unwrap(), 4);
    let rows = model.batch.buffers().rows;
    let seen = machine.memory(rows.bytes());
    machine.sim.hold(machine.stream.raw());
    let first = model.step(&machine.stream, Sends::All);
    machine.launch_copy(&machine.stream, seen.span(), rows.address()).unwrap();
    let second = model.step(&machine.stream, Sends::All);
    machine.sim.release_hold(machine.stream.raw());
    assert_ne!(first.rows, second.rows);
    (read(&machine.stream, seen.span()), first.rows)
}

#[test]
fn a_step_staged_behind_a_stalled_stream_is_read_as_it_was_staged() {
    let (found, staged) = read_behind_a_stall(false);
    assert_eq!(found, staged);
}

#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn without_events_the_first_step_reads_the_second() {
    let (found, staged) = read_behind_a_stall(true);
    assert_ne!(found, staged);
}
