//! The pool that a cache is built with: its policy, and its events.

use kv_plane::manager::CacheEvent;
use kv_pool::ConfigError;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};

use crate::prelude::*;

/// The block that became evictable last goes first, of those that no other follows.
#[derive(Debug, Default)]
struct NewestFirst(Vec<(RecordId, bool)>);

impl NewestFirst {
    fn make(_: u64) -> Result<Box<dyn EvictionPolicy>, ConfigError> {
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
        let pool = PoolRules { eviction, ..PoolRules::default() };
        let mut engine = machine.rig.engine_with(KvCacheOptions { pool, ..options(small(), 3, 0) });
        for prompt in [&first, &second, &third] {
            assert_eq!(engine.serve(prompt), (0, 0));
        }
        // The third needs two blocks, of which one is empty: one of the other prefixes has gone.
        let pool = engine.pool();
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
