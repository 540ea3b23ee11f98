//! Block tables on their way to a device: those of every path (self-attention, cross-attention, beams, a
//! draft model), and those of long runs.

use std::collections::VecDeque;

use crate::machine::entries;
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Event, Stream};
use kv_stage::{
    BatchOptions, BatchTable, BlockId, DeviceBatch, Row, StagingOptions, StagingPool, SubmittedView,
};
use kv_testkit::Random;
use kv_testkit::machine::{CopyKernel, read};

/// Number of paths.
pub(crate) const PATHS: usize = 4;
/// Entries of a row in the table of each path.
const WIDTHS: [u32; PATHS] = [12, 6, 24, 9];
pub(crate) const ROWS: u32 = 4;
/// Blocks of each row, of one token each.
pub(crate) const BLOCKS: u32 = 3;
const NULL_BLOCK: i32 = i32::MAX;

fn table(width: u32) -> BatchTable {
    BatchTable {
        width,
        block_tokens: 1,
        null_block: BlockId::new(NULL_BLOCK as u32).unwrap(),
        is_state: false,
    }
}

/// A batch with a table for each path.
pub(crate) fn paths() -> BatchOptions {
    BatchOptions {
        rows: ROWS,
        sequences_max: ROWS,
        tokens_max: ROWS,
        tables: WIDTHS.map(table).into(),
        arrays: vec![16],
    }
}

/// The ids of a row in a round.
fn ids(round: i32, path: usize, row: u32) -> [i32; BLOCKS as usize] {
    let first = 10_000 * (round + 1) + 1_000 * path as i32 + 100 * row as i32;
    std::array::from_fn(|block| first + block as i32)
}

/// A path's dense table in a round, as bytes.
pub(crate) fn dense(round: i32, path: usize) -> Vec<u8> {
    let behind = vec![NULL_BLOCK; (WIDTHS[path] - BLOCKS) as usize];
    let rows = (0..ROWS).map(|row| [&ids(round, path, row)[..], &behind].concat());
    bytemuck::cast_slice(&rows.collect::<Vec<_>>().concat()).to_vec()
}

/// Writes the tables of every path and sends a step of all rows.
pub(crate) fn stage_paths(stream: &Stream, batch: &mut DeviceBatch, round: i32) {
    for path in 0..PATHS {
        for row in 0..ROWS {
            batch.edit(path, Row::new(row), 0, &entries(&ids(round, path, row))).unwrap();
        }
    }
    let mut step = batch.step(stream).unwrap();
    for row in 0..ROWS {
        let tokens = u64::from(BLOCKS) - 1;
        step.row(Row::new(row), tokens, tokens, 1).unwrap();
    }
    step.submit().unwrap();
}

/// Memory for what a kernel reads of the table of each path.
pub(crate) fn path_logs(device: &Device) -> [DeviceBuffer; PATHS] {
    let bytes = WIDTHS.map(|width| u64::from(ROWS * width) * 4);
    bytes.map(|bytes| DeviceBuffer::alloc(device, bytes).unwrap())
}

/// Lets a kernel read the table of each path.
pub(crate) fn log_paths(
    stream: &Stream,
    kernel: &CopyKernel,
    batch: &DeviceBatch,
    logs: &[DeviceBuffer; PATHS],
) {
    for (table, log) in batch.buffers().tables.iter().zip(logs) {
        // SAFETY: device memory of equal lengths.
        unsafe { kernel.launch(stream, log.span(), table.block_table.address()) }.unwrap();
    }
}

const COLUMNS: usize = 16;
const SEQUENCES: usize = 6;
const TABLE_BYTES: u64 = (SEQUENCES * COLUMNS * size_of::<i32>()) as u64;
/// Number of steps between two checks of the received data.
const LOG: usize = 64;

/// Number of steps of a long run; `KV_STAGE_ITERATIONS` sets another number.
pub(crate) fn iterations() -> usize {
    match std::env::var("KV_STAGE_ITERATIONS") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => 100_000,
    }
}

/// The block table of a long run as the host has it, of blocks of one token.
struct Table {
    ids: [[i32; COLUMNS]; SEQUENCES],
    lens: [usize; SEQUENCES],
}

impl Table {
    /// Lets a sequence arrive, grow or leave; answers its row if it has another block.
    fn edit(&mut self, random: &mut Random) -> Option<usize> {
        let row = random.below(SEQUENCES as u64) as usize;
        let len = self.lens[row];
        if len == COLUMNS || random.once_in(8) {
            self.ids[row].fill(NULL_BLOCK);
            self.lens[row] = 0;
            return None;
        }
        self.ids[row][len] = random.below(1 << 30) as i32;
        self.lens[row] += 1;
        Some(row)
    }
}

