//! A simulated machine with the kernels loaded, and the shapes that every test runs over.

use std::ops::Deref;

use cuda_driver::DeviceBuffer;
use cuda_driver::reference::KernelReference;
use cuda_sim::SimDriver;
use kv_kernels::{KvShape, KvShapeOptions, PagedKv, PagedLayout, layout::Strides, references};

use crate::ops::on::On;
pub(crate) use crate::ops::on::{Random, noise};

/// A simulated device, and what commands it.
pub(crate) struct Machine {
    on: On,
    pub(crate) sim: SimDriver,
}

impl Machine {
    /// A machine that runs the CPU references of the kernels.
    pub(crate) fn new() -> Self {
        Self::with(references())
    }

    /// A machine that knows the kernels by these references, and all others by their PTX.
    pub(crate) fn with(references: &[KernelReference]) -> Self {
        let on = On::sim(references);
        let sim = on.sim.clone().unwrap();
        Self { on, sim }
    }
}

impl Deref for Machine {
    type Target = On;

    fn deref(&self) -> &On {
        &self.on
    }
}

/// Paged memory with the buffer that it lies in, filled with bytes of its own.
pub(crate) struct Paged {
    pub(crate) kv: PagedKv,
    pub(crate) memory: DeviceBuffer,
    pub(crate) before: Vec<u8>,
}

impl Paged {
    pub(crate) fn new(machine: &Machine, shape: KvShape, layout: PagedLayout, blocks: u64) -> Self {
        let before = noise(layout.extent_bytes(&shape, blocks).unwrap());
        let memory = machine.upload(&before);
        let kv = PagedKv::new(&machine.stream, shape, layout, memory.span(), blocks).unwrap();
        Self { kv, memory, before }
    }

    /// Where a slot's row lies in a plane, from the start of the memory.
    pub(crate) fn row(&self, plane: u64, slot: u64) -> std::ops::Range<usize> {
        let (shape, layout) = (self.kv.shape(), self.kv.layout());
        let block_tokens = u64::from(shape.block_tokens());
        let kv_count = u64::from(shape.kv_count());
        let start = plane / kv_count * layout.options().layer_stride_bytes
            + plane % kv_count * layout.options().kv_stride_bytes
            + slot / block_tokens * layout.options().block_stride_bytes
            + slot % block_tokens * layout.parts_of(0)[0].token_stride_bytes;
        start as usize..(start + shape.row_bytes()) as usize
    }
}

/// Where a token's row lies in a chunk.
pub(crate) fn chunk_row(
    shape: &KvShape,
    tokens: u64,
    plane: u64,
    token: u64,
) -> std::ops::Range<usize> {
    let (layer, kv) = (plane / u64::from(shape.kv_count()), plane % u64::from(shape.kv_count()));
    let start = ((kv * u64::from(shape.layers()) + layer) * tokens + token) * shape.row_bytes();
    start as usize..(start + shape.row_bytes()) as usize
}

/// Shapes small and large, with rows as of each element type, each in every kind of layout.
pub(crate) fn shapes_and_layouts(blocks: u64) -> Vec<(KvShape, PagedLayout)> {
    let mut all = Vec::new();
    for (layers, kv_count, row_bytes, block_tokens) in [
        (1, 1, 8, 1),
        (1, 1, 16, 512),
        (1, 2, 16, 32),
        (3, 2, 24, 5),
        (2, 1, 40, 3),
        (2, 2, 32, 16),
        (2, 2, 64, 16),
        (3, 1, 128, 64),
        (4, 2, 2048, 16),
    ] {
        let options = KvShapeOptions { layers, kv_count, row_bytes, block_tokens };
        let shape = KvShape::new(options).unwrap();
        // Rows with a gap after each, tokens outermost within a block.
        let strides = Strides {
            plane_bytes: row_bytes + 8,
            token_bytes: (row_bytes + 8) * shape.planes(),
            block_bytes: (row_bytes + 8) * shape.planes() * u64::from(block_tokens) + 16,
        };
        all.extend([
            (shape, PagedLayout::block_major(&shape)),
            (shape, PagedLayout::layer_major(&shape, blocks).unwrap()),
            (shape, PagedLayout::custom(&shape, strides).unwrap()),
        ]);
    }
    all
}
