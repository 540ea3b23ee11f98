//! A cache in tensors that the engine has allocated, in FlashInfer's format.
//!
//! `cargo run -p kv-plane --example own_tensors`

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    KvFormat, PagedKv,
    layout::{FormatOptions, TensorView},
};
use kv_plane::{GroupId, KvCache, KvCacheOptions, Request};

const BLOCKS: u64 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let compute = Stream::new(&device)?;
    // Four layers of [blocks, K and V, 16 tokens, 2 heads, 64 elements of 2 bytes].
    let shape = [BLOCKS, 2, 16, 2, 64];
    let strides = [2 * 16 * 2 * 64, 16 * 2 * 64, 2 * 64, 64, 1];
    let bytes = BLOCKS * strides[0] as u64 * 2;
    let tensor = |_| DeviceBuffer::alloc(&device, bytes);
    let tensors = (0..4).map(tensor).collect::<Result<Vec<_>, _>>()?;
    let view = |tensor: &DeviceBuffer| TensorView {
        span: tensor.span(),
        element_bytes: 2,
        shape: &shape,
        strides: &strides,
    };
    let views: Vec<_> = tensors.iter().map(view).collect();
    let numbers = FormatOptions {
        layers: 4,
        heads: 2,
        head_bytes: 128,
        element_bytes: 2,
        block_tokens: 16,
        blocks: BLOCKS,
        block_padding_bytes: 0,
    };
    // What does not fit the tensors' real shape and strides is refused.
    let paged = PagedKv::adopt(&compute, KvFormat::FlashInferNhd, &numbers, &views)?;
    let options = KvCacheOptions::new(*paged.shape(), BLOCKS as u32);
    let mut kv = KvCache::over(&[compute], vec![paged], options)?;
    let mut requests = VecDeque::from([Request::new((0..100).collect())]);
    let step = kv.begin_step()?;
    let Some((_, mut sequence)) = kv.admit(&mut requests, 128)?.admitted.pop() else {
        return Err("the cache is full".into());
    };
    kv.stage(&step, &mut [&mut sequence])?;
    // The model writes the tokens to the batch's slots of its own tensors.
    kv.finish_step(step)?;
    assert_eq!(sequence.block_count(GroupId(0)), 7);
    drop(sequence);
    kv.close()?;
    Ok(())
}
