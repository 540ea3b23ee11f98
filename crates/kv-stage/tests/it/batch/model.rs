//! A batch beside a model of it in plain Rust: random steps, of which every byte of every buffer is
//! compared.

use crate::machine::entries;
use cuda_driver::{DeviceSpan, Stream};
use kv_stage::error::BatchError;
use kv_stage::{
    BatchLength, BatchOptions, BatchTable, BlockId, DeviceBatch, Row, RowStates, StagingOptions,
    StagingPool, TableEntry,
};
use kv_testkit::Random;

/// Where a row stands.
#[derive(Clone, Copy, Default)]
struct RowModel {
    /// Where the tokens of its last step began.
    start: u32,
    /// What the device's entry of accepted tokens says.
    accepted: u32,
    /// The lower and upper bound of where the next tokens begin.
    bounds: (u32, u32),
    /// Tokens of its last step before its drafts.
    sure: u32,
}

pub(crate) struct Model {
    pub(crate) batch: DeviceBatch,
    options: BatchOptions,
    tables: Vec<Vec<i32>>,
    rows: Vec<RowModel>,
    random: Random,
    /// Steps that were refused, and sent again.
    pub(crate) refused: usize,
}

/// A row of a step: its number, the bounds of where its tokens begin, its tokens, and what is said of its states.
type Job = (u32, u32, u32, u32, RowStates);

/// What a table holds: the dense rows, the slots, and the states that rows begin with.
type TableContents = (Vec<i32>, Vec<i64>, Vec<i32>);

/// The contents of all buffers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Contents {
    pub(crate) tables: Vec<TableContents>,
    pub(crate) lengths: Vec<i32>,
    pub(crate) query_starts: Vec<i32>,
    pub(crate) positions: Vec<i64>,
    pub(crate) rows: Vec<i32>,
    pub(crate) accepted: Vec<u32>,
    pub(crate) arrays: Vec<Vec<u8>>,
}

/// How a step reaches the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sends {
    /// The inputs and the gather.
    All,
    /// The inputs alone: the gather is in a graph.
    Inputs,
}

pub(crate) fn small() -> BatchOptions {
    BatchOptions {
        rows: 12,
        sequences_max: 6,
        tokens_max: 40,
        tables: vec![
            BatchTable { width: 9, block_tokens: 4, null_block: BlockId::from(0), is_state: false },
            BatchTable {
                width: 5,
                block_tokens: 7,
                null_block: BlockId::from(77),
                is_state: false,
            },
            BatchTable { width: 4, block_tokens: 1, null_block: BlockId::from(78), is_state: true },
        ],
        arrays: vec![24, 37],
    }
}

/// A model whose first layers are recurrent.
pub(crate) fn recurrent() -> BatchOptions {
    let states =
        BatchTable { width: 3, block_tokens: 1, null_block: BlockId::from(9), is_state: true };
    let table =
        BatchTable { width: 9, block_tokens: 4, null_block: BlockId::from(0), is_state: false };
    let tables = vec![states, table];
    BatchOptions { rows: 6, sequences_max: 4, tokens_max: 24, tables, arrays: vec![] }
}

/// A table whose rows are longer than a block of threads fetches at once.
pub(crate) fn wide() -> BatchOptions {
    let table =
        BatchTable { width: 1500, block_tokens: 2, null_block: BlockId::from(5), is_state: false };
    BatchOptions { rows: 3, sequences_max: 2, tokens_max: 9, tables: vec![table], arrays: vec![] }
}

impl Model {
    pub(crate) fn new(
        device: &cuda_driver::Device,
        options: BatchOptions,
        buffers: usize,
        seed: u64,
    ) -> Self {
        let pool = pool(device, &options, buffers);
        Self::over(DeviceBatch::new(&pool, options).unwrap(), seed)
    }

    /// Beside a batch that has had no step.
    pub(crate) fn over(batch: DeviceBatch, seed: u64) -> Self {
        let options = batch.options().clone();
        let entries = |table: &BatchTable| vec![-1; (options.rows * table.width) as usize];
        Self {
            batch,
            tables: options.tables.iter().map(entries).collect(),
            rows: vec![RowModel::default(); options.rows as usize],
            random: Random::new(seed),
            refused: 0,
            options,
        }
    }

    fn below(&mut self, end: u32) -> u32 {
        self.random.below(end.max(1).into()) as u32
    }

    /// Changes some entries, of any rows, now and then twice.
    fn edit_some(&mut self) {
        let mut last = (0, 0);
        for _ in 0..self.below(9) {
            if self.below(3) > 0 {
                let table = self.below(self.options.tables.len() as u32) as usize;
                last = (table, self.below(self.options.rows));
            }
            let (table, row) = last;
            let width = self.options.tables[table].width;
            let first = self.below(width);
            let count = 1 + self.below(width - first);
            let ids: Vec<i32> = (0..count)
                .map(|_| if self.below(8) == 0 { -1 } else { self.below(1 << 20) as i32 })
                .collect();
            self.batch.edit(table, Row::new(row), first, &entries(&ids)).unwrap();
            self.tables[table][(row * width + first) as usize..][..ids.len()].copy_from_slice(&ids);
        }
    }

