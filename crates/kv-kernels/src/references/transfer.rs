//! What the transfer kernels compute.

use std::ops::Range;

use cuda_driver::reference::{DeviceMemory, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::{Arguments, at, load_array, report_bad};
use crate::Direction;
use crate::launch::CHUNKS_MAX;
use crate::walk::{TransferChunk, TransferChunks, TransferPages, WideRows};

pub(super) fn run_one(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: TransferPages = args.take()?;
    let chunk: TransferChunk = args.take()?;
    run_chunks(memory, &PageRows::narrow(&pages)?, &[chunk])
}

pub(super) fn run_several(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: TransferPages = args.take()?;
    let chunks: TransferChunks = args.take()?;
    run_chunks(memory, &PageRows::narrow(&pages)?, first(&chunks.0, pages.chunks)?)
}

pub(super) fn run_walk(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let pages: TransferPages = args.take()?;
    let wide: WideRows = args.take()?;
    let chunks: TransferChunks = args.take()?;
    let rows = PageRows::narrow(&pages)?;
    let rows = if wide.first_vectors == 0 { rows } else { rows.wide(&wide)? };
    run_chunks(memory, &rows, first(&chunks.0, pages.chunks)?)
}

/// As many chunks as the pages say.
fn first<T>(chunks: &[T; CHUNKS_MAX], count: u32) -> Result<&[T], ReferenceError> {
    chunks.get(..count as usize).ok_or(ReferenceError::Argument { index: 1 })
}

fn run_chunks(
    memory: &mut dyn DeviceMemory,
    pages: &PageRows,
    chunks: &[TransferChunk],
) -> Result<(), ReferenceError> {
    if chunks.iter().any(|chunk| chunk.moved.divisor == 0) {
        return Err(ReferenceError::Argument { index: 1 });
    }
    let mut copied = Vec::new();
    for chunk in chunks {
        ChunkMove { pages, chunk, copied: &mut copied }.run(memory)?;
    }
    Ok(())
}

/// A part of a row in the pages, in bytes.
#[derive(Clone, Copy, Debug)]
struct PartBytes {
    bytes: u64,
    offset: u64,
    segment: u64,
    token_stride: u64,
    segment_stride: u64,
}

/// What a launch is told of the pages.
#[derive(Clone, Copy, Debug)]
struct PageRows {
    pages: TransferPages,
    row_bytes: u64,
    /// The second may have no bytes.
    parts: [PartBytes; 2],
    block_stride: u64,
    block_tokens: u64,
    /// Slots, or blocks, that are ready.
    places: u64,
}

impl PageRows {
    fn narrow(pages: &TransferPages) -> Result<Self, ReferenceError> {
        let vector_bytes = u64::from(pages.vector_bytes);
        let row_bytes = u64::from(pages.row_vectors.divisor) * vector_bytes;
        let segment = u64::from(pages.segment_vectors.divisor) * vector_bytes;
        let block_tokens = u64::from(pages.block_tokens.divisor);
        if [row_bytes, segment, block_tokens].contains(&0) || pages.layers.divisor == 0 {
            return Err(ReferenceError::Argument { index: 0 });
        }
        let part = PartBytes {
            bytes: row_bytes,
            offset: 0,
            segment,
            token_stride: pages.token_stride.into(),
            segment_stride: pages.segment_stride.into(),
        };
        Ok(Self {
            pages: *pages,
            row_bytes,
            parts: [part, PartBytes { bytes: 0, ..part }],
            block_stride: pages.block_stride.into(),
            block_tokens,
            places: pages.places.into(),
        })
    }

    fn wide(self, wide: &WideRows) -> Result<Self, ReferenceError> {
        let vector_bytes = u64::from(self.pages.vector_bytes);
        let first_bytes = u64::from(wide.first_vectors) * vector_bytes;
        let rest = self.row_bytes.checked_sub(first_bytes);
        let rest = rest.ok_or(ReferenceError::Argument { index: 1 })?;
        let parts = std::array::from_fn(|i| PartBytes {
            bytes: [first_bytes, rest][i],
            offset: wide.parts[i].offset,
            segment: u64::from(wide.parts[i].segment_vectors.divisor) * vector_bytes,
            token_stride: wide.parts[i].token_stride,
            segment_stride: wide.parts[i].segment_stride,
        });
        let no_segment = |part: &PartBytes| part.bytes > 0 && part.segment == 0;
        if wide.block_tokens.divisor == 0 || parts.iter().any(no_segment) {
            return Err(ReferenceError::Argument { index: 1 });
        }
        Ok(Self {
            parts,
            block_stride: wide.block_stride,
            block_tokens: wide.block_tokens.divisor,
            places: wide.places,
            ..self
        })
    }

    /// Whether rows are one piece in the pages too.
    fn is_plain(&self) -> bool {
        let first = &self.parts[0];
        first.segment == self.row_bytes && first.offset == 0
    }
}

/// One chunk of a launch.
struct ChunkMove<'a> {
    pages: &'a PageRows,
    chunk: &'a TransferChunk,
    /// What is on its way, kept for the next copy.
    copied: &'a mut Vec<u8>,
}

