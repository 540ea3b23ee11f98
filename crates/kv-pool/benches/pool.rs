//! What one operation of the pool costs a thread that has the pool to itself.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that prints its result")]

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use kv_pool::{BlockHash, BlockPool, Naming, Pinned, PoolConfig, Priority, Tier};

const SAMPLES: usize = 15;
const BLOCKS: u64 = 65_536;
const PREFIX: usize = 256;
const TOKENS: u32 = 16;

/// The median and the least over several samples of the nanoseconds of one of `operations`, done by
/// `work`. On a machine with other work the least says more.
fn measure(operations: usize, mut work: impl FnMut()) -> [f64; 2] {
    work();
    let mut samples: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_nanos() as f64 / operations as f64
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    [samples[SAMPLES / 2], samples[0]]
}

fn row(what: &str, [median, least]: [f64; 2]) {
    println!("| {what:<58} | {median:>8.1} | {least:>8.1} |");
}

fn chain(start: u32, blocks: usize) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    (0..blocks as u32)
        .map(|block| {
            let first = start + block * TOKENS;
            let tokens: [u32; TOKENS as usize] = std::array::from_fn(|token| first + token as u32);
            parent = BlockHash::chain(parent, &tokens);
            parent
        })
        .collect()
}

/// Writes `hashes` into new blocks and releases them, as a request does.
fn serve(pool: &BlockPool, hashes: &[BlockHash]) {
    let mut blocks = pool.claim(hashes.len()).unwrap();
    while let Some(offload) = blocks.take_offload() {
        offload.commit();
    }
    drop(blocks.register(hashes, Priority::DEFAULT).unwrap());
}

/// The same, one block at a time.
fn serve_singly(pool: &BlockPool, hashes: &[BlockHash]) {
    for &hash in hashes {
        let mut block = pool.claim_one().unwrap();
        drop(block.register(&[hash], Priority::DEFAULT).unwrap());
    }
}

/// The same, for who names what it has written only to have it cached.
fn cache_singly(pool: &BlockPool, hashes: &[BlockHash]) {
    for &hash in hashes {
        let named = pool.claim_one().unwrap().cache(&[hash], Priority::DEFAULT);
        assert_eq!(named, Ok(1), "every name is new");
    }
}

/// A hot prefix of 64 blocks found and released, and 16 new blocks cached, so often in all threads
/// together; million block operations a second.
fn mixed(threads: usize) -> f64 {
    const ROUNDS: usize = 40_000;
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS)).unwrap();
    let mut count = u128::MAX / 2;
    (0..BLOCKS as usize / 64).for_each(|_| serve(&pool, &names(&mut count, 64)));
    let hot: Vec<_> = (0..128).map(|at| chain(at * 64 * TOKENS, 64)).collect();
    hot.iter().for_each(|chain| serve(&pool, chain));
    let start = Barrier::new(threads + 1);
    let took = thread::scope(|scope| {
        for thread in 0..threads {
            let (pool, hot, start) = (&pool, &hot, &start);
            scope.spawn(move || {
                let mut random = thread as u64 + 1;
                let mut fresh = (thread as u128 + 1) << 64;
                start.wait();
                for _ in 0..ROUNDS / threads {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
                    let found = pool.match_prefix(&hot[(random >> 57) as usize]);
                    assert_eq!(found.len(), 64, "the hot prefixes stay cached");
                    drop(found);
                    cache_singly(pool, &names(&mut fresh, 16));
                }
                start.wait();
            });
        }
        start.wait();
        let begun = Instant::now();
        start.wait();
        begun.elapsed()
    });
    (ROUNDS / threads * threads * 80) as f64 / took.as_secs_f64() / 1e6
}

fn names(count: &mut u128, blocks: usize) -> Vec<BlockHash> {
    (0..blocks)
        .map(|_| {
            *count += 1;
            BlockHash::chain(BlockHash::from_u128(*count), &[])
        })
        .collect()
}

fn one_tier() {
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS)).unwrap();
    let nanoseconds = measure(PREFIX, || drop(pool.claim(PREFIX).unwrap()));
    row("claim and drop, a block of 256 without content", nanoseconds);

    let mut count = 0;
    let rounds = BLOCKS as usize / PREFIX;
    let batches: Vec<_> = (0..rounds * (SAMPLES + 2)).map(|_| names(&mut count, PREFIX)).collect();
    let mut batch = batches.iter();
    // The first pass, which is not measured, fills the pool: then every claim evicts.
    let nanoseconds = measure(rounds * PREFIX, || {
        batch.by_ref().take(rounds).for_each(|hashes| serve(&pool, hashes));
    });
    row("claim with eviction, register, release, a block of 256", nanoseconds);

    let batches: Vec<_> = (0..rounds * (SAMPLES + 2)).map(|_| names(&mut count, PREFIX)).collect();
    let mut batch = batches.iter();
    let nanoseconds = measure(rounds * PREFIX, || {
        batch.by_ref().take(rounds).for_each(|hashes| serve_singly(&pool, hashes));
    });
    row("the same, one block at a time", nanoseconds);
    let batches: Vec<_> = (0..rounds * (SAMPLES + 2)).map(|_| names(&mut count, PREFIX)).collect();
    let mut batch = batches.iter();
    let nanoseconds = measure(rounds * PREFIX, || {
        batch.by_ref().take(rounds).for_each(|hashes| cache_singly(&pool, hashes));
    });
    row("the same, registered and released in one step", nanoseconds);

    drop(batches);
    lookups(&pool);
}

