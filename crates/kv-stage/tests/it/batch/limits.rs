//! What a batch refuses, what it sends in pieces, and the order of two streams.

use super::model::{Model, Sends, pool, read, small};
use super::steps::machine;
use crate::prelude::*;

/// A batch on a machine of its own, whose pool has so many buffers.
fn small_batch(buffers: usize) -> (Machine, StagingPool, DeviceBatch) {
    let machine = machine(0, false);
    let pool = pool(&machine.device, &small(), buffers);
    let batch = DeviceBatch::new(&pool, small()).unwrap();
    (machine, pool, batch)
}

#[test]
fn what_is_refused_leaves_the_step_as_it_was() {
    let (machine, _pool, mut batch) = small_batch(1);
    batch.edit(0, Row::new(3), 0, &[5, 6].map(TableEntry::from)).unwrap();
    batch.edit(1, Row::new(3), 0, &[8].map(TableEntry::from)).unwrap();
    let mut step = batch.step(&machine.stream).unwrap();
    let [third, fourth] = [3, 4].map(Row::new);
    let twice = step.row(third, 1, 1, 1).and_then(|()| step.row(third, 0, 0, 1));
    assert_eq!(twice, Err(BatchError::RowTwice { row: third }));
    let outside = step.row(Row::new(12), 0, 0, 1);
    assert_eq!(outside, Err(BatchError::Row { row: Row::new(12), rows: 12 }));
    let backwards = step.row(fourth, 3, 2, 1);
    assert_eq!(backwards, Err(BatchError::Start { row: fourth, resolved: 3, upper: 2 }));
    // The second table has blocks for 35 tokens.
    let beyond = step.row(fourth, 0, 35, 1);
    assert_eq!(beyond, Err(BatchError::End { row: fourth, end: 36, max: 35 }));
    for (drafts, tokens) in [(1, 1), (2, 1), (u32::MAX, 3)] {
        let all = step.row_with_states(fourth, (0, 0), tokens, RowStates { drafts, input: 0 });
        assert_eq!(all, Err(BatchError::Drafts { row: fourth, drafts, tokens }));
    }
    let tokens = step.row(fourth, 0, 0, 40);
    assert_eq!(tokens, Err(BatchError::Tokens { tokens: 41, max: 40 }));
    let array = step.array(2, &[1_u8]);
    assert_eq!(array, Err(BatchError::Array { array: 2, arrays: 2 }));
    let bytes = step.array(0, &[1_u64; 4]);
    assert_eq!(bytes, Err(BatchError::ArrayBytes { array: 0, bytes: 32, max: 24 }));
    step.array(0, &[1_u64, 2, 3]).unwrap();
    assert_eq!(step.array(0, &[9_u64]), Err(BatchError::ArrayTwice { array: 0 }));
    for row in 4..9 {
        step.row(Row::new(row), 0, 0, 0).unwrap();
    }
    let full = step.row(Row::new(9), 0, 0, 0);
    assert_eq!(full, Err(BatchError::Sequences { max: 6 }));
    let staged = step.submit().unwrap();
    assert_eq!((staged.tokens, staged.lengths.len()), (1, 6));
    let buffers = staged.buffers;
    assert_eq!(read::<i32>(&machine.stream, buffers.rows), [3, 4, 5, 6, 7, 8]);
    assert_eq!(read::<i32>(&machine.stream, buffers.lengths), [2, 0, 0, 0, 0, 0]);
    assert_eq!(read::<i64>(&machine.stream, buffers.tables[0].slots)[..2], [21, -1]);
    assert_eq!(read::<u64>(&machine.stream, buffers.arrays[0]), [1, 2, 3]);
    // A step that is dropped leaves no row behind.
    batch.step_wait(&machine.stream).unwrap().row(third, 1, 1, 1).unwrap();
    batch.step_wait(&machine.stream).unwrap().row(third, 1, 1, 1).unwrap();
}

