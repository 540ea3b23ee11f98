//! What every eviction policy owes its caller, whatever order it chooses: one suite, run on each of ours.

use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};
use kv_pool::{BlockHash, Priority};
use kv_tools::policies::evict::{AdaptiveReplacement, Eviction, S3Fifo, Slru};

const BLOCKS: usize = 24;

fn policies() -> Vec<Box<dyn EvictionPolicy>> {
    Eviction::ALL.map(|eviction| eviction.make(BLOCKS as u64).unwrap()).into()
}

/// A cached block, as the caller knows it.
#[derive(Clone, Copy)]
struct Cached {
    facts: BlockFacts,
    held: bool,
    children: u32,
}

/// A pool that knows nothing but the rules.
struct Caller {
    policy: Box<dyn EvictionPolicy>,
    cached: Vec<Option<Cached>>,
    now: PolicyTime,
    random: u64,
}

impl Caller {
    fn new(policy: Box<dyn EvictionPolicy>, seed: u64) -> Self {
        let now = PolicyTime::default();
        Self { policy, cached: vec![None; BLOCKS], now, random: seed }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % bound
    }

    fn block(&mut self) -> (RecordId, usize) {
        let index = self.below(BLOCKS as u64) as usize;
        (RecordId::from_index(index as u32), index)
    }

    /// One call of a kind and to a block chosen at random.
    fn step(&mut self) {
        self.now.lookups += 1;
        self.now.ms += [0, 0, 3, 700, 40_000][self.below(5) as usize];
        let (block, index) = self.block();
        match (self.below(6), self.cached[index]) {
            (0..2, None) => self.store(block, index),
            (0..2, Some(cached)) if cached.held => self.release(block, index),
            (0..2, Some(_)) => {
                self.policy.held(block);
                self.cached[index].as_mut().unwrap().held = true;
            }
            (2, Some(_)) => self.find(block, index),
            (3, Some(cached)) if cached.children == 0 => {
                self.policy.removed(block);
                self.forget(index);
            }
            (4, _) => self.evict(),
            (5, Some(cached)) if cached.held => self.release(block, index),
            _ => {}
        }
        let evictable = self.cached.iter().flatten().filter(|cached| !cached.held).count();
        assert_eq!(self.policy.len(), evictable);
    }

    fn store(&mut self, block: RecordId, index: usize) {
        let (parent, parent_index) = self.block();
        let parent = self.cached[parent_index].is_some().then_some(parent);
        if let Some(cached) = parent.and(self.cached[parent_index].as_mut()) {
            cached.children += 1;
            if !cached.held && cached.children == 1 {
                self.policy.children(parent.unwrap(), true);
            }
        }
        let hash = BlockHash::from_u128(u128::from(self.below(60)) << 40 | 1);
        let priority = [Priority::DEFAULT, Priority::MIN, Priority::MAX][self.below(3) as usize];
        let facts = BlockFacts {
            parent,
            priority,
            full: self.below(4) > 0,
            used: self.now,
            ..BlockFacts::new(hash)
        };
        self.policy.missed(hash, self.now);
        self.policy.stored(block, &facts);
        self.cached[index] = Some(Cached { facts, held: true, children: 0 });
    }

    fn find(&mut self, block: RecordId, index: usize) {
        let now = self.now;
        let cached = self.cached[index].as_mut().unwrap();
        cached.facts.found += 1;
        cached.facts.used = now;
        self.policy.found(block, now);
        if !std::mem::replace(&mut cached.held, true) {
            self.policy.held(block);
        }
    }

    fn release(&mut self, block: RecordId, index: usize) {
        let cached = self.cached[index].as_mut().unwrap();
        cached.held = false;
        cached.facts.has_children = cached.children > 0;
        let facts = cached.facts;
        self.policy.evictable(block, &facts);
    }