fn lookups(pool: &BlockPool) {
    let chains: Vec<_> = (0..1024).map(|at| chain(at * 64 * TOKENS, 64)).collect();
    chains.iter().for_each(|chain| serve(pool, chain));
    let mut random = 1_u64;
    let nanoseconds = measure(64 * 1000, || {
        for _ in 0..1000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            drop(black_box(pool.match_prefix(&chains[(random >> 54) as usize])));
        }
    });
    row("match a random prefix and release, a block of 64 of 65,536", nanoseconds);
    let held: Vec<_> = chains.iter().map(|chain| pool.match_prefix(chain)).collect();
    let nanoseconds = measure(64 * 1000, || {
        for _ in 0..1000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            drop(black_box(pool.match_prefix(&chains[(random >> 54) as usize])));
        }
    });
    row("the same of blocks that are in use", nanoseconds);
    drop(held);

    let prefix = chain(0, PREFIX);
    serve(pool, &prefix);
    let nanoseconds = measure(PREFIX * 100, || {
        for _ in 0..100 {
            drop(black_box(pool.match_prefix(&prefix)));
        }
    });
    row("match a prefix and release, a block of 256", nanoseconds);

    let held = pool.match_prefix(&prefix);
    let pin = held.pin(7).unwrap();
    let nanoseconds = measure(10_000, || {
        for _ in 0..10_000 {
            drop(black_box(pin.clone()));
        }
    });
    row("pin and unpin a block that is in use", nanoseconds);
    drop((pin, held));
    let nanoseconds = measure(10_000, || {
        for _ in 0..10_000 {
            drop(black_box(pool.match_prefix(&prefix[..1])));
        }
    });
    row("find, pin and unpin a block that is unused", nanoseconds);
    let absent = chain(u32::MAX / 2, 1);
    let nanoseconds = measure(10_000, || {
        for _ in 0..10_000 {
            black_box(pool.match_prefix(&absent));
        }
    });
    row("look for a prefix that is not there", nanoseconds);
}

/// 256 sequences that name one block after the other, as they fill up, and are then released.
fn growing() {
    const SEQUENCES: usize = 256;
    let each = BLOCKS as usize / SEQUENCES / 4;
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS)).unwrap();
    let mut count = 0;
    let all = (SAMPLES + 1) * SEQUENCES * each;
    let names = names(&mut count, all);
    let mut rounds = names.chunks(SEQUENCES * each);
    let nanoseconds = measure(SEQUENCES * each, || {
        let hashes = rounds.next().unwrap();
        let claim = |_| (pool.claim(each).unwrap(), Pinned::default());
        let mut sequences: Vec<_> = (0..SEQUENCES).map(claim).collect();
        for block in 0..each {
            for (at, (own, held)) in sequences.iter_mut().enumerate() {
                let hashes = &hashes[at * each..];
                let parent = block.checked_sub(1).map(|before| hashes[before]);
                let naming = Naming { parent, ..Naming::default() };
                let named = own.register_onto(&[hashes[block]], naming, held);
                assert_eq!(named, Ok(1), "every name is new");
            }
        }
    });
    row("name the next block of a growing list", nanoseconds);
}

fn epochs() {
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS)).unwrap();
    let nanoseconds = measure(PREFIX * 10, || {
        for _ in 0..10 {
            let epoch = pool.begin_epoch();
            drop(pool.claim(PREFIX).unwrap());
            pool.complete_epoch(epoch).unwrap();
        }
    });
    row("claim, drop and complete the epoch, a block of 256", nanoseconds);
}

