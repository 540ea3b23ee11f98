//! Chunks of every format, and windows of chunks.

use cuda_driver::{DeviceBuffer, DeviceSpan, PinnedBuffer};
use kv_kernels::{
    Direction, PagedKv, Slot, TableEntry,
    chunks::{Chunk, ChunkMapping, ChunkMemory, ChunkTransfer, LaunchLimits},
};

use super::chunk_cases::{BLOCKS, Case, ChunkCase, Mapping, cases};
use super::on::{On, Outputs, noise};

/// Bytes on either side of what a call may touch.
const MARGIN: u64 = 16;

/// Memory of a chunk.
enum Memory {
    Device(DeviceBuffer),
    Pinned(PinnedBuffer),
}

impl Case {
    pub(crate) fn chunk_bytes(&self, chunk: &ChunkCase) -> u64 {
        let planes = self.layers.len() as u64 * u64::from(self.shape.kv_count());
        chunk.tokens * planes * self.shape.row_bytes()
    }

    pub(crate) fn margin(&self) -> u64 {
        MARGIN + self.shift
    }

    /// Each tensor with a margin on both sides.
    pub(crate) fn tensors(&self, on: &On) -> Vec<DeviceBuffer> {
        let count = self.layout.tensors().count(&self.shape);
        (0..count).map(|tensor| on.upload(&self.tensor_before(tensor))).collect()
    }

    fn tensor_before(&self, tensor: u64) -> Vec<u8> {
        let bytes = self.layout.extent_bytes(&self.shape, BLOCKS).unwrap() + 2 * self.margin();
        noise(bytes).iter().map(|byte| byte ^ tensor as u8).collect()
    }

    pub(crate) fn chunk_before(&self, chunk: &ChunkCase) -> Vec<u8> {
        noise(self.chunk_bytes(chunk) + 2 * self.margin() + 1)
    }

    pub(crate) fn paged(&self, on: &On, tensors: &[DeviceBuffer]) -> PagedKv {
        let spans: Vec<DeviceSpan> = tensors.iter().map(|tensor| self.inner(tensor)).collect();
        PagedKv::over(&on.stream, self.shape, self.layout, &spans, BLOCKS).unwrap()
    }

    /// A buffer without its margins.
    fn inner(&self, buffer: &DeviceBuffer) -> DeviceSpan {
        let extent = self.layout.extent_bytes(&self.shape, BLOCKS).unwrap();
        buffer.span().slice(self.margin(), extent).unwrap()
    }

