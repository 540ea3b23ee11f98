//! What `append` computes.

use cuda_driver::KernelArgs;
use cuda_driver::reference::{DeviceMemory, ReferenceError};

use super::block_copy::Planes;
use super::{Arguments, at, load_array, report_bad};
use crate::append::RawAppendRows;
use crate::raw::{RawBlockSide, RawBlockUnits};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    args: &KernelArgs,
    vector_bytes: u64,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: RawBlockSide = args.take()?;
    let from: RawAppendRows = args.take()?;
    let units = RawBlockUnits::of_dividers(args.take()?);
    let [slot_mapping, block_tokens, _, first_token, plane_and_count]: [u64; 5] = args.take()?;
    let block_tokens = block_tokens.max(1);
    let (first_plane, kv_count) = (plane_and_count & 0xFFFF_FFFF, (plane_and_count >> 32).max(1));
    let report: u64 = args.take()?;

    let table = RawBlockUnits { planes: first_plane + units.planes, ..units };
    let planes = Planes::of(memory, &pages, &table)?;
    let bytes = units.unit_vectors * vector_bytes;
    let mut unit = Vec::new();
    for (token, slot) in (0..).zip(load_array::<i64>(memory, slot_mapping, units.tokens)?) {
        let Ok(slot) = u64::try_from(slot) else { continue };
        let (block, token_of_block) = (slot / block_tokens, slot % block_tokens);
        if block >= pages.num_blocks {
            report_bad(memory, report, 1, first_token + token)?;
            continue;
        }
        for plane in 0..units.planes {
            let (layer, kv) = (plane / kv_count, plane % kv_count);
            let rows = from.rows[kv as usize % 2].wrapping_add(from.base);
            let row = at(at(rows, layer, from.layer_stride), token, from.token_stride);
            for segment in 0..units.segments {
                unit.clear();
                unit.extend_from_slice(&memory.load(at(row, segment, from.segment_stride), bytes)?);
                let place = [first_plane + plane, token_of_block, segment];
                memory.store(planes.at(&pages, block, place), &unit)?;
            }
        }
    }
    Ok(())
}
