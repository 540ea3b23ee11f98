//! A model with full attention in every second layer and a sliding window in the others, as GPT-OSS has.
//!
//! `cargo run -p kv-plane --example window`

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::{GroupId, GroupKind, GroupOptions, KvCache, KvCacheOptions, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On a GPU: `CudaDriver::load()?`.
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let compute = Stream::new(&device)?;
    let layers = KvShapeOptions { layers: 12, kv_count: 2, row_bytes: 128, block_tokens: 16 };
    let shape = KvShape::new(layers)?;
    let windows = GroupOptions {
        kind: GroupKind::Window { tokens: 128, sinks: 4 },
        // Of a sequence of any length, only the blocks of the window and of the sinks stay, beside those of the
        // chunks in flight.
        ..GroupOptions::new(shape, 128)
    };
    let mut options = KvCacheOptions::new(shape, 256);
    options.groups.push(windows);
    let mut kv = KvCache::new(&[compute], options)?;
    let prompt: Vec<u32> = (0..2000).collect();
    for (hit, request) in [(0, Request::new(prompt.clone())), (1984, Request::new(prompt))] {
        let step = kv.begin_step()?;
        let admitted = kv.admit(&mut VecDeque::from([request]), 512)?.admitted.pop();
        let Some((_, mut sequence)) = admitted else { return Err("no room".into()) };
        // The second time the window's blocks at the end of the prefix are cached, and all of full attention.
        assert_eq!(sequence.cached_tokens(), hit);
        kv.stage(&step, &mut [&mut sequence])?;
        kv.finish_step(step)?;
        while sequence.to_compute() > 0 {
            let step = kv.begin_step()?;
            let chunk = sequence.to_compute().min(256) as u32;
            kv.reserve(&mut sequence, chunk)?.given()?;
            kv.stage(&step, &mut [&mut sequence])?;
            // Each group's layers read a table and slots of their own.
            let tables = &kv.parts()[0].batch().tables;
            assert_ne!(tables[0].block_table.address(), tables[1].block_table.address());
            kv.finish_step(step)?;
        }
        let held = |group| {
            let ids = kv.manager().block_ids(GroupId(group), &sequence);
            ids.iter().filter(|id| id.block().is_some()).count()
        };
        assert!(held(0) == 125 && held(1) < 40, "{} and {} blocks", held(0), held(1));
    }
    kv.drain()?;
    kv.close()?;
    Ok(())
}