fn two_tiers() {
    let config = PoolConfig { secondary_blocks: BLOCKS, ..PoolConfig::primary_only(BLOCKS) };
    let pool = BlockPool::new(&config).unwrap();
    let mut count = 0;
    let rounds = BLOCKS as usize / PREFIX;
    let batches: Vec<_> = (0..rounds * (SAMPLES + 2)).map(|_| names(&mut count, PREFIX)).collect();
    let mut batch = batches.iter();
    batch.by_ref().take(rounds).for_each(|hashes| serve(&pool, hashes));
    let nanoseconds = measure(rounds * PREFIX, || {
        batch.by_ref().take(rounds).for_each(|hashes| serve(&pool, hashes));
    });
    row("the same with an offload that evicts in the second tier", nanoseconds);
    assert!(pool.counters().offloaded >= BLOCKS * SAMPLES as u64);

    // Back and forth: what one moves in makes the other move out. Half is in each tier.
    let hashes: Vec<_> = batches[batches.len() - 2 * rounds..].concat();
    let onboards = 2_000;
    let mut far = hashes.iter().cycle();
    let nanoseconds = measure(onboards, || {
        for _ in 0..onboards {
            let find = |&hash: &BlockHash| pool.find_and_pin(hash, Tier::Secondary);
            let pin = far.by_ref().take(hashes.len()).find_map(find).unwrap();
            let mut target = pool.claim_one().unwrap();
            if let Some(offload) = target.take_offload() {
                offload.commit();
            }
            let done = pool.begin_onboard(pin, target).unwrap().commit();
            assert!(done.copies.is_empty(), "nobody else is there");
        }
    });
    row("find, claim, offload, onboard and release a block", nanoseconds);
}

/// One claim that evicts so many blocks to the second tier, and the moves that it asks for.
fn claim_with_offloads(blocks: u64) {
    let config = PoolConfig { secondary_blocks: blocks, ..PoolConfig::primary_only(blocks) };
    let pool = BlockPool::new(&config).unwrap();
    let mut count = 0;
    serve(&pool, &names(&mut count, blocks as usize));
    let batches: Vec<_> = (0..=SAMPLES).map(|_| names(&mut count, blocks as usize)).collect();
    let mut samples = [Vec::new(), Vec::new()];
    let each = |begin: Instant| begin.elapsed().as_nanos() as f64 / blocks as f64;
    for hashes in &batches {
        let begin = Instant::now();
        let mut claimed = pool.claim(blocks as usize).unwrap();
        samples[0].push(each(begin));
        let begin = Instant::now();
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
        }
        samples[1].push(each(begin));
        drop(claimed.register(hashes, Priority::DEFAULT).unwrap());
    }
    for (what, mut samples) in ["claim", "take and commit offloads"].into_iter().zip(samples) {
        samples.sort_by(f64::total_cmp);
        let figures = [samples[SAMPLES / 2], samples[0]];
        row(&format!("{what}, a block of {blocks} evicted"), figures);
    }
}

/// As many chains of two blocks as there are children, or one root that has them all, in a pool of
/// the same size: what the eviction of one child costs, and the caching of another.
fn fan_out(roots: usize) {
    let all: Vec<_> =
        (0..roots as u32).map(|at| BlockHash::chain(BlockHash::ROOT, &[at])).collect();
    let pool = BlockPool::new(&PoolConfig::primary_only(BLOCKS)).unwrap();
    for &root in &all {
        assert_eq!(pool.claim_one().unwrap().cache(&[root], Priority::MAX), Ok(1));
    }
    let children = BLOCKS as usize - roots;
    let mut count = 0;
    let mut evict_all = || {
        for at in 0..children {
            count += 1;
            let root = all[at % roots];
            let child = BlockHash::chain(root, &[count]);
            pool.claim_one().unwrap().cache(&[child], Naming::after(root)).unwrap();
        }
    };
    evict_all();
    let nanoseconds = measure(children, evict_all);
    row(&format!("evict and cache one of {} children of a root", children / roots), nanoseconds);
    assert!(all.iter().all(|&root| pool.match_prefix(&[root]).len() == 1), "roots go last");
}

fn creation() {
    let blocks = 1 << 20;
    let nanoseconds = measure(1, || {
        drop(black_box(BlockPool::new(&PoolConfig::primary_only(blocks)).unwrap()));
    });
    row("make and drop a pool of 1,048,576 blocks, in all", nanoseconds);
}

fn main() {
    let title = format!("{BLOCKS} blocks a tier, one thread");
    println!("| {title:<58} | {:>8} | {:>8} |", "ns", "least");
    println!("| {:-<58} | {:->8} | {:->8} |", "", ":", ":");
    one_tier();
    growing();
    epochs();
    two_tiers();
    [1 << 12, 1 << 14, 1 << 16].into_iter().for_each(claim_with_offloads);
    creation();
    [1 << 15, 1 << 10, 1].into_iter().for_each(fan_out);
    let tokens: Vec<u32> = (0..TOKENS).collect();
    let nanoseconds = measure(10_000, || {
        for _ in 0..10_000 {
            black_box(BlockHash::chain(BlockHash::ROOT, black_box(&tokens)));
        }
    });
    row("hash a block of 16 tokens", nanoseconds);

    println!("\n| mixed load, million block operations a second | median of 5 | most |");
    println!("| --- | ---: | ---: |");
    for threads in [1, 2, 4, 8] {
        let mut rates: Vec<f64> = (0..5).map(|_| mixed(threads)).collect();
        rates.sort_by(f64::total_cmp);
        println!("| {threads} threads | {:.1} | {:.1} |", rates[2], rates[4]);
    }
}
