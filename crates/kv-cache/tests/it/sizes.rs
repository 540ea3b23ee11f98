//! Sizes and counts that a cache takes, at 0, 1, a usual value, the largest, and values whose products
//! overflow, alone and in pairs: each is taken or refused by a typed error, without a panic, an abort or a
//! hang, and in bounded memory.

use std::time::Duration;

use cuda_driver::{Device, DeviceBuffer};
use cuda_sim::SimConfig;
use cuda_vmm::limit::{AdmissionPolicy, Headroom};
use kv_cache::{
    Answer, BuildError, GroupId, Growth, KvCache, KvCacheOptions, KvWorker, MemoryLimit,
    MemoryRules, PoolRules, Request, Tokens, TransportChoice, TransportRules, Worker,
    WorkerOptions,
};
use kv_kernels::{
    KvShape, KvShapeOptions, PagedKv, PagedLayout,
    link::{HostLinkOptions, TransportProfile},
};
use kv_pool::{
    BlockHash, Tier,
    tenants::{TenantId, TenantQuota},
};

use crate::common::engine::{Prompt, admit_to, options, shape, streams};
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
fn shapes() {
    let base = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 32, block_tokens: 4 };
    let mut shapes = Vec::new();
    for value in U32 {
        shapes.push(KvShapeOptions { layers: value, ..base });
        shapes.push(KvShapeOptions { kv_count: value, ..base });
        shapes.push(KvShapeOptions { block_tokens: value, ..base });
        shapes.push(KvShapeOptions { layers: value, block_tokens: value, ..base });
        shapes.push(KvShapeOptions { layers: value, kv_count: value, block_tokens: value, ..base });
    }
    for value in U64 {
        shapes.push(KvShapeOptions { row_bytes: value, ..base });
        shapes.push(KvShapeOptions { row_bytes: value & !7, ..base });
        shapes.push(KvShapeOptions { row_bytes: value & !7, layers: 1 << 20, ..base });
    }
    // The simulated device keeps 16 bytes a page of what is reserved, which is more than the bound here.
    let is_kept = |shape: &KvShape| !(1 << 42..1 << 48).contains(&shape.block_bytes());
    let shapes = shapes.into_iter().filter_map(|shape| KvShape::new(shape).ok());
    let made: Vec<KvShape> = shapes.filter(is_kept).collect();
    assert!(made.len() > 10);
    try_all(made.into_iter().map(|shape| KvCacheOptions { shape, ..small() }));
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
fn logs_of_events() {
    let with = |events| KvCacheOptions {
        pool: PoolRules { events: Some(events), ..PoolRules::default() },
        ..small()
    };
    try_all([0, 1, 2, 4096, 1 << 40, usize::MAX - 1, usize::MAX].map(with));
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
fn requests() {
    let device = device();
    let mut cache = KvCache::new(&streams(&[device]), small()).unwrap();
    let names: Vec<_> = (0..64).map(|at| BlockHash::chain(BlockHash::ROOT, &[at])).collect();
    let admit = |cache: &mut KvCache, tokens: u64, named: usize, budget: u64| {
        let mut request = Request::named(tokens, names[..named].to_vec());
        request.tokens_max = tokens;
        cache.admit(&mut [request], budget).unwrap().pop()
    };
    for tokens in U64 {
        for named in [0, 1, 64] {
            match admit(&mut cache, tokens, named, tokens) {
                Some(Answer::Admitted(sequence)) => {
                    assert_eq!(sequence.block_count() as u64, tokens.div_ceil(4));
                    assert_eq!(u64::from(sequence.next()), tokens);
                }
                Some(Answer::Refused(error)) => assert!(!error.to_string().is_empty()),
                // Without a budget nothing is looked at.
                None => assert_eq!(tokens, 0, "{named}"),
                answer => panic!("{tokens}, {named}: {answer:?}"),
            }
            let mut request = Request::named(tokens, names[..named].to_vec());
            let formats = cache.manager().formats();
            let (answer, adoption) = cache.adopt(&mut request, tokens, &formats).unwrap();
            assert_eq!(
                matches!(answer, Answer::Admitted(_)),
                (1..3).contains(&tokens) && named == 0
            );
            drop((answer, adoption));
        }
    }
    for budget in U64 {
        assert!(cache.admit(&mut [], budget).unwrap().is_empty());
        for (hit_max, shared_tokens) in [(0, 0), (u64::MAX, u64::MAX)] {
            let mut request = Request::new(vec![7]);
            (request.hit_max, request.content.shared_tokens) = (hit_max, shared_tokens);
            request.content.salt = vec![1];
            let answers = cache.admit(&mut vec![request; 10_000], budget).unwrap();
            let admitted = answers.iter().filter(|answer| matches!(answer, Answer::Admitted(_)));
            // The budget is counted in blocks.
            assert_eq!(admitted.count() as u64, budget.div_ceil(4).min(8));
        }
    }

    cache.close().unwrap();
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
            let mapped = cache.slot_mapping(&sequence, start..end, &mut slots);
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
fn adopted_blocks() {
    let device = device();
    let mut cache = KvCache::new(&streams(&[device]), small()).unwrap();
    for right in [0, 1, 2, 3, usize::MAX] {
        let mut request = Request::new(Prompt::new(right as u32, 9).tokens);
        let formats = cache.manager().formats();
        let (answer, adoption) = cache.adopt(&mut request, 8, &formats).unwrap();
        let Answer::Admitted(mut sequence) = answer else { panic!("{answer:?}") };
        let end = cache.adopted(&mut sequence, adoption.unwrap(), right).unwrap();
        assert_eq!(end, 4 * right.min(2) as u64);
    }
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
            assert_eq!(worker.ready_blocks(), blocks.min(8).min(kept.max(1)));
            assert_eq!(worker.grow_to(blocks).unwrap(), blocks.min(8));
        }
        worker.close().unwrap();
    }
}

