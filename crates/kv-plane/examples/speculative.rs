//! Drafts under overlap: the next step is staged before it is known how many drafts of the last one stand.
//!
//! `cargo run -p kv-plane --example speculative`

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::manager::Start;
use kv_plane::{KvCache, KvCacheOptions, Request};

/// Drafts in a step, and how many of them are accepted here.
const DRAFTS: u32 = 3;
const ACCEPTED: u32 = 1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let compute = Stream::new(&device)?;
    let shape =
        KvShape::new(KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 64, block_tokens: 16 })?;
    let options = KvCacheOptions { step_arrays: vec![4], ..KvCacheOptions::new(shape, 64) };
    let mut kv = KvCache::new(&[compute], options)?;
    let mut requests = VecDeque::from([Request::new((0..40).collect())]);
    let step = kv.begin_step()?;
    let Some((_, mut sequence)) = kv.admit(&mut requests, 64)?.admitted.pop() else {
        return Err("the cache is full".into());
    };
    kv.stage(&step, &mut [&mut sequence])?;
    kv.finish_step(step)?;
    let (mut open, mut outcomes) = (0, vec![(1, vec![7])]);
    for number in 2..20 {
        let step = kv.begin_step()?;
        // Ids of a step arrive when the next one is staged already.
        while outcomes.len() > 1 || number == 2 && !outcomes.is_empty() {
            let (before, ids) = outcomes.remove(0);
            kv.commit(&mut sequence, before, &ids)?;
        }
        // The sampled token, and drafts behind it: counted from where the KV ends at most.
        kv.reserve(&mut sequence, 1 + DRAFTS)?.given()?;
        kv.stage_with(&step, &mut [&mut sequence], &mut |_, step| step.array(0, &[1 + ACCEPTED]))?;
        open += u32::from(matches!(kv.manager().last_plan().batch[0].start, Start::Open { .. }));
        // The model computes the tokens at `positions` and `slots` of the batch. Then its sampler says how
        // many of them stand: here it copies the number.
        let (part, row) = (&kv.parts()[0], sequence.row().map_or(0, |row| row.index() as u64));
        let accepted = part.batch().accepted.slice(row * 4, 4)?;
        part.compute().copy_on_device(accepted, part.batch().arrays[0])?;
        kv.finish_step(step)?;
        outcomes.push((number, vec![7; 1 + ACCEPTED as usize]));
    }
    assert!(open > 15, "steps were staged behind open outcomes");
    assert_eq!(sequence.resolved(), 40 + 16 * u64::from(1 + ACCEPTED));
    Ok(())
}
