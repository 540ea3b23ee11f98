//! Steps: the contents of one copy, for every path with a table, and refused steps.

use crate::rows::{row_at, rows_at};
use cuda_driver::{Device, DeviceError, Stream};
use cuda_sim::RaceCheck;
use kv_stage::{
    BlockTable, Staged, StagingPool, StepStager,
    error::{AcquireError, PartError, StageError, TableError},
};

use crate::machine::{Machine, pattern};

fn stager(machine: &Machine, pool: &StagingPool, device_bytes: u64) -> StepStager {
    StepStager::new(&machine.device, pool, device_bytes).unwrap()
}

#[test]
fn one_copy_carries_rows_and_arrays_aligned() {
    let machine = Machine::new(1);
    let pool = machine.pool(4096, 2);
    let mut stager = stager(&machine, &pool, 8192);
    assert_eq!(stager.capacity_bytes(), 4096);
    let mut table = BlockTable::new(4, 8).unwrap();
    for block in 10..13 {
        table.append(row_at(2), block).unwrap();
    }
    table.append(row_at(0), 5).unwrap();

    let mut step = stager.begin().unwrap();
    let rows = step.block_rows(&table, &rows_at(&[2, 0, 2]), 5).unwrap();
    let lens = step.array::<u32>(&[40, 3]).unwrap();
    let slots = step.array::<i64>(&[-1, 1 << 40]).unwrap();
    let none = step.array::<u64>(&[]).unwrap();
    let keys = step.array::<u64>(&[u64::MAX]).unwrap();
    assert_eq!(step.bytes(), 3 * 256 + 8);
    let copies = machine.calls("cuMemcpyHtoDAsync");
    let staged = step.submit(&machine.stream).unwrap();
    assert_eq!(machine.calls("cuMemcpyHtoDAsync"), copies + 1);
    assert_eq!(staged.bytes(), 3 * 256 + 8);

    let read = |part| {
        let span = staged.span(part).unwrap();
        assert_eq!(span.address() % StepStager::PART_ALIGNMENT, 0);
        machine.read(span)
    };
    let expected = [10, 11, 12, -1, -1, 5, -1, -1, -1, -1, 10, 11, 12, -1, -1];
    assert_eq!(read(rows), bytemuck::cast_slice::<i32, u8>(&expected));
    assert_eq!(read(lens), bytemuck::cast_slice::<u32, u8>(&[40, 3]));
    assert_eq!(read(slots), bytemuck::cast_slice::<i64, u8>(&[-1, 1 << 40]));
    assert_eq!(read(none), []);
    assert_eq!(read(keys), [0xFF; 8]);
}

#[test]
fn gaps_between_parts_carry_nothing_of_earlier_steps() {
    let machine = Machine::new(2);
    let pool = machine.pool(1024, 1);
    let mut stager = stager(&machine, &pool, 1024);
    let mut step = stager.begin().unwrap();
    let all = step.array(&[0xAAu8; 1024]).unwrap();
    let staged = step.submit(&machine.stream).unwrap();
    assert_eq!(machine.read(staged.span(all).unwrap()), [0xAA; 1024]);
    pool.drain().unwrap();

    let mut step = stager.begin().unwrap();
    step.array(&[1u8]).unwrap();
    step.array(&[2u8]).unwrap();
    step.submit(&machine.stream).unwrap();
    let mut expected = [0; 257];
    (expected[0], expected[256]) = (1, 2);
    let start = staged.span(all).unwrap().slice(0, 257).unwrap();
    assert_eq!(machine.read(start), expected);
}

