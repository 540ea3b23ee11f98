//! What `gather_rows` computes.

use cuda_driver::reference::{DeviceMemory, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::{Arguments, at, load_array};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let out: u64 = args.take()?;
    let out_stride: u64 = args.take()?;
    let table: u64 = args.take()?;
    let table_stride: u64 = args.take()?;
    let row_index: u64 = args.take()?;
    let rows = u64::from(args.take::<u32>()?);
    let width = u64::from(args.take::<u32>()?);
    let table_rows: u32 = args.take()?;
    if width == 0 {
        return Ok(());
    }

    let sources = load_array::<u32>(memory, row_index, rows)?;
    let unknown = vec![0xFF; width as usize * 4];
    let mut row = Vec::new();
    for (number, source) in (0u64..).zip(sources) {
        row.clear();
        if source < table_rows {
            let from = at(table, u64::from(source).wrapping_mul(table_stride), 4);
            row.extend_from_slice(&memory.load(from, width * 4)?);
        } else {
            row.extend_from_slice(&unknown);
        }
        memory.store(at(out, number.wrapping_mul(out_stride), 4), &row)?;
    }
    Ok(())
}
