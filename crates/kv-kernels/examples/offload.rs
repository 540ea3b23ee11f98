//! Moves blocks to pinned memory and back to other blocks, and checks every byte by its sums.
//!
//! `cargo run -p kv-kernels --example offload` runs on the simulated device.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use bytemuck::NoUninit;
use cuda_driver::{Device, DeviceBuffer, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    BlockCopy, BlockId, BlockPair, BlockPairs, Blocks, HostBlocks, KvKernels, KvShape,
    KvShapeOptions, PagedKv, PagedLayout,
    verify::{BlockSums, block_sum},
};

const BLOCKS: u64 = 8;

fn main() -> Result<(), Box<dyn Error>> {
    // On a GPU: `cuda_driver::CudaDriver::load()?`.
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let stream = Stream::new(&device)?;
    let kernels = KvKernels::load(&device)?;

    // Eight blocks on the device, layer by layer, and room for two in pinned memory, each in one piece.
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 64, block_tokens: 4 };
    let shape = KvShape::new(options)?;
    let pages = DeviceBuffer::alloc(&device, BLOCKS * shape.block_bytes())?;
    let layout = PagedLayout::layer_major(&shape, BLOCKS)?;
    let paged = PagedKv::new(&stream, shape, layout, pages.span(), BLOCKS)?;
    let bytes: Vec<u8> = (0..pages.bytes()).map(|byte| (byte % 251) as u8).collect();
    stream.upload(pages.span(), &bytes)?;
    let room = 2 * shape.block_bytes();
    let pinned = Arc::new(PinnedBuffer::alloc(&device, room, HostAllocFlags::CACHED)?);
    let layout = PagedLayout::block_major(&shape);
    let host = HostBlocks::new(&stream, shape, layout, (pinned, 0), 2)?;

    // Blocks 5 and 2 go to the host, and from there to blocks 0 and 7.
    let pair = |(source, destination): (u16, u16)| BlockPair {
        source: source.into(),
        destination: destination.into(),
    };
    let out = [(5, 0), (2, 1)].map(pair);
    let back = [(0, 0), (1, 7)].map(pair);
    for (from, to, pairs) in [
        (Blocks::from(&paged), Blocks::from(&host), &out),
        (Blocks::from(&host), Blocks::from(&paged), &back),
    ] {
        let device_pairs = upload(&stream, pairs)?;
        let copy = BlockCopy {
            from,
            to,
            pairs: device_pairs.span().into(),
            count: 2,
            // The host's copy: ids out of range and blocks that are written twice are errors here.
            host_pairs: Some(BlockPairs::new(pairs)?),
            from_blocks: from.count(),
            to_blocks: to.count(),
            report: None,
            multiprocessors: None,
        };
        kernels.copy_blocks(&stream, copy)?;
    }

    // A block has the same sum in every layout and memory.
    let ids = [5, 0, 2, 7].map(BlockId::from);
    let (device_ids, sums) = (upload(&stream, &ids)?, upload(&stream, &[0u64; 4])?);
    let args = BlockSums {
        blocks: (&paged).into(),
        ids: device_ids.span().into(),
        count: 4,
        host_ids: Some(&ids),
        num_blocks: BLOCKS,
        sums: sums.span(),
        report: None,
    };
    kernels.sum_blocks(&stream, args)?;
    let mut found = [0u64; 4];
    stream.download(bytemuck::cast_slice_mut(&mut found), sums.span())?;
    let mut block = vec![0; shape.block_bytes() as usize];
    for (number, pair) in found.chunks(2).enumerate() {
        // The stream has been waited for: the host's blocks can be read.
        host.read_block(number as u64, &mut block)?;
        let on_host = block_sum(&block);
        println!(
            "block {}: {:#018x} on the device, {on_host:#018x} on the host",
            ids[2 * number],
            pair[0]
        );
        if pair != [on_host; 2] {
            return Err(format!("block {} was lost on its way", ids[2 * number]).into());
        }
    }
    Ok(())
}

fn upload<T: NoUninit>(stream: &Stream, values: &[T]) -> Result<DeviceBuffer, Box<dyn Error>> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let buffer = DeviceBuffer::alloc(stream.device(), bytes.len() as u64)?;
    stream.upload(buffer.span(), bytes)?;
    Ok(buffer)
}
