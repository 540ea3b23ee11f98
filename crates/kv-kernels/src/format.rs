//! The layouts of serving engines by name, each as axes and strides.

mod axes;

use crate::layout::{LayoutOptions, RowPart, Tensors};
use crate::{KvShape, KvShapeOptions, PagedLayout, layout::LayoutError};

pub(crate) use axes::FormatAxis;
pub use axes::TensorAxis;

/// How a serving engine lays out its paged KV.
///
/// The axes, outermost first, are those of a contiguous tensor: `NL` layers, `NB` blocks, `BS` tokens
/// of a block, `NH` heads, `HS` bytes of a head, `KV` keys and values, in that order. `list(..)` stands
/// for tensors of their own, in the order in which [`PagedKv::over`](crate::PagedKv::over) takes them.
/// Numbers below 100 are those by which cache servers know the formats.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
#[repr(u8)]
pub enum KvFormat {
    /// `[NB, NL, KV, BS, NH, HS]`: cross-layer blocks.
    CrossLayerNhd = 0,
    /// `list(NL)` of `[KV, NB, BS, NH, HS]`: flash-attention.
    FlashAttentionNhd = 1,
    /// `list(NL)` of `[NB, KV, BS, NH, HS]`: FlashInfer.
    FlashInferNhd = 2,
    /// `list(NL)` of `[NB, BS, HS]`: MLA, keys and values compressed into one.
    Mla = 3,
    /// `list(KV x NL)` of `[NB x BS, NH, HS]`: keys of all layers, then values.
    KvListsNhd = 4,
    /// `list(NL)` of `[NB x BS, 1, HS]`: MLA in slots.
    MlaSlots = 5,
    /// `list(NL)` of `[KV, NB, NH, BS, HS]`: flash-attention, heads first.
    FlashAttentionHnd = 6,
    /// `list(NL)` of `[NB, KV, NH, BS, HS]`: FlashInfer, heads first.
    FlashInferHnd = 7,
    /// `[NB, NL, KV, NH, BS, HS]`: cross-layer blocks, heads first; a pool of TensorRT-LLM.
    CrossLayerHnd = 8,
    /// `list(KV x NL)` of `[NB, BS, NH, HS]`: keys of all layers, then values, in blocks.
    KvListsPagedNhd = 9,
    /// `list(NL)` of `[NB, NH, BS, KV, HS]`: each head's key and value beside each other. In the chunk
    /// they stay so: one row of `NH x KV x HS`.
    FusedHnd = 10,
    /// `list(NL)` of `[NB, BS, NH, KV, HS]`, likewise.
    FusedNhd = 11,
    /// `list(NL)` of `[NB, NH, BS, CS]`: whatever a head keeps, heads first; `head_bytes` is `CS`.
    UnifiedHnd = 12,
    /// `list(NL)` of `[NB, BS, NH, CS]`.
    UnifiedNhd = 13,
    /// `list(NL)` of `[NB, BS x values + BS x scale]`: pages of an indexer, the values of all tokens
    /// and then a scale of 4 bytes for each. `head_bytes` counts the values; a row in the chunk is a
    /// token's values and its scale.
    IndexerPages = 14,
    /// `list(NL x KV)` of `[NB, BS, NH, HS]`: a pair of tensors for each layer.
    LayerPairsNhd = 16,
    /// `list(NL)` of `[NB, BS, NH, HS]`: one component of the KV, whose planes know nothing of others.
    ComponentPlanes = 18,
    /// `list(NL x KV)`, a pair of tensors for each layer: keys `[NB, NH, HS / x, BS, x]` with as many elements
    /// x as 16 bytes hold, values `[NB, NH, HS, BS]`. The paged attention of vLLM and mistral.rs.
    PagedAttention = 109,
    /// As [`FusedHnd`](KvFormat::FusedHnd), and in the chunk keys and values are planes of their own.
    FusedHndSplit = 110,
    /// As [`FusedNhd`](KvFormat::FusedNhd), and in the chunk keys and values are planes of their own.
    FusedNhdSplit = 111,
}