    /// Stages a step of random rows. Returns what the buffers hold then.
    pub(crate) fn step(&mut self, stream: &Stream, sends: Sends) -> Contents {
        self.edit_some();
        let most = self.options.sequences_max;
        let sequences = match self.below(4) {
            0 => most,
            _ => self.below(most + 1),
        };
        let mut picked: Vec<u32> = (0..self.options.rows).collect();
        for at in 0..sequences as usize {
            let other = at + self.below(picked.len() as u32 - at as u32) as usize;
            picked.swap(at, other);
        }
        picked.truncate(sequences as usize);
        let arrays: Vec<Vec<u8>> = (0..self.options.arrays.len())
            .map(|array| {
                let bytes = self.below(self.options.arrays[array] as u32 + 1);
                (0..bytes).map(|_| 1 + self.below(255) as u8).collect()
            })
            .collect();
        let tables = self.options.tables.iter().filter(|table| !table.is_state);
        let row_tokens = tables.map(|table| table.width * table.block_tokens).min();
        let row_tokens = row_tokens.unwrap();

        let mut jobs = Vec::new();
        let mut tokens_left = self.options.tokens_max;
        for &row in &picked {
            let (mut resolved, mut upper) = self.rows[row as usize].bounds;
            match self.below(6) {
                // What is known by now, of what was open.
                0 | 1 => {
                    let state = self.rows[row as usize];
                    let start = (state.start + state.accepted.min(64)).clamp(resolved, upper);
                    (resolved, upper) = (start, start);
                }
                // Another sequence.
                2 => {
                    let start = self.below(row_tokens);
                    (resolved, upper) = (start, start);
                }
                _ => {}
            }
            let room = tokens_left.min(row_tokens.saturating_sub(upper));
            let most = if self.below(12) == 0 { room } else { room.min(9) };
            let tokens = self.below(most + 1);
            if upper > row_tokens {
                continue;
            }
            tokens_left -= tokens;
            // More than there is room for, now and then.
            let drafts = if self.below(2) == 0 { 0 } else { self.below(tokens.min(7)) };
            let input = match self.below(4) {
                0 => self.below(7),
                _ if resolved == upper => self.below(4),
                _ => self.rows[row as usize].sure,
            };
            jobs.push((row, resolved, upper, tokens, RowStates { drafts, input }));
        }

        while let Err(error) = self.send(stream, sends, &jobs, &arrays) {
            self.refused += 1;
            assert!(self.refused < 4, "{error}");
        }
        self.expected(&jobs, &arrays)
    }

    fn send(
        &mut self,
        stream: &Stream,
        sends: Sends,
        jobs: &[Job],
        arrays: &[Vec<u8>],
    ) -> Result<(), BatchError> {
        let mut step = self.batch.step_wait(stream)?;
        for (array, values) in arrays.iter().enumerate() {
            if !values.is_empty() {
                step.array(array, values)?;
            }
        }
        for &(row, resolved, upper, tokens, states) in jobs {
            let bounds = (resolved.into(), upper.into());
            step.row_with_states(Row::new(row), bounds, tokens, states)?;
        }
        let staged = match sends {
            Sends::All => step.submit()?,
            Sends::Inputs => step.submit_inputs()?,
        };
        let lengths: Vec<BatchLength> = jobs
            .iter()
            .map(|&(_, resolved, upper, tokens, _)| BatchLength {
                least: resolved + tokens,
                most: upper + tokens,
            })
            .collect();
        assert_eq!(staged.lengths, lengths);
        Ok(())
    }

