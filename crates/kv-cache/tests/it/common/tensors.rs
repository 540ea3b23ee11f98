//! The tensors of a serving engine, each format written out as axes: which tensor there is for which layers
//! and planes, how long its axes are, and where a byte of a token lies. Nothing here asks the layouts of
//! `kv-kernels`, so that a layout with a wrong stride is seen.

use cuda_driver::{DeviceBuffer, DeviceSpan, Stream};
use kv_kernels::{
    KvFormat, KvShape, PagedKv, PagedLayout,
    error::AdoptError,
    layout::{FormatOptions, TensorView},
    verify::token_word,
};

/// Bytes of the pieces that the keys of paged attention are in.
const PIECE_BYTES: u64 = 16;
/// Bytes of an indexer's scale of a token.
const SCALE_BYTES: u64 = 4;

/// Tensors of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors {
    pub(crate) format: KvFormat,
    pub(crate) numbers: FormatOptions,
}

/// A byte of a row of the cache.
#[derive(Clone, Copy, Debug)]
struct Byte {
    layer: u64,
    kv: u64,
    block: u64,
    token: u64,
    byte: u64,
}

/// Where all bytes of blocks lie, in all tensors one after another.
#[derive(Debug)]
pub(crate) struct Places {
    /// Those of block 0, in the order `[token][plane][byte]`.
    offsets: Vec<u64>,
    /// From a block to the next, for every byte.
    step: u64,
    token_bytes: usize,
    /// Pieces of memory of block 0, as starts and lengths.
    pieces: Vec<(u64, u64)>,
    /// The start of each tensor.
    starts: Vec<u64>,
    pub(crate) bytes: u64,
}

impl Places {
    /// Whether all bytes of a token of a block are those of its key.
    pub(crate) fn hold(&self, memory: &[u8], (block, token): (u64, usize), key: u64) -> bool {
        let first = token * self.token_bytes;
        let offsets = &self.offsets[first..first + self.token_bytes];
        (0..).zip(offsets.chunks_exact(8)).all(|(index, offsets)| {
            let word = token_word(key, index).to_le_bytes();
            let byte = |offset: &u64| memory[(offset + block * self.step) as usize];
            offsets.iter().map(byte).eq(word)
        })
    }

    /// The pieces of memory of a block: where they begin in all tensors, and where they are.
    pub(crate) fn pieces(
        &self,
        tensors: &[DeviceBuffer],
        block: u64,
    ) -> impl Iterator<Item = (u64, DeviceSpan)> {
        self.pieces.iter().map(move |&(start, length)| {
            let start = start + block * self.step;
            let tensor = self.starts.partition_point(|&first| first <= start) - 1;
            let span = tensors[tensor].span().slice(start - self.starts[tensor], length);
            (start, span.unwrap())
        })
    }
}

impl Tensors {
    /// 3 layers, and 2 heads of 16 elements of 2 bytes or what the format has instead; 8 tokens a block.
    pub(crate) fn new(format: KvFormat, blocks: u64) -> Self {
        let heads = match format {
            KvFormat::Mla | KvFormat::MlaSlots | KvFormat::IndexerPages => 1,
            _ => 2,
        };
        // A row of an indexer has its scale too.
        let (head_bytes, element_bytes) = match format {
            KvFormat::IndexerPages => (28, 1),
            _ => (32, 2),
        };
        let numbers = FormatOptions {
            layers: 3,
            heads,
            head_bytes,
            element_bytes,
            block_tokens: 8,
            blocks,
            block_padding_bytes: 0,
        };
        Self { format, numbers }
    }

    /// The same with gaps behind blocks; `None` for tensors of slots, which have none.
    pub(crate) fn padded(self) -> Option<Self> {
        let slots = matches!(self.format, KvFormat::KvListsNhd | KvFormat::MlaSlots);
        let numbers = FormatOptions { block_padding_bytes: 48, ..self.numbers };
        (!slots).then_some(Self { numbers, ..self })
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.format.shape(&self.numbers).unwrap()
    }

