//! Whole blocks between pages and a tier in pinned memory.

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, ErrorCode, PinnedBuffer, Stream};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, HostBlocks, KvShape, KvShapeOptions, PagedKv,
    PagedLayout,
    layout::{LayoutOptions, RowPart, Tensors},
    link::{HostLinkOptions, Transport},
    references,
};

use super::machine::{Machine, noise};
use crate::ops::on::{block, pair};

const BLOCKS: u64 = 24;

pub(crate) struct Scene {
    pub(crate) paged: PagedKv,
    pub(crate) pages: DeviceBuffer,
    pub(crate) host: HostBlocks,
    shape: KvShape,
}

impl Scene {
    pub(crate) fn new(machine: &Machine, layout: impl Fn(&KvShape) -> PagedLayout) -> Self {
        Self::of(machine, |shape| [layout(shape); 2])
    }

    /// With layouts of the pages and of the host.
    fn of(machine: &Machine, layouts: impl Fn(&KvShape) -> [PagedLayout; 2]) -> Self {
        let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 24, block_tokens: 4 };
        let shape = KvShape::new(options).unwrap();
        let [layout, of_host] = layouts(&shape);
        let bytes = layout.extent_bytes(&shape, BLOCKS).unwrap();
        let pages = machine.upload(&noise(bytes, 3));
        let paged = PagedKv::new(&machine.stream, shape, layout, pages.span(), BLOCKS).unwrap();
        let bytes = of_host.extent_bytes(&shape, BLOCKS).unwrap();
        let buffer: Arc<PinnedBuffer> = Arc::new(machine.pinned(&noise(bytes + 16, 4)));
        let host = HostBlocks::new(&machine.stream, shape, of_host, (buffer, 16), BLOCKS).unwrap();
        Self { paged, pages, host, shape }
    }

    /// Pages and pinned memory, once the work of `stream` has run.
    pub(crate) fn bytes(&self, stream: &Stream) -> (Vec<u8>, Vec<u8>) {
        let mut pages = vec![0; self.pages.bytes() as usize];
        stream.download(&mut pages, self.pages.span()).unwrap();
        let mut host = vec![0; self.host.buffer().bytes() as usize];
        self.host.buffer().read_at(0, &mut host).unwrap();
        (pages, host)
    }
}

pub(crate) fn pairs(of: &[(i32, i32)]) -> Vec<BlockPair> {
    of.iter().map(|&(source, destination)| pair(source, destination)).collect()
}

fn lists() -> Vec<Vec<BlockPair>> {
    let scattered: Vec<_> = (0..20).map(|i| (i * 7 % 24, i * 5 % 24)).collect();
    let run: Vec<_> = (0..17).map(|i| (i * 7 % 24, i + 4)).collect();
    let run_of_sources: Vec<_> = (0..17).map(|i| (i + 4, i * 7 % 24)).collect();
    vec![pairs(&scattered), pairs(&run), pairs(&run_of_sources), pairs(&[(3, 3)]), pairs(&[])]
}

pub(crate) fn copy_of<'a>(
    scene: &'a Scene,
    to_host: bool,
    table: &DeviceBuffer,
    list: &'a [BlockPair],
) -> BlockCopy<'a> {
    let (device, host) = (Blocks::Device(&scene.paged), Blocks::Host(&scene.host));
    let (from, to) = if to_host { (device, host) } else { (host, device) };
    BlockCopy {
        from,
        to,
        pairs: table.span().into(),
        count: list.len() as u64,
        host_pairs: Some(BlockPairs::new(list).unwrap()),
        from_blocks: BLOCKS,
        to_blocks: BLOCKS,
        report: None,
        multiprocessors: None,
    }
}

/// Wipes host memory, and has the stream write what was there: who reads it too early reads other bytes.
pub(crate) fn write_late(machine: &Machine, host: &PinnedBuffer) {
    let mut bytes = vec![0; host.bytes() as usize];
    host.read_at(0, &mut bytes).unwrap();
    let (kept, wiped) = (machine.upload(&bytes), machine.upload(&vec![0xEE_u8; bytes.len()]));
    machine.stream.copy_to_host(host, 0, wiped.span()).unwrap();
    machine.stream.synchronize().unwrap();
    machine.stream.copy_to_host(host, 0, kept.span()).unwrap();
}

/// Layouts of pages and host, and whether every transport carries blocks between them.
type Layouts = (fn(&KvShape) -> [PagedLayout; 2], bool);

fn layer_major(shape: &KvShape) -> PagedLayout {
    PagedLayout::layer_major(shape, BLOCKS).unwrap()
}