/// The numbers of a format.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FormatOptions {
    /// Layers, at least 1.
    pub layers: u32,
    /// Heads of a tensor, at least 1. Of MLA and of an indexer, 1.
    pub heads: u32,
    /// Bytes of one head of one token in one tensor (head size x bytes of an element), at least 1.
    pub head_bytes: u64,
    /// Bytes of an element, at least 1: `head_bytes` is whole elements. Of an indexer, 1.
    pub element_bytes: u64,
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
    /// Blocks, at least 1. In formats with `KV` before `NB` it spaces keys from values.
    pub blocks: u64,
    /// Bytes that follow each block and belong to nobody, for padded pools: a step of `NB` is that
    /// much longer than what it contains.
    pub block_padding_bytes: u64,
}

/// Bytes of the pieces that the keys of [`KvFormat::PagedAttention`] are in.
const SPLIT_BYTES: u64 = 16;
/// Bytes of an indexer's scale of one token.
const SCALE_BYTES: u64 = 4;

impl KvFormat {
    /// Every format.
    pub const ALL: [Self; 20] = [
        Self::CrossLayerNhd,
        Self::FlashAttentionNhd,
        Self::FlashInferNhd,
        Self::Mla,
        Self::KvListsNhd,
        Self::MlaSlots,
        Self::FlashAttentionHnd,
        Self::FlashInferHnd,
        Self::CrossLayerHnd,
        Self::KvListsPagedNhd,
        Self::FusedHnd,
        Self::FusedNhd,
        Self::UnifiedHnd,
        Self::UnifiedNhd,
        Self::IndexerPages,
        Self::LayerPairsNhd,
        Self::ComponentPlanes,
        Self::PagedAttention,
        Self::FusedHndSplit,
        Self::FusedNhdSplit,
    ];

    /// Tensors of a layer in a chunk: 2 where keys and values have planes of their own, else 1.
    pub(crate) fn kv_count(self) -> u32 {
        match self {
            Self::Mla
            | Self::MlaSlots
            | Self::FusedHnd
            | Self::FusedNhd
            | Self::UnifiedHnd
            | Self::UnifiedNhd
            | Self::IndexerPages
            | Self::ComponentPlanes => 1,
            _ => 2,
        }
    }

