//! What a cached prompt asks of the allocator: its blocks are lists from the pool to the sequence, so the number
//! of allocations does not depend on theirs.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "this test uses its share")]
#[path = "../../kv-pool/tests/counting/mod.rs"]
mod counting;
#[allow(dead_code, reason = "this test uses its share")]
#[path = "common/engine.rs"]
mod engine;

use std::sync::Arc;

use counting::allocations;
use cuda_driver::Device;
use cuda_sim::{SimConfig, SimDriver};
use engine::{options, shape, streams};
use kv_cache::{KvCache, KvCacheOptions};
use kv_pool::BlockHash;

const BLOCK_TOKENS: u32 = 4;

/// Allocations of the admission and the release of a cached prompt, when it was done before.
fn of_a_cached_prompt(blocks: u32) -> u64 {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    sim.register_kernels(kv_kernels::references());
    let device = Device::open(Arc::new(sim), 0).unwrap();
    let options = KvCacheOptions {
        blocks_per_sequence_max: blocks + 1,
        step_array_bytes: 1 << 20,
        ..options(shape(1, 64, BLOCK_TOKENS), 2 * blocks + 2, 0)
    };
    let mut cache = KvCache::new(&streams(&[device]), options).unwrap();
    let hashes: Vec<_> =
        (0..blocks).map(|block| BlockHash::chain(BlockHash::ROOT, &[block])).collect();
    let tokens = u64::from(blocks * BLOCK_TOKENS) + 1;
    let mut sequence = cache.admit(tokens, &hashes).unwrap();
    cache.seal(&mut sequence, &hashes).unwrap();
    drop(sequence);
    let mut before = 0;
    for _ in 0..3 {
        before = allocations();
        let sequence = cache.admit(tokens, &hashes).unwrap();
        assert_eq!(sequence.cached_tokens(), tokens - 1);
        drop(sequence);
    }
    let counted = allocations() - before;
    cache.close().unwrap();
    counted
}

#[test]
fn the_number_of_allocations_of_a_cached_prompt_does_not_grow_with_it() {
    let counts = [1, 64, 1024, 8192].map(of_a_cached_prompt);
    assert!(counts.iter().all(|&count| count <= 16), "{counts:?}");
    // The count is seen to count.
    let before = allocations();
    drop(std::hint::black_box(Vec::<u8>::with_capacity(64)));
    assert_eq!(allocations() - before, 1);
}
