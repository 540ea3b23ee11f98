//! What a scheduler's thread pays for the manager's part of a step: nanoseconds and heap allocations.
//!
//! `cargo bench -p kv-manager --bench iteration`, with `-- --hits` for admissions alone. With `-- --steps 512` it decodes so few steps
//! of one group alone, for tools that count instructions and cache misses.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and fails by panicking"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kv_manager::{
    Completion, GroupOptions, Manager, ManagerOptions, Outcome, Request, Sequence, WorkerId,
};
use kv_pool::{BlockHash, PoolConfig};
use kv_tier::GroupKind;

/// Counts allocations.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: u32 = 16;

/// Steps of a measurement.
const STEPS: usize = 4096;

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--steps").skip(1);
    let few = arguments.next().map(|steps| steps.parse::<usize>().unwrap());
    println!("| per step | p50 us | p99 us | worst us | allocations |");
    println!("| --- | --- | --- | --- | --- |");
    if let Some(steps) = few {
        for sequences in [256, 1024] {
            decode_in(1, sequences, (0, false), steps, "pool grown");
            decode_in(1, sequences, (0, true), steps, "pool grown, caches cold");
        }
        return;
    }
    let hits_only = std::env::args().any(|argument| argument == "--hits");
    for sequences in [256, 1024].into_iter().filter(|_| !hits_only) {
        decode(sequences, 0, false, "pool grown");
        decode_in(2, sequences, (0, false), STEPS, "2 groups");
        decode_in(4, sequences, (0, false), STEPS, "4 groups");
        decode(sequences, 0, true, "pool grown, caches cold");
        decode(sequences, 1, false, "pool full, evicting");
    }
    for (groups, blocks) in [(1, 16), (1, 256), (1, 1024), (2, 256), (4, 256)] {
        hit(groups, blocks);
    }
}

fn manager(groups: u32, sequences: u32, device: u64, host: u64) -> Manager {
    let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(device) };
    // Every second one has a window, as in many models.
    let group = |index| GroupOptions {
        kind: match index % 2 {
            1 => GroupKind::Window { tokens: 1024, sinks: 0 },
            _ => GroupKind::Full,
        },
        ..GroupOptions::new(BLOCK, pool.clone())
    };
    let options = ManagerOptions::of((0..groups).map(group).collect());
    Manager::new(ManagerOptions { sequences_max: sequences, ..options }).unwrap()
}

/// More than the second-level cache of a processor, which an engine's other work fills between steps.
const OTHER_WORK_BYTES: usize = 6 << 20;

/// Sequences that decode one token each a step, with one step of overlap.
fn decode(sequences: u32, full: u64, cold: bool, name: &str) {
    decode_in(1, sequences, (full, cold), STEPS, name);
}

fn decode_in(groups: u32, sequences: u32, (full, cold): (u64, bool), steps: usize, name: &str) {
    let own = u64::from(sequences) * (steps as u64 / u64::from(BLOCK) + 20);
    let mut manager = manager(groups, sequences, own, full * own);
    if full > 0 {
        fill(&mut manager);
    }
    let mut requests: VecDeque<_> = (0..sequences)
        .map(|number| {
            // Blocks become full at different steps.
            let ids = (0..64 + number % BLOCK).map(|at| number * 1000 + at).collect();
            let mut request = Request::new(ids);
            request.tokens_max = steps as u64 + 256;
            request
        })
        .collect();
    let step = manager.begin_step().unwrap();
    let admitted = manager.admit(&mut requests, u64::MAX).admitted;
    let mut running: Vec<_> = admitted.into_iter().map(|(_, sequence)| sequence).collect();
    let mut batch: Vec<_> = running.iter_mut().collect();
    manager.stage(&step, &mut batch).unwrap();
    manager.finish_step(step).unwrap();
    let (mut times, mut allocations) = (Vec::with_capacity(steps), Vec::with_capacity(steps));
    let first = manager.stats().steps;
    // Any ids.
    let ids: Vec<u32> = (0..sequences).collect();
    let mut other_work = vec![0_u8; if cold { OTHER_WORK_BYTES } else { 0 }];
    for _ in 0..steps - 64 {
        let mut batch: Vec<&mut Sequence> = running.iter_mut().collect();
        std::hint::black_box(&mut other_work).iter_mut().step_by(64).for_each(|byte| *byte ^= 1);
        let (before, start) = (ALLOCATIONS.load(Ordering::Relaxed), Instant::now());
        let step = manager.begin_step().unwrap();
        let number = step.number();
        let (committed, mut at) = (number.saturating_sub(2), 0);
        while at < batch.len() {
            at += manager.decode(&mut batch[at..], committed, &ids[at..]);
            let Some(sequence) = batch.get_mut(at) else { break };
            if number > first + 1 {
                manager.commit(sequence, committed, &ids[at..=at]).unwrap();
            }
            manager.reserve(sequence, 1).unwrap().given().unwrap();
            at += 1;
        }
        manager.stage(&step, &mut batch).unwrap();
        manager.finish_step(step).unwrap();
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        manager.complete(Completion { worker, step: number - 1, outcome }).unwrap();
        times.push(start.elapsed().as_nanos() as u64);
        allocations.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
    }
    print(&format!("{sequences} sequences decode, {name}"), times, allocations);
}

