//! Reading all of each sequence's KV through its block table, as attention does.

use cuda_driver::{DeviceSpan, Kernel, KernelArgs, LaunchConfig, Stream};

use crate::launcher::{GRID_Y_MAX, Launcher, SUM_THREADS, check_words, planes_of};
use crate::operand::{TableExtent, check_array, check_disjoint, check_table};
use crate::shape::WORD_BYTES;
use crate::{KernelError, PagedKv, error::Operand};

/// What [`KvKernels::paged_checksum`](crate::KvKernels::paged_checksum) reads.
#[derive(Clone, Copy, Debug)]
pub struct ChecksumArgs {
    /// Block ids (`i32`), a row of `table_stride` for each sequence.
    pub block_table: DeviceSpan,
    /// Entries of a row of `block_table` and of `checksums`.
    pub table_stride: u64,
    /// Tokens (`u32`) of each sequence.
    pub seq_lens: DeviceSpan,
    /// Number of sequences.
    pub sequences: u32,
    /// Where the sums (`u64`) go, at the place of their block in the table.
    pub checksums: DeviceSpan,
    /// Blocks that are ready, the first of the paged memory; others are not read.
    pub num_blocks: u64,
}

/// See [`KvKernels::paged_checksum`](crate::KvKernels::paged_checksum).
pub(crate) fn checksum(
    (on, kernel): (&Launcher, &Kernel),
    stream: &Stream,
    paged: &PagedKv,
    checksum: ChecksumArgs,
) -> Result<(), KernelError> {
    on.check_stream(stream)?;
    on.check_paged(paged, checksum.num_blocks)?;
    let ChecksumArgs { block_table, table_stride, seq_lens, sequences, checksums, num_blocks } =
        checksum;
    let shape = paged.shape();
    let planes = planes_of(shape)?;
    check_words(shape.row_bytes())?;
    if !paged.layout().has_whole_rows() || paged.alignment() < WORD_BYTES {
        return Err(KernelError::PagedWords { alignment: paged.alignment() });
    }
    let table = |entry_bytes| TableExtent {
        rows: u64::from(sequences),
        width: table_stride,
        stride: table_stride,
        entry_bytes,
    };
    check_table(Operand::BlockTable, block_table, table(size_of::<i32>() as u64))?;
    check_table(Operand::Checksums, checksums, table(size_of::<u64>() as u64))?;
    check_array(Operand::SeqLens, seq_lens, u64::from(sequences), size_of::<u32>() as u64)?;
    for read in [(Operand::BlockTable, block_table), (Operand::SeqLens, seq_lens)] {
        check_disjoint((Operand::Checksums, checksums), read)?;
    }
    if let Some(tensor) = paged.tensor_meeting(checksums.into()) {
        check_disjoint((Operand::Checksums, checksums), (Operand::Pages, tensor))?;
    }
    if sequences == 0 || table_stride == 0 {
        return Ok(());
    }

    let layout = paged.layout();
    let args = KernelArgs::new()
        .arg(block_table.address_on(stream)?)
        .arg(table_stride)
        .arg(seq_lens.address_on(stream)?)
        .arg(sequences)
        .arg(paged.planes_address())
        .arg(planes)
        .arg(shape.row_bytes())
        .arg(u64::from(shape.block_tokens()))
        .arg(layout.block_stride_bytes())
        .arg(layout.token_stride_bytes())
        .arg(num_blocks)
        .arg(checksums.address_on(stream)?);
    let config = checksum_launch(on, sequences, table_stride);
    // SAFETY: the 12 arguments are the parameters of `paged_checksum` in `kernels/checksum.cu`,
    // in order and size. All addresses come from device spans and a device buffer, and the
    // kernel stays inside them: table and sums have `table_stride` entries for each sequence, to
    // which the kernel keeps whatever the lengths say; there is a length for each sequence and a
    // plane address for each plane; and rows of blocks below `num_blocks`, to which the kernel
    // keeps, lie in the paged span (invariant of `PagedKv`).
    unsafe { on.launch(kernel, stream, &config, &args) }
}

/// Enough blocks for one long sequence to fill the device, and no more than pay for themselves
/// when many short sequences leave most of them without work.
fn checksum_launch(on: &Launcher, sequences: u32, table_stride: u64) -> LaunchConfig {
    let rows = sequences.min(GRID_Y_MAX);
    let of_device = on.multiprocessors() * BLOCKS_OF_MULTIPROCESSOR;
    let columns = (of_device * WAVES / u64::from(rows)).max(of_device).min(table_stride);
    LaunchConfig { grid: [columns as u32, rows, 1], block: [SUM_THREADS, 1, 1], shared_bytes: 0 }
}

/// Blocks of [`SUM_THREADS`] that are resident on a multiprocessor at once.
const BLOCKS_OF_MULTIPROCESSOR: u64 = 4;
/// How many times over the grid of a launch with few sequences covers the device.
const WAVES: u64 = 16;
