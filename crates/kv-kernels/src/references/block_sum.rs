//! What `sum_blocks` computes.

use cuda_driver::KernelArgs;
use cuda_driver::reference::{DeviceMemory, ReferenceError};

use super::block_copy::{Planes, for_each_unit, known};
use super::{Arguments, at, load_array, report_bad};
use crate::{
    raw::{RawBlockSide, RawBlockUnits},
    verify::{BAD_BLOCK, weight},
};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    args: &KernelArgs,
    vector_bytes: u64,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let from: RawBlockSide = args.take()?;
    let dense: RawBlockSide = args.take()?;
    let units = RawBlockUnits::of_dividers(args.take()?);
    let ids: u64 = args.take()?;
    let count: u64 = args.take()?;
    let sums: u64 = args.take()?;
    let first: u32 = args.take()?;
    let report: u64 = args.take()?;

    let (planes, in_block) =
        (Planes::of(memory, &from, &units)?, Planes::of(memory, &dense, &units)?);
    let bytes = units.unit_vectors * vector_bytes;
    for (place, block) in (0..).zip(load_array::<i32>(memory, ids, count)?) {
        let mut sum = 0u64;
        match known(block, &from) {
            Some(block) => for_each_unit(&units, |plane, token, segment| {
                let unit = [plane, token, segment];
                let start = in_block.at(&dense, 0, unit);
                let held = memory.load(planes.at(&from, block, unit), bytes)?;
                sum = sum.wrapping_add(share(start, &held));
                Ok(())
            })?,
            None if first != 0 => {
                report_bad(memory, report, 1, place)?;
                sum = BAD_BLOCK;
            }
            None => {}
        }
        let at = at(sums, place, 8);
        let was = load_array::<u64>(memory, at, 1)?[0];
        memory.store(at, &was.wrapping_add(sum).to_le_bytes())?;
    }
    Ok(())
}

/// What bytes add to the sum of a block in which they begin at `start`.
fn share(start: u64, bytes: &[u8]) -> u64 {
    let mut sum = 0u64;
    let mut place = start;
    let mut rest = bytes;
    while !rest.is_empty() {
        let (word, shift) = (place / 8, place % 8);
        let (now, later) = rest.split_at(rest.len().min(8 - shift as usize));
        let mut value = [0; 8];
        value[..now.len()].copy_from_slice(now);
        let value = u64::from_le_bytes(value) << (8 * shift);
        sum = sum.wrapping_add(value.wrapping_mul(weight(word)));
        place += now.len() as u64;
        rest = later;
    }
    sum
}
