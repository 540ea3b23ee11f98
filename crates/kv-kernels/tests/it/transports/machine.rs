//! A simulated machine with pages, a chunk in pinned memory, and the bytes that both must have after.

use std::sync::Arc;

use cuda_driver::reference::KernelReference;
use cuda_driver::{
    CountingDriver, Device, DeviceBuffer, Driver, HostAllocFlags, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    Direction, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot,
    link::{HostLink, HostLinkOptions, HostTransfer, LayerEvents, Transport, TransportError},
    references,
};

pub(crate) const BOTH: [Direction; 2] = [Direction::PagedToChunk, Direction::ChunkToPaged];

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

    /// A link with a ring of two slots that hold a few rows each, so that slots come round often.
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
        let profile = link.profile().clone().forced(transport);
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

/// Which transfer.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) shape: KvShape,
    pub(crate) layout: PagedLayout,
    pub(crate) slots: Vec<Slot>,
    pub(crate) skip: u64,
    pub(crate) direction: Direction,
}

pub(crate) const BLOCKS: u64 = 12;
/// Where chunks begin in pinned memory.
pub(crate) const OFFSET: u64 = 48;

impl Case {
    pub(crate) fn new(
        (layers, kv_count, row_bytes, block_tokens): (u32, u32, u64, u32),
        slots: &[i64],
        skip: u64,
        direction: Direction,
    ) -> Self {
        let options = KvShapeOptions { layers, kv_count, row_bytes, block_tokens };
        let shape = KvShape::new(options).unwrap();
        let layout = PagedLayout::layer_major(&shape, BLOCKS).unwrap();
        Self { shape, layout, slots: crate::ops::on::slots(slots), skip, direction }
    }

    /// Three layers of two tensors, 20 tokens in order and out of it.
    pub(crate) fn plain(direction: Direction) -> Self {
        let slots: Vec<i64> = (8..16).chain(28..32).chain([5, 3, 40, 41, 7, 20, 22, 21]).collect();
        Self::new((3, 2, 64, 4), &slots, 0, direction)
    }
}

/// A case's memory on a machine.
pub(crate) struct Scene {
    pub(crate) paged: PagedKv,
    pub(crate) pages: DeviceBuffer,
    pub(crate) host: PinnedBuffer,
    pub(crate) mapping: DeviceBuffer,
    pub(crate) case: Case,
    /// Pages, and the pinned memory from its start, as they must be after.
    pub(crate) pages_after: Vec<u8>,
    pub(crate) host_after: Vec<u8>,
}

impl Scene {
    /// Sets a case up; what it must give is what the transfer kernel gives over device memory.
    pub(crate) fn new(machine: &Machine, case: &Case) -> Self {
        let Case { shape, layout, slots, .. } = case;
        let tokens = slots.len() as u64;
        let chunk_bytes = tokens * shape.token_bytes();
        let pages_before = noise(layout.extent_bytes(shape, BLOCKS).unwrap(), 1);
        let host_before = noise(OFFSET + chunk_bytes + 32, 2);
        let pages = machine.upload(&pages_before);
        let paged = PagedKv::new(&machine.stream, *shape, *layout, pages.span(), BLOCKS).unwrap();
        let host = machine.pinned(&host_before);
        let mapping = machine.upload(slots);

        let in_chunk = OFFSET as usize..(OFFSET + chunk_bytes) as usize;
        let chunk = machine.upload(&host_before[in_chunk.clone()]);
        let transfer = kv_kernels::Transfer {
            chunk: chunk.span(),
            slot_mapping: mapping.span(),
            host_slots: slots,
            tokens,
            skip_prefix_n_tokens: case.skip,
            direction: case.direction,
            num_blocks: BLOCKS,
        };
        machine.kernels.multi_layer_transfer(&machine.stream, &paged, transfer).unwrap();
        let mut pages_after = pages_before.clone();
        machine.stream.download(&mut pages_after, pages.span()).unwrap();
        let mut host_after = host_before;
        machine.stream.download(&mut host_after[in_chunk], chunk.span()).unwrap();
        machine.stream.upload(pages.span(), &pages_before).unwrap();
        Self { paged, pages, host, mapping, case: case.clone(), pages_after, host_after }
    }

    pub(crate) fn transfer<'a>(&'a self, events: Option<&'a LayerEvents>) -> HostTransfer<'a> {
        HostTransfer {
            paged: &self.paged,
            host: &self.host,
            host_offset: OFFSET,
            slot_mapping: self.mapping.span(),
            host_slots: &self.case.slots,
            tokens: self.case.slots.len() as u64,
            skip_prefix_n_tokens: self.case.skip,
            direction: self.case.direction,
            num_blocks: BLOCKS,
            layer_events: events,
        }
    }

    pub(crate) fn run(
        &self,
        link: &mut HostLink,
        stream: &Stream,
    ) -> Result<Transport, TransportError> {
        link.transfer_chunk(stream, self.transfer(None))
    }

    /// Whether both memories are as they must be, once the work of `stream` has run.
    pub(crate) fn is_done(&self, stream: &Stream) -> bool {
        let mut pages = vec![0; self.pages_after.len()];
        stream.download(&mut pages, self.pages.span()).unwrap();
        let mut host = vec![0; self.host_after.len()];
        self.host.read_at(0, &mut host).unwrap();
        pages == self.pages_after && host == self.host_after
    }
}
