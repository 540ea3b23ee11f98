//! What of the evicted content moves to host memory: policies, and the one that learns.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{name, priority};
use kv_pool::clock::ManualClock;
use kv_pool::store::{Candidate, StoreAll, StoreByEvidence, StorePolicy, StoreRules};
use kv_pool::{BlockHash, BlockPool, Naming, PoolConfig, Priority, Tier};

/// Says what it is told to say, and notes what it is asked.
#[derive(Debug, Default)]
struct Told {
    stores: bool,
    asked: Vec<Candidate>,
    used: Vec<BlockHash>,
}

#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Told>>);

impl StorePolicy for Shared {
    fn name(&self) -> &'static str {
        "told"
    }

    fn stores(&mut self, tier: Tier, content: &Candidate) -> bool {
        assert_eq!(tier, Tier::Secondary);
        let mut told = self.0.lock().unwrap();
        told.asked.push(*content);
        told.stores
    }

    fn used(&mut self, name: BlockHash) -> u32 {
        let mut told = self.0.lock().unwrap();
        told.used.push(name);
        told.asked.iter().any(|content| content.name == name).into()
    }
}

fn pool(primary: u64, secondary: u64, policy: impl StorePolicy + 'static) -> BlockPool {
    let config = PoolConfig { secondary_blocks: secondary, ..PoolConfig::primary_only(primary) };
    BlockPool::builder(&config).store_policy(Box::new(policy)).build().unwrap()
}

/// Uses a chain of blocks as a request does: what is cached is found and brought back, the rest computed.
fn serve(pool: &BlockPool, names: &[BlockHash]) -> usize {
    let mut rest = pool.match_prefix(names);
    let found = rest.len();
    let mut held = Vec::new();
    while let Some(tier) = { rest.locations().next() }.map(|at| at.tier) {
        let alike = rest.locations().take_while(|at| at.tier == tier).count();
        let tail = rest.split_off(alike);
        let part = std::mem::replace(&mut rest, tail);
        if tier == Tier::Primary {
            held.push(part);
            continue;
        }
        let target = claim(pool, part.len());
        held.push(pool.begin_onboard(part, target).unwrap().commit().pinned);
    }
    let parent = found.checked_sub(1).map(|last| names[last]);
    let mut own = claim(pool, names.len() - found);
    held.push(own.register(&names[found..], Naming { parent, ..Naming::default() }).unwrap());
    drop(held);
    pool.check_integrity().unwrap();
    found
}

/// Claims blocks, and moves what they have evicted.
fn claim(pool: &BlockPool, count: usize) -> kv_pool::Claimed {
    let mut claimed = pool.claim(count).unwrap();
    while let Some(offload) = claimed.take_offload() {
        offload.commit();
    }
    claimed
}

/// Content of which nothing but the name is known.
fn candidate(name: BlockHash) -> Candidate {
    let (depth, found, parent_found, now_ms) = (0, 0, 0, 0);
    let priority = Priority::DEFAULT;
    Candidate { name, depth, found, parent_found, followed: false, priority, now_ms }
}

fn chain(first: u32, blocks: u32) -> Vec<BlockHash> {
    (first..first + blocks).map(name).collect()
}

#[test]
fn refused_content_is_dropped_and_its_return_is_regretted() {
    let told = Shared::default();
    let pool = pool(2, 2, told.clone());
    serve(&pool, &chain(0, 2));
    serve(&pool, &chain(10, 2));
    let counters = pool.stats().counters;
    assert_eq!((counters.evicted, counters.offloaded, counters.refused), (2, 0, 2));
    assert_eq!(serve(&pool, &chain(0, 2)), 0);
    assert_eq!(pool.stats().counters.regretted, 2);
    told.0.lock().unwrap().stores = true;
    serve(&pool, &chain(20, 2));
    assert_eq!(serve(&pool, &chain(0, 2)), 2);
    assert_eq!(pool.stats().counters.offloaded, 2);
}

