//! How fast the operations beside transfers are on a GPU, beside plain copies in the same run.
//!
//! `cargo bench -p kv-kernels --bench operations_gpu`, on a machine with a GPU of 12 GiB or more; names
//! of parts (`copies`, `host_copies`, `sums_and_appends`, `offsets`) after `--` choose. The
//! shape is that of an 8-billion-parameter model: 32 layers, keys and values, 8 heads of 128 16-bit
//! elements, blocks of 16 tokens. Each figure is the median of 7 timings by events. After its timings, every
//! byte that a way writes is compared with what the host foretells; `ways/mod.rs` says how to see that.
//!
//! "Of copy" is the rate of bytes that cross the memory bus, read and written, relative to that of a
//! copy within the device. Beside host memory it is relative to a copy of as many bytes by the copy
//! engine in the same direction.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]
#![allow(clippy::too_many_lines, reason = "one table a function")]

#[path = "ways/mod.rs"]
mod ways;

use std::process::ExitCode;
use std::sync::Arc;

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer, Stream};
use kv_kernels::{
    Append, BlockCopy, BlockId, BlockPair, BlockPairs, Blocks, HostBlocks, KvKernels, KvShape,
    KvShapeOptions, PagedKv, PagedLayout, Slot,
    verify::{BlockSums, block_sum},
};
pub(crate) use ways::Ways;
use ways::{all, noise, shuffled};

const SHAPE: KvShapeOptions =
    KvShapeOptions { layers: 32, kv_count: 2, row_bytes: 2048, block_tokens: 16 };