#[test]
fn a_wrong_count_leads_to_no_slot_outside_the_rows_blocks() {
    let machine = machine(0, false);
    for ptx in [false, true] {
        machine.sim.prefer_ptx(ptx);
        let pool = pool(&machine.device, &small(), 1);
        let mut batch = DeviceBatch::new(&pool, small()).unwrap();
        batch.edit(0, Row::new(2), 0, &entries(&[1, 2, 3, -1, 99])).unwrap();
        batch.edit(1, Row::new(2), 0, &[4, 5].map(TableEntry::from)).unwrap();
        for (count, start) in [(0, 4), (1, 4), (3, 6), (4, 7), (5, 7), (u32::MAX, 7)] {
            let mut step = batch.step_wait(&machine.stream).unwrap();
            step.row(Row::new(2), 3, 3, 4).unwrap();
            let accepted = step.submit().unwrap().buffers.accepted.slice(8, 4).unwrap();
            machine.stream.upload(accepted, &u32::to_le_bytes(count)).unwrap();
            let mut step = batch.step_wait(&machine.stream).unwrap();
            step.row(Row::new(2), 4, 7, 5).unwrap();
            let buffers = step.submit().unwrap().buffers;
            assert_eq!(read::<i32>(&machine.stream, buffers.lengths)[0], start + 5, "{count}");
            let slots = read::<i64>(&machine.stream, buffers.tables[0].slots);
            // The row's blocks are 1, 2 and 3, and then none, of 4 tokens each.
            let slot = |at: i64| [1, 2, 3][at as usize / 4] * 4 + at % 4;
            let first = i64::from(start);
            let right: Vec<i64> = (first..first + 5).map(slot).collect();
            assert_eq!(slots[..5], right, "{count}");
        }
    }
}

#[test]
fn changes_beyond_a_packet_are_sent_before_the_step_and_in_order() {
    let machine = machine(0, false);
    let table =
        BatchTable { width: 9_000, block_tokens: 1, null_block: BlockId::from(0), is_state: false };
    let tables = vec![table];
    let options = BatchOptions { rows: 4, sequences_max: 4, tokens_max: 4, tables, arrays: vec![] };
    let pool = pool(&machine.device, &options, 8);
    let mut batch = DeviceBatch::new(&pool, options).unwrap();
    let ids = |seed: i32| (0..9_000).map(|id| id * 7 + seed).collect::<Vec<i32>>();
    for seed in 0..8 {
        batch.edit(0, Row::new(seed as u32 % 4), 0, &entries(&ids(seed))).unwrap();
    }
    let refused = batch.edit(0, Row::new(0), 0, &[1].map(TableEntry::from));
    assert_eq!(refused, Err(BatchError::Backlog { ids: 72_001, max: 72_000 }));
    let before = machine.calls("cuMemcpyHtoDAsync");
    let mut step = batch.step_wait(&machine.stream).unwrap();
    for row in 0..4 {
        step.row(Row::new(row), 8_999, 8_999, 1).unwrap();
    }
    let staged = step.submit().unwrap();
    let found = read::<i32>(&machine.stream, staged.buffers.tables[0].block_table);
    let right: Vec<i32> = (4..8).flat_map(ids).collect();
    assert_eq!(found, right);
    assert_eq!(staged.buffers.tables[0].width as usize, right.len() / 4);
    // About 16,000 ids have room in a packet: one row of 9,000.
    assert_eq!(machine.calls("cuMemcpyHtoDAsync") - before, 8);
}

