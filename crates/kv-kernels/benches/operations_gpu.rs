//! How fast the operations beside transfers are on a GPU, beside plain copies in the same run.
//!
//! `cargo bench -p kv-kernels --bench operations_gpu`, on a machine with a GPU of 12 GiB or more; names
//! of parts (`copies`, `host_copies`, `conversions`, `sums_and_appends`, `offsets`) after `--` choose. The
//! shape is that of an 8-billion-parameter model: 32 layers, keys and values, 8 heads of 128 16-bit
//! elements, blocks of 16 tokens. Each figure is the median of 7 timings by events.
//!
//! "Of copy" is the rate of bytes that cross the memory bus, read and written, relative to that of a
//! copy within the device. Beside host memory it is relative to a copy of as many bytes by the copy
//! engine in the same direction.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::process::ExitCode;
use std::sync::Arc;

use bytemuck::NoUninit;
use cuda_driver::{CudaDriver, Device, DeviceBuffer, Event, HostAllocFlags, PinnedBuffer, Stream};
use kv_kernels::{
    Append, BlockCopy, BlockOffsets, BlockPair, BlockSums, Blocks, Conversion, HostBlocks,
    HostOffsets, KvKernels, KvShape, KvShapeOptions, NarrowFormat, PackedOffsets, PagedKv,
    PagedLayout, RowRange, ScalePer, WideFormat,
};

const SHAPE: KvShapeOptions =
    KvShapeOptions { layers: 32, kv_count: 2, row_bytes: 2048, block_tokens: 16 };
const POOL_BYTES: u64 = 2 << 30;
const MOVED_BYTES: u64 = 1 << 30;
const HOST_BYTES: u64 = 256 << 20;
const TIMINGS: usize = 7;

type Part = fn(&Bench);