/// Fills the device with content that nobody uses.
fn fill(manager: &mut Manager) {
    let first = &manager.options().groups[0];
    let (blocks, width) = (first.pool.primary_blocks, u64::from(first.blocks_per_sequence_max));
    let mut left = blocks;
    for number in 1.. {
        let step = manager.begin_step().unwrap();
        let here = left.min(width);
        let ids = (0..here as u32 * BLOCK).map(|at| at + (number << 16)).collect();
        let mut requests = VecDeque::from([Request::new(ids)]);
        let (_, mut sequence) = manager.admit(&mut requests, u64::MAX).admitted.pop().unwrap();
        let plan = manager.stage(&step, &mut [&mut sequence]).unwrap().step;
        manager.finish_step(step).unwrap();
        drop(sequence);
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        manager.complete(Completion { worker, step: plan, outcome }).unwrap();
        left -= here;
        if left == 0 {
            break;
        }
    }
}

/// Names of so many blocks that follow each other.
fn chain(blocks: u32) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    let next = |block: u32| {
        parent = BlockHash::chain(parent, &[block]);
        parent
    };
    (0..blocks).map(next).collect()
}

/// A prompt that is cached, admitted and dropped.
fn hit(groups: u32, blocks: u32) {
    const ROUNDS: usize = 2000;
    let mut manager = manager(groups, 4, 2 * u64::from(blocks) + 2, 0);
    // An engine names the blocks of a request once, when it arrives: 10 ns a block.
    let (names, tokens) = (chain(blocks), u64::from(blocks * BLOCK) + 1);
    let (mut times, mut allocations) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let mut requests = VecDeque::from([Request::named(tokens, names.clone())]);
        let step = manager.begin_step().unwrap();
        let (before, start) = (ALLOCATIONS.load(Ordering::Relaxed), Instant::now());
        let mut admitted = manager.admit(&mut requests, u64::MAX).admitted;
        let (_, mut sequence) = admitted.pop().unwrap();
        let until_admitted = start.elapsed();
        let plan = manager.stage(&step, &mut [&mut sequence]).unwrap().step;
        let start = Instant::now();
        drop(sequence);
        let time = until_admitted + start.elapsed();
        if round > 0 {
            times.push(time.as_nanos() as u64);
            allocations.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
        }
        manager.finish_step(step).unwrap();
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        manager.complete(Completion { worker, step: plan, outcome }).unwrap();
    }
    print(
        &format!("admit and release, {blocks} cached blocks, {groups} groups"),
        times,
        allocations,
    );
}

fn print(name: &str, mut times: Vec<u64>, mut allocations: Vec<u64>) {
    times.sort_unstable();
    allocations.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    let most = allocations[(allocations.len() - 1) / 2];
    let sum: u64 = allocations.iter().sum();
    println!(
        "| {name} | {:.2} | {:.2} | {:.2} | {most} (mean {:.2}) |",
        at(0.5),
        at(0.99),
        at(1.0),
        sum as f64 / allocations.len() as f64
    );
}
