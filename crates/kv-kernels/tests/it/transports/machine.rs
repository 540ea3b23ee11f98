//! A simulated machine with blocks in pages and in pinned memory, and the bytes that both must have after.

use std::sync::Arc;

use cuda_driver::reference::KernelReference;
use cuda_driver::{
    CountingDriver, Device, DeviceBuffer, Driver, HostAllocFlags, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    BlockPair, KvKernels, PagedLayout,
    link::{HostLink, HostLinkOptions, Transport, TransportError, TransportProfile},
    references,
};

use super::blocks::{Scene, copy_of, pairs};

pub(crate) struct Machine {
    pub(crate) sim: SimDriver,
    pub(crate) counts: Arc<CountingDriver>,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) kernels: Arc<KvKernels>,
}

impl Machine {
    pub(crate) fn new(seed: u64) -> Self {
        Self::with(seed, references())
    }

    /// One that runs these references, and the PTX of all other kernels.
    pub(crate) fn with(seed: u64, references: &[KernelReference]) -> Self {
        let sim = SimDriver::new(SimConfig { seed, ..SimConfig::default() }).unwrap();
        sim.register_kernels(references);
        let counts = Arc::new(CountingDriver::new(Arc::new(sim.clone())));
        let device = Device::open(Arc::clone(&counts) as Arc<dyn Driver>, 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let kernels = Arc::new(KvKernels::load(&device).unwrap());
        Self { sim, counts, device, stream, kernels }
    }

    /// A link with a ring of two slots that hold two blocks each, so that slots come round often.
    pub(crate) fn link(&self, transport: Transport) -> HostLink {
        let options = HostLinkOptions {
            ring_buffers: 2,
            ring_buffer_bytes: 1024,
            ..HostLinkOptions::default()
        };
        self.link_with(transport, options)
    }

    pub(crate) fn link_with(&self, transport: Transport, options: HostLinkOptions) -> HostLink {
        let link = HostLink::new(Arc::clone(&self.kernels), options).unwrap();
        let profile = TransportProfile { forced: Some(transport), ..link.profile().clone() };
        link.with_profile(profile)
    }

    pub(crate) fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = DeviceBuffer::alloc(&self.device, bytes.len() as u64).unwrap();
        self.stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    pub(crate) fn pinned(&self, bytes: &[u8]) -> PinnedBuffer {
        let flags = HostAllocFlags::CACHED;
        let mut buffer = PinnedBuffer::alloc(&self.device, bytes.len() as u64, flags).unwrap();
        buffer.write_at(0, bytes).unwrap();
        buffer
    }

    pub(crate) fn assert_clean(&self) {
        assert!(self.sim.findings().is_empty(), "{:?}", self.sim.findings());
    }
}

/// Bytes that hardly ever repeat.
pub(crate) fn noise(bytes: u64, seed: u64) -> Vec<u8> {
    let mut random = seed;
    (0..bytes)
        .map(|_| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (random >> 56) as u8
        })
        .collect()
}

/// Blocks that a link moves on a machine, and the bytes that both memories must have after.
pub(crate) struct Moving {
    pub(crate) scene: Scene,
    table: DeviceBuffer,
    list: Vec<BlockPair>,
    to_host: bool,
    right: (Vec<u8>, Vec<u8>),
}

impl Moving {
    /// Nine blocks in no order in the pages, that follow each other on the host.
    pub(crate) fn new(machine: &Machine, to_host: bool) -> Self {
        Self::of(machine, to_host, &(0..9).map(|i| (i * 5 % 24, i + 12)).collect::<Vec<_>>())
    }

    /// Blocks of pages and of the host; what they must give is what the kernel gives.
    pub(crate) fn of(machine: &Machine, to_host: bool, blocks: &[(i32, i32)]) -> Self {
        let turned: Vec<_> = blocks.iter().map(|&(a, b)| (b, a)).collect();
        let list = pairs(if to_host { blocks } else { &turned });
        let table = machine.upload(&list);
        let expected = Scene::new(machine, PagedLayout::block_major);
        let copy = copy_of(&expected, to_host, &table, &list);
        machine.kernels.copy_blocks(&machine.stream, copy).unwrap();
        let right = expected.bytes(&machine.stream);
        let scene = Scene::new(machine, PagedLayout::block_major);
        Self { scene, table, list, to_host, right }
    }

    pub(crate) fn run(
        &self,
        link: &mut HostLink,
        stream: &Stream,
    ) -> Result<Transport, TransportError> {
        link.copy_blocks(stream, copy_of(&self.scene, self.to_host, &self.table, &self.list))
    }

    /// Whether both memories are as they must be, once the work of `stream` has run.
    pub(crate) fn is_right(&self, stream: &Stream) -> bool {
        self.scene.bytes(stream) == self.right
    }
}
