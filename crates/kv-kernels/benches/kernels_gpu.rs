//! How fast the kernels are on a GPU, beside a plain copy of as many bytes in the same run.
//!
//! `cargo bench -p kv-kernels --bench kernels_gpu`, on a machine with a GPU of 12 GiB or more. The
//! shape is that of an 8-billion-parameter model: 32 layers, keys and values, 8 heads of 128 16-bit
//! elements, blocks of 16 tokens. Each figure is the median of 7 timings by events.
//!
//! "Traffic" counts what crosses the memory bus: a copy and a transfer read and write each byte, the
//! reader only reads it. "Of copy" is the traffic's rate relative to that of `cuMemcpyDtoDAsync` of
//! as many bytes.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::process::ExitCode;
use std::sync::Arc;

use bytemuck::NoUninit;
use cuda_driver::{CudaDriver, Device, DeviceBuffer, DeviceSpan, Event, Stream};
use kv_kernels::{
    ChecksumArgs, Direction, FillPattern, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout,
    Transfer, weight,
};

const SHAPE: KvShapeOptions =
    KvShapeOptions { layers: 32, kv_count: 2, row_bytes: 2048, block_tokens: 16 };
const PAGES_BYTES: u64 = 8 << 30;
const TIMINGS: usize = 7;

fn main() -> ExitCode {
    match open() {
        Ok(device) => {
            println!("{}\n", device.info().name);
            let bench = Bench::new(&device);
            bench.transfers();
            bench.reader();
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn open() -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), 0).map_err(|error| format!("{error}: {error:?}"))
}

struct Bench {
    device: Device,
    stream: Stream,
    kernels: KvKernels,
    shape: KvShape,
    pages: DeviceBuffer,
    paged: PagedKv,
    blocks: u64,
}

