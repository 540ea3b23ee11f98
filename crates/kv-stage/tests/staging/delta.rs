//! Steps that send only the changes: the received data, the sent bytes, and the cases in which
//! everything is sent again.

use crate::rows::{row_at, rows_at};
use cuda_driver::{DeviceBuffer, ErrorCode};
use cuda_sim::RaceCheck;
use kv_stage::{BlockTable, PartId, Staged, StagingPool, StepStager};

use crate::machine::{Machine, Random};

/// A machine with a pool and a stager that sends only changes.
struct Rig {
    machine: Machine,
    pool: StagingPool,
    stager: StepStager,
}

impl Rig {
    fn new(seed: u64, device_bytes: u64, buffers: usize) -> Self {
        let machine = Machine::new(seed);
        let pool = machine.pool(StepStager::buffer_bytes(device_bytes), buffers);
        let stager = StepStager::with_scatter(pool.device(), &pool, device_bytes).unwrap();
        assert!(stager.capacity_bytes() >= device_bytes / 16 * 16);
        Self { machine, pool, stager }
    }

    /// Stages the rows of `slots` and the lengths, and reads both back.
    fn stage(&mut self, table: &BlockTable, slots: &[usize], width: usize, lens: &[u32]) -> Seen {
        let mut step = self.stager.begin_wait().unwrap();
        let rows = step.block_rows(table, &rows_at(slots), width).unwrap();
        let lengths = step.array(lens).unwrap();
        let staged = step.submit(&self.machine.stream).unwrap();
        assert_eq!(
            self.read::<i32>(&staged, rows),
            expected(table, slots, staged.row_entries(rows).unwrap())
        );
        assert_eq!(self.read::<u32>(&staged, lengths), lens);
        Seen { bytes: staged.bytes(), words: staged.words() }
    }

    fn read<T: bytemuck::Pod>(&self, staged: &Staged, part: PartId) -> Vec<T> {
        bytemuck::pod_collect_to_vec(&self.machine.read(staged.span(part).unwrap()))
    }
}

/// The cost of a step.
#[derive(Debug, Eq, PartialEq)]
struct Seen {
    bytes: u64,
    words: u32,
}

/// The rows of `slots`, `stride` entries each.
fn expected(table: &BlockTable, slots: &[usize], stride: usize) -> Vec<i32> {
    slots.iter().flat_map(|slot| &table.row(row_at(*slot)).unwrap()[..stride]).copied().collect()
}

/// A table of `slots` rows with `blocks` blocks each.
fn filled(slots: usize, max_blocks: usize, blocks: usize) -> BlockTable {
    let mut table = BlockTable::new(slots, max_blocks).unwrap();
    for slot in 0..slots {
        for block in 0..blocks {
            table.append(row_at(slot), (slot * 1000 + block) as i32).unwrap();
        }
    }
    table
}

#[test]
fn a_decode_step_sends_one_word_for_each_change_in_one_launch() {
    let mut rig = Rig::new(1, 256 * 2048 * 4 + 4096, 2);
    let mut table = filled(256, 2048, 1500);
    let slots: Vec<usize> = (0..256).rev().collect();
    let lens = vec![7u32; 256];
    let first = rig.stage(&table, &slots, 1500, &lens);
    assert_eq!(first, Seen { bytes: 256 * 2048 * 4 + 1024, words: 0 }, "all of it, copied");

    let calls = ["cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemHostRegister", "cuEventCreate"];
    let count = |rig: &Rig| calls.map(|call| rig.machine.calls(call));
    for step in 0..20 {
        for slot in 0..16 {
            table.append(row_at(slot * 16 + step % 16), step as i32).unwrap();
        }
        let before = count(&rig);
        let seen = rig.stage(&table, &slots, 1501 + step, &lens);
        let words = 16 + 256 / 4;
        assert_eq!(seen, Seen { bytes: u64::from(words) * 20, words });
        let [copies, launches, pinned, events] = before;
        assert_eq!(count(&rig), [copies, launches + 1, pinned, events]);
    }
    // Nothing changed, and there is no array, so nothing is sent.
    let before = count(&rig);
    let mut step = rig.stager.begin().unwrap();
    let rows = step.block_rows(&table, &rows_at(&slots), 1520).unwrap();
    let staged = step.submit(&rig.machine.stream).unwrap();
    assert_eq!((staged.bytes(), count(&rig)), (0, before));
    assert!(rig.read::<i32>(&staged, rows) == expected(&table, &slots, 2048));
}