/// Rows of three heads in pieces, keys and values each in their own, with gaps behind blocks and planes.
fn pieces(shape: &KvShape) -> PagedLayout {
    let part = |bytes: u64| RowPart {
        segment_bytes: bytes,
        segments: (24 / bytes) as u32,
        segment_stride_bytes: 4 * bytes,
        token_stride_bytes: bytes,
        offset_bytes: 0,
    };
    let options = LayoutOptions {
        tensors: Tensors::One,
        layer_stride_bytes: BLOCKS * 2 * 112 + 48,
        kv_stride_bytes: 96,
        block_stride_bytes: 2 * 112,
        parts: &[part(8)],
    };
    PagedLayout::new(shape, options).unwrap().with_value_parts(shape, &[part(2)]).unwrap()
}

const WHOLE: Layouts = (|shape| [PagedLayout::block_major(shape); 2], true);
const PLANES: [Layouts; 2] = [
    (|shape| [layer_major(shape), PagedLayout::block_major(shape)], true),
    (|shape| [pieces(shape), pieces(shape).packed(shape)], true),
];
const APART: [Layouts; 4] = [
    (|shape| [layer_major(shape); 2], false),
    (|shape| [PagedLayout::block_major(shape), layer_major(shape)], false),
    (|shape| [pieces(shape), PagedLayout::block_major(shape)], false),
    (|shape| [PagedLayout::block_major(shape), pieces(shape).packed(shape)], false),
];

fn check(machine: &Machine, transport: Transport, (layouts, carried): Layouts) {
    let options =
        HostLinkOptions { ring_buffers: 2, ring_buffer_bytes: 1300, ..HostLinkOptions::default() };
    let mut link = machine.link_with(transport, options);
    for list in lists() {
        for to_host in [false, true] {
            let (expected, seen) = (Scene::of(machine, layouts), Scene::of(machine, layouts));
            assert!(seen.shape.block_bytes() < 1300);
            let table = machine.upload(&[&list[..], &pairs(&[(0, 0)])].concat());
            let stream = &machine.stream;
            let right = copy_of(&expected, to_host, &table, &list);
            machine.kernels.copy_blocks(stream, right).unwrap();
            write_late(machine, seen.host.buffer());
            let used = link.copy_blocks(stream, copy_of(&seen, to_host, &table, &list)).unwrap();
            if carried && !list.is_empty() {
                assert_eq!(used, transport);
            } else {
                assert_eq!(used, Transport::DirectKernel);
            }
            assert!(
                seen.bytes(&machine.stream) == expected.bytes(&machine.stream),
                "{transport}, {to_host}"
            );
        }
    }
    machine.assert_clean();
}

#[test]
fn every_transport_gives_what_the_kernel_gives() {
    for seed in 0..4 {
        let machine = Machine::new(seed);
        for transport in Transport::ALL {
            check(&machine, transport, WHOLE);
        }
    }
}

#[test]
fn every_transport_carries_the_planes_of_blocks() {
    for seed in 0..2 {
        let machine = Machine::new(seed);
        for transport in Transport::ALL {
            PLANES.into_iter().for_each(|layouts| check(&machine, transport, layouts));
        }
    }
}

#[test]
fn blocks_that_are_not_in_one_piece_are_left_to_the_kernel() {
    let machine = Machine::new(1);
    for transport in Transport::ALL {
        APART.into_iter().for_each(|layouts| check(&machine, transport, layouts));
    }
}

#[test]
fn a_driver_without_batches_makes_each_copy_by_a_call() {
    let machine = Machine::new(2);
    machine.sim.fail_nth("cuMemcpyBatchAsync", 1, ErrorCode::NOT_SUPPORTED);
    check(&machine, Transport::CopyEngine, WHOLE);
    let calls = machine.sim.calls();
    assert_eq!(calls.get("cuMemcpyBatchAsync"), Some(&1), "asked once, and remembered");
    assert!(calls["cuMemcpyDtoHAsync"] > 20);
}

