//! Adopts the tensors that an engine allocated for paged attention, and refuses those of its next release.
//!
//! `cargo run -p kv-kernels --example adopt` runs on the simulated device.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    HostBlocks, KvFormat, PagedKv,
    layout::{FormatOptions, TensorView},
};

const BLOCKS: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    // On a GPU: `cuda_driver::CudaDriver::load()?`.
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let stream = Stream::new(&device)?;

    // The engine's: a tensor of keys and one of values for each of two layers, in bf16. An engine has
    // pointers, of which `DeviceSpan::of_device` makes spans.
    let bytes = BLOCKS * 8 * 128 * 16 * 2;
    let caches: Vec<DeviceBuffer> =
        (0..4).map(|_| DeviceBuffer::alloc(&device, bytes)).collect::<Result<_, _>>()?;
    // [blocks, heads, head size / 8, tokens, 8] and [blocks, heads, head size, tokens].
    let (keys, key_strides) = ([BLOCKS, 8, 16, 16, 8], [16384, 2048, 128, 8, 1]);
    let (values, value_strides) = ([BLOCKS, 8, 128, 16], [16384, 2048, 16, 1]);
    let view = |(place, cache): (usize, &DeviceBuffer)| {
        let (shape, strides): (&[u64], &[i64]) =
            if place % 2 == 0 { (&keys, &key_strides) } else { (&values, &value_strides) };
        TensorView { span: cache.span(), element_bytes: 2, shape, strides }
    };
    let mut tensors: Vec<TensorView<'_>> = caches.iter().enumerate().map(view).collect();

    // What they are held to be, from the model's configuration.
    let options = FormatOptions {
        layers: 2,
        heads: 8,
        head_bytes: 128 * 2,
        element_bytes: 2,
        block_tokens: 16,
        blocks: BLOCKS,
        block_padding_bytes: 0,
    };
    let paged = PagedKv::adopt(&stream, KvFormat::PagedAttention, &options, &tensors)?;

    // A host tier keeps blocks as they lie on the device.
    let shape = *paged.shape();
    let room = 16 * shape.block_bytes();
    let pinned = Arc::new(PinnedBuffer::alloc(&device, room, HostAllocFlags::CACHED)?);
    let host = HostBlocks::new(&stream, shape, paged.layout().packed(&shape), (pinned, 0), 16)?;
    println!("{} blocks on the device, {} on the host", paged.blocks(), host.blocks());

    // The next release has values with the head size innermost.
    let (values, value_strides) = ([BLOCKS, 8, 128, 16], [16384, 2048, 1, 128]);
    (tensors[1].shape, tensors[1].strides) = (&values, &value_strides);
    match PagedKv::adopt(&stream, KvFormat::PagedAttention, &options, &tensors) {
        Err(refused) => println!("{refused}"),
        Ok(_) => return Err("another layout was adopted".into()),
    }
    Ok(())
}