/// Stages a step with one table of each path behind a stalled stream, edits the tables, stages again.
fn stage_every_path(machine: &Machine, pool: &StagingPool) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    const BEAMS: usize = 2;
    let mut stager = stager(machine, pool, 4096);
    // Self-attention, cross-attention, beams (a row each) and a draft model's own table.
    let mut tables = [2, 2, 2 * BEAMS, 2].map(|rows| BlockTable::new(rows, 12).unwrap());
    let (mut expected, mut logged) = (Vec::new(), Vec::new());
    machine.sim.hold(machine.stream.raw());
    for round in 0..2 {
        for (path, table) in (0..).zip(&mut tables) {
            for slot in 0..table.rows() {
                table.clear_row(row_at(slot)).unwrap();
                for block in 0..5 + round {
                    let block = 10_000 * round + 1_000 * path + 100 * slot as i32 + block;
                    table.append(row_at(slot), block).unwrap();
                }
            }
        }
        let mut step = stager.begin().unwrap();
        let parts = tables.each_ref().map(|table| {
            let slots: Vec<usize> = (0..table.rows()).rev().collect();
            let rows = slots.iter().flat_map(|slot| &table.row(row_at(*slot)).unwrap()[..9]);
            let bytes: Vec<i32> = rows.copied().collect();
            expected.push(bytemuck::cast_slice(&bytes).to_vec());
            step.block_rows(table, &rows_at(&slots), 9).unwrap()
        });
        let staged: Staged = step.submit(&machine.stream).unwrap();
        for part in parts {
            let span = staged.span(part).unwrap();
            let log = machine.memory(span.bytes());
            machine.launch_copy(&machine.stream, log.span(), span.address()).unwrap();
            logged.push(log);
        }
    }
    machine.sim.release_hold(machine.stream.raw());
    (logged.iter().map(|log| machine.read(log.span())).collect(), expected)
}

#[test]
fn every_path_arrives_as_it_was_when_staged() {
    for seed in 0..16 {
        let machine = Machine::new(seed);
        let (arrived, expected) = stage_every_path(&machine, &machine.pool(4096, 2));
        assert_ne!(expected[..4], expected[4..]);
        assert_eq!(arrived, expected);
    }
}

/// With the protection disabled, every path of the first step reads the second step's data.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn without_events_every_path_of_the_first_step_is_overwritten() {
    let machine = Machine::new(0);
    let pool = machine.pool(4096, 2);
    pool.sabotage_reuse_before_event();
    machine.sim.set_race_check(RaceCheck::Report);
    let (arrived, expected) = stage_every_path(&machine, &pool);
    assert!(!machine.sim.races().is_empty(), "nothing orders the readers and the host");
    assert_eq!(arrived[..4], expected[4..]);
    assert_eq!(arrived[4..], expected[4..]);
}

#[test]
fn a_step_too_large_is_refused_and_stays_as_it_was() {
    let machine = Machine::new(3);
    let pool = machine.pool(1000, 1);
    let mut stager = stager(&machine, &pool, 4096);
    let table = BlockTable::new(2, 300).unwrap();
    let mut step = stager.begin().unwrap();
    let first = step.array(&pattern(1, 100)).unwrap();
    let refused = step.array(&pattern(2, 745));
    let too_large = |needed_bytes| StageError::Capacity { needed_bytes, capacity_bytes: 1000 };
    assert_eq!(refused, Err(too_large(1001)));
    assert_eq!(step.block_rows(&table, &rows_at(&[0, 1]), 300), Err(too_large(256 + 2400)));
    assert_eq!(
        step.block_rows(&table, &rows_at(&[0]), 301),
        Err(StageError::Table(TableError::Column { logical: 301, max_blocks: 300 }))
    );
    assert_eq!(
        step.block_rows(&table, &rows_at(&[0, 2]), 1),
        Err(StageError::Table(TableError::Row { row: row_at(2), rows: 2 }))
    );
    assert_eq!(step.bytes(), 100);
    let second = step.array(&pattern(2, 744)).unwrap();
    let staged = step.submit(&machine.stream).unwrap();
    assert_eq!(machine.read(staged.span(first).unwrap()), pattern(1, 100));
    assert_eq!(machine.read(staged.span(second).unwrap()), pattern(2, 744));
}

