//! Policies that answer wrongly: no block that is in use is claimed, and none is lost.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::common::{One, OneClaimed, Order};
use crate::common::{cache, checked, name};
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyKind, PolicyTime};
use kv_pool::{
    BlockPool, Naming, PoolConfig, Priority, Tier, policy::RecordId, tenants::TenantQuota,
};

const BLOCKS: u64 = 8;
const FAR: u64 = 4;

/// What a wrong policy answers when it is asked for a victim.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Wrong {
    /// The same block each time, whatever it is and wherever.
    Always(u32),
    /// A right block, which it goes on holding for evictable.
    Twice,
    /// None, whatever it has.
    Never,
    /// None after three right ones.
    NoMore,
    /// The blocks that are in use, the first time they are let go and ever after.
    Held,
}

#[derive(Debug)]
struct WrongPolicy {
    wrong: Wrong,
    order: Order,
    asked: u32,
    first: Option<RecordId>,
}

impl WrongPolicy {
    fn boxed(wrong: Wrong) -> Box<Self> {
        Box::new(Self { wrong, order: Order::default(), asked: 0, first: None })
    }
}

impl EvictionPolicy for WrongPolicy {
    crate::as_ordered!(order);

    fn name(&self) -> &'static str {
        "wrong"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.first.get_or_insert(block);
        self.order.evictable(block, facts);
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        self.asked += 1;
        match self.wrong {
            Wrong::Always(index) => Some(RecordId::from_index(index)),
            Wrong::Twice if self.asked.is_multiple_of(2) => self.first,
            Wrong::Twice => {
                self.first = self.order.victim(now);
                self.first
            }
            Wrong::Never => None,
            Wrong::NoMore if self.asked > 3 => None,
            Wrong::NoMore => self.order.victim(now),
            Wrong::Held => self.first,
        }
    }
}

fn wrong_ones() -> Vec<Wrong> {
    let mut all = vec![Wrong::Twice, Wrong::Never, Wrong::NoMore, Wrong::Held];
    let blocks = (BLOCKS + FAR) as u32;
    all.extend((0..blocks + 2).chain([u32::MAX]).map(Wrong::Always));
    all
}

fn pool(tier: Tier, policy: Box<dyn EvictionPolicy>) -> BlockPool {
    let config = PoolConfig { secondary_blocks: FAR, ..PoolConfig::primary_only(BLOCKS) };
    BlockPool::builder(&config).policy(tier, policy).build().unwrap()
}

/// Uses a pool whose blocks are all cached, some of them pinned, claimed or elsewhere.
fn use_up(pool: &BlockPool, what: &str) {
    (0..BLOCKS as u32).for_each(|content| cache(pool, content, Priority::MAX));
    let pinned = pool.match_prefix(&[name(0)]);
    assert_eq!(pinned.len(), 1);
    let block_id = pinned.ids().next().unwrap();
    for round in 0..6 {
        let mut claimed = pool.claim(BLOCKS as usize - 1).unwrap();
        let block_ids: HashSet<_> = claimed.ids().collect();
        assert_eq!(block_ids.len(), BLOCKS as usize - 1, "{what}, round {round}");
        assert!(!block_ids.contains(&block_id), "{what}: a pinned block was claimed");
        assert!(pool.claim(1).is_err());
        checked(pool);
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
        }
        let contents: Vec<_> =
            (0..BLOCKS as u32 - 1).map(|at| name(100 * (round + 1) + at)).collect();
        drop(claimed.register(&contents, Naming::default()).unwrap());
        checked(pool);
        drop(claimed);
        let there = pool.find_and_pin(name(0), Tier::Primary).unwrap();
        assert_eq!(there.block_id(), block_id, "{what}");
    }
    drop(pinned);
    assert_eq!(pool.claim(BLOCKS as usize).unwrap().len(), BLOCKS as usize);
    assert_eq!(pool.stats().primary.claimable(), BLOCKS);
    checked(pool);
}