    /// The axes that choose a tensor, and those of the tensor, outermost first: layers `l`, keys and values `k`,
    /// blocks `b`, tokens of a block `t`, slots `s`, heads `h`, elements `e` of a head, pieces `p` of a head and elements
    /// `x` of a piece, and bytes `g` of a page.
    fn axes(&self, kv: u64) -> (&'static str, &'static str) {
        match self.format {
            KvFormat::CrossLayerNhd => ("", "blkthe"),
            KvFormat::FlashAttentionNhd => ("l", "kbthe"),
            KvFormat::FlashInferNhd => ("l", "bkthe"),
            KvFormat::Mla => ("l", "bte"),
            KvFormat::KvListsNhd => ("kl", "she"),
            KvFormat::MlaSlots => ("l", "she"),
            KvFormat::FlashAttentionHnd => ("l", "kbhte"),
            KvFormat::FlashInferHnd => ("l", "bkhte"),
            KvFormat::CrossLayerHnd => ("", "blkhte"),
            KvFormat::KvListsPagedNhd => ("kl", "bthe"),
            KvFormat::FusedHnd | KvFormat::FusedHndSplit => ("l", "bhtke"),
            KvFormat::FusedNhd | KvFormat::FusedNhdSplit => ("l", "bthke"),
            KvFormat::UnifiedHnd => ("l", "bhte"),
            KvFormat::UnifiedNhd | KvFormat::ComponentPlanes => ("l", "bthe"),
            KvFormat::IndexerPages => ("l", "bg"),
            KvFormat::LayerPairsNhd => ("lk", "bthe"),
            KvFormat::PagedAttention if kv == 0 => ("lk", "bhptx"),
            KvFormat::PagedAttention => ("lk", "bhet"),
            other => panic!("{other:?} is not written out"),
        }
    }

    fn length(&self, axis: char) -> u64 {
        let FormatOptions { head_bytes, element_bytes, blocks, .. } = self.numbers;
        let tokens = u64::from(self.numbers.block_tokens);
        match axis {
            'l' => self.numbers.layers.into(),
            'k' => 2,
            'b' => blocks,
            't' => tokens,
            's' => blocks * tokens,
            'h' => self.numbers.heads.into(),
            'e' => head_bytes / element_bytes,
            'p' => head_bytes / PIECE_BYTES,
            'x' => PIECE_BYTES / element_bytes,
            'g' => tokens * (head_bytes + SCALE_BYTES),
            other => panic!("no axis {other}"),
        }
    }

    /// The axes of a tensor of keys (0) or values (1), each with its length and its stride in elements; and
    /// the elements of all.
    fn strides(&self, kv: u64) -> (Vec<(char, u64, u64)>, u64) {
        let padding = self.numbers.block_padding_bytes / self.numbers.element_bytes;
        let mut inner = 1;
        let stride = |axis| {
            let (length, stride) =
                (self.length(axis), inner + if axis == 'b' { padding } else { 0 });
            inner = length * stride;
            (axis, length, stride)
        };
        let mut axes: Vec<_> = self.axes(kv).1.chars().rev().map(stride).collect();
        axes.reverse();
        (axes, inner)
    }

    /// The kinds of all tensors, keys (0) or values (1), in their order.
    fn kinds(&self) -> Vec<u64> {
        let layers = u64::from(self.numbers.layers);
        match self.axes(0).0 {
            "" => vec![0],
            "l" => vec![0; layers as usize],
            "kl" => (0..2 * layers).map(|tensor| tensor / layers).collect(),
            "lk" => (0..2 * layers).map(|tensor| tensor % 2).collect(),
            other => panic!("no tensors by {other}"),
        }
    }

    /// Where all bytes lie.
    pub(crate) fn places(&self) -> Places {
        let shape = self.shape();
        let (kv_count, row_bytes) = (u64::from(shape.kv_count()), shape.row_bytes());
        let of_block = |block| -> Vec<u64> {
            let tokens = 0..u64::from(shape.block_tokens());
            let rows =
                tokens.flat_map(|token| (0..shape.planes()).map(move |plane| (token, plane)));
            rows.flat_map(|(token, plane)| {
                let (layer, kv) = (plane / kv_count, plane % kv_count);
                (0..row_bytes).map(move |byte| Byte { layer, kv, block, token, byte })
            })
            .map(|byte| self.place(byte))
            .collect()
        };
        let (offsets, next) = (of_block(0), of_block(1));
        let step = next[0] - offsets[0];
        assert!(offsets.iter().zip(&next).all(|(first, second)| second - first == step));
        let mut sorted = offsets.clone();
        sorted.sort_unstable();
        let pieces = sorted.chunk_by(|a, b| a + 1 == *b);
        let pieces = pieces.map(|piece| (piece[0], piece.len() as u64)).collect();
        let mut bytes = 0;
        let start = |kv| {
            bytes += self.tensor_bytes(kv);
            bytes - self.tensor_bytes(kv)
        };
        let starts = self.kinds().into_iter().map(start).collect();
        let token_bytes = shape.token_bytes() as usize;
        Places { offsets, step, token_bytes, pieces, starts, bytes }
    }