#[test]
fn back_pressure_reaches_the_caller_and_an_abandoned_step_costs_nothing() {
    let machine = Machine::new(4);
    let pool = machine.pool(256, 1);
    let mut stager = stager(&machine, &pool, 256);
    drop(stager.begin().unwrap());
    // An empty step sends nothing and keeps nothing.
    assert_eq!(stager.begin().unwrap().submit(&machine.stream).unwrap().bytes(), 0);
    machine.sim.hold(machine.stream.raw());
    let mut step = stager.begin().unwrap();
    step.array(&[1u8]).unwrap();
    step.submit(&machine.stream).unwrap();
    let refused = stager.begin().map(|_| ());
    assert_eq!(refused, Err(AcquireError::Exhausted { live: 1, max: 1 }));
    machine.sim.release_hold(machine.stream.raw());
    stager.begin_wait().unwrap();
}

#[test]
fn parts_and_streams_of_others_are_refused() {
    let machine = Machine::new(5);
    let pool = machine.pool(1024, 3);
    let mut stager = stager(&machine, &pool, 1024);
    let mut step = stager.begin().unwrap();
    let old = step.array(&[1u8]).unwrap();
    step.submit(&machine.stream).unwrap();
    let mut step = stager.begin().unwrap();
    let new = step.array(&[2u8]).unwrap();
    let staged = step.submit(&machine.stream).unwrap();
    assert!(staged.span(new).is_ok());
    let Err(PartError { part_step, step, .. }) = staged.span(old) else { panic!("foreign part") };
    assert!(part_step < step);

    let other = Stream::new(&machine.device).unwrap();
    let far = Device::open(machine.device.driver().clone(), 1).unwrap();
    let refused = stager.begin().unwrap().submit(&other).map(|_| ());
    let (bound, given) = (machine.stream.raw(), other.raw());
    assert_eq!(refused, Err(StageError::OtherStream { bound, given }));
    let refused = stager.begin().unwrap().submit(&Stream::new(&far).unwrap()).map(|_| ());
    assert_eq!(refused, Err(StageError::OtherDevice { stager: 0, stream: 1 }));
    let refused = stager.rebind(&Stream::new(&far).unwrap());
    let call = "StepStager::rebind";
    assert_eq!(refused, Err(DeviceError::OtherDevice { call, device: 0, stream: 1 }));
    stager.begin().unwrap().submit(&machine.stream).unwrap();
    pool.drain().unwrap();
    assert_eq!(pool.live(), 0);
}

#[test]
fn a_stager_that_was_bound_before_its_first_step_stays_so() {
    let machine = Machine::new(6);
    let pool = machine.pool(256, 2);
    let mut stager = stager(&machine, &pool, 256);
    let other = Stream::new(&machine.device).unwrap();
    stager.rebind(&other).unwrap();
    let refused = stager.begin().unwrap().submit(&machine.stream).map(|_| ());
    let (bound, given) = (other.raw(), machine.stream.raw());
    assert_eq!(refused, Err(StageError::OtherStream { bound, given }));
    stager.begin().unwrap().submit(&other).unwrap();
}

#[test]
fn a_rebound_stager_waits_for_the_readers_of_its_old_stream() {
    for seed in 0..16 {
        let machine = Machine::new(seed);
        let pool = machine.pool(256, 2);
        let mut stager = stager(&machine, &pool, 256);
        let other = Stream::new(&machine.device).unwrap();
        let logs = [machine.memory(64), machine.memory(64)];
        machine.sim.hold(machine.stream.raw());
        for (number, (stream, log)) in [&machine.stream, &other].into_iter().zip(&logs).enumerate()
        {
            stager.rebind(stream).unwrap();
            let mut step = stager.begin().unwrap();
            let part = step.array(&pattern(number as u64, 64)).unwrap();
            let staged = step.submit(stream).unwrap();
            let source = staged.span(part).unwrap().address();
            machine.launch_copy(stream, log.span(), source).unwrap();
        }
        machine.sim.release_hold(machine.stream.raw());
        other.synchronize().unwrap();
        assert_eq!(machine.read(logs[0].span()), pattern(0, 64), "seed {seed}");
        assert_eq!(machine.read(logs[1].span()), pattern(1, 64), "seed {seed}");
    }
}
