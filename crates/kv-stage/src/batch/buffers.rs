//! The device memory of a batch, at addresses that stay.

use bytemuck::NoUninit;
use cuda_driver::{CopyError, Device, DeviceBuffer, DeviceError, DeviceSpan, Stream};

use super::options::{BatchOptions, padded};
use crate::BlockId;
use crate::error::StagingError;

/// The part of a batch that belongs to one block table.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TableBuffers {
    /// `[sequences_max, width]` of `i32`: the block ids that hold each sequence's tokens, the step's
    /// included, and the null block behind them and where the table has -1.
    pub block_table: DeviceSpan,
    /// `[tokens_max]` of `i64`: the slot of each token, `block id * block_tokens + offset`; -1 behind
    /// them. Of states, the block of the state behind the token, and -1 for tokens before the last that is no draft.
    pub slots: DeviceSpan,
    /// `[sequences_max]` of `i32`, of states: the block with the state that each sequence begins with, which the device has
    /// chosen where drafts of its last step are open; the null block for one that begins with its first token, and behind
    /// the sequences. The states that the step leaves are the `block_table`'s.
    pub state_in: Option<DeviceSpan>,
    /// Entries of a row of the block table, for kernels that step from row to row.
    pub width: u32,
}

/// The buffers of a [`DeviceBatch`](crate::DeviceBatch). Their addresses stay for its life.
///
/// A smaller batch is the front of the same buffers. What lies behind the step's own entries is
/// padding, as far as each buffer goes, so that a kernel captured for a larger batch may read it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BatchBuffers {
    /// One for each block table.
    pub tables: Vec<TableBuffers>,
    /// `[sequences_max]` of `i32`: each sequence's tokens, the step's included; 0 behind them.
    pub lengths: DeviceSpan,
    /// `[sequences_max + 1]` of `i32`: where each sequence's tokens begin among the step's, and behind
    /// them the number of tokens.
    pub query_starts: DeviceSpan,
    /// `[tokens_max]` of `i64`: the position of each token in its sequence; 0 behind them.
    pub positions: DeviceSpan,
    /// `[sequences_max]` of `i32`: the row of each sequence; -1 behind them.
    pub rows: DeviceSpan,
    /// `[rows]` of `u32`, the only buffer that others write: how many tokens of a row's last step
    /// stand, see [`DeviceBatch`](crate::DeviceBatch#tokens-that-may-be-rejected).
    pub accepted: DeviceSpan,
    /// The engine's arrays, each of its maximum length, with zeros behind the step's values.
    pub arrays: Vec<DeviceSpan>,
}

/// All memory of a batch.
#[derive(Debug)]
pub(super) struct Memory {
    /// The step's inputs. Written in the order of the batch's stream, after the gather of the step
    /// before.
    pub(super) packet: DeviceBuffer,
    pub(super) tables: DeviceBuffer,
    pub(super) arrays: Option<DeviceBuffer>,
    pub(super) states: DeviceBuffer,
    pub(super) buffers: BatchBuffers,
    /// What the spans of `buffers` and the descriptions in `tables` and `arrays` name.
    _owned: Vec<DeviceBuffer>,
}

/// `Table` of `kernels/stage/batch.cu`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct Table {
    ids: u64,
    dense: u64,
    slots: u64,
    live: u64,
    state_in: u64,
    width: u32,
    block_tokens: u32,
    null_block: BlockId,
    unused: u32,
}

/// `Array` of `kernels/stage/batch.cu`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct Array {
    out: u64,
    vectors: u64,
}

/// Bytes of `RowState` of `kernels/stage/batch.cu`.
const STATE_BYTES: u64 = 16;

impl Memory {
    /// Allocates and fills the memory. What the gather writes is not filled.
    pub(super) fn new(stream: &Stream, options: &BatchOptions) -> Result<Self, StagingError> {
        let device = stream.device();
        let mut owned = Vec::new();
        let rows = u64::from(options.rows);
        let sequences = u64::from(options.sequences_max);
        let tokens = u64::from(options.tokens_max);
        let mut tables = Vec::with_capacity(options.tables.len());
        let mut described = Vec::with_capacity(options.tables.len());
        for table in &options.tables {
            let width = u64::from(table.width);
            let ids = filled(stream, product([rows, width, 4]), 0xFF)?;
            let dense = alloc(device, product([sequences, width, 4]))?;
            let slots = alloc(device, tokens * 8)?;
            // Above any width, so that the first gather writes every column.
            let live = filled(stream, sequences * 4, 0xFF)?;
            let state_in = table.is_state.then(|| alloc(device, sequences * 4)).transpose()?;
            let input = state_in.as_ref().map(DeviceBuffer::span);
            described.push(Table {
                ids: ids.address(),
                dense: dense.address(),
                slots: slots.address(),
                live: live.address(),
                state_in: input.map_or(0, |span| span.address()),
                width: table.width,
                block_tokens: table.block_tokens,
                null_block: table.null_block,
                unused: 0,
            });
            let (block_table, slots_of, width) = (dense.span(), slots.span(), table.width);
            tables.push(TableBuffers { block_table, slots: slots_of, state_in: input, width });
            owned.extend([ids, dense, slots, live].into_iter().chain(state_in));
        }
        let [lengths, rows_of, query_starts, positions] =
            [sequences * 4, sequences * 4, (sequences + 1) * 4, tokens * 8]
                .map(|bytes| alloc(device, bytes));
        let (lengths, rows_of) = (lengths?, rows_of?);
        let (query_starts, positions) = (query_starts?, positions?);
        let accepted = filled(stream, rows * 4, 0)?;
        let (mut arrays, mut places) = (Vec::new(), Vec::new());
        for &bytes in &options.arrays {
            let array = alloc(device, padded(bytes))?;
            places.push(Array { out: array.address(), vectors: array.bytes() / 16 });
            arrays.push(array.span().slice(0, bytes).map_err(CopyError::from)?);
            owned.push(array);
        }
        let buffers = BatchBuffers {
            tables,
            lengths: lengths.span(),
            query_starts: query_starts.span(),
            positions: positions.span(),
            rows: rows_of.span(),
            accepted: accepted.span(),
            arrays,
        };
        owned.extend([lengths, rows_of, query_starts, positions, accepted]);
        let describe = |bytes: &[u8]| -> Result<DeviceBuffer, StagingError> {
            let memory = alloc(device, bytes.len() as u64)?;
            stream.upload(memory.span(), bytes)?;
            Ok(memory)
        };
        let places = (!places.is_empty()).then(|| describe(bytemuck::cast_slice(&places)));
        Ok(Self {
            packet: filled(stream, options.buffer_bytes(), 0)?,
            tables: describe(bytemuck::cast_slice(&described))?,
            arrays: places.transpose()?,
            states: filled(stream, rows * STATE_BYTES, 0)?,
            buffers,
            _owned: owned,
        })
    }
}

/// The product; more bytes than any device has where it overflows.
fn product(factors: [u64; 3]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

fn alloc(device: &Device, bytes: u64) -> Result<DeviceBuffer, DeviceError> {
    DeviceBuffer::alloc(device, bytes)
}

fn filled(stream: &Stream, bytes: u64, byte: u8) -> Result<DeviceBuffer, StagingError> {
    let memory = alloc(stream.device(), bytes)?;
    stream.fill(memory.span(), byte)?;
    Ok(memory)
}
