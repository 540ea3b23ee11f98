//! What the transfer kernels compute.

use std::ops::Range;

use cuda_driver::{DeviceMemory, KernelArgs, LaunchConfig, ReferenceError};

use super::{Arguments, at, load_array, report_bad};
use crate::Direction;
use crate::launch::{CHUNKS_MAX, Chunk, Chunks, Pages, Part};
use crate::narrow::{NarrowChunk, NarrowChunks, NarrowPages};

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: Pages = args.take()?;
    let chunks: Chunks = args.take()?;
    run_chunks(memory, &pages, first(&chunks.0, pages.chunks)?)
}

/// As many chunks as the pages say.
fn first<T>(chunks: &[T; CHUNKS_MAX], count: u32) -> Result<&[T], ReferenceError> {
    chunks.get(..count as usize).ok_or(ReferenceError::Argument { index: 1 })
}

pub(super) fn run_narrow_one(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: NarrowPages = args.take()?;
    let chunk: NarrowChunk = args.take()?;
    let pages = pages.general();
    run_chunks(memory, &pages, &[chunk.general(&pages)])
}

pub(super) fn run_narrow(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: NarrowPages = args.take()?;
    let chunks: NarrowChunks = args.take()?;
    let pages = pages.general();
    let chunks = first(&chunks.0, pages.chunks)?;
    let chunks: Vec<Chunk> = chunks.iter().map(|chunk| chunk.general(&pages)).collect();
    run_chunks(memory, &pages, &chunks)
}

fn run_chunks(
    memory: &mut dyn DeviceMemory,
    pages: &Pages,
    chunks: &[Chunk],
) -> Result<(), ReferenceError> {
    let divisors = [u64::from(pages.row_vectors.divisor), pages.block_tokens.divisor];
    if divisors.contains(&0) || pages.layers.divisor == 0 {
        return Err(ReferenceError::Argument { index: 0 });
    }
    if chunks.iter().any(|chunk| chunk.moved.divisor == 0) {
        return Err(ReferenceError::Argument { index: 1 });
    }
    let mut copied = Vec::new();
    for chunk in chunks {
        Transfer { pages, chunk, copied: &mut copied }.run(memory)?;
    }
    Ok(())
}

/// One chunk of a launch.
struct Transfer<'a> {
    pages: &'a Pages,
    chunk: &'a Chunk,
    /// What is on its way, kept for the next copy.
    copied: &'a mut Vec<u8>,
}

