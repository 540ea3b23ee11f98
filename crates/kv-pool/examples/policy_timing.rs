//! What the eviction policy of this crate costs: a full cache of 65,536 blocks, requests of 16 blocks, half of them found
//! again.
//!
//! `cargo run --release -p kv-pool --example policy_timing`

#![allow(clippy::print_stdout, reason = "a program that reports")]

use std::time::Instant;

use kv_pool::ConfigError;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyKind, PolicyTime};
use kv_pool::{BlockHash, policy::RecordId};

const BLOCKS: u32 = 1 << 16;
const REQUEST: u32 = 16;
const ROUNDS: u64 = 200_000;

/// Spreads numbers over names.
fn name(number: u64) -> BlockHash {
    BlockHash::from_u128(u128::from((number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// Nanoseconds for each block of a request that is evicted, for each that is then cached and released, and for each that
/// is found and released.
fn measure(policy: &mut dyn EvictionPolicy) -> [f64; 3] {
    let mut facts = vec![BlockFacts::new(BlockHash::ROOT); BLOCKS as usize];
    for (number, facts) in (0..).zip(&mut facts) {
        facts.hash = name(number);
        let block = RecordId::from_index(number as u32);
        policy.stored(block, facts);
        policy.evictable(block, facts);
    }
    let (mut evicting, mut caching, mut finding) = (0, 0, 0);
    let mut used = Vec::with_capacity(REQUEST as usize);
    for round in 0..ROUNDS {
        let now = PolicyTime { lookups: (round + 1) * u64::from(REQUEST), ms: round };
        let names = u64::from(BLOCKS) + now.lookups;
        let begun = Instant::now();
        for number in names..names + u64::from(REQUEST) {
            policy.missed(name(number), now);
            if let Some(victim) = policy.victim(now) {
                policy.evicted(victim, facts[victim.index()].hash);
                used.push(victim);
            }
        }
        evicting += begun.elapsed().as_nanos();
        let begun = Instant::now();
        for (&block, number) in used.iter().zip(names..) {
            facts[block.index()] = BlockFacts { used: now, ..BlockFacts::new(name(number)) };
            policy.stored(block, &facts[block.index()]);
        }
        for block in used.drain(..).rev() {
            policy.evictable(block, &facts[block.index()]);
        }
        caching += begun.elapsed().as_nanos();
        let begun = Instant::now();
        // Blocks that lie far apart, as those of another request would.
        let first = (round as u32).wrapping_mul(0x9E37_79B9) % BLOCKS;
        for place in 0..REQUEST {
            let block = RecordId::from_index((first + place) % BLOCKS);
            facts[block.index()].found += 1;
            facts[block.index()].used = now;
            policy.found(block, now);
            policy.held(block);
            policy.evictable(block, &facts[block.index()]);
        }
        finding += begun.elapsed().as_nanos();
    }
    let blocks = (ROUNDS * u64::from(REQUEST)) as f64;
    [evicting, caching, finding].map(|total: u128| total as f64 / blocks)
}

fn main() -> Result<(), ConfigError> {
    let blocks = u64::from(BLOCKS);
    println!(
        "{:<12} {:>8} {:>16} {:>16}",
        "ns a block", "evict", "cache, release", "find, release"
    );
    if let Some(mut policy) = PolicyKind::HitDensity.make(blocks)? {
        let [evict, cache, find] = measure(&mut *policy);
        println!("{:<12} {evict:>8.0} {cache:>16.0} {find:>16.0}", policy.name());
    }
    Ok(())
}
