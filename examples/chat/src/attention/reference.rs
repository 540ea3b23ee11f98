//! What the kernel computes, over any device memory: the simulated device runs it in place of the PTX, for speed.

use std::borrow::Cow;

use bytemuck::{AnyBitPattern, Pod, Zeroable};
use cuda_driver::reference::{AccessFault, DeviceMemory, KernelReference, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::arithmetic::attend;
use super::{Batch, ENTRY, HeadArgs, Pages};

/// Multiplications below which threads cost more than they save.
const ALONE_MAX: usize = 1 << 18;

/// The reference of the kernel, to register with a simulated device.
#[must_use]
pub fn references() -> &'static [KernelReference] {
    &[KernelReference { name: ENTRY, run }]
}

fn run(
    memory: &mut dyn DeviceMemory,
    config: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let pages: Pages = arg(args, 0)?;
    let batch: Batch = arg(args, 1)?;
    let heads: HeadArgs = arg(args, 2)?;
    let [queries, out]: [u64; 2] = [arg(args, 3)?, arg(args, 4)?];
    let tokens = config.grid[0] as usize;
    let row = (heads.heads * heads.head_size) as usize;
    let queries = floats(memory, queries, (tokens * row) as u64)?.into_owned();
    let starts: Vec<i32> = array(memory, batch.query_starts, u64::from(batch.sequences) + 1)?;
    let first = u64::from(batch.first_token);
    let positions: Vec<i64> = array(memory, batch.positions + first * 8, tokens as u64)?;
    let mut result = vec![f32::NAN; tokens * row];
    let mut token = 0;
    while token < tokens {
        let at = (batch.first_token as usize + token) as i32;
        // The last sequence that begins at the token or before it.
        let sequence = starts[1..starts.len() - 1].partition_point(|&start| start <= at);
        let end = if sequence + 2 < starts.len() { starts[sequence + 1] } else { i32::MAX };
        let end =
            tokens.min((i64::from(end) - i64::from(batch.first_token)) as usize).max(token + 1);
        let contexts: Vec<usize> =
            positions[token..end].iter().map(|&position| position as usize + 1).collect();
        let (from, to) = (token * row, end * row);
        if let Some(kv) = Kv::of(memory, (&pages, &batch), (sequence as u64, &contexts), &heads)? {
            kv.attend_all(&queries[from..to], &contexts, &mut result[from..to]);
        }
        token = end;
    }
    memory.store(out, bytemuck::cast_slice(&result))?;
    Ok(())
}

/// The keys and values of one sequence, block by block, where they lie.
struct Kv<'a> {
    keys: Vec<Cow<'a, [f32]>>,
    values: Vec<Cow<'a, [f32]>>,
    block_tokens: usize,
    /// Floats from a token to the next.
    stride: usize,
    heads: HeadArgs,
}

impl<'a> Kv<'a> {
    /// `None` if a block id is out of range.
    fn of(
        memory: &'a dyn DeviceMemory,
        (pages, batch): (&Pages, &Batch),
        (sequence, contexts): (u64, &[usize]),
        heads: &HeadArgs,
    ) -> Result<Option<Self>, ReferenceError> {
        let block_tokens = pages.block_tokens as usize;
        let most = contexts.iter().max().copied().unwrap_or(0);
        let blocks = most.div_ceil(block_tokens) as u64;
        let width = u64::from(batch.table_width);
        if blocks > width {
            return Ok(None);
        }
        let ids: Vec<i32> = array(memory, batch.block_table + sequence * width * 4, blocks)?;
        let row_bytes = u64::from(heads.kv_heads * heads.head_size) * 4;
        let plane = |first: u64| {
            ids.iter()
                .enumerate()
                .map(|(index, &id)| {
                    let tokens = block_tokens.min(most - index * block_tokens) as u64;
                    let bytes = (tokens - 1) * pages.token_stride + row_bytes;
                    floats(memory, first + id as u64 * pages.block_stride, bytes / 4)
                })
                .collect::<Result<Vec<_>, _>>()
        };
        if ids.iter().any(|&id| id < 0 || id as u32 >= pages.num_blocks) {
            return Ok(None);
        }
        let (keys, values) = (plane(pages.keys)?, plane(pages.values)?);
        let stride = (pages.token_stride / 4) as usize;
        Ok(Some(Self { keys, values, block_tokens, stride, heads: *heads }))
    }

    /// All heads of all tokens, by several threads where that is worth it.
    fn attend_all(&self, queries: &[f32], contexts: &[usize], out: &mut [f32]) {
        let row = (self.heads.heads * self.heads.head_size) as usize;
        let work: usize = contexts.iter().map(|context| context * row * 2).sum();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = contexts.len().div_ceil(threads).max(1);
        if work <= ALONE_MAX || share == contexts.len() {
            return self.attend_some(queries, contexts, out);
        }
        std::thread::scope(|scope| {
            let shares = queries.chunks(share * row).zip(contexts.chunks(share));
            for ((queries, contexts), out) in shares.zip(out.chunks_mut(share * row)) {
                scope.spawn(move || self.attend_some(queries, contexts, out));
            }
        });
    }

    fn attend_some(&self, queries: &[f32], contexts: &[usize], out: &mut [f32]) {
        let HeadArgs { heads, kv_heads, head_size, scale } = self.heads;
        let (size, group) = (head_size as usize, (heads / kv_heads) as usize);
        let row = heads as usize * size;
        for (token, &context) in contexts.iter().enumerate() {
            for head in 0..heads as usize {
                let at = token * row + head * size;
                let first = head / group * size;
                attend(
                    &queries[at..at + size],
                    context,
                    scale,
                    |j| self.part(&self.keys, j, first),
                    |j| self.part(&self.values, j, first),
                    &mut out[at..at + size],
                );
            }
        }
    }

    fn part<'b>(&self, plane: &'b [Cow<'a, [f32]>], token: usize, first: usize) -> &'b [f32] {
        let start = token % self.block_tokens * self.stride + first;
        &plane[token / self.block_tokens][start..start + self.heads.head_size as usize]
    }
}

fn arg<T: AnyBitPattern>(args: &KernelArgs, index: usize) -> Result<T, ReferenceError> {
    args.get(index).ok_or(ReferenceError::Argument { index })
}

/// `count` floats, where they lie if they are aligned there.
fn floats(
    memory: &dyn DeviceMemory,
    address: u64,
    count: u64,
) -> Result<Cow<'_, [f32]>, AccessFault> {
    Ok(match memory.load(address, count * 4)? {
        Cow::Borrowed(bytes) => match bytemuck::try_cast_slice(bytes) {
            Ok(floats) => Cow::Borrowed(floats),
            Err(_) => Cow::Owned(unaligned(bytes)),
        },
        Cow::Owned(bytes) => Cow::Owned(unaligned(&bytes)),
    })
}

fn array<T: Pod + Zeroable>(
    memory: &dyn DeviceMemory,
    address: u64,
    count: u64,
) -> Result<Vec<T>, AccessFault> {
    Ok(unaligned(&memory.load(address, count * size_of::<T>() as u64)?))
}

fn unaligned<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}
