//! What a driver sees of launches and transfers: which line of the program asked for them, and which bytes
//! the host reads.

use std::sync::Arc;

use crate::ops::on::pair;
use cuda_driver::{
    Device, DeviceBuffer, DeviceSpan, HostAccess, HostAllocFlags, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    Append, BlockCopy, BlockPairs, DeviceReport, Direction, GatherRows, HostBlocks, KvKernels,
    KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot, Transfer,
    chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits},
    layout::Strides,
    link::{HostLink, HostLinkOptions, MeasureOptions, Transport, TransportProfile},
    references,
    verify::{BlockSums, ChecksumArgs, FillPattern},
};
use kv_testkit::{Watch, from_here};

const BLOCKS: u64 = 4;
const ROW: u64 = 64;
const TOKENS: u64 = 4;

struct Scene {
    watch: Watch,
    stream: Stream,
    kernels: Arc<KvKernels>,
    shape: KvShape,
    paged: PagedKv,
    /// Zeros, which are a valid slot, id, row and pair wherever one is asked for.
    zeros: DeviceBuffer,
    pages: DeviceBuffer,
    written: DeviceBuffer,
}

fn shape(row_bytes: u64) -> KvShape {
    let options = KvShapeOptions { layers: 1, kv_count: 1, row_bytes, block_tokens: TOKENS as u32 };
    KvShape::new(options).unwrap()
}

impl Scene {
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        sim.register_kernels(references());
        let watch = Watch::default();
        let device = Device::open(watch.over(Arc::new(sim)), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let kernels = Arc::new(KvKernels::load(&device).unwrap());
        let [zeros, pages, written] =
            [(), (), ()].map(|()| DeviceBuffer::alloc(&device, 8192).unwrap());
        for memory in [&zeros, &pages, &written] {
            stream.fill(memory.span(), 0).unwrap();
        }
        let shape = shape(ROW);
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&stream, shape, layout, pages.span(), BLOCKS).unwrap();
        Self { watch, stream, kernels, shape, paged, zeros, pages, written }
    }

    fn device(&self) -> &Device {
        self.stream.device()
    }

    fn zeros(&self) -> DeviceSpan {
        self.zeros.span()
    }

    /// Memory that is only written.
    fn out(&self, bytes: u64) -> DeviceSpan {
        self.written.span().slice(0, bytes).unwrap()
    }
}

