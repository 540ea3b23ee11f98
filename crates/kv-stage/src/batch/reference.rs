//! What `gather_batch` computes, for a simulated device.

use bytemuck::AnyBitPattern;
use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::kernel::GATHER;

/// The references of this crate's kernels, to register with a simulated device. They run faster than
/// the kernels' PTX, which the device interprets without them.
#[must_use]
pub fn references() -> &'static [KernelReference] {
    const { &[KernelReference { name: GATHER, run: gather_batch }] }
}

/// `Table` of `kernels/stage/batch.cu`.
struct Table {
    ids: u64,
    dense: u64,
    slots: u64,
    live: u64,
    state_in: u64,
    width: u32,
    block_tokens: u32,
    null_block: i32,
}

struct Job {
    row: u32,
    resolved: u32,
    upper: u32,
    first_token: u32,
    drafts: u32,
    input: u32,
}

type Outcome<T> = Result<T, ReferenceError>;

fn gather_batch(memory: &mut dyn DeviceMemory, _: &LaunchConfig, args: &KernelArgs) -> Outcome<()> {
    let address = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
    let number = |index| args.get::<u32>(index).ok_or(ReferenceError::Argument { index });
    let packet = address(0)?;
    let tables = load_tables(memory, address(1)?, number(2)?)?;
    let (arrays, array_count) = (address(3)?, number(4)?);
    let (states, accepted, rows) = (address(5)?, address(6)?, address(7)?);
    let (lengths, query_starts, positions) = (address(8)?, address(9)?, address(10)?);
    let (sequences_max, tokens_max) = (number(11)?, number(12)?);

    let header = load::<u32>(memory, packet, 16)?;
    let step = u64::from(header[0]) | u64::from(header[1]) << 32;
    let (sequences, jobs, tokens) = (header[2] as usize, header[3] as usize, header[4]);
    let word = |at: u32| packet + u64::from(at) * 4;
    let records = load::<u32>(memory, word(header[5]), jobs * 8)?;
    let job = |r: &[u32]| Job {
        row: r[0],
        resolved: r[1],
        upper: r[2],
        first_token: r[3],
        drafts: r[4],
        input: r[5],
    };
    let records: Vec<Job> = records.chunks_exact(8).map(job).collect();
    let heads = load::<u32>(memory, word(header[6]), jobs * tables.len())?;
    for (table, heads) in tables.iter().zip(heads.chunks(jobs.max(1))) {
        for (job, &head) in records.iter().zip(heads) {
            apply(memory, table.line(job.row), head, (word(header[7]), word(header[8])))?;
        }
    }

    let batch = records.get(..sequences).unwrap_or(&records);
    let last = (states, accepted);
    let mut starts = Vec::with_capacity(batch.len());
    for (number, job) in batch.iter().enumerate() {
        let next = batch.get(number + 1).map_or(tokens, |next| next.first_token);
        starts.push(begin(memory, step, job, next - job.first_token, last)?);
    }
    for table in &tables {
        for (number, job) in
            (0..sequences_max as usize).zip(batch.iter().map(Some).chain(std::iter::repeat(None)))
        {
            let span = starts.get(number).copied().unwrap_or_default();
            gather_row(memory, table, number as u64, job, span)?;
        }
        let padding = vec![-1i64; (tokens_max - tokens) as usize];
        store(memory, table.slots + u64::from(tokens) * 8, &padding)?;
    }

    let row_of = batch.iter().map(|job| job.row as i32);
    store(memory, rows, &padded(row_of, sequences_max, -1))?;
    let ends = starts.iter().map(|span| span.end as i32);
    store(memory, lengths, &padded(ends, sequences_max, 0))?;
    let firsts = batch.iter().map(|job| job.first_token as i32);
    store(memory, query_starts, &padded(firsts, sequences_max + 1, tokens as i32))?;
    let places = starts.iter().flat_map(|span| i64::from(span.start)..i64::from(span.end));
    store(memory, positions, &padded(places, tokens_max, 0))?;

    let parts = load::<u32>(memory, packet + 64, array_count as usize * 2)?;
    for (array, part) in (0..).zip(parts.chunks_exact(2)) {
        let place = load::<u64>(memory, arrays + array * 16, 2)?;
        let mut values = load::<u8>(memory, word(part[0]), part[1] as usize * 16)?;
        values.resize(place[1] as usize * 16, 0);
        store(memory, place[0], &values)?;
    }
    Ok(())
}

/// The tokens of a row, and the entry with the state that they begin with.
#[derive(Clone, Copy, Default)]
struct Span {
    start: u32,
    end: u32,
    entry: u32,
}

