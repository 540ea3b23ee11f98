//! Chunks of 256 tokens one behind the other, as engines move them out and in, beside as many copies
//! of as many bytes.

use cuda_driver::DeviceBuffer;
use kv_kernels::{Direction, HostLink, HostLinkOptions, HostReady, HostTransfer, Transport};

use super::{BOTH, Bench, MIB, SHAPES, Scene, cell};

/// Chunks in a sequence.
const CHUNKS: usize = 8;

/// How the chunks of a sequence are asked for.
#[derive(Clone, Copy)]
enum Way {
    /// A call for each, as operations of the stream.
    Strict,
    /// One call, as one operation of the stream.
    OneCall,
    /// A call that starts each.
    Started,
    /// One call that starts them all.
    OneStarted,
}

const WAYS: [(&str, Way, u32); 6] = [
    ("`transfer_chunk`, each", Way::Strict, 8),
    ("`transfer_chunks`, all", Way::OneCall, 8),
    ("`start_chunks`, each", Way::Started, 8),
    ("`start_chunks`, all", Way::OneStarted, 8),
    ("`start_chunks`, each, on 4 multiprocessors", Way::Started, 4),
    ("`start_chunks`, each, on 2 multiprocessors", Way::Started, 2),
];

impl Bench {
    pub(super) fn sequences(&self) {
        println!(
            "{CHUNKS} chunks of 256 tokens in a sequence, 8 multiprocessors at most: GB/s, and the share \
             of {CHUNKS} memcpys of as many bytes; from the first call until the last byte has arrived, \
             by events and by the host's clock\n"
        );
        println!("| shape | MiB each | way | down | up | down, host's clock | up, host's clock |");
        println!("|---|---|---|---|---|---|---|");
        for shape in &SHAPES {
            let scene = self.scene(shape, 256 * CHUNKS as u64);
            let each = scene.bytes / CHUNKS as u64;
            let by_copies = BOTH.map(|direction| {
                let mut run = || {
                    for index in 0..CHUNKS as u64 {
                        self.copy_at(index * each, each, direction);
                    }
                };
                (self.back_to_back(1, &mut run), self.alone(&mut run))
            });
            let row = |name: &str, seconds: [(f64, f64); 2]| {
                let [(a, c), (b, d)] = seconds;
                let [(x, z), (y, w)] = by_copies;
                let cells = [(a, x), (b, y), (c, z), (d, w)].map(|(s, c)| cell(scene.bytes, c, s));
                println!("| {} | {} | {name} | {} |", shape.name, each / MIB, cells.join(" | "));
            };
            row("memcpy, each", by_copies);
            let split = Split::of(self, &scene);
            for (name, way, multiprocessors) in WAYS {
                let options = HostLinkOptions { multiprocessors, ..HostLinkOptions::default() };
                let mut link = self.link(None, options);
                let mut used = Transport::DirectKernel;
                let seconds = BOTH.map(|direction| {
                    self.check_split(&scene, &split, direction, || {
                        used = self.run(&mut link, &scene, &split, (way, direction));
                    });
                    let mut once = || {
                        self.run(&mut link, &scene, &split, (way, direction));
                    };
                    (self.back_to_back(1, &mut once), self.alone(&mut once))
                });
                row(&format!("{name} ({used})"), seconds);
            }
        }
        println!();
    }

    /// Enqueues the whole sequence, and makes the stream wait for its end.
    fn run(
        &self,
        link: &mut HostLink,
        scene: &Scene,
        split: &Split,
        (way, direction): (Way, Direction),
    ) -> Transport {
        let transfers: Vec<_> =
            (0..CHUNKS).map(|index| split.transfer(self, scene, index, direction)).collect();
        let stream = &self.stream;
        match way {
            Way::Strict => {
                let each = transfers.iter().map(|one| link.transfer_chunk(stream, *one).unwrap());
                each.last().unwrap()
            }
            Way::OneCall => link.transfer_chunks(stream, &transfers).unwrap(),
            Way::Started => {
                let start = |one| link.start_chunks(stream, HostReady::Now, &[one]).unwrap();
                let last = transfers.into_iter().map(start).last().unwrap();
                last.wait(stream).unwrap();
                last.transport()
            }
            Way::OneStarted => {
                let arrival = link.start_chunks(stream, HostReady::Now, &transfers).unwrap();
                arrival.wait(stream).unwrap();
                arrival.transport()
            }
        }
    }