#[test]
fn forgotten_changes_are_not_sent_and_leave_room_for_others() {
    let machine = machine(0, false);
    let table =
        BatchTable { width: 8, block_tokens: 1, null_block: BlockId::from(0), is_state: false };
    let tables = vec![table];
    let options = BatchOptions { rows: 2, sequences_max: 2, tokens_max: 2, tables, arrays: vec![] };
    let pool = pool(&machine.device, &options, 2);
    let mut batch = DeviceBatch::new(&pool, options).unwrap();
    let mut refused = false;
    for _ in 0..8 {
        refused |= batch.edit(0, Row::new(0), 0, &[TableEntry::from(9); 8]).is_err();
    }
    assert!(refused);
    batch.forget_edits();
    batch.edit(0, Row::new(1), 0, &[1, 2, 3, 4, 5, 6, 7, 8].map(TableEntry::from)).unwrap();
    let mut step = batch.step_wait(&machine.stream).unwrap();
    step.row(Row::new(1), 7, 7, 1).unwrap();
    let staged = step.submit().unwrap();
    let found = read::<i32>(&machine.stream, staged.buffers.tables[0].block_table);
    assert_eq!(found[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_step_on_another_stream_or_device_is_refused() {
    let machine = machine(0, false);
    let mut model = Model::new(&machine.device, small(), 2, 1);
    model.step(&machine.stream, Sends::All);
    let other = Stream::new(&machine.device).unwrap();
    let (bound, given) = (machine.stream.raw(), other.raw());
    let refused = model.batch.step(&other).map(drop);
    assert_eq!(refused, Err(BatchError::OtherStream { bound, given }));
    let second = Device::open(Arc::new(machine.sim.clone()), 1).unwrap();
    let away = Stream::new(&second).unwrap();
    let elsewhere = BatchError::OtherDevice { batch: 0, stream: 1 };
    assert_eq!(model.batch.step(&away).map(drop), Err(elsewhere));
    assert_eq!(model.batch.rebind(&away), Err(elsewhere));
    assert_eq!(model.refused, 0);
}

#[test]
fn a_batch_that_was_bound_before_its_first_step_stays_so() {
    let (machine, _pool, mut batch) = small_batch(2);
    let other = Stream::new(&machine.device).unwrap();
    batch.rebind(&other).unwrap();
    let (bound, given) = (other.raw(), machine.stream.raw());
    let refused = batch.step(&machine.stream).map(drop);
    assert_eq!(refused, Err(BatchError::OtherStream { bound, given }));
    batch.step(&other).unwrap().submit().unwrap();
}

#[test]
fn a_first_step_that_is_refused_binds_no_stream() {
    let (machine, pool, mut batch) = small_batch(1);
    let other = Stream::new(&machine.device).unwrap();
    let held = pool.acquire().unwrap();
    batch.step(&other).map(drop).unwrap_err();
    drop(held);
    batch.step(&machine.stream).unwrap().submit().unwrap();
}

#[test]
fn a_rebound_batch_waits_for_the_work_of_its_old_stream() {
    let machine = machine(6, false);
    let mut model = Model::new(&machine.device, small(), 4, 2);
    let other = Stream::new(&machine.device).unwrap();
    let seen = machine.memory(u64::from(small().sequences_max) * 4);
    let mut at = 0;
    for _ in 0..20 {
        let streams = [&machine.stream, &other];
        let expected = model.step(streams[at], Sends::All);
        // A reader of this step, which may run late.
        let lengths = model.batch.buffers().lengths;
        machine.launch_copy(streams[at], seen.span(), lengths.address()).unwrap();
        at = 1 - at;
        model.batch.rebind(streams[at]).unwrap();
        // The wait of the new stream is also for the reader.
        assert_eq!(read::<i32>(streams[at], seen.span()), expected.lengths);
    }
}

#[test]
fn a_pool_that_is_exhausted_or_too_small_is_an_outcome() {
    let machine = machine(0, false);
    let large = pool(&machine.device, &small(), 1);
    let mut batch = DeviceBatch::new(&large, small()).unwrap();
    let held = large.acquire().unwrap();
    let refused = batch.step(&machine.stream).map(drop).unwrap_err();
    let is_exhausted = matches!(refused, BatchError::Acquire(AcquireError::Exhausted { .. }));
    assert!(is_exhausted, "{refused}");
    drop(held);
    drop(batch.step(&machine.stream).unwrap());
    let bytes = small().buffer_bytes();
    let tight = machine.pool(bytes - 1, 1);
    let error = DeviceBatch::new(&tight, small()).map(drop).unwrap_err();
    let (what, value, most) = ("bytes in a packet", bytes, bytes - 1);
    assert_eq!(error, StagingError::Batch { what, value, most });
}