#[test]
fn a_policy_is_told_what_is_known_of_the_content() {
    let told = Shared::default();
    let pool = pool(3, 3, told.clone());
    let names = chain(0, 3);
    serve(&pool, &names);
    assert_eq!(serve(&pool, &names[..2]), 2);
    assert_eq!(serve(&pool, &names[..1]), 1);
    serve(&pool, &chain(10, 3));
    let asked = std::mem::take(&mut told.0.lock().unwrap().asked);
    let known: Vec<_> =
        asked.iter().map(|of| (of.name, of.depth, of.found, of.parent_found)).collect();
    // Tails first, and all are leaves when their turn comes.
    assert_eq!(known, [(names[2], 2, 0, 1), (names[1], 1, 1, 2), (names[0], 0, 2, 0)]);
    assert!(asked.iter().all(|of| !of.followed), "{asked:?}");
    assert_eq!(told.0.lock().unwrap().used.len(), 3 + 2 + 1 + 3);
}

#[test]
fn content_below_the_configured_priority_is_not_asked_for() {
    let told = Shared::default();
    let pool = pool(1, 1, told.clone());
    crate::common::cache(&pool, 1, priority(1));
    drop(claim(&pool, 1));
    assert_eq!(told.0.lock().unwrap().asked.len(), 0);
    assert_eq!(pool.stats().counters.refused, 0);
}

#[test]
fn a_policy_that_panics_is_called_no_more_and_all_is_stored() {
    #[derive(Debug)]
    struct Panics;
    impl StorePolicy for Panics {
        fn name(&self) -> &'static str {
            "panics"
        }
        fn stores(&mut self, _: Tier, _: &Candidate) -> bool {
            panic!("a test's policy")
        }
    }
    let pool = pool(2, 4, Panics);
    serve(&pool, &chain(0, 2));
    serve(&pool, &chain(10, 2));
    let counters = pool.stats().counters;
    assert_eq!((counters.policy_faults, counters.offloaded, counters.refused), (1, 2, 0));
    assert_eq!(serve(&pool, &chain(0, 2)), 2);
}

/// Serves two conversations that come back, and prompts that do not; how often the conversations were found.
fn mixed(pool: &BlockPool, turns: u32) -> usize {
    let mut found = 0;
    for turn in 0..turns {
        found += serve(pool, &chain(1_000_000 + turn % 8 * 100, 4));
        serve(pool, &chain(100 * turn, 12));
    }
    found
}

#[test]
fn evidence_keeps_what_comes_back_from_what_does_not() {
    // Between two uses of a conversation 128 blocks leave the device: more than both tiers have.
    let (all, learned) = (pool(32, 48, StoreAll), pool(32, 48, evidence(48, 0.02)));
    let (in_all, in_learned) = (mixed(&all, 2000), mixed(&learned, 2000));
    let (all, learned) = (all.stats().counters, learned.stats().counters);
    assert!(
        in_learned > in_all + 4000,
        "{in_learned} blocks were found, {in_all} where all is stored"
    );
    assert!(2 * learned.offloaded < all.offloaded, "{learned:?}, {all:?}");
    assert_eq!(learned.offloaded + learned.refused, learned.evicted);
}

#[test]
fn evidence_gives_content_the_time_to_come_back() {
    let mut policy = evidence(1000, 0.02);
    let mut left = 0..;
    let mut stored_of = |count: usize| {
        let contents = left.by_ref().take(count).map(|of| candidate(name(of)));
        contents.filter(|content| policy.stores(Tier::Secondary, content)).count()
    };
    // Hardly as much as the tier has room for: nothing of it could be known yet.
    assert_eq!(stored_of(999), 999);
    // Nothing came back while three times as much has left.
    stored_of(3000);
    assert_eq!(stored_of(1000), 0);
}

