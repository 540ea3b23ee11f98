//! The axes of a format's tensors, with their lengths and strides.

use std::fmt;

use super::{FormatOptions, KvFormat, SCALE_BYTES, SPLIT_BYTES};
use crate::layout::LayoutError;

/// An axis of a tensor, by what it counts.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum TensorAxis {
    /// `NL`: layers.
    Layers,
    /// `KV`: keys and values.
    Kv,
    /// `NB`: blocks.
    Blocks,
    /// `NB x BS`: token slots.
    Slots,
    /// `BS`: tokens of a block.
    Tokens,
    /// `NH`: heads.
    Heads,
    /// `HS`: elements of a head.
    Elements,
    /// `HS / x`: pieces of a head.
    Pieces,
    /// `x`: elements of a piece.
    PieceElements,
    /// All bytes of a block of an indexer: values and then scales.
    PageBytes,
}

impl fmt::Display for TensorAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Layers => "layers",
            Self::Kv => "keys and values",
            Self::Blocks => "blocks",
            Self::Slots => "slots",
            Self::Tokens => "tokens of a block",
            Self::Heads => "heads",
            Self::Elements => "elements of a head",
            Self::Pieces => "pieces of a head",
            Self::PieceElements => "elements of a piece",
            Self::PageBytes => "bytes of a page",
        })
    }
}

/// An axis as a format has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct FormatAxis {
    pub(crate) axis: TensorAxis,
    /// Places.
    pub(crate) count: u64,
    /// Elements from a place to the next.
    pub(crate) stride: u64,
}

impl KvFormat {
    /// The axes of each tensor of keys (0) or values (1), outermost first, for numbers of which [`layout`](KvFormat::layout) has made
    /// a layout.
    ///
    /// # Errors
    /// [`LayoutError::Format`] for padding that is not whole elements, or that a tensor of slots would have;
    /// [`LayoutError::Size`].
    pub(crate) fn axes(
        self,
        options: &FormatOptions,
        kv: u64,
    ) -> Result<Vec<FormatAxis>, LayoutError> {
        use TensorAxis::{
            Blocks, Elements, Heads, Kv, Layers, PageBytes, PieceElements, Pieces, Slots, Tokens,
        };
        let axes: &[TensorAxis] = match self {
            Self::CrossLayerNhd => &[Blocks, Layers, Kv, Tokens, Heads, Elements],
            Self::FlashAttentionNhd => &[Kv, Blocks, Tokens, Heads, Elements],
            Self::FlashInferNhd => &[Blocks, Kv, Tokens, Heads, Elements],
            Self::Mla => &[Blocks, Tokens, Elements],
            Self::KvListsNhd | Self::MlaSlots => &[Slots, Heads, Elements],
            Self::FlashAttentionHnd => &[Kv, Blocks, Heads, Tokens, Elements],
            Self::FlashInferHnd => &[Blocks, Kv, Heads, Tokens, Elements],
            Self::CrossLayerHnd => &[Blocks, Layers, Kv, Heads, Tokens, Elements],
            Self::KvListsPagedNhd
            | Self::UnifiedNhd
            | Self::LayerPairsNhd
            | Self::ComponentPlanes => &[Blocks, Tokens, Heads, Elements],
            Self::FusedHnd | Self::FusedHndSplit => &[Blocks, Heads, Tokens, Kv, Elements],
            Self::FusedNhd | Self::FusedNhdSplit => &[Blocks, Tokens, Heads, Kv, Elements],
            Self::UnifiedHnd => &[Blocks, Heads, Tokens, Elements],
            Self::IndexerPages => &[Blocks, PageBytes],
            Self::PagedAttention if kv == 0 => &[Blocks, Heads, Pieces, Tokens, PieceElements],
            Self::PagedAttention => &[Blocks, Heads, Elements, Tokens],
        };
        strided(axes, options)
    }
}

/// The lengths and strides of axes that follow each other without gaps but those behind blocks.
fn strided(axes: &[TensorAxis], options: &FormatOptions) -> Result<Vec<FormatAxis>, LayoutError> {
    let FormatOptions { element_bytes, block_padding_bytes, blocks, .. } = *options;
    let tokens = u64::from(options.block_tokens);
    let size = LayoutError::Size { block_bytes: u64::MAX, blocks };
    // Slots follow each other as one axis only where blocks do.
    let has_blocks = axes.contains(&TensorAxis::Blocks);
    if !block_padding_bytes.is_multiple_of(element_bytes)
        || (!has_blocks && block_padding_bytes > 0)
    {
        let (quantity, value) = ("block_padding_bytes", block_padding_bytes);
        return Err(LayoutError::Format { quantity, value });
    }
    let mut strided = Vec::with_capacity(axes.len());
    let mut inner = Some(1u64);
    for &axis in axes.iter().rev() {
        let count = match axis {
            TensorAxis::Layers => options.layers.into(),
            TensorAxis::Kv => 2,
            TensorAxis::Blocks => blocks,
            TensorAxis::Slots => blocks.checked_mul(tokens).ok_or(size)?,
            TensorAxis::Tokens => tokens,
            TensorAxis::Heads => options.heads.into(),
            TensorAxis::Elements => options.head_bytes / element_bytes,
            TensorAxis::Pieces => options.head_bytes / SPLIT_BYTES,
            TensorAxis::PieceElements => SPLIT_BYTES / element_bytes,
            // Elements of one byte: `layout` has refused others.
            TensorAxis::PageBytes => {
                let token_bytes = options.head_bytes.checked_add(SCALE_BYTES).ok_or(size)?;
                token_bytes.checked_mul(tokens).ok_or(size)?
            }
        };
        let padding =
            if axis == TensorAxis::Blocks { block_padding_bytes / element_bytes } else { 0 };
        let stride = inner.and_then(|inner| inner.checked_add(padding)).ok_or(size)?;
        // Nothing steps over the outermost axis: its end may be beyond what is counted.
        inner = stride.checked_mul(count);
        strided.push(FormatAxis { axis, count, stride });
    }
    strided.reverse();
    Ok(strided)
}
