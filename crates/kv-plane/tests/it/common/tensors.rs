//! Tensors of a serving engine, which a cache lies in. Where each format has its bytes is proven in
//! `kv-kernels`.

use cuda_driver::{DeviceBuffer, Stream};
use kv_kernels::{KvFormat, KvShape, PagedKv, layout::FormatOptions};

/// Tensors of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors {
    format: KvFormat,
    numbers: FormatOptions,
}

impl Tensors {
    /// 3 layers, and 2 heads of 16 elements of 2 bytes or what the format has instead; 8 tokens a block.
    pub(crate) fn new(format: KvFormat) -> Self {
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
            blocks: 1,
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

    /// Allocates tensors for so many blocks, with bytes that no block may hold, and describes them.
    pub(crate) fn make(&self, stream: &Stream, blocks: u64) -> (Vec<DeviceBuffer>, PagedKv) {
        let numbers = FormatOptions { blocks, ..self.numbers };
        let (shape, layout) = (self.shape(), self.format.layout(&numbers).unwrap());
        let bytes = layout.extent_bytes(&shape, blocks).unwrap();
        let tensor = |_| {
            let tensor = DeviceBuffer::alloc(stream.device(), bytes).unwrap();
            stream.fill(tensor.span(), 0xA5).unwrap();
            tensor
        };
        let tensors: Vec<_> = (0..layout.tensors().count(&shape)).map(tensor).collect();
        let spans: Vec<_> = tensors.iter().map(DeviceBuffer::span).collect();
        let paged = PagedKv::over(stream, shape, layout, &spans, blocks).unwrap();
        (tensors, paged)
    }
}