#[test]
fn a_victim_that_is_none_is_not_claimed_and_every_claim_is_whole() {
    for wrong in wrong_ones() {
        for tier in [Tier::Primary, Tier::Secondary] {
            use_up(&pool(tier, WrongPolicy::boxed(wrong)), &format!("{wrong:?} in {tier:?}"));
        }
    }
}

#[test]
fn a_policy_that_was_wrong_is_asked_no_more() {
    for wrong in [Wrong::Always(u32::MAX), Wrong::Never] {
        let pool = pool(Tier::Primary, WrongPolicy::boxed(wrong));
        use_up(&pool, "wrong");
        assert_eq!(pool.counters().policy_faults, 1, "{wrong:?}");
    }
    let pool = pool(Tier::Primary, Box::new(Order::default()));
    use_up(&pool, "right");
    assert_eq!(pool.counters().policy_faults, 0);
}

#[test]
fn a_policy_made_for_fewer_blocks_loses_none() {
    let made = |blocks| PolicyKind::HitDensity.make(blocks).unwrap().unwrap();
    for blocks in [0, 1, 3, BLOCKS - 1] {
        use_up(&pool(Tier::Primary, made(blocks)), &format!("for {blocks}"));
    }
    let right = pool(Tier::Primary, made(BLOCKS + FAR));
    use_up(&right, "for all");
    assert_eq!(right.counters().policy_faults, 0);
}

#[test]
fn a_policy_s_order_goes_on_after_blocks_that_are_kept() {
    let pool = pool(Tier::Primary, Box::new(Order::default()));
    let owner = pool.add_tenant().unwrap();
    let quota = TenantQuota { reserved: 3, ..TenantQuota::NONE };
    pool.set_quota(owner, Tier::Primary, quota).unwrap();
    for content in 0..3 {
        let block = pool.claim_for(owner, 1).unwrap();
        assert!(block.cache_one(name(content), Priority::MIN));
    }
    (3..8).for_each(|content| cache(&pool, content, Priority::MIN));
    let claimed = pool.claim(5).unwrap();
    checked(&pool);
    assert_eq!(pool.match_prefix(&[0, 1, 2].map(name)).len(), 3);
    drop(claimed);
    let own = pool.claim_for(owner, 8).unwrap();
    assert_eq!((own.len(), pool.counters().policy_faults), (8, 0));
    checked(&pool);
}

/// Right, until it is told of a block that it names once, whatever follows that.
#[derive(Debug, Default)]
struct NamesOne {
    order: Order,
    named: Arc<Mutex<Option<RecordId>>>,
}

impl EvictionPolicy for NamesOne {
    crate::as_ordered!(order);

    fn name(&self) -> &'static str {
        "names one"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.order.evictable(block, facts);
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        self.named.lock().take().or_else(|| self.order.victim(now))
    }
}

#[test]
fn a_victim_that_was_held_back_is_so_no_more() {
    let policy = NamesOne::default();
    let named = Arc::clone(&policy.named);
    let builder = BlockPool::builder(&PoolConfig::primary_only(BLOCKS));
    let pool = builder.policy(Tier::Primary, Box::new(policy)).build().unwrap();
    let mut claimed = pool.claim(4).unwrap();
    let mut head = claimed.register(&[1, 2, 3, 4].map(name), Naming::default()).unwrap();
    let second = head.records().nth(1).unwrap();
    let tail = head.split_off(3);
    drop((head, claimed));
    // Nothing is left but what the tail follows: the first of it goes, and the others are listed.
    let all = pool.claim(BLOCKS as usize - 3).unwrap();
    assert_eq!(pool.prefix_len(&[name(2)]), 1);
    checked(&pool);
    *named.lock() = Some(second);
    let victim = pool.claim(1).unwrap();
    checked(&pool);
    drop((tail, all, victim));
    checked(&pool);
    assert_eq!(pool.claimable(), BLOCKS as usize);
}