    /// Asks for a victim, which must be there if any block may go, and must be one that may.
    fn evict(&mut self) {
        let may_go = |cached: &Cached| !cached.held && cached.children == 0;
        let expected = self.cached.iter().flatten().any(may_go);
        let victim = self.policy.victim(self.now);
        assert_eq!(victim.is_some(), expected, "{}", self.policy.name());
        if let Some(victim) = victim {
            let cached = self.cached[victim.index()].unwrap();
            assert!(may_go(&cached), "{}: {victim:?}", self.policy.name());
            self.drop_victim(victim);
        }
    }

    fn drop_victim(&mut self, victim: RecordId) {
        let cached = self.cached[victim.index()].unwrap();
        self.policy.evicted(victim, cached.facts.hash);
        self.forget(victim.index());
    }

    fn forget(&mut self, index: usize) {
        let parent = self.cached[index].take().and_then(|cached| cached.facts.parent);
        let Some(parent) = parent else { return };
        let cached = self.cached[parent.index()].as_mut().expect("parents outlive their children");
        cached.children -= 1;
        if cached.children == 0 && !cached.held {
            self.policy.children(parent, false);
        }
    }
}

#[test]
fn no_policy_evicts_what_is_held_or_has_children_or_keeps_what_may_go() {
    for seed in 0..20 {
        for policy in policies() {
            let mut caller = Caller::new(policy, seed);
            for _ in 0..4000 {
                caller.step();
            }
            // All are released: tails go before heads, until nothing is left.
            for index in 0..BLOCKS {
                if caller.cached[index].is_some_and(|cached| cached.held) {
                    caller.release(RecordId::from_index(index as u32), index);
                }
            }
            for _ in 0..caller.policy.len() {
                caller.evict();
            }
            assert!(caller.policy.len() == 0 && caller.cached.iter().all(Option::is_none));
            assert_eq!(caller.policy.victim(caller.now), None);
        }
    }
}

#[test]
fn equal_calls_give_equal_victims() {
    let victims = |mut caller: Caller| {
        let mut victims = Vec::new();
        for _ in 0..2000 {
            caller.step();
            if caller.below(3) == 0
                && let Some(victim) = caller.policy.victim(caller.now)
            {
                victims.push(victim);
                caller.drop_victim(victim);
            }
        }
        victims
    };
    for (one, other) in policies().into_iter().zip(policies()) {
        let (one, other) = (victims(Caller::new(one, 5)), victims(Caller::new(other, 5)));
        assert!(one.len() > 100);
        assert_eq!(one, other);
    }
}

#[test]
fn calls_that_make_no_sense_change_nothing() {
    let facts = BlockFacts::new(BlockHash::from_u128(1));
    for mut policy in policies() {
        for block in [0, BLOCKS as u32, u32::MAX].map(RecordId::from_index) {
            policy.found(block, facts.used);
            policy.held(block);
            policy.children(block, false);
            policy.children(block, true);
            policy.removed(block);
            policy.evicted(block, facts.hash);
        }
        let beyond = RecordId::from_index(BLOCKS as u32);
        policy.stored(beyond, &facts);
        policy.evictable(beyond, &facts);
        assert_eq!((policy.len(), policy.victim(facts.used)), (0, None), "{}", policy.name());
        // Twice evictable is once.
        let block = RecordId::from_index(0);
        policy.evictable(block, &facts);
        policy.evictable(block, &facts);
        assert_eq!(policy.len(), 1, "{}", policy.name());
        assert_eq!(policy.victim(facts.used), Some(block), "{}", policy.name());
        assert_eq!((policy.len(), policy.victim(facts.used)), (0, None), "{}", policy.name());
    }
}

#[test]
fn a_policy_for_more_blocks_than_a_pool_has_is_refused() {
    let blocks = kv_pool::BLOCKS_MAX + 1;
    for eviction in Eviction::ALL {
        let message = eviction.make(blocks).unwrap_err().to_string();
        let expected = "a policy for 2147483648 blocks, more than the largest pool, 2147483647";
        assert_eq!(message, expected, "{eviction}");
    }
    assert!(Slru::new(blocks).is_err());
    assert!(S3Fifo::new(blocks).is_err());
    assert!(AdaptiveReplacement::new(blocks).is_err());
}
