//! A simulated machine with the kernels loaded, and the shapes that every test runs over.

use std::sync::Arc;

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, KernelReference, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout, Strides, references};

pub(crate) struct Machine {
    pub(crate) sim: SimDriver,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) kernels: KvKernels,
}

impl Machine {
    /// A machine that runs the CPU references of the kernels.
    pub(crate) fn new() -> Self {
        Self::with(references())
    }

    /// A machine that knows the kernels by these references, and all others by their PTX.
    pub(crate) fn with(references: &[KernelReference]) -> Self {
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        sim.register_kernels(references);
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let kernels = KvKernels::load(&device).unwrap();
        Self { sim, device, stream, kernels }
    }

    pub(crate) fn memory(&self, bytes: u64) -> DeviceBuffer {
        DeviceBuffer::alloc(&self.device, bytes).unwrap()
    }

    /// A buffer with these values.
    pub(crate) fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = self.memory(bytes.len() as u64);
        self.stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    /// What `span` holds once all work of the machine's stream has run.
    pub(crate) fn read(&self, span: DeviceSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        self.stream.download(&mut bytes, span).unwrap();
        bytes
    }

    pub(crate) fn launches(&self) -> u64 {
        let calls = self.sim.calls();
        let made = |call| calls.get(call).copied().unwrap_or(0);
        made("cuLaunchKernel") + made("cuGraphLaunch")
    }

    pub(crate) fn assert_clean(&self) {
        assert!(self.sim.findings().is_empty(), "{:?}", self.sim.findings());
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
        let start = plane / kv_count * layout.layer_stride_bytes()
            + plane % kv_count * layout.kv_stride_bytes()
            + slot / block_tokens * layout.block_stride_bytes()
            + slot % block_tokens * layout.token_stride_bytes();
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

/// Bytes that hardly ever repeat.
pub(crate) fn noise(bytes: u64) -> Vec<u8> {
    let mut random = Random(bytes);
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

/// A small generator, so that every run is the same.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }

    pub(crate) fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}
