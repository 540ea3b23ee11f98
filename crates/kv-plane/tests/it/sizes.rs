//! Sizes and counts that a cache takes, at 0, 1, a usual value, the largest, and values whose products
//! overflow, alone and in pairs: each is taken or refused by a typed error, without a panic, an abort or a
//! hang, and in bounded memory.

use cuda_vmm::limit::AdmissionPolicy;

use crate::machine;
use crate::prelude::*;

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
                let reserved = cache.reserve(&mut sequence, tokens as u32 + 3);
                if !matches!(reserved, Ok(Room::Given(_))) {
                    cache.reserve(&mut sequence, tokens as u32).unwrap().given().unwrap();
                }
                let staged = cache.stage(&step, &mut [&mut sequence]);
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
    |options, value| options.groups[0].device_blocks = value,
    |options, value| options.groups[0].host_blocks = value,
    |options, value| options.sequences_max = value,
    |options, value| options.groups[0].blocks_per_sequence_max = value,
    |options, value| options.overlap_depth = value,
    |options, value| options.groups[0].watermark_blocks = value,
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
            let is_far = [1, u32::MAX].contains(&value);
            for set_other in COUNTS[index + 1..].iter().filter(|_| is_far) {
                for other in [1, 1 << 20, u32::MAX] {
                    let mut options = options.clone();
                    set_other(&mut options, other);
                    all.push(options);
                }
            }
        }
    }
    let (built, refused) = try_all(all);
    assert!(built > 10 && refused > 50, "{built} built, {refused} refused");
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
        let admission = Some(AdmissionPolicy::new(keep_free_bytes));
        with(MemoryRules { admission, ..MemoryRules::default() })
    });
    assert_eq!(try_all(headrooms), (U64.len(), 0));
}

#[test]
fn growth_ahead() {
    let ahead = |blocks| Growth::Ahead { blocks, worker: Worker::manual() };
    let all = U32.map(|blocks| KvCacheOptions { growth: ahead(blocks), ..small() });
    assert_eq!(try_all(all), (U32.len(), 0));
}

#[test]
fn arrays_of_a_step() {
    let mut cache = KvCache::new(&streams(&[device()]), small()).unwrap();
    let mut sequence = admit_to(&mut cache, 5).unwrap();
    for words in [0, 1, 1 << 10, 1 << 20] {
        let step = cache.begin_step().unwrap();
        // What the dropped step has spoilt is told once.
        let _ = cache.reserve(&mut sequence, 0);
        cache.reserve(&mut sequence, 1).unwrap().given().unwrap();
        let array = vec![0_u64; words];
        let staged =
            cache.stage_with(&step, &mut [&mut sequence], &mut |_, step| step.array(0, &array));
        assert_eq!(staged.is_ok(), words <= 512, "{words}");
    }
    drop(sequence);
    cache.close().unwrap();
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
fn budgets() {
    let device = device();
    let mut cache = KvCache::new(&streams(&[device]), small()).unwrap();
    for blocks in U64 {
        for (tier, most) in [(Tier::Primary, 8), (Tier::Secondary, 4)] {
            let set = cache.set_budget(GroupId(0), tier, blocks);
            assert_eq!(set.is_ok(), blocks <= most, "{tier:?}, {blocks}");
        }
    }
    cache.set_budget(GroupId(0), Tier::Primary, 8).unwrap();
    drop(admit_to(&mut cache, 32).unwrap());
    cache.close().unwrap();
}

#[test]
fn growth_of_a_worker() {
    let device = device();
    for blocks in U64 {
        let mut worker =
            KvWorker::new(&streams(std::slice::from_ref(&device)), small(), ALONE).unwrap();
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
    let mut worker = KvWorker::new(&streams(&[device()]), small(), ALONE).unwrap();
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
    let group = group(kv_plane::GroupKind::Full, shape(3, 64, 4), 1, 0);
    for bytes in U64 {
        for devices in [0, 1, 2, 3, 4, usize::MAX] {
            let mut options = options(shape(2, 32, 4), 8, 0);
            options.groups.push(group);
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