    /// All that the call may have written, and what lies around it.
    pub(crate) fn run(&self, on: &On) -> Outputs {
        let tensors = self.tensors(on);
        let paged = self.paged(on, &tensors);
        let memories: Vec<Memory> =
            self.chunks.iter().map(|chunk| self.memory(on, chunk)).collect();
        let mappings: Vec<DeviceBuffer> = self.chunks.iter().map(|c| mapping(on, c)).collect();
        let chunks: Vec<Chunk<'_>> = self
            .chunks
            .iter()
            .zip(&memories)
            .zip(&mappings)
            .map(|((chunk, memory), mapping)| self.chunk(chunk, memory, mapping))
            .collect();
        let transfer = ChunkTransfer {
            chunks: &chunks,
            layers: self.layers.clone(),
            direction: self.direction,
            num_blocks: BLOCKS,
            limits: self.limits,
            report: None,
        };
        on.kernels.transfer_chunks(&on.stream, &paged, &transfer).unwrap();
        let mut outputs: Outputs = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            outputs.push((format!("tensor {index}: {}", self.name), on.read(tensor.span())));
        }
        for (index, memory) in memories.iter().enumerate() {
            let bytes = match memory {
                Memory::Device(buffer) => on.read(buffer.span()),
                Memory::Pinned(buffer) => on.read_pinned(buffer),
            };
            outputs.push((format!("chunk {index}: {}", self.name), bytes));
        }
        outputs
    }

    /// Tensors with their margins, of which no byte was ever written.
    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn unwritten_tensors(&self, on: &On) -> Vec<DeviceBuffer> {
        let extent = self.layout.extent_bytes(&self.shape, BLOCKS).unwrap();
        let count = self.layout.tensors().count(&self.shape);
        (0..count).map(|_| on.memory(extent + 2 * self.margin())).collect()
    }

    /// Where rows that move lie in a chunk, without its margin.
    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn moved_rows(&self, chunk: &ChunkCase) -> Vec<std::ops::Range<u64>> {
        let (row_bytes, tokens) = (self.shape.row_bytes(), u64::from(self.shape.block_tokens()));
        let planes = self.layers.len() as u64 * u64::from(self.shape.kv_count());
        let moves = |token: &u64| chunk.mapping.slot(*token, tokens).is_some();
        (0..planes)
            .flat_map(|plane| {
                (chunk.skip..chunk.tokens)
                    .filter(moves)
                    .map(move |token| (plane * chunk.tokens + token) * row_bytes)
            })
            .map(|start| start..start + row_bytes)
            .collect()
    }

    /// Moves one chunk, whatever the direction of the case.
    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn move_alone(
        &self,
        on: &On,
        (paged, chunk): (&PagedKv, &ChunkCase),
        memory: &DeviceBuffer,
        direction: Direction,
    ) {
        let mapping = mapping(on, chunk);
        let memory = memory.span().slice(self.margin(), self.chunk_bytes(chunk)).unwrap();
        let chunk = Chunk { memory: memory.into(), ..self.described(chunk, &mapping) };
        let transfer = ChunkTransfer {
            chunks: &[chunk],
            layers: self.layers.clone(),
            direction,
            num_blocks: BLOCKS,
            limits: self.limits,
            report: None,
        };
        on.kernels.transfer_chunks(&on.stream, paged, &transfer).unwrap();
    }

    /// Which bytes of tensors hold rows of tokens that move.
    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn written_pages(&self) -> Vec<Vec<bool>> {
        let bytes = self.layout.extent_bytes(&self.shape, BLOCKS).unwrap() + 2 * self.margin();
        let count = self.layout.tensors().count(&self.shape);
        let mut written = vec![vec![false; bytes as usize]; count as usize];
        let tokens = u64::from(self.shape.block_tokens());
        for chunk in &self.chunks {
            let moved = (chunk.skip..chunk.tokens).filter_map(|t| chunk.mapping.slot(t, tokens));
            for slot in moved {
                for layer in self.layers.clone() {
                    for kv in 0..u64::from(self.shape.kv_count()) {
                        for byte in 0..self.shape.row_bytes() {
                            let (tensor, at) = self.place(layer.into(), kv, slot, byte);
                            written[tensor][(self.margin() + at) as usize] = true;
                        }
                    }
                }
            }
        }
        written
    }

    fn memory(&self, on: &On, chunk: &ChunkCase) -> Memory {
        let before = self.chunk_before(chunk);
        if chunk.pinned {
            Memory::Pinned(on.pin(&before))
        } else {
            Memory::Device(on.upload(&before))
        }
    }

    fn chunk<'a>(
        &self,
        chunk: &'a ChunkCase,
        memory: &'a Memory,
        mapping: &'a DeviceBuffer,
    ) -> Chunk<'a> {
        let (offset, bytes) = (self.margin(), self.chunk_bytes(chunk));
        let memory = match memory {
            Memory::Device(buffer) => buffer.span().slice(offset, bytes).unwrap().into(),
            Memory::Pinned(buffer) => ChunkMemory::Pinned { buffer, offset, bytes },
        };
        Chunk { memory, ..self.described(chunk, mapping) }
    }

    /// A chunk whose memory is to be filled in.
    fn described<'a>(&self, chunk: &'a ChunkCase, mapping: &'a DeviceBuffer) -> Chunk<'a> {
        let device = mapping.span().into();
        let memory = ChunkMemory::Device(mapping.span());
        let mapping = match &chunk.mapping {
            Mapping::Slots(slots) => ChunkMapping::Slots { slots: device, host: Some(slots) },
            Mapping::Blocks(ids) => ChunkMapping::Blocks { ids: device, host: Some(ids) },
        };
        Chunk { memory, mapping, tokens: chunk.tokens, skip_prefix_n_tokens: chunk.skip }
    }

    /// The same by the formula, byte by byte.
    pub(crate) fn oracle(&self) -> Vec<Vec<u8>> {
        let count = self.layout.tensors().count(&self.shape);
        let mut tensors: Vec<Vec<u8>> = (0..count).map(|t| self.tensor_before(t)).collect();
        let mut chunks: Vec<Vec<u8>> =
            self.chunks.iter().map(|chunk| self.chunk_before(chunk)).collect();
        for (chunk, bytes) in self.chunks.iter().zip(&mut chunks) {
            self.move_chunk(chunk, bytes, &mut tensors);
        }
        tensors.append(&mut chunks);
        tensors
    }

    fn move_chunk(&self, chunk: &ChunkCase, bytes: &mut [u8], tensors: &mut [Vec<u8>]) {
        let (shape, margin) = (&self.shape, self.margin());
        let (row_bytes, tokens) = (shape.row_bytes(), u64::from(shape.block_tokens()));
        let layers = self.layers.len() as u64;
        for kv in 0..u64::from(shape.kv_count()) {
            for layer in 0..layers {
                for token in chunk.skip..chunk.tokens {
                    let Some(slot) = chunk.mapping.slot(token, tokens) else { continue };
                    let row = (kv * layers + layer) * chunk.tokens + token;
                    let in_layers = u64::from(self.layers.start) + layer;
                    for byte in 0..row_bytes {
                        let in_chunk = (margin + row * row_bytes + byte) as usize;
                        let (tensor, at) = self.place(in_layers, kv, slot, byte);
                        let in_pages = &mut tensors[tensor][(margin + at) as usize];
                        match self.direction {
                            Direction::ChunkToPaged => *in_pages = bytes[in_chunk],
                            Direction::PagedToChunk => bytes[in_chunk] = *in_pages,
                        }
                    }
                }
            }
        }
    }

    /// The tensor, and the offset in it, of a byte of a row; as the documentation of the layout says.
    fn place(&self, layer: u64, kv: u64, slot: u64, byte: u64) -> (usize, u64) {
        use kv_kernels::layout::Tensors;
        let (shape, layout) = (&self.shape, &self.layout);
        let (kv_count, layers) = (u64::from(shape.kv_count()), u64::from(shape.layers()));
        let tensor = match layout.tensors() {
            Tensors::One => 0,
            Tensors::PerLayer => layer,
            Tensors::PerPlane => layer * kv_count + kv,
            _ => kv * layers + layer,
        };
        let tokens = u64::from(shape.block_tokens());
        let start = layer * layout.options().layer_stride_bytes
            + kv * layout.options().kv_stride_bytes
            + slot / tokens * layout.options().block_stride_bytes;
        let mut byte = byte;
        for part in layout.parts_of(kv) {
            let bytes = part.segment_bytes * u64::from(part.segments);
            if byte < bytes {
                let offset = part.offset_bytes
                    + slot % tokens * part.token_stride_bytes
                    + byte / part.segment_bytes * part.segment_stride_bytes
                    + byte % part.segment_bytes;
                return (tensor as usize, start + offset);
            }
            byte -= bytes;
        }
        unreachable!("a byte beyond the row")
    }
}

