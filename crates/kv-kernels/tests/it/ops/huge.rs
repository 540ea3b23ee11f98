//! Every stride beyond 32 bits: rows that lie gigabytes apart in reserved addresses of which only the
//! pages with rows are mapped, so that an offset cut to 32 bits, signed or not, meets a hole.

use std::collections::BTreeSet;

use cuda_driver::{AccessDesc, AddressRange, PhysicalMemory, Stream};
use kv_kernels::{
    Direction, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot,
    chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits},
    layout::{LayoutOptions, RowPart, Tensors},
};

use super::on::{On, Outputs, noise};

const GIB: u64 = 1 << 30;

/// Addresses of which some pages are mapped.
struct Sparse {
    range: AddressRange,
    /// Mapped for as long as the range is.
    _memory: Vec<PhysicalMemory>,
    stream: Stream,
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // A range is freed only when nothing is mapped in it.
        let unmapped =
            self.stream.synchronize().and_then(|()| self.range.unmap(0, self.range.bytes()));
        assert!(unmapped.is_ok() || std::thread::panicking(), "{unmapped:?}");
    }
}

impl Sparse {
    /// `bytes` bytes of addresses, with memory under all the pieces of `piece` bytes.
    fn new(on: &On, bytes: u64, pieces: &[u64], piece: u64) -> Self {
        let page = PhysicalMemory::granularity(&on.device).unwrap();
        let range = AddressRange::reserve(&on.device, bytes.next_multiple_of(page)).unwrap();
        let pages: BTreeSet<u64> = pieces
            .iter()
            .flat_map(|start| [start / page * page, (start + piece - 1) / page * page])
            .collect();
        let map = |at: u64| {
            let memory = PhysicalMemory::create(&on.device, page).unwrap();
            range.map(at, &memory).unwrap();
            let access = AccessDesc { device: on.device.ordinal() };
            range.set_access(at, page, &[access]).unwrap();
            on.stream.fill(range.span(at, page).unwrap(), 0x5A).unwrap();
            memory
        };
        let memory = pages.into_iter().map(map).collect();
        Self { range, _memory: memory, stream: on.stream.clone() }
    }

    fn read(&self, on: &On, pieces: &[u64], piece: u64) -> Vec<u8> {
        let read = |at: &u64| on.read(self.range.span(*at, piece).unwrap());
        pieces.iter().flat_map(read).collect()
    }
}

fn shape() -> KvShape {
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 66, block_tokens: 2 };
    KvShape::new(options).unwrap()
}

/// Each step of each axis is longer than 32 bits can count.
fn layout() -> PagedLayout {
    let part = RowPart {
        segment_bytes: 22,
        segments: 3,
        segment_stride_bytes: 5 * GIB,
        token_stride_bytes: 16 * GIB,
        offset_bytes: 3 * GIB,
    };
    let options = LayoutOptions {
        tensors: Tensors::One,
        layer_stride_bytes: 512 * GIB,
        kv_stride_bytes: 200 * GIB,
        block_stride_bytes: 60 * GIB,
        parts: &[part],
    };
    PagedLayout::new(&shape(), options).unwrap()
}

fn segments() -> Vec<u64> {
    let layout = layout();
    let part = layout.parts_of(0)[0];
    let mut starts = Vec::new();
    for plane in 0..4 {
        for (block, token) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for segment in 0..3 {
                let start = plane / 2 * layout.options().layer_stride_bytes
                    + plane % 2 * layout.options().kv_stride_bytes
                    + block * layout.options().block_stride_bytes
                    + token * part.token_stride_bytes
                    + segment * part.segment_stride_bytes;
                starts.push(start + part.offset_bytes);
            }
        }
    }
    starts
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs = pages(on);
    outputs.extend(chunk(on));
    outputs.extend(slots(on));
    outputs
}

/// Pages with rows in pieces, every step longer than 32 bits can count.
fn pages(on: &On) -> Outputs {
    let (shape, layout, segments) = (shape(), layout(), segments());
    let extent = layout.extent_bytes(&shape, 2).unwrap();
    let sparse = Sparse::new(on, extent, &segments, 22);
    let span = sparse.range.span(0, extent).unwrap();
    let paged = PagedKv::new(&on.stream, shape, layout, span, 2).unwrap();
    let slots = [3, 0, 2, 1].map(Slot::from);
    let device_slots = on.upload(&slots);
    let stored = on.upload(&noise(4 * shape.token_bytes()));
    let gathered = on.memory(4 * shape.token_bytes());
    for (chunk, direction) in
        [(&stored, Direction::ChunkToPaged), (&gathered, Direction::PagedToChunk)]
    {
        let mapping = ChunkMapping::Slots { slots: device_slots.span().into(), host: Some(&slots) };
        let chunk =
            Chunk { memory: chunk.span().into(), mapping, tokens: 4, skip_prefix_n_tokens: 0 };
        let transfer = ChunkTransfer {
            chunks: &[chunk],
            layers: 0..2,
            direction,
            num_blocks: 2,
            limits: LaunchLimits::default(),
            report: None,
        };
        on.kernels.transfer_chunks(&on.stream, &paged, &transfer).unwrap();
    }
    let gathered = on.read(gathered.span());
    assert!(gathered == on.read(stored.span()), "what was stored came back changed");
    vec![
        ("sparse pages".into(), sparse.read(on, &segments, 22)),
        ("gathered from sparse pages".into(), gathered),
    ]
}

