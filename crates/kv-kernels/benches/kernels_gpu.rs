//! How fast the kernels are on a GPU, beside a plain copy of as many bytes in the same run.
//!
//! `cargo bench -p kv-kernels --bench kernels_gpu`, on a machine with a GPU of 12 GiB or more. The
//! shape is that of an 8-billion-parameter model: 32 layers, keys and values, 8 heads of 128 16-bit
//! elements, blocks of 16 tokens. Each figure is the median of 7 timings by events. After its timings, every
//! byte that a way writes is compared with what the host foretells; `ways/mod.rs` says how to see that.
//!
//! "Traffic" counts what crosses the memory bus: a copy and a transfer read and write each byte, the
//! reader only reads it. "Of copy" is the traffic's rate relative to that of `cuMemcpyDtoDAsync` of
//! as many bytes.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

#[path = "ways/mod.rs"]
mod ways;

use std::process::ExitCode;

use cuda_driver::{DeviceBuffer, DeviceSpan, Stream};
use kv_kernels::{
    Direction, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot, Transfer,
    verify::{ChecksumArgs, FillPattern, token_word, word_share},
};
pub(crate) use ways::Ways;
use ways::{all, noise, shuffled};

const SHAPE: KvShapeOptions =
    KvShapeOptions { layers: 32, kv_count: 2, row_bytes: 2048, block_tokens: 16 };
/// Bytes after which the bytes of the pages repeat.
const PERIOD: u64 = 64 << 20;

