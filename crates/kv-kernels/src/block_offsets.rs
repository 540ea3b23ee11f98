//! Offset tables of attention kernels, made from rows of block ids.

use cuda_driver::{DeviceSpan, KernelArgs, LaunchConfig, Stream};

use crate::launcher::{GRID_Y_MAX, Launcher, ROW_THREADS};
use crate::lazy::LazyKernel;
use crate::operand::{Extent, check_aligned, check_array, check_disjoint, check_length};
use crate::{
    DeviceReport, KernelError, KernelSource,
    error::{Operand, OperandError},
};

/// Bytes of an entry, which is an `i32` or a `u32`.
const ENTRY_BYTES: u64 = 4;
/// Columns that a thread reads at once: `COLUMNS_IN_FLIGHT` of `kernels/block_offsets.cu`.
const COLUMNS_IN_FLIGHT: u32 = 4;
/// Entries from a row to the next, at most, so that no row's place overflows.
const ROW_STRIDE_MAX: u64 = 1 << 32;

/// What [`KvKernels::gather_block_offsets`](crate::KvKernels::gather_block_offsets) gathers.
///
/// All entries are 32-bit integers without gaps. `source` is `[pools, pool_stride]`, of which row `r`
/// of a pool begins at entry `r * row_stride`: a table `[pools, rows, 2, width]` whose second plane is
/// not read has `row_stride = 2 * width` and `pool_stride = rows * row_stride`; rows of different
/// lengths packed one after another have `row_stride = 1`, and their starts as `row_index`.
#[derive(Clone, Copy, Debug)]
pub struct BlockOffsets<'a> {
    /// Block ids (`i32`), -1 where there is none: `pools * pool_stride` of them.
    pub source: KernelSource<'a>,
    /// Entries from a pool of the source to the next, and all that may be read of one.
    pub pool_stride: u64,
    /// Entries from a row of the source to the next, at most 2^32.
    pub row_stride: u64,
    /// The source's row (`u32`) for each row of the output; `None` where they are the same.
    pub row_index: Option<KernelSource<'a>>,
    /// The host's copy of `row_index`, which is checked before the launch; `None` where only the
    /// device has it.
    pub host_index: Option<&'a [u32]>,
    /// Columns (`u32`) of each row that are alive; `None` where all are. A number beyond `width` is
    /// cut to it.
    pub live: Option<KernelSource<'a>>,
    /// What the ids of each pool (`i32`) are multiplied with.
    pub scales: KernelSource<'a>,
    /// What each pool (`i32`) adds for values.
    pub offsets: KernelSource<'a>,
    /// Where the offsets go: `[pools, out_rows, 2, width]`.
    pub out: DeviceSpan,
    /// Rows of each pool of the output.
    pub out_rows: u32,
    /// Pools of source and output.
    pub pools: u32,
    /// Rows to gather, at most `out_rows`.
    pub rows: u32,
    /// Columns of a row; any number.
    pub width: u32,
    /// Where to tell of rows that are not in the source.
    pub report: Option<&'a DeviceReport>,
}

/// See [`KvKernels::gather_block_offsets`](crate::KvKernels::gather_block_offsets).
pub(crate) fn gather_offsets(
    (on, kernel): (&Launcher, &LazyKernel),
    stream: &Stream,
    gather: BlockOffsets<'_>,
) -> Result<(), KernelError> {
    on.check_stream(stream)?;
    if let Some(report) = gather.report {
        on.check_report(report)?;
    }
    check(&gather)?;
    if gather.pools == 0 || gather.rows == 0 || gather.width == 0 {
        return Ok(());
    }
    let address =
        |source: Option<KernelSource<'_>>| source.map_or(Ok(0), |source| source.address(stream));
    let args = KernelArgs::new()
        .arg(gather.out.address_on(stream)?)
        .arg(u64::from(gather.out_rows))
        .arg(gather.source.address(stream)?)
        .arg(gather.pool_stride)
        .arg(gather.row_stride)
        .arg(address(gather.row_index)?)
        .arg(address(gather.live)?)
        .arg(gather.scales.address(stream)?)
        .arg(gather.offsets.address(stream)?)
        .arg(gather.pools)
        .arg(gather.rows)
        .arg(gather.width)
        .arg(gather.report.map_or(0, DeviceReport::address));
    let threads = ROW_THREADS as u32;
    let config = LaunchConfig {
        grid: [
            gather.width.div_ceil(threads * COLUMNS_IN_FLIGHT).max(1),
            gather.rows.clamp(1, GRID_Y_MAX),
            gather.pools.clamp(1, GRID_Y_MAX),
        ],
        block: [threads, 1, 1],
        shared_bytes: 0,
    };
    let kernel = kernel.get(on.device())?;
    // SAFETY: the 13 arguments are the parameters of `gather_block_offsets` in
    // `kernels/block_offsets.cu`, in order and size. `check` has found room for all that the
    // kernel reads and writes: one value in each array for each row or pool, and
    // `pools * pool_stride` entries in the source, beyond which the kernel does not go whatever
    // the index says. Sources are device memory or spans of pinned memory, whose memory is not
    // freed before the device has finished (a dropped buffer is only retired); the kernel writes
    // the output and the report only, both device memory.
    Ok(unsafe { kernel.launch(stream, &config, &args) }?)
}

