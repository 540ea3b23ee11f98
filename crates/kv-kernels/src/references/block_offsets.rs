//! What `gather_block_offsets` computes.

use cuda_driver::reference::{DeviceMemory, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::{Arguments, at, load_array, report_bad};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let out: u64 = args.take()?;
    let out_rows: u64 = args.take()?;
    let source: u64 = args.take()?;
    let pool_stride: u64 = args.take()?;
    let row_stride: u64 = args.take()?;
    let row_index: u64 = args.take()?;
    let live: u64 = args.take()?;
    let scales: u64 = args.take()?;
    let offsets: u64 = args.take()?;
    let pools = u64::from(args.take::<u32>()?);
    let rows = u64::from(args.take::<u32>()?);
    let width = u64::from(args.take::<u32>()?);
    let report: u64 = args.take()?;

    let index = match row_index {
        0 => (0..rows).collect(),
        _ => load_array::<u32>(memory, row_index, rows)?.into_iter().map(u64::from).collect(),
    };
    let index: Vec<u64> = index;
    let live = match live {
        0 => vec![width; rows as usize],
        _ => {
            let live = load_array::<u32>(memory, live, rows)?;
            live.into_iter().map(|columns| u64::from(columns).min(width)).collect()
        }
    };
    let scales = load_array::<i32>(memory, scales, pools)?;
    let offsets = load_array::<i32>(memory, offsets, pools)?;
    for (pool, (scale, offset)) in (0..).zip(scales.into_iter().zip(offsets)) {
        for (row, (&source_row, &columns)) in (0..).zip(index.iter().zip(&live)) {
            let from = source_row.wrapping_mul(row_stride);
            let known = from.wrapping_add(columns) <= pool_stride;
            if !known && pool == 0 {
                report_bad(memory, report, 1, row)?;
            }
            if columns == 0 {
                continue;
            }
            let ids = if known {
                load_array::<i32>(memory, at(at(source, pool, pool_stride * 4), from, 4), columns)?
            } else {
                vec![-1; columns as usize]
            };
            let place = at(out, (pool * out_rows + row).wrapping_mul(2), width * 4);
            let (keys, values) = planes(&ids, scale, offset);
            memory.store(place, bytemuck::cast_slice(&keys))?;
            memory.store(at(place, width, 4), bytemuck::cast_slice(&values))?;
        }
    }
    Ok(())
}

/// The offsets of keys and of values for these ids.
fn planes(ids: &[i32], scale: i32, offset: i32) -> (Vec<i32>, Vec<i32>) {
    let key = |id: &i32| if *id == -1 { -1 } else { scale.wrapping_mul(*id) };
    let value = |id: &i32| {
        if *id == -1 { -1 } else { scale.wrapping_mul(*id).wrapping_add(offset) }
    };
    (ids.iter().map(key).collect(), ids.iter().map(value).collect())
}