impl Bench {
    fn new(device: &Device) -> Self {
        let stream = Stream::new(device).unwrap();
        let kernels = KvKernels::load(device).unwrap();
        let shape = KvShape::new(SHAPE).unwrap();
        let pages = DeviceBuffer::alloc(device, PAGES_BYTES).unwrap();
        stream.fill(pages.span(), 1).unwrap();
        let blocks = PAGES_BYTES / shape.block_bytes();
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&stream, shape, layout, pages.span(), blocks).unwrap();
        Self { device: device.clone(), stream, kernels, shape, pages, paged, blocks }
    }

    fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let buffer = DeviceBuffer::alloc(&self.device, bytes.len() as u64).unwrap();
        self.stream.upload(buffer.span(), bytes).unwrap();
        buffer
    }

    /// Seconds of one `enqueue`: the median of the timings, each of as many as take a while.
    fn seconds(&self, bytes: u64, enqueue: impl Fn()) -> f64 {
        let repeats = ((4 << 30) / bytes).clamp(1, 100);
        let mut timings: Vec<f64> = (0..=TIMINGS)
            .map(|_| {
                let (start, end) = (
                    Event::with_timing(&self.device).unwrap(),
                    Event::with_timing(&self.device).unwrap(),
                );
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

    fn copy_seconds(&self, destination: DeviceSpan, source: DeviceSpan) -> f64 {
        self.seconds(source.bytes(), || self.stream.copy_on_device(destination, source).unwrap())
    }

    fn transfers(&self) {
        println!("multi_layer_transfer and fill_pattern, a chunk of T tokens, one launch\n");
        println!(
            "| tokens | MiB | slots | to paged, GB/s | of copy | to chunk, GB/s | of copy \
             | copy, GB/s | fill, GB/s |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for tokens in [512, 1024, 2048, 4096, 8192] {
            for scattered in [false, true] {
                self.transfer(tokens, scattered);
            }
        }
        println!();
    }

    fn transfer(&self, tokens: u64, scattered: bool) {
        let bytes = tokens * self.shape.token_bytes();
        let chunk = DeviceBuffer::alloc(&self.device, bytes).unwrap();
        let host_slots = self.slots(tokens, scattered);
        let slot_mapping = self.upload(&host_slots);
        let transfer = |direction| Transfer {
            chunk: chunk.span(),
            slot_mapping: slot_mapping.span(),
            host_slots: &host_slots,
            tokens,
            skip_prefix_n_tokens: 0,
            direction,
            num_blocks: self.blocks,
        };
        let timed = |direction| {
            self.seconds(bytes, || {
                let transfer = transfer(direction);
                self.kernels.multi_layer_transfer(&self.stream, &self.paged, transfer).unwrap();
            })
        };
        let to_chunk = timed(Direction::PagedToChunk);
        let to_paged = timed(Direction::ChunkToPaged);
        let copy = self.copy_seconds(self.pages.span().slice(0, bytes).unwrap(), chunk.span());
        let token_keys = self.upload(&(0..tokens).collect::<Vec<u64>>());
        let fill = self.seconds(bytes, || {
            let fill = FillPattern { chunk: chunk.span(), token_keys: token_keys.span(), tokens };
            self.kernels.fill_pattern(&self.stream, &self.shape, fill).unwrap();
        });
        // What the pages held is of no matter to the reader's speed, but its check needs it.
        self.stream.fill(self.pages.span(), 1).unwrap();
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

    /// Slots all over the pages: whole blocks in random order, or each token anywhere.
    fn slots(&self, tokens: u64, scattered: bool) -> Vec<i64> {
        let block_tokens = i64::from(self.shape.block_tokens());
        let slots: Vec<i64> = if scattered {
            shuffled(self.blocks as i64 * block_tokens)
        } else {
            let ids = shuffled(self.blocks as i64);
            ids.iter()
                .flat_map(|id| (0..block_tokens).map(move |t| id * block_tokens + t))
                .collect()
        };
        slots[..tokens as usize].to_vec()
    }

    fn reader(&self) {
        let half = PAGES_BYTES / 2;
        let [to, from] = [0, half].map(|offset| self.pages.span().slice(offset, half).unwrap());
        // Reads and writes half the bytes each: the reader's traffic, and as many bytes in all.
        let copy = self.copy_seconds(to, from);
        println!(
            "paged_checksum, {} GiB through the block tables of S sequences\n",
            PAGES_BYTES >> 30
        );
        println!("| sequences | tokens each | GB/s | traffic, of copy | copy, GB/s of traffic |");
        println!("|---|---|---|---|---|");
        for sequences in [1, 8, 64, 256] {
            let seconds = self.read_seconds(sequences);
            println!(
                "| {sequences} | {} | {:.0} | {:.2} | {:.0} |",
                self.paged.slots() / u64::from(sequences),
                PAGES_BYTES as f64 / seconds / 1e9,
                copy / seconds,
                PAGES_BYTES as f64 / copy / 1e9,
            );
        }
    }

    fn read_seconds(&self, sequences: u32) -> f64 {
        let ids: Vec<i32> = shuffled(self.blocks as i64).iter().map(|id| *id as i32).collect();
        let table_stride = self.blocks / u64::from(sequences);
        let tokens = table_stride as u32 * self.shape.block_tokens();
        let block_table = self.upload(&ids);
        let seq_lens = self.upload(&vec![tokens; sequences as usize]);
        let sums = DeviceBuffer::alloc(&self.device, self.blocks * 8).unwrap();
        let seconds = self.seconds(PAGES_BYTES, || {
            let args = ChecksumArgs {
                block_table: block_table.span(),
                table_stride,
                seq_lens: seq_lens.span(),
                sequences,
                checksums: sums.span(),
                num_blocks: self.blocks,
            };
            self.kernels.paged_checksum(&self.stream, &self.paged, args).unwrap();
        });
        self.check_sums(sums.span());
        seconds
    }

    /// A kernel that is fast and wrong is not fast: every block holds the same byte everywhere.
    fn check_sums(&self, sums: DeviceSpan) {
        let word = u64::from_ne_bytes([1; 8]);
        let expected = (0..self.shape.block_bytes() / 8)
            .fold(0u64, |sum, index| sum.wrapping_add(word.wrapping_mul(weight(index))));
        let mut bytes = vec![0; sums.bytes() as usize];
        self.stream.download(&mut bytes, sums).unwrap();
        let sums: Vec<u64> = bytemuck::pod_collect_to_vec(&bytes);
        assert!(sums.iter().all(|sum| *sum == expected), "the reader's sums are wrong");
    }
}

fn shuffled(count: i64) -> Vec<i64> {
    let mut values: Vec<i64> = (0..count).collect();
    let mut random = 1u64;
    for i in (1..values.len()).rev() {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        values.swap(i, (random >> 33) as usize % (i + 1));
    }
    values
}
