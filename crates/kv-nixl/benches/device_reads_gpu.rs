//! What blocks from another process's device cost: found, pinned, read to this process's device, put in place, summed there and given
//! back, beside the same transfers by NIXL alone and beside a copy between the devices by the driver.
//!
//! `cargo bench -p kv-nixl --bench device_reads_gpu`, with `KV_NIXL_LIBRARY` as of the tests and UCX's variables as they are. The node
//! is on the first device, and the reader on the last one. Figures are medians of `KV_NIXL_BENCH_ROUNDS` rounds (25). Without a device
//! or the library it says so.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement ends by panicking")]

mod common;

use kv_pool::BlockId;
use std::sync::Arc;
use std::time::Duration;

use common::{LEASE, NODE, block, far};
use cuda_driver::{CudaDriver, Device, DeviceBuffer, Stream};
use kv_kernels::verify::BlockSums;
use kv_kernels::{KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout};
use kv_nixl::{Library, NixlDeviceMemory, NixlDeviceTransfer};
use kv_pool::clock::SystemClock;
use kv_remote::{Memory, Node, NodeOptions, Peer};

/// Tokens of a block, layers, and blocks of a request: 256 KiB to 8 MiB a block.
const SHAPES: [(u32, u32, u64); 5] =
    [(16, 4, 1), (16, 4, 64), (16, 32, 1), (16, 32, 64), (64, 32, 32)];

fn shape(block_tokens: u32, layers: u32) -> KvShape {
    KvShape::new(KvShapeOptions { layers, kv_count: 2, row_bytes: 2048, block_tokens }).unwrap()
}

fn open(ordinal: i32) -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), ordinal).map_err(|error| error.to_string())
}

fn main() {
    if let Ok(said) = std::env::var(NODE) {
        let (bytes, count) = said.split_once(' ').unwrap();
        serve(bytes.parse().unwrap(), count.parse().unwrap());
        return;
    }
    match (open(0), Library::open()) {
        (Ok(_), Ok(_)) => measure(),
        (device, library) => println!(
            "not measured: {}",
            device.err().or(library.err().map(|error| error.to_string())).unwrap_or_default()
        ),
    }
}

fn serve(bytes: u64, count: u64) {
    let room = (bytes + 64) * count;
    let memory = NixlDeviceMemory::new(&Library::open().unwrap(), &open(0).unwrap(), room).unwrap();
    let memory: Arc<dyn Memory> = Arc::new(memory);
    let options = NodeOptions::new("a", bytes);
    let node = Arc::new(Node::new(&options, memory, Arc::new(SystemClock::new())).unwrap());
    let blocks: Vec<_> = (0..count).map(|number| (block(number), bytes as u32)).collect();
    node.reserve(&blocks).unwrap().keep(&vec![0; blocks.len()]).unwrap();
    common::serve(node);
}

fn timed(run: impl FnMut()) -> Duration {
    common::timed(25, run)
}

fn measure() {
    let first = open(0).unwrap();
    let count = first.run(|driver| driver.device_get_count()).unwrap();
    let last = Device::open(Arc::clone(first.driver()), count - 1).unwrap();
    println!(
        "from device 0 to device {}, {}, UCX_TLS={}",
        count - 1,
        last.info().name,
        std::env::var("UCX_TLS").unwrap_or_default()
    );
    if count > 1 {
        last.enable_access_to(&first).unwrap();
    }
    println!(
        "{:>9} {:>6} {:>10} {:>10} {:>10} {:>12} {:>10} {:>11}",
        "bytes",
        "blocks",
        "whole GB/s",
        "read GB/s",
        "NIXL GB/s",
        "driver GB/s",
        "read/NIXL",
        "us/request"
    );
    for (tokens, layers, count) in SHAPES {
        row(&Reader::new(&last, shape(tokens, layers), count), &first, count);
    }
}

/// The reader's device, with room for the blocks of a request.
struct Reader {
    kernels: KvKernels,
    stream: Stream,
    pages: DeviceBuffer,
    paged: PagedKv,
    ids: Vec<BlockId>,
    device_ids: DeviceBuffer,
    sums: DeviceBuffer,
    bytes: u64,
}

