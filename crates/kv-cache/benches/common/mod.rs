//! What the benchmarks share: the device that they measure, counts, and options of a cache.

#![allow(dead_code, unused_imports, reason = "each benchmark uses a part")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

use std::process::ExitCode;
use std::sync::Arc;

use cuda_driver::{CountingDriver, CudaDriver, Device, Driver, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_cache::{
    Answer, Growth, HostPinning, KvCache, KvCacheOptions, MemoryRules, PoolRules, Request,
    Sequence, TransportRules,
};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_pool::{BlockHash, BlockHasher};
pub(crate) use kv_testkit::alloc::allocations;

pub(crate) const BLOCK_TOKENS: u32 = 16;

/// Where a benchmark runs.
pub(crate) struct Rig {
    counting: Arc<CountingDriver>,
    pub(crate) device: Device,
    pub(crate) simulated: bool,
}

/// Runs `measure` on the first device, or with `--sim` on a simulated one.
pub(crate) fn run(measure: impl FnOnce(&Rig)) -> ExitCode {
    let simulated = std::env::args().any(|argument| argument == "--sim");
    match Rig::open(simulated) {
        Ok(rig) => {
            println!("{}", rig.device.info().name);
            rig.device.while_current(|| measure(&rig)).unwrap();
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

impl Rig {
    /// The simulated device, or the first real one.
    pub(crate) fn open(simulated: bool) -> Result<Self, String> {
        let driver: Arc<dyn Driver> = if simulated {
            let sim = SimDriver::new(SimConfig::default()).map_err(|error| error.to_string())?;
            sim.register_kernels(kv_kernels::references());
            sim.register_kernels(kv_stage::references());
            Arc::new(sim)
        } else {
            Arc::new(CudaDriver::load().map_err(|error| error.to_string())?)
        };
        let counting = Arc::new(CountingDriver::new(driver));
        let device = Device::open(counting.clone(), 0).map_err(|error| format!("{error:?}"))?;
        Ok(Self { counting, device, simulated })
    }

    /// Calls of the driver so far.
    pub(crate) fn calls(&self) -> u64 {
        self.counting.calls().values().sum()
    }

    /// One of two, for a GPU or for the simulated device.
    pub(crate) fn either<T>(&self, on_gpu: T, on_sim: T) -> T {
        if self.simulated { on_sim } else { on_gpu }
    }

    /// A cache with a stream of its own.
    pub(crate) fn cache(&self, options: KvCacheOptions) -> KvCache {
        KvCache::new(&[Stream::new(&self.device).unwrap()], options).unwrap()
    }
}

/// K and V of `layers` layers, in blocks of [`BLOCK_TOKENS`].
pub(crate) fn shape(layers: u32, row_bytes: u64) -> KvShape {
    let block_tokens = BLOCK_TOKENS;
    KvShape::new(KvShapeOptions { layers, kv_count: 2, row_bytes, block_tokens }).unwrap()
}

/// A cache for one sequence of all blocks, with a host tier that is pinned before it is used.
pub(crate) fn options(shape: KvShape, device_blocks: u32, host_blocks: u32) -> KvCacheOptions {
    KvCacheOptions {
        kind: kv_cache::GroupKind::Full,
        further_groups: Vec::new(),
        shared: None,
        shape,
        tiers: Default::default(),
        placement: None,
        parts_share_devices: false,
        device_blocks,
        growth: Growth::OnDemand,
        host_blocks,
        pinning: HostPinning::AT_ONCE,
        transport: TransportRules::default(),
        sequences_max: 1,
        blocks_per_sequence_max: device_blocks,
        overlap_depth: 1,
        watermark_blocks: 0,
        scrubs: false,
        hasher: BlockHasher::FAST,
        step_tokens_max: device_blocks * BLOCK_TOKENS,
        step_arrays: Vec::new(),
        memory: MemoryRules::default(),
        pool: PoolRules::default(),
    }
}

/// Names of `blocks` blocks that follow each other, which no other seed has.
pub(crate) fn chain(seed: u32, blocks: u64) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    let next = |block: u64| {
        parent = BlockHash::chain(parent, &[seed, block as u32]);
        parent
    };
    (0..blocks).map(next).collect()
}

/// Admits a request.
pub(crate) fn admit(cache: &mut KvCache, request: &mut [Request; 1]) -> Sequence {
    match cache.admit(request, u64::MAX).unwrap().pop() {
        Some(Answer::Admitted(sequence)) => sequence,
        other => panic!("{other:?}"),
    }
}

/// The value below which `share` of the values are; sorts them.
pub(crate) fn quantile<T: Copy + PartialOrd>(values: &mut [T], share: f64) -> T {
    values.sort_by(|a, b| a.partial_cmp(b).unwrap());
    values[((values.len() - 1) as f64 * share) as usize]
}
