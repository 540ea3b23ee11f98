//! How fast KV moves between pages and chunks, on the device and in pinned host memory, beside memcpy
//! of as many bytes in the same run.
//!
//! `cargo bench -p kv-kernels --bench transport_gpu [-- MEASUREMENT...]`, on a machine with a GPU of
//! 12 GiB or more. Measurements: `device`, `host`, `sequences`, `blocks`, `layers` and `product`; all without
//! one.
//! `product` needs cuBLAS: `KV_CUBLAS=/path/to/libcublas.so` names it, and without it that is left out.
//! Every way is checked, byte by byte, before it is timed (of blocks up to 64 MiB of them). Each figure is the median of 7.
//!
//! "Back to back" is the time of one of several transfers enqueued one after the other, by events;
//! "alone" is the host's time from before the call until the stream is idle.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod blocks;
mod product;
mod sequences;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::NoUninit;
use cuda_driver::{CudaDriver, Device, DeviceBuffer, Event, HostAllocFlags, PinnedBuffer, Stream};
use kv_kernels::{
    Direction, FormatOptions, HostLink, HostLinkOptions, HostTransfer, KvFormat, KvKernels,
    LayerEvents, MeasureOptions, PagedKv, Transfer, Transport, TransportProfile,
};

const TIMINGS: usize = 7;
const MIB: u64 = 1 << 20;

fn main() -> ExitCode {
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|arg| arg == name);
    let device = match open() {
        Ok(device) => device,
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}\n", device.info().name);
    let bench = Bench::new(&device);
    println!("profile, measured:\n```\n{}```\n", bench.profile);
    if wants("device") {
        bench.device_chunks();
    }
    if wants("host") {
        bench.host_chunks();
    }
    if wants("sequences") {
        bench.sequences();
    }
    if wants("blocks") {
        bench.blocks();
    }
    if wants("layers") {
        bench.layers();
    }
    if wants("product") {
        bench.products();
    }
    ExitCode::SUCCESS
}

fn open() -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), 0).map_err(|error| format!("{error}: {error:?}"))
}

/// A shape that other programs' figures are compared on.
struct Shape {
    name: &'static str,
    format: KvFormat,
    layers: u32,
    heads: u32,
    head_bytes: u64,
    block_tokens: u32,
    blocks: u64,
}

const SHAPES: [Shape; 4] = [
    Shape {
        name: "8B: 32 layers, 1,024 wide",
        format: KvFormat::FlashAttentionNhd,
        layers: 32,
        heads: 8,
        head_bytes: 256,
        block_tokens: 16,
        blocks: 1024,
    },
    Shape {
        name: "70B at TP8: 80 layers, 128 wide",
        format: KvFormat::FlashAttentionNhd,
        layers: 80,
        heads: 1,
        head_bytes: 256,
        block_tokens: 16,
        blocks: 2048,
    },
    Shape {
        name: "MLA: 61 layers, 576 wide",
        format: KvFormat::Mla,
        layers: 61,
        heads: 1,
        head_bytes: 1152,
        block_tokens: 64,
        blocks: 256,
    },
    Shape {
        name: "8B, heads first",
        format: KvFormat::FlashAttentionHnd,
        layers: 32,
        heads: 8,
        head_bytes: 256,
        block_tokens: 16,
        blocks: 1024,
    },
];

/// The plain kernel of the comparison: a block of threads for each token, words of 16 bytes, one at a
/// time in each thread. Pages `[plane][block][token][row]`, rows whole.
const PLAIN_PTX: &str = include_str!("plain.compute_80.ptx");

struct Bench {
    device: Device,
    stream: Stream,
    kernels: Arc<KvKernels>,
    profile: TransportProfile,
    host: PinnedBuffer,
    chunk: DeviceBuffer,
    plain: cuda_driver::Kernel,
    /// As many words as the longest chunk has, and some.
    noise: Vec<u64>,
}

/// Pages of a shape with some tokens in them.
struct Scene {
    paged: PagedKv,
    tensors: Vec<DeviceBuffer>,
    planes: DeviceBuffer,
    host_slots: Vec<i64>,
    slots: DeviceBuffer,
    tokens: u64,
    bytes: u64,
}

