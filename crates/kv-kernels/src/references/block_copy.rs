//! What `copy_blocks` computes, and where the units of blocks lie.

use cuda_driver::KernelArgs;
use cuda_driver::reference::{DeviceMemory, ReferenceError};

use super::{Arguments, at, load_array, report_bad};
use crate::raw::{RawBlockSide, RawBlockUnits};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    args: &KernelArgs,
    vector_bytes: u64,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let to: RawBlockSide = args.take()?;
    let from: RawBlockSide = args.take()?;
    let units = RawBlockUnits::of_dividers(args.take()?);
    let pairs: u64 = args.take()?;
    let items: u32 = args.take()?;
    let [source_ids, destination_ids]: [u32; 2] = args.take()?;
    let first_pair: u64 = args.take()?;
    let report: u64 = args.take()?;

    let of_block = units.planes * units.tokens * units.segments * units.unit_vectors;
    let count = u64::from(items).checked_div(of_block).unwrap_or(0);
    let pairs = load_array::<[i32; 2]>(memory, pairs, count)?;
    let (to_planes, from_planes) =
        (Planes::of(memory, &to, &units)?, Planes::of(memory, &from, &units)?);
    let bytes = units.unit_vectors * vector_bytes;
    let mut unit = Vec::new();
    for (place, [source, destination]) in (0..).zip(pairs) {
        let number = |id: i32, ids: u32| if ids == 0 { place as i32 } else { id };
        let (Some(source), Some(destination)) = (
            known(number(source, source_ids), &from),
            known(number(destination, destination_ids), &to),
        ) else {
            report_bad(memory, report, 1, first_pair + place)?;
            continue;
        };
        for_each_unit(&units, |plane, token, segment| {
            unit.clear();
            let from = from_planes.at(&from, source, [plane, token, segment]);
            unit.extend_from_slice(&memory.load(from, bytes)?);
            memory.store(to_planes.at(&to, destination, [plane, token, segment]), &unit)?;
            Ok(())
        })?;
    }
    Ok(())
}

/// A block that a launch may touch.
pub(super) fn known(block: i32, side: &RawBlockSide) -> Option<u64> {
    u64::try_from(block).ok().filter(|block| *block < side.num_blocks)
}

/// Calls `unit` with every plane, token and segment.
pub(super) fn for_each_unit(
    units: &RawBlockUnits,
    mut unit: impl FnMut(u64, u64, u64) -> Result<(), ReferenceError>,
) -> Result<(), ReferenceError> {
    for plane in 0..units.planes {
        for token in 0..units.tokens {
            for segment in 0..units.segments {
                unit(plane, token, segment)?;
            }
        }
    }
    Ok(())
}

/// Where the planes of a side begin.
pub(super) struct Planes(Vec<u64>);

impl Planes {
    pub(super) fn of(
        memory: &dyn DeviceMemory,
        side: &RawBlockSide,
        units: &RawBlockUnits,
    ) -> Result<Self, ReferenceError> {
        if side.plane_ptrs == 0 {
            return Ok(Self((0..units.planes).map(|p| at(0, p, side.plane_stride)).collect()));
        }
        Ok(Self(load_array(memory, side.plane_ptrs, units.planes)?))
    }

    /// The address of a unit.
    pub(super) fn at(
        &self,
        side: &RawBlockSide,
        block: u64,
        [plane, token, segment]: [u64; 3],
    ) -> u64 {
        let start = side.base.wrapping_add(self.0[plane as usize]);
        let block = at(start, block, side.block_stride);
        at(at(block, token, side.token_stride), segment, side.segment_stride)
    }
}