    fn copy_at(&self, offset: u64, bytes: u64, direction: Direction) {
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

    /// Holds a sequence to the bytes that must come out: each chunk is that of its own tokens.
    fn check_split(&self, scene: &Scene, split: &Split, direction: Direction, run: impl FnOnce()) {
        self.fill(scene, 3);
        let each = scene.bytes / CHUNKS as u64;
        let device = |to: Direction| {
            for index in 0..CHUNKS {
                split.on_device(self, scene, index, to);
            }
        };
        device(Direction::PagedToChunk);
        let mut right = vec![0; scene.bytes as usize];
        let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
        self.stream.download(&mut right, chunk).unwrap();
        let mut seen = vec![0; scene.bytes as usize];
        match direction {
            Direction::PagedToChunk => {
                self.stream.fill(chunk, 0).unwrap();
                self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
                self.stream.synchronize().unwrap();
                run();
                self.stream.synchronize().unwrap();
                self.host.read_at(0, &mut seen).unwrap();
            }
            Direction::ChunkToPaged => {
                self.stream.copy_to_host(&self.host, 0, chunk).unwrap();
                for tensor in &scene.tensors {
                    self.stream.fill(tensor.span(), 0).unwrap();
                }
                self.stream.synchronize().unwrap();
                run();
                self.stream.fill(chunk, 0).unwrap();
                device(Direction::PagedToChunk);
                self.stream.download(&mut seen, chunk).unwrap();
            }
        }
        assert!(seen == right, "a sequence {direction:?}, of {each} bytes each: wrong bytes");
    }
}

/// The tokens of a scene, chunk by chunk.
struct Split {
    mappings: Vec<DeviceBuffer>,
    tokens: usize,
}

impl Split {
    fn of(bench: &Bench, scene: &Scene) -> Self {
        let tokens = scene.host_slots.len() / CHUNKS;
        let mappings = scene.host_slots.chunks(tokens).map(|slots| bench.upload(slots)).collect();
        Self { mappings, tokens }
    }

    fn slots<'a>(&self, scene: &'a Scene, index: usize) -> &'a [i64] {
        &scene.host_slots[index * self.tokens..][..self.tokens]
    }

    fn transfer<'a>(
        &'a self,
        bench: &'a Bench,
        scene: &'a Scene,
        index: usize,
        direction: Direction,
    ) -> HostTransfer<'a> {
        HostTransfer {
            host_offset: index as u64 * (scene.bytes / CHUNKS as u64),
            slot_mapping: self.mappings[index].span(),
            host_slots: self.slots(scene, index),
            tokens: self.tokens as u64,
            ..bench.host_transfer(scene, direction, None)
        }
    }

    fn on_device(&self, bench: &Bench, scene: &Scene, index: usize, direction: Direction) {
        let each = scene.bytes / CHUNKS as u64;
        let transfer = kv_kernels::Transfer {
            chunk: bench.chunk.span().slice(index as u64 * each, each).unwrap(),
            slot_mapping: self.mappings[index].span(),
            host_slots: self.slots(scene, index),
            tokens: self.tokens as u64,
            skip_prefix_n_tokens: 0,
            direction,
            num_blocks: scene.paged.blocks(),
        };
        bench.kernels.multi_layer_transfer(&bench.stream, &scene.paged, transfer).unwrap();
    }
}