#[test]
fn rows_that_change_hands_are_sent_whole_and_others_stay() {
    let mut rig = Rig::new(2, 16 * 64 * 4 + 4096, 2);
    let mut table = filled(20, 64, 40);
    rig.stage(&table, &(0..16).collect::<Vec<_>>(), 40, &[1]);
    // Row 3 is another slot's, the last row is gone, and slot 5 is somebody else's.
    let mut slots: Vec<usize> = (0..15).collect();
    slots[3] = 17;
    table.clear_row(row_at(5)).unwrap();
    table.append(row_at(5), 12345).unwrap();
    let seen = rig.stage(&table, &slots, 40, &[1]);
    assert_eq!(seen.words, 64 / 4 + 40 / 4 + 1, "a row, what was cleared, and the length");
    // Rows swap, and two more are added.
    slots.swap(0, 9);
    slots.extend([3, 15]);
    let seen = rig.stage(&table, &slots, 64, &[1]);
    assert_eq!(seen.words, 4 * 16 + 1);
    // A slot that is there twice cannot be followed: everything is sent, then and the next time.
    slots.push(17);
    for _ in 0..2 {
        assert_eq!(rig.stage(&table, &slots, 64, &[1]).words, 0);
    }
    slots.pop();
    assert_eq!(rig.stage(&table, &slots, 64, &[1]).words, 0);
    assert_eq!(rig.stage(&table, &slots, 64, &[1]).words, 1);
}

#[test]
fn forgotten_edits_large_changes_and_other_tables_are_sent_whole() {
    let mut rig = Rig::new(3, 1 << 16, 2);
    let mut table = filled(8, 128, 100);
    let slots: Vec<usize> = (0..8).collect();
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 0);
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 1);
    // More edits than the table remembers.
    for edit in 0..200 {
        table.set(row_at(edit % 8), edit % 100, edit as i32).unwrap();
    }
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 0);
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 1);
    // Few edits, which cover most of the table.
    for slot in 0..7 {
        table.truncate(row_at(slot), 1).unwrap();
    }
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 0);
    // A table with equal contents, and one with longer rows.
    let (twin, long) = (filled(8, 128, 1), filled(8, 300, 1));
    assert_eq!(rig.stage(&twin, &slots, 100, &[1]).words, 0);
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 0);
    assert_eq!(rig.stage(&long, &slots, 300, &[1]).words, 0);
    // Tables of the same shape with the same number of edits.
    let twins = [7, 8].map(|block| {
        let mut twin = BlockTable::new(8, 128).unwrap();
        (0..8).for_each(|slot| twin.append(row_at(slot), block).unwrap());
        twin
    });
    for twin in [0, 1, 0, 1] {
        assert_eq!(rig.stage(&twins[twin], &slots, 100, &[1]).words, 0);
    }
    // Another step's arrays were at the place of the table.
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 0);
    let mut step = rig.stager.begin().unwrap();
    step.array(&[77u8; 3000]).unwrap();
    step.submit(&rig.machine.stream).unwrap();
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 0);
    assert_eq!(rig.stage(&table, &slots, 100, &[1]).words, 1);
}

