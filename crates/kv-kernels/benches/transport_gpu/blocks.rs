//! Whole blocks between pages and a tier in pinned memory.

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, HostAllocFlags, PinnedBuffer};
use kv_kernels::{
    BlockCopy, BlockId, BlockPair, BlockPairs, Blocks, Direction, HostBlocks, KvShape,
    KvShapeOptions, PagedKv, PagedLayout, Slot, Transfer,
    link::{HostLinkOptions, Transport},
};

use super::{BOTH, Bench, KIB, MIB, shuffled};

impl Bench<'_> {
    pub(super) fn blocks(&self) {
        println!("whole blocks, scattered in the pages: GB/s down / up, back to back [alone]\n");
        println!(
            "| block | MiB | host's blocks | memcpy | chosen | direct kernel | copy engine | two hops |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        for kib in [4_u64, 16, 32, 64, 128, 512, 2048] {
            let lengths: &[u64] = if kib == 4 { &[8, 64, 256] } else { &[64] };
            // A simulated device has little memory, and time for few blocks.
            let (lengths, unit) = self.ways.either((lengths, MIB), (&[2][..], 16 * kib * KIB));
            for &length in lengths {
                for in_order in [true, false] {
                    let bytes = self.ways.either(length * unit, (length * unit).min(4 * MIB));
                    let tier = Tier::new(self, kib << 10, bytes, in_order);
                    self.block_row(&tier);
                }
            }
        }
        println!();
    }

    fn block_row(&self, tier: &Tier) {
        let bytes = tier.bytes;
        let repeats = if bytes > 64 * MIB { 2 } else { 6 };
        let rates = |seconds: [(f64, f64); 2]| {
            let rate = |s: f64| bytes as f64 / s / 1e9;
            let [(a, c), (b, d)] = seconds;
            format!("{:.1} / {:.1} [{:.1} / {:.1}]", rate(a), rate(b), rate(c), rate(d))
        };
        let mut cells = vec![rates(BOTH.map(|d| self.memcpy(bytes, repeats, d)))];
        let all = [None].into_iter().chain(Transport::ALL.map(Some));
        for transport in all {
            let is_slow = match transport {
                // A piece is of one run: each block would be one.
                Some(Transport::TwoHop) => !tier.in_order,
                Some(Transport::CopyEngine) => tier.count > 4096,
                _ => false,
            };
            if is_slow {
                cells.push("-".into());
                continue;
            }
            let mut link = self.link(transport, HostLinkOptions::default());
            let mut used = [Transport::DirectKernel; 2];
            let seconds = [0, 1].map(|up| {
                tier.way(self, &format!("blocks, {transport:?}"), up, repeats, || {
                    used[up] = link.copy_blocks(&self.stream, tier.copy(up)).unwrap();
                })
            });
            let cell = rates(seconds);
            cells.push(match transport {
                None => format!("{cell} ({} / {})", used[0], used[1]),
                Some(transport) if used[0] != transport => "-".into(),
                Some(_) => cell,
            });
        }
        let order = if tier.in_order { "in a row" } else { "scattered" };
        println!(
            "| {} KiB | {} | {order} | {} |",
            tier.block_bytes >> 10,
            bytes / MIB,
            cells.join(" | ")
        );
    }
}

/// Blocks in pages and in pinned memory, and which goes where.
struct Tier {
    block_bytes: u64,
    bytes: u64,
    count: u64,
    in_order: bool,
    paged: PagedKv,
    pages: DeviceBuffer,
    host: HostBlocks,
    places: Vec<u64>,
    pairs: [Vec<BlockPair>; 2],
    tables: [DeviceBuffer; 2],
    host_slots: Vec<Slot>,
    slots: DeviceBuffer,
}

