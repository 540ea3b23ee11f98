//! An engine's loop over a cache: requests that share a system prompt are admitted, decode a few tokens, and leave.
//!
//! `cargo run -p kv-cache --example serve` runs on the simulated device. On a GPU the driver is
//! `cuda_driver::CudaDriver::load()?`, and the engine enqueues its model where the comment says.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_cache::{
    Admission, Growth, KvCache, KvCacheOptions, MemoryRules, PoolRules, Request, Sequence,
    TransportRules,
};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_pool::BlockHash;

const BLOCK_TOKENS: usize = 16;
const REQUESTS: u32 = 6;
const DECODE_STEPS: u64 = 20;

/// A running request.
struct Live {
    sequence: Sequence,
    /// Names of the prompt's full blocks.
    names: Vec<BlockHash>,
    /// First token that the next step computes.
    computed: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut cache = cache()?;
    // 64 tokens that all prompts begin with, then 40 of their own.
    let prompts: Vec<Vec<u32>> = (0..REQUESTS)
        .map(|request| (0..64).chain(1000 * (request + 1)..1000 * (request + 1) + 40).collect())
        .collect();

    // The first request computes the shared prefix, and the batch of the others finds it.
    let mut live = Vec::new();
    for batch in [&prompts[..1], &prompts[1..]] {
        let names: Vec<Vec<BlockHash>> = batch.iter().map(|prompt| names(prompt)).collect();
        let requests: Vec<Request<'_>> = batch
            .iter()
            .zip(&names)
            .map(|(prompt, names)| Request::new(prompt.len() as u64, names))
            .collect();
        let step = cache.begin_step()?;
        let Admission { admitted, refused } = cache.admit_fitting(&requests, u64::MAX)?;
        if let Some(refused) = refused {
            return Err(refused.into());
        }
        for (sequence, names) in admitted.into_iter().zip(names) {
            println!("admitted {} tokens, {} cached", sequence.tokens(), sequence.cached_tokens());
            live.push(Live { computed: sequence.cached_tokens(), sequence, names });
        }
        run(&mut cache, &mut live)?;
        cache.finish_step(step)?;
    }

    for _ in 0..DECODE_STEPS {
        let step = cache.begin_step()?;
        for request in &mut live {
            let tokens = request.sequence.tokens() + 1;
            cache.extend(&mut request.sequence, tokens)?;
        }
        run(&mut cache, &mut live)?;
        cache.finish_step(step)?;
    }
    // Dropping the sequences releases their blocks, which stay cached.
    drop(live);
    cache.drain()?;

    let stats = cache.stats();
    println!("{} steps, {} device blocks with memory", stats.steps, stats.ready_blocks);
    cache.close().map_err(|mut errors| errors.remove(0))?;
    Ok(())
}

/// Stages a step of all requests, and seals the blocks that it fills.
fn run(cache: &mut KvCache, live: &mut [Live]) -> Result<(), Box<dyn std::error::Error>> {
    let mut slots = Vec::new();
    for request in live.iter() {
        let tokens = request.computed..request.sequence.tokens();
        cache.slot_mapping(&request.sequence, tokens, &mut slots)?;
    }
    let sequences: Vec<&Sequence> = live.iter().map(|request| &request.sequence).collect();
    let staged = cache.stage(&sequences, None, |_part, step| step.array(&slots))?;
    for (part, staged) in cache.parts().iter().zip(&staged) {
        let (_stream, _table) = (part.compute(), staged.block_table()?);
        let (_lengths, _slots) = (staged.lengths()?, staged.span(*staged.extra())?);
        // Enqueue the model on `_stream`: it writes the KV of new tokens to `_slots`, and reads all KV through
        // `_table` and `_lengths`.
    }
    for request in live {
        cache.seal(&mut request.sequence, &request.names)?;
        request.computed = request.sequence.tokens();
    }
    Ok(())
}

/// The names of a prompt's full blocks: each has the name of the block before it in it.
fn names(prompt: &[u32]) -> Vec<BlockHash> {
    let mut name = BlockHash::ROOT;
    let blocks = prompt.chunks_exact(BLOCK_TOKENS);
    blocks
        .map(|tokens| {
            name = BlockHash::chain(name, tokens);
            name
        })
        .collect()
}

fn cache() -> Result<KvCache, Box<dyn std::error::Error>> {
    let driver = SimDriver::new(SimConfig::default())?;
    driver.register_kernels(kv_kernels::references());
    let device = Device::open(Arc::new(driver), 0)?;
    let shape = KvShape::new(KvShapeOptions {
        layers: 8,
        kv_count: 2,
        row_bytes: 128,
        block_tokens: BLOCK_TOKENS as u32,
    })?;
    let options = KvCacheOptions {
        shape,
        placement: None,
        device_blocks: 256,
        growth: Growth::OnDemand,
        host_blocks: 64,
        transport: TransportRules::default(),
        sequences_max: 16,
        blocks_per_sequence_max: 32,
        overlap_depth: 1,
        step_array_bytes: 16 << 10,
        memory: MemoryRules::default(),
        pool: PoolRules::default(),
    };
    Ok(KvCache::new(&[Stream::new(&device)?], options)?)
}