impl Reader {
    fn new(device: &Device, shape: KvShape, count: u64) -> Self {
        let (stream, bytes) = (Stream::new(device).unwrap(), shape.block_bytes());
        let pages = DeviceBuffer::alloc(device, bytes * count).unwrap();
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&stream, shape, layout, pages.span(), count).unwrap();
        let ids: Vec<_> = (0..count as u32).filter_map(BlockId::new).collect();
        let device_ids = DeviceBuffer::alloc(device, count * 4).unwrap();
        let id_bytes: Vec<u8> = (0..count as u32).flat_map(u32::to_le_bytes).collect();
        stream.upload(device_ids.span(), &id_bytes).unwrap();
        let sums = DeviceBuffer::alloc(device, count * 8).unwrap();
        let kernels = KvKernels::load(device).unwrap();
        Self { kernels, stream, pages, paged, ids, device_ids, sums, bytes }
    }

    /// Reads blocks, puts them in place, and gives them back.
    fn read(&self, peer: &mut Peer, transfer: &mut NixlDeviceTransfer, is_summed: bool) {
        let wanted: Vec<_> = (0..self.ids.len() as u64).map(block).collect();
        let found = peer.find_and_pin(&wanted, LEASE, far()).unwrap();
        assert_eq!(found.blocks.len(), wanted.len());
        let mut place = |at, span| {
            let to = self.pages.span().slice(at as u64 * self.bytes, self.bytes).unwrap();
            self.stream.copy_on_device(to, span).unwrap();
        };
        transfer.read_each(peer, &found, far(), &mut place).unwrap();
        if is_summed {
            self.sum();
        } else {
            self.stream.synchronize().unwrap();
        }
        peer.end(found.lease.unwrap(), far()).unwrap();
    }

    fn sum(&self) {
        let args = BlockSums {
            blocks: (&self.paged).into(),
            ids: self.device_ids.span().into(),
            count: self.ids.len() as u64,
            host_ids: Some(&self.ids),
            num_blocks: self.ids.len() as u64,
            sums: self.sums.span(),
            report: None,
        };
        self.kernels.sum_blocks(&self.stream, args).unwrap();
        let mut found = vec![0; 8 * self.ids.len()];
        self.stream.download(&mut found, self.sums.span()).unwrap();
    }
}

fn row(reader: &Reader, first: &Device, count: u64) {
    let (bytes, stream) = (reader.bytes, &reader.stream);
    let (child, mut peer) = common::node(&format!("{bytes} {count}"));
    let mut transfer = NixlDeviceTransfer::new(Library::open().unwrap(), stream);
    let summed = timed(|| reader.read(&mut peer, &mut transfer, true));
    let read = timed(|| reader.read(&mut peer, &mut transfer, false));
    let wanted: Vec<_> = (0..count).map(block).collect();
    let found = peer.find_and_pin(&wanted, LEASE, far()).unwrap();
    // Nothing is done with what has come: this is NIXL's transfer and no more.
    let mut came = 0;
    let plain = timed(|| {
        transfer.read_each(&mut peer, &found, far(), &mut |_, _| came += 1).unwrap();
    });
    assert!(came as u64 >= count);
    peer.end(found.lease.unwrap(), far()).unwrap();
    let asked = timed(|| {
        let found = peer.find_and_pin(&wanted, LEASE, far()).unwrap();
        peer.end(found.lease.unwrap(), far()).unwrap();
    });
    let from = DeviceBuffer::alloc(first, bytes * count).unwrap();
    let to = (stream.device(), reader.pages.span());
    let driver = timed(|| {
        stream.copy_between(to, (first, from.span())).unwrap();
        stream.synchronize().unwrap();
    });
    let rate = |time: Duration| (bytes * count) as f64 / time.as_secs_f64() / 1e9;
    println!(
        "{bytes:>9} {count:>6} {:>10.1} {:>10.1} {:>10.1} {:>12.1} {:>10.2} {:>11.1}",
        rate(summed),
        rate(read),
        rate(plain),
        rate(driver),
        rate(read) / rate(plain),
        asked.as_secs_f64() * 1e6,
    );
    common::end(child);
}
