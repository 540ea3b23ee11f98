//! What a pool tells its policies: the life of a block as they are promised it, in every tier.

use std::sync::{Arc, Mutex};

use crate::common::Order;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime};
use kv_pool::{BlockHash, BlockPool, Naming, PoolConfig, Priority, Tier, policy::RecordId};

/// A right policy that writes down what it is told.
#[derive(Debug)]
struct Recorder {
    order: Order,
    told: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    fn note(&self, what: &str, name: impl std::fmt::Display) {
        self.told.lock().unwrap().push(format!("{what} {name}"));
    }
}

fn named(hash: BlockHash) -> u128 {
    hash.to_u128()
}

impl EvictionPolicy for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn missed(&mut self, hash: BlockHash, _now: PolicyTime) {
        self.note("missed", named(hash));
    }

    fn stored(&mut self, _block: RecordId, facts: &BlockFacts) {
        let after = facts.parent.map_or_else(String::new, |_| " after another".to_owned());
        self.note("stored", format!("{}{after}", named(facts.hash)));
    }

    fn found(&mut self, block: RecordId, _now: PolicyTime) {
        self.note("found", format!("block {}", block.index()));
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.note("evictable", named(facts.hash));
        self.order.evictable(block, facts);
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.order.children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.note("held", format!("block {}", block.index()));
        self.order.held(block);
    }

    fn removed(&mut self, block: RecordId) {
        self.note("removed", format!("block {}", block.index()));
        self.order.removed(block);
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        let victim = self.order.victim(now)?;
        self.note("victim", format!("block {}", victim.index()));
        Some(victim)
    }

    fn evicted(&mut self, _block: RecordId, hash: BlockHash) {
        self.note("evicted", named(hash));
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    /// What was told since this was asked last.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn pool(primary: u64, secondary: u64) -> (BlockPool, [Told; 2]) {
    let config = PoolConfig { secondary_blocks: secondary, ..PoolConfig::primary_only(primary) };
    let recorder = || {
        let told = Arc::new(Mutex::new(Vec::new()));
        (Box::new(Recorder { order: Order::default(), told: told.clone() }), Told(told))
    };
    let ((near, told_near), (far, told_far)) = (recorder(), recorder());
    let builder = BlockPool::builder(&config);
    let builder = builder.policy(Tier::Primary, near).policy(Tier::Secondary, far);
    (builder.build().unwrap(), [told_near, told_far])
}

fn names(names: &[u128]) -> Vec<BlockHash> {
    names.iter().copied().map(BlockHash::from_u128).collect()
}

/// Writes content of these names, as one chain, and lets go of it.
fn write(pool: &BlockPool, chain: &[BlockHash]) {
    let mut claimed = pool.claim(chain.len()).unwrap();
    while let Some(offload) = claimed.take_offload() {
        offload.commit();
    }
    drop(claimed.register(chain, Naming::default()).unwrap());
}

#[test]
fn a_find_is_told_before_the_hold_and_what_is_stored_with_its_parent() {
    let (pool, [told, _]) = pool(4, 0);
    let chain = names(&[1, 2]);
    write(&pool, &chain);
    assert_eq!(told.take(), ["stored 1", "stored 2 after another", "evictable 2", "evictable 1"]);
    let pins = pool.match_prefix(&names(&[1, 2, 3]));
    let expected = ["missed 3", "found block 0", "found block 1", "held block 0", "held block 1"];
    assert_eq!(told.take(), expected);
    // Found again while it is held.
    let more = pool.match_prefix(&chain[..1]);
    assert_eq!(told.take(), ["found block 0"]);
    drop((pins, more));
    assert_eq!(told.take(), ["evictable 2", "evictable 1"]);
}

#[test]
fn content_that_moves_leaves_one_tier_s_policy_and_comes_to_the_other_s() {
    let (pool, [near, far]) = pool(1, 1);
    write(&pool, &names(&[1]));
    near.take();
    write(&pool, &names(&[2]));
    assert_eq!(
        near.take(),
        ["victim block 0", "evicted 1", "removed block 0", "stored 2", "evictable 2"],
        "1 makes room for 2"
    );
    assert_eq!(far.take(), ["stored 1", "evictable 1"]);
    let pin = pool.match_prefix(&names(&[1])).into_iter().next().unwrap();
    assert_eq!(near.take(), ["missed 1"]);
    assert_eq!(far.take(), ["found block 0", "held block 0"]);
    let mut target = pool.claim_one().unwrap();
    // Nothing is kept of what makes room: the only other block id is in use.
    assert!(target.take_offload().is_none());
    near.take();
    let onboarded = pool.begin_onboard(pin, target).unwrap().commit();
    assert!(onboarded.copies.is_empty());
    let pin = onboarded.pinned;
    assert_eq!(far.take(), ["removed block 0"]);
    assert_eq!(near.take(), ["stored 1"]);
    drop(pin);
    assert_eq!(near.take(), ["evictable 1"]);
    pool.check_integrity().unwrap();
}

#[test]
fn content_computed_again_leaves_the_far_tier_s_policy_and_comes_to_the_near_one_s() {
    // Far already, and on its way there.
    for arrived in [true, false] {
        let (pool, [near, far]) = pool(1, 1);
        write(&pool, &names(&[1]));
        let mut block = pool.claim(1).unwrap();
        let mut offload = block.take_offload();
        let evictable = arrived.then_some("evictable 1");
        if arrived {
            offload.take().unwrap().commit();
        }
        let told_far: Vec<_> = ["stored 1"].into_iter().chain(evictable).collect();
        assert_eq!(far.take(), told_far);
        near.take();
        drop(block.register(&names(&[1]), Naming::default()).unwrap());
        let held = arrived.then_some("held block 0");
        let told_far: Vec<_> = held.into_iter().chain(["removed block 0"]).collect();
        assert_eq!(far.take(), told_far);
        let evictable: Vec<_> =
            ["stored 1"].into_iter().chain(arrived.then_some("evictable 1")).collect();
        assert_eq!(near.take(), evictable, "a copy reads the block id until the offload ends");
        drop(offload);
        pool.check_integrity().unwrap();
    }
}

/// The highest priority first.
#[derive(Debug, Default)]
struct Reversed {
    order: Order,
}

impl EvictionPolicy for Reversed {
    crate::as_ordered!(order);

    fn name(&self) -> &'static str {
        "reversed"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        let priority = Priority::new(Priority::MAX.get() - facts.priority.get()).unwrap();
        self.order.evictable(block, &BlockFacts { priority, ..*facts });
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        self.order.victim(now)
    }
}

#[test]
fn a_policy_of_the_callers_choice_decides_who_goes() {
    let policy = Box::new(Reversed::default());
    let builder = BlockPool::builder(&PoolConfig::primary_only(4));
    let pool = builder.policy(Tier::Primary, policy).build().unwrap();
    let all = names(&[1, 2, 3, 4]);
    for (hash, priority) in all.iter().zip([10, 90, 30, 70]) {
        let priority = Priority::new(priority).unwrap();
        assert_eq!(pool.claim_one().unwrap().cache(&[*hash], priority), Ok(1));
    }
    let cached = || all.iter().map(|&hash| pool.match_prefix(&[hash]).len()).collect::<Vec<_>>();
    let claimed = pool.claim(2).unwrap();
    assert_eq!(cached(), [1, 0, 1, 0]);
    drop(claimed);
    assert_eq!(pool.counters().policy_faults, 0);
    pool.check_integrity().unwrap();
}