impl Bench {
    fn new(device: &Device) -> Self {
        let stream = Stream::new(device).unwrap();
        let kernels = Arc::new(KvKernels::load(device).unwrap());
        let profile = TransportProfile::measure(&kernels, &MeasureOptions::default()).unwrap();
        let host = PinnedBuffer::alloc(device, 272 * MIB, HostAllocFlags::CACHED).unwrap();
        let chunk = DeviceBuffer::alloc(device, 272 * MIB).unwrap();
        let plain = cuda_driver::Module::load(device, PLAIN_PTX).unwrap();
        let plain = plain.kernel("plain_transfer").unwrap();
        let noise = (0..(256 * MIB) / 8 + 64).map(mix).collect();
        Self { device: device.clone(), stream, kernels, profile, host, chunk, plain, noise }
    }

    fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = DeviceBuffer::alloc(&self.device, bytes.len() as u64).unwrap();
        self.stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    fn link(&self, transport: Option<Transport>, options: HostLinkOptions) -> HostLink {
        let link = HostLink::new(Arc::clone(&self.kernels), options).unwrap();
        let profile = match transport {
            Some(transport) => self.profile.clone().forced(transport),
            None => self.profile.clone(),
        };
        link.with_profile(profile)
    }

    fn scene(&self, shape: &Shape, tokens: u64) -> Scene {
        let options = FormatOptions {
            layers: shape.layers,
            heads: shape.heads,
            head_bytes: shape.head_bytes,
            block_tokens: shape.block_tokens,
            blocks: shape.blocks,
            block_padding_bytes: 0,
        };
        let kv_shape = shape.format.shape(&options).unwrap();
        let layout = shape.format.layout(&options).unwrap();
        let extent = layout.extent_bytes(&kv_shape, shape.blocks).unwrap();
        let tensors: Vec<DeviceBuffer> = (0..layout.tensors().count(&kv_shape))
            .map(|_| DeviceBuffer::alloc(&self.device, extent).unwrap())
            .collect();
        let spans: Vec<_> = tensors.iter().map(DeviceBuffer::span).collect();
        let blocks = shape.blocks;
        let paged = PagedKv::over(&self.stream, kv_shape, layout, &spans, blocks).unwrap();
        // Planes in the order of the chunk, for the plain kernel, where tensors are one a layer.
        let planes: Vec<u64> = (0..u64::from(kv_shape.kv_count()))
            .flat_map(|kv| tensors.iter().map(move |t| (kv, t.address())))
            .map(|(kv, address)| address + kv * layout.kv_stride_bytes())
            .collect();
        let ids = shuffled(blocks);
        let block_tokens = u64::from(shape.block_tokens);
        let host_slots: Vec<i64> = (0..tokens)
            .map(|t| (ids[(t / block_tokens) as usize] * block_tokens + t % block_tokens) as i64)
            .collect();
        Scene {
            paged,
            tensors,
            planes: self.upload(&planes),
            slots: self.upload(&host_slots),
            host_slots,
            tokens,
            bytes: tokens * kv_shape.token_bytes(),
        }
    }

    /// Seconds of one of `repeats` enqueued back to back, by events.
    fn back_to_back(&self, repeats: u32, mut enqueue: impl FnMut()) -> f64 {
        let timer = || Event::with_timing(&self.device).unwrap();
        median(|| {
            let (start, end) = (timer(), timer());
            start.record(&self.stream).unwrap();
            for _ in 0..repeats {
                enqueue();
            }
            end.record(&self.stream).unwrap();
            end.synchronize().unwrap();
            f64::from(end.elapsed_ms_since(&start).unwrap()) / 1e3 / f64::from(repeats)
        })
    }

    /// Seconds from before the call until the stream is idle.
    fn alone(&self, mut enqueue: impl FnMut()) -> f64 {
        median(|| {
            self.stream.synchronize().unwrap();
            let begun = Instant::now();
            enqueue();
            self.stream.synchronize().unwrap();
            begun.elapsed().as_secs_f64()
        })
    }

