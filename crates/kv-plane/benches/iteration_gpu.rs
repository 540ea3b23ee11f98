//! What a scheduler's thread pays for a step of the cache, behind a device that is busy.
//!
//! `cargo bench -p kv-plane --bench iteration_gpu`, on a machine with a GPU. Times are on the host's clock:
//! `decode`, or `commit` and `reserve`, `stage` and `finish_step` of a step, and apart from them `begin_step`, which
//! waits for the device. Each step enqueues work of about half a millisecond. Heap allocations and driver
//! calls are those of the same calls.
//!
//! Beside each figure, from the same run and in turn with it: what the driver takes for the same calls with the same
//! sizes, and what a block pool takes for the lists of the step, with their names where the cache makes these. `own` is the
//! rest of the step's time as a multiple of the driver's.
//!
//! With `--processes 3` it runs in so many processes, one after the other. With `--sim` it runs on the simulated device,
//! where times mean nothing and calls are the same.

#![allow(clippy::print_stdout, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod common;

use std::collections::VecDeque;
use std::process::{Command, ExitCode};
use std::time::Instant;

use common::bare::{Bare, Lists};
use common::{BLOCK_TOKENS as BLOCK, Rig, admit_queued, allocations, quantile};
use cuda_driver::DeviceBuffer;
use kv_plane::{GroupId, KvCache, KvCacheOptions, Request, Sequence};
use kv_pool::{BlockHash, BlockHasher};

kv_testkit::allocator!(i64::MAX);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--processes").skip(1);
    let Some(processes) = arguments.next() else {
        return common::run(|rig| Bench { rig, steps: rig.either(1040, 96) }.measure());
    };
    let simulated = std::env::args().filter(|argument| argument == "--sim");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(simulated);
    let statuses = (0..processes.parse::<u32>().unwrap()).map(|_| child.status().unwrap());
    if statuses.fold(true, |all, status| all & status.success()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

struct Bench<'a> {
    rig: &'a Rig,
    steps: u64,
}

/// What one call, or several, have cost.
#[derive(Default)]
struct Costs {
    nanoseconds: Vec<u64>,
    allocations: Vec<u64>,
    calls: Vec<u64>,
    /// The same driver calls by themselves.
    bare: Vec<u64>,
    /// The lists of the step, of a pool by itself.
    lists: Vec<u64>,
    begins: Vec<u64>,
}

impl Costs {
    fn report(mut self, name: &str) {
        let [p50, p99, worst] = at(&mut self.nanoseconds, [0.5, 0.99, 1.0]);
        let allocations: u64 = self.allocations.iter().sum();
        let calls = quantile(&mut self.calls, 0.5);
        let [bare, lists] = [&mut self.bare, &mut self.lists].map(|times| match times.is_empty() {
            true => "".to_owned(),
            false => at(times, [0.5, 0.99]).map(|time| format!("{time:.1}")).join(" / "),
        });
        let own = match self.bare.is_empty() {
            true => String::new(),
            false => {
                let [driver] = at(&mut self.bare, [0.5]);
                format!("{:.1}", (p50 - driver) / driver)
            }
        };
        let begins = match self.begins.is_empty() {
            true => String::new(),
            false => format!("{:.1}", at(&mut self.begins, [0.5])[0]),
        };
        let steps = self.nanoseconds.len();
        println!(
            "| {name} | {steps} | {p50:.1} / {p99:.1} / {worst:.1} | {allocations} | {calls} | {bare} | {own} | {lists} | {begins} |"
        );
    }
}

/// The times below which these shares of the times are, in microseconds.
fn at<const N: usize>(nanoseconds: &mut [u64], shares: [f64; N]) -> [f64; N] {
    shares.map(|share| quantile(nanoseconds, share) as f64 / 1e3)
}

