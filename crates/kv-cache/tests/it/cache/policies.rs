//! The pool that a cache is built with: its policy, and its events.

use kv_cache::kv_manager::CacheEvent;
use kv_cache::{Eviction, KvCacheOptions, PoolRules};
use kv_pool::policy::{
    BlockFacts, EvictionPolicy, PolicyError, PolicyKind, PolicyTime, PriorityLru, RecordId,
};

use crate::common::engine::{Prompt, options};
use crate::machine::{Machine, small};

/// The block that became evictable last goes first.
#[derive(Debug)]
struct NewestFirst {
    evictable: Vec<RecordId>,
    order: PriorityLru,
}

impl NewestFirst {
    fn make(blocks: u64) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        Ok(Box::new(Self { evictable: Vec::new(), order: PriorityLru::new(blocks)? }))
    }
}

impl EvictionPolicy for NewestFirst {
    fn name(&self) -> &'static str {
        "newest_first"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.order.evictable(block, facts);
        self.evictable.push(block);
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.order.children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.removed(block);
    }

    fn removed(&mut self, block: RecordId) {
        self.order.removed(block);
        self.evictable.retain(|&other| other != block);
    }

    fn victim(&mut self, _now: PolicyTime) -> Option<RecordId> {
        let victim = self.evictable.pop()?;
        self.order.removed(victim);
        Some(victim)
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

#[test]
fn a_policy_of_the_caller_s_decides_who_goes() {
    let machine = Machine::new(1, 1, small());
    // Three prompts of one full block and a bit; room for two of them and a half.
    let [first, second, third] = [1, 2, 3].map(|seed| Prompt::new(seed, 5));
    let kept = |eviction: Eviction| {
        let pool = PoolRules { eviction, ..PoolRules::default() };
        let mut engine = machine.rig.engine_with(KvCacheOptions { pool, ..options(small(), 3, 0) });
        for prompt in [&first, &second, &third] {
            assert_eq!(engine.serve(prompt), (0, 0));
        }
        // The third needs two blocks, of which one is empty: one of the other prefixes has gone.
        let pool = engine.cache.manager().pool().clone();
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
fn events_are_kept_when_they_are_asked_for() {
    let (machine, engine) = Machine::one(8, 0);
    assert!(engine.cache.manager().events().is_none());
    drop(engine);
    let pool = PoolRules { events: Some(64), ..PoolRules::default() };
    let mut engine = machine.rig.engine_with(KvCacheOptions { pool, ..options(small(), 8, 0) });
    let mut reader = engine.cache.manager().events().unwrap();
    let prompt = Prompt::new(1, 9);
    engine.serve(&prompt);
    let mut events = Vec::new();
    reader.read(&mut events).unwrap();
    let [CacheEvent::Cleared, CacheEvent::Stored(stored)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(stored.names, prompt.hashes(4));
    machine.close(engine);
}