fn main() -> ExitCode {
    let device = CudaDriver::load()
        .map_err(|error| error.to_string())
        .and_then(|driver| Device::open(Arc::new(driver), 0).map_err(|error| format!("{error:?}")));
    match device {
        Ok(device) => {
            println!("{}\n", device.info().name);
            let bench = Bench::new(&device);
            let parts: [(&str, Part); 5] = [
                ("copies", Bench::copies),
                ("host_copies", Bench::host_copies),
                ("conversions", Bench::conversions),
                ("sums_and_appends", Bench::sums_and_appends),
                ("offsets", Bench::offsets),
            ];
            // Cargo's own arguments begin with a dash.
            let wanted: Vec<String> =
                std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
            for (name, part) in parts {
                if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
                    part(&bench);
                }
            }
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

struct Bench {
    device: Device,
    stream: Stream,
    kernels: KvKernels,
    /// What a device without the newer instructions would run.
    baseline: KvKernels,
    pools: [DeviceBuffer; 2],
    /// Bytes that a copy within the device reads and writes in a second.
    copied: f64,
}

/// A pool of blocks of a shape in a layout.
#[derive(Clone, Copy, Debug)]
enum Order {
    PageFirst,
    LayerFirst,
}

impl Bench {
    fn new(device: &Device) -> Self {
        let stream = Stream::new(device).unwrap();
        let kernels = KvKernels::load(device).unwrap();
        let baseline = KvKernels::load_baseline(device).unwrap();
        let pools = [0, 1].map(|_| DeviceBuffer::alloc(device, POOL_BYTES).unwrap());
        for pool in &pools {
            stream.fill(pool.span(), 1).unwrap();
        }
        let mut bench =
            Self { device: device.clone(), stream, kernels, baseline, pools, copied: 0.0 };
        let [to, from] = [0, 1].map(|n| bench.pools[n].span().slice(0, MOVED_BYTES).unwrap());
        let seconds = bench.seconds(MOVED_BYTES, || bench.stream.copy_on_device(to, from).unwrap());
        bench.copied = 2.0 * MOVED_BYTES as f64 / seconds;
        println!("copy within the device: {:.0} GB/s\n", bench.copied / 2e9);
        bench
    }

    fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = DeviceBuffer::alloc(&self.device, bytes.len() as u64).unwrap();
        self.stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    fn pin<T: NoUninit>(&self, values: &[T]) -> PinnedBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let flags = HostAllocFlags::CACHED;
        let mut buffer = PinnedBuffer::alloc(&self.device, bytes.len() as u64, flags).unwrap();
        buffer.write_at(0, bytes).unwrap();
        buffer
    }

    /// Seconds of one `enqueue`: the median of the timings, each of as many as take a while.
    fn seconds(&self, bytes: u64, enqueue: impl Fn()) -> f64 {
        let repeats = ((2 << 30) / bytes).clamp(1, 100);
        let mut timings: Vec<f64> = (0..=TIMINGS)
            .map(|_| {
                let [start, end] = [0, 1].map(|_| Event::with_timing(&self.device).unwrap());
                start.record(&self.stream).unwrap();
                for _ in 0..repeats {
                    enqueue();
                }
                end.record(&self.stream).unwrap();
                end.synchronize().unwrap();
                f64::from(end.elapsed_ms_since(&start).unwrap()) / 1e3 / repeats as f64
            })
            .skip(1) // the first warms up
            .collect();
        timings.sort_by(f64::total_cmp);
        timings[TIMINGS / 2]
    }

    fn pool(&self, number: usize, options: KvShapeOptions, order: Order) -> PagedKv {
        let shape = KvShape::new(options).unwrap();
        let blocks = POOL_BYTES / shape.block_bytes();
        let layout = match order {
            Order::PageFirst => PagedLayout::block_major(&shape),
            Order::LayerFirst => PagedLayout::layer_major(&shape, blocks).unwrap(),
        };
        PagedKv::new(&self.stream, shape, layout, self.pools[number].span(), blocks).unwrap()
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
            let row = options.row_bytes;
            let whole = RowRange { from_byte: 0, to_byte: 0, bytes: row };
            self.copy(&format!("{from:?} to {to:?}"), [options; 2], [from, to], (whole, None));
        }
        // Two of eight heads of 256 bytes, to a shard that has two.
        let shard = KvShapeOptions { row_bytes: 512, ..SHAPE };
        let heads = RowRange { from_byte: 1024, to_byte: 0, bytes: 512 };
        self.copy("2 of 8 heads", [SHAPE, shard], [LayerFirst, LayerFirst], (heads, None));
        let whole = RowRange { from_byte: 0, to_byte: 0, bytes: SHAPE.row_bytes };
        for few in [4, 8, 16] {
            let name = format!("LayerFirst to PageFirst, {few} multiprocessors");
            self.copy(&name, [SHAPE; 2], [LayerFirst, PageFirst], (whole, Some(few)));
        }
        println!();
    }

    fn copy(
        &self,
        name: &str,
        shapes: [KvShapeOptions; 2],
        orders: [Order; 2],
        (rows, multiprocessors): (RowRange, Option<u32>),
    ) {
        let [from, to] = [0, 1].map(|n| self.pool(n, shapes[n], orders[n]));
        let block_bytes = from.shape().block_bytes() / from.shape().row_bytes() * rows.bytes;
        let count = (MOVED_BYTES / block_bytes).min(from.blocks());
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
        let checked = BlockCopy { host_pairs: Some(&pairs), ..copy };
        self.kernels.copy_block_rows(&self.stream, checked, rows).unwrap();
        let seconds = self.seconds(bytes, || {
            self.kernels.copy_block_rows(&self.stream, copy, rows).unwrap();
        });
        let piece = rows.bytes * if rows.bytes == from.shape().row_bytes() { 16 } else { 1 };
        println!(
            "| {name} | {} KiB | {piece} | {:.0} | {:.2} |",
            block_bytes >> 10,
            bytes as f64 / seconds / 1e9,
            2.0 * bytes as f64 / seconds / self.copied
        );
    }

    fn host_copies(&self) {
        println!("| host memory by kernel | multiprocessors | GB/s | of the copy engine |");
        println!("|---|---|---|---|");
        let device = self.pool(0, SHAPE, Order::LayerFirst);
        let shape = *device.shape();
        let blocks = HOST_BYTES / shape.block_bytes();
        let flags = HostAllocFlags::CACHED;
        let buffer = Arc::new(PinnedBuffer::alloc(&self.device, HOST_BYTES, flags).unwrap());
        let layout = PagedLayout::block_major(&shape);
        let of = (Arc::clone(&buffer), 0);
        let host = HostBlocks::new(&self.stream, shape, layout, of, blocks).unwrap();
        let span = self.pools[1].span().slice(0, HOST_BYTES).unwrap();
        let engine = [
            self.seconds(HOST_BYTES, || self.stream.copy_to_host(&buffer, 0, span).unwrap()),
            self.seconds(HOST_BYTES, || self.stream.copy_to_device(span, &buffer, 0).unwrap()),
        ];
        for multiprocessors in [4, 8, 16, 32] {
            for (to_host, engine) in [true, false].into_iter().zip(engine) {
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
                    multiprocessors: Some(multiprocessors),
                };
                let seconds = self.seconds(HOST_BYTES, || {
                    self.kernels.copy_blocks(&self.stream, copy).unwrap();
                });
                println!(
                    "| {} | {multiprocessors} | {:.1} | {:.2} |",
                    if to_host { "to the host" } else { "from the host" },
                    HOST_BYTES as f64 / seconds / 1e9,
                    engine / seconds
                );
            }
        }
        println!();
    }

    fn conversions(&self) {
        println!("| conversion | scales per | GB/s of 16-bit elements | of copy | baseline |");
        println!("|---|---|---|---|---|");
        let narrow_shape = KvShapeOptions { row_bytes: 1024, ..SHAPE };
        let [wide, narrow] =
            [(0, SHAPE), (1, narrow_shape)].map(|(n, s)| self.pool(n, s, Order::LayerFirst));
        let count = MOVED_BYTES / wide.shape().block_bytes();
        let device_pairs = self.upload(&pairs(wide.blocks(), wide.blocks(), count));
        let planes_of_scales = narrow.shape().planes() * narrow.slots() * 8;
        let scales = self.upload(&vec![0.5f32; planes_of_scales as usize]);
        for per in [ScalePer::Head, ScalePer::Block, ScalePer::TokenHead] {
            for format in [NarrowFormat::E4m3, NarrowFormat::E5m2, NarrowFormat::Int8] {
                let conversion = Conversion {
                    from: (&wide).into(),
                    to: (&narrow).into(),
                    wide: WideFormat::Bf16,
                    narrow: format,
                    head_size: 128,
                    scales: scales.span(),
                    per,
                    pairs: device_pairs.span().into(),
                    count,
                    host_pairs: None,
                    from_blocks: wide.blocks(),
                    to_blocks: narrow.blocks(),
                    report: None,
                };
                let back = Conversion { from: (&narrow).into(), to: (&wide).into(), ..conversion };
                let back =
                    Conversion { from_blocks: narrow.blocks(), to_blocks: wide.blocks(), ..back };
                // Bytes that cross the bus for each of the 16-bit elements.
                let line = |name: &str, ways: f64, run: &dyn Fn(&KvKernels)| {
                    let kernels = [&self.kernels, &self.baseline];
                    let seconds = kernels.map(|kernels| self.seconds(MOVED_BYTES, || run(kernels)));
                    let bytes = MOVED_BYTES as f64;
                    let [of_copy, baseline] =
                        seconds.map(|seconds| ways * bytes / seconds / self.copied);
                    println!(
                        "| {name} {format:?} | {per:?} | {:.0} | {of_copy:.2} | {baseline:.2} |",
                        bytes / seconds[0] / 1e9
                    );
                };
                line("bf16 to", 1.5, &|kernels| {
                    kernels.quantize_blocks(&self.stream, conversion).unwrap();
                });
                line("bf16 from", 1.5, &|kernels| {
                    kernels.dequantize_blocks(&self.stream, back).unwrap();
                });
                if per.is_of_block() {
                    line("measure for", 1.0, &|kernels| {
                        kernels.measure_scales(&self.stream, conversion).unwrap();
                    });
                }
            }
        }
        println!();
    }

    fn sums_and_appends(&self) {
        println!("| operation | GB/s | of copy |");
        println!("|---|---|---|");
        let line = |name: &str, seconds: f64, ways: f64| {
            let bytes = MOVED_BYTES as f64;
            let of_copy = ways * bytes / seconds / self.copied;
            println!("| {name} | {:.0} | {of_copy:.2} |", bytes / seconds / 1e9);
        };
        for order in [Order::PageFirst, Order::LayerFirst] {
            let pool = self.pool(0, SHAPE, order);
            let count = MOVED_BYTES / pool.shape().block_bytes();
            let ids: Vec<i32> =
                pairs(pool.blocks(), count, count).iter().map(|p| p.source).collect();
            let ids = self.upload(&ids);
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
            let seconds =
                self.seconds(MOVED_BYTES, || self.kernels.sum_blocks(&self.stream, args).unwrap());
            line(&format!("sum_blocks, {order:?}"), seconds, 1.0);

            let tokens = MOVED_BYTES / pool.shape().token_bytes();
            let slots: Vec<i64> = (0..tokens as i64).rev().collect();
            let slots = self.upload(&slots);
            let half = MOVED_BYTES / 2;
            let [keys, values] =
                [0, half].map(|at| self.pools[1].span().slice(at, half).unwrap().into());
            let append = Append {
                keys,
                values: Some(values),
                layer_stride_bytes: tokens * 2048,
                token_stride_bytes: 2048,
                first_layer: 0,
                layers: 32,
                slot_mapping: slots.span().into(),
                host_slots: None,
                tokens,
                num_blocks: pool.blocks(),
                report: None,
            };
            let seconds = self
                .seconds(MOVED_BYTES, || self.kernels.append(&self.stream, &pool, append).unwrap());
            line(&format!("append, {order:?}"), seconds, 2.0);
        }
        println!();
    }

    fn offsets(&self) {
        println!("| offsets of 256 rows of 2048 columns | live | microseconds |");
        println!("|---|---|---|");
        let (rows, width, pools) = (256u32, 2048u32, 1u32);
        let table: Vec<i32> = (0..(rows * 2 * width) as i32).collect();
        let index: Vec<u32> = (0..rows).rev().collect();
        let out = DeviceBuffer::alloc(&self.device, u64::from(rows * 2 * width) * 4).unwrap();
        let (pinned, pinned_index) = (self.pin(&table), self.pin(&index));
        let (scales, offsets) = (self.upload(&[64i32]), self.upload(&[32i32]));
        for columns in [2048u32, 256, 32] {
            let live = vec![columns; rows as usize];
            let pinned_live = self.pin(&live);
            let gather = BlockOffsets {
                source: pinned.span(0, pinned.bytes()).unwrap().into(),
                pool_stride: u64::from(rows * 2 * width),
                row_stride: u64::from(2 * width),
                row_index: Some(pinned_index.span(0, pinned_index.bytes()).unwrap().into()),
                host_index: None,
                live: Some(pinned_live.span(0, pinned_live.bytes()).unwrap().into()),
                scales: scales.span().into(),
                offsets: offsets.span().into(),
                out: out.span(),
                out_rows: rows,
                pools,
                rows,
                width,
                report: None,
            };
            let by_kernel = self.seconds(1 << 25, || {
                self.kernels.gather_block_offsets(&self.stream, gather).unwrap();
            });
            let on_host = HostOffsets {
                source: &table,
                pool_stride: (rows * 2 * width) as usize,
                row_stride: (2 * width) as usize,
                row_index: &index,
                live: Some(&live),
                scales: &[64],
                offsets: &[32],
                width: width as usize,
            };
            let packed = PackedOffsets::new(&on_host).unwrap();
            let mut staged = vec![0; packed.entries()];
            packed.pack(&on_host, &mut staged).unwrap();
            let (staged, arrived) = (self.pin(&staged), self.upload(&staged));
            let unpack = packed.on_device(arrived.span(), out.span(), (rows, width)).unwrap();
            let by_copy = self.seconds(1 << 25, || {
                self.stream.copy_to_device(arrived.span(), &staged, 0).unwrap();
                self.kernels.gather_block_offsets(&self.stream, unpack).unwrap();
            });
            println!("| kernel reads pinned rows | {columns} | {:.1} |", by_kernel * 1e6);
            println!("| packed on the host, copied, unpacked | {columns} | {:.1} |", by_copy * 1e6);
        }
    }
}

/// Sources and destinations in random order, each once.
fn pairs(from: u64, to: u64, count: u64) -> Vec<BlockPair> {
    let (from, to) = (shuffled(from as i32), shuffled(to as i32));
    let pair = |(source, destination)| BlockPair { source, destination };
    from.into_iter().zip(to).map(pair).take(count as usize).collect()
}

fn shuffled(count: i32) -> Vec<i32> {
    let mut values: Vec<i32> = (0..count).collect();
    let mut random = 1u64;
    for i in (1..values.len()).rev() {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        values.swap(i, (random >> 33) as usize % (i + 1));
    }
    values
}