/// A chunk with planes of 2.7 GB of which the last three tokens alone move, and whose mapping, of 320
/// MB, is there for those tokens only.
fn chunk(on: &On) -> Outputs {
    const TOKENS: u64 = 40_000_000;
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 66, block_tokens: 2 };
    let shape = KvShape::new(options).unwrap();
    let rows: Vec<u64> =
        (0..4).flat_map(|plane| [3, 2, 1].map(|n| (plane * TOKENS + TOKENS - n) * 66)).collect();
    let bytes = TOKENS * shape.token_bytes();
    let sparse = Sparse::new(on, bytes, &rows, 66);
    let mapping = Sparse::new(on, TOKENS * 8, &[(TOKENS - 3) * 8], 24);
    let slots = mapping.range.span((TOKENS - 3) * 8, 24).unwrap();
    on.stream.upload(slots, bytemuck::cast_slice(&[5i64, 2, 3])).unwrap();
    let pages = on.upload(&noise(3 * shape.block_bytes()));
    let layout = PagedLayout::block_major(&shape);
    let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), 3).unwrap();
    let chunk = Chunk {
        memory: sparse.range.span(0, bytes).unwrap().into(),
        mapping: ChunkMapping::Slots {
            slots: mapping.range.span(0, TOKENS * 8).unwrap().into(),
            host: None,
        },
        tokens: TOKENS,
        skip_prefix_n_tokens: TOKENS - 3,
    };
    let mut transfer = ChunkTransfer {
        chunks: &[chunk],
        layers: 0..2,
        direction: Direction::PagedToChunk,
        num_blocks: 3,
        limits: LaunchLimits::default(),
        report: None,
    };
    on.kernels.transfer_chunks(&on.stream, &paged, &transfer).unwrap();
    let gathered = sparse.read(on, &rows, 66);
    let empty = on.memory(pages.bytes());
    on.stream.fill(empty.span(), 0).unwrap();
    let paged = PagedKv::new(&on.stream, shape, layout, empty.span(), 3).unwrap();
    transfer.direction = Direction::ChunkToPaged;
    on.kernels.transfer_chunks(&on.stream, &paged, &transfer).unwrap();
    vec![
        ("sparse chunk".into(), gathered),
        ("stored from a sparse chunk".into(), on.read(empty.span())),
    ]
}

/// More slots than 32 bits count, of which the last block's alone are there.
fn slots(on: &On) -> Outputs {
    const BLOCKS: u64 = (1 << 28) + 3;
    let options = KvShapeOptions { layers: 1, kv_count: 1, row_bytes: 16, block_tokens: 17 };
    let shape = KvShape::new(options).unwrap();
    let layout = PagedLayout::block_major(&shape);
    let (extent, block) = (BLOCKS * shape.block_bytes(), shape.block_bytes());
    let sparse = Sparse::new(on, extent, &[extent - block], block);
    let span = sparse.range.span(0, extent).unwrap();
    let paged = PagedKv::new(&on.stream, shape, layout, span, BLOCKS).unwrap();
    let last = (BLOCKS * 17) as i64;
    let slots = super::on::slots(&[last - 3, last - 17, last - 1]);
    assert!(slots[1].get() > 1 << 32);
    let device_slots = on.upload(&slots);
    let chunk = on.upload(&noise(3 * 16));
    let chunk = Chunk {
        memory: chunk.span().into(),
        mapping: ChunkMapping::Slots { slots: device_slots.span().into(), host: Some(&slots) },
        tokens: 3,
        skip_prefix_n_tokens: 0,
    };
    let transfer = ChunkTransfer {
        chunks: &[chunk],
        layers: 0..1,
        direction: Direction::ChunkToPaged,
        num_blocks: BLOCKS,
        limits: LaunchLimits::default(),
        report: None,
    };
    on.kernels.transfer_chunks(&on.stream, &paged, &transfer).unwrap();
    let stored = sparse.read(on, &[extent - block], block);
    let row = |token: usize| &stored[token * 16..][..16];
    let rows = noise(3 * 16);
    assert!([row(14), row(0), row(16)].concat() == rows, "rows are in other slots");
    vec![("the last slots of many".into(), stored)]
}

#[cfg(test)]
mod on_sim {
    use kv_kernels::references;

    use super::super::on::compare;
    use super::*;

    #[test]
    fn the_ptx_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
    }
}
