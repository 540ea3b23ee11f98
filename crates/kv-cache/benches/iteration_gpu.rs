//! What a scheduler's thread pays for a step of the cache, behind a device that is busy.
//!
//! `cargo bench -p kv-cache --bench iteration_gpu`, on a machine with a GPU. Times are on the host's clock:
//! `commit`, `reserve`, `stage` and `finish_step` of a step, and apart from them `begin_step`, which
//! waits for the device. Each step enqueues work of about half a millisecond. Heap allocations and driver calls are those of the same calls. With `--sim` it runs on the simulated
//! device, where times mean nothing and calls are the same.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cuda_driver::{CountingDriver, CudaDriver, Device, DeviceBuffer, Driver, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_cache::{
    Answer, Growth, HostPinning, KvCache, KvCacheOptions, MemoryRules, PoolRules, Request,
    Sequence, TransportRules,
};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_pool::BlockHasher;

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

fn main() -> ExitCode {
    let simulated = std::env::args().any(|argument| argument == "--sim");
    let driver: Result<Arc<dyn Driver>, String> = if simulated {
        SimDriver::new(SimConfig::default()).map_err(|error| error.to_string()).map(|sim| {
            sim.register_kernels(kv_kernels::references());
            sim.register_kernels(kv_stage::references());
            Arc::new(sim) as Arc<dyn Driver>
        })
    } else {
        CudaDriver::load().map(|driver| Arc::new(driver) as _).map_err(|error| error.to_string())
    };
    let opened = driver.and_then(|driver| {
        let counting = Arc::new(CountingDriver::new(driver));
        let device = Device::open(counting.clone(), 0).map_err(|error| format!("{error:?}"))?;
        Ok((counting, device))
    });
    match opened {
        Ok((counting, device)) => {
            println!("{}", device.info().name);
            let steps = if simulated { 96 } else { 1024 };
            let rig = Rig { counting: &counting, device: &device, steps, simulated };
            device.while_current(|| rig.measure()).unwrap();
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

struct Rig<'a> {
    counting: &'a CountingDriver,
    device: &'a Device,
    steps: u64,
    simulated: bool,
}

/// What one call, or several, have cost.
#[derive(Default)]
struct Costs {
    nanoseconds: Vec<u64>,
    allocations: Vec<u64>,
    calls: Vec<u64>,
}

impl Costs {
    fn report(mut self, name: &str, begin: Option<Vec<u64>>) {
        let microseconds = |sorted: &[u64], of: f64| {
            let at = ((sorted.len() - 1) as f64 * of) as usize;
            sorted[at] as f64 / 1e3
        };
        for list in [&mut self.nanoseconds, &mut self.allocations, &mut self.calls] {
            list.sort_unstable();
        }
        let begins = begin.map_or_else(
            || "".to_owned(),
            |mut begin| {
                begin.sort_unstable();
                format!("{:.1}", microseconds(&begin, 0.5))
            },
        );
        let at = |list: &[u64]| list[list.len() / 2];
        println!(
            "| {name} | {:.1} / {:.1} / {:.1} | {} | {} | {begins} |",
            microseconds(&self.nanoseconds, 0.5),
            microseconds(&self.nanoseconds, 0.99),
            microseconds(&self.nanoseconds, 1.0),
            at(&self.allocations),
            at(&self.calls),
        );
    }
}

impl Rig<'_> {
    fn measure(&self) {
        println!(
            "\n| per step | p50 / p99 / worst, us | allocations | driver calls | begin_step, us |"
        );
        println!("| --- | ---: | ---: | ---: | ---: |");
        self.decode(256, false);
        self.decode(256, true);
        self.decode(1024, false);
        self.hits(256);
        self.hits(1024);
        self.evicting_admission();
    }

    fn calls(&self) -> u64 {
        self.counting.calls().values().sum()
    }

    fn cache(&self, sequences: u32, device_blocks: u32, host_blocks: u32) -> KvCache {
        let layers = if self.simulated { 1 } else { 8 };
        let row_bytes = if self.simulated { 16 } else { 2048 };
        let shape =
            KvShape::new(KvShapeOptions { layers, kv_count: 2, row_bytes, block_tokens: BLOCK })
                .unwrap();
        let options = KvCacheOptions {
            shape,
            placement: None,
            device_blocks,
            growth: Growth::OnDemand,
            host_blocks,
            pinning: HostPinning::AT_ONCE,
            transport: TransportRules::default(),
            sequences_max: sequences,
            blocks_per_sequence_max: 2048,
            overlap_depth: 1,
            watermark_blocks: 0,
            scrubs: false,
            hasher: BlockHasher::FAST,
            step_tokens_max: sequences * 128 + device_blocks * BLOCK,
            step_arrays: vec![u64::from(sequences) * 4],
            memory: MemoryRules::default(),
            pool: PoolRules::default(),
        };
        KvCache::new(&[Stream::new(self.device).unwrap()], options).unwrap()
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
        let busy = DeviceBuffer::alloc(self.device, if self.simulated { 4096 } else { 2 << 30 });
        let busy = busy.unwrap();
        let mut requests: Vec<_> = (0..sequences)
            .map(|number| {
                let ids = (0..64 + number % BLOCK).map(|at| (number << 12) + at + (1 << 30));
                let mut request = Request::new(ids.collect());
                request.tokens_max = self.steps + 256;
                request
            })
            .collect();
        let step = cache.begin_step().unwrap();
        let answers = cache.admit(&mut requests, u64::MAX).unwrap();
        let mut running: Vec<_> = answers.into_iter().map(admitted).collect();
        let first = step.number();
        cache.stage(&step, &mut running.iter_mut().collect::<Vec<_>>(), |_, _| Ok(())).unwrap();
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
        let (mut costs, mut begins) = (Costs::default(), Vec::new());
        for _ in 0..self.steps - 16 {
            let mut batch: Vec<&mut Sequence> = running.iter_mut().collect();
            let start = Instant::now();
            let step = cache.begin_step().unwrap();
            begins.push(start.elapsed().as_nanos() as u64);
            let (calls, allocations) = (self.calls(), ALLOCATIONS.load(Ordering::Relaxed));
            let (start, number) = (Instant::now(), step.number());
            for sequence in &mut batch {
                // The ids of the last step but one, as an overlap scheduler has them.
                if number > first + 1 {
                    cache.commit(sequence, number - 2, &[number as u32]).unwrap();
                }
                cache.reserve(sequence, 1).unwrap();
            }
            cache.stage(&step, &mut batch, |_, _| Ok(())).unwrap();
            let mut spent = start.elapsed();
            let counted = (self.calls(), ALLOCATIONS.load(Ordering::Relaxed));
            cache.parts()[0].compute().fill(busy.span(), number as u8).unwrap();
            let (after, start) = (self.calls(), Instant::now());
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            cache.finish_step(step).unwrap();
            spent += start.elapsed();
            costs.nanoseconds.push(spent.as_nanos() as u64);
            costs.calls.push(counted.0 - calls + self.calls() - after);
            let finished = ALLOCATIONS.load(Ordering::Relaxed) - before;
            costs.allocations.push(counted.1 - allocations + finished);
        }
        let name = match full {
            true => format!("{sequences} decode, pool full: a block in 16 evicts one to the host"),
            false => format!("{sequences} decode, pool grown"),
        };
        costs.report(&name, Some(begins));
        drop(running);
        cache.close().unwrap();
    }

    /// Fills the device with cached content that nobody uses.
    fn fill(&self, cache: &mut KvCache, blocks: u32) {
        let width = cache.options().blocks_per_sequence_max;
        let mut left = blocks;
        for number in 1_u32.. {
            let here = left.min(width);
            let ids = (0..here * BLOCK).map(|at| at + (number << 16)).collect();
            let mut requests = [Request::new(ids)];
            let step = cache.begin_step().unwrap();
            let answer = cache.admit(&mut requests, u64::MAX).unwrap().pop().unwrap();
            let mut sequence = admitted(answer);
            cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
            cache.finish_step(step).unwrap();
            drop(sequence);
            cache.drain().unwrap();
            left -= here;
            if left == 0 {
                return;
            }
        }
    }

    /// A prompt that is cached, admitted and dropped.
    fn hits(&self, blocks: u32) {
        let mut cache = self.cache(4, 2 * blocks, 0);
        let ids: Vec<u32> = (0..=blocks * BLOCK).collect();
        let mut costs = Costs::default();
        for round in 0..self.steps / 2 {
            let mut requests = [Request::new(ids.clone())];
            // Names are made when a request is first asked for.
            requests[0].hit_max = 0;
            drop(cache.admit(&mut requests, 0).unwrap());
            requests[0].hit_max = u64::MAX;
            let step = cache.begin_step().unwrap();
            let (calls, allocations) = (self.calls(), ALLOCATIONS.load(Ordering::Relaxed));
            let start = Instant::now();
            let mut sequence =
                admitted(cache.admit(&mut requests, u64::MAX).unwrap().pop().unwrap());
            let admitting = start.elapsed();
            let counted = (self.calls(), ALLOCATIONS.load(Ordering::Relaxed));
            if round == 0 {
                cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
            }
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            let start = Instant::now();
            drop(sequence);
            if round > 0 {
                costs.nanoseconds.push((admitting + start.elapsed()).as_nanos() as u64);
                costs.calls.push(counted.0 - calls);
                let dropped = ALLOCATIONS.load(Ordering::Relaxed) - before;
                costs.allocations.push(counted.1 - allocations + dropped);
            }
            cache.finish_step(step).unwrap();
            cache.drain().unwrap();
        }
        costs.report(&format!("admit and release, {blocks} cached blocks"), None);
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
            let mut requests = [Request::new(ids)];
            // Names are made when a request is first asked for.
            drop(cache.admit(&mut requests, 0).unwrap());
            let step = cache.begin_step().unwrap();
            let (calls, allocations) = (self.calls(), ALLOCATIONS.load(Ordering::Relaxed));
            let start = Instant::now();
            let mut sequence =
                admitted(cache.admit(&mut requests, u64::MAX).unwrap().pop().unwrap());
            cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
            costs.nanoseconds.push(start.elapsed().as_nanos() as u64);
            costs.calls.push(self.calls() - calls);
            costs.allocations.push(ALLOCATIONS.load(Ordering::Relaxed) - allocations);
            cache.finish_step(step).unwrap();
            drop(sequence);
            cache.drain().unwrap();
        }
        assert!(cache.manager().stats().offloaded_blocks >= u64::from(30 * BLOCKS));
        costs.report("admit 256 blocks, each evicting one to the host, and stage", None);
        cache.close().unwrap();
    }
}

/// The names of all content.
fn cached_names(cache: &KvCache) -> Vec<kv_pool::BlockHash> {
    cache.pool().snapshot().blocks.iter().filter_map(|block| block.hash).collect()
}

fn admitted(answer: Answer) -> Sequence {
    match answer {
        Answer::Admitted(sequence) => sequence,
        other => panic!("{other:?}"),
    }
}