#[test]
fn after_a_step_that_was_dropped_or_refused_all_is_sent_anew() {
    let mut rig = Rig::new(4, 1 << 14, 3);
    let mut table = filled(8, 64, 50);
    let slots: Vec<usize> = (0..8).collect();
    let other = cuda_driver::Stream::new(&rig.machine.device).unwrap();
    rig.stage(&table, &slots, 64, &[1]);
    // Each leaves a change unsent, which must not be lost.
    type Upset = fn(&mut Rig, &BlockTable, &[usize], &cuda_driver::Stream);
    let upsets: [Upset; 6] = [
        |rig, table, slots, _| {
            rig.stager.begin().unwrap().block_rows(table, &rows_at(slots), 64).map(drop).unwrap();
        },
        |rig, table, slots, other| {
            let mut step = rig.stager.begin().unwrap();
            step.block_rows(table, &rows_at(slots), 64).unwrap();
            step.submit(other).map(drop).unwrap_err();
        },
        |rig, table, slots, _| {
            refused(rig, table, slots, "cuGraphLaunch", ErrorCode::OUT_OF_MEMORY)
        },
        |rig, table, slots, _| {
            refused(rig, table, slots, "cuEventRecord", ErrorCode::OUT_OF_MEMORY)
        },
        |rig, table, slots, _| {
            // Other code writes the device's table, and calls `forget`.
            let mut step = rig.stager.begin().unwrap();
            let rows = step.block_rows(table, &rows_at(slots), 64).unwrap();
            let staged = step.submit(&rig.machine.stream).unwrap();
            rig.machine.stream.fill(staged.span(rows).unwrap(), 0xEE).unwrap();
            rig.stager.forget();
        },
        |rig, table, slots, other| {
            // No reset: the new stream waits for the work of the old one.
            rig.stager.rebind(other).unwrap();
            let mut step = rig.stager.begin().unwrap();
            step.block_rows(table, &rows_at(slots), 64).unwrap();
            step.submit(other).unwrap();
            rig.stager.rebind(&rig.machine.stream.clone()).unwrap();
        },
    ];
    for (number, upset) in (0..).zip(upsets) {
        table.set(row_at(3), 9, 900 + number).unwrap();
        assert_eq!(rig.stage(&table, &slots, 64, &[1]).words, 2, "before upset {number}");
        table.set(row_at(2), 7, 700 + number).unwrap();
        upset(&mut rig, &table, &slots, &other);
        table.set(row_at(1), 5, 500 + number).unwrap();
        let words = if number == 5 { 2 } else { 0 };
        assert_eq!(rig.stage(&table, &slots, 64, &[1]).words, words, "after upset {number}");
    }
    assert_eq!(rig.pool.leaked(), 1, "of the event that could not be recorded");
}

/// Rows that do not fit with room to grow are shorter than those on the device, so that no change of these tells of them.
#[test]
fn rows_of_another_length_than_the_last_steps_are_sent_whole() {
    let mut rig = Rig::new(15, 4000, 3);
    let table = filled(16, 100, 40);
    let slots: Vec<usize> = (0..16).collect();
    rig.stage(&table, &slots[..15], 40, &[1]);
    assert_eq!(rig.stage(&table, &slots[..15], 40, &[2]).words, 1);
    assert_eq!(rig.stage(&table, &slots, 40, &[3]).words, 0);
}

/// A step without a table writes arrays over the last step's rows, also if not all of it was sent.
#[test]
fn after_a_refused_step_without_a_table_all_is_sent_anew() {
    let mut rig = Rig::new(14, 1 << 14, 3);
    let mut table = filled(8, 64, 50);
    let slots: Vec<usize> = (0..8).collect();
    rig.stage(&table, &slots, 64, &[1]);
    rig.machine.sim.fail_nth("cuEventRecord", 1, ErrorCode::OUT_OF_MEMORY);
    let mut step = rig.stager.begin().unwrap();
    step.array(&[0xEEu8; 512]).unwrap();
    step.submit(&rig.machine.stream).map(drop).unwrap_err();
    table.set(row_at(1), 5, 500).unwrap();
    // `stage` compares every row.
    assert_eq!(rig.stage(&table, &slots, 64, &[1]).words, 0, "sent whole");
}

/// Submits a step whose `call` fails.
fn refused(
    rig: &mut Rig,
    table: &BlockTable,
    slots: &[usize],
    call: &'static str,
    code: ErrorCode,
) {
    rig.machine.sim.fail_nth(call, 1, code);
    let mut step = rig.stager.begin().unwrap();
    step.block_rows(table, &rows_at(slots), 64).unwrap();
    step.submit(&rig.machine.stream).map(drop).unwrap_err();
}

