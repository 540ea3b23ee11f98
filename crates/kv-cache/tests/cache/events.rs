//! Events of a cache, and bytes by way: a mirror that hears only of events has what the pool has.

use std::collections::HashSet;

use kv_cache::{CacheEvent, KvCacheOptions, PoolRules};
use kv_pool::{BlockHash, Tier};

use crate::common::engine::{Engine, Prompt, options};
use crate::machine::{Machine, small};

/// Names by tier.
type Mirror = HashSet<(Tier, BlockHash)>;

fn cached(engine: &Engine) -> Mirror {
    let blocks = engine.cache.pool().snapshot().blocks;
    blocks.iter().filter_map(|block| Some((block.location.tier, block.hash?))).collect()
}

fn take_in(mirror: &mut Mirror, event: &CacheEvent) {
    match event {
        CacheEvent::Stored(blocks) => {
            mirror.extend(blocks.names.iter().map(|&name| (blocks.tier, name)));
        }
        CacheEvent::Moved { from, to } => {
            for &name in &to.names {
                assert!(mirror.remove(&(*from, name)), "moved from where it was not");
                mirror.insert((to.tier, name));
            }
        }
        CacheEvent::Removed { tier, names, .. } => {
            for &name in names {
                assert!(mirror.remove(&(*tier, name)), "removed from where it was not");
            }
        }
        CacheEvent::Cleared => mirror.clear(),
        other => panic!("{other:?}"),
    }
}

/// Serves eight prompts in turn, of which device and host memory hold five; how often content has moved, and how often
/// a reader that keeps `events_max` was told of a loss.
fn follow(events_max: usize) -> (usize, usize) {
    let machine = Machine::new(3, 1, small());
    let pool = PoolRules { events: Some(events_max), ..PoolRules::default() };
    let mut engine = machine.rig.engine_with(KvCacheOptions { pool, ..options(small(), 12, 10) });
    let mut reader = engine.cache.events().unwrap();
    let (mut mirror, mut events, mut moved, mut lost) = (Mirror::new(), Vec::new(), 0, 0);
    for seed in (0..8).chain(0..8).chain([5, 4, 6, 7, 5, 4]) {
        let mut live = engine.admit(&Prompt::new(seed, 4 * 4 + 2)).unwrap();
        engine.run(&mut [&mut live]).unwrap();
        engine.drain().unwrap();
        drop(live);
        engine.idle().unwrap();
        events.clear();
        if reader.read(&mut events).is_err() {
            lost += 1;
            reader.read(&mut events).unwrap();
        }
        events.iter().for_each(|event| take_in(&mut mirror, event));
        moved += events.iter().filter(|event| matches!(event, CacheEvent::Moved { .. })).count();
        assert_eq!(mirror, cached(&engine), "after prompt {seed}");
    }
    let (decided, stats) = (engine.decided(), engine.cache.stats());
    let bytes = |blocks: u64| blocks * engine.cache.shape().block_bytes();
    assert_eq!(stats.ways.device_to_host, bytes(decided.offloaded_blocks));
    assert_eq!(stats.ways.host_to_device, bytes(decided.onboarded_blocks));
    assert_eq!(stats.copied_bytes, stats.ways.device_to_host + stats.ways.host_to_device);
    assert!(decided.offloaded_blocks > 20 && decided.onboarded_blocks > 8, "{decided:?}");
    engine.close();
    machine.assert_clean();
    (moved, lost)
}

#[test]
fn a_mirror_of_events_has_what_the_cache_has() {
    let (moved, lost) = follow(1000);
    assert!(moved > 8 && lost == 0, "{moved} moved, {lost} lost");
}

#[test]
fn a_mirror_that_came_too_late_is_repaired() {
    let (_, lost) = follow(6);
    assert!(lost > 4, "{lost} lost");
}

#[test]
fn a_cache_without_events_has_no_reader() {
    let machine = Machine::new(3, 1, small());
    let cache = machine.rig.engine_with(options(small(), 12, 10)).cache;
    assert!(cache.events().is_none());
    cache.close().unwrap();
    machine.assert_clean();
}