fn check(gather: &BlockOffsets<'_>) -> Result<(), KernelError> {
    let BlockOffsets { source, pool_stride, row_stride, out, out_rows, pools, .. } = *gather;
    let (rows, width) = (gather.rows, gather.width);
    if rows > out_rows {
        return Err(KernelError::Rows { rows: rows.into(), capacity: out_rows.into() });
    }
    if row_stride > ROW_STRIDE_MAX {
        let (operand, rows, row_bytes) = (Operand::Table, rows.into(), row_stride);
        return Err(OperandError::Overflow { operand, rows, row_bytes }.into());
    }
    let all = |operand, entries: u64| {
        let overflow = OperandError::Overflow { operand, rows: pools.into(), row_bytes: entries };
        entries.checked_mul(pools.into()).and_then(|n| n.checked_mul(ENTRY_BYTES)).ok_or(overflow)
    };
    check_aligned(Operand::Table, source.place(), ENTRY_BYTES)?;
    check_length(Operand::Table, source.bytes(), all(Operand::Table, pool_stride)?)?;
    // 2^32 rows of 2^33 entries overflow; `checked_mul` sees the rest.
    let of_pool = u64::from(out_rows).checked_mul(2 * u64::from(width));
    let overflow =
        OperandError::Overflow { operand: Operand::Out, rows: out_rows.into(), row_bytes: 2 };
    let out_bytes = all(Operand::Out, of_pool.ok_or(overflow)?)?;
    check_aligned(Operand::Out, out.address(), ENTRY_BYTES)?;
    check_length(Operand::Out, out.bytes(), out_bytes)?;
    let arrays = [
        (Operand::RowIndex, gather.row_index, rows),
        (Operand::SeqLens, gather.live, rows),
        (Operand::Scales, Some(gather.scales), pools),
        (Operand::Offsets, Some(gather.offsets), pools),
    ];
    let written = Extent { address: out.address(), bytes: out_bytes };
    for (operand, array, count) in arrays {
        let Some(array) = array else { continue };
        check_array(operand, array, count.into(), ENTRY_BYTES)?;
        check_disjoint((Operand::Out, written), (operand, array))?;
    }
    check_disjoint((Operand::Out, written), (Operand::Table, source))?;
    check_index(gather)
}

/// Checks the host's copy of the index, or rows `0..rows` where there is none.
fn check_index(gather: &BlockOffsets<'_>) -> Result<(), KernelError> {
    let BlockOffsets { pool_stride, row_stride, rows, .. } = *gather;
    // What a row has at most is not known where lengths are only on the device.
    let width = if gather.live.is_some() { 0 } else { u64::from(gather.width) };
    // No overflow: both factors are at most 2^32, and the width below.
    let check = |row: u64, source_row: u64| {
        let end = source_row.saturating_mul(row_stride).saturating_add(width);
        if end > pool_stride {
            return Err(KernelError::RowOutOfRange { row, source_row, pool_stride, row_stride });
        }
        Ok(())
    };
    match (gather.row_index, gather.host_index) {
        (Some(_), Some(index)) => {
            if index.len() as u64 != u64::from(rows) {
                return Err(KernelError::IndexCount {
                    rows: rows.into(),
                    given: index.len() as u64,
                });
            }
            (0u64..).zip(index).try_for_each(|(row, &source)| check(row, source.into()))
        }
        (Some(_), None) => Ok(()),
        (None, _) if rows == 0 => Ok(()),
        (None, _) => check(u64::from(rows) - 1, u64::from(rows) - 1),
    }
}