/// With the protection disabled, an unsent change is lost.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn trusting_a_refused_step_loses_its_changes() {
    let mut rig = Rig::new(5, 1 << 14, 2);
    let mut table = filled(8, 64, 50);
    let slots: Vec<usize> = (0..8).collect();
    rig.stage(&table, &slots, 64, &[1]);
    rig.stager.sabotage_trust_uncertain();
    table.set(row_at(2), 7, 4711).unwrap();
    refused(&mut rig, &table, &slots, "cuGraphLaunch", ErrorCode::OUT_OF_MEMORY);
    let mut step = rig.stager.begin().unwrap();
    let rows = step.block_rows(&table, &rows_at(&slots), 64).unwrap();
    let staged = step.submit(&rig.machine.stream).unwrap();
    let arrived: Vec<i32> = rig.read(&staged, rows);
    let right = expected(&table, &slots, 64);
    let wrong: Vec<usize> = (0..right.len()).filter(|&i| arrived[i] != right[i]).collect();
    assert_eq!(wrong, [2 * 64 + 7], "the test above would not see the bug it is for");
}

/// Tables of every path, edited and staged at random behind a slow device, compared with snapshots.
struct Model {
    tables: Vec<BlockTable>,
    random: Random,
    /// The rows of each table that are staged at present.
    staged: Vec<Vec<usize>>,
}

impl Model {
    fn new(seed: u64) -> Self {
        // Self-attention, cross-attention, two beams of each, a draft model, a window, one odd
        // width.
        let shapes = [(8, 40), (8, 6), (16, 40), (8, 24), (4, 64), (5, 7)];
        let table = |(slots, max): (usize, usize)| BlockTable::new(slots, max).unwrap();
        let staged = shapes.map(|(slots, _)| (0..slots / 2).collect()).into();
        Self { tables: shapes.map(table).into(), random: Random(seed * 7 + 1), staged }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(end as u64) as usize
    }

    fn edit(&mut self) {
        let number = self.below(self.tables.len());
        let slot = self.below(self.tables[number].rows());
        let column = self.below(self.tables[number].max_blocks());
        let (kind, block) = (self.below(16), self.random.below(1 << 30) as i32);
        let table = &mut self.tables[number];
        match kind {
            0 => table.clear_row(row_at(slot)).unwrap(),
            1 => table.truncate(row_at(slot), column).unwrap(),
            2 => table.set(row_at(slot), column, -1).unwrap(),
            3 | 4 => table.set(row_at(slot), column, block).unwrap(),
            _ => drop(table.append(row_at(slot), block)),
        }
    }

    /// Adds, removes and moves rows.
    fn reorder(&mut self) {
        let number = self.below(self.tables.len());
        let slots = self.tables[number].rows();
        let (kind, slot, row) = (self.below(5), self.below(slots), self.below(slots));
        let staged = &mut self.staged[number];
        match kind {
            0 if staged.len() < slots => staged.push(slot),
            1 => drop(staged.pop()),
            2 if row < staged.len() => drop(staged.swap_remove(row)),
            3 if row < staged.len() => staged[row] = slot,
            _ if row < staged.len() => staged.swap(0, row),
            _ => {}
        }
    }
}

/// Runs `steps` random steps; returns how many sent only changes.
fn run_model(seed: u64, steps: usize) -> usize {
    let device_bytes = 12 << 10;
    let mut rig = Rig::new(seed, device_bytes, 3);
    let mut model = Model::new(seed);
    let mut changes_only = 0;
    let mut logs: Vec<(DeviceBuffer, Vec<u8>)> = Vec::new();
    for number in 0..steps {
        for _ in 0..model.below(8) {
            model.edit();
        }
        if model.below(3) == 0 {
            model.reorder();
        }
        // Sometimes the number of tables changes, and the order of tables and arrays.
        let tables = if model.below(16) == 0 { model.below(7) } else { 6 };
        let arrays = [model.below(3) * 4, model.below(40)].map(|len| vec![number as u32; len]);
        let mut step = rig.stager.begin_wait().unwrap();
        let mut parts: Vec<Part> = Vec::new();
        for index in 0..tables {
            let (table, slots) = (&model.tables[index], &model.staged[index]);
            let width =
                slots.iter().map(|&slot| table.len(row_at(slot)).unwrap()).max().unwrap_or(0);
            let part = step.block_rows(table, &rows_at(slots), width).unwrap();
            let columns = table.max_blocks();
            let right = bytemuck::cast_slice(&expected(table, slots, columns)).to_vec();
            parts.push(Part { part, columns, right });
        }
        for array in &arrays {
            let (part, right) = (step.array(array).unwrap(), bytemuck::cast_slice(array).to_vec());
            parts.push(Part { part, columns: 0, right });
        }
        if model.below(32) == 0 {
            continue; // a step that is given up
        }
        let staged = step.submit(&rig.machine.stream).unwrap();
        changes_only += usize::from(staged.words() > 0);
        log_parts(&rig, &staged, parts, &mut logs);
        if number % 8 == 7 {
            check_logs(&rig, &mut logs, seed);
        }
    }
    check_logs(&rig, &mut logs, seed);
    assert_eq!(rig.machine.sim.findings(), []);
    changes_only
}

