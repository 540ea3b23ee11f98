//! What `sum_blocks` computes.

use cuda_driver::KernelArgs;
use cuda_driver::reference::{DeviceMemory, ReferenceError};

use super::{Arguments, at, load_array, report_bad};
use crate::block_sum::BlockRows;
use crate::verify::{BAD_BLOCK, block_sum};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    args: &KernelArgs,
    vector_bytes: u64,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let rows: BlockRows = args.take()?;
    let ids: u64 = args.take()?;
    let count: u64 = args.take()?;
    let sums: u64 = args.take()?;
    let report: u64 = args.take()?;

    let planes = load_array(memory, rows.plane_ptrs, rows.planes())?;
    for (place, block) in (0..).zip(load_array::<i32>(memory, ids, count)?) {
        let sum = match u64::try_from(block).ok().filter(|block| *block < rows.num_blocks) {
            Some(block) => block_sum(&dense(memory, &rows, (&planes, block), vector_bytes)?),
            None => {
                report_bad(memory, report, 1, place)?;
                BAD_BLOCK
            }
        };
        let at = at(sums, place, 8);
        let was = load_array::<u64>(memory, at, 1)?[0];
        memory.store(at, &was.wrapping_add(sum).to_le_bytes())?;
    }
    Ok(())
}

/// The bytes of a block in their order.
fn dense(
    memory: &dyn DeviceMemory,
    rows: &BlockRows,
    (planes, block): (&[u64], u64),
    vector_bytes: u64,
) -> Result<Vec<u8>, ReferenceError> {
    let mut bytes = Vec::new();
    for (plane, start) in planes.iter().enumerate() {
        let start = at(*start, block, rows.block_stride);
        let [first, second] = rows.parts(plane);
        let row = rows.row.divisor;
        for token in 0..u64::from(rows.tokens.divisor) {
            for (part, end) in [(first, second.first.min(row)), (second, row)] {
                let segments = end.saturating_sub(part.first) / part.segment.divisor.max(1);
                let start = at(start + part.offset, token, part.token_stride);
                for segment in 0..u64::from(segments) {
                    let from = at(start, segment, part.segment_stride);
                    let length = u64::from(part.segment.divisor) * vector_bytes;
                    bytes.extend_from_slice(&memory.load(from, length)?);
                }
            }
        }
    }
    Ok(bytes)
}
