//! Extents and overlaps of layouts.

use super::*;
use crate::KvShapeOptions;

fn shape() -> KvShape {
    let options = KvShapeOptions { layers: 3, kv_count: 2, row_bytes: 24, block_tokens: 4 };
    KvShape::new(options).unwrap()
}

#[test]
fn both_named_layouts_are_dense() {
    let shape = shape();
    let block_major = PagedLayout::block_major(&shape);
    let layer_major = PagedLayout::layer_major(&shape, 10).unwrap();
    for layout in [block_major, layer_major] {
        assert_eq!(layout.extent_bytes(&shape, 10), Ok(10 * shape.block_bytes()));
        assert!(layout.has_whole_rows());
    }
    assert_eq!((block_major.kv_stride_bytes(), block_major.block_stride_bytes()), (96, 576));
    assert_eq!((layer_major.kv_stride_bytes(), layer_major.block_stride_bytes()), (960, 96));
    assert_eq!(layer_major.layer_stride_bytes(), 1920);
    assert!(block_major.has_whole_blocks(&shape) && !layer_major.has_whole_blocks(&shape));
    assert_eq!(layer_major.extent_bytes(&shape, 3), Ok(5 * 960 + 3 * 96));
    // More blocks than the planes were spaced for.
    assert_eq!(
        layer_major.extent_bytes(&shape, 11),
        Err(LayoutError::Overlap { axis: "kv", stride_bytes: 960, inner_bytes: 1056 })
    );
}

#[test]
fn own_strides_are_checked() {
    let shape = shape();
    let dense = Strides { plane_bytes: 96, block_bytes: 576, token_bytes: 24 };
    assert_eq!(PagedLayout::custom(&shape, dense), Ok(PagedLayout::block_major(&shape)));
    assert_eq!(
        PagedLayout::custom(&shape, Strides { token_bytes: 16, ..dense }),
        Err(LayoutError::TokenStride { token_stride_bytes: 16, row_bytes: 24 })
    );
    // Planes interleaved inside a token, [block][token][plane][row], as some engines have it.
    let interleaved = Strides { plane_bytes: 24, block_bytes: 576, token_bytes: 144 };
    let interleaved = PagedLayout::custom(&shape, interleaved).unwrap();
    assert_eq!(interleaved.extent_bytes(&shape, 7), Ok(7 * 576));
    let torn = PagedLayout::custom(&shape, Strides { block_bytes: 88, ..dense }).unwrap();
    assert!(matches!(torn.extent_bytes(&shape, 2), Err(LayoutError::Overlap { .. })));
    assert_eq!(torn.extent_bytes(&shape, 1), Ok(576));
}

#[test]
fn what_every_address_is_a_multiple_of_follows_from_the_strides() {
    let shape = shape();
    let dense = Strides { plane_bytes: 96, block_bytes: 576, token_bytes: 24 };
    let alignment = |strides| PagedLayout::custom(&shape, strides).unwrap().alignment();
    assert_eq!(alignment(dense), 8);
    assert_eq!(alignment(Strides { block_bytes: 580, ..dense }), 4);
    assert_eq!(alignment(Strides { plane_bytes: 97, ..dense }), 1);
    let wide = KvShapeOptions { layers: 1, kv_count: 1, row_bytes: 4096, block_tokens: 1 };
    assert_eq!(PagedLayout::block_major(&KvShape::new(wide).unwrap()).alignment(), 16);
}

#[test]
fn sizes_beyond_64_bits_are_refused() {
    let shape = shape();
    let size = |blocks| LayoutError::Size { block_bytes: 576, blocks };
    assert_eq!(PagedLayout::layer_major(&shape, u64::MAX), Err(size(u64::MAX)));
    let layout = PagedLayout::block_major(&shape);
    assert_eq!(layout.extent_bytes(&shape, u64::MAX / 8), Err(size(u64::MAX / 8)));
    let huge = Strides { plane_bytes: u64::MAX / 2 + 1, block_bytes: 576, token_bytes: 24 };
    assert_eq!(PagedLayout::custom(&shape, huge), Err(size(1)));
}

