//! A hybrid model: few layers with attention, and many with a recurrent state, as Jamba has.
//!
//! `cargo run -p kv-plane --example hybrid`

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
    let attention = KvShapeOptions { layers: 4, kv_count: 2, row_bytes: 256, block_tokens: 16 };
    // A state of 64 KiB in each of 28 layers.
    let state = KvShapeOptions { layers: 28, kv_count: 1, row_bytes: 1 << 16, block_tokens: 1 };
    let states = GroupOptions {
        kind: GroupKind::State { checkpoint_tokens: 256, drafts: 0 },
        // One for each running sequence, and checkpoints.
        ..GroupOptions::new(KvShape::new(state)?, 24)
    };
    let mut options = KvCacheOptions::new(KvShape::new(attention)?, 256);
    options.sequences_max = 8;
    options.groups.push(states);
    let mut kv = KvCache::new(&[compute], options)?;
    let prompts = [(0..1000).collect::<Vec<u32>>(), (0..800).chain(5000..5100).collect()];
    for (prompt, hit) in prompts.into_iter().zip([0, 768]) {
        let mut queue = VecDeque::from([Request::new(prompt)]);
        let step = kv.begin_step()?;
        let admitted = kv.admit(&mut queue, 1024)?.admitted.pop();
        let Some((_, mut sequence)) = admitted else { return Err("no room".into()) };
        // Attention could go on behind 800 tokens. The states' last checkpoint before that decides for both.
        assert_eq!(sequence.cached_tokens(), hit);
        kv.stage(&step, &mut [&mut sequence])?;
        kv.finish_step(step)?;
        while sequence.to_compute() > 0 {
            let step = kv.begin_step()?;
            // A step ends at a checkpoint: it may get fewer tokens than it asked for.
            let left = sequence.to_compute() as u32;
            kv.reserve(&mut sequence, left)?.given()?;
            assert!(sequence.next() <= 256);
            kv.stage(&step, &mut [&mut sequence])?;
            // The layers read and write this state in place.
            assert_eq!(kv.manager().block_ids(GroupId(1), &sequence).len(), 1);
            kv.finish_step(step)?;
        }
    }
    kv.drain()?;
    kv.close()?;
    Ok(())
}
