//! The block tables of every path go the same way: staged behind a stalled stream, each arrives as it was
//! when staged. And the buffers stay where they are.

use kv_testkit::alloc::allocations;

use super::model::pool;
use super::steps::machine;
use crate::prelude::*;
use crate::tables::{BLOCKS, PATHS, ROWS, dense, log_paths, path_logs, paths, stage_paths};

const ROUNDS: usize = 3;

/// Stages every path in a few rounds behind a stalled stream. Answers what a kernel has read of each path
/// in each round.
fn stage_behind_a_stall(machine: &Machine, pool: &StagingPool) -> Vec<Vec<Vec<u8>>> {
    let mut batch = DeviceBatch::new(pool, paths()).unwrap();
    let logs = [0; ROUNDS].map(|_| path_logs(&machine.device));
    machine.sim.hold(machine.stream.raw());
    for (round, logs) in (0..).zip(&logs) {
        stage_paths(&machine.stream, &mut batch, round);
        log_paths(&machine.stream, machine.copy_kernel(), &batch, logs);
    }
    machine.sim.release_hold(machine.stream.raw());
    let read = |log: &cuda_driver::DeviceBuffer| machine.read(log.span());
    logs.iter().map(|logs| logs.iter().map(read).collect()).collect()
}

/// What every path should have in a round.
fn all(round: usize) -> Vec<Vec<u8>> {
    (0..PATHS).map(|path| dense(round as i32, path)).collect()
}

#[test]
fn every_path_arrives_as_it_was_when_staged() {
    for seed in 0..16 {
        let machine = machine(seed, seed == 0);
        let pool = pool(&machine.device, &paths(), ROUNDS);
        for (round, arrived) in stage_behind_a_stall(&machine, &pool).into_iter().enumerate() {
            assert!(arrived == all(round), "seed {seed}, round {round}");
        }
        assert_eq!(machine.sim.findings(), []);
    }
}

/// With the protection disabled, every table of the first rounds is that of the last.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn without_events_every_path_of_the_first_step_is_overwritten() {
    let machine = machine(0, false);
    let pool = pool(&machine.device, &paths(), ROUNDS);
    pool.sabotage_reuse_before_event();
    machine.sim.set_race_check(RaceCheck::Report);
    let arrived = stage_behind_a_stall(&machine, &pool);
    assert!(!machine.sim.races().is_empty(), "nothing orders the readers and the host");
    let last = vec![all(ROUNDS - 1); ROUNDS];
    assert!(arrived == last, "the test above would not see the bug it is for");
}

/// Readers of the addresses see every later step, at the same places, and the host's part of a step
/// allocates nothing.
#[test]
fn buffers_keep_address_and_layout_and_steps_allocate_nothing() {
    let machine = machine(0, false);
    let pool = pool(&machine.device, &paths(), 2);
    let mut batch = DeviceBatch::new(&pool, paths()).unwrap();
    let spans = |batch: &DeviceBatch| {
        let buffers = batch.buffers();
        let tables = buffers.tables.iter().flat_map(|table| [table.block_table, table.slots]);
        let others = [buffers.lengths, buffers.query_starts, buffers.positions, buffers.rows];
        let all = tables.chain(others).chain(buffers.arrays.iter().copied());
        all.map(|span| (span.address(), span.bytes())).collect::<Vec<_>>()
    };
    let before = spans(&batch);
    let tables: Vec<DeviceSpan> = batch.buffers().tables.iter().map(|t| t.block_table).collect();
    for round in 0..2_000 {
        stage_paths(&machine.stream, &mut batch, round as i32);
        assert_eq!(spans(&batch), before);
        let found: Vec<_> = tables.iter().map(|&table| machine.read(table)).collect();
        assert!(found == all(round), "round {round}");
        let allocated = allocations();
        for row in 0..ROWS {
            batch.edit(2, Row::new(row), 0, &[1, 2, 3, 4].map(TableEntry::from)).unwrap();
        }
        // The simulated device allocates when it is asked about events.
        let before_step = allocations();
        let mut step = batch.step_wait(&machine.stream).unwrap();
        let of_calls = allocations() - before_step;
        for row in 0..ROWS {
            step.row(Row::new(row), u64::from(BLOCKS), u64::from(BLOCKS), 1).unwrap();
        }
        assert_eq!(allocations() - of_calls, allocated);
    }
}