#[test]
fn evidence_remembers_what_left_long_ago() {
    let mut policy = evidence(1000, 0.1);
    let first = |of| candidate(name(of));
    let later = |of| Candidate { depth: 9, ..candidate(name(of)) };
    let mut stored = |content| policy.stores(Tier::Secondary, &content);
    assert!((0..240).map(first).all(&mut stored));
    // Eight times as much as the tier has blocks leaves behind it.
    let _ = (240..8100).map(later).filter(|&content| stored(content)).count();
    assert!(!stored(first(8100)), "nothing of its kind came back");
}

#[test]
fn evidence_stores_what_is_followed() {
    let mut policy = evidence(64, 1.0);
    // Stores never pay, and it has seen enough to know.
    for content in 0..1000 {
        policy.stores(Tier::Secondary, &candidate(name(content)));
    }
    let alone = candidate(name(5000));
    assert!(!policy.stores(Tier::Secondary, &alone));
    assert!(policy.stores(Tier::Secondary, &Candidate { followed: true, ..alone }));
}

#[test]
fn evidence_stores_no_more_than_its_share_of_the_link() {
    let rules = StoreRules { blocks_per_second_max: Some(10), cost: 0.0, blocks: 64 };
    let mut policy = StoreByEvidence::new(rules).unwrap();
    let mut stored_at = |now_ms: u64| {
        let contents = (0..50).map(|of| Candidate { now_ms, ..candidate(name(of)) });
        contents.filter(|content| policy.stores(Tier::Secondary, content)).count()
    };
    assert_eq!(stored_at(0), 10);
    assert_eq!(stored_at(0), 0);
    assert_eq!(stored_at(500), 5);
    // A clock that goes back earns nothing, and a long rest earns a second's.
    assert_eq!(stored_at(400), 0);
    assert_eq!(stored_at(u64::MAX), 10);
    let none = StoreRules { blocks_per_second_max: Some(0), ..StoreRules::new(64) };
    let mut none = StoreByEvidence::new(none).unwrap();
    assert!(!none.stores(Tier::Secondary, &candidate(name(1))));
}

#[test]
fn rules_of_any_size_are_made_or_refused() {
    for blocks in [0, 1, 7, 1 << 20] {
        for cost in [f64::NAN, f64::NEG_INFINITY, -1.0, 0.0, 1.0, f64::INFINITY] {
            let mut policy = evidence(blocks, cost);
            for content in 0..300 {
                let content = Candidate { depth: u32::MAX, ..candidate(name(content)) };
                policy.stores(Tier::Secondary, &content);
                policy.used(content.name);
            }
        }
    }
    assert!(StoreByEvidence::new(StoreRules::new(u64::MAX)).is_err());
}

#[test]
fn costs_follow_from_the_seconds() {
    let cost = |store, load, compute| StoreRules::new(1).costs(store, load, compute).cost;
    assert!((cost(1.0, 1.0, 11.0) - 0.1).abs() < 1e-9);
    // Loads that take as long as computing never pay.
    for (store, load, compute) in [(1.0, 2.0, 2.0), (1.0, f64::INFINITY, 0.0), (9.0, 0.0, 1.0)] {
        assert!((cost(store, load, compute) - 1.0).abs() < 1e-9);
    }
    assert!(cost(f64::NAN, -1.0, 1.0).abs() < 1e-9);
}

fn evidence(blocks: u64, cost: f64) -> StoreByEvidence {
    StoreByEvidence::new(StoreRules { cost, ..StoreRules::new(blocks) }).unwrap()
}

#[test]
fn regrets_of_a_large_tier_are_as_many_as_those_of_a_small_one() {
    const CONTENT: u32 = 4_000;
    let regretted = |secondary: u64| {
        // Nothing may be stored: the link has no room.
        let rules = StoreRules { blocks_per_second_max: Some(0), ..StoreRules::new(secondary) };
        let pool = pool(1, secondary, StoreByEvidence::new(rules).unwrap());
        for _ in 0..2 {
            (0..CONTENT)
                .for_each(|content| crate::common::cache(&pool, content, Priority::DEFAULT));
        }
        pool.counters().regretted
    };
    assert_eq!(regretted(8_000), CONTENT.into());
    // One name in four is remembered.
    let estimated = regretted(40_000);
    assert!((3_500..4_500).contains(&estimated), "{estimated} regrets");
}

