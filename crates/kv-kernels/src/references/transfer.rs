//! What `multi_layer_transfer` computes.

use cuda_driver::{DeviceMemory, KernelArgs, LaunchConfig, ReferenceError};

use super::{Arguments, at, load_array};
use crate::Direction;

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let chunk: u64 = args.take()?;
    let plane_ptrs: u64 = args.take()?;
    let slot_mapping: u64 = args.take()?;
    let tokens: u64 = args.take()?;
    let skip: u64 = args.take()?;
    let layers = u64::from(args.take::<u32>()?);
    let kv_count = u64::from(args.take::<u32>()?);
    let row_bytes: u64 = args.take()?;
    let block_tokens = args.take_divisor()?;
    let block_stride_bytes: u64 = args.take()?;
    let token_stride_bytes: u64 = args.take()?;
    let to_paged = args.take::<u32>()? == Direction::ChunkToPaged as u32;
    let num_slots: u64 = args.take()?;
    if skip >= tokens {
        return Ok(());
    }

    let planes = load_array::<u64>(memory, plane_ptrs, layers * kv_count)?;
    let slots = load_array::<i64>(memory, at(slot_mapping, skip, 8), tokens - skip)?;
    let offset = |slot: u64| {
        at(at(0, slot / block_tokens, block_stride_bytes), slot % block_tokens, token_stride_bytes)
    };
    let runs = find_runs(&slots, skip, row_bytes, |slot| {
        u64::try_from(slot).ok().filter(|slot| *slot < num_slots).map(offset)
    });
    let mut rows = Vec::new();
    for kv in 0..kv_count {
        for layer in 0..layers {
            let plane = planes[(layer * kv_count + kv) as usize];
            let chunk = at(chunk, (kv * layers + layer).wrapping_mul(tokens), row_bytes);
            for run in &runs {
                let in_chunk = at(chunk, run.token, row_bytes);
                let in_pages = at(plane, 1, run.offset);
                let (from, to) = if to_paged { (in_chunk, in_pages) } else { (in_pages, in_chunk) };
                rows.clear();
                rows.extend_from_slice(&memory.load(from, run.tokens.saturating_mul(row_bytes))?);
                memory.store(to, &rows)?;
            }
        }
    }
    Ok(())
}

/// Tokens whose rows lie together on both sides.
#[derive(Debug, Eq, PartialEq)]
struct Run {
    /// First token.
    token: u64,
    tokens: u64,
    /// Where the first token's row lies in a plane.
    offset: u64,
}

/// Most bytes of a run in one plane, so that what is copied stays in the processor's cache.
const RUN_BYTES_MAX: u64 = 128 << 10;

fn find_runs(
    slots: &[i64],
    first_token: u64,
    row_bytes: u64,
    offset_of: impl Fn(i64) -> Option<u64>,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (token, &slot) in (first_token..).zip(slots) {
        let Some(offset) = offset_of(slot) else { continue };
        if let Some(run) = runs.last_mut() {
            let follows = token == run.token + run.tokens
                && offset == at(run.offset, run.tokens, row_bytes)
                && (run.tokens + 1).saturating_mul(row_bytes) <= RUN_BYTES_MAX;
            if follows {
                run.tokens += 1;
                continue;
            }
        }
        runs.push(Run { token, tokens: 1, offset });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_both_sides_make_one_run() {
        // Slots of 8 bytes, without gaps; -1 is skipped.
        let runs = find_runs(&[4, 5, -1, 6, 7, 3, 8], 10, 8, |slot| {
            u64::try_from(slot).ok().map(|slot| slot * 8)
        });
        let run = |token, tokens, slot: u64| Run { token, tokens, offset: slot * 8 };
        assert_eq!(runs, [run(10, 2, 4), run(13, 2, 6), run(15, 1, 3), run(16, 1, 8)]);
    }
}
