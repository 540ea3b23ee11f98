//! A decode step as a captured CUDA graph: its kernels keep their addresses, and each replay reads its step.
//!
//! `cargo run -p kv-plane --example graph`

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KernelError, KvShape, KvShapeOptions, verify::ChecksumArgs};
use kv_plane::{GroupId, KvCache, KvCacheOptions, Request};

const BLOCKS: u32 = 80;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver = SimDriver::new(SimConfig::default())?;
    driver.register_kernels(kv_kernels::references());
    driver.register_kernels(kv_stage::references());
    let device = Device::open(Arc::new(driver), 0)?;
    let compute = Stream::new(&device)?;
    let shape =
        KvShape::new(KvShapeOptions { layers: 1, kv_count: 2, row_bytes: 64, block_tokens: 16 })?;
    let mut options = KvCacheOptions::new(shape, BLOCKS);
    options.groups[0].blocks_per_sequence_max = BLOCKS;
    let mut kv = KvCache::new(std::slice::from_ref(&compute), options)?;
    let mut request = Request::new((0..40).collect());
    request.tokens_max = u64::from(BLOCKS) * 16;
    let step = kv.begin_step()?;
    let mut queue = VecDeque::from([request]);
    let Some((_, mut sequence)) = kv.admit(&mut queue, 64)?.admitted.pop() else {
        return Err("no room".into());
    };
    kv.stage(&step, &mut [&mut sequence])?;
    kv.finish_step(step)?;
    // The model's kernels; here one that sums the bytes of each block.
    let sums = DeviceBuffer::alloc(&device, u64::from(BLOCKS) * 8)?;
    let part = &kv.parts()[0];
    let reads = ChecksumArgs {
        block_table: part.batch().tables[0].block_table,
        table_stride: BLOCKS.into(),
        seq_lens: part.batch().lengths,
        sequences: 1,
        checksums: sums.span(),
        num_blocks: BLOCKS.into(),
    };
    let model = || part.kernels().paged_checksum(&compute, part.paged(), reads);
    let graph = compute.capture::<KernelError>(model)?;
    for number in 2..1000 {
        let step = kv.begin_step()?;
        kv.commit(&mut sequence, number - 1, &[7])?;
        kv.reserve(&mut sequence, 1)?.given()?;
        kv.stage(&step, &mut [&mut sequence])?;
        // SAFETY: the kernels, the cache and the sums live until the end, which waits.
        unsafe { graph.launch(&compute)? };
        kv.finish_step(step)?;
    }
    kv.drain()?;
    assert_eq!((sequence.known(), sequence.block_count(GroupId(0))), (1038, 65));
    Ok(())
}