/// A part of a step and its expected data: for a table, rows of `columns` entries.
struct Part {
    part: PartId,
    columns: usize,
    right: Vec<u8>,
}

/// Lets a kernel copy the staged data to other memory.
fn log_parts(
    rig: &Rig,
    staged: &Staged,
    parts: Vec<Part>,
    logs: &mut Vec<(DeviceBuffer, Vec<u8>)>,
) {
    for Part { part, columns, mut right } in parts {
        let span = staged.span(part).unwrap();
        let stride = staged.row_entries(part).unwrap();
        if stride > 0 {
            let rows: Vec<&[u8]> =
                right.chunks_exact(columns * 4).map(|row| &row[..stride * 4]).collect();
            right = rows.concat();
        }
        assert_eq!(span.bytes(), right.len() as u64);
        if span.bytes() > 0 {
            let log = rig.machine.memory(span.bytes());
            let Machine { stream, .. } = &rig.machine;
            rig.machine.launch_copy(stream, log.span(), span.address()).unwrap();
            logs.push((log, right));
        }
    }
}

fn check_logs(rig: &Rig, logs: &mut Vec<(DeviceBuffer, Vec<u8>)>, seed: u64) {
    for (log, right) in logs.drain(..) {
        assert_eq!(rig.machine.read(log.span()), right, "seed {seed}");
    }
}

#[test]
fn random_steps_arrive_as_they_were_when_staged() {
    let mut changes_only = 0;
    for seed in 0..24 {
        changes_only += run_model(seed, 250);
    }
    assert!(changes_only > 24 * 50, "{changes_only} steps sent changes only");
}

/// The tables of every path, staged three times behind a stalled stream: first completely, then as
/// changes.
fn stage_behind_a_stall(rig: &mut Rig) -> Vec<(Vec<i32>, Vec<i32>)> {
    let mut tables = [4, 4, 8, 4].map(|slots| filled(slots, 64, 30));
    let slots = tables.each_ref().map(|table| (0..table.rows()).collect::<Vec<_>>());
    let mut logs = Vec::new();
    rig.machine.sim.hold(rig.machine.stream.raw());
    for round in 0..3 {
        for (path, table) in (0..).zip(&mut tables) {
            for slot in 0..table.rows() {
                table
                    .append(row_at(slot), 10_000 * (round + 1) + 100 * path + slot as i32)
                    .unwrap();
            }
        }
        let mut step = rig.stager.begin().unwrap();
        let parts = [0, 1, 2, 3]
            .map(|path| step.block_rows(&tables[path], &rows_at(&slots[path]), 40).unwrap());
        let staged = step.submit(&rig.machine.stream).unwrap();
        assert_eq!(staged.words() > 0, round > 0, "changes only from the second step on");
        for (path, part) in parts.into_iter().enumerate() {
            let span = staged.span(part).unwrap();
            let log = rig.machine.memory(span.bytes());
            rig.machine.launch_copy(&rig.machine.stream, log.span(), span.address()).unwrap();
            logs.push((log, expected(&tables[path], &slots[path], 64)));
        }
    }
    rig.machine.sim.release_hold(rig.machine.stream.raw());
    let read = |log: &DeviceBuffer| bytemuck::pod_collect_to_vec(&rig.machine.read(log.span()));
    logs.into_iter().map(|(log, right)| (read(&log), right)).collect()
}