impl Tier {
    fn new(bench: &Bench<'_>, block_bytes: u64, bytes: u64, in_order: bool) -> Self {
        let count = bytes / block_bytes;
        let options =
            KvShapeOptions { layers: 1, kv_count: 1, row_bytes: block_bytes, block_tokens: 1 };
        let shape = KvShape::new(options).unwrap();
        let layout = PagedLayout::block_major(&shape);
        let blocks = 2 * count;
        let pages = DeviceBuffer::alloc(&bench.device, blocks * block_bytes).unwrap();
        let stream = &bench.stream;
        let paged = PagedKv::new(stream, shape, layout, pages.span(), blocks).unwrap();
        let buffer = PinnedBuffer::alloc(&bench.device, bytes, HostAllocFlags::CACHED).unwrap();
        let host = HostBlocks::new(stream, shape, layout, (Arc::new(buffer), 0), count).unwrap();
        let ids = &shuffled(blocks)[..count as usize];
        let places = if in_order { (0..count).collect() } else { shuffled(count) };
        let pairs = [false, true].map(|up| {
            let block = |id| BlockId::new(id as u32).unwrap();
            let pair = |(&device, &host): (&u64, &u64)| {
                let (a, b) = if up { (host, device) } else { (device, host) };
                BlockPair { source: block(a), destination: block(b) }
            };
            ids.iter().zip(&places).map(pair).collect::<Vec<_>>()
        });
        let tables = [bench.upload(&pairs[0]), bench.upload(&pairs[1])];
        let host_slots: Vec<_> = ids.iter().map(|&id| Slot::from(id as u32)).collect();
        let slots = bench.upload(&host_slots);
        Self {
            block_bytes,
            bytes,
            count,
            in_order,
            paged,
            pages,
            host,
            places,
            pairs,
            tables,
            host_slots,
            slots,
        }
    }

    fn copy(&self, up: usize) -> BlockCopy<'_> {
        let (device, host) = (Blocks::Device(&self.paged), Blocks::Host(&self.host));
        let (from, to) = if up == 0 { (device, host) } else { (host, device) };
        BlockCopy {
            from,
            to,
            pairs: self.tables[up].span().into(),
            count: self.count,
            host_pairs: Some(BlockPairs::new(&self.pairs[up]).unwrap()),
            from_blocks: from.count(),
            to_blocks: to.count(),
            report: None,
            multiprocessors: None,
        }
    }

    fn on_device(&self, bench: &Bench<'_>, direction: Direction) {
        let transfer = Transfer {
            chunk: bench.chunk.span().slice(0, self.bytes).unwrap(),
            slot_mapping: self.slots.span(),
            host_slots: &self.host_slots,
            tokens: self.count,
            skip_prefix_n_tokens: 0,
            direction,
            num_blocks: self.paged.blocks(),
        };
        bench.kernels.multi_layer_transfer(&bench.stream, &self.paged, transfer).unwrap();
    }

    /// Times a way, down (0) or up (1), and holds it to its bytes.
    fn way(
        &self,
        bench: &Bench<'_>,
        name: &str,
        up: usize,
        repeats: u32,
        run: impl FnMut(),
    ) -> (f64, f64) {
        self.prepare(bench, up);
        let time = |run: &mut dyn FnMut()| bench.both_times(repeats, run);
        bench.ways.timed(&format!("{name}, up {up}"), run, time, || self.is_right(bench, up))
    }

    /// The host's memory with what is right for the blocks of the pages, each in its place.
    fn on_host(&self, bench: &Bench<'_>) -> Vec<u8> {
        let (size, mut host) = (self.block_bytes as usize, vec![0; self.bytes as usize]);
        for (block, &place) in bench.right(self.bytes).chunks(size).zip(&self.places) {
            host[place as usize * size..][..size].copy_from_slice(block);
        }
        host
    }

    /// Puts the blocks where the way reads them, and wipes where it writes.
    fn prepare(&self, bench: &Bench<'_>, up: usize) {
        let (stream, chunk) = (&bench.stream, bench.chunk.span().slice(0, self.bytes).unwrap());
        if up == 0 {
            stream.upload(chunk, bench.right(self.bytes)).unwrap();
            self.on_device(bench, Direction::ChunkToPaged);
            stream.fill(chunk, 0).unwrap();
        } else {
            stream.upload(chunk, &self.on_host(bench)).unwrap();
            stream.fill(self.pages.span(), 0).unwrap();
        }
        stream.copy_to_host(self.host.buffer(), 0, chunk).unwrap();
        stream.synchronize().unwrap();
    }

    fn is_right(&self, bench: &Bench<'_>, up: usize) -> bool {
        let (stream, chunk) = (&bench.stream, bench.chunk.span().slice(0, self.bytes).unwrap());
        if up == 0 {
            stream.synchronize().unwrap();
            let mut seen = vec![0; self.bytes as usize];
            self.host.buffer().read_at(0, &mut seen).unwrap();
            return seen == self.on_host(bench);
        }
        stream.fill(chunk, 0).unwrap();
        self.on_device(bench, Direction::PagedToChunk);
        bench.read(chunk) == bench.right(self.bytes)
    }
}
