//! Caches of models whose layers are not all of one kind. Bytes are verified by the replay of traces, in
//! `kv-replay`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "this test uses its share")]
#[path = "common/engine.rs"]
mod engine;

use std::sync::Arc;

use cuda_driver::{Device, DeviceSpan, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use engine::{options, shape, streams};
use kv_cache::{
    Answer, BuildError, GroupId, GroupKind, GroupOptions, KvCache, KvCacheOptions, OptionsError,
    Request, Sequence,
};
use kv_pool::Tier;

const WINDOW: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);
const WINDOW_BLOCKS: u32 = 12;
const STATES: u32 = 6;

/// Blocks of four tokens: full attention, a window of six tokens, and a state.
fn hybrid() -> KvCacheOptions {
    let mut options = options(shape(2, 32, 4), 32, 0);
    let group = GroupOptions {
        kind: GroupKind::Window { tokens: 6, sinks: 0 },
        shape: shape(3, 16, 4),
        device_blocks: WINDOW_BLOCKS,
        host_blocks: 0,
        blocks_per_sequence_max: options.blocks_per_sequence_max,
        watermark_blocks: 0,
    };
    let kind = GroupKind::State { checkpoint_tokens: 16 };
    let states = GroupOptions { kind, shape: shape(1, 64, 1), device_blocks: STATES, ..group };
    options.further_groups = vec![group, states];
    options
}

fn machine(devices: u32) -> (SimDriver, Vec<Stream>) {
    let sim = SimDriver::new(SimConfig { devices, ..SimConfig::default() }).unwrap();
    sim.register_kernels(kv_kernels::references());
    sim.register_kernels(kv_stage::references());
    let open = |ordinal| Device::open(Arc::new(sim.clone()), ordinal).unwrap();
    let devices: Vec<Device> = (0..devices as i32).map(open).collect();
    let streams = streams(&devices);
    (sim, streams)
}

/// The whole prompt of `tokens` tokens, computed.
fn computed(cache: &mut KvCache, tokens: u32) -> Sequence {
    let mut request = Request::new((0..tokens).collect());
    let step = cache.begin_step().unwrap();
    let answer = cache.admit(std::slice::from_mut(&mut request), 8).unwrap().remove(0);
    let Answer::Admitted(mut sequence) = answer else { panic!("{answer:?}") };
    cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
    while sequence.to_compute() > 0 {
        let step = cache.begin_step().unwrap();
        let chunk = sequence.to_compute().min(8) as u32;
        cache.reserve(&mut sequence, chunk).unwrap();
        cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
    }
    sequence
}

fn read(stream: &Stream, from: DeviceSpan) -> Vec<i32> {
    let to = PinnedBuffer::alloc(stream.device(), from.bytes(), HostAllocFlags::CACHED).unwrap();
    stream.copy_to_host(&to, 0, from).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; from.bytes() as usize];
    to.read_at(0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|id| i32::from_le_bytes(id.try_into().unwrap())).collect()
}

#[test]
fn entries_without_a_block_name_memory_that_nobody_owns() {
    let (_sim, streams) = machine(1);
    let mut cache = KvCache::new(&streams, hybrid()).unwrap();
    let sequence = computed(&mut cache, 30);
    for (group, null) in [(WINDOW, WINDOW_BLOCKS as i32), (STATE, STATES as i32)] {
        let ids = cache.manager().block_ids_of(group, &sequence).to_vec();
        let table = cache.parts()[0].batch().tables[usize::from(group.0)].block_table;
        let staged = read(&streams[0], table);
        let (own, padding) = staged.split_at(ids.len());
        for (&staged, &id) in own.iter().zip(&ids) {
            assert_eq!(staged, if id < 0 { null } else { id }, "{group:?}: {own:?} of {ids:?}");
            assert!(id < null, "nobody is given it");
        }
        assert!(padding.iter().all(|&id| id == null), "{group:?}");
        let held = &cache.parts()[0].groups()[usize::from(group.0)];
        assert_eq!(held.ready_blocks(), null as u64 + 1, "it has memory");
    }
    let window = cache.manager().block_ids_of(WINDOW, &sequence);
    assert!(window[..5].iter().all(|&id| id < 0), "blocks behind the window have left: {window:?}");
    assert!(window[6] >= 0 && window[7] >= 0);
    drop(sequence);
    cache.close().unwrap();
}

#[test]
fn the_block_that_nobody_owns_stays_whatever_the_budget() {
    let (_sim, streams) = machine(1);
    let mut options = hybrid();
    options.kind = GroupKind::Window { tokens: 6, sinks: 0 };
    options.further_groups.clear();
    let mut cache = KvCache::new(&streams, options).unwrap();
    drop(computed(&mut cache, 30));
    cache.set_budget(Tier::Primary, 0).unwrap();
    for _ in 0..3 {
        let step = cache.begin_step().unwrap();
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
    }
    assert_eq!(cache.parts()[0].ready_blocks(), 33);
    cache.set_budget(Tier::Primary, 32).unwrap();
    drop(computed(&mut cache, 30));
    cache.close().unwrap();
}

#[test]
fn groups_that_cannot_be_are_refused_by_name() {
    let (_sim, streams) = machine(2);
    let refused =
        |options: KvCacheOptions, devices: usize| match KvCache::new(&streams[..devices], options)
            .unwrap_err()
        {
            BuildError::Options(error) => error.to_string(),
            error => error.to_string(),
        };
    assert_eq!(refused(hybrid(), 2), "a cache on 2 devices has only 1 layers to divide");
    let with = |change: fn(&mut GroupOptions)| {
        let mut options = hybrid();
        change(&mut options.further_groups[0]);
        options
    };
    assert_eq!(
        refused(with(|group| group.device_blocks = 0), 1),
        "the cache option device_blocks is 0"
    );
    let most = with(|group| group.device_blocks = u32::MAX);
    assert!(matches!(
        KvCache::new(&streams[..1], most).unwrap_err(),
        BuildError::Options(OptionsError::TooManyBlocks { .. })
    ));
    let narrow = with(|group| group.blocks_per_sequence_max = 0);
    assert_eq!(refused(narrow, 1), "the cache option blocks_per_sequence_max is 0");
    let mut placed = hybrid();
    placed.further_groups[1].kind = GroupKind::State { checkpoint_tokens: 6 };
    assert_eq!(refused(placed, 1), "no manager can have these options");
}
