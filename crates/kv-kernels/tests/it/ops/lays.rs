//! Layouts with their index formula written out, for oracles.

use kv_kernels::{
    KvShape, KvShapeOptions, PagedLayout,
    layout::{LayoutOptions, RowPart, Strides, Tensors},
};

/// A layout, and where byte `x` of the row of a token of a block in a plane lies.
pub(crate) struct Lay {
    pub(crate) name: &'static str,
    pub(crate) layout: PagedLayout,
    /// Bytes of all tensors, one after another.
    pub(crate) bytes: u64,
    /// Bytes from a tensor to the next.
    pub(crate) tensor_bytes: u64,
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

/// How many layouts [`lays`] gives.
pub(crate) const LAYS: usize = 7;

/// Every kind of layout, with rows of two, or of an odd number of, heads.
pub(crate) fn lays(shape: &KvShape, blocks: u64) -> Vec<Lay> {
    let heads = if shape.row_bytes().is_multiple_of(2) { 2 } else { shape.row_bytes() };
    let mut lays = lays_of_heads(shape, blocks, heads);
    lays.push(two_parts(shape, blocks));
    lays.push(split_keys(shape, blocks, if shape.row_bytes().is_multiple_of(2) { 2 } else { 1 }));
    assert_eq!(lays.len(), LAYS);
    lays
}

/// Page-first, layer-first, tokens outermost in a block with gaps that nobody may touch, heads before
/// tokens, and a tensor for each layer.
pub(crate) fn lays_of_heads(shape: &KvShape, blocks: u64, heads: u64) -> Vec<Lay> {
    let (row, planes) = (shape.row_bytes(), shape.planes());
    let (of_plane, of_block) = (shape.block_plane_bytes(), shape.block_bytes());
    let tokens = u64::from(shape.block_tokens());
    let one = |name, layout, bytes, at| Lay { name, layout, bytes, tensor_bytes: bytes, at };
    let page_first = one(
        "page-first",
        PagedLayout::block_major(shape),
        blocks * of_block,
        Box::new(move |p: Place| p.block * of_block + p.plane * of_plane + p.token * row + p.byte),
    );
    let layer_first = one(
        "layer-first",
        PagedLayout::layer_major(shape, blocks).unwrap(),
        blocks * of_block,
        Box::new(move |p| (p.plane * blocks + p.block) * of_plane + p.token * row + p.byte),
    );
    let gap = row + 8;
    let strides = Strides {
        plane_bytes: gap,
        token_bytes: gap * planes,
        block_bytes: gap * planes * tokens + 16,
    };
    let gaps = one(
        "gaps",
        PagedLayout::custom(shape, strides).unwrap(),
        blocks * strides.block_bytes,
        Box::new(move |p| {
            p.block * strides.block_bytes + (p.token * planes + p.plane) * gap + p.byte
        }),
    );
    let head = row / heads;
    let part = RowPart {
        segment_bytes: head,
        segments: heads as u32,
        segment_stride_bytes: tokens * head,
        token_stride_bytes: head,
        offset_bytes: 0,
    };
    let heads_first = one(
        "heads-first",
        in_one_tensor(shape, of_plane, &[part]),
        blocks * of_block,
        Box::new(move |p| {
            let (head_of, inside) = (p.byte / head, p.byte % head);
            let plane = p.block * of_block + p.plane * of_plane;
            plane + head_of * tokens * head + p.token * head + inside
        }),
    );
    vec![page_first, layer_first, gaps, heads_first, per_layer(shape, blocks)]
}

/// Blocks of all planes one after another, with rows of these parts.
pub(crate) fn in_one_tensor(shape: &KvShape, plane_bytes: u64, parts: &[RowPart]) -> PagedLayout {
    let options = LayoutOptions {
        tensors: Tensors::One,
        layer_stride_bytes: plane_bytes * u64::from(shape.kv_count()),
        kv_stride_bytes: plane_bytes,
        block_stride_bytes: plane_bytes * shape.planes(),
        parts,
    };
    PagedLayout::new(shape, options).unwrap()
}

/// Rows that lie whole, one token's behind the other's.
pub(crate) fn whole_rows(shape: &KvShape) -> RowPart {
    let row = shape.row_bytes();
    RowPart {
        segment_bytes: row,
        segments: 1,
        segment_stride_bytes: row,
        token_stride_bytes: row,
        offset_bytes: 0,
    }
}

/// A tensor for each layer, with a gap after each.
fn per_layer(shape: &KvShape, blocks: u64) -> Lay {
    let (row, kv_count) = (shape.row_bytes(), u64::from(shape.kv_count()));
    let of_plane = shape.block_plane_bytes();
    let tensor_bytes = (kv_count * blocks * of_plane).next_multiple_of(16) + 48;
    let options = LayoutOptions {
        tensors: Tensors::PerLayer,
        layer_stride_bytes: 0,
        kv_stride_bytes: blocks * of_plane,
        block_stride_bytes: of_plane,
        parts: &[whole_rows(shape)],
    };
    Lay {
        name: "a tensor for each layer",
        layout: PagedLayout::new(shape, options).unwrap(),
        bytes: tensor_bytes * u64::from(shape.layers()),
        tensor_bytes,
        at: Box::new(move |p| {
            let (layer, kv) = (p.plane / kv_count, p.plane % kv_count);
            let plane = layer * tensor_bytes + kv * blocks * of_plane;
            plane + p.block * of_plane + p.token * row + p.byte
        }),
    }
}

/// All tokens' values, and then all tokens' scales, as in an indexer's pages.
fn two_parts(shape: &KvShape, blocks: u64) -> Lay {
    let (row, tokens) = (shape.row_bytes(), u64::from(shape.block_tokens()));
    let (of_plane, of_block) = (shape.block_plane_bytes(), shape.block_bytes());
    let first = row - row.div_ceil(4);
    let part = |bytes, offset_bytes| RowPart {
        segment_bytes: bytes,
        segments: 1,
        segment_stride_bytes: bytes,
        token_stride_bytes: bytes,
        offset_bytes,
    };
    let parts = [part(first, 0), part(row - first, tokens * first)];
    Lay {
        name: "two parts",
        layout: in_one_tensor(shape, of_plane, &parts),
        bytes: blocks * of_block,
        tensor_bytes: blocks * of_block,
        at: Box::new(move |p| {
            let plane = p.block * of_block + p.plane * of_plane;
            plane
                + match p.byte.checked_sub(first) {
                    None => p.token * first + p.byte,
                    Some(byte) => tokens * first + p.token * (row - first) + byte,
                }
        }),
    }
}

/// Keys in pieces, each beside those of the block's other tokens, and values element by element.
pub(crate) fn split_keys(shape: &KvShape, blocks: u64, element_bytes: u64) -> Lay {
    let (row, tokens) = (shape.row_bytes(), u64::from(shape.block_tokens()));
    let (of_plane, of_block) = (shape.block_plane_bytes(), shape.block_bytes());
    let piece = [16, 8, 4, 2, 1].into_iter().find(|piece| row.is_multiple_of(*piece)).unwrap();
    let part = |bytes| RowPart {
        segment_bytes: bytes,
        segments: (row / bytes) as u32,
        segment_stride_bytes: tokens * bytes,
        token_stride_bytes: bytes,
        offset_bytes: 0,
    };
    let keys = in_one_tensor(shape, of_plane, &[part(piece)]);
    let kv_count = u64::from(shape.kv_count());
    let layout = match kv_count {
        2 => keys.with_value_parts(shape, &[part(element_bytes)]).unwrap(),
        _ => keys,
    };
    Lay {
        name: "keys in pieces, tokens of values last",
        layout,
        bytes: blocks * of_block,
        tensor_bytes: blocks * of_block,
        at: Box::new(move |p| {
            let piece = if p.plane % kv_count == 0 { piece } else { element_bytes };
            let in_plane = (p.byte / piece * tokens + p.token) * piece + p.byte % piece;
            p.block * of_block + p.plane * of_plane + in_plane
        }),
    }
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