    /// The shape of the KV in this format.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn shape(self, options: &FormatOptions) -> Result<KvShape, LayoutError> {
        let FormatOptions { layers, heads, head_bytes, block_tokens, .. } = *options;
        if heads == 0 {
            return Err(LayoutError::Zero { quantity: "heads" });
        }
        let too_long = LayoutError::BlockBytes {
            layers,
            kv_count: self.kv_count(),
            row_bytes: head_bytes,
            block_tokens,
        };
        let row_bytes = match self {
            // A key and a value of each head.
            Self::FusedHnd | Self::FusedNhd => head_bytes.checked_mul(2),
            Self::IndexerPages if head_bytes > 0 => head_bytes.checked_add(SCALE_BYTES),
            _ => Some(head_bytes),
        };
        let row_bytes = row_bytes.and_then(|bytes| bytes.checked_mul(u64::from(heads)));
        let row_bytes = row_bytes.ok_or(too_long)?;
        KvShape::new(KvShapeOptions { layers, kv_count: self.kv_count(), row_bytes, block_tokens })
    }

    /// The layout of this format.
    ///
    /// # Errors
    /// [`LayoutError::Format`] for numbers that make no shape, for several heads where there can be
    /// one, and for heads that are not whole elements; [`LayoutError::Size`].
    pub fn layout(self, options: &FormatOptions) -> Result<PagedLayout, LayoutError> {
        let FormatOptions { layers, heads, block_tokens, blocks, .. } = *options;
        let shape = self.shape(options).map_err(|error| match error {
            LayoutError::Zero { quantity } => LayoutError::Format { quantity, value: 0 },
            _ => LayoutError::Size { block_bytes: u64::MAX, blocks },
        })?;
        let one_head = matches!(self, Self::Mla | Self::MlaSlots | Self::IndexerPages);
        if one_head && heads != 1 {
            return Err(LayoutError::Format { quantity: "heads", value: heads.into() });
        }
        self.check_elements(options)?;
        let size = LayoutError::Size { block_bytes: shape.block_bytes(), blocks };
        // Bytes of one block of one plane: no overflow, they are part of a block's.
        let plane_bytes = shape.row_bytes() * u64::from(block_tokens);
        let padded = |bytes: u64| bytes.checked_add(options.block_padding_bytes).ok_or(size);
        let (tensors, layer_stride_bytes, kv_stride_bytes, block_stride_bytes) = match self {
            Self::CrossLayerNhd | Self::CrossLayerHnd => {
                let block = padded(plane_bytes * 2 * u64::from(layers))?;
                (Tensors::One, plane_bytes * 2, plane_bytes, block)
            }
            Self::FlashAttentionNhd | Self::FlashAttentionHnd => {
                let block = padded(plane_bytes)?;
                (Tensors::PerLayer, 0, block.checked_mul(blocks).ok_or(size)?, block)
            }
            Self::FlashInferNhd | Self::FlashInferHnd => {
                (Tensors::PerLayer, 0, plane_bytes, padded(plane_bytes * 2)?)
            }
            Self::FusedHndSplit | Self::FusedNhdSplit => {
                (Tensors::PerLayer, 0, options.head_bytes, padded(plane_bytes * 2)?)
            }
            Self::KvListsNhd | Self::KvListsPagedNhd => {
                (Tensors::PerPlaneKvFirst, 0, 0, padded(plane_bytes)?)
            }
            Self::LayerPairsNhd | Self::PagedAttention => {
                (Tensors::PerPlane, 0, 0, padded(plane_bytes)?)
            }
            _ => (Tensors::PerLayer, 0, 0, padded(plane_bytes)?),
        };
        let (parts, count) = self.parts(options, &shape);
        let layout = PagedLayout::new(
            &shape,
            LayoutOptions {
                tensors,
                layer_stride_bytes,
                kv_stride_bytes,
                block_stride_bytes,
                parts: &parts[..count],
            },
        )?;
        let layout = match self {
            Self::PagedAttention => {
                layout.with_value_parts(&shape, &[spread(options, options.element_bytes)])?
            }
            _ => layout,
        };
        layout.extent_bytes(&shape, blocks)?;
        Ok(layout)
    }

    /// Checks that a head is whole elements.
    fn check_elements(self, options: &FormatOptions) -> Result<(), LayoutError> {
        let FormatOptions { element_bytes, head_bytes, .. } = *options;
        if element_bytes == 0 || (self == Self::IndexerPages && element_bytes != 1) {
            return Err(LayoutError::Format { quantity: "element_bytes", value: element_bytes });
        }
        let is_split = self == Self::PagedAttention;
        if is_split && !SPLIT_BYTES.is_multiple_of(element_bytes) {
            return Err(LayoutError::Format { quantity: "element_bytes", value: element_bytes });
        }
        if is_split && u64::from(options.heads).saturating_mul(head_bytes) > u32::MAX.into() {
            // As many segments as elements, which a part counts in 32 bits.
            return Err(LayoutError::Format { quantity: "head_bytes", value: head_bytes });
        }
        let whole = if is_split { SPLIT_BYTES } else { element_bytes };
        if !head_bytes.is_multiple_of(whole) {
            return Err(LayoutError::Format { quantity: "head_bytes", value: head_bytes });
        }
        Ok(())
    }

    /// What rows are made of: of two parts the first, or both.
    fn parts(self, options: &FormatOptions, shape: &KvShape) -> ([RowPart; 2], usize) {
        let (heads, tokens) = (options.heads, u64::from(options.block_tokens));
        let (head, row) = (options.head_bytes, shape.row_bytes());
        let part = |segment_bytes, segments, segment_stride_bytes, token_stride_bytes| RowPart {
            segment_bytes,
            segments,
            segment_stride_bytes,
            token_stride_bytes,
            offset_bytes: 0,
        };
        // No product overflows: each is at most the bytes of a block.
        let first = match self {
            Self::FlashAttentionHnd
            | Self::FlashInferHnd
            | Self::CrossLayerHnd
            | Self::UnifiedHnd => part(head, heads, tokens * head, head),
            Self::FusedHnd => part(2 * head, heads, tokens * 2 * head, 2 * head),
            Self::FusedHndSplit => part(head, heads, tokens * 2 * head, 2 * head),
            Self::FusedNhdSplit => part(head, heads, 2 * head, 2 * row),
            Self::IndexerPages => part(head, 1, head, head),
            Self::PagedAttention => spread(options, SPLIT_BYTES),
            _ => part(row, 1, row, row),
        };
        let scale = RowPart {
            offset_bytes: tokens * head,
            ..part(SCALE_BYTES, 1, SCALE_BYTES, SCALE_BYTES)
        };
        ([first, scale], if self == Self::IndexerPages { 2 } else { 1 })
    }
}

