//! A router fed by events: two caches, and each request goes where the longest prefix of it is cached.
//!
//! `cargo run -p kv-manager --example router`

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::{HashSet, VecDeque};

use kv_manager::{
    CacheEvent, Completion, EventReader, Manager, ManagerOptions, Outcome, Request, WorkerId,
};
use kv_pool::{BlockHash, PoolConfig, Tier};

type Mirror = HashSet<(BlockHash, Tier)>;

/// Takes in what has happened at a cache. After a loss, the next read begins with `Cleared` and all content.
fn follow(events: &mut EventReader, mirror: &mut Mirror) {
    let mut read = Vec::new();
    while let Err(lost) = events.read(&mut read) {
        println!("{lost}");
    }
    for event in read {
        match event {
            CacheEvent::Stored(now) => {
                mirror.extend(now.names.iter().map(|&name| (name, now.tier)))
            }
            CacheEvent::Moved { from, to } => to.names.iter().for_each(|&name| {
                mirror.remove(&(name, from));
                mirror.insert((name, to.tier));
            }),
            CacheEvent::Removed { names, tier, .. } => {
                mirror.retain(|(name, at)| *at != tier || !names.contains(name));
            }
            _ => mirror.clear(),
        }
    }
}

/// Computes a prompt; how many of its tokens were cached.
fn compute(cache: &mut Manager, ids: &[u32]) -> Result<u64, Box<dyn std::error::Error>> {
    let step = cache.begin_step()?;
    let mut queue = VecDeque::from([Request::new(ids.to_vec())]);
    let admitted = cache.admit(&mut queue, u64::MAX).admitted.pop();
    let Some((_, mut sequence)) = admitted else { return Err("no room".into()) };
    let number = cache.stage(&step, &mut [&mut sequence])?.step;
    cache.finish_step(step)?;
    // The workers would carry the plan out here.
    cache.complete(Completion { worker: WorkerId(0), step: number, outcome: Outcome::Done })?;
    Ok(sequence.cached_tokens())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PoolConfig::primary_only(64);
    let options = ManagerOptions { events_max: 16, ..ManagerOptions::new(16, pool) };
    let mut caches = [Manager::new(options.clone())?, Manager::new(options)?];
    let mut readers: Vec<_> = caches.iter().filter_map(Manager::events).collect();
    let mut mirrors = [Mirror::new(), Mirror::new()];
    for request in 0..12_u32 {
        // Three conversations, each of which gets longer; the last turns fill more blocks than the log keeps.
        let ids: Vec<u32> = (0..97 + 64 * request).map(|at| request % 3 * 10_000 + at).collect();
        readers.iter_mut().zip(&mut mirrors).for_each(|(reader, mirror)| follow(reader, mirror));
        let mut parent = BlockHash::ROOT;
        let names = ids[..ids.len() - 1].chunks_exact(16).map(|block| {
            parent = BlockHash::chain(parent, block);
            parent
        });
        let names: Vec<_> = names.collect();
        let there = |mirror: &Mirror| {
            names.iter().take_while(|&&name| mirror.contains(&(name, Tier::Primary))).count()
        };
        let matches = mirrors.each_ref().map(there);
        let to = match matches[0].cmp(&matches[1]) {
            std::cmp::Ordering::Equal => request as usize % 2,
            order => usize::from(order.is_lt()),
        };
        let cached = compute(&mut caches[to], &ids)?;
        assert_eq!(cached, matches[to] as u64 * 16, "the mirror is as the cache");
        println!("request {request}: {} tokens to cache {to}, {cached} cached there", ids.len());
    }
    Ok(())
}
