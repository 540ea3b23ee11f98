//! Speed of the committed kernels when run from their PTX, in instructions per second, with every
//! check on.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that prints its result")]

use std::time::Instant;

use cuda_driver::{Driver, KernelArgs, LaunchConfig};
use cuda_sim::{SimConfig, SimDriver};
use kv_testkit::raw_args::{RawArgs, WHOLE_ROWS};

const LAYERS: u32 = 8;
const KV: u32 = 2;
const ROW_BYTES: u64 = 2048;
const TOKENS: u64 = 512;
const BLOCK_TOKENS: u64 = 16;
const PLANES: u64 = (LAYERS * KV) as u64;
const CHUNK_BYTES: u64 = PLANES * TOKENS * ROW_BYTES;
const BLOCKS: u64 = TOKENS / BLOCK_TOKENS;
const BLOCK_STRIDE: u64 = BLOCK_TOKENS * ROW_BYTES;

fn main() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let context = sim.device_primary_ctx_retain(0).unwrap();
    // SAFETY: the context was retained above.
    unsafe { sim.ctx_set_current(context) }.unwrap();

    let keys = upload(&sim, &(0..TOKENS).collect::<Vec<u64>>());
    let chunk = sim.mem_alloc(CHUNK_BYTES).unwrap();
    let pages = sim.mem_alloc(CHUNK_BYTES).unwrap();
    let planes: Vec<u64> = (0..PLANES).map(|plane| pages + plane * BLOCKS * BLOCK_STRIDE).collect();
    let planes = upload(&sim, &planes);
    let slots = upload(&sim, &(0..TOKENS).rev().collect::<Vec<u64>>());
    let table = upload(&sim, &(0..BLOCKS as u32).collect::<Vec<u32>>());
    let lengths = upload(&sim, &[TOKENS as u32]);
    let sums = sim.mem_alloc(BLOCKS * 8).unwrap();
    let out = sim.mem_alloc(64 * BLOCKS * 4).unwrap();
    let rows = upload(&sim, &[0u32; 64]);

    let fill = KernelArgs::new();
    let fill = fill.arg(chunk).arg(keys).arg(TOKENS).arg(LAYERS).arg(KV).arg(ROW_BYTES);
    let source = include_str!("../../kv-kernels/ptx/pattern.compute_80.ptx");
    measure(&sim, source, "fill_pattern", ([1024, 1, 1], 256), &fill);

    let transfer = RawArgs {
        chunk,
        planes,
        mapping: slots,
        tokens: TOKENS,
        skip: 0,
        layers: LAYERS,
        kv_count: KV,
        row_bytes: ROW_BYTES,
        block_tokens: BLOCK_TOKENS,
        block_stride: BLOCK_STRIDE,
        direction: 0,
        num_blocks: TOKENS / BLOCK_TOKENS,
        vector_bytes: 16,
        ..WHOLE_ROWS
    };
    let transfer = transfer.one(0);
    let source = include_str!("../../kv-kernels/ptx/transfer_16.compute_80.ptx");
    let tiles = (CHUNK_BYTES / 16).div_ceil(256) as u32;
    measure(&sim, source, "transfer_16", ([tiles, 1, 1], 256), &transfer);

    let sum = KernelArgs::new().arg(table).arg(BLOCKS).arg(lengths).arg(1u32).arg(planes);
    let sum = sum.arg(PLANES as u32).arg(ROW_BYTES).arg(BLOCK_TOKENS).arg(BLOCK_STRIDE);
    let sum = sum.arg(ROW_BYTES).arg(BLOCKS).arg(sums);
    let source = include_str!("../../kv-kernels/ptx/checksum.compute_80.ptx");
    measure(&sim, source, "paged_checksum", ([BLOCKS as u32, 1, 1], 512), &sum);

    let gather = KernelArgs::new().arg(out).arg(BLOCKS).arg(table).arg(BLOCKS).arg(rows);
    let gather = gather.arg(64u32).arg(BLOCKS as u32).arg(1u32);
    let source = include_str!("../../kv-kernels/ptx/gather.compute_80.ptx");
    measure(&sim, source, "gather_rows", ([1, 64, 1], 32), &gather);
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
}

/// A buffer with these values.
fn upload<T: Copy + Into<u64>>(sim: &SimDriver, values: &[T]) -> u64 {
    let size = size_of::<T>();
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|&value| value.into().to_le_bytes().into_iter().take(size))
        .collect();
    let buffer = sim.mem_alloc(bytes.len() as u64).unwrap();
    // SAFETY: `bytes` is pageable memory, which is read only during the call.
    unsafe { sim.memcpy_htod_async(buffer, bytes.as_ptr() as u64, bytes.len() as u64, 0) }.unwrap();
    buffer
}

/// Runs a kernel for a while and prints its speed.
fn measure(
    sim: &SimDriver,
    source: &str,
    name: &str,
    (grid, threads): ([u32; 3], u32),
    args: &KernelArgs,
) {
    let module = sim.module_load_data(source, &mut String::new()).unwrap();
    // SAFETY: the module was loaded above.
    let function = unsafe { sim.module_get_function(module, name) }.unwrap();
    let config = LaunchConfig { grid, block: [threads, 1, 1], shared_bytes: 0 };
    let mut best = 0.0f64;
    for _ in 0..5 {
        let before = sim.instructions();
        let start = Instant::now();
        // SAFETY: the arguments are those of the kernel, and name device memory.
        unsafe { sim.launch_kernel(function, &config, args, 0) }.unwrap();
        sim.ctx_synchronize().unwrap();
        let count = (sim.instructions() - before) as f64;
        best = best.max(count / start.elapsed().as_secs_f64());
    }
    println!("{name}: {:.1} M thread-instructions a second", best / 1e6);
}
