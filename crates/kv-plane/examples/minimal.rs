//! The loop of an engine: requests come in, are computed in chunks, decode and leave.
//!
//! `cargo run -p kv-plane --example minimal`

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::{KvCache, KvCacheOptions, Request, Sequence};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On a GPU: `CudaDriver::load()?`.
    let device = Device::open(Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let compute = Stream::new(&device)?;
    let shape =
        KvShape::new(KvShapeOptions { layers: 8, kv_count: 2, row_bytes: 128, block_tokens: 16 })?;
    let mut kv = KvCache::new(&[compute], KvCacheOptions::new(shape, 64))?;
    // 64 tokens that all prompts begin with, then 20 of their own.
    let prompt = |request: u32| (0..64).chain(request * 100..request * 100 + 20).collect();
    let mut waiting: VecDeque<_> = (1..5).map(|request| Request::new(prompt(request))).collect();
    let mut running: Vec<Sequence> = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        let step = kv.begin_step()?;
        for sequence in &mut running {
            // The id that the model has sampled in a step before.
            if let Some(before) = sequence.awaits() {
                kv.commit(sequence, before, &[7])?;
            }
        }
        running.retain(|sequence| sequence.known() < 100);
        for sequence in &mut running {
            // Without room, a server suspends or drops another sequence.
            kv.reserve(sequence, sequence.to_compute().min(32) as u32)?.given()?;
        }
        // The first request computes the shared prefix, and the others wait for it.
        let admission = kv.admit(&mut waiting, 32)?;
        running.extend(admission.admitted.into_iter().map(|(_, sequence)| sequence));
        if let Some((_, error)) = admission.refused.into_iter().next() {
            // It can never be admitted: a server tells who has asked, and goes on.
            return Err(error.into());
        }
        let mut batch: Vec<_> = running.iter_mut().filter(|one| one.next() > 0).collect();
        kv.stage(&step, &mut batch)?;
        // Enqueue the model on `kv.parts()[0].compute()`: it reads `kv.parts()[0].batch()`.
        kv.finish_step(step)?;
    }
    let stats = kv.manager().stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens), (4 * 84, 3 * 64));
    kv.close()?;
    Ok(())
}
