//! Layouts with their index formula written out, for oracles.

use kv_kernels::{KvShape, KvShapeOptions, PagedLayout, Strides};

/// A layout, and where byte `x` of the row of a token of a block in a plane lies.
pub(crate) struct Lay {
    pub(crate) name: &'static str,
    pub(crate) layout: PagedLayout,
    pub(crate) bytes: u64,
    pub(crate) at: Box<dyn Fn(Place) -> u64>,
}

/// A byte of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) plane: u64,
    pub(crate) block: u64,
    pub(crate) token: u64,
    pub(crate) byte: u64,
}

pub(crate) fn shape(layers: u32, kv_count: u32, row_bytes: u64, block_tokens: u32) -> KvShape {
    KvShape::new(KvShapeOptions { layers, kv_count, row_bytes, block_tokens }).unwrap()
}

/// Page-first, layer-first, and tokens outermost in a block with gaps that nobody may touch.
pub(crate) fn lays(shape: &KvShape, blocks: u64) -> Vec<Lay> {
    let (row, planes) = (shape.row_bytes(), shape.planes());
    let (of_plane, of_block) = (shape.block_plane_bytes(), shape.block_bytes());
    let tokens = u64::from(shape.block_tokens());
    let page_first = Lay {
        name: "page-first",
        layout: PagedLayout::block_major(shape),
        bytes: blocks * of_block,
        at: Box::new(move |p| p.block * of_block + p.plane * of_plane + p.token * row + p.byte),
    };
    let layer_first = Lay {
        name: "layer-first",
        layout: PagedLayout::layer_major(shape, blocks).unwrap(),
        bytes: blocks * of_block,
        at: Box::new(move |p| (p.plane * blocks + p.block) * of_plane + p.token * row + p.byte),
    };
    let gap = row + 8;
    let strides = Strides {
        plane_bytes: gap,
        token_bytes: gap * planes,
        block_bytes: gap * planes * tokens + 16,
    };
    let gaps = Lay {
        name: "gaps",
        layout: PagedLayout::custom(shape, strides).unwrap(),
        bytes: blocks * strides.block_bytes,
        at: Box::new(move |p| {
            p.block * strides.block_bytes + (p.token * planes + p.plane) * gap + p.byte
        }),
    };
    vec![page_first, layer_first, gaps]
}

/// Every byte of the given bytes of the rows of a block, with its place in the rows.
pub(crate) fn places(
    shape: &KvShape,
    block: u64,
    bytes: std::ops::Range<u64>,
) -> impl Iterator<Item = Place> {
    let (planes, tokens) = (shape.planes(), u64::from(shape.block_tokens()));
    (0..planes).flat_map(move |plane| {
        let bytes = bytes.clone();
        (0..tokens).flat_map(move |token| {
            bytes.clone().map(move |byte| Place { plane, block, token, byte })
        })
    })
}