#[test]
fn launches_of_chunks_name_the_programs_line() {
    let s = Scene::new();
    let (watch, kernels, stream, paged) = (&s.watch, &s.kernels, &s.stream, &s.paged);
    let chunk = s.out(ROW);
    let transfer = Transfer {
        chunk,
        slot_mapping: s.zeros(),
        host_slots: &[0].map(Slot::from),
        tokens: 1,
        skip_prefix_n_tokens: 0,
        direction: Direction::PagedToChunk,
        num_blocks: BLOCKS,
    };
    let moved = {
        from_here!(watch, "cuLaunchKernel", kernels.multi_layer_transfer(stream, paged, transfer))
    };
    moved.0.unwrap();
    let mapping = ChunkMapping::Slots { slots: s.zeros().into(), host: None };
    let chunks = [Chunk { memory: chunk.into(), mapping, tokens: 1, skip_prefix_n_tokens: 0 }];
    let many = ChunkTransfer {
        chunks: &chunks,
        layers: 0..1,
        direction: Direction::PagedToChunk,
        num_blocks: BLOCKS,
        limits: LaunchLimits::default(),
        report: None,
    };
    from_here!(watch, "cuLaunchKernel", kernels.transfer_chunks(stream, paged, &many)).0.unwrap();
    let fill = FillPattern { chunk, token_keys: s.zeros(), tokens: 1 };
    from_here!(watch, "cuLaunchKernel", kernels.fill_pattern(stream, &s.shape, fill)).0.unwrap();
    let append = Append {
        keys: s.zeros().into(),
        values: None,
        layer_stride_bytes: ROW,
        token_stride_bytes: ROW,
        first_layer: 0,
        layers: 1,
        slot_mapping: s.zeros().into(),
        host_slots: None,
        tokens: 1,
        num_blocks: BLOCKS,
        report: None,
    };
    from_here!(watch, "cuLaunchKernel", kernels.append(stream, paged, append)).0.unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn launches_of_tables_name_the_programs_line() {
    let s = Scene::new();
    let (watch, kernels, stream, paged) = (&s.watch, &s.kernels, &s.stream, &s.paged);
    let gather = GatherRows {
        out: s.out(4),
        out_stride: 1,
        table: s.zeros(),
        table_stride: 1,
        row_index: s.zeros(),
        rows: 1,
        width: 1,
        table_rows: 1,
    };
    from_here!(watch, "cuLaunchKernel", kernels.gather_rows(stream, gather)).0.unwrap();
    let checksum = ChecksumArgs {
        block_table: s.zeros(),
        table_stride: 1,
        seq_lens: s.zeros(),
        sequences: 1,
        checksums: s.out(8),
        num_blocks: BLOCKS,
    };
    from_here!(watch, "cuLaunchKernel", kernels.paged_checksum(stream, paged, checksum)).0.unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn launches_of_blocks_name_the_programs_line() {
    let s = Scene::new();
    let (watch, kernels, stream, paged) = (&s.watch, &s.kernels, &s.stream, &s.paged);
    let sums = BlockSums {
        blocks: paged.into(),
        ids: s.zeros().into(),
        count: 1,
        host_ids: None,
        num_blocks: BLOCKS,
        sums: s.out(8),
        report: None,
    };
    from_here!(watch, "cuLaunchKernel", kernels.sum_blocks(stream, sums)).0.unwrap();
    let other = DeviceBuffer::alloc(s.device(), 4096).unwrap();
    let layout = PagedLayout::block_major(&s.shape);
    let other = PagedKv::new(stream, s.shape, layout, other.span(), BLOCKS).unwrap();
    let pairs = [pair(0, 0)];
    let copy = BlockCopy {
        from: paged.into(),
        to: (&other).into(),
        pairs: s.zeros().into(),
        count: 1,
        host_pairs: Some(BlockPairs::new(&pairs).unwrap()),
        from_blocks: BLOCKS,
        to_blocks: BLOCKS,
        report: None,
        multiprocessors: None,
    };
    from_here!(watch, "cuLaunchKernel", kernels.copy_blocks(stream, copy)).0.unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn what_kernels_need_names_the_programs_line() {
    let s = Scene::new();
    let (watch, stream) = (&s.watch, &s.stream);
    from_here!(watch, "cuModuleLoadDataEx", KvKernels::load(s.device())).0.unwrap();
    let (report, _) = from_here!(watch, "cuMemcpyHtoDAsync", DeviceReport::new(stream));
    from_here!(watch, "cuMemcpyDtoHAsync", report.unwrap().take(stream)).0.unwrap();
    let (shape, layout, span) = (s.shape, *s.paged.layout(), s.pages.span());
    let pages =
        from_here!(watch, "cuMemcpyHtoDAsync", PagedKv::new(stream, shape, layout, span, 1));
    pages.0.unwrap();
    let buffer = PinnedBuffer::alloc(s.device(), 4096, HostAllocFlags::CACHED).unwrap();
    let host = (Arc::new(buffer), 0);
    from_here!(watch, "cuMemcpyHtoDAsync", HostBlocks::new(stream, shape, layout, host, 1))
        .0
        .unwrap();
}

#[test]
fn blocks_of_a_link_and_its_measurement_name_the_programs_line() {
    let s = Scene::new();
    let (watch, stream) = (&s.watch, &s.stream);
    let options = HostLinkOptions::default();
    let link = from_here!(watch, "cuStreamCreate", HostLink::new(s.kernels.clone(), options));
    let mut link = link.0.unwrap();
    let buffer = PinnedBuffer::alloc(s.device(), 4096, HostAllocFlags::CACHED).unwrap();
    let layout = *s.paged.layout();
    let host = HostBlocks::new(stream, s.shape, layout, (Arc::new(buffer), 0), BLOCKS).unwrap();
    let pairs = [pair(0, 0)];
    let copy = BlockCopy {
        from: (&s.paged).into(),
        to: (&host).into(),
        pairs: s.zeros().into(),
        count: 1,
        host_pairs: Some(BlockPairs::new(&pairs).unwrap()),
        from_blocks: BLOCKS,
        to_blocks: BLOCKS,
        report: None,
        multiprocessors: None,
    };
    let assumed = link.profile().clone();
    for transport in Transport::ALL {
        link = link.with_profile(TransportProfile { forced: Some(transport), ..assumed.clone() });
        from_here!(watch, "cuCtxGetCurrent", link.copy_blocks(stream, copy)).0.unwrap();
    }
    stream.synchronize().unwrap();
    let options = MeasureOptions { bytes: 1 << 20, rounds: 1, ..MeasureOptions::default() };
    let (measured, _) = {
        from_here!(watch, "cuEventSynchronize", TransportProfile::measure(&s.kernels, &options))
    };
    measured.unwrap();
}

/// A block whose rows have gaps between them is read row by row, and so it is told.
#[test]
fn a_block_that_the_host_reads_is_told_row_by_row() {
    let s = Scene::new();
    let strides = Strides { plane_bytes: ROW, token_bytes: 2 * ROW, block_bytes: 8 * ROW };
    let layout = PagedLayout::custom(&s.shape, strides).unwrap();
    let buffer = PinnedBuffer::alloc(s.device(), 4096, HostAllocFlags::CACHED).unwrap();
    let start = buffer.host_address() + 128 + 8 * ROW;
    let host = HostBlocks::new(&s.stream, s.shape, layout, (Arc::new(buffer), 128), 2).unwrap();
    s.watch.accesses();
    let mut dense = vec![0; s.shape.block_bytes() as usize];
    from_here!(s.watch, "host", host.read_block(1, &mut dense)).0.unwrap();
    let row =
        |token: u64| HostAccess { address: start + token * 2 * ROW, bytes: ROW, writes: false };
    assert_eq!(s.watch.accesses(), [0, 1, 2, 3].map(row));
}