    /// Writes noise to the pages, or what the chunk will be compared with.
    fn fill(&self, scene: &Scene, seed: u64) {
        // The chunk on the device takes the noise into the pages.
        let words = &self.noise[seed as usize..][..(scene.bytes / 8) as usize];
        let bytes = bytemuck::cast_slice::<u64, u8>(words);
        self.stream.upload(self.chunk.span().slice(0, scene.bytes).unwrap(), bytes).unwrap();
        self.on_device(scene, Direction::ChunkToPaged);
        self.stream.synchronize().unwrap();
    }

    fn on_device(&self, scene: &Scene, direction: Direction) {
        let transfer = Transfer {
            chunk: self.chunk.span().slice(0, scene.bytes).unwrap(),
            slot_mapping: scene.slots.span(),
            host_slots: &scene.host_slots,
            tokens: scene.tokens,
            skip_prefix_n_tokens: 0,
            direction,
            num_blocks: scene.paged.blocks(),
        };
        self.kernels.multi_layer_transfer(&self.stream, &scene.paged, transfer).unwrap();
    }

    fn host_transfer<'a>(
        &'a self,
        scene: &'a Scene,
        direction: Direction,
        layer_events: Option<&'a LayerEvents>,
    ) -> HostTransfer<'a> {
        HostTransfer {
            paged: &scene.paged,
            host: &self.host,
            host_offset: 0,
            slot_mapping: scene.slots.span(),
            host_slots: &scene.host_slots,
            tokens: scene.tokens,
            skip_prefix_n_tokens: 0,
            direction,
            num_blocks: scene.paged.blocks(),
            layer_events,
        }
    }

    fn plain(&self, scene: &Scene, chunk: u64, direction: Direction) {
        let shape = scene.paged.shape();
        let args = cuda_driver::KernelArgs::new()
            .arg(chunk)
            .arg(scene.planes.address())
            .arg(scene.slots.address())
            .arg(scene.tokens)
            .arg(shape.planes())
            .arg(shape.row_bytes())
            .arg(u64::from(direction == Direction::ChunkToPaged));
        let config = cuda_driver::LaunchConfig::linear(scene.tokens as u32, 256);
        // SAFETY: the arguments are those of `plain.cu`; slots lie in the pages, and the chunk has all
        // tokens of all planes. Nobody accesses host memory meanwhile.
        unsafe { self.plain.launch(&self.stream, &config, &args) }.unwrap();
    }

    /// A plain copy of as many bytes: within the device, or over the link in a direction.
    fn memcpy(&self, bytes: u64, direction: Option<Direction>, other: &DeviceBuffer) {
        let chunk = self.chunk.span().slice(0, bytes).unwrap();
        match direction {
            None => {
                let source = other.span().slice(0, bytes.min(other.bytes())).unwrap();
                let parts = bytes.div_ceil(source.bytes());
                assert_eq!(parts, 1, "one copy");
                self.stream.copy_on_device(chunk, source).unwrap();
            }
            Some(Direction::PagedToChunk) => {
                self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
            }
            Some(Direction::ChunkToPaged) => {
                self.stream.copy_to_device(chunk, &self.host, 0).unwrap();
            }
        }
    }

    fn device_chunks(&self) {
        println!("chunks in device memory: GB/s read and written, and the share of memcpy\n");
        println!(
            "| shape | tokens | MiB | memcpy | to chunk | to pages | plain kernel, to chunk | to pages |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        let other = DeviceBuffer::alloc(&self.device, 272 * MIB).unwrap();
        for shape in &SHAPES {
            for tokens in [256, 2048] {
                let scene = self.scene(shape, tokens);
                self.check(&scene, "device", Direction::PagedToChunk, || {
                    self.on_device(&scene, Direction::PagedToChunk);
                });
                let repeats = if tokens == 256 { 20 } else { 5 };
                let copy = self.back_to_back(repeats, || self.memcpy(scene.bytes, None, &other));
                let cells: Vec<String> = [Direction::PagedToChunk, Direction::ChunkToPaged]
                    .into_iter()
                    .map(|d| {
                        cell(
                            2 * scene.bytes,
                            copy,
                            self.back_to_back(repeats, || self.on_device(&scene, d)),
                        )
                    })
                    .chain([Direction::PagedToChunk, Direction::ChunkToPaged].map(|d| {
                        if shape.format == KvFormat::FlashAttentionHnd {
                            return "-".into();
                        }
                        let chunk = self.chunk.address();
                        let seconds = self.back_to_back(repeats, || self.plain(&scene, chunk, d));
                        cell(2 * scene.bytes, copy, seconds)
                    }))
                    .collect();
                println!(
                    "| {} | {tokens} | {} | {:.0} | {} |",
                    shape.name,
                    scene.bytes / MIB,
                    2.0 * scene.bytes as f64 / copy / 1e9,
                    cells.join(" | ")
                );
            }
        }
        println!();
    }

    /// Holds a way from or to the pages to the bytes that must come out.
    fn check(&self, scene: &Scene, name: &str, direction: Direction, run: impl FnOnce()) {
        self.fill(scene, 1);
        let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
        let mut right = vec![0; scene.bytes as usize];
        self.stream.download(&mut right, chunk).unwrap();
        let mut seen = vec![0; scene.bytes as usize];
        match (name, direction) {
            ("device", _) => {
                self.stream.fill(chunk, 0).unwrap();
                run();
                self.stream.download(&mut seen, chunk).unwrap();
            }
            (_, Direction::PagedToChunk) => {
                self.stream.fill(chunk, 0).unwrap();
                self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
                run();
                self.stream.synchronize().unwrap();
                self.host.read_at(0, &mut seen).unwrap();
            }
            (_, Direction::ChunkToPaged) => {
                // The host has the bytes, the pages are wiped.
                self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
                for tensor in &scene.tensors {
                    self.stream.fill(tensor.span(), 0).unwrap();
                }
                run();
                self.stream.fill(chunk, 0).unwrap();
                self.on_device(scene, Direction::PagedToChunk);
                self.stream.download(&mut seen, chunk).unwrap();
            }
        }
        assert!(seen == right, "{name} {direction:?}: wrong bytes");
    }

    fn host_chunks(&self) {
        println!(
            "chunks in pinned memory, 8 multiprocessors at most: GB/s, and the share of memcpy\n"
        );
        println!("| shape | tokens | MiB | way | down | up | down, alone | up, alone |");
        println!("|---|---|---|---|---|---|---|---|");
        let other = DeviceBuffer::alloc(&self.device, MIB).unwrap();
        for shape in &SHAPES {
            for tokens in [256, 2048] {
                let scene = self.scene(shape, tokens);
                let repeats = if tokens == 256 { 6 } else { 3 };
                let both = [Direction::PagedToChunk, Direction::ChunkToPaged];
                let copies = both.map(|d| {
                    (
                        self.back_to_back(repeats, || self.memcpy(scene.bytes, Some(d), &other)),
                        self.alone(|| self.memcpy(scene.bytes, Some(d), &other)),
                    )
                });
                let row = |name: &str, seconds: [(f64, f64); 2]| {
                    let mut cells = Vec::new();
                    for (s, c) in seconds.iter().zip(&copies) {
                        cells.push(cell(scene.bytes, c.0, s.0));
                    }
                    for (s, c) in seconds.iter().zip(&copies) {
                        cells.push(cell(scene.bytes, c.1, s.1));
                    }
                    let (name, mib) = (name.to_owned(), scene.bytes / MIB);
                    println!(
                        "| {} | {tokens} | {mib} | {name} | {} |",
                        shape.name,
                        cells.join(" | ")
                    );
                };
                row("memcpy", copies);
                if shape.format != KvFormat::FlashAttentionHnd {
                    let chunk = self.host.device_address();
                    row(
                        "plain kernel, all multiprocessors",
                        both.map(|d| {
                            let plain = || self.plain(&scene, chunk, d);
                            (self.back_to_back(repeats, plain), self.alone(plain))
                        }),
                    );
                }
                self.ways(&scene, repeats, row);
            }
        }
        println!();
    }

    fn ways(&self, scene: &Scene, repeats: u32, row: impl Fn(&str, [(f64, f64); 2])) {
        let both = [Direction::PagedToChunk, Direction::ChunkToPaged];
        let options = HostLinkOptions::default();
        let long = HostLinkOptions { slot_bytes: 24 << 20, ..options };
        let ways = [
            ("chosen", None, options),
            ("direct kernel", Some(Transport::DirectKernel), options),
            ("two hops", Some(Transport::TwoHop), options),
            ("two hops, slots of 24 MiB", Some(Transport::TwoHop), long),
        ];
        for (name, transport, options) in ways {
            let mut link = self.link(transport, options);
            let mut used = Transport::DirectKernel;
            let seconds = both.map(|d| {
                self.check(scene, name, d, || {
                    used = link
                        .transfer_chunk(&self.stream, self.host_transfer(scene, d, None))
                        .unwrap();
                });
                let mut once = || {
                    link.transfer_chunk(&self.stream, self.host_transfer(scene, d, None)).unwrap();
                };
                (self.back_to_back(repeats, &mut once), self.alone(&mut once))
            });
            let name =
                if transport.is_none() { format!("{name} ({used} up)") } else { name.into() };
            row(&name, seconds);
        }
    }

    fn layers(&self) {
        println!("8B, 2,048 tokens to the pages, layer by layer: ms after the start\n");
        println!("| way | first layer | middle | last | memcpy of all |");
        println!("|---|---|---|---|---|");
        let scene = self.scene(&SHAPES[0], 2048);
        let other = DeviceBuffer::alloc(&self.device, MIB).unwrap();
        let direction = Direction::ChunkToPaged;
        let copy = self.back_to_back(1, || self.memcpy(scene.bytes, Some(direction), &other));
        let layers = scene.paged.shape().layers();
        let events = LayerEvents::new(&self.device, layers).unwrap();
        let waiter = Stream::new(&self.device).unwrap();
        for transport in [Transport::DirectKernel, Transport::TwoHop] {
            let mut link = self.link(Some(transport), HostLinkOptions::default());
            let at = [0, layers / 2, layers - 1].map(|layer| {
                median(|| {
                    self.stream.synchronize().unwrap();
                    let start = Event::with_timing(&self.device).unwrap();
                    let end = Event::with_timing(&self.device).unwrap();
                    start.record(&self.stream).unwrap();
                    let transfer = self.host_transfer(&scene, direction, Some(&events));
                    link.transfer_chunk(&self.stream, transfer).unwrap();
                    events.wait(&waiter, layer).unwrap();
                    end.record(&waiter).unwrap();
                    end.synchronize().unwrap();
                    f64::from(end.elapsed_ms_since(&start).unwrap())
                })
            });
            println!(
                "| {transport} | {:.2} | {:.2} | {:.2} | {:.2} |",
                at[0],
                at[1],
                at[2],
                copy * 1e3
            );
        }
        println!();
    }
}

const BOTH: [Direction; 2] = [Direction::PagedToChunk, Direction::ChunkToPaged];

fn cell(bytes: u64, copy: f64, seconds: f64) -> String {
    format!("{:.1} ({:.3})", bytes as f64 / seconds / 1e9, copy / seconds)
}

fn median(mut timing: impl FnMut() -> f64) -> f64 {
    timing(); // warms up
    let mut timings: Vec<f64> = (0..TIMINGS).map(|_| timing()).collect();
    timings.sort_by(f64::total_cmp);
    timings[TIMINGS / 2]
}

fn mix(value: u64) -> u64 {
    let mixed = (value ^ (value >> 31)).wrapping_mul(0x7FB5_D329_728E_A185);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x81DA_DEF4_BC2D_D44D)
}

fn shuffled(count: u64) -> Vec<u64> {
    let mut values: Vec<u64> = (0..count).collect();
    let mut random = 1u64;
    for i in (1..values.len()).rev() {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        values.swap(i, (random >> 33) as usize % (i + 1));
    }
    values
}
