//! What `paged_checksum` computes: the reader that takes most of a replay's time.

use std::sync::{Mutex, OnceLock, PoisonError};

use cuda_driver::reference::{DeviceMemory, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::{Arguments, at, load_array};
use crate::pattern::{BAD_BLOCK, GOLDEN, mixed, word_key};

/// Bytes below which a launch is not worth another thread.
const BYTES_OF_THREAD_MIN: u64 = 1 << 20;

/// Bytes that a thread takes at a time: little enough that all threads end at nearly the same time,
/// however late one of them began.
const BYTES_OF_TURN: u64 = 256 << 10;

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let block_table: u64 = args.take()?;
    let table_stride: u64 = args.take()?;
    let seq_lens: u64 = args.take()?;
    let sequences = u64::from(args.take::<u32>()?);
    let plane_ptrs: u64 = args.take()?;
    let planes = u64::from(args.take::<u32>()?);
    let row_bytes: u64 = args.take()?;
    let block_tokens = args.take_divisor()?;
    let block_stride_bytes: u64 = args.take()?;
    let token_stride_bytes: u64 = args.take()?;
    let num_blocks: u64 = args.take()?;
    let checksums: u64 = args.take()?;

    let pages = PagedPlanes {
        planes: load_array(memory, plane_ptrs, planes)?,
        row_bytes,
        block_stride_bytes,
        token_stride_bytes,
        num_blocks,
    };
    let lens = load_array::<u32>(memory, seq_lens, sequences)?;
    let mut items = Vec::new();
    for (sequence, &len) in (0u64..).zip(&lens) {
        let len = u64::from(len);
        let live = len.div_ceil(block_tokens).min(table_stride);
        let row = at(block_table, sequence.wrapping_mul(table_stride), 4);
        let blocks = load_array::<i32>(memory, row, live)?;
        items.extend((0u64..).zip(blocks).map(|(logical, block)| Item {
            block,
            tokens: (len - logical * block_tokens).min(block_tokens),
        }));
    }

    let mut sums = vec![0u64; items.len()];
    sum_all(&*memory, &pages, &items, &mut sums)?;

    let mut rest = sums.as_slice();
    for (sequence, &len) in (0u64..).zip(&lens) {
        let live = u64::from(len).div_ceil(block_tokens).min(table_stride);
        if live > 0 {
            let (row, after) = rest.split_at(live as usize);
            let to = at(checksums, sequence.wrapping_mul(table_stride), 8);
            memory.store(to, bytemuck::cast_slice(row))?;
            rest = after;
        }
    }
    Ok(())
}

/// A live entry of the block table.
#[derive(Clone, Copy, Debug)]
struct Item {
    block: i32,
    /// Tokens of the block that its sequence has.
    tokens: u64,
}

impl Item {
    fn bytes(self, token_bytes: u64) -> u64 {
        self.tokens.saturating_mul(token_bytes)
    }
}

/// Where rows lie.
#[derive(Debug)]
struct PagedPlanes {
    planes: Vec<u64>,
    row_bytes: u64,
    block_stride_bytes: u64,
    token_stride_bytes: u64,
    num_blocks: u64,
}

/// Sums every item, on several threads when there is enough to read.
fn sum_all(
    memory: &dyn DeviceMemory,
    pages: &PagedPlanes,
    items: &[Item],
    sums: &mut [u64],
) -> Result<(), ReferenceError> {
    let token_bytes = (pages.planes.len() as u64).saturating_mul(pages.row_bytes);
    let bytes = items.iter().fold(0u64, |sum, item| sum.saturating_add(item.bytes(token_bytes)));
    let threads = (bytes / BYTES_OF_THREAD_MIN).clamp(1, threads_max());
    if threads == 1 {
        return sum_some(memory, pages, items, sums);
    }
    let turns = bytes.div_ceil(BYTES_OF_TURN).max(1);
    let items_of_turn = items.len().div_ceil(turns as usize).max(1);
    let turns = items.chunks(items_of_turn).zip(sums.chunks_mut(items_of_turn)).enumerate();
    let turns = Mutex::new(turns);
    // The first failure in the order of the items is told, whichever thread meets it.
    let work = || {
        loop {
            let turn = turns.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((index, (items, sums))) = turn else { return Ok(()) };
            sum_some(memory, pages, items, sums).map_err(|error| (index, error))?;
        }
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let others = workers.into_iter().map(|worker| match worker.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        others.chain([own]).collect()
    });
    let first = outcomes.into_iter().filter_map(Result::err).min_by_key(|(index, _)| *index);
    first.map_or(Ok(()), |(_, error)| Err(error))
}

/// Threads of this machine, asked for once: the answer takes reading files.
fn threads_max() -> u64 {
    static THREADS: OnceLock<u64> = OnceLock::new();
    *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get() as u64))
}

fn sum_some(
    memory: &dyn DeviceMemory,
    pages: &PagedPlanes,
    items: &[Item],
    sums: &mut [u64],
) -> Result<(), ReferenceError> {
    for (item, sum) in items.iter().zip(sums) {
        *sum = pages.sum(memory, *item)?;
    }
    Ok(())
}

impl PagedPlanes {
    fn sum(&self, memory: &dyn DeviceMemory, item: Item) -> Result<u64, ReferenceError> {
        let Some(block) = u64::try_from(item.block).ok().filter(|id| *id < self.num_blocks) else {
            return Ok(BAD_BLOCK);
        };
        let planes = self.planes.len() as u64;
        let row_words = self.row_bytes / 8;
        let mut sum = 0u64;
        for (plane, &base) in (0u64..).zip(&self.planes) {
            let rows = StridedRows {
                row_words,
                first: plane.wrapping_mul(row_words),
                step: planes.wrapping_mul(row_words),
            };
            let start = at(base, block, self.block_stride_bytes);
            if self.token_stride_bytes == self.row_bytes {
                let bytes = memory.load(start, item.tokens.saturating_mul(self.row_bytes))?;
                sum = sum.wrapping_add(rows.sum(&bytes));
                continue;
            }
            for token in 0..item.tokens {
                let bytes =
                    memory.load(at(start, token, self.token_stride_bytes), self.row_bytes)?;
                let row = StridedRows { first: at(rows.first, token, rows.step), ..rows };
                sum = sum.wrapping_add(row.sum(&bytes));
            }
        }
        Ok(sum)
    }
}

/// Rows that lie together in memory, whose indices do not follow each other.
#[derive(Clone, Copy, Debug)]
struct StridedRows {
    row_words: u64,
    /// Index of the first row's first word.
    first: u64,
    /// Between the indices of two rows' first words.
    step: u64,
}

impl StridedRows {
    /// The sum of whole rows.
    fn sum(&self, bytes: &[u8]) -> u64 {
        let row_bytes = (self.row_words as usize * 8).max(8);
        let (mut sum, mut key) = (0u64, word_key(self.first));
        let key_step = self.step.wrapping_mul(GOLDEN);
        for row in bytes.chunks_exact(row_bytes) {
            sum = sum.wrapping_add(sum_words(row, key));
            key = key.wrapping_add(key_step);
        }
        sum
    }
}

/// The sum of words whose indices follow each other, the first of which has this key.
fn sum_words(bytes: &[u8], first: u64) -> u64 {
    let (mut sum, mut key) = (0u64, first);
    for word in bytes.chunks_exact(8) {
        sum = sum.wrapping_add(mixed(load_word(word), key));
        key = key.wrapping_add(GOLDEN);
    }
    sum
}

/// The word in 8 bytes.
fn load_word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_le_bytes(word)
}
