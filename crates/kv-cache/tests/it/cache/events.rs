//! Events of a cache, and bytes by way: a mirror that hears only of events has what the pool has.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kv_cache::kv_manager::tiers::{MemoryTier, MemoryTierOptions};
use kv_cache::{CacheEvent, KvCacheOptions, LowerTiers, PoolRules};
use kv_pool::clock::ManualClock;
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

/// What each name follows that was ever told of.
type Parents = HashMap<BlockHash, Option<BlockHash>>;

/// Notes what the names of an event follow.
fn note(parents: &mut Parents, event: &CacheEvent) {
    let CacheEvent::Stored(blocks) = event else { return };
    let mut parent = blocks.parent;
    for &name in &blocks.names {
        parents.insert(name, parent);
        parent = Some(name);
    }
}

/// Compares a mirror with what lookups find, in a tier below host memory too.
fn assert_same(mirror: &Mirror, parents: &Parents, engine: &Engine, when: &str) {
    let (below, above): (Mirror, Mirror) =
        mirror.iter().partition(|(tier, _)| *tier > Tier::Secondary);
    let (manager, there) = (engine.cache.manager(), cached(engine));
    let near: HashSet<_> = there.iter().map(|&(_, name)| name).collect();
    let is_somewhere = |name| {
        near.contains(&name) || manager.find_below_of(kv_manager::GroupId(0), name).is_some()
    };
    let is_found = |&name: &BlockHash| {
        let before = |name: &BlockHash| parents.get(name).copied().flatten();
        std::iter::successors(Some(name), before).all(is_somewhere)
    };
    assert_eq!(above, there.into_iter().filter(|(_, name)| is_found(name)).collect(), "{when}");
    let stored = parents
        .keys()
        .filter(|&&name| manager.find_below_of(kv_manager::GroupId(0), name) == Some(Tier::Third));
    let found: Mirror =
        stored.filter(|name| is_found(name)).map(|&name| (Tier::Third, name)).collect();
    assert_eq!(below, found, "{when}");
    assert!(found.len() as u64 <= manager.lower_stats().names[0], "{when}");
}

#[test]
fn a_mirror_of_a_whole_life_has_what_the_cache_has_in_every_tier() {
    let (machine, clock) = (Machine::new(7, 1, small()), ManualClock::new());
    let mut tiers = LowerTiers::new(b"a model");
    // Fewer than are stored, so the tier drops some by itself.
    tiers.push(|| {
        Box::new(MemoryTier::new(MemoryTierOptions { records_max: 26, ..Default::default() }))
    });
    let now = Some(Arc::new(clock.clone()) as _);
    let pool = PoolRules { events: Some(1000), clock: now, ..PoolRules::default() };
    let mut engine =
        machine.rig.engine_with(KvCacheOptions { tiers, pool, ..options(small(), 12, 10) });
    engine.clock = Some(clock.clone());
    let mut reader = engine.cache.events().unwrap();
    let (mut mirror, mut events, mut removed) = (Mirror::new(), Vec::new(), 0);
    let mut parents = Parents::new();
    for turn in 0..32 {
        if turn == 20 {
            engine.cache.reset();
        }
        clock.advance(Duration::from_millis(1));
        // Of 28 blocks the device and host memory hold 22, and the tier 26.
        let (mut live, _) = engine.admit_loaded(&Prompt::new(turn % 7, 4 * 4 + 2)).unwrap();
        engine.run(&mut [&mut live]).unwrap();
        engine.drain().unwrap();
        drop(live);
        for _ in 0..4 {
            engine.idle().unwrap();
        }
        events.clear();
        reader.read(&mut events).unwrap();
        let below = |event: &&CacheEvent| matches!(event, CacheEvent::Removed { tier, .. } if *tier == Tier::Third);
        removed += events.iter().filter(below).count();
        for event in &events {
            take_in(&mut mirror, event);
            note(&mut parents, event);
        }
        assert_same(&mirror, &parents, &engine, &format!("after turn {turn}"));
    }
    let stats = engine.cache.manager().lower_stats();
    assert!(stats.stored_blocks[0] > 20 && stats.loaded_blocks[0] > 0, "{stats:?}");
    assert!(removed > 0, "the tier dropped nothing: {stats:?}");
    // A reader that begins now has the same.
    let mut late = Mirror::new();
    events.clear();
    engine.cache.events().unwrap().read(&mut events).unwrap();
    events.iter().for_each(|event| take_in(&mut late, event));
    assert_eq!(late, mirror);
    engine.close();
    machine.assert_clean();
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