#[test]
fn changes_of_every_path_staged_behind_a_stalled_stream_arrive_intact() {
    for seed in 0..16 {
        let mut rig = Rig::new(seed, 1 << 14, 3);
        for (arrived, right) in stage_behind_a_stall(&mut rig) {
            assert_eq!(arrived, right, "seed {seed}");
        }
        assert_eq!(rig.machine.sim.findings(), []);
    }
}

/// With the protection disabled, the second step's words are those of the third, on every path.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn without_events_changes_of_every_path_are_overwritten() {
    let mut rig = Rig::new(0, 1 << 14, 3);
    rig.pool.sabotage_reuse_before_event();
    rig.machine.sim.set_race_check(RaceCheck::Report);
    let seen = stage_behind_a_stall(&mut rig);
    assert!(!rig.machine.sim.races().is_empty(), "nothing orders the readers and the host");
    let steps: Vec<_> = seen.chunks_exact(4).collect();
    for (path, (arrived, right)) in steps[1].iter().enumerate() {
        assert_ne!(arrived, right, "path {path}: the test above would not see the bug it is for");
    }
}

#[test]
fn a_table_that_leaves_no_room_to_grow_is_still_sent() {
    // 9 rows of 10 entries are 360 bytes; with room to grow they would be 576.
    let mut rig = Rig::new(6, 512, 2);
    let mut table = filled(9, 40, 10);
    let slots: Vec<usize> = (0..9).collect();
    let mut step = rig.stager.begin().unwrap();
    let rows = step.block_rows(&table, &rows_at(&slots), 10).unwrap();
    assert!(step.array(&[0u8; 64]).is_err(), "no part starts beyond the memory");
    let staged = step.submit(&rig.machine.stream).unwrap();
    assert_eq!(staged.row_entries(rows), Ok(10));
    table.set(row_at(4), 4, 44).unwrap();
    let mut step = rig.stager.begin().unwrap();
    let rows = step.block_rows(&table, &rows_at(&slots), 10).unwrap();
    let staged = step.submit(&rig.machine.stream).unwrap();
    assert_eq!((staged.words(), rig.read(&staged, rows)), (1, expected(&table, &slots, 10)));
}

#[test]
fn the_end_of_a_short_array_carries_nothing_of_earlier_steps() {
    let mut rig = Rig::new(8, 1 << 12, 1);
    let table = filled(2, 16, 9);
    let mut stage = |array: &[u8]| {
        let mut step = rig.stager.begin_wait().unwrap();
        step.block_rows(&table, &rows_at(&[0, 1]), 9).unwrap();
        let part = step.array(array).unwrap();
        let staged = step.submit(&rig.machine.stream).unwrap();
        rig.machine.stream.synchronize().unwrap();
        (staged.words(), staged.span(part).unwrap())
    };
    stage(&[0xAA; 16]);
    let (words, long) = stage(&[0xAA; 16]);
    assert_eq!((words, stage(&[0xBB]).0), (1, 1));
    let mut right = [0; 16];
    right[0] = 0xBB;
    assert_eq!(rig.machine.read(long), right);
}

#[test]
fn a_little_of_one_table_and_all_of_the_next_travel_together() {
    let mut rig = Rig::new(7, 1 << 14, 2);
    let (mut first, second) = (filled(8, 64, 64), filled(8, 64, 9));
    let slots: Vec<usize> = (0..8).collect();
    rig.stage(&first, &slots, 64, &[1]);
    first.set(row_at(7), 63, 7).unwrap();
    let copies = rig.machine.calls("cuMemcpyHtoDAsync");
    let mut step = rig.stager.begin().unwrap();
    let rows = [&first, &second].map(|table| step.block_rows(table, &rows_at(&slots), 9).unwrap());
    let lens = step.array(&[1u32, 2, 3]).unwrap();
    let staged = step.submit(&rig.machine.stream).unwrap();
    assert_eq!((staged.words(), rig.machine.calls("cuMemcpyHtoDAsync")), (1, copies + 1));
    assert_eq!(rig.read::<i32>(&staged, rows[0]), expected(&first, &slots, 64));
    assert_eq!(rig.read::<i32>(&staged, rows[1]), expected(&second, &slots, 16));
    assert_eq!(rig.read::<u32>(&staged, lens), [1, 2, 3]);
}
