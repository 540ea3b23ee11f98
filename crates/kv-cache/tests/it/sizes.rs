//! Sizes and counts that a cache takes, at 0, 1, a usual value, the largest, and values whose products
//! overflow, alone and in pairs: each is taken or refused by a typed error, without a panic, an abort or a
//! hang, and in bounded memory.

use std::time::Duration;

use cuda_driver::{Device, DeviceBuffer};
use cuda_sim::SimConfig;
use cuda_vmm::limit::{AdmissionPolicy, Headroom};
use kv_cache::{
    BuildError, GroupId, Growth, KvCache, KvCacheOptions, KvWorker, MemoryLimit, MemoryRules,
    Tokens, TransportChoice, TransportRules, Worker, WorkerOptions,
};
use kv_kernels::{
    PagedKv, PagedLayout,
    link::{HostLinkOptions, TransportProfile},
};
use kv_pool::{BlockHash, Tier};

use crate::common::engine::{admit_to, group, options, shape, streams};
use crate::machine;

const U32: [u32; 8] = [0, 1, 2, 7, 1 << 16, 1 << 31, u32::MAX - 1, u32::MAX];
const U64: [u64; 9] = [0, 1, 2, 4096, 1 << 32, 1 << 40, i64::MAX as u64, u64::MAX - 1, u64::MAX];

fn device() -> Device {
    // A machine that gives more pinned memory than its tables take, and less than the bound.
    let config = SimConfig { pinned_bytes: 256 << 20, ..SimConfig::default() };
    let sim = machine::sim(config);
    machine::device(&sim)
}

fn small() -> KvCacheOptions {
    options(shape(4, 32, 4), 8, 4)
}