#[allow(dead_code, reason = "tests run it another way")]
fn main() -> ExitCode {
    match Ways::of_environment() {
        Ok(ways) => {
            measure(&ways);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Measures everything.
pub(crate) fn measure(ways: &Ways) {
    println!("{}\n", ways.device.info().name);
    let bench = Bench::new(ways);
    bench.transfers();
    bench.reader();
}

struct Bench<'w> {
    ways: &'w Ways,
    stream: Stream,
    kernels: KvKernels,
    shape: KvShape,
    pages: DeviceBuffer,
    paged: PagedKv,
    blocks: u64,
    /// What the pages hold, repeated.
    noise: Vec<u64>,
}

impl<'w> Bench<'w> {
    fn new(ways: &'w Ways) -> Self {
        let device = &ways.device;
        let stream = Stream::new(device).unwrap();
        let kernels = KvKernels::load(device).unwrap();
        let shape =
            KvShape::new(KvShapeOptions { layers: ways.either(SHAPE.layers, 2), ..SHAPE }).unwrap();
        let pages = DeviceBuffer::alloc(device, ways.either(8 << 30, 4 << 20)).unwrap();
        let blocks = pages.bytes() / shape.block_bytes();
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&stream, shape, layout, pages.span(), blocks).unwrap();
        let noise = noise(PERIOD.min(pages.bytes()) / 8, 1);
        Self { ways, stream, kernels, shape, pages, paged, blocks, noise }
    }

    /// Puts the noise into the pages.
    fn fill_pages(&self) {
        let noise = bytemuck::cast_slice::<u64, u8>(&self.noise);
        for at in (0..self.pages.bytes()).step_by(noise.len()) {
            let span = self.pages.span().slice(at, noise.len() as u64).unwrap();
            self.stream.upload(span, noise).unwrap();
        }
    }

    fn seconds(&self, bytes: u64, enqueue: &mut dyn FnMut()) -> f64 {
        self.ways.seconds(&self.stream, ((4 << 30) / bytes).clamp(1, 100), enqueue)
    }

    fn wipe(&self, span: DeviceSpan) {
        self.stream.fill(span, 0).unwrap();
        self.stream.synchronize().unwrap();
    }

    fn read(&self, span: DeviceSpan) -> Vec<u8> {
        self.ways.download(&self.stream, span)
    }

    fn copy_seconds(&self, destination: DeviceSpan, source: DeviceSpan) -> f64 {
        self.wipe(destination);
        self.ways.timed(
            "copy",
            || self.stream.copy_on_device(destination, source).unwrap(),
            |run| self.seconds(source.bytes(), run),
            || self.read(destination) == self.read(source),
        )
    }

    fn transfers(&self) {
        println!("multi_layer_transfer and fill_pattern, a chunk of T tokens, one launch\n");
        println!(
            "| tokens | MiB | slots | to paged, GB/s | of copy | to chunk, GB/s | of copy \
             | copy, GB/s | fill, GB/s |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        let lengths = self.ways.either(&[512, 1024, 2048, 4096, 8192][..], &[48]);
        for &tokens in lengths {
            for scattered in [false, true] {
                self.transfer(tokens, scattered);
            }
        }
        println!();
    }

    /// Whether a chunk has the rows of the slots as the noise in the pages says.
    fn is_of_pages(&self, chunk: &[u8], slots: &[Slot]) -> bool {
        let (shape, layout) = (&self.shape, self.paged.layout());
        let (tokens, row) = (slots.len(), shape.row_bytes() as usize);
        let noise = bytemuck::cast_slice::<u64, u8>(&self.noise);
        let (layers, block_tokens) = (u64::from(shape.layers()), u64::from(shape.block_tokens()));
        let rows: Vec<&[u8]> = chunk.chunks(row).collect();
        all(&rows, |n, found| {
            let (plane, slot) = ((n / tokens) as u64, slots[n % tokens].get() as u64);
            // A chunk has all layers of keys before those of values.
            let at = plane % layers * layout.options().layer_stride_bytes
                + plane / layers * layout.options().kv_stride_bytes
                + slot / block_tokens * layout.options().block_stride_bytes
                + slot % block_tokens * layout.parts_of(0)[0].token_stride_bytes;
            *found == &noise[at as usize % noise.len()..][..row]
        })
    }

    fn transfer(&self, tokens: u64, scattered: bool) {
        let bytes = tokens * self.shape.token_bytes();
        let chunk = DeviceBuffer::alloc(&self.ways.device, bytes).unwrap();
        let host_slots = self.slots(tokens, scattered);
        let slot_mapping = self.ways.upload(&self.stream, &host_slots);
        let enqueue = |direction| {
            let transfer = Transfer {
                chunk: chunk.span(),
                slot_mapping: slot_mapping.span(),
                host_slots: &host_slots,
                tokens,
                skip_prefix_n_tokens: 0,
                direction,
                num_blocks: self.blocks,
            };
            self.kernels.multi_layer_transfer(&self.stream, &self.paged, transfer).unwrap();
        };
        self.fill_pages();
        self.wipe(chunk.span());
        let to_chunk = self.ways.timed(
            "to the chunk",
            || enqueue(Direction::PagedToChunk),
            |run| self.seconds(bytes, run),
            || self.is_of_pages(&self.read(chunk.span()), &host_slots),
        );
        let other = noise(bytes / 8, 2);
        let other = bytemuck::cast_slice::<u64, u8>(&other);
        self.stream.upload(chunk.span(), other).unwrap();
        let to_paged = self.ways.timed(
            "to the pages",
            || enqueue(Direction::ChunkToPaged),
            |run| self.seconds(bytes, run),
            || {
                // By the way back, which has just been held to its bytes.
                self.wipe(chunk.span());
                enqueue(Direction::PagedToChunk);
                let is_right = self.read(chunk.span()) == other;
                self.stream.upload(chunk.span(), other).unwrap();
                is_right
            },
        );
        let copy = self.copy_seconds(self.pages.span().slice(0, bytes).unwrap(), chunk.span());
        let keys: Vec<u64> = (0..tokens).collect();
        let token_keys = self.ways.upload(&self.stream, &keys);
        self.wipe(chunk.span());
        let fill = self.ways.timed(
            "fill",
            || {
                let token_keys = token_keys.span();
                let fill = FillPattern { chunk: chunk.span(), token_keys, tokens };
                self.kernels.fill_pattern(&self.stream, &self.shape, fill).unwrap();
            },
            |run| self.seconds(bytes, run),
            || self.is_pattern(&self.read(chunk.span()), &keys),
        );
        let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
        println!(
            "| {tokens} | {} | {} | {:.0} | {:.2} | {:.0} | {:.2} | {:.0} | {:.0} |",
            bytes >> 20,
            if scattered { "scattered" } else { "blocks" },
            rate(to_paged),
            copy / to_paged,
            rate(to_chunk),
            copy / to_chunk,
            rate(copy),
            rate(fill),
        );
    }

    /// Whether every word of a chunk is that of its token's key.
    fn is_pattern(&self, chunk: &[u8], keys: &[u64]) -> bool {
        let (kv_count, layers) = (u64::from(self.shape.kv_count()), u64::from(self.shape.layers()));
        let rows: Vec<&[u8]> = chunk.chunks(self.shape.row_bytes() as usize).collect();
        all(&rows, |n, row| {
            let (plane, key) = ((n / keys.len()) as u64, keys[n % keys.len()]);
            let plane = plane % layers * kv_count + plane / layers;
            let words = (plane * self.shape.row_words()..).zip(row.chunks(8));
            words.into_iter().all(|(index, word)| *word == token_word(key, index).to_le_bytes())
        })
    }

    /// Slots all over the pages: whole blocks in random order, or each token anywhere.
    fn slots(&self, tokens: u64, scattered: bool) -> Vec<Slot> {
        let block_tokens = u64::from(self.shape.block_tokens());
        let slots: Vec<u64> = if scattered {
            shuffled(self.blocks * block_tokens)
        } else {
            let ids = shuffled(self.blocks);
            ids.iter()
                .flat_map(|id| (0..block_tokens).map(move |t| id * block_tokens + t))
                .collect()
        };
        slots[..tokens as usize].iter().map(|slot| Slot::from(*slot as u32)).collect()
    }

    fn reader(&self) {
        let half = self.pages.bytes() / 2;
        let [to, from] = [0, half].map(|offset| self.pages.span().slice(offset, half).unwrap());
        self.fill_pages();
        // Reads and writes half the bytes each: the reader's traffic, and as many bytes in all.
        let copy = self.copy_seconds(to, from);
        // The reader's sums are then those of one block.
        self.stream.fill(self.pages.span(), 1).unwrap();
        println!(
            "paged_checksum, {} GiB through the block tables of S sequences\n",
            self.pages.bytes() >> 30
        );
        println!("| sequences | tokens each | GB/s | traffic, of copy | copy, GB/s of traffic |");
        println!("|---|---|---|---|---|");
        for &sequences in self.ways.either(&[1, 8, 64, 256][..], &[1, 8]) {
            let seconds = self.read_seconds(sequences);
            println!(
                "| {sequences} | {} | {:.0} | {:.2} | {:.0} |",
                self.paged.slots() / u64::from(sequences),
                self.pages.bytes() as f64 / seconds / 1e9,
                copy / seconds,
                self.pages.bytes() as f64 / copy / 1e9,
            );
        }
    }

    fn read_seconds(&self, sequences: u32) -> f64 {
        let ids: Vec<i32> = shuffled(self.blocks).iter().map(|id| *id as i32).collect();
        let table_stride = self.blocks / u64::from(sequences);
        let tokens = table_stride as u32 * self.shape.block_tokens();
        let block_table = self.ways.upload(&self.stream, &ids);
        let seq_lens = self.ways.upload(&self.stream, &vec![tokens; sequences as usize]);
        let sums = DeviceBuffer::alloc(&self.ways.device, self.blocks * 8).unwrap();
        self.wipe(sums.span());
        self.ways.timed(
            "the reader",
            || {
                let args = ChecksumArgs {
                    block_table: block_table.span(),
                    table_stride,
                    seq_lens: seq_lens.span(),
                    sequences,
                    checksums: sums.span(),
                    num_blocks: self.blocks,
                };
                self.kernels.paged_checksum(&self.stream, &self.paged, args).unwrap();
            },
            |run| self.seconds(self.pages.bytes(), run),
            || self.are_sums(&self.read(sums.span())),
        )
    }

    /// Whether all sums are that of a block that holds the same byte everywhere.
    fn are_sums(&self, bytes: &[u8]) -> bool {
        let word = u64::from_ne_bytes([1; 8]);
        let expected = (0..self.shape.block_bytes() / 8)
            .fold(0u64, |sum, index| sum.wrapping_add(word_share(word, index)));
        let sums: Vec<u64> = bytemuck::pod_collect_to_vec(bytes);
        sums.iter().all(|sum| *sum == expected)
    }
}
