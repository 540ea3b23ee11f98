//! The main use: a scheduler serves requests whose prompts begin alike, from a pool that is smaller than what they
//! need together.
//!
//! `cargo run -p kv-pool --example serving`

#![allow(clippy::print_stdout, reason = "a program that reports")]

use kv_pool::{BlockHash, BlockPool, Naming, PoolConfig, TableEntry};

const BLOCK_TOKENS: usize = 16;
const BLOCKS: u64 = 64;

/// The names of the full blocks of a prompt: each depends on all tokens before it.
fn names(prompt: &[u32]) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    let full = prompt.chunks_exact(BLOCK_TOKENS);
    full.map(|tokens| {
        parent = BlockHash::chain(parent, tokens);
        parent
    })
    .collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS))?;
    // All requests share 160 tokens, ten blocks, and go on with 64 of their own.
    let prompt = |request: u32| {
        let own = (0..64).map(move |token| 1_000 * (request + 1) + token);
        (0..160).chain(own).collect::<Vec<u32>>()
    };
    let mut waiting: Vec<_> = (0..24).map(|request| names(&prompt(request))).collect();
    let mut step = 0;
    while !waiting.is_empty() {
        step += 1;
        // Blocks that are released from here on may still be read by the work of this step.
        let epoch = pool.begin_epoch();
        // First all are looked up, and then blocks are claimed, in order: none takes what another one has found.
        let found: Vec<_> = waiting.iter().map(|names| pool.match_prefix(names)).collect();
        let (mut served, mut written) = (0, 0);
        for (prefix, names) in found.into_iter().zip(&waiting) {
            // The budget of a step: 32 blocks to compute.
            if written >= 32 {
                break;
            }
            let mut claimed = match pool.claim(names.len() - prefix.len()) {
                Ok(claimed) => claimed,
                Err(refused) => {
                    println!("step {step}: {} wait: {refused}", waiting.len() - served);
                    break;
                }
            };
            let cached = prefix.len();
            let block_table: Vec<_> =
                prefix.ids().chain(claimed.ids()).map(TableEntry::from).collect();
            // ... enqueue the work that writes the claimed blocks, with this table ...
            println!("step {step}: {cached} of {} blocks were cached", block_table.len());
            // Written: others find the blocks from now on. Dropped: nobody needs them at present.
            let naming = cached
                .checked_sub(1)
                .map_or_else(Naming::default, |last| Naming::after(names[last]));
            written += claimed.len();
            drop(claimed.register(&names[cached..], naming)?);
            served += 1;
        }
        waiting.drain(..served);
        // ... wait for the work of the step ...
        pool.complete_epoch(epoch)?;
    }
    let counters = pool.counters();
    println!(
        "{} of {} blocks were found, {} evicted",
        counters.hits, counters.lookups, counters.evicted
    );
    pool.check_integrity()?;
    Ok(())
}