/// Builds a cache, and serves a request with it if that can be.
fn try_options(options: KvCacheOptions) -> Result<(), BuildError> {
    let what = format!("{options:?}");
    let device = device();
    let worker = options.growth.worker().cloned();
    let mut cache = KvCache::new(&streams(&[device]), options)?;
    while worker.as_ref().is_some_and(|worker| worker.poll()) {}
    for tokens in [1, 5] {
        let step = cache.begin_step().unwrap();
        match admit_to(&mut cache, tokens) {
            Ok(mut sequence) => {
                if cache.reserve(&mut sequence, tokens as u32 + 3).is_err() {
                    cache.reserve(&mut sequence, tokens as u32).unwrap();
                }
                let staged = cache.stage(&step, &mut [&mut sequence], |_, _| Ok(()));
                let fits = tokens as u32 + 3 <= cache.options().step_tokens_max;
                assert!(staged.is_ok() || !fits, "{what}: {staged:?}");
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        cache.finish_step(step).unwrap();
    }
    assert!(cache.close().is_ok(), "{what}");
    Ok(())
}

/// Builds caches from all of `options`; how many can be.
fn try_all(all: impl IntoIterator<Item = KvCacheOptions>) -> (usize, usize) {
    let (mut built, mut refused) = (0, 0);
    for options in all {
        match try_options(options) {
            Ok(()) => built += 1,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
        }
    }
    (built, refused)
}

/// The options with one count set.
type Setter = fn(&mut KvCacheOptions, u32);

const COUNTS: [Setter; 7] = [
    |options, value| options.device_blocks = value,
    |options, value| options.host_blocks = value,
    |options, value| options.sequences_max = value,
    |options, value| options.blocks_per_sequence_max = value,
    |options, value| options.overlap_depth = value,
    |options, value| options.watermark_blocks = value,
    |options, value| options.step_tokens_max = value,
];

#[test]
fn counts_of_options_alone_and_in_pairs() {
    let mut all = Vec::new();
    for (index, set) in COUNTS.into_iter().enumerate() {
        for value in U32 {
            let mut options = small();
            set(&mut options, value);
            all.push(options.clone());
            for set_other in &COUNTS[index + 1..] {
                for other in [1, 1 << 20, u32::MAX] {
                    let mut options = options.clone();
                    set_other(&mut options, other);
                    all.push(options);
                }
            }
        }
    }
    let (built, refused) = try_all(all);
    assert!(built > 20 && refused > 100, "{built} built, {refused} refused");
}

#[test]
fn bytes_of_steps_and_rules_of_memory() {
    try_all(U64.map(|bytes| KvCacheOptions { step_arrays: vec![bytes; 2], ..small() }));
    let with = |memory| KvCacheOptions { memory, ..small() };
    let limits = U64.map(|bytes| {
        with(MemoryRules { limit: Some(MemoryLimit::new(bytes)), ..MemoryRules::default() })
    });
    assert_eq!(try_all(limits), (U64.len(), 0));
    let headrooms = U64.map(|keep_free_bytes| {
        let admission = Some(AdmissionPolicy::new(Headroom { keep_free_bytes }));
        with(MemoryRules { admission, ..MemoryRules::default() })
    });
    assert_eq!(try_all(headrooms), (U64.len(), 0));
}

#[test]
fn growth_ahead_and_workers() {
    let ahead = |blocks| Growth::Ahead { blocks, worker: Worker::manual() };
    let all = U32.map(|blocks| KvCacheOptions { growth: ahead(blocks), ..small() });
    assert_eq!(try_all(all), (U32.len(), 0));
    for time in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        for naps_before_sleep in [0, 1, u32::MAX] {
            let options = WorkerOptions { nap: time, naps_before_sleep, retry: time };
            let Ok(worker) = Worker::spawn(options) else { continue };
            let growth = Growth::Ahead { blocks: u32::MAX, worker: worker.clone() };
            try_all([KvCacheOptions { growth, ..small() }]);
            worker.close();
        }
    }
}

#[test]
fn transports() {
    let link = |link| {
        let transport = TransportRules { link, ..TransportRules::default() };
        KvCacheOptions { transport, ..small() }
    };
    let base = HostLinkOptions { ring_buffer_bytes: 4096, ..HostLinkOptions::default() };
    let mut all = Vec::new();
    for value in U32 {
        all.push(link(HostLinkOptions { multiprocessors: value, ..base }));
        all.push(link(HostLinkOptions { ring_buffers: value, ..base }));
        for ring_buffer_bytes in [0, 1, u64::MAX] {
            all.push(link(HostLinkOptions { ring_buffers: value, ring_buffer_bytes, ..base }));
        }
    }
    for value in U64 {
        all.push(link(HostLinkOptions { launch_bytes: value, ..base }));
        all.push(link(HostLinkOptions { ring_buffer_bytes: value, ..base }));
    }
    let device = device();
    for multiprocessors in [1, u32::MAX] {
        for bytes_per_s in [0, 1, u64::MAX] {
            let mut profile = TransportProfile::assumed(&device, multiprocessors).unwrap();
            profile.to_host.copy_bytes_per_s = bytes_per_s;
            profile.to_pages.copy_bytes_per_s = bytes_per_s;
            for choice in TransportChoice::ALL {
                let profiles = vec![profile.clone()];
                let transport = TransportRules { choice, profiles, link: base };
                all.push(KvCacheOptions { transport, ..small() });
            }
        }
    }
    let (built, _) = try_all(all);
    assert!(built > 40, "{built}");
    for text in ["", "auto", "AUTO", &"auto".repeat(1 << 16)] {
        assert_eq!(text.parse::<TransportChoice>().is_ok(), text == "auto");
    }
}

#[test]
fn streams_of_devices() {
    let device = device();
    for count in [0, 1, 2, 4, 5, 64] {
        let streams = streams(&vec![device.clone(); count]);
        let built = KvCache::new(&streams, small());
        assert_eq!(built.is_ok(), (1..=4).contains(&count), "{count} streams");
        if let Ok(cache) = built {
            cache.close().unwrap();
        }
    }
}

#[test]
fn sequences() {
    let device = device();
    let mut cache = KvCache::new(&streams(&[device]), small()).unwrap();
    let names: Vec<_> = (0..64).map(|at| BlockHash::chain(BlockHash::ROOT, &[at])).collect();
    let mut sequence = admit_to(&mut cache, 5).unwrap();
    for tokens in U32 {
        let reserved = cache.reserve(&mut sequence, tokens);
        assert_eq!(reserved.is_ok(), tokens <= 32, "{tokens}");
    }
    let mut slots = Vec::new();
    let room = sequence.block_count() as u64 * 4;
    for start in U64 {
        for end in U64 {
            let mapped = cache.manager().slot_mapping(&sequence, start..end, &mut slots);
            assert_eq!(mapped.is_ok(), start <= end && end <= room, "{start}..{end}");
        }
    }
    for index in [0, 1, 1 << 32, usize::MAX] {
        assert_eq!(sequence.block(index).is_some(), index < sequence.block_count());
    }
    for count in [0, 1, 64] {
        assert_eq!(cache.prefetch(&names[..count]).unwrap(), 0);
        assert_eq!(cache.forget(&names[..count]), 0);
    }
    for step in U64 {
        let committed = cache.commit(&mut sequence, step, &[7]);
        assert_eq!(committed.is_err(), step > 0, "step 0 is stale: {committed:?}");
        assert_eq!(sequence.known(), 5);
    }

    for words in [0, 1, 1 << 10, 1 << 20] {
        let step = cache.begin_step().unwrap();
        // What the dropped step has spoilt is told once.
        let _ = cache.reserve(&mut sequence, 0);
        cache.reserve(&mut sequence, 1).unwrap();
        let array = vec![0_u64; words];
        let staged = cache.stage(&step, &mut [&mut sequence], |_, step| step.array(0, &array));
        assert_eq!(staged.is_ok(), words <= 512, "{words}");
    }
    for tokens in U64 {
        let known = sequence.known();
        // What the dropped step has spoilt is told once.
        let _ = cache.reserve(&mut sequence, 0);
        assert_eq!(cache.truncate(&mut sequence, tokens).is_ok(), tokens <= known, "{tokens}");
        let more = Tokens::Named { count: tokens, names: &[] };
        assert!(cache.extend(&mut sequence, more).is_err(), "it has ids");
        let missing = vec![7; 5 - sequence.known() as usize];
        cache.extend(&mut sequence, &missing).unwrap();
    }
    drop(sequence);
    cache.close().unwrap();
}

#[test]
fn tensors_of_an_engine() {
    let device = device();
    let streams = streams(std::slice::from_ref(&device));
    let shape = small().shape;
    let memory = DeviceBuffer::alloc(&device, 64 * shape.block_bytes()).unwrap();
    let paged = |blocks: u64, count: usize| -> Vec<PagedKv> {
        let layout = PagedLayout::block_major(&shape);
        let span = memory.span().slice(0, blocks * shape.block_bytes()).unwrap();
        let made = |_| PagedKv::new(&streams[0], shape, layout, span, blocks).unwrap();
        (0..count).map(made).collect()
    };
    for (blocks, count, fits) in
        [(1, 1, false), (7, 1, false), (8, 1, true), (8, 2, false), (64, 1, true)]
    {
        let cache = KvCache::over(&streams, paged(blocks, count), small());
        assert_eq!(cache.is_ok(), fits, "{blocks} blocks, {count} times");
        let worker = KvWorker::over(&streams, paged(blocks, count), small());
        assert_eq!(worker.is_ok(), fits, "{blocks} blocks, {count} times");
        cache.into_iter().for_each(|cache| cache.close().unwrap());
        worker.into_iter().for_each(|worker| worker.close().unwrap());
    }
    assert!(KvCache::over(&streams, Vec::new(), small()).is_err());
}

#[test]
fn budgets() {
    let device = device();
    let mut cache = KvCache::new(&streams(&[device]), small()).unwrap();
    for blocks in U64 {
        for (tier, most) in [(Tier::Primary, 8), (Tier::Secondary, 4)] {
            let set = cache.set_budget(tier, blocks);
            assert_eq!(set.is_ok(), blocks <= most, "{tier:?}, {blocks}");
        }
    }
    cache.set_budget(Tier::Primary, 8).unwrap();
    drop(admit_to(&mut cache, 32).unwrap());
    cache.close().unwrap();
}

#[test]
fn growth_of_a_worker() {
    let device = device();
    for blocks in U64 {
        let mut worker = KvWorker::new(&streams(std::slice::from_ref(&device)), small()).unwrap();
        let ready = worker.grow_to(blocks).unwrap();
        assert_eq!(ready, blocks.min(8));
        for kept in U64 {
            assert!(worker.shrink_to(kept), "{blocks} blocks, of which {kept} are kept");
            // Block 0 stays.
            assert_eq!(worker.ready_blocks(GroupId(0)), blocks.min(8).min(kept.max(1)));
            assert_eq!(worker.grow_to(blocks).unwrap(), blocks.min(8));
        }
        worker.close().unwrap();
    }
}

#[test]
fn layers_that_are_waited_for() {
    let mut worker = KvWorker::new(&streams(&[device()]), small()).unwrap();
    for layer in U32 {
        for group in [0, 1, u16::MAX] {
            let waited = worker.wait_for_layer(GroupId(group), layer);
            assert_eq!(waited.is_ok(), layer < 4 && group == 0, "layer {layer} of group {group}");
        }
    }
    worker.close().unwrap();
}

#[test]
fn memory_to_share_of_any_size_is_divided_or_refused() {
    let group = group(kv_cache::GroupKind::Full, shape(3, 64, 4), 1, 0);
    for bytes in U64 {
        for devices in [0, 1, 2, 3, 4, usize::MAX] {
            let mut options = options(shape(2, 32, 4), 8, 0);
            options.further_groups = vec![group];
            let divided = options.sharing(bytes, devices);
            // Of two devices, each has half of a block, and too many of them for ids.
            let fits = [(1 << 32, 1), (1 << 32, 2), (1 << 40, 1)].contains(&(bytes, devices));
            assert_eq!(divided.is_ok(), fits, "{bytes} bytes of {devices} devices");
        }
    }
    let streams = streams(&[device()]);
    let mut cache = KvCache::new(&streams, options(shape(2, 32, 4), 8, 0)).unwrap();
    for granules in U32 {
        assert!(cache.set_granules(granules).is_err(), "its groups share nothing");
    }
    cache.close().unwrap();
}
