//! Speed of evicted blocks on their way to host memory and back, by every way.
//!
//! `cargo bench -p kv-cache --bench offload_gpu`, on a machine with a GPU. A first request fills
//! the device, a second one evicts all its blocks, then the first comes back and evicts the
//! second's. Times are on the host's clock, from the admission until the compute stream could
//! begin, with the pool's work, the staging of the step and all calls. Medians of 9 rounds, in
//! which the ways take turns. With `--sim` it runs on the simulated device, where times mean
//! nothing and calls are the same.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use cuda_driver::{CountingDriver, CudaDriver, Device, Driver, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_cache::{
    Answer, Growth, HostPinning, KvCache, KvCacheOptions, MemoryRules, PoolRules, Request,
    TransportChoice, TransportRules, TransportStats,
};
use kv_kernels::{
    KvKernels, KvShape, KvShapeOptions,
    link::{MeasureOptions, TransportProfile},
};
use kv_pool::{BlockHash, BlockHasher};

/// Name, layers, bytes of a row; blocks have 16 tokens.
const SHAPES: [(&str, u32, u64); 5] = [
    ("8B: 32 layers, 1,024 wide", 32, 2048),
    ("70B at TP8: 80 layers, 128 wide", 80, 256),
    ("8 layers, 256 wide", 8, 512),
    ("2 layers, 256 wide", 2, 512),
    ("2 layers, 64 wide", 2, 128),
];
const BLOCK_TOKENS: u32 = 16;
const MOVED_BYTES: u64 = 128 << 20;
const BLOCKS_MAX: u64 = 1024;
const ROUNDS: usize = 9;

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
            device.while_current(|| compare(&counting, &device, simulated)).unwrap();
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn compare(counting: &CountingDriver, device: &Device, simulated: bool) {
    let kernels = Arc::new(KvKernels::load(device).unwrap());
    let measured = (!simulated)
        .then(|| TransportProfile::measure(&kernels, &MeasureOptions::default()).unwrap());
    let shapes = if simulated { &SHAPES[3..] } else { &SHAPES[..] };
    for &(name, layers, row_bytes) in shapes {
        let options = KvShapeOptions { layers, kv_count: 2, row_bytes, block_tokens: BLOCK_TOKENS };
        let shape = KvShape::new(options).unwrap();
        let blocks = (MOVED_BYTES / shape.block_bytes()).min(BLOCKS_MAX);
        println!("\n{name}: {blocks} blocks of {} KiB", shape.block_bytes() >> 10);
        println!("| way | out, GB/s | back and out, GB/s | calls, out | host, out, us | went by |");
        println!("| --- | ---: | ---: | ---: | ---: | --- |");
        let mut caches = TransportChoice::ALL
            .map(|choice| Bench::new(device, shape, blocks, choice, measured.as_ref()));
        for _ in 0..ROUNDS {
            caches.iter_mut().for_each(|bench| bench.round(counting));
        }
        caches.into_iter().for_each(|bench| bench.report(shape.block_bytes()));
    }
}

/// A cache that one request fills.
struct Bench {
    cache: KvCache,
    choice: TransportChoice,
    blocks: u64,
    prompts: [Vec<BlockHash>; 2],
    /// Seconds of a way out alone, of both ways, and of the host's part of the way out; its calls.
    out: Vec<f64>,
    both: Vec<f64>,
    host: Vec<f64>,
    calls: u64,
}