/// Rows in pieces of `bytes` bytes, each beside the same piece of the block's other tokens.
fn spread(options: &FormatOptions, bytes: u64) -> RowPart {
    RowPart {
        segment_bytes: bytes,
        // No overflow: `check_elements` has counted the bytes of a row.
        segments: (u64::from(options.heads) * options.head_bytes / bytes) as u32,
        segment_stride_bytes: u64::from(options.block_tokens) * bytes,
        token_stride_bytes: bytes,
        offset_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: FormatOptions = FormatOptions {
        layers: 3,
        heads: 2,
        head_bytes: 10,
        element_bytes: 1,
        block_tokens: 4,
        blocks: 5,
        block_padding_bytes: 0,
    };

    fn options_of(format: KvFormat) -> FormatOptions {
        let one = matches!(format, KvFormat::Mla | KvFormat::MlaSlots | KvFormat::IndexerPages);
        let head_bytes = if format == KvFormat::PagedAttention { 16 } else { SMALL.head_bytes };
        FormatOptions { heads: if one { 1 } else { 2 }, head_bytes, ..SMALL }
    }

    /// The axes of a format as its tensors have them, by the letters of its documentation:
    /// `l`ayer, `k`v, `b`lock, `t`oken, `h`ead; and those that choose the tensor.
    fn axes(format: KvFormat) -> (&'static str, &'static str) {
        match format {
            KvFormat::CrossLayerNhd => ("", "blkth"),
            KvFormat::FlashAttentionNhd => ("l", "kbth"),
            KvFormat::FlashInferNhd => ("l", "bkth"),
            KvFormat::Mla | KvFormat::MlaSlots => ("l", "bth"),
            KvFormat::KvListsNhd | KvFormat::KvListsPagedNhd => ("kl", "bth"),
            KvFormat::FlashAttentionHnd => ("l", "kbht"),
            KvFormat::FlashInferHnd => ("l", "bkht"),
            KvFormat::CrossLayerHnd => ("", "blkht"),
            KvFormat::FusedHnd | KvFormat::FusedHndSplit => ("l", "bhtk"),
            KvFormat::FusedNhd | KvFormat::FusedNhdSplit => ("l", "bthk"),
            KvFormat::UnifiedHnd => ("l", "bht"),
            KvFormat::UnifiedNhd | KvFormat::ComponentPlanes => ("l", "bth"),
            KvFormat::LayerPairsNhd => ("lk", "bth"),
            KvFormat::IndexerPages | KvFormat::PagedAttention => {
                unreachable!("no rows in one piece")
            }
        }
    }

    /// The index of an element of a contiguous tensor with these axes, and how many there are.
    fn flat(axes: &str, at: &dyn Fn(char) -> (u64, u64)) -> (u64, u64) {
        axes.chars().fold((0, 1), |(index, count), axis| {
            let (coordinate, length) = at(axis);
            (index * length + coordinate, count * length)
        })
    }

    #[test]
    fn every_byte_lies_where_the_axes_of_the_format_say() {
        let in_pieces = [KvFormat::IndexerPages, KvFormat::PagedAttention];
        for format in KvFormat::ALL.into_iter().filter(|format| !in_pieces.contains(format)) {
            let options = options_of(format);
            let (shape, layout) =
                (format.shape(&options).unwrap(), format.layout(&options).unwrap());
            let (chosen, inner) = axes(format);
            // A fused row keeps its keys and values: they are one axis more of the row.
            let fused = inner.ends_with('k') && shape.kv_count() == 1;
            for layer in 0..3 {
                for kv in 0..u64::from(shape.kv_count()) {
                    for (block, token) in (0..5).flat_map(|b| (0..4).map(move |t| (b, t))) {
                        for byte in 0..shape.row_bytes() {
                            let head_row = if fused { 20 } else { 10 };
                            let (head, rest) = (byte / head_row, byte % head_row);
                            let kv = if fused { rest / 10 } else { kv };
                            let at = |axis| match axis {
                                'l' => (layer, 3),
                                'k' => (kv, 2),
                                'b' => (block, 5),
                                't' => (token, 4),
                                _ => (head, u64::from(options.heads)),
                            };
                            let expected =
                                (flat(chosen, &at).0, flat(inner, &at).0 * 10 + rest % 10);
                            let plane_kv = if fused { 0 } else { kv };
                            let tensor = layout.tensors().index(&shape, layer, plane_kv);
                            let part = layout.parts_of(plane_kv)[0];
                            let offset = layout.plane_offset(layer, plane_kv)
                                + block * layout.block_stride_bytes()
                                + token * part.token_stride_bytes
                                + byte / part.segment_bytes * part.segment_stride_bytes
                                + byte % part.segment_bytes;
                            assert_eq!((tensor, offset), expected, "{format:?} byte {byte}");
                        }
                    }
                }
            }
            let inner_bytes = flat(inner, &|axis| match axis {
                'l' => (0, 3),
                'k' => (0, 2),
                'b' => (0, 5),
                't' => (0, 4),
                _ => (0, u64::from(options.heads)),
            });
            assert_eq!(layout.extent_bytes(&shape, 5), Ok(inner_bytes.1 * 10), "{format:?}");
        }
    }

    #[test]
    fn an_indexer_has_all_values_of_a_block_before_its_scales() {
        let options = FormatOptions { heads: 1, head_bytes: 128, block_tokens: 64, ..SMALL };
        let format = KvFormat::IndexerPages;
        let (shape, layout) = (format.shape(&options).unwrap(), format.layout(&options).unwrap());
        assert_eq!((shape.row_bytes(), shape.kv_count()), (132, 1));
        let [values, scale] = layout.parts_of(0) else { panic!("{layout:?}") };
        assert_eq!(
            (values.segment_bytes, values.token_stride_bytes, values.offset_bytes),
            (128, 128, 0)
        );
        assert_eq!(
            (scale.segment_bytes, scale.token_stride_bytes, scale.offset_bytes),
            (4, 4, 64 * 128)
        );
        assert_eq!(layout.extent_bytes(&shape, 5), Ok(5 * 64 * 132));
        assert_eq!(layout.alignment(), 4);
    }

    #[test]
    fn padding_follows_every_block() {
        for format in KvFormat::ALL {
            let tight = options_of(format);
            let padded = FormatOptions { block_padding_bytes: 6, ..tight };
            let shape = format.shape(&tight).unwrap();
            let (a, b) = (format.layout(&tight).unwrap(), format.layout(&padded).unwrap());
            assert_eq!(b.block_stride_bytes(), a.block_stride_bytes() + 6, "{format:?}");
            // The last block's padding is nobody's.
            let kv = if b.kv_stride_bytes() > b.block_stride_bytes() { 2 } else { 1 };
            let more = 6 * (5 * kv - 1);
            let extent = a.extent_bytes(&shape, 5).unwrap();
            assert_eq!(b.extent_bytes(&shape, 5), Ok(extent + more), "{format:?}");
        }
    }

    #[test]
    fn numbers_that_make_no_format_are_refused() {
        for format in KvFormat::ALL {
            let good = options_of(format);
            for (quantity, options) in [
                ("layers", FormatOptions { layers: 0, ..good }),
                ("heads", FormatOptions { heads: 0, ..good }),
                ("row_bytes", FormatOptions { head_bytes: 0, ..good }),
                ("block_tokens", FormatOptions { block_tokens: 0, ..good }),
            ] {
                let refused = LayoutError::Format { quantity, value: 0 };
                assert_eq!(format.layout(&options), Err(refused), "{format:?}");
            }
            let huge = FormatOptions { head_bytes: u64::MAX / 2, ..good };
            assert!(matches!(format.layout(&huge), Err(LayoutError::Size { .. })), "{format:?}");
            let many = FormatOptions { blocks: u64::MAX / 16, ..good };
            assert!(matches!(format.layout(&many), Err(LayoutError::Size { .. })), "{format:?}");
            let padded = FormatOptions { block_padding_bytes: u64::MAX, ..good };
            assert!(matches!(format.layout(&padded), Err(LayoutError::Size { .. })), "{format:?}");
        }
        let two = LayoutError::Format { quantity: "heads", value: 2 };
        assert_eq!(KvFormat::Mla.layout(&SMALL), Err(two));
    }
}
