//! A device with the kernels loaded: a GPU, or a simulated one that runs the PTX or the references.

use std::sync::Arc;

use bytemuck::NoUninit;
use cuda_driver::reference::KernelReference;
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{BlockId, BlockPair, KvKernels, Slot, TableEntry, verify::token_word};

pub(crate) struct On {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) kernels: KvKernels,
    pub(crate) sim: Option<SimDriver>,
}

/// What an operation may have written, by name.
pub(crate) type Outputs = Vec<(String, Vec<u8>)>;

impl On {
    pub(crate) fn device(device: Device) -> Self {
        let kernels = KvKernels::load(&device).unwrap();
        Self::with(kernels)
    }

    /// With these kernels, on their device.
    pub(crate) fn with(kernels: KvKernels) -> Self {
        let device = kernels.device().clone();
        let stream = Stream::new(&device).unwrap();
        Self { device, stream, kernels, sim: None }
    }

    /// A simulated device that runs these references, and the PTX of all other kernels.
    pub(crate) fn sim(references: &[KernelReference]) -> Self {
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        sim.register_kernels(references);
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        Self { sim: Some(sim), ..Self::device(device) }
    }

    pub(crate) fn memory(&self, bytes: u64) -> DeviceBuffer {
        DeviceBuffer::alloc(&self.device, bytes).unwrap()
    }

    /// Device memory with these values.
    pub(crate) fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = self.memory(bytes.len() as u64);
        self.stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    /// Pinned memory with these values.
    pub(crate) fn pin<T: NoUninit>(&self, values: &[T]) -> PinnedBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let flags = HostAllocFlags::CACHED;
        let mut buffer = PinnedBuffer::alloc(&self.device, bytes.len() as u64, flags).unwrap();
        buffer.write_at(0, bytes).unwrap();
        buffer
    }

    /// What `span` holds once all work of the stream has run.
    pub(crate) fn read(&self, span: DeviceSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        self.stream.download(&mut bytes, span).unwrap();
        bytes
    }

    /// What pinned memory holds once all work of the stream has run.
    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn read_pinned(&self, buffer: &PinnedBuffer) -> Vec<u8> {
        self.stream.synchronize().unwrap();
        let mut bytes = vec![0; buffer.bytes() as usize];
        buffer.read_at(0, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn assert_clean(&self) {
        if let Some(sim) = &self.sim {
            assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        }
    }

    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn launches(&self) -> u64 {
        let calls = self.sim.as_ref().unwrap().calls();
        let made = |call| calls.get(call).copied().unwrap_or(0);
        made("cuLaunchKernel") + made("cuGraphLaunch")
    }
}

/// Runs the same on both and compares every byte that may have been written.
#[track_caller]
pub(crate) fn compare(expected: &On, found: &On, outputs: fn(&On) -> Outputs) {
    let (expected_bytes, found_bytes) = (outputs(expected), outputs(found));
    assert_eq!(expected_bytes.len(), found_bytes.len());
    for ((what, expected), (_, found)) in expected_bytes.iter().zip(&found_bytes) {
        let differs = expected.iter().zip(found).position(|(a, b)| a != b);
        assert_eq!(expected.len(), found.len(), "{what}");
        assert_eq!(differs, None, "first byte that differs: {what}");
    }
    expected.assert_clean();
    found.assert_clean();
}

/// `count` bytes that hardly ever repeat.
pub(crate) fn noise(count: u64) -> Vec<u8> {
    let words: Vec<u64> = (0..count.div_ceil(8)).map(|at| token_word(0, at + count)).collect();
    bytemuck::cast_slice(&words)[..count as usize].to_vec()
}

/// A small generator, so that every run is the same.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }

    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Slots, -1 for none.
pub(crate) fn slots(numbers: &[i64]) -> Vec<Slot> {
    numbers.iter().map(|&number| Slot::new(number).unwrap()).collect()
}

/// Entries of a block table, -1 for none.
pub(crate) fn entries(ids: &[i32]) -> Vec<TableEntry> {
    ids.iter().map(|&id| TableEntry::new(id).unwrap()).collect()
}

pub(crate) fn block(index: impl TryInto<u32, Error: std::fmt::Debug>) -> BlockId {
    BlockId::new(index.try_into().unwrap()).unwrap()
}

pub(crate) fn pair<T: TryInto<u32, Error: std::fmt::Debug>>(
    source: T,
    destination: T,
) -> BlockPair {
    BlockPair { source: block(source), destination: block(destination) }
}