#[test]
fn quotas() {
    let device = device();
    let mut cache = KvCache::new(&streams(&[device]), small()).unwrap();
    let tenant = cache.add_tenant().unwrap();
    for held_max in U64 {
        for cached_max in U64 {
            for reserved in U64 {
                for tier in [Tier::Primary, Tier::Secondary] {
                    let quota = TenantQuota { held_max, cached_max, reserved };
                    for tenant in [tenant, TenantId::NOBODY] {
                        if let Err(error) = cache.set_quota(tenant, tier, quota) {
                            assert!(!error.to_string().is_empty());
                        }
                    }
                    let mut request = Request::new(vec![7; 9]);
                    request.tenant = tenant;
                    drop(cache.admit(&mut [request], held_max));
                }
            }
        }
    }
    for length in [0, 1, 1 << 16] {
        KvCache::add_tenant_with_key(&mut cache, &vec![0xFF; length]).unwrap();
    }
    for id in [0, 7, u32::MAX] {
        KvCache::set_placeholder_ids(&mut cache, vec![id..=id]);
        let answers = cache.admit(&mut [Request::new(vec![id; 9])], 9).unwrap();
        assert!(matches!(answers[..], [Answer::Refused(_)]), "{id}: {answers:?}");
    }
    let none = TenantQuota::NONE;
    cache.set_quota(tenant, Tier::Primary, none).unwrap();
    cache.set_quota(tenant, Tier::Secondary, none).unwrap();
    let mut tenants = 1_u64;
    while tenants < 1 << 20 && cache.add_tenant().is_ok() {
        tenants += 1;
    }
    assert!(tenants < 1 << 20, "no bound on tenants");
    cache.close().unwrap();
}

#[test]
fn tiers_of_any_number_and_models_of_any_length_are_taken_or_refused() {
    use kv_cache::kv_tier::{MemoryTier, MemoryTierOptions};
    let device = [device()];
    for (tiers, length) in [(0, 0), (1, 1), (2, 1 << 20), (3, 7)] {
        let mut lower = kv_cache::LowerTiers::new(&vec![1; length]);
        (0..tiers).for_each(|_| {
            lower.push(|| Box::new(MemoryTier::new(MemoryTierOptions::default())));
        });
        let options = KvCacheOptions { tiers: lower, ..small() };
        let made = kv_cache::KvCache::new(&streams(&device), options);
        assert_eq!(made.is_ok(), tiers <= 2, "{tiers} tiers");
        made.into_iter().for_each(|cache| cache.close().unwrap());
    }
}

#[test]
fn layers_that_are_waited_for() {
    let mut cache = KvCache::new(&streams(&[device()]), small()).unwrap();
    let mut worker = KvWorker::new(&streams(&[device()]), small()).unwrap();
    for layer in U32 {
        let waited = KvCache::wait_for_layer(&mut cache, layer);
        assert_eq!(waited.is_ok(), layer < 4, "layer {layer} of 4: {waited:?}");
        assert_eq!(KvWorker::wait_for_layer(&mut worker, layer).is_ok(), layer < 4);
        let group = |of: u32| GroupId(of.min(u16::MAX.into()) as u16);
        let waited = KvCache::wait_for_layer_of(&mut cache, group(layer), layer);
        assert_eq!(waited.is_ok(), layer == 0, "layer {layer} of group {layer}: {waited:?}");
        let waited = KvWorker::wait_for_layer_of(&mut worker, group(layer), layer);
        assert_eq!(waited.is_ok(), layer == 0, "layer {layer} of group {layer}: {waited:?}");
    }
    cache.close().unwrap();
    worker.close().unwrap();
}

#[test]
fn memory_to_share_of_any_size_is_divided_or_refused() {
    let group = kv_cache::GroupOptions {
        kind: kv_cache::GroupKind::Full,
        shape: shape(3, 64, 4),
        device_blocks: 1,
        host_blocks: 0,
        blocks_per_sequence_max: 4,
        watermark_blocks: 0,
        draft_model: false,
    };
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

#[test]
fn what_is_stored_is_decided_for_any_number_of_host_blocks() {
    use kv_cache::HostStore;
    for blocks in [0, 1, 4096, u32::MAX] {
        assert!(HostStore::All.make(blocks).unwrap().is_none());
        let made = HostStore::from(kv_pool::store::StoreKind::Evidence).make(blocks);
        match blocks {
            0 => assert!(made.unwrap().is_none()),
            u32::MAX => assert!(made.is_err(), "more blocks than a pool can have"),
            _ => assert_eq!(made.unwrap().unwrap().name(), "evidence"),
        }
    }
}
