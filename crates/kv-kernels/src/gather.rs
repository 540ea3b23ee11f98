//! Gathering rows of a table of block ids on the device.

use cuda_driver::{DeviceSpan, Kernel, KernelArgs, LaunchConfig, Stream};

use crate::launcher::{GRID_Y_MAX, Launcher, ROW_THREADS};
use crate::operand::{TableExtent, check_array, check_disjoint, check_table};
use crate::{KernelError, error::Operand};

/// What [`KvKernels::gather_rows`](crate::KvKernels::gather_rows) gathers.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    /// Where `rows` rows of `width` entries (`i32`) go.
    pub out: DeviceSpan,
    /// Entries from a row of `out` to the next, at least `width`.
    pub out_stride: u64,
    /// The table, `table_rows` rows of at least `width` entries (`i32`).
    pub table: DeviceSpan,
    /// Entries from a row of the table to the next, at least `width`.
    pub table_stride: u64,
    /// Which row of the table (`u32`) each row of `out` is; at least `rows` of them.
    pub row_index: DeviceSpan,
    /// Rows to gather.
    pub rows: u32,
    /// Entries of each row to gather.
    pub width: u32,
    /// Rows of the table.
    pub table_rows: u32,
}

/// See [`KvKernels::gather_rows`](crate::KvKernels::gather_rows).
pub(crate) fn gather_rows(
    (on, kernel): (&Launcher, &Kernel),
    stream: &Stream,
    gather: GatherRows,
) -> Result<(), KernelError> {
    on.check_stream(stream)?;
    let GatherRows { out, table, row_index, rows, width, table_rows, .. } = gather;
    let entry_bytes = size_of::<i32>() as u64;
    let extent = |rows: u32, stride| TableExtent {
        rows: rows.into(),
        width: width.into(),
        stride,
        entry_bytes,
    };
    check_table(Operand::Out, out, extent(rows, gather.out_stride))?;
    check_table(Operand::Table, table, extent(table_rows, gather.table_stride))?;
    check_array(Operand::RowIndex, row_index, u64::from(rows), size_of::<u32>() as u64)?;
    check_disjoint((Operand::Out, out), (Operand::Table, table))?;
    check_disjoint((Operand::Out, out), (Operand::RowIndex, row_index))?;
    if rows == 0 || width == 0 {
        return Ok(());
    }

    let args = KernelArgs::new()
        .arg(out.address_on(stream)?)
        .arg(gather.out_stride)
        .arg(table.address_on(stream)?)
        .arg(gather.table_stride)
        .arg(row_index.address_on(stream)?)
        .arg(rows)
        .arg(width)
        .arg(table_rows);
    let threads = ROW_THREADS as u32;
    let config = LaunchConfig {
        grid: [width.div_ceil(threads), rows.min(GRID_Y_MAX), 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
    };
    // SAFETY: the 8 arguments are the parameters of `gather_rows` in `kernels/gather.cu`, in
    // order and size. All addresses come from device spans, and the kernel stays inside them:
    // `out` holds `rows` rows, the table `table_rows`, to which the kernel keeps whatever the
    // index says (`check_table`), and there is an index for each row (`check_array`).
    unsafe { on.launch(kernel, stream, &config, &args) }
}