/// What each step of a long run sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sends {
    /// The whole table in a staging buffer, which a kernel reads.
    Everything,
    /// What changed, in a batch.
    Changes,
}

/// A long run: a pool, and tables that go through it.
pub(crate) struct Run<'a> {
    pub(crate) pool: StagingPool,
    batch: Option<DeviceBatch>,
    stream: &'a Stream,
    kernel: &'a CopyKernel,
    table: Table,
    log: DeviceBuffer,
    random: Random,
}

impl<'a> Run<'a> {
    /// With a pool of `buffers` buffers.
    pub(crate) fn new(
        stream: &'a Stream,
        kernel: &'a CopyKernel,
        sends: Sends,
        buffers: usize,
    ) -> Self {
        let device = stream.device();
        let sequences = SEQUENCES as u32;
        let options = BatchOptions {
            rows: sequences,
            sequences_max: sequences,
            tokens_max: sequences,
            tables: vec![table(COLUMNS as u32)],
            arrays: vec![],
        };
        let buffer_bytes = match sends {
            Sends::Everything => TABLE_BYTES,
            Sends::Changes => options.buffer_bytes(),
        };
        let pooled = StagingOptions { buffer_bytes, buffers_max: buffers };
        let pool = StagingPool::new(device, pooled).unwrap();
        let batch = (sends == Sends::Changes).then(|| DeviceBatch::new(&pool, options).unwrap());
        let table = Table { ids: [[NULL_BLOCK; COLUMNS]; SEQUENCES], lens: [0; SEQUENCES] };
        let log = DeviceBuffer::alloc(device, LOG as u64 * TABLE_BYTES).unwrap();
        Self { pool, batch, stream, kernel, table, log, random: Random::new(buffers as u64) }
    }

    /// Sends the table and lets a kernel log it. The row `changed` has another last block.
    fn send(&mut self, changed: Option<usize>, log: DeviceSpan) {
        let Self { stream, kernel, table, .. } = self;
        let Some(batch) = &mut self.batch else {
            let mut buffer = self.pool.acquire().unwrap();
            buffer.bytes_mut().copy_from_slice(bytemuck::cast_slice(&table.ids));
            // SAFETY: the pool keeps the buffer until the kernel has run.
            let read =
                |view: &SubmittedView<'_>| unsafe { kernel.launch(stream, log, view.address()) };
            buffer.submit(stream, read).unwrap();
            return;
        };
        if let Some(row) = changed {
            let last = table.lens[row] - 1;
            let id = [table.ids[row][last]];
            batch.edit(0, Row::new(row as u32), last as u32, &entries(&id)).unwrap();
        }
        let mut step = batch.step(stream).unwrap();
        for (row, &len) in (0..).zip(&table.lens) {
            let tokens = len.min(1);
            let start = (len - tokens) as u64;
            step.row(Row::new(row), start, start, tokens as u32).unwrap();
        }
        let source = step.submit().unwrap().buffers.tables[0].block_table;
        // SAFETY: device memory of equal lengths.
        unsafe { kernel.launch(stream, log, source.address()) }.unwrap();
    }

    /// Runs the steps with the host `depth` steps ahead and compares each table that was logged. Calls `after`
    /// behind each step.
    pub(crate) fn steps(
        &mut self,
        depth: usize,
        steps: usize,
        mut after: impl FnMut(&StagingPool),
    ) {
        let event = || Event::new(self.stream.device()).unwrap();
        let mut spare: Vec<Event> = (0..=depth).map(|_| event()).collect();
        let mut ahead: VecDeque<Event> = VecDeque::new();
        let mut expected = Vec::new();
        for number in 0..steps {
            if ahead.len() == depth {
                let event = ahead.pop_front().unwrap();
                event.synchronize().unwrap();
                spare.push(event);
            }
            let changed = self.table.edit(&mut self.random);
            let place = (number % LOG) as u64 * TABLE_BYTES;
            let entry = self.log.span().slice(place, TABLE_BYTES).unwrap();
            self.send(changed, entry);
            expected.extend_from_slice(bytemuck::cast_slice::<_, u8>(&self.table.ids));
            let event = spare.pop().unwrap();
            event.record(self.stream).unwrap();
            ahead.push_back(event);
            after(&self.pool);
            if number % LOG == LOG - 1 || number + 1 == steps {
                let arrived = read(self.stream, self.log.span());
                let same = arrived[..expected.len()] == expected;
                assert!(same, "a table was wrong at depth {depth}, by step {number}");
                expected.clear();
            }
        }
    }
}
