//! A model whose layers lie on two GPUs: one numbering of blocks, one batch a step on each.
//!
//! `cargo run -p kv-plane --example two_gpus`

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, Driver, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::{GroupId, KvCache, KvCacheOptions, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = SimConfig { devices: 2, ..SimConfig::default() };
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(config)?);
    let stream = |ordinal| Stream::new(&Device::open(Arc::clone(&driver), ordinal)?);
    let compute = [stream(0)?, stream(1)?];
    let shape =
        KvShape::new(KvShapeOptions { layers: 5, kv_count: 2, row_bytes: 128, block_tokens: 16 })?;
    let mut kv = KvCache::new(&compute, KvCacheOptions::new(shape, 64))?;
    let layers: Vec<_> = kv.parts().iter().map(|part| part.layers().to_vec()).collect();
    assert_eq!(layers, [vec![0, 1, 2], vec![3, 4]]);
    let mut requests = VecDeque::from([Request::new((0..100).collect())]);
    let step = kv.begin_step()?;
    let Some((_, mut sequence)) = kv.admit(&mut requests, 128)?.admitted.pop() else {
        return Err("the cache is full".into());
    };
    kv.stage(&step, &mut [&mut sequence])?;
    for part in kv.parts() {
        // Enqueue these layers on the device's stream; the hidden states go from one to the next.
        let _ = (part.layers(), part.compute(), part.batch());
    }
    kv.finish_step(step)?;
    drop(sequence);
    // Blocks are free when both devices have completed the step.
    kv.drain()?;
    let pool = kv.manager().pool(GroupId(0)).ok_or("no group")?;
    assert_eq!(pool.stats().primary.pinned, 0);
    kv.close()?;
    Ok(())
}
