//! What transfers of chunks are tried over: every format, at every width, both ways.

use kv_kernels::{
    Direction, KvFormat, KvShape, PagedLayout, Slot, TableEntry, chunks::LaunchLimits,
    layout::FormatOptions,
};

use super::on::{Random, entries};

pub(crate) const BLOCKS: u64 = 6;

/// One call, of several chunks.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) shape: KvShape,
    pub(crate) layout: PagedLayout,
    pub(crate) direction: Direction,
    pub(crate) layers: std::ops::Range<u32>,
    pub(crate) chunks: Vec<ChunkCase>,
    /// Bytes by which tensors and chunks are off the alignment of their allocations.
    pub(crate) shift: u64,
    pub(crate) limits: LaunchLimits,
}

pub(crate) struct ChunkCase {
    pub(crate) tokens: u64,
    pub(crate) skip: u64,
    pub(crate) pinned: bool,
    pub(crate) mapping: Mapping,
}

pub(crate) enum Mapping {
    Slots(Vec<Slot>),
    Blocks(Vec<TableEntry>),
}

impl Mapping {
    /// The slot of a token; `None` for one that stays where it is.
    pub(crate) fn slot(&self, token: u64, block_tokens: u64) -> Option<u64> {
        match self {
            Self::Slots(slots) => slots[token as usize].place(),
            Self::Blocks(ids) => {
                let block = ids[(token / block_tokens) as usize].block()?;
                block.slot(block_tokens as u32, (token % block_tokens) as u32).place()
            }
        }
    }
}

/// Bytes of a head so that vectors of 16, 8, 4, 2 and 1 bytes are what is aligned, and head sizes of 66
/// and 576 elements of 2 bytes; 128 values and a scale make the rows of 132 bytes of an indexer.
const HEADS: [(u64, u64); 8] =
    [(32, 0), (24, 0), (12, 0), (132, 0), (66, 0), (5, 0), (1152, 0), (128, 48)];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (number, format) in (0..).zip(KvFormat::ALL) {
        for (which, (head_bytes, padding)) in (0..).zip(HEADS) {
            for direction in [Direction::ChunkToPaged, Direction::PagedToChunk] {
                cases.push(case(format, (head_bytes, padding), direction, number + which));
            }
        }
    }
    cases
}

fn case(
    format: KvFormat,
    (head_bytes, block_padding_bytes): (u64, u64),
    direction: Direction,
    number: u64,
) -> Case {
    let one_head = matches!(format, KvFormat::Mla | KvFormat::MlaSlots | KvFormat::IndexerPages);
    let is_split = format == KvFormat::PagedAttention;
    // Elements of one byte, and of two.
    let element_bytes = if is_split { 1 + number % 2 } else { 1 };
    let head_bytes = if is_split { head_bytes.next_multiple_of(16) } else { head_bytes };
    let options = FormatOptions {
        layers: 2 + (number % 2) as u32,
        heads: if one_head { 1 } else { 2 + (number % 2) as u32 },
        head_bytes,
        element_bytes,
        block_tokens: [3, 16, 4, 1][number as usize % 4],
        blocks: BLOCKS,
        block_padding_bytes,
    };
    let by_blocks = number / 2 % 2 == 1;
    let shape = format.shape(&options).unwrap();
    // Every fourth case moves one layer alone.
    let layers = if number % 4 == 3 { 1..2 } else { 0..shape.layers() };
    let layout = format.layout(&options).unwrap();
    let limits = [
        LaunchLimits::default(),
        LaunchLimits { blocks: 2, threads: 64 },
        LaunchLimits { blocks: 1, threads: 0 },
    ][number as usize % 3];
    Case {
        name: format!("{format:?} {head_bytes} {direction:?} blocks: {by_blocks} {options:?}"),
        shape,
        layout,
        direction,
        layers,
        chunks: chunks(u64::from(options.block_tokens), by_blocks, number),
        shift: [0, 0, 8, 1][number as usize % 4],
        limits,
    }
}

/// Chunks of several blocks, of less than one, of one token and of none, over different slots.
fn chunks(block_tokens: u64, by_blocks: bool, number: u64) -> Vec<ChunkCase> {
    if by_blocks {
        let ids = [vec![3, -1, 0], vec![5], vec![], vec![4]];
        return (0..)
            .zip(ids)
            .map(|(index, ids)| {
                // The last block of a chunk is not always whole.
                let short = if index == 0 { block_tokens / 2 } else { 0 };
                let tokens = ids.len() as u64 * block_tokens - short;
                let skip = [block_tokens, 0, 0, tokens][index as usize];
                let pinned = (number + index).is_multiple_of(3);
                ChunkCase { tokens, skip, pinned, mapping: Mapping::Blocks(entries(&ids)) }
            })
            .collect();
    }
    let mut slots: Vec<_> = (0..(BLOCKS * block_tokens) as u32).map(Slot::from).collect();
    let mut random = Random(number + 3);
    random.shuffle(&mut slots[block_tokens as usize..]);
    for slot in &mut slots {
        if random.below(7) == 0 {
            *slot = Slot::NONE;
        }
    }
    let lengths = [block_tokens * 2 + 1, 1, 0, block_tokens];
    (0..)
        .zip(lengths)
        .map(|(index, tokens)| {
            let slots = slots.drain(..tokens as usize).collect();
            let skip = [2.min(tokens), 0, 0, tokens.saturating_sub(1)][index as usize];
            let pinned = (number + index).is_multiple_of(3);
            ChunkCase { tokens, skip, pinned, mapping: Mapping::Slots(slots) }
        })
        .collect()
}