impl Bench {
    fn new(
        device: &Device,
        shape: KvShape,
        blocks: u64,
        choice: TransportChoice,
        measured: Option<&TransportProfile>,
    ) -> Self {
        let profiles = measured.cloned().into_iter().collect();
        let options = KvCacheOptions {
            shape,
            placement: None,
            device_blocks: blocks as u32 + 1,
            growth: Growth::OnDemand,
            host_blocks: 4 * blocks as u32,
            pinning: HostPinning::AT_ONCE,
            transport: TransportRules { choice, profiles, ..TransportRules::default() },
            sequences_max: 1,
            blocks_per_sequence_max: blocks as u32 + 1,
            overlap_depth: 1,
            step_tokens_max: BLOCK_TOKENS * (blocks as u32 + 1),
            step_arrays: Vec::new(),
            memory: MemoryRules::default(),
            pool: PoolRules::default(),
            watermark_blocks: 0,
            scrubs: false,
            hasher: BlockHasher::FAST,
        };
        let cache = KvCache::new(&[Stream::new(device).unwrap()], options).unwrap();
        let prompts = [1, 2].map(|seed| chain(seed, blocks));
        let (out, both, host) = (Vec::new(), Vec::new(), Vec::new());
        Self { cache, choice, blocks, prompts, out, both, host, calls: 0 }
    }

    /// Admits a prompt and brings it to the point where its step could begin: seconds until the device
    /// is there, and until the host was.
    fn serve(&mut self, hashes: &[BlockHash]) -> (f64, f64) {
        let step = self.cache.begin_step().unwrap();
        let begun = Instant::now();
        let tokens = self.blocks * u64::from(BLOCK_TOKENS) + 1;
        let requests = &mut [Request::named(tokens, hashes.to_vec())];
        let mut sequence = match self.cache.admit(requests, tokens).unwrap().pop() {
            Some(Answer::Admitted(sequence)) => sequence,
            other => panic!("{other:?}"),
        };
        self.cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
        let host = begun.elapsed().as_secs_f64();
        self.cache.parts()[0].compute().synchronize().unwrap();
        let all = begun.elapsed().as_secs_f64();
        self.cache.finish_step(step).unwrap();
        drop(sequence);
        self.cache.drain().unwrap();
        (all, host)
    }

    fn round(&mut self, counting: &CountingDriver) {
        let [first, second] = self.prompts.clone();
        // New content each time, so that no block is found.
        let fresh = chain(100 + self.out.len() as u32, self.blocks);
        self.serve(&first);
        let decided = |cache: &KvCache| cache.manager().stats();
        let before = decided(&self.cache);
        let calls = || counting.calls().values().sum::<u64>();
        let calls_before = calls();
        let (seconds, host) = self.serve(&fresh);
        self.calls = calls() - calls_before;
        let after = decided(&self.cache);
        assert_eq!(after.offloaded_blocks - before.offloaded_blocks, self.blocks);
        assert_eq!(after.onboarded_blocks, before.onboarded_blocks);
        self.out.push(seconds);
        self.host.push(host);
        let (seconds, _) = self.serve(&first);
        assert_eq!(decided(&self.cache).onboarded_blocks - after.onboarded_blocks, self.blocks);
        self.both.push(seconds);
        self.serve(&second);
    }

    fn report(self, block_bytes: u64) {
        let bytes = (self.blocks * block_bytes) as f64;
        let ways = went_by(&self.cache.transports());
        println!(
            "| {} | {:.1} | {:.1} | {} | {:.0} | {ways} |",
            self.choice,
            bytes / median(self.out) / 1e9,
            2.0 * bytes / median(self.both) / 1e9,
            self.calls,
            median(self.host) * 1e6,
        );
        self.cache.close().unwrap();
    }
}

fn went_by(stats: &TransportStats) -> String {
    let ways = stats.by_name().into_iter().filter(|(_, carried)| carried.blocks > 0);
    let ways: Vec<_> = ways
        .map(|(name, carried)| {
            format!("{name}, {:.1} blocks a batch", carried.blocks as f64 / carried.batches as f64)
        })
        .collect();
    ways.join("; ")
}

fn chain(seed: u32, blocks: u64) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    let next = |block: u64| {
        parent = BlockHash::chain(parent, &[seed, block as u32]);
        parent
    };
    (0..blocks).map(next).collect()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