impl ChunkMove<'_> {
    fn run(&mut self, memory: &mut dyn DeviceMemory) -> Result<(), ReferenceError> {
        let (pages, chunk) = (self.pages, self.chunk);
        let moved = u64::from(chunk.moved.divisor);
        let first = u64::from(chunk.first_row);
        let end = first + u64::from(chunk.items / pages.pages.row_vectors.divisor);
        if first == end {
            return Ok(());
        }
        let layout = RowLayout::of(pages);
        // Nearly all planes move all tokens, whose runs are found once.
        let mut found: Option<(Range<u64>, Refused, Vec<TokenRun>)> = None;
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
            report_bad(memory, pages.pages.report, refused.count, refused.lowest)?;
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
    ) -> Result<(Vec<Option<PagedToken>>, Refused), ReferenceError> {
        let (pages, chunk) = (self.pages, self.chunk);
        let block_tokens = pages.block_tokens;
        let by_slot = pages.pages.mapping_kind == 0;
        let blocks = if by_slot { pages.places.div_ceil(block_tokens) } else { pages.places };
        let (first, count) = (u64::from(chunk.skip) + tokens.start, tokens.end - tokens.start);
        let mut refused = Refused { count: 0, lowest: u64::MAX };
        let mut ready = |block, token, entry| {
            if block < blocks {
                return Some(PagedToken { block, token });
            }
            refused.count += 1;
            refused.lowest = refused.lowest.min(entry);
            None
        };
        let mut places = Vec::with_capacity(count as usize);
        if by_slot {
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
        runs: &[TokenRun],
    ) -> Result<(), ReferenceError> {
        let (pages, chunk) = (self.pages, self.chunk);
        let entry = plane
            + plane / u64::from(pages.pages.layers.divisor)
                * u64::from(pages.pages.layers_left_out);
        let in_pages = load_array::<u64>(memory, at(pages.pages.plane_ptrs, entry, 8), 1)?[0];
        // The chunk's address is that of the first row that moves, behind the skipped of its plane.
        let before =
            (u64::from(chunk.first_row) + u64::from(chunk.skip)).wrapping_mul(pages.row_bytes);
        let tokens = u64::from(chunk.moved.divisor) + u64::from(chunk.skip);
        let first = chunk.address.wrapping_sub(before);
        let in_chunk = at(first, plane, tokens.wrapping_mul(pages.row_bytes));
        for run in runs {
            let in_chunk = at(in_chunk, run.token, pages.row_bytes);
            let block = at(in_pages, run.block, pages.block_stride);
            if pages.is_plain() {
                let start = at(block, run.token_in_block, pages.parts[0].token_stride);
                self.copy(memory, in_chunk, start, run.tokens.saturating_mul(pages.row_bytes))?;
                continue;
            }
            // Rows in pieces have runs of one token.
            let mut in_chunk = in_chunk;
            for part in pages.parts.iter().filter(|part| part.bytes > 0) {
                let start = at(at(block, 1, part.offset), run.token_in_block, part.token_stride);
                for segment in 0..part.bytes / part.segment {
                    let piece = at(start, segment, part.segment_stride);
                    self.copy(memory, in_chunk, piece, part.segment)?;
                    in_chunk = at(in_chunk, 1, part.segment);
                }
            }
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
        let to_paged = self.pages.pages.direction == Direction::ChunkToPaged as u32;
        let (from, to) = if to_paged { (in_chunk, in_pages) } else { (in_pages, in_chunk) };
        self.copied.clear();
        self.copied.extend_from_slice(&memory.load(from, bytes)?);
        memory.store(to, self.copied)?;
        Ok(())
    }
}

/// Where a token lies in the pages.
#[derive(Clone, Copy, Debug)]
struct PagedToken {
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
struct TokenRun {
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
struct RowLayout {
    /// 0 where rows are in pieces.
    row_bytes: u64,
    block_tokens: u64,
    block_stride: u64,
    token_stride: u64,
}

impl RowLayout {
    fn of(pages: &PageRows) -> Self {
        Self {
            row_bytes: if pages.is_plain() { pages.row_bytes } else { 0 },
            block_tokens: pages.block_tokens,
            block_stride: pages.block_stride,
            token_stride: pages.parts[0].token_stride,
        }
    }
}

fn find_runs(places: &[Option<PagedToken>], first_token: u64, layout: &RowLayout) -> Vec<TokenRun> {
    let mut runs: Vec<TokenRun> = Vec::new();
    let together = layout.row_bytes != 0 && layout.token_stride == layout.row_bytes;
    // Blocks follow each other without a gap where their rows fill them.
    let dense = together && layout.block_stride == layout.block_tokens * layout.row_bytes;
    // Where the token after the last run lies, if its row follows.
    let mut next = None;
    for (token, place) in (first_token..).zip(places) {
        let Some(PagedToken { block, token: token_in_block }) = *place else {
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
            _ => runs.push(TokenRun { token, tokens: 1, block, token_in_block }),
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