#[test]
fn content_that_the_tier_would_not_have_any_more_is_not_regretted() {
    let mut policy = evidence(64, 1.0);
    let refused = candidate(name(1));
    for content in 1000..2000 {
        policy.stores(Tier::Secondary, &candidate(name(content)));
    }
    assert!(!policy.stores(Tier::Secondary, &refused));
    let followed = |of| Candidate { followed: true, ..candidate(name(of)) };
    assert!((2000..2063).all(|of| policy.stores(Tier::Secondary, &followed(of))));
    assert_eq!(policy.used(name(1)), 1);
    assert!(!policy.stores(Tier::Secondary, &refused));
    assert!((3000..3064).all(|of| policy.stores(Tier::Secondary, &followed(of))));
    assert_eq!(policy.used(name(1)), 0, "others have its place by now");
}

#[test]
fn names_made_of_one_hash_twice_are_remembered_apart() {
    let mut policy = evidence(1024, 1.0);
    let twice = |of: u32| {
        let half = name(of).to_u128() as u64;
        BlockHash::from_u128(u128::from(half) | u128::from(half) << 64)
    };
    for content in 0..1000 {
        policy.stores(Tier::Secondary, &candidate(twice(content)));
    }
    let regretted: u32 = (1000..2000).map(|content| policy.used(twice(content))).sum();
    assert_eq!(regretted, 0, "none of them has ever left");
}

#[test]
fn a_bound_by_the_second_goes_by_the_clock_of_the_pool_and_not_by_ticks() {
    let config = PoolConfig { secondary_blocks: 64, ..PoolConfig::primary_only(1) };
    let rules = StoreRules { blocks_per_second_max: Some(2), ..StoreRules::new(64) };
    let clock = ManualClock::new();
    let policy = StoreByEvidence::new(rules).unwrap();
    let pool = BlockPool::builder(&config).clock(clock.clone()).store_policy(Box::new(policy));
    let pool = pool.build().unwrap();
    for content in 0..10 {
        clock.advance(Duration::from_secs(1));
        let block = claim(&pool, 1);
        assert_eq!(block.cache(&[name(content)], Naming::default()), Ok(1));
    }
    assert_eq!(pool.counters().offloaded, 9, "one a second, and two are allowed");
    // Content that is asked about, to be stored further below, is of now, too.
    clock.advance(Duration::from_secs(90));
    assert_eq!(pool.candidate(name(9)).unwrap().now_ms, 100_000);
}

#[test]
fn refused_content_is_counted_when_it_is_lost_and_not_when_it_is_asked_about() {
    let told = Shared::default();
    let pool = pool(3, 3, told.clone());
    let names = chain(0, 3);
    let pins = pool.claim(3).unwrap().register(&names, Naming::default()).unwrap();
    // From head to tail: each of the first two waits for the one that follows it.
    pins.into_iter().for_each(drop);
    drop(claim(&pool, 1));
    let counters = pool.counters();
    assert_eq!((counters.evicted, counters.refused), (1, 1));
    drop(claim(&pool, 3));
    let counters = pool.counters();
    assert_eq!((counters.evicted, counters.refused, counters.offloaded), (3, 3, 0));
    // The same of what a budget takes.
    let pins = pool.claim(3).unwrap().register(&names, Naming::default()).unwrap();
    pins.into_iter().for_each(drop);
    drop(pool.set_budget(Tier::Primary, 0).unwrap());
    let counters = pool.counters();
    assert_eq!((counters.evicted, counters.refused, counters.offloaded), (6, 6, 0));
}