/// What belongs to two owners may touch on both sides: tensors that were allocated one after the other. A
/// driver refuses a copy of both at once.
#[test]
fn memory_of_two_owners_that_touches_is_copied_one_by_one() {
    for to_host in [true, false] {
        let machine = Machine::new(3);
        // No batches, so that each copy is a call.
        machine.sim.fail_nth("cuMemcpyBatchAsync", 1, ErrorCode::NOT_SUPPORTED);
        let copies = || {
            let calls = machine.sim.calls();
            let name = if to_host { "cuMemcpyDtoHAsync" } else { "cuMemcpyHtoDAsync" };
            calls.get(name).copied().unwrap_or(0)
        };
        let mut link = machine.link(Transport::CopyEngine);
        let pages = machine.upload(&noise(2 * 96, 3));
        let stream = &machine.stream;
        // A tensor for each layer, one behind the other in one allocation.
        let options = KvShapeOptions { layers: 2, kv_count: 1, row_bytes: 24, block_tokens: 4 };
        let shape = KvShape::new(options).unwrap();
        let rows = PagedLayout::block_major(&shape);
        let options = LayoutOptions {
            tensors: Tensors::PerLayer,
            layer_stride_bytes: 0,
            kv_stride_bytes: 0,
            block_stride_bytes: 96,
            parts: rows.parts_of(0),
        };
        let layout = PagedLayout::new(&shape, options).unwrap();
        let tensors = [0, 96].map(|start| pages.span().slice(start, 96).unwrap());
        let paged = PagedKv::over(stream, shape, layout, &tensors, 1).unwrap();
        let buffer = Arc::new(machine.pinned(&noise(2 * 96, 4)));
        let packed = paged.layout().packed(paged.shape());
        let host = HostBlocks::new(stream, *paged.shape(), packed, (buffer, 0), 1).unwrap();
        let (device, on_host) = (Blocks::Device(&paged), Blocks::Host(&host));
        let (from, to) = if to_host { (device, on_host) } else { (on_host, device) };
        let list = pairs(&[(0, 0)]);
        let table = machine.upload(&list);
        let copy = BlockCopy {
            from,
            to,
            pairs: table.span().into(),
            count: 1,
            host_pairs: Some(BlockPairs::new(&list).unwrap()),
            from_blocks: 1,
            to_blocks: 1,
            report: None,
            multiprocessors: None,
        };
        let before = copies();
        assert_eq!(link.copy_blocks(stream, copy), Ok(Transport::CopyEngine));
        assert_eq!(copies() - before, 2, "a block in two tensors");
        machine.assert_clean();
    }
}

/// A table on the device that has other blocks than the host's copy of it, in memory between guards: with
/// whatever blocks, nothing leaves the ring, the pages and the blocks that the host named.
#[test]
fn pairs_that_only_the_device_has_leave_neither_ring_nor_pages() {
    let list: Vec<_> = (0..9).map(|i| (i * 5 % 24, i + 12)).collect();
    let options =
        HostLinkOptions { ring_buffers: 2, ring_buffer_bytes: 1300, ..HostLinkOptions::default() };
    for references in [references(), &[]] {
        for to_host in [true, false] {
            let named = pairs(&list);
            let turned =
                |pair: &BlockPair| BlockPair { source: pair.destination, destination: pair.source };
            let named = if to_host { named } else { named.iter().map(turned).collect() };
            for other in [0, 11, 12, 20, 21, 23] {
                let machine = Machine::with(1, references);
                let before = machine.upload(&noise(1 << 15, 8));
                let scene = Scene::new(&machine, PagedLayout::block_major);
                let mut link = machine.link_with(Transport::TwoHop, options);
                let after = machine.upload(&noise(1 << 15, 9));
                // Both sides name blocks that are there, and others than the host was told.
                let on_device: Vec<_> = (named.iter().zip(0..))
                    .map(|(pair, i)| BlockPair {
                        source: if to_host { pair.source } else { block((other + i) % 24) },
                        destination: if to_host {
                            block((other + i) % 24)
                        } else {
                            pair.destination
                        },
                    })
                    .collect();
                let table = machine.upload(&on_device);
                let (pages, host) = scene.bytes(&machine.stream);
                let copy = copy_of(&scene, to_host, &table, &named);
                assert_eq!(link.copy_blocks(&machine.stream, copy), Ok(Transport::TwoHop));
                let (pages_after, host_after) = scene.bytes(&machine.stream);
                let what = format!("to host {to_host}, blocks from {other} on");
                for (guard, seed) in [(&before, 8), (&after, 9)] {
                    let mut seen = vec![0; 1 << 15];
                    machine.stream.download(&mut seen, guard.span()).unwrap();
                    assert!(seen == noise(1 << 15, seed), "{what}: other memory was written");
                }
                let block_bytes = scene.shape.block_bytes() as usize;
                let block =
                    |bytes: &[u8], id: usize| bytes[id * block_bytes..][..block_bytes].to_vec();
                for id in 0..BLOCKS as usize {
                    let (was, is) = match to_host {
                        true => (block(&host[16..], id), block(&host_after[16..], id)),
                        false => (block(&pages, id), block(&pages_after, id)),
                    };
                    // What the host named lies in the ring by its place there.
                    let pair = named.iter().find(|pair| pair.destination.index() == id);
                    let right = match pair {
                        Some(pair) if to_host => block(&pages, pair.source.index()),
                        Some(pair) => block(&host[16..], pair.source.index()),
                        None => was,
                    };
                    assert!(is == right, "{what}: block {id}");
                }
                let same = if to_host { pages == pages_after } else { host == host_after };
                assert!(same, "{what}: the source was written");
                machine.assert_clean();
            }
        }
    }
}
