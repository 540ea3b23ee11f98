//! The pool that a cache is built with: policies, priorities that end, events.

use std::sync::Arc;
use std::time::Duration;

use kv_cache::{Eviction, HostStore, KvCacheOptions, PoolRules};
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyError, PolicyKind, PolicyTime, RecordId};
use kv_pool::{
    Priority,
    clock::ManualClock,
    events::{PoolEvent, Reading},
    retention::{Retention, RetentionPolicy, TokenRange},
    tenants::TenantId,
};

use crate::common::engine::{Engine, Live, Prompt, options};
use crate::common::random;
use crate::machine::{Machine, small};

#[test]
fn contents_are_right_under_every_policy_in_both_tiers() {
    for kind in PolicyKind::ALL {
        for seed in 0..2 {
            let machine = Machine::new(seed, 1, small());
            let clock = ManualClock::new();
            let rules = [HostStore::All, HostStore::from(kv_pool::store::StoreKind::Evidence)];
            let pool = PoolRules {
                eviction: kind.into(),
                host_eviction: kind.into(),
                store: rules[seed as usize],
                events: None,
                clock: Some(Arc::new(clock)),
                pinned_blocks_max: 0,
            };
            random::random_requests_with(&machine.rig, seed, 1_500, pool);
            machine.assert_clean();
        }
    }
}

fn engine(machine: &Machine, device_blocks: u32, pool: PoolRules) -> Engine {
    machine.rig.engine_with(KvCacheOptions { pool, ..options(machine.rig.shape, device_blocks, 0) })
}

/// Runs one request alone; how many of its tokens were cached.
fn serve(engine: &mut Engine, prompt: &Prompt) -> u64 {
    let live = engine.admit(prompt).unwrap();
    finish(engine, live)
}

fn finish(engine: &mut Engine, mut live: Live) -> u64 {
    let cached = live.sequence.cached_tokens();
    engine.run(&mut [&mut live]).unwrap();
    drop(live);
    engine.drain().unwrap();
    cached
}

/// The block that became evictable last goes first, of those that no other follows.
#[derive(Debug, Default)]
struct NewestFirst(Vec<(RecordId, bool)>);

impl NewestFirst {
    fn make(_: u64) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        Ok(Box::new(Self::default()))
    }
}

impl EvictionPolicy for NewestFirst {
    fn name(&self) -> &'static str {
        "newest_first"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.0.push((block, facts.has_children));
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.0.iter_mut().filter(|of| of.0 == block).for_each(|of| of.1 = has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.0.retain(|of| of.0 != block);
    }

    fn removed(&mut self, block: RecordId) {
        self.held(block);
    }

    fn victim(&mut self, _now: PolicyTime) -> Option<RecordId> {
        let at = self.0.iter().rposition(|(_, has_children)| !has_children)?;
        Some(self.0.remove(at).0)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn a_policy_of_the_caller_s_decides_who_goes() {
    let machine = Machine::new(1, 1, small());
    // Three prompts of one full block and a bit; room for two of them and a half.
    let [first, second, third] = [1, 2, 3].map(|seed| Prompt::new(seed, 5));
    let kept = |eviction: Eviction| {
        let rules = PoolRules { eviction, ..PoolRules::default() };
        let mut engine = engine(&machine, 3, rules);
        for prompt in [&first, &second, &third] {
            assert_eq!(serve(&mut engine, prompt), 0);
        }
        // The third needs two blocks, of which one is empty: one of the other prefixes has gone.
        let pool = engine.cache.pool().clone();
        let cached =
            [&first, &second].map(|prompt| !pool.match_prefix(&prompt.hashes(4)).is_empty());
        engine.close();
        cached
    };
    assert_eq!(kept(PolicyKind::Lru.into()), [false, true]);
    assert_eq!(kept(Eviction::Custom(NewestFirst::make)), [true, false]);
    machine.assert_clean();
}

#[test]
fn what_is_worth_more_stays_until_its_time_is_over() {
    let machine = Machine::new(1, 1, small());
    let clock = ManualClock::new();
    let rules = PoolRules { clock: Some(Arc::new(clock.clone())), ..PoolRules::default() };
    let mut engine = engine(&machine, 8, rules);
    let duration = Some(Duration::from_secs(60));
    let keep = Retention { priority: Priority::MAX, duration };
    // Of three full blocks the first two.
    let ranges = vec![TokenRange::new(0, 8, keep)];
    let retention = Arc::new(RetentionPolicy::new(ranges, Retention::default()).unwrap());
    let kept = Prompt::new(1, 13);
    let live = engine.admit_as(&kept, TenantId::NOBODY, Some(&retention)).unwrap();
    finish(&mut engine, live);
    for seed in 2..6 {
        serve(&mut engine, &Prompt::new(seed, 21));
    }
    assert_eq!(serve(&mut engine, &kept), 8);
    for seed in 6..10 {
        serve(&mut engine, &Prompt::new(seed, 21));
    }
    assert_eq!(serve(&mut engine, &kept), 8, "a block that is found again keeps its priority");
    clock.advance(Duration::from_secs(61));
    let blocks = engine.cache.pool().snapshot().blocks;
    let ends = blocks.iter().any(|block| block.expiry.is_some());
    assert!(!ends, "a block that is used again keeps it for good");
    engine.close();
    machine.assert_clean();
}

#[test]
fn events_are_kept_when_they_are_asked_for() {
    let machine = Machine::new(1, 1, small());
    let rules = PoolRules { events: Some(64), ..PoolRules::default() };
    let mut engine = engine(&machine, 8, rules);
    let mut events = engine.cache.pool().events().unwrap();
    let prompt = Prompt::new(1, 9);
    serve(&mut engine, &prompt);
    let mut readings = Vec::new();
    events.read(64, &mut readings);
    let stored: Vec<_> = readings
        .into_iter()
        .filter_map(|reading| match reading {
            Reading::Event { event: PoolEvent::Stored { hash, .. }, .. } => Some(hash),
            _ => None,
        })
        .collect();
    assert_eq!(stored, prompt.hashes(4));
    engine.close();
    machine.assert_clean();
}

#[test]
fn a_pinned_prefix_stays_on_the_device_under_pressure() {
    for pins in [false, true] {
        let machine = Machine::new(1, 1, small());
        let rules = PoolRules { pinned_blocks_max: 2, ..PoolRules::default() };
        let mut engine = engine(&machine, 8, rules);
        let prompt = Prompt::new(1, 9);
        serve(&mut engine, &prompt);
        let names = prompt.hashes(4);
        let pin = pins.then(|| engine.cache.pin(&names).unwrap());
        assert_eq!(pin.as_ref().map_or(0, kv_cache::PinnedPrefix::len), if pins { 2 } else { 0 });
        for seed in 2..8 {
            serve(&mut engine, &Prompt::new(seed, 21));
        }
        let held = engine.cache.pool().snapshot();
        let found = held.blocks.iter().filter(|block| {
            block.location.tier == kv_pool::Tier::Primary
                && block.hash.is_some_and(|hash| names.contains(&hash))
        });
        assert_eq!(found.count(), if pins { 2 } else { 0 });
        drop(pin);
        engine.close();
        machine.assert_clean();
    }
}
