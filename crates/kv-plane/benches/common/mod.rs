//! What the benchmarks share: the device that they measure, counts, and options of a cache.

#![allow(dead_code, unused_imports, reason = "each benchmark uses a part")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

pub(crate) mod bare;

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;

use cuda_driver::{
    CountingDriver, CudaDriver, Device, DeviceBuffer, DeviceSpan, Driver, HostAllocFlags,
    PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::{GroupId, GroupOptions, HostPinning, KvCache, KvCacheOptions, Request, Sequence};
use kv_pool::BlockHash;
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
            sim.register_kernels(&kv_plane::references());
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

    /// The same by the driver's names for them.
    pub(crate) fn calls_by_name(&self) -> BTreeMap<&'static str, u64> {
        self.counting.calls()
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
    let group = GroupOptions {
        host_blocks,
        blocks_per_sequence_max: device_blocks,
        ..GroupOptions::new(shape, device_blocks)
    };
    KvCacheOptions {
        pinning: HostPinning::AT_ONCE,
        sequences_max: 1,
        step_tokens_max: device_blocks * BLOCK_TOKENS,
        ..KvCacheOptions::of(vec![group])
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
pub(crate) fn admit(cache: &mut KvCache, request: Request) -> Sequence {
    admit_queued(cache, &mut VecDeque::from([request]))
}

/// The same of a request that is alone in a queue.
pub(crate) fn admit_queued(cache: &mut KvCache, queue: &mut VecDeque<Request>) -> Sequence {
    let mut admission = cache.admit(queue, u64::MAX).unwrap();
    let Some((_, sequence)) = admission.admitted.pop() else { panic!("{admission:?}") };
    sequence
}

/// Admits a request in a step of its own, in which the device does `work`.
pub(crate) fn compute(
    cache: &mut KvCache,
    request: Request,
    work: impl FnOnce(&KvCache, &Sequence),
) -> Sequence {
    let step = cache.begin_step().unwrap();
    let mut sequence = admit(cache, request);
    cache.stage(&step, &mut [&mut sequence]).unwrap();
    work(cache, &sequence);
    cache.finish_step(step).unwrap();
    sequence
}

/// The memory of a sequence's blocks.
pub(crate) fn blocks(cache: &KvCache, sequence: &Sequence) -> Vec<DeviceSpan> {
    let ids = &cache.manager().block_ids(GroupId(0), sequence)[..sequence.block_count(GroupId(0))];
    let paged = cache.parts()[0].paged();
    ids.iter().map(|&id| paged.block_span(id.get() as u64).unwrap().unwrap()).collect()
}

/// Memory for copies that no cache makes: as many bytes on both sides of each direction, with a stream each.
pub(crate) struct Plain {
    pub(crate) streams: [Stream; 2],
    pub(crate) pages: [DeviceBuffer; 2],
    /// Pinned as the caches here have theirs.
    pub(crate) host: [PinnedBuffer; 2],
}

impl Plain {
    pub(crate) fn new(rig: &Rig, bytes: u64) -> Self {
        let pinned = || PinnedBuffer::alloc(&rig.device, bytes, HostAllocFlags::CACHED).unwrap();
        Self {
            streams: [0, 1].map(|_| Stream::new(&rig.device).unwrap()),
            pages: [0, 1].map(|_| DeviceBuffer::alloc(&rig.device, bytes).unwrap()),
            host: [0, 1].map(|_| pinned()),
        }
    }

    /// Enqueues the copy out, and that back, of a part of the bytes.
    pub(crate) fn copy(&self, [goes_out, comes_back]: [bool; 2], at: u64, bytes: u64) {
        let [out, back] = [0, 1].map(|n| self.pages[n].span().slice(at, bytes).unwrap());
        if goes_out {
            self.streams[0].copy_to_host(&self.host[0], at, out).unwrap();
        }
        if comes_back {
            self.streams[1].copy_to_device(back, &self.host[1], at).unwrap();
        }
    }
}

/// The value below which `share` of the values are; sorts them.
pub(crate) fn quantile<T: Copy + PartialOrd>(values: &mut [T], share: f64) -> T {
    values.sort_by(|a, b| a.partial_cmp(b).unwrap());
    values[((values.len() - 1) as f64 * share) as usize]
}