impl Transfer<'_> {
    fn run(&mut self, memory: &mut dyn DeviceMemory) -> Result<(), ReferenceError> {
        let (pages, chunk) = (self.pages, self.chunk);
        let moved = u64::from(chunk.moved.divisor);
        let first = chunk.first_row;
        let end = first + chunk.items / u64::from(pages.row_vectors.divisor);
        if first == end {
            return Ok(());
        }
        let layout = Layout::of(pages);
        // Nearly all planes move all tokens, whose runs are found once.
        let mut found: Option<(Range<u64>, Refused, Vec<Run>)> = None;
        for plane in first / moved..=(end - 1) / moved {
            let start = plane * moved;
            let tokens = first.max(start) - start..end.min(start + moved) - start;
            let (refused, runs) = match &mut found {
                Some((known, refused, runs)) if *known == tokens => (refused, runs),
                other => {
                    let (places, refused) = self.places(memory, &tokens)?;
                    let runs = find_runs(&places, u64::from(chunk.skip) + tokens.start, &layout);
                    let (_, refused, runs) = other.insert((tokens, refused, runs));
                    (refused, runs)
                }
            };
            report_bad(memory, pages.report, refused.count, refused.lowest)?;
            self.plane(memory, plane, runs)?;
        }
        Ok(())
    }

    /// Block and place in it of each token of a range, counted from the first that moves; and which
    /// entries of the mapping are out of range.
    fn places(
        &self,
        memory: &dyn DeviceMemory,
        tokens: &Range<u64>,
    ) -> Result<(Vec<Option<Place>>, Refused), ReferenceError> {
        let (pages, chunk) = (self.pages, self.chunk);
        let block_tokens = pages.block_tokens.divisor;
        let (first, count) = (u64::from(chunk.skip) + tokens.start, tokens.end - tokens.start);
        let mut refused = Refused { count: 0, lowest: u64::MAX };
        let mut ready = |block, token, entry| {
            if block < pages.num_blocks {
                return Some(Place { block, token });
            }
            refused.count += 1;
            refused.lowest = refused.lowest.min(entry);
            None
        };
        let mut places = Vec::with_capacity(count as usize);
        if pages.mapping_kind == 0 {
            let slots = load_array::<i64>(memory, at(chunk.mapping, first, 8), count)?;
            for (entry, slot) in (first..).zip(slots) {
                let slot = u64::try_from(slot).ok();
                let place = |slot| ready(slot / block_tokens, slot % block_tokens, entry);
                places.push(slot.and_then(place));
            }
            return Ok((places, refused));
        }
        let entries = first / block_tokens..(first + count).div_ceil(block_tokens);
        let address = at(chunk.mapping, entries.start, 4);
        let ids = load_array::<i32>(memory, address, entries.end - entries.start)?;
        for token in first..first + count {
            let entry = token / block_tokens;
            let block = u64::try_from(ids[(entry - entries.start) as usize]).ok();
            places.push(block.and_then(|block| ready(block, token % block_tokens, entry)));
        }
        Ok((places, refused))
    }

    /// Moves the runs of one plane.
    fn plane(
        &mut self,
        memory: &mut dyn DeviceMemory,
        plane: u64,
        runs: &[Run],
    ) -> Result<(), ReferenceError> {
        let (pages, chunk) = (self.pages, self.chunk);
        let layers = u64::from(pages.layers.divisor);
        let (kv, layer) = (plane / layers, plane % layers);
        let entry = kv * u64::from(pages.plane_layers) + u64::from(pages.first_layer) + layer;
        let in_pages = load_array::<u64>(memory, at(pages.plane_ptrs, entry, 8), 1)?[0];
        let in_chunk = at(at(chunk.address, kv, chunk.kv_stride), layer, chunk.layer_stride);
        let vector_bytes = u64::from(pages.vector_bytes);
        let row_bytes = u64::from(pages.row_vectors.divisor) * vector_bytes;
        let first_bytes = u64::from(pages.first_part_vectors) * vector_bytes;
        for run in runs {
            let in_chunk = at(in_chunk, run.token, chunk.token_stride);
            let block = at(in_pages, run.block, pages.block_stride);
            if pages.is_plain() {
                let start = at(block, run.token_in_block, pages.parts[0].token_stride);
                self.copy(memory, in_chunk, start, run.tokens.saturating_mul(row_bytes))?;
                continue;
            }
            // Rows in pieces have runs of one token.
            let [first, second] = &pages.parts;
            self.part(memory, first, run.token_in_block, (in_chunk, block), first_bytes)?;
            let rest = row_bytes - first_bytes;
            let in_chunk = at(in_chunk, 1, first_bytes);
            self.part(memory, second, run.token_in_block, (in_chunk, block), rest)?;
        }
        Ok(())
    }

    /// Moves one part of one row, `bytes` bytes.
    fn part(
        &mut self,
        memory: &mut dyn DeviceMemory,
        part: &Part,
        token: u64,
        (in_chunk, block): (u64, u64),
        bytes: u64,
    ) -> Result<(), ReferenceError> {
        let segment_bytes =
            u64::from(part.segment_vectors.divisor) * u64::from(self.pages.vector_bytes);
        let start = at(at(block, 1, part.offset), token, part.token_stride);
        let segments = if bytes == 0 { 0 } else { bytes / segment_bytes };
        for segment in 0..segments {
            let in_chunk = at(in_chunk, segment, segment_bytes);
            self.copy(memory, in_chunk, at(start, segment, part.segment_stride), segment_bytes)?;
        }
        Ok(())
    }

    fn copy(
        &mut self,
        memory: &mut dyn DeviceMemory,
        in_chunk: u64,
        in_pages: u64,
        bytes: u64,
    ) -> Result<(), ReferenceError> {
        let to_paged = self.pages.direction == Direction::ChunkToPaged as u32;
        let (from, to) = if to_paged { (in_chunk, in_pages) } else { (in_pages, in_chunk) };
        self.copied.clear();
        self.copied.extend_from_slice(&memory.load(from, bytes)?);
        memory.store(to, self.copied)?;
        Ok(())
    }
}

/// Where a token lies in the pages.
#[derive(Clone, Copy, Debug)]
struct Place {
    block: u64,
    token: u64,
}

