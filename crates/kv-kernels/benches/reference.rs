//! How fast the CPU references are, in GB/s of KV, over plain memory larger than any cache.
//!
//! `cargo bench -p kv-kernels --bench reference`. A replay on a simulated device moves and reads
//! terabytes through these; the first two rows are what it runs with by default.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for the terminal")]

use std::borrow::Cow;
use std::time::Instant;

use cuda_driver::reference::{AccessFault, DeviceMemory};
use cuda_driver::{KernelArgs, LaunchConfig};
use kv_kernels::{KvShape, KvShapeOptions, references};
use kv_testkit::raw_args::{RawArgs, WHOLE_ROWS};

/// Memory that starts at `BASE`, checked as a device's would be.
struct Memory(Vec<u8>);

const BASE: u64 = 1 << 40;

impl Memory {
    fn range(&self, address: u64, bytes: u64) -> Result<std::ops::Range<usize>, AccessFault> {
        let fault = || AccessFault { address, bytes, reason: "outside".to_owned() };
        let start = address.checked_sub(BASE).ok_or_else(fault)?;
        let end = start.checked_add(bytes).filter(|end| *end <= self.0.len() as u64);
        Ok(start as usize..end.ok_or_else(fault)? as usize)
    }
}

impl DeviceMemory for Memory {
    fn load(&self, address: u64, bytes: u64) -> Result<Cow<'_, [u8]>, AccessFault> {
        Ok(Cow::Borrowed(&self.0[self.range(address, bytes)?]))
    }

    fn store(&mut self, address: u64, data: &[u8]) -> Result<(), AccessFault> {
        let range = self.range(address, data.len() as u64)?;
        self.0[range].copy_from_slice(data);
        Ok(())
    }
}

/// Block-major pages of `BLOCKS_BYTES`, then the operands.
struct Bench {
    memory: Memory,
    shape: KvShape,
    blocks: u64,
    end: u64,
}

const PAGES_BYTES: u64 = 512 << 20;

impl Bench {
    fn new(options: KvShapeOptions) -> Self {
        let shape = KvShape::new(options).unwrap();
        let memory = Memory(vec![1; (PAGES_BYTES + (256 << 20)) as usize]);
        let blocks = PAGES_BYTES / shape.block_bytes();
        let mut bench = Self { memory, shape, blocks, end: BASE + PAGES_BYTES };
        let stride = shape.block_plane_bytes();
        let planes: Vec<u64> = (0..shape.planes()).map(|p| BASE + p * stride).collect();
        assert_eq!(bench.put(&planes), BASE + PAGES_BYTES);
        bench
    }

    /// Stores an operand; where it lies.
    fn put<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> u64 {
        let bytes = bytemuck::cast_slice(values);
        let at = self.room(bytes.len() as u64);
        self.memory.store(at, bytes).unwrap();
        at
    }

    fn room(&mut self, bytes: u64) -> u64 {
        let at = self.end;
        self.end = (at + bytes).next_multiple_of(64);
        at
    }

    fn run(&mut self, name: &str, args: &KernelArgs) {
        let reference = references().iter().find(|reference| reference.name == name).unwrap();
        (reference.run)(&mut self.memory, &LaunchConfig::linear(1, 32), args).unwrap();
    }

    /// The reader: as much as all memory, `blocks_of_launch` a launch, in random order, of the first
    /// `blocks` blocks.
    fn checksum(&mut self, blocks_of_launch: u64, blocks: u64) -> f64 {
        let ids: Vec<i32> = shuffled(self.blocks).iter().map(|id| id % blocks as i32).collect();
        let launch_bytes = blocks_of_launch * self.shape.block_bytes();
        let table = self.put(&ids);
        let tokens = blocks_of_launch as u32 * self.shape.block_tokens();
        let lens = self.put(&[tokens]);
        let sums = self.room(blocks_of_launch * 8);
        let launches = self.blocks / blocks_of_launch;
        best_gbs(launches * launch_bytes, || {
            for launch in 0..launches {
                let args = KernelArgs::new()
                    .arg(table + launch * blocks_of_launch * 4)
                    .arg(blocks_of_launch)
                    .arg(lens)
                    .arg(1u32)
                    .arg(BASE + PAGES_BYTES)
                    .arg(self.shape.planes() as u32)
                    .arg(self.shape.row_bytes())
                    .arg(u64::from(self.shape.block_tokens()))
                    .arg(self.shape.block_bytes())
                    .arg(self.shape.row_bytes())
                    .arg(self.blocks)
                    .arg(sums);
                self.run("paged_checksum", &args);
            }
        })
    }