impl Bench<'_> {
    fn measure(&self) {
        println!(
            "\n| per step | steps | p50 / p99 / worst, us | allocations in all | driver calls | these alone, p50 / p99 | own | the pool's lists alone, p50 / p99 | begin_step |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        self.decode(256, false);
        self.decode(256, true);
        self.decode(1024, false);
        for (blocks, is_named) in [(256, true), (1024, true), (256, false), (1024, false)] {
            self.hits(blocks, is_named);
        }
        self.evicting_admission();
    }

    fn calls(&self) -> u64 {
        self.rig.calls()
    }

    /// Driver calls and allocations so far; counting the calls allocates, and is not among them.
    fn counts(&self) -> (u64, u64) {
        let allocated = allocations();
        (self.calls(), allocated)
    }

    fn cache(&self, sequences: u32, device_blocks: u32, host_blocks: u32) -> KvCache {
        let shape = common::shape(self.rig.either(8, 1), self.rig.either(2048, 16));
        let mut options = common::options(shape, device_blocks, host_blocks);
        options.groups[0].blocks_per_sequence_max = 2048;
        self.rig.cache(KvCacheOptions {
            sequences_max: sequences,
            step_tokens_max: sequences * 128 + device_blocks * BLOCK,
            step_arrays: vec![u64::from(sequences) * 4],
            ..options
        })
    }

    /// Sequences that decode a token each in every step; a sixteenth of them begins a block.
    fn decode(&self, sequences: u32, full: bool) {
        let blocks = sequences * (u32::try_from(self.steps).unwrap() / BLOCK + 8);
        let host = if full { blocks / 2 } else { 0 };
        let mut cache = self.cache(sequences, blocks, host);
        // All memory is mapped before the measured steps.
        self.fill(&mut cache, blocks);
        if !full {
            let names = cached_names(&cache);
            cache.forget(&names);
        }
        let busy = self.rig.either(2 << 30, 4096);
        let busy = DeviceBuffer::alloc(&self.rig.device, busy).unwrap();
        let mut requests: VecDeque<_> = (0..sequences)
            .map(|number| {
                let ids = (0..64 + number % BLOCK).map(|at| (number << 12) + at + (1 << 30));
                let mut request = Request::new(ids.collect());
                request.tokens_max = self.steps + 256;
                request
            })
            .collect();
        let step = cache.begin_step().unwrap();
        let admitted = cache.admit(&mut requests, u64::MAX).unwrap().admitted;
        let mut running: Vec<_> = admitted.into_iter().map(|(_, sequence)| sequence).collect();
        let first = step.number();
        cache.stage(&step, &mut running.iter_mut().collect::<Vec<_>>()).unwrap();
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
        // Any ids.
        let ids: Vec<u32> = (0..sequences).collect();
        let mut costs = Costs::default();
        let mut bare = Bare::new(self.rig, &cache);
        let mut lists = Lists::new(u64::from(blocks));
        for _ in 0..self.steps - 16 {
            let mut batch: Vec<&mut Sequence> = running.iter_mut().collect();
            let start = Instant::now();
            let step = cache.begin_step().unwrap();
            costs.begins.push(start.elapsed().as_nanos() as u64);
            bare.begin();
            let (calls, allocated) = (self.calls(), allocations());
            let (start, number) = (Instant::now(), step.number());
            // The ids of the last step but one, as an overlap scheduler has them.
            let (committed, mut at) = (number.saturating_sub(2), 0);
            while at < batch.len() {
                at += cache.decode(&mut batch[at..], committed, &ids[at..]);
                let Some(sequence) = batch.get_mut(at) else { break };
                if number > first + 1 {
                    cache.commit(sequence, committed, &ids[at..=at]).unwrap();
                }
                cache.reserve(sequence, 1).unwrap().given().unwrap();
                at += 1;
            }
            cache.stage(&step, &mut batch).unwrap();
            let mut spent = start.elapsed();
            let counted = self.counts();
            cache.parts()[0].compute().fill(busy.span(), number as u8).unwrap();
            let (after, start) = (self.calls(), Instant::now());
            let before = allocations();
            cache.finish_step(step).unwrap();
            spent += start.elapsed();
            costs.nanoseconds.push(spent.as_nanos() as u64);
            let finished = allocations() - before;
            costs.calls.push(counted.0 - calls + self.calls() - after);
            costs.allocations.push(counted.1 - allocated + finished);
            // One call was the work of the step.
            costs.bare.extend(bare.repeat(&["cuMemsetD8Async"]));
            costs.lists.push(lists.claim_and_name(sequences / BLOCK));
        }
        let name = match full {
            true => format!("{sequences} decode, pool full: a block in 16 evicts one to the host"),
            false => format!("{sequences} decode, pool grown"),
        };
        costs.report(&name);
        drop((running, bare));
        cache.close().unwrap();
    }

    /// Fills the device with cached content that nobody uses.
    fn fill(&self, cache: &mut KvCache, blocks: u32) {
        let width = cache.options().groups[0].blocks_per_sequence_max;
        let mut left = blocks;
        for number in 1_u32.. {
            let here = left.min(width);
            let ids = (0..here * BLOCK).map(|at| at + (number << 16)).collect();
            drop(common::compute(cache, Request::new(ids), |_, _| ()));
            cache.drain().unwrap();
            left -= here;
            if left == 0 {
                return;
            }
        }
    }

    /// A prompt that is cached, admitted and dropped: with the names of its blocks, or with ids, of which the cache makes
    /// names.
    fn hits(&self, blocks: u32, is_named: bool) {
        let mut cache = self.cache(4, 2 * blocks, 0);
        let ids: Vec<u32> = (0..=blocks * BLOCK).collect();
        let width = BLOCK.try_into().unwrap();
        let names: Vec<_> = BlockHasher::FAST.prefix(BlockHash::ROOT, &ids, width).collect();
        let mut costs = Costs::default();
        let mut lists = Lists::new(2 * u64::from(blocks));
        lists.cache(&names);
        for round in 0..self.steps / 2 {
            let request = match is_named {
                true => Request::named(ids.len() as u64, names.clone()),
                false => Request::new(ids.clone()),
            };
            let mut requests = VecDeque::from([request]);
            let step = cache.begin_step().unwrap();
            let (calls, allocated) = (self.calls(), allocations());
            let start = Instant::now();
            let mut sequence = admit_queued(&mut cache, &mut requests);
            let admitting = start.elapsed();
            let counted = self.counts();
            if round == 0 {
                cache.stage(&step, &mut [&mut sequence]).unwrap();
            }
            let before = allocations();
            let start = Instant::now();
            drop(sequence);
            if round > 0 {
                costs.nanoseconds.push((admitting + start.elapsed()).as_nanos() as u64);
                costs.calls.push(counted.0 - calls);
                let dropped = allocations() - before;
                costs.allocations.push(counted.1 - allocated + dropped);
                costs.lists.push(match is_named {
                    true => lists.find_and_release(&names),
                    false => lists.name_and_find(&ids),
                });
            }
            cache.finish_step(step).unwrap();
            cache.drain().unwrap();
        }
        let given = if is_named { "by names" } else { "by ids" };
        costs.report(&format!("admit and release, {blocks} cached blocks, {given}"));
        cache.close().unwrap();
    }

    /// A prompt of 256 blocks, each of which evicts one to the host.
    fn evicting_admission(&self) {
        const BLOCKS: u32 = 256;
        let mut cache = self.cache(4, 2 * BLOCKS, 64 * BLOCKS);
        self.fill(&mut cache, 2 * BLOCKS);
        let mut costs = Costs::default();
        for round in 0..32_u32 {
            let ids = (0..BLOCKS * BLOCK).map(|at| at + (round << 16) + (1 << 28)).collect();
            let mut requests = VecDeque::from([Request::new(ids)]);
            let step = cache.begin_step().unwrap();
            let (calls, allocated) = (self.calls(), allocations());
            let start = Instant::now();
            let mut sequence = admit_queued(&mut cache, &mut requests);
            cache.stage(&step, &mut [&mut sequence]).unwrap();
            costs.nanoseconds.push(start.elapsed().as_nanos() as u64);
            let counted = self.counts();
            costs.calls.push(counted.0 - calls);
            costs.allocations.push(counted.1 - allocated);
            cache.finish_step(step).unwrap();
            drop(sequence);
            cache.drain().unwrap();
        }
        assert!(cache.manager().stats().offloaded_blocks >= u64::from(30 * BLOCKS));
        costs.report("admit 256 blocks, each evicting one to the host, and stage");
        cache.close().unwrap();
    }
}

/// The names of all content.
fn cached_names(cache: &KvCache) -> Vec<BlockHash> {
    let pool = cache.manager().pool(GroupId(0)).unwrap().snapshot();
    pool.blocks.iter().filter_map(|block| block.hash).collect()
}