    fn tensor_bytes(&self, kv: u64) -> u64 {
        self.strides(kv).1 * self.numbers.element_bytes
    }

    /// Where a byte lies, in all tensors one after another.
    fn place(&self, at: Byte) -> u64 {
        let FormatOptions { head_bytes, element_bytes, .. } = self.numbers;
        let tokens = u64::from(self.numbers.block_tokens);
        let fused = matches!(self.format, KvFormat::FusedHnd | KvFormat::FusedNhd);
        // A fused row has the key and the value of each head.
        let (head, kv, byte) = match fused {
            true => (at.byte / (2 * head_bytes), at.byte / head_bytes % 2, at.byte % head_bytes),
            false => (at.byte / head_bytes, at.kv, at.byte % head_bytes),
        };
        let page_byte = match at.byte.checked_sub(head_bytes) {
            // Scales follow the values of all tokens.
            Some(scale) => tokens * head_bytes + at.token * SCALE_BYTES + scale,
            None => at.token * head_bytes + at.byte,
        };
        let index = |axis| match axis {
            'l' => at.layer,
            'k' => kv,
            'b' => at.block,
            't' => at.token,
            's' => at.block * tokens + at.token,
            'h' => head,
            'e' => byte / element_bytes,
            'p' => byte / PIECE_BYTES,
            'x' => byte % PIECE_BYTES / element_bytes,
            'g' => page_byte,
            other => panic!("no axis {other}"),
        };
        let chosen = self.axes(kv).0.chars();
        let tensor = chosen.fold(0, |tensor, axis| tensor * self.length(axis) + index(axis));
        let kinds = self.kinds();
        let before: u64 =
            kinds[..tensor as usize].iter().map(|&kind| self.tensor_bytes(kind)).sum();
        let (axes, _) = self.strides(kinds[tensor as usize]);
        let element: u64 = axes.iter().map(|&(axis, _, stride)| index(axis) * stride).sum();
        before + element * element_bytes + byte % element_bytes
    }

    /// Allocates the tensors, with bytes that no block may hold.
    pub(crate) fn allocate(&self, stream: &Stream) -> Vec<DeviceBuffer> {
        let tensor = |kv| {
            let tensor = DeviceBuffer::alloc(stream.device(), self.tensor_bytes(kv)).unwrap();
            stream.fill(tensor.span(), 0xA5).unwrap();
            tensor
        };
        let tensors = self.kinds().into_iter().map(tensor).collect();
        stream.synchronize().unwrap();
        tensors
    }

    /// Adopts tensors of this format as those of `format`, by their real lengths and strides.
    pub(crate) fn adopt_as(
        &self,
        stream: &Stream,
        tensors: &[DeviceBuffer],
        (format, numbers): (KvFormat, &FormatOptions),
    ) -> Result<PagedKv, AdoptError> {
        let axes: Vec<(Vec<u64>, Vec<i64>)> = (0..2)
            .map(|kv| {
                let axes = self.strides(kv).0.into_iter();
                axes.map(|(_, length, stride)| (length, stride as i64)).unzip()
            })
            .collect();
        let view = |(tensor, kv): (&DeviceBuffer, u64)| TensorView {
            span: tensor.span(),
            element_bytes: self.numbers.element_bytes,
            shape: &axes[kv as usize].0,
            strides: &axes[kv as usize].1,
        };
        let views: Vec<_> = tensors.iter().zip(self.kinds()).map(view).collect();
        PagedKv::adopt(stream, format, numbers, &views)
    }

    /// Adopts tensors of this format.
    pub(crate) fn adopt(&self, stream: &Stream, tensors: &[DeviceBuffer]) -> PagedKv {
        self.adopt_as(stream, tensors, (self.format, &self.numbers)).unwrap()
    }

    /// Describes tensors of this format by another layout, without a check of their strides.
    pub(crate) fn misread(
        &self,
        stream: &Stream,
        tensors: &[DeviceBuffer],
        layout: PagedLayout,
    ) -> PagedKv {
        let spans: Vec<_> = tensors.iter().map(DeviceBuffer::span).collect();
        PagedKv::over(stream, self.shape(), layout, &spans, self.numbers.blocks).unwrap()
    }
}