    /// A chunk of 64 MiB stored into blocks in random order, or single slots in random order.
    fn transfer(&mut self, scattered: bool) -> f64 {
        let block_tokens = u64::from(self.shape.block_tokens());
        let tokens = (64 << 20) / self.shape.token_bytes();
        let ids = shuffled(self.blocks);
        let mut slots: Vec<i64> = (0..tokens)
            .map(|t| {
                i64::from(ids[(t / block_tokens) as usize]) * block_tokens as i64
                    + (t % block_tokens) as i64
            })
            .collect();
        if scattered {
            let order = shuffled(tokens);
            slots = order.iter().map(|t| slots[*t as usize]).collect();
        }
        let mapping = self.put(&slots);
        let chunk = self.room(tokens * self.shape.token_bytes());
        let args = RawArgs {
            chunk,
            planes: BASE + PAGES_BYTES,
            mapping,
            tokens,
            skip: 0,
            layers: self.shape.layers(),
            kv_count: self.shape.kv_count(),
            row_bytes: self.shape.row_bytes(),
            block_tokens,
            block_stride: self.shape.block_bytes(),
            direction: 0,
            num_blocks: self.blocks,
            vector_bytes: 8,
            ..WHOLE_ROWS
        }
        .one(0);
        best_gbs(tokens * self.shape.token_bytes(), || self.run("transfer_8", &args))
    }

    /// What this machine can at most: adding up the words of the pages, in order, on one thread.
    fn plain_sum(&self) -> f64 {
        let words = bytemuck::cast_slice::<u8, u64>(&self.memory.0[..PAGES_BYTES as usize]);
        best_gbs(PAGES_BYTES, || {
            std::hint::black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
        })
    }

    fn fill(&mut self) -> f64 {
        let tokens = (64 << 20) / self.shape.token_bytes();
        let keys = self.put(&(0..tokens).collect::<Vec<u64>>());
        let chunk = self.room(tokens * self.shape.token_bytes());
        let args = KernelArgs::new()
            .arg(chunk)
            .arg(keys)
            .arg(tokens)
            .arg(self.shape.layers())
            .arg(self.shape.kv_count())
            .arg(self.shape.row_bytes());
        best_gbs(tokens * self.shape.token_bytes(), || self.run("fill_pattern", &args))
    }
}

fn shuffled(count: u64) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..count as i32).collect();
    let mut random = 1u64;
    for i in (1..ids.len()).rev() {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        ids.swap(i, (random >> 33) as usize % (i + 1));
    }
    ids
}

/// GB/s of the best of five runs.
fn best_gbs(bytes: u64, mut run: impl FnMut()) -> f64 {
    let seconds = (0..5).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("GB/s of KV; reader on 1 thread, and on up to {threads}\n");
    println!(
        "| layers | kv | row bytes | block tokens | plain sum, 1 | reader, 1, cached | reader, 1 | reader | transfer, blocks | transfer, slots | fill |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (layers, kv_count, row_bytes, block_tokens) in
        [(1, 1, 16, 512), (1, 2, 16, 512), (1, 2, 24, 64), (2, 2, 128, 16), (32, 2, 2048, 16)]
    {
        let options = KvShapeOptions { layers, kv_count, row_bytes, block_tokens };
        let mut bench = Bench::new(options);
        let block_bytes = bench.shape.block_bytes();
        // Just below what is worth a second thread; 256 KiB of blocks stay in the core's cache.
        let blocks = bench.blocks;
        let few = ((1 << 20) / block_bytes).max(1);
        let hot = bench.checksum(few, ((256 << 10) / block_bytes).max(1));
        let one = bench.checksum(few, blocks);
        let many = bench.checksum((64 << 20) / block_bytes, blocks);
        let sum = bench.plain_sum();
        let blocks = bench.transfer(false);
        let slots = bench.transfer(true);
        let fill = Bench::new(options).fill();
        println!(
            "| {layers} | {kv_count} | {row_bytes} | {block_tokens} | {sum:.1} | {hot:.1} | {one:.1} | {many:.1} | {blocks:.1} | {slots:.1} | {fill:.1} |"
        );
    }
}