    /// What the buffers hold after a step of these rows.
    fn expected(&mut self, jobs: &[Job], arrays: &[Vec<u8>]) -> Contents {
        let BatchOptions { sequences_max, tokens_max, .. } = self.options;
        let mut contents = self.padding();
        let mut tokens_before = 0;
        for (number, &(row, resolved, upper, tokens, states)) in jobs.iter().enumerate() {
            let state = &mut self.rows[row as usize];
            let start = u64::from(state.start) + u64::from(state.accepted);
            let start = start.clamp(resolved.into(), upper.into()) as u32;
            let RowStates { drafts, input } = states;
            let entry = match resolved == upper {
                true => input,
                false => start.saturating_sub(state.start + input),
            };
            let (bounds, sure) = ((start, start + tokens), tokens - drafts);
            *state = RowModel { start, accepted: tokens, bounds, sure };
            // With drafts, at least one token stands.
            state.bounds.0 += tokens.min(1);
            contents.lengths[number] = (start + tokens) as i32;
            contents.query_starts[number] = tokens_before as i32;
            contents.rows[number] = row as i32;
            for (position, token) in (start..start + tokens).zip(tokens_before..) {
                contents.positions[token as usize] = position.into();
            }
            for (table, ids) in self.tables.iter().enumerate() {
                let BatchTable { width, block_tokens, null_block, is_state } =
                    self.options.tables[table];
                let ids = &ids[(row * width) as usize..][..width as usize];
                let null_block = TableEntry::from(null_block).get();
                let (dense, slots, inputs) = &mut contents.tables[table];
                let or_null = |id: i32| if id == -1 { null_block } else { id };
                if is_state {
                    let left = if start + tokens > 0 { drafts + 1 } else { 0 }.min(width) as usize;
                    let row = number * width as usize;
                    for (dense, &id) in dense[row..].iter_mut().zip(&ids[..left]) {
                        *dense = or_null(id);
                    }
                    let last = (tokens_before + tokens) as usize;
                    let count = left.min(tokens as usize);
                    for (slot, &id) in
                        slots[last - count..last].iter_mut().zip(&ids[left - count..])
                    {
                        *slot = id.into();
                    }
                    if start > 0 {
                        inputs[number] = or_null(ids[entry.min(width - 1) as usize]);
                    }
                    continue;
                }
                let columns = (start + tokens).div_ceil(block_tokens);
                for column in 0..columns {
                    let id = ids[column as usize];
                    dense[number * width as usize + column as usize] = or_null(id);
                }
                for (position, token) in (start..start + tokens).zip(tokens_before..) {
                    let id = i64::from(ids[(position / block_tokens) as usize]);
                    if id >= 0 {
                        slots[token as usize] =
                            id * i64::from(block_tokens) + i64::from(position % block_tokens);
                    }
                }
            }
            tokens_before += tokens;
        }
        contents.query_starts[jobs.len()..].fill(tokens_before as i32);
        for (array, values) in contents.arrays.iter_mut().zip(arrays) {
            array[..values.len()].copy_from_slice(values);
        }
        contents.accepted = self.rows.iter().map(|row| row.accepted).collect();
        assert!(jobs.len() <= sequences_max as usize && tokens_before <= tokens_max);
        contents
    }

    /// A batch of nothing.
    pub(crate) fn padding(&self) -> Contents {
        let sequences = self.options.sequences_max as usize;
        let tokens = self.options.tokens_max as usize;
        let table = |table: &BatchTable| {
            let inputs = if table.is_state { sequences } else { 0 };
            let null_block = TableEntry::from(table.null_block).get();
            let dense = vec![null_block; sequences * table.width as usize];
            (dense, vec![-1; tokens], vec![null_block; inputs])
        };
        Contents {
            tables: self.options.tables.iter().map(table).collect(),
            lengths: vec![0; sequences],
            query_starts: vec![0; sequences + 1],
            positions: vec![0; tokens],
            rows: vec![-1; sequences],
            accepted: vec![0; self.options.rows as usize],
            arrays: self.options.arrays.iter().map(|&bytes| vec![0; bytes as usize]).collect(),
        }
    }

    /// Samples: some rows of the last step had drafts rejected, and a few counts are wrong. Returns
    /// what the sampler makes of the accepted counts.
    pub(crate) fn sample(&mut self, contents: &Contents) -> Vec<u32> {
        for row in contents.rows.iter().filter_map(|&row| usize::try_from(row).ok()) {
            let count = match self.below(8) {
                0..4 => self.below(self.rows[row].accepted + 1),
                4 => u32::MAX - self.below(3),
                _ => continue,
            };
            self.rows[row].accepted = count;
        }
        self.rows.iter().map(|row| row.accepted).collect()
    }

    /// What the buffers hold once the work of the stream has run.
    pub(crate) fn contents(&self, stream: &Stream) -> Contents {
        let buffers = self.batch.buffers();
        let table = |table: &kv_stage::TableBuffers| {
            let inputs = table.state_in.map(|inputs| read(stream, inputs));
            (read(stream, table.block_table), read(stream, table.slots), inputs.unwrap_or_default())
        };
        Contents {
            tables: buffers.tables.iter().map(table).collect(),
            lengths: read(stream, buffers.lengths),
            query_starts: read(stream, buffers.query_starts),
            positions: read(stream, buffers.positions),
            rows: read(stream, buffers.rows),
            accepted: read(stream, buffers.accepted),
            arrays: buffers.arrays.iter().map(|&array| read(stream, array)).collect(),
        }
    }
}

/// A pool with buffers for a batch.
pub(crate) fn pool(
    device: &cuda_driver::Device,
    options: &BatchOptions,
    buffers: usize,
) -> StagingPool {
    let staging = StagingOptions { buffer_bytes: options.buffer_bytes(), buffers_max: buffers };
    StagingPool::new(device, staging).unwrap()
}

pub(crate) fn read<T: bytemuck::Pod>(stream: &Stream, span: DeviceSpan) -> Vec<T> {
    let mut bytes = vec![0; span.bytes() as usize];
    stream.download(&mut bytes, span).unwrap();
    bytemuck::pod_collect_to_vec(&bytes)
}