#[test]
fn values_may_lie_differently_from_keys() {
    let shape = shape();
    let part = |bytes: u64| RowPart {
        segment_bytes: bytes,
        segments: (24 / bytes) as u32,
        segment_stride_bytes: 4 * bytes,
        token_stride_bytes: bytes,
        offset_bytes: 0,
    };
    let options = LayoutOptions {
        tensors: Tensors::PerLayer,
        layer_stride_bytes: 0,
        kv_stride_bytes: 96,
        block_stride_bytes: 192,
        parts: &[part(8)],
    };
    let keys = PagedLayout::new(&shape, options).unwrap();
    let both = keys.with_value_parts(&shape, &[part(2)]).unwrap();
    assert_eq!((both.parts_of(0), both.parts_of(1)), (&[part(8)][..], &[part(2)][..]));
    assert!(!both.has_like_planes() && !both.has_whole_rows() && keys.has_like_planes());
    assert_eq!((both.alignment_of(0), both.alignment_of(1), both.alignment()), (8, 2, 2));
    assert_eq!(both.extent_bytes(&shape, 5), Ok(5 * 192));
    // Values like keys are nothing of their own.
    assert_eq!(keys.with_value_parts(&shape, &[part(8)]), Ok(keys));
    assert_eq!(both.with_value_parts(&shape, &[part(8)]), Ok(keys));
    // Values that reach into the next block's keys.
    let far = RowPart { offset_bytes: 1, ..part(2) };
    let overlap = LayoutError::Overlap { axis: "kv", stride_bytes: 96, inner_bytes: 97 };
    assert_eq!(keys.with_value_parts(&shape, &[far]), Err(overlap));
    let short = RowPart { segments: 11, ..part(2) };
    let bytes = LayoutError::RowBytes { parts_bytes: 22, row_bytes: 24 };
    assert_eq!(keys.with_value_parts(&shape, &[short]), Err(bytes));
    assert_eq!(keys.with_value_parts(&shape, &[]), Err(LayoutError::Parts { parts: 0 }));
    let one = KvShapeOptions { layers: 3, kv_count: 1, row_bytes: 24, block_tokens: 4 };
    let one = KvShape::new(one).unwrap();
    let refused = LayoutError::Format { quantity: "kv_count", value: 1 };
    assert_eq!(keys.with_value_parts(&one, &[part(2)]), Err(refused));
}

#[test]
fn a_packed_layout_has_no_gaps() {
    let shape = shape();
    let dense = Strides { plane_bytes: 96, block_bytes: 576, token_bytes: 24 };
    let block_major = PagedLayout::block_major(&shape);
    for strides in [
        dense,
        Strides { block_bytes: 600, ..dense },
        Strides { plane_bytes: 960, block_bytes: 96, ..dense },
        Strides { plane_bytes: 128, block_bytes: 768, token_bytes: 32 },
        Strides { plane_bytes: 24, block_bytes: 576, token_bytes: 144 },
    ] {
        let layout = PagedLayout::custom(&shape, strides).unwrap();
        assert_eq!(layout.packed(&shape), block_major, "{strides:?}");
    }
    let heads = RowPart {
        segment_bytes: 8,
        segments: 3,
        segment_stride_bytes: 32,
        token_stride_bytes: 8,
        offset_bytes: 0,
    };
    let options = LayoutOptions {
        tensors: Tensors::PerPlaneKvFirst,
        layer_stride_bytes: 0,
        kv_stride_bytes: 0,
        block_stride_bytes: 112,
        parts: &[heads],
    };
    let packed = PagedLayout::new(&shape, options).unwrap().packed(&shape);
    assert_eq!((packed.tensors(), packed.parts_of(0)), (Tensors::One, &[heads][..]));
    assert_eq!((packed.kv_stride_bytes(), packed.block_stride_bytes()), (96, 576));
    assert_eq!(packed.packed(&shape), packed);
}

#[test]
fn parts_make_up_a_row_and_share_nothing() {
    let shape = shape();
    let head = RowPart {
        segment_bytes: 8,
        segments: 3,
        segment_stride_bytes: 32,
        token_stride_bytes: 8,
        offset_bytes: 0,
    };
    let options = LayoutOptions {
        tensors: Tensors::PerLayer,
        layer_stride_bytes: 7,
        kv_stride_bytes: 96,
        block_stride_bytes: 192,
        parts: &[head],
    };
    let layout = PagedLayout::new(&shape, options).unwrap();
    assert_eq!(layout.extent_bytes(&shape, 5), Ok(5 * 192));
    assert_eq!((layout.layer_stride_bytes(), layout.tensors().count(&shape)), (0, 3));
    assert!(!layout.has_whole_rows());
    let refused = |parts: &[RowPart]| {
        PagedLayout::new(&shape, LayoutOptions { parts, ..options }).unwrap_err()
    };
    assert_eq!(refused(&[]), LayoutError::Parts { parts: 0 });
    assert_eq!(refused(&[head; 3]), LayoutError::Parts { parts: 3 });
    assert_eq!(refused(&[head; 2]), LayoutError::RowBytes { parts_bytes: 48, row_bytes: 24 });
    let none = RowPart { segments: 0, ..head };
    assert_eq!(refused(&[none]), LayoutError::RowBytes { parts_bytes: 0, row_bytes: 24 });
    // Heads so near to each other that the fourth token of one lies on the first of the next.
    let near = RowPart { segment_stride_bytes: 24, ..head };
    let overlap = LayoutError::Overlap { axis: "segment", stride_bytes: 24, inner_bytes: 32 };
    assert_eq!(refused(&[near]), overlap);

    let values = RowPart {
        segment_bytes: 20,
        segments: 1,
        segment_stride_bytes: 0,
        token_stride_bytes: 20,
        offset_bytes: 0,
    };
    let scale = RowPart { segment_bytes: 4, token_stride_bytes: 4, offset_bytes: 80, ..values };
    let paged = LayoutOptions { parts: &[values, scale], ..options };
    assert_eq!(PagedLayout::new(&shape, paged).unwrap().extent_bytes(&shape, 2), Ok(384));
    let torn = RowPart { offset_bytes: 79, ..scale };
    assert_eq!(
        refused(&[values, torn]),
        LayoutError::PartsOverlap {
            first_offset: 0,
            first_bytes: 80,
            second_offset: 79,
            second_bytes: 16
        }
    );
}