/// Where the tokens of a row begin and end. Notes them as those of the row's last step.
fn begin(
    memory: &mut dyn DeviceMemory,
    step: u64,
    job: &Job,
    count: u32,
    (states, accepted): (u64, u64),
) -> Outcome<Span> {
    let (state, entry) = (states + u64::from(job.row) * 16, accepted + u64::from(job.row) * 4);
    let last = load::<u64>(memory, state, 2)?;
    let again = last[0] == step;
    let stand = if again { 0 } else { load::<u32>(memory, entry, 1)?[0] };
    let start = u64::from(last[1] as u32) + u64::from(stand);
    let start = start.max(job.resolved.into()).min(job.upper.into()) as u32;
    let sure = (last[1] as u32).wrapping_add(job.input);
    let state_entry = match again {
        true => (last[1] >> 32) as u32,
        false if job.resolved == job.upper => job.input,
        false => start.saturating_sub(sure),
    };
    store(memory, state, &[step, u64::from(start) | u64::from(state_entry) << 32])?;
    if !again {
        store(memory, entry, &[count])?;
    }
    Ok(Span { start, end: start + count, entry: state_entry })
}

fn padded<T: Clone>(values: impl Iterator<Item = T>, count: u32, with: T) -> Vec<T> {
    let mut values: Vec<T> = values.collect();
    values.resize(count as usize, with);
    values
}

impl Table {
    fn line(&self, row: u32) -> u64 {
        self.ids + u64::from(row) * u64::from(self.width) * 4
    }
}

fn load_tables(memory: &dyn DeviceMemory, address: u64, count: u32) -> Outcome<Vec<Table>> {
    let of = |number: u64| {
        let at = address + number * 56;
        let (places, sizes) = (load::<u64>(memory, at, 5)?, load::<u32>(memory, at + 40, 3)?);
        Ok(Table {
            ids: places[0],
            dense: places[1],
            slots: places[2],
            live: places[3],
            state_in: places[4],
            width: sizes[0],
            block_tokens: sizes[1].max(1),
            null_block: sizes[2] as i32,
        })
    };
    (0..u64::from(count)).map(of).collect()
}

/// Applies a row's edits in order.
fn apply(
    memory: &mut dyn DeviceMemory,
    line: u64,
    head: u32,
    (edits, ids): (u64, u64),
) -> Outcome<()> {
    let mut next = head;
    while next != 0 {
        let edit = load::<u32>(memory, edits + u64::from(next - 1) * 16, 4)?;
        let values = load::<i32>(memory, ids + u64::from(edit[2]) * 4, edit[1] as usize)?;
        store(memory, line + u64::from(edit[0]) * 4, &values)?;
        next = edit[3];
    }
    Ok(())
}

/// Writes a row of the batch, or of its padding, as far as one table says.
fn gather_row(
    memory: &mut dyn DeviceMemory,
    table: &Table,
    number: u64,
    job: Option<&Job>,
    Span { start, end, entry }: Span,
) -> Outcome<()> {
    let is_state = table.state_in != 0;
    let drafts = job.map_or(0, |job| job.drafts);
    let columns = match is_state {
        true if end > 0 => drafts + 1,
        true => 0,
        false => end.div_ceil(table.block_tokens),
    };
    let columns = columns.min(table.width) as usize;
    let line = |count: usize, memory: &mut dyn DeviceMemory| match job {
        Some(job) => load::<i32>(memory, table.line(job.row), count),
        None => Ok(Vec::new()),
    };
    let ids = line(columns, memory)?;
    let live = table.live + number * 4;
    let filled = load::<u32>(memory, live, 1)?[0].min(table.width) as usize;
    let or_null = |id: i32| if id < 0 { table.null_block } else { id };
    let mut dense: Vec<i32> = ids.iter().map(|&id| or_null(id)).collect();
    dense.resize(filled.max(columns), table.null_block);
    store(memory, table.dense + number * u64::from(table.width) * 4, &dense)?;
    store(memory, live, &[columns as u32])?;
    if is_state {
        let entry = entry.min(table.width - 1) as usize;
        let id = match start {
            0 => -1,
            _ => line(entry + 1, memory)?.last().copied().unwrap_or(-1),
        };
        store(memory, table.state_in + number * 4, &[or_null(id)])?;
    }
    let slot = |position: u32| {
        let (left, offset) = (end - 1 - position, position % table.block_tokens);
        let (place, tokens, offset) = match is_state {
            true => ((columns as u32).checked_sub(1 + left), 1, 0),
            false => (Some(position / table.block_tokens), table.block_tokens, offset),
        };
        let id = place.map_or(-1, |place| ids[place as usize]);
        if id < 0 { -1 } else { i64::from(id) * i64::from(tokens) + i64::from(offset) }
    };
    let slots: Vec<i64> = (start..end).map(slot).collect();
    let first = job.map_or(0, |job| u64::from(job.first_token));
    store(memory, table.slots + first * 8, &slots)
}

/// `count` values at `address`.
fn load<T: AnyBitPattern>(
    memory: &dyn DeviceMemory,
    address: u64,
    count: usize,
) -> Outcome<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let bytes = memory.load(address, (count * size_of::<T>()) as u64)?;
    Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
}

fn store<T: bytemuck::NoUninit>(
    memory: &mut dyn DeviceMemory,
    address: u64,
    values: &[T],
) -> Outcome<()> {
    match values {
        [] => Ok(()),
        _ => Ok(memory.store(address, bytemuck::cast_slice(values))?),
    }
}