#[allow(dead_code, reason = "tests run it another way")]
fn main() -> ExitCode {
    // Cargo's own arguments begin with a dash.
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    match Ways::of_environment() {
        Ok(ways) => {
            measure(&ways, &wanted);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

type Part = fn(&Bench<'_>);

/// Measures the parts that are wanted, or all.
pub(crate) fn measure(ways: &Ways, wanted: &[String]) {
    println!("{}\n", ways.device.info().name);
    let bench = Bench::new(ways);
    let parts: [(&str, Part); 3] = [
        ("copies", |bench| bench.copies()),
        ("host_copies", |bench| bench.host_copies()),
        ("sums_and_appends", |bench| bench.sums_and_appends()),
    ];
    for (name, part) in parts {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            part(&bench);
        }
    }
}

struct Bench<'w> {
    ways: &'w Ways,
    device: Device,
    stream: Stream,
    kernels: KvKernels,
    /// What is read, what is written, and what the host is wiped from.
    pools: [DeviceBuffer; 3],
    /// The bytes of the first pool.
    image: Vec<u8>,
    moved_bytes: u64,
    host_bytes: u64,
    /// Bytes that a copy within the device reads and writes in a second.
    copied: f64,
}

/// A pool of blocks of a shape in a layout.
#[derive(Clone, Copy, Debug)]
enum Order {
    PageFirst,
    LayerFirst,
}

/// Where a row lies in a pool.
fn row_at(paged: &PagedKv, plane: u64, block: u64, token: u64) -> usize {
    let (layout, kv_count) = (paged.layout(), u64::from(paged.shape().kv_count()));
    (plane / kv_count * layout.options().layer_stride_bytes
        + plane % kv_count * layout.options().kv_stride_bytes
        + block * layout.options().block_stride_bytes
        + token * layout.parts_of(0)[0].token_stride_bytes) as usize
}

/// Whether `is_right` holds of every plane and token of every pair.
fn all_rows(
    shape: &KvShape,
    pairs: &[BlockPair],
    is_right: impl Fn(BlockPair, u64, u64) -> bool + Sync,
) -> bool {
    let tokens = u64::from(shape.block_tokens());
    all(pairs, |_, pair| {
        (0..shape.planes()).all(|plane| (0..tokens).all(|token| is_right(*pair, plane, token)))
    })
}

impl<'w> Bench<'w> {
    fn new(ways: &'w Ways) -> Self {
        let device = ways.device.clone();
        let stream = Stream::new(&device).unwrap();
        let kernels = KvKernels::load(&device).unwrap();
        let pool_bytes = ways.either(2 << 30, 4 << 20);
        let pools = [0, 1, 2].map(|_| DeviceBuffer::alloc(&device, pool_bytes).unwrap());
        let image = bytemuck::pod_collect_to_vec(&noise(pool_bytes / 8, 1));
        stream.upload(pools[0].span(), &image).unwrap();
        let (moved_bytes, host_bytes) =
            (ways.either(1 << 30, 2 << 20), ways.either(256 << 20, 1 << 20));
        let mut bench = Self {
            ways,
            device,
            stream,
            kernels,
            pools,
            image,
            moved_bytes,
            host_bytes,
            copied: 0.0,
        };
        let [from, to] = [0, 1].map(|n| bench.pools[n].span().slice(0, moved_bytes).unwrap());
        bench.wipe(to);
        let seconds = bench.timed(
            ("copy within the device", moved_bytes),
            || bench.stream.copy_on_device(to, from).unwrap(),
            || bench.read(to) == bench.image[..moved_bytes as usize],
        );
        bench.copied = 2.0 * moved_bytes as f64 / seconds;
        println!("copy within the device: {:.0} GB/s\n", bench.copied / 2e9);
        bench
    }

    fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        self.ways.upload(&self.stream, values)
    }

    fn read(&self, span: DeviceSpan) -> Vec<u8> {
        self.ways.download(&self.stream, span)
    }

    fn wipe(&self, span: DeviceSpan) {
        self.stream.fill(span, 0).unwrap();
        self.stream.synchronize().unwrap();
    }

    /// Seconds of one `run` over `bytes` bytes, of the timings, after which the bytes are looked at.
    fn timed(
        &self,
        (name, bytes): (&str, u64),
        run: impl FnMut(),
        is_right: impl Fn() -> bool,
    ) -> f64 {
        let repeats = ((2 << 30) / bytes).clamp(1, 100);
        let time = |run: &mut dyn FnMut()| self.ways.seconds(&self.stream, repeats, run);
        self.ways.timed(name, run, time, is_right)
    }

    fn pool(&self, number: usize, options: KvShapeOptions, order: Order) -> PagedKv {
        let layers = options.layers.min(self.ways.either(32, 2));
        let shape = KvShape::new(KvShapeOptions { layers, ..options }).unwrap();
        let pool = &self.pools[number];
        let blocks = pool.bytes() / shape.block_bytes();
        let layout = match order {
            Order::PageFirst => PagedLayout::block_major(&shape),
            Order::LayerFirst => PagedLayout::layer_major(&shape, blocks).unwrap(),
        };
        PagedKv::new(&self.stream, shape, layout, pool.span(), blocks).unwrap()
    }

    fn copies(&self) {
        println!("| copy_blocks | block | bytes in a piece | GB/s | of copy |");
        println!("|---|---|---|---|---|");
        use Order::{LayerFirst, PageFirst};
        let small = KvShapeOptions { layers: 1, kv_count: 1, row_bytes: 256, block_tokens: 16 };
        let narrow = KvShapeOptions { row_bytes: 256, ..SHAPE };
        let odd = KvShapeOptions { row_bytes: 132, ..small };
        for (options, from, to) in [
            (SHAPE, PageFirst, PageFirst),
            (SHAPE, LayerFirst, LayerFirst),
            (SHAPE, LayerFirst, PageFirst),
            (SHAPE, PageFirst, LayerFirst),
            (narrow, LayerFirst, PageFirst),
            (small, PageFirst, PageFirst),
            (odd, PageFirst, LayerFirst),
        ] {
            self.copy(&format!("{from:?} to {to:?}"), options, [from, to], None);
        }
        for few in [4, 8, 16] {
            let name = format!("LayerFirst to PageFirst, {few} multiprocessors");
            self.copy(&name, SHAPE, [LayerFirst, PageFirst], Some(few));
        }
        println!();
    }

    fn copy(
        &self,
        name: &str,
        options: KvShapeOptions,
        orders: [Order; 2],
        multiprocessors: Option<u32>,
    ) {
        let [from, to] = [0, 1].map(|n| self.pool(n, options, orders[n]));
        let block_bytes = from.shape().block_bytes();
        let count = (self.moved_bytes / block_bytes).min(from.blocks());
        let pairs = pairs(from.blocks(), to.blocks(), count);
        let device_pairs = self.upload(&pairs);
        let copy = BlockCopy {
            from: (&from).into(),
            to: (&to).into(),
            pairs: device_pairs.span().into(),
            count,
            // Checked once, and not in each timing: the figures are the card's.
            host_pairs: None,
            from_blocks: from.blocks(),
            to_blocks: to.blocks(),
            report: None,
            multiprocessors,
        };
        let bytes = count * block_bytes;
        let checked = BlockCopy { host_pairs: Some(BlockPairs::new(&pairs).unwrap()), ..copy };
        self.kernels.copy_blocks(&self.stream, checked).unwrap();
        self.wipe(self.pools[1].span());
        let row = options.row_bytes as usize;
        let enqueue = || self.kernels.copy_blocks(&self.stream, copy).unwrap();
        let seconds = self.timed((name, bytes), enqueue, || {
            let found = self.read(self.pools[1].span());
            all_rows(from.shape(), &pairs, |pair, plane, token| {
                let there = row_at(&to, plane, pair.destination.index() as u64, token);
                let here = row_at(&from, plane, pair.source.index() as u64, token);
                found[there..][..row] == self.image[here..][..row]
            })
        });
        println!(
            "| {name} | {} KiB | {} | {:.0} | {:.2} |",
            block_bytes >> 10,
            16 * row,
            bytes as f64 / seconds / 1e9,
            2.0 * bytes as f64 / seconds / self.copied
        );
    }

    fn host_copies(&self) {
        println!("| host memory by kernel | multiprocessors | GB/s | of the copy engine |");
        println!("|---|---|---|---|");
        let flags = HostAllocFlags::CACHED;
        let bytes = self.host_bytes;
        let buffer = Arc::new(PinnedBuffer::alloc(&self.device, bytes, flags).unwrap());
        let shape = *self.pool(0, SHAPE, Order::LayerFirst).shape();
        let blocks = bytes / shape.block_bytes();
        let layout = PagedLayout::block_major(&shape);
        let of = (Arc::clone(&buffer), 0);
        let host = HostBlocks::new(&self.stream, shape, layout, of, blocks).unwrap();
        // Of the pages' end: what is read goes to the host, and what comes back is written elsewhere.
        let [read, written] = [0, 1].map(|n| self.pools[n].span().slice(0, bytes).unwrap());
        let zeros = self.pools[2].span().slice(0, bytes).unwrap();
        self.wipe(zeros);
        let wipe_host = || {
            self.stream.copy_to_host(&buffer, 0, zeros).unwrap();
            self.stream.synchronize().unwrap();
        };
        let on_host = || {
            let mut found = vec![0; bytes as usize];
            buffer.read_at(0, &mut found).unwrap();
            found
        };
        let image = &self.image[..bytes as usize];
        wipe_host();
        let down = self.timed(
            ("copy to the host", bytes),
            || self.stream.copy_to_host(&buffer, 0, read).unwrap(),
            || on_host() == image,
        );
        self.wipe(written);
        let up = self.timed(
            ("copy from the host", bytes),
            || self.stream.copy_to_device(written, &buffer, 0).unwrap(),
            || self.read(written) == image,
        );
        for multiprocessors in self.ways.either(&[4, 8, 16, 32][..], &[4]) {
            for (to_host, engine) in [true, false].into_iter().zip([down, up]) {
                let device = self.pool(if to_host { 0 } else { 1 }, SHAPE, Order::LayerFirst);
                let [from, to]: [Blocks<'_>; 2] = match to_host {
                    true => [(&device).into(), (&host).into()],
                    false => [(&host).into(), (&device).into()],
                };
                let pairs = pairs(from.count(), to.count(), blocks);
                let device_pairs = self.upload(&pairs);
                let copy = BlockCopy {
                    from,
                    to,
                    pairs: device_pairs.span().into(),
                    count: blocks,
                    host_pairs: None,
                    from_blocks: from.count(),
                    to_blocks: to.count(),
                    report: None,
                    multiprocessors: Some(*multiprocessors),
                };
                if to_host {
                    wipe_host();
                } else {
                    self.stream.copy_to_host(&buffer, 0, read).unwrap();
                    self.wipe(self.pools[1].span());
                }
                let row = shape.row_bytes() as usize;
                let dense = |block: BlockId, plane: u64, token: u64| {
                    (block.index() as u64 * shape.block_bytes()
                        + plane * shape.block_plane_bytes()
                        + token * shape.row_bytes()) as usize
                };
                let name = if to_host { "to the host" } else { "from the host" };
                let seconds = self.timed(
                    (name, bytes),
                    || self.kernels.copy_blocks(&self.stream, copy).unwrap(),
                    || {
                        let found =
                            if to_host { on_host() } else { self.read(self.pools[1].span()) };
                        all_rows(&shape, &pairs, |pair, plane, token| {
                            let (there, here) = match to_host {
                                true => (
                                    dense(pair.destination, plane, token),
                                    row_at(&device, plane, pair.source.index() as u64, token),
                                ),
                                false => (
                                    row_at(&device, plane, pair.destination.index() as u64, token),
                                    dense(pair.source, plane, token),
                                ),
                            };
                            found[there..][..row] == self.image[here..][..row]
                        })
                    },
                );
                println!(
                    "| {name} | {multiprocessors} | {:.1} | {:.2} |",
                    bytes as f64 / seconds / 1e9,
                    engine / seconds
                );
            }
        }
        println!();
    }

    fn sums_and_appends(&self) {
        println!("| operation | GB/s | of copy |");
        println!("|---|---|---|");
        let line = |name: &str, seconds: f64, ways: f64| {
            let bytes = self.moved_bytes as f64;
            let of_copy = ways * bytes / seconds / self.copied;
            println!("| {name} | {:.0} | {of_copy:.2} |", bytes / seconds / 1e9);
        };
        for order in [Order::PageFirst, Order::LayerFirst] {
            let pool = self.pool(0, SHAPE, order);
            let count = self.moved_bytes / pool.shape().block_bytes();
            let host_ids: Vec<_> =
                pairs(pool.blocks(), count, count).iter().map(|p| p.source).collect();
            let ids = self.upload(&host_ids);
            let sums = DeviceBuffer::alloc(&self.device, count * 8).unwrap();
            let args = BlockSums {
                blocks: (&pool).into(),
                ids: ids.span().into(),
                count,
                host_ids: None,
                num_blocks: pool.blocks(),
                sums: sums.span(),
                report: None,
            };
            self.wipe(sums.span());
            let seconds = self.timed(
                ("sum_blocks", self.moved_bytes),
                || self.kernels.sum_blocks(&self.stream, args).unwrap(),
                || {
                    let found: Vec<u64> = bytemuck::pod_collect_to_vec(&self.read(sums.span()));
                    all(&host_ids, |n, id| {
                        let planes = 0..pool.shape().planes();
                        let plane = |plane| {
                            let at = row_at(&pool, plane, id.index() as u64, 0);
                            &self.image[at..][..pool.shape().block_plane_bytes() as usize]
                        };
                        let block: Vec<u8> = planes.flat_map(plane).copied().collect();
                        found[n] == block_sum(&block)
                    })
                },
            );
            line(&format!("sum_blocks, {order:?}"), seconds, 1.0);

            let tokens = self.moved_bytes / pool.shape().token_bytes();
            let host_slots: Vec<_> = (0..tokens as u32).rev().map(Slot::from).collect();
            let slots = self.upload(&host_slots);
            let half = self.moved_bytes / 2;
            let [keys, values] =
                [0, half].map(|at| self.pools[0].span().slice(at, half).unwrap().into());
            let pages = self.pool(1, SHAPE, order);
            let layers = pages.shape().layers();
            let append = Append {
                keys,
                values: Some(values),
                layer_stride_bytes: tokens * 2048,
                token_stride_bytes: 2048,
                first_layer: 0,
                layers,
                slot_mapping: slots.span().into(),
                host_slots: None,
                tokens,
                num_blocks: pages.blocks(),
                report: None,
            };
            self.wipe(self.pools[1].span());
            let seconds = self.timed(
                ("append", self.moved_bytes),
                || self.kernels.append(&self.stream, &pages, append).unwrap(),
                || {
                    let found = self.read(self.pools[1].span());
                    all(&host_slots, |token, slot| {
                        let (block, inside) = (slot.get() as u64 / 16, slot.get() as u64 % 16);
                        (0..pages.shape().planes()).all(|plane| {
                            let (layer, kv) = (plane / 2, plane % 2);
                            let here = kv * half + (layer * tokens + token as u64) * 2048;
                            let there = row_at(&pages, plane, block, inside);
                            found[there..][..2048] == self.image[here as usize..][..2048]
                        })
                    })
                },
            );
            line(&format!("append, {order:?}"), seconds, 2.0);
        }
        println!();
    }
}

/// Sources and destinations in random order, each once.
fn pairs(from: u64, to: u64, count: u64) -> Vec<BlockPair> {
    let (from, to) = (shuffled(from), shuffled(to));
    let block = |id| BlockId::new(id as u32).unwrap();
    let pair = |(source, destination)| BlockPair {
        source: block(source),
        destination: block(destination),
    };
    from.into_iter().zip(to).map(pair).take(count as usize).collect()
}
