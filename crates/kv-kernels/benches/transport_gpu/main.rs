//! How fast KV moves: chunks to and from pages on the device, and blocks between pages and pinned
//! memory, beside memcpy of as many bytes in the same run.
//!
//! `cargo bench -p kv-kernels --bench transport_gpu [-- MEASUREMENT...]`, on a machine with a GPU of
//! 12 GiB or more. Measurements: `device` and `blocks`; both without one.
//! After its timings, every byte that a way writes is compared with what it must be; `ways/mod.rs` says how
//! to see that. Each figure is the median of 7.
//!
//! "Back to back" is the time of one of several transfers enqueued one after the other, by events;
//! "alone" is the host's time from before the call until the stream is idle.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod blocks;
#[path = "../ways/mod.rs"]
mod ways;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer, Stream};
use kv_kernels::{
    Direction, KvFormat, KvKernels, PagedKv, Slot, Transfer,
    layout::{FormatOptions, Tensors},
    link::{HostLink, HostLinkOptions, MeasureOptions, Transport, TransportProfile},
};
pub(crate) use ways::Ways;
use ways::{noise, shuffled};

const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;

#[allow(dead_code, reason = "tests run it another way")]
fn main() -> ExitCode {
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match Ways::of_environment() {
        Ok(ways) => {
            measure(&ways, &asked);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Measures what is asked for, or everything.
pub(crate) fn measure(ways: &Ways, asked: &[String]) {
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|arg| arg == name);
    println!("{}\n", ways.device.info().name);
    let bench = Bench::new(ways);
    println!("profile, measured:\n```\n{}```\n", bench.profile);
    if wants("device") {
        bench.device_chunks();
    }
    if wants("blocks") {
        bench.blocks();
    }
}

/// A shape that other programs' figures are compared on.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    format: KvFormat,
    layers: u32,
    heads: u32,
    head_bytes: u64,
    block_tokens: u32,
    blocks: u64,
}

const SHAPES: [Shape; 5] = [
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
    Shape {
        name: "8B, paged attention",
        format: KvFormat::PagedAttention,
        layers: 32,
        heads: 8,
        head_bytes: 256,
        block_tokens: 16,
        blocks: 1024,
    },
];

/// Whether rows are in pieces, which the plain kernel does not know.
fn has_pieces(format: KvFormat) -> bool {
    matches!(format, KvFormat::FlashAttentionHnd | KvFormat::PagedAttention)
}

/// The plain kernel of the comparison: a block of threads for each token, words of 16 bytes, one at a
/// time in each thread. Pages `[plane][block][token][row]`, rows whole.
const PLAIN_PTX: &str = include_str!("plain.compute_80.ptx");

struct Bench<'w> {
    ways: &'w Ways,
    device: Device,
    stream: Stream,
    kernels: Arc<KvKernels>,
    profile: TransportProfile,
    host: PinnedBuffer,
    chunk: DeviceBuffer,
    plain: cuda_driver::Kernel,
    /// As many words as the longest chunk has.
    noise: Vec<u64>,
}

/// Pages of a shape with some tokens in them.
struct Scene {
    paged: PagedKv,
    tensors: Vec<DeviceBuffer>,
    planes: DeviceBuffer,
    host_slots: Vec<Slot>,
    slots: DeviceBuffer,
    tokens: u64,
    bytes: u64,
}

impl<'w> Bench<'w> {
    fn new(ways: &'w Ways) -> Self {
        let device = &ways.device;
        let stream = Stream::new(device).unwrap();
        let kernels = Arc::new(KvKernels::load(device).unwrap());
        let mut options = MeasureOptions::default();
        options.bytes = ways.either(options.bytes, MIB);
        let profile = TransportProfile::measure(&kernels, &options).unwrap();
        let bytes = ways.either(272 * MIB, 4 * MIB);
        let host = PinnedBuffer::alloc(device, bytes, HostAllocFlags::CACHED).unwrap();
        let chunk = DeviceBuffer::alloc(device, bytes).unwrap();
        let plain = cuda_driver::Module::load(device, PLAIN_PTX).unwrap();
        let plain = plain.kernel("plain_transfer").unwrap();
        let noise = noise(bytes / 8, 1);
        Self { ways, device: device.clone(), stream, kernels, profile, host, chunk, plain, noise }
    }

    /// The shapes; on the simulated device with fewer layers and blocks.
    fn shapes(&self) -> [Shape; SHAPES.len()] {
        SHAPES.map(|shape| match self.ways.is_sim {
            false => shape,
            true => Shape { layers: 2, blocks: 256 / u64::from(shape.block_tokens), ..shape },
        })
    }

    fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        self.ways.upload(&self.stream, values)
    }

    fn read(&self, span: DeviceSpan) -> Vec<u8> {
        self.ways.download(&self.stream, span)
    }

    fn read_host(&self, bytes: u64) -> Vec<u8> {
        self.stream.synchronize().unwrap();
        let mut seen = vec![0; bytes as usize];
        self.host.read_at(0, &mut seen).unwrap();
        seen
    }

    fn link(&self, transport: Option<Transport>, options: HostLinkOptions) -> HostLink {
        let link = HostLink::new(Arc::clone(&self.kernels), options).unwrap();
        let profile = match transport {
            Some(transport) => TransportProfile { forced: Some(transport), ..self.profile.clone() },
            None => self.profile.clone(),
        };
        link.with_profile(profile)
    }

    fn scene(&self, shape: &Shape, tokens: u64) -> Scene {
        let options = FormatOptions {
            layers: shape.layers,
            heads: shape.heads,
            head_bytes: shape.head_bytes,
            element_bytes: 2,
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
            .map(|(kv, address)| address + kv * layout.options().kv_stride_bytes)
            .collect();
        let ids = shuffled(blocks);
        let block_tokens = u64::from(shape.block_tokens);
        let host_slots: Vec<_> = (0..tokens)
            .map(|t| ids[(t / block_tokens) as usize] * block_tokens + t % block_tokens)
            .map(|slot| Slot::from(slot as u32))
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

    /// Seconds of one of `repeats` enqueued back to back, by events, and of one alone.
    fn both_times(&self, repeats: u32, enqueue: &mut dyn FnMut()) -> (f64, f64) {
        let back_to_back = self.ways.seconds(&self.stream, repeats.into(), enqueue);
        let alone = self.ways.median(|| {
            self.stream.synchronize().unwrap();
            let begun = Instant::now();
            enqueue();
            self.stream.synchronize().unwrap();
            begun.elapsed().as_secs_f64()
        });
        (back_to_back, alone)
    }

    /// What a chunk must hold, or what the pages must.
    fn right(&self, bytes: u64) -> &[u8] {
        &bytemuck::cast_slice(&self.noise)[..bytes as usize]
    }

    /// Puts what is right where a way reads it, and wipes where the way writes.
    fn prepare(&self, scene: &Scene, direction: Direction) {
        let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
        self.stream.upload(chunk, self.right(scene.bytes)).unwrap();
        match direction {
            Direction::PagedToChunk => {
                self.on_device(scene, Direction::ChunkToPaged);
                self.stream.fill(chunk, 0).unwrap();
            }
            Direction::ChunkToPaged => {
                for tensor in &scene.tensors {
                    self.stream.fill(tensor.span(), 0).unwrap();
                }
            }
        }
        self.stream.synchronize().unwrap();
    }

    /// Whether a way that was prepared for has given all bytes.
    fn is_right(&self, scene: &Scene, direction: Direction) -> bool {
        let right = self.right(scene.bytes);
        match direction {
            Direction::PagedToChunk => {
                self.read(self.chunk.span().slice(0, scene.bytes).unwrap()) == right
            }
            Direction::ChunkToPaged => self.are_pages(scene, right),
        }
    }

    /// Whether the tensors, one a layer or a pair, have the rows of a chunk in their slots.
    fn are_pages(&self, scene: &Scene, chunk: &[u8]) -> bool {
        let (shape, layout) = (scene.paged.shape(), scene.paged.layout());
        let block_tokens = u64::from(shape.block_tokens());
        let (row, tokens) = (shape.row_bytes() as usize, scene.tokens as usize);
        let layers = shape.layers() as usize;
        let tensors: Vec<Vec<u8>> = scene.tensors.iter().map(|t| self.read(t.span())).collect();
        let rows: Vec<&[u8]> = chunk.chunks(row).collect();
        ways::all(&rows, |n, row| {
            let (plane, slot) = (n / tokens, scene.host_slots[n % tokens].get() as u64);
            let (kv, layer) = (plane / layers, plane % layers);
            let part = layout.parts_of(kv as u64)[0];
            let tensor = match layout.tensors() {
                Tensors::PerPlane => 2 * layer + kv,
                _ => layer,
            };
            let at = kv as u64 * layout.options().kv_stride_bytes
                + slot / block_tokens * layout.options().block_stride_bytes
                + slot % block_tokens * part.token_stride_bytes;
            let segments = row.chunks(part.segment_bytes as usize).zip(0..);
            segments.into_iter().all(|(segment, number)| {
                let at = (at + number * part.segment_stride_bytes) as usize;
                tensors[tensor][at..][..segment.len()] == *segment
            })
        })
    }

    /// Seconds of a way of a scene, which is held to its bytes.
    fn way(
        &self,
        name: &str,
        (scene, direction): (&Scene, Direction),
        repeats: u64,
        run: impl FnMut(),
    ) -> f64 {
        self.prepare(scene, direction);
        let time = |run: &mut dyn FnMut()| self.ways.seconds(&self.stream, repeats, run);
        let is_right = || self.is_right(scene, direction);
        self.ways.timed(&format!("{name}, {direction:?}"), run, time, is_right)
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

    fn plain(&self, scene: &Scene, direction: Direction) {
        let shape = scene.paged.shape();
        let args = cuda_driver::KernelArgs::new()
            .arg(self.chunk.address())
            .arg(scene.planes.address())
            .arg(scene.slots.address())
            .arg(scene.tokens)
            .arg(shape.planes())
            .arg(shape.row_bytes())
            .arg(u64::from(direction == Direction::ChunkToPaged));
        let config = cuda_driver::LaunchConfig::linear(scene.tokens as u32, 256);
        // SAFETY: the arguments are those of `plain.cu`; slots lie in the pages, and the chunk has all
        // tokens of all planes.
        unsafe { self.plain.launch(&self.stream, &config, &args) }.unwrap();
    }

    /// A plain copy of as many bytes over the link, timed and held to its bytes.
    fn memcpy(&self, bytes: u64, repeats: u32, direction: Direction) -> (f64, f64) {
        let chunk = self.chunk.span().slice(0, bytes).unwrap();
        let right = self.right(bytes);
        let to_host = direction == Direction::PagedToChunk;
        // Both ends have it, and the one that is written is wiped.
        self.stream.upload(chunk, right).unwrap();
        if !to_host {
            self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
            self.stream.fill(chunk, 0).unwrap();
        } else {
            self.stream.fill(chunk, 0).unwrap();
            self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
            self.stream.synchronize().unwrap();
            self.stream.upload(chunk, right).unwrap();
        }
        self.stream.synchronize().unwrap();
        self.ways.timed(
            "memcpy",
            || self.copy(0, bytes, direction),
            |run| self.both_times(repeats, run),
            || if to_host { self.read_host(bytes) == right } else { self.read(chunk) == right },
        )
    }

    /// Enqueues a plain copy between the chunk and the host.
    fn copy(&self, offset: u64, bytes: u64, direction: Direction) {
        let chunk = self.chunk.span().slice(offset, bytes).unwrap();
        match direction {
            Direction::PagedToChunk => {
                self.stream.copy_to_host(&self.host, offset, chunk).unwrap();
            }
            Direction::ChunkToPaged => {
                self.stream.copy_to_device(chunk, &self.host, offset).unwrap();
            }
        }
    }

    fn device_chunks(&self) {
        println!("chunks in device memory: GB/s read and written, and the share of memcpy\n");
        println!(
            "| shape | tokens | MiB | memcpy | to chunk | to pages | plain kernel, to chunk | to pages |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        let other = self.upload(&self.noise);
        for shape in &self.shapes() {
            for tokens in self.ways.either([256, 2048], [32, 128]) {
                let scene = self.scene(shape, tokens);
                let repeats = if tokens == 256 { 20 } else { 5 };
                let [to, from] =
                    [&self.chunk, &other].map(|b| b.span().slice(0, scene.bytes).unwrap());
                self.stream.fill(to, 0).unwrap();
                self.stream.synchronize().unwrap();
                let copy = self.ways.timed(
                    "memcpy",
                    || self.stream.copy_on_device(to, from).unwrap(),
                    |run| self.ways.seconds(&self.stream, repeats, run),
                    || self.read(to) == self.right(scene.bytes),
                );
                let ours = BOTH.map(|d| {
                    let run = || self.on_device(&scene, d);
                    cell(2 * scene.bytes, copy, self.way("transfer", (&scene, d), repeats, run))
                });
                let plain = BOTH.map(|d| {
                    if has_pieces(shape.format) {
                        return "-".into();
                    }
                    let run = || self.plain(&scene, d);
                    cell(2 * scene.bytes, copy, self.way("plain kernel", (&scene, d), repeats, run))
                });
                println!(
                    "| {} | {tokens} | {} | {:.0} | {} | {} |",
                    shape.name,
                    scene.bytes / MIB,
                    2.0 * scene.bytes as f64 / copy / 1e9,
                    ours.join(" | "),
                    plain.join(" | ")
                );
            }
        }
        println!();
    }
}

const BOTH: [Direction; 2] = [Direction::PagedToChunk, Direction::ChunkToPaged];

fn cell(bytes: u64, copy: f64, seconds: f64) -> String {
    format!("{:.1} ({:.3})", bytes as f64 / seconds / 1e9, copy / seconds)
}