/// The mapping on the device, with a margin for chunks without tokens.
fn mapping(on: &On, chunk: &ChunkCase) -> DeviceBuffer {
    match &chunk.mapping {
        Mapping::Slots(slots) => {
            on.upload(&[slots.as_slice(), &[Slot::new(i64::MAX).unwrap()]].concat())
        }
        Mapping::Blocks(ids) => {
            on.upload(&[ids.as_slice(), &[TableEntry::new(i32::MAX).unwrap(); 2]].concat())
        }
    }
}

pub(crate) fn outputs(on: &On) -> Outputs {
    cases().iter().flat_map(|case| case.run(on)).collect()
}

/// The first chunk of each case alone, with the whole device: that is a kernel of its own.
fn alone() -> Vec<Case> {
    let alone = |case: Case| Case {
        name: format!("alone: {}", case.name),
        chunks: case.chunks.into_iter().take(1).collect(),
        limits: LaunchLimits::default(),
        ..case
    };
    cases().into_iter().map(alone).collect()
}

pub(crate) fn ones(on: &On) -> Outputs {
    alone().iter().flat_map(|case| case.run(on)).collect()
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

    #[test]
    fn the_ptx_gives_what_the_reference_gives_for_one_chunk() {
        compare(&On::sim(references()), &On::sim(&[]), ones);
    }

    #[test]
    fn every_byte_is_where_the_formula_says() {
        let on = On::sim(references());
        for case in cases().into_iter().chain(alone()) {
            for ((what, found), expected) in case.run(&on).iter().zip(case.oracle()) {
                let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!((differs, found.len()), (None, expected.len()), "{what}");
            }
        }
        on.assert_clean();
    }
}
