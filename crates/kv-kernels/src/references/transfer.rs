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
    let layout = Layout { block_tokens, block_stride_bytes, token_stride_bytes, num_slots };
    let runs = find_runs(&slots, skip, row_bytes, &layout);
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

/// Where slots lie in a plane.
#[derive(Debug)]
struct Layout {
    block_tokens: u64,
    block_stride_bytes: u64,
    token_stride_bytes: u64,
    num_slots: u64,
}

fn find_runs(slots: &[i64], first_token: u64, row_bytes: u64, layout: &Layout) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    // What the next slot of the same block would be, where it would lie, and how many of the block
    // come from there on: most tokens follow the one before them, and divisions are slow.
    let (mut next_slot, mut next_offset, mut left) = (0, 0, 0);
    for (token, &slot) in (first_token..).zip(slots) {
        let Some(slot) = u64::try_from(slot).ok().filter(|slot| *slot < layout.num_slots) else {
            continue;
        };
        if slot != next_slot || left == 0 {
            let (block, token_in_block) = (slot / layout.block_tokens, slot % layout.block_tokens);
            let start = at(0, block, layout.block_stride_bytes);
            next_offset = at(start, token_in_block, layout.token_stride_bytes);
            left = layout.block_tokens - token_in_block;
        }
        let offset = next_offset;
        next_slot = slot + 1;
        next_offset = next_offset.wrapping_add(layout.token_stride_bytes);
        left -= 1;
        match runs.last_mut() {
            Some(run) if run.is_followed_by(token, offset, row_bytes) => run.tokens += 1,
            _ => runs.push(Run { token, tokens: 1, offset }),
        }
    }
    runs
}

impl Run {
    fn is_followed_by(&self, token: u64, offset: u64, row_bytes: u64) -> bool {
        token == self.token + self.tokens
            && offset == at(self.offset, self.tokens, row_bytes)
            && (self.tokens + 1).saturating_mul(row_bytes) <= RUN_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_both_sides_make_one_run() {
        let run = |token, tokens, offset| Run { token, tokens, offset };
        let slots = [4, 5, -1, 6, 7, 3, 8, 100, 12];
        // Blocks of 4 slots of 8 bytes, without gaps: a run goes on into the next block.
        let mut layout = Layout {
            block_tokens: 4,
            block_stride_bytes: 32,
            token_stride_bytes: 8,
            num_slots: 100,
        };
        assert_eq!(
            find_runs(&slots, 10, 8, &layout),
            [run(10, 2, 32), run(13, 2, 48), run(15, 1, 24), run(16, 1, 64), run(18, 1, 96)]
        );
        layout.block_stride_bytes = 40;
        assert_eq!(find_runs(&[2, 3, 4, 5], 0, 8, &layout), [run(0, 2, 16), run(2, 2, 40)]);
        layout.token_stride_bytes = 16;
        assert_eq!(find_runs(&[1, 2], 0, 8, &layout), [run(0, 1, 16), run(1, 1, 32)]);
        assert_eq!(find_runs(&[0, 1], 0, 100 << 10, &layout).len(), 2);
    }
}