/// Tokens whose block is out of range, and not negative.
#[derive(Clone, Copy, Debug)]
struct Refused {
    count: u64,
    /// The lowest place in the mapping of one of them.
    lowest: u64,
}

/// Tokens whose rows lie together on both sides; one token, where rows are in pieces.
#[derive(Debug, Eq, PartialEq)]
struct Run {
    /// First token, in the chunk.
    token: u64,
    tokens: u64,
    /// Where it lies.
    block: u64,
    token_in_block: u64,
}

/// Most bytes of a run in one plane, so that what is copied stays in the processor's cache.
const RUN_BYTES_MAX: u64 = 128 << 10;

/// What decides whether rows lie together.
#[derive(Debug)]
struct Layout {
    /// 0 where rows are in pieces.
    row_bytes: u64,
    block_tokens: u64,
    block_stride: u64,
    token_stride: u64,
}

impl Layout {
    fn of(pages: &Pages) -> Self {
        let row_bytes = u64::from(pages.row_vectors.divisor) * u64::from(pages.vector_bytes);
        Self {
            row_bytes: if pages.is_plain() { row_bytes } else { 0 },
            block_tokens: pages.block_tokens.divisor,
            block_stride: pages.block_stride,
            token_stride: pages.parts[0].token_stride,
        }
    }
}

fn find_runs(places: &[Option<Place>], first_token: u64, layout: &Layout) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let together = layout.row_bytes != 0 && layout.token_stride == layout.row_bytes;
    // Blocks follow each other without a gap where their rows fill them.
    let dense = together && layout.block_stride == layout.block_tokens * layout.row_bytes;
    // Where the token after the last run lies, if its row follows.
    let mut next = None;
    for (token, place) in (first_token..).zip(places) {
        let Some(Place { block, token: token_in_block }) = *place else {
            next = None;
            continue;
        };
        match runs.last_mut() {
            Some(run)
                if next == Some((block, token_in_block))
                    && (run.tokens + 1).saturating_mul(layout.row_bytes) <= RUN_BYTES_MAX =>
            {
                run.tokens += 1;
            }
            _ => runs.push(Run { token, tokens: 1, block, token_in_block }),
        }
        next = if !together {
            None
        } else if token_in_block + 1 < layout.block_tokens {
            Some((block, token_in_block + 1))
        } else if dense {
            Some((block + 1, 0))
        } else {
            None
        };
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(slots: &[i64], first_token: u64, layout: &Layout) -> Vec<Run> {
        let places: Vec<_> = slots
            .iter()
            .map(|slot| {
                let slot = u64::try_from(*slot).ok().filter(|slot| *slot < 100)?;
                let (block, token) = (slot / layout.block_tokens, slot % layout.block_tokens);
                Some(Place { block, token })
            })
            .collect();
        find_runs(&places, first_token, layout)
    }

    #[test]
    fn neighbours_on_both_sides_make_one_run() {
        let run = |token, tokens, slot: u64| Run {
            token,
            tokens,
            block: slot / 4,
            token_in_block: slot % 4,
        };
        // Blocks of 4 rows of 8 bytes, without gaps: a run goes on into the next block.
        let dense = Layout { row_bytes: 8, block_tokens: 4, block_stride: 32, token_stride: 8 };
        assert_eq!(
            runs(&[4, 5, -1, 6, 7, 3, 8, 100, 12], 10, &dense),
            [run(10, 2, 4), run(13, 2, 6), run(15, 1, 3), run(16, 1, 8), run(18, 1, 12)]
        );
        assert_eq!(runs(&[2, 3, 4], 0, &dense), [run(0, 3, 2)]);
        let padded = Layout { block_stride: 40, ..dense };
        assert_eq!(runs(&[2, 3, 4, 5], 0, &padded), [run(0, 2, 2), run(2, 2, 4)]);
        let spread = Layout { token_stride: 16, ..dense };
        assert_eq!(runs(&[1, 2], 0, &spread), [run(0, 1, 1), run(1, 1, 2)]);
        let pieces = Layout { row_bytes: 0, ..dense };
        assert_eq!(runs(&[0, 1], 0, &pieces).len(), 2);
        let long = Layout {
            row_bytes: 100 << 10,
            block_tokens: 4,
            block_stride: 400 << 10,
            token_stride: 100 << 10,
        };
        assert_eq!(runs(&[0, 1], 0, &long).len(), 2);
    }
}
