//! An engine's loop over a cache: requests that share a system prompt are admitted, computed in chunks, decode a few
//! tokens, and leave.
//!
//! `cargo run -p kv-cache --example serve` runs on the simulated device. On a GPU the driver is
//! `cuda_driver::CudaDriver::load()?`, and the engine enqueues its model where the comment says.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_cache::{
    Answer, Committed, Growth, HostPinning, KvCache, KvCacheOptions, MemoryRules, PoolRules,
    Request, Sequence, TransportRules,
};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_pool::BlockHasher;

const REQUESTS: u32 = 6;
/// Tokens that a step computes at most, those of running requests aside.
const BUDGET: u64 = 96;
const TOKENS_OUT: u64 = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut cache = cache()?;
    // 64 tokens that all prompts begin with, then 40 of their own.
    let mut waiting: Vec<Request> = (0..REQUESTS)
        .map(|request| (0..64).chain(1000 * (request + 1)..1000 * (request + 1) + 40).collect())
        .map(Request::new)
        .collect();
    let mut running: Vec<Sequence> = Vec::new();

    while !waiting.is_empty() || !running.is_empty() {
        let step = cache.begin_step()?;
        let mut budget = BUDGET;
        for sequence in &mut running {
            // The id that the model has sampled in the step before.
            if let Some(before) = sequence.awaits() {
                let committed = cache.commit(sequence, before, &[7])?;
                assert_eq!(committed, Committed::Taken);
            }
            // The next token, or the next chunk of the prompt.
            let tokens = sequence.to_compute().min(BUDGET) as u32;
            cache.reserve(sequence, tokens)?;
            budget = budget.saturating_sub(tokens.into());
        }
        // The first request computes the shared prefix, and the others wait for it.
        let answers = cache.admit(&mut waiting, budget)?;
        let mut admitted = Vec::new();
        for (at, answer) in answers.into_iter().enumerate() {
            match answer {
                Answer::Admitted(sequence) => {
                    let (tokens, cached) = (sequence.prompt_tokens(), sequence.cached_tokens());
                    println!("step {}: {tokens} tokens, {cached} cached", step.number());
                    admitted.push(at);
                    // The budget may be used up: then it has a chunk in a later step.
                    running.push(sequence);
                }
                Answer::Waiting(_) | Answer::NoRoom(_) | Answer::NoRow => {}
                Answer::Refused(error) => return Err(error.into()),
            }
        }
        admitted.into_iter().rev().for_each(|at| drop(waiting.remove(at)));

        let mut batch: Vec<&mut Sequence> =
            running.iter_mut().filter(|sequence| sequence.next() > 0).collect();
        cache.stage(&step, &mut batch, |_part, _step| Ok(()))?;
        for part in cache.parts() {
            let (_stream, buffers) = (part.compute(), part.batch());
            let (_table, _slots) = (buffers.tables[0].block_table, buffers.tables[0].slots);
            let _lengths = buffers.lengths;
            // Enqueue the model on `_stream`: it writes the KV of new tokens to `_slots`, and reads all KV through
            // `_table` and `_lengths`.
        }
        cache.finish_step(step)?;
        // Dropping a sequence releases its blocks, which stay cached.
        running.retain(|sequence| sequence.known() < sequence.prompt_tokens() + TOKENS_OUT);
    }
    cache.drain()?;

    let (stats, decided) = (cache.stats(), cache.manager().stats());
    println!("{} steps, {} device blocks with memory", decided.steps, stats.ready_blocks);
    cache.close().map_err(|mut errors| errors.remove(0))?;
    Ok(())
}

fn cache() -> Result<KvCache, Box<dyn std::error::Error>> {
    let driver = SimDriver::new(SimConfig::default())?;
    driver.register_kernels(kv_kernels::references());
    let device = Device::open(Arc::new(driver), 0)?;
    let shape =
        KvShape::new(KvShapeOptions { layers: 8, kv_count: 2, row_bytes: 128, block_tokens: 16 })?;
    let options = KvCacheOptions {
        shape,
        placement: None,
        device_blocks: 256,
        growth: Growth::OnDemand,
        host_blocks: 64,
        pinning: HostPinning::BACKGROUND,
        transport: TransportRules::default(),
        sequences_max: 16,
        blocks_per_sequence_max: 32,
        overlap_depth: 1,
        step_tokens_max: 1024,
        step_arrays: Vec::new(),
        memory: MemoryRules::default(),
        pool: PoolRules::default(),
        // Blocks that admission leaves for what is running.
        watermark_blocks: 8,
        scrubs: false,
        hasher: BlockHasher::FAST,
    };
    Ok(KvCache::new(&[Stream::new(&device)?], options)?)
}
