//! Chunks of 256 tokens one behind the other, as engines move them out and in, beside as many copies
//! of as many bytes.

use cuda_driver::DeviceBuffer;
use kv_kernels::{
    Direction, Slot,
    link::{HostLink, HostLinkOptions, HostReady, HostTransfer, Transport},
};

use super::{BOTH, Bench, End, MIB, Scene, cell};

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

impl Bench<'_> {
    pub(super) fn sequences(&self) {
        println!(
            "{CHUNKS} chunks of 256 tokens in a sequence, 8 multiprocessors at most: GB/s, and the share \
             of {CHUNKS} memcpys of as many bytes; from the first call until the last byte has arrived, \
             by events and by the host's clock\n"
        );
        println!("| shape | MiB each | way | down | up | down, host's clock | up, host's clock |");
        println!("|---|---|---|---|---|---|---|");
        for shape in &self.shapes() {
            let scene = self.scene(shape, self.ways.either(256, 16) * CHUNKS as u64);
            let each = scene.bytes / CHUNKS as u64;
            let by_copies = BOTH.map(|direction| self.copies_of_all(&scene, each, direction));
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
                    self.prepare_split(&scene, &split, direction);
                    self.ways.timed(
                        &format!("{name}, {direction:?}"),
                        || used = self.run(&mut link, &scene, &split, (way, direction)),
                        |run| self.both_times(1, run),
                        || self.is_split(&scene, &split, direction),
                    )
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
                last.fence().hold_back(stream).unwrap();
                last.transport()
            }
            Way::OneStarted => {
                let arrival = link.start_chunks(stream, HostReady::Now, &transfers).unwrap();
                arrival.fence().hold_back(stream).unwrap();
                arrival.transport()
            }
        }
    }

    /// As many plain copies of as many bytes, timed and held to their bytes.
    fn copies_of_all(&self, scene: &Scene, each: u64, direction: Direction) -> (f64, f64) {
        let right = self.right(scene.bytes);
        let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
        let to_host = direction == Direction::PagedToChunk;
        let fill = |zero: bool| {
            if zero {
                self.stream.fill(chunk, 0).unwrap();
            } else {
                self.stream.upload(chunk, right).unwrap();
            }
        };
        fill(to_host);
        self.copy(0, scene.bytes, Direction::PagedToChunk);
        self.stream.synchronize().unwrap();
        fill(!to_host);
        self.stream.synchronize().unwrap();
        self.ways.timed(
            "memcpy, each",
            || (0..CHUNKS as u64).for_each(|index| self.copy(index * each, each, direction)),
            |run| self.both_times(1, run),
            || match direction {
                Direction::PagedToChunk => self.read_host(scene.bytes) == right,
                Direction::ChunkToPaged => self.read(chunk) == right,
            },
        )
    }

    /// Moves each chunk of its own tokens between the pages and the device's chunk.
    fn on_device_split(&self, scene: &Scene, split: &Split, to: Direction) {
        (0..CHUNKS).for_each(|index| split.on_device(self, scene, index, to));
    }

    /// Puts the bytes of a sequence, chunk by chunk, where it reads them, and wipes where it writes.
    fn prepare_split(&self, scene: &Scene, split: &Split, direction: Direction) {
        let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
        match direction {
            Direction::PagedToChunk => {
                self.stream.upload(chunk, self.right(scene.bytes)).unwrap();
                self.on_device_split(scene, split, Direction::ChunkToPaged);
                self.stream.fill(chunk, 0).unwrap();
                self.copy(0, scene.bytes, Direction::PagedToChunk);
                self.stream.synchronize().unwrap();
            }
            Direction::ChunkToPaged => self.prepare(scene, End::Host, direction),
        }
    }

    /// Whether each chunk is that of its own tokens.
    fn is_split(&self, scene: &Scene, split: &Split, direction: Direction) -> bool {
        let right = self.right(scene.bytes);
        if direction == Direction::PagedToChunk {
            return self.read_host(scene.bytes) == right;
        }
        let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
        self.stream.fill(chunk, 0).unwrap();
        self.on_device_split(scene, split, Direction::PagedToChunk);
        self.read(chunk) == right
    }
}

/// The tokens of a scene, chunk by chunk.
struct Split {
    mappings: Vec<DeviceBuffer>,
    tokens: usize,
}

impl Split {
    fn of(bench: &Bench<'_>, scene: &Scene) -> Self {
        let tokens = scene.host_slots.len() / CHUNKS;
        let mappings = scene.host_slots.chunks(tokens).map(|slots| bench.upload(slots)).collect();
        Self { mappings, tokens }
    }

    fn slots<'a>(&self, scene: &'a Scene, index: usize) -> &'a [Slot] {
        &scene.host_slots[index * self.tokens..][..self.tokens]
    }

    fn transfer<'a>(
        &'a self,
        bench: &'a Bench<'_>,
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

    fn on_device(&self, bench: &Bench<'_>, scene: &Scene, index: usize, direction: Direction) {
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
