//! What an engine says of the future of its blocks.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Order, checked, claim, name, with_policy};
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyKind, PolicyTime, ReuseHint};
use kv_pool::{
    BlockHash, BlockPool, Naming, Pinned, PoolConfig, Priority, Tier, policy::RecordId,
    retention::Retention,
};

/// All blocks of the lists.
const ALL: Range<usize> = 0..usize::MAX;

/// A pool of four blocks whose policy is of this kind.
fn pool(kind: PolicyKind) -> BlockPool {
    with_policy(BlockPool::builder(&PoolConfig::primary_only(4)), Tier::Primary, kind, 4)
        .build()
        .unwrap()
}

/// A pool of four blocks for each order there is.
fn pools() -> impl Iterator<Item = BlockPool> {
    PolicyKind::ALL.into_iter().map(pool)
}

fn names(contents: &[u32]) -> Vec<BlockHash> {
    contents.iter().map(|&content| name(content)).collect()
}

/// The content of these numbers, each the successor of the one before.
fn chain(pool: &BlockPool, contents: &[u32]) -> Pinned {
    pool.claim(contents.len()).unwrap().register(&names(contents), Naming::default()).unwrap()
}

fn cached(pool: &BlockPool, contents: Range<u32>) -> Vec<u32> {
    contents.filter(|&content| pool.locate(name(content)).is_some()).collect()
}

#[test]
fn what_is_over_goes_before_what_was_released_earlier() {
    for pool in pools() {
        drop(chain(&pool, &[1]));
        let ended = chain(&pool, &[2, 3]);
        assert_eq!(Pinned::hint([&ended], ALL, ReuseHint::Over), 2);
        drop(ended);
        drop(chain(&pool, &[4]));
        let (first, second) = (claim(&pool), claim(&pool));
        assert_eq!(cached(&pool, 1..5), [1, 4]);
        drop((first, second));
        checked(&pool);
    }
}

#[test]
fn who_finds_what_is_over_makes_it_as_good_as_any() {
    for pool in pools() {
        let ended = chain(&pool, &[1, 2]);
        Pinned::hint([&ended], ALL, ReuseHint::Over);
        drop(ended);
        assert_eq!(pool.retention(name(1)), Some(Retention::from(Priority::MIN)));
        drop(pool.match_prefix(&names(&[1, 2])));
        assert_eq!(pool.retention(name(1)), Some(Retention::default()));
        assert_eq!(pool.retention(name(2)), Some(Retention::default()));
        checked(&pool);
    }
}

#[test]
fn what_other_sessions_begin_with_is_not_over_with_one_of_them() {
    for pool in pools() {
        let head = chain(&pool, &[1]);
        let after = |content| {
            let naming = Naming { parent: Some(name(1)), ..Naming::default() };
            pool.claim(1).unwrap().register(&[name(content)], naming).unwrap()
        };
        let (one, other) = (after(2), after(3));
        assert_eq!(
            Pinned::hint([&head, &one], ALL, ReuseHint::Over),
            1,
            "the tail, and not the head"
        );
        drop((other, one, head));
        assert_eq!(pool.retention(name(1)), Some(Retention::default()));
        assert_eq!(pool.retention(name(2)), Some(Retention::from(Priority::MIN)));
        checked(&pool);
    }
}

#[test]
fn what_others_hold_is_not_over() {
    for pool in pools() {
        let one = chain(&pool, &[1, 2]);
        let other = pool.match_prefix(&names(&[1]));
        assert_eq!(Pinned::hint([&one], ALL, ReuseHint::Over), 1);
        drop((one, other));
        assert_eq!(pool.retention(name(1)), Some(Retention::default()));
        checked(&pool);
    }
}

#[test]
fn a_priority_that_was_given_is_stronger_than_a_hint_and_ends_it() {
    let pool = pool(PolicyKind::HitDensity);
    let high = Retention::from(Priority::MAX);
    let kept = chain(&pool, &[1]);
    pool.retain(&kept, high);
    assert_eq!(Pinned::hint([&kept], ALL, ReuseHint::Over), 0);
    let later = chain(&pool, &[2]);
    assert_eq!(Pinned::hint([&later], ALL, ReuseHint::Over), 1);
    pool.retain(&later, high);
    drop((kept, later));
    drop(pool.match_prefix(&names(&[2])));
    assert_eq!(pool.retention(name(1)), Some(high));
    assert_eq!(pool.retention(name(2)), Some(high), "no hint is left that a use would end");
    checked(&pool);
}

#[test]
fn content_of_another_pool_is_left_alone() {
    let pools: Vec<_> = pools().take(2).collect();
    let [ours, theirs] = [chain(&pools[0], &[1]), chain(&pools[1], &[1, 2])];
    let _same_record = chain(&pools[0], &[3]);
    assert_eq!(Pinned::hint([&Pinned::default(), &ours, &theirs], ALL, ReuseHint::Over), 1);
    assert_eq!(pools[0].retention(name(1)), Some(Retention::from(Priority::MIN)));
    assert_eq!(pools[0].retention(name(3)), Some(Retention::default()));
    assert_eq!(pools[1].retention(name(1)), Some(Retention::default()));
    assert_eq!(Pinned::hint([&Pinned::default()], ALL, ReuseHint::Over), 0);
    assert_eq!(Pinned::hint([], ALL, ReuseHint::Over), 0);
}

#[test]
fn a_hint_is_about_the_blocks_of_its_range_in_whatever_list() {
    for pool in pools() {
        let held = chain(&pool, &[1, 2, 3, 4]);
        let (mut head, mut rest) = (held, Pinned::default());
        for _ in 0..2 {
            let mut tail = head.split_off(head.len() - 1);
            tail.append(rest).unwrap();
            rest = tail;
        }
        for (range, expected) in [(1..3, 0), (0..0, 0), (4..9, 0), (2..4, 2), (1..2, 0), (1..4, 1)]
        {
            assert_eq!(
                Pinned::hint([&head, &rest], range.clone(), ReuseHint::Over),
                expected,
                "{range:?}"
            );
        }
        drop((rest, head));
        let over = |content| pool.retention(name(content)) == Some(Retention::from(Priority::MIN));
        assert_eq!((1..5).filter(|&content| over(content)).collect::<Vec<_>>(), [2, 3, 4]);
        checked(&pool);
    }
}

/// The name of a block, and what was said of it.
type Heard = (Option<BlockHash>, ReuseHint);

/// A right policy that notes which hints it hears, and of which names.
#[derive(Debug)]
struct Listener {
    order: Order,
    names: Vec<Option<BlockHash>>,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl EvictionPolicy for Listener {
    crate::as_ordered!(order);

    fn name(&self) -> &'static str {
        "listener"
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        self.names[block.index()] = Some(facts.hash);
    }

    fn hinted(&mut self, block: RecordId, hint: ReuseHint, _: PolicyTime) {
        self.heard.lock().unwrap().push((self.names[block.index()], hint));
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.order.evictable(block, facts);
    }

    fn victim(&mut self, now: PolicyTime) -> Option<RecordId> {
        self.order.victim(now)
    }
}

#[test]
fn a_policy_hears_what_comes_back_and_what_sessions_begin_with() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let order = Order::default();
    let policy = Listener { order, names: vec![None; 4], heard: Arc::clone(&heard) };
    let builder = BlockPool::builder(&PoolConfig::primary_only(4));
    let pool = builder.policy(Tier::Primary, Box::new(policy)).build().unwrap();
    let (head, tail) = (chain(&pool, &[1]), chain(&pool, &[2]));
    let back = ReuseHint::BackIn(Duration::from_secs(3));
    assert_eq!(Pinned::hint([&head, &tail], ALL, back), 2);
    assert_eq!(Pinned::hint([&head], ALL, ReuseHint::SharedHead), 1);
    assert_eq!(Pinned::hint([&tail], ALL, ReuseHint::Over), 1, "which the pool sees to itself");
    let expected =
        [(Some(name(2)), back), (Some(name(1)), back), (Some(name(1)), ReuseHint::SharedHead)];
    assert_eq!(*heard.lock().unwrap(), expected);
    // Without a policy there is nobody to hear it.
    let plain = BlockPool::new(&PoolConfig::primary_only(1)).unwrap();
    assert_eq!(Pinned::hint([&chain(&plain, &[1])], ALL, back), 0);
}

/// Whether the lock of a pool is taken: its text has the counters only if not.
fn is_locked(pool: &BlockPool) -> bool {
    !format!("{pool:?}").contains("counters")
}

/// Says what content follows, and notes whether the pool was locked when it was asked.
struct Asked<'a>(&'a BlockPool);

impl From<Asked<'_>> for Naming {
    fn from(Asked(pool): Asked<'_>) -> Self {
        assert!(!is_locked(pool), "the caller's code runs under the lock");
        Self::default()
    }
}

impl std::fmt::Write for Asked<'_> {
    fn write_str(&mut self, _: &str) -> std::fmt::Result {
        assert!(!is_locked(self.0), "the caller's code runs under the lock");
        Ok(())
    }
}

#[test]
fn the_lists_of_a_hint_are_walked_outside_of_the_lock() {
    for pool in pools() {
        let pins = chain(&pool, &[1, 2]);
        for hint in [ReuseHint::Over, ReuseHint::SharedHead] {
            let lists = [&pins, &pins];
            let looked = lists.into_iter().inspect(|_| assert!(!is_locked(&pool)));
            let _ = Pinned::hint(looked, ALL, hint);
        }
        checked(&pool);
    }
}

#[test]
fn no_conversion_and_no_writer_of_the_caller_s_runs_under_the_lock() {
    let pool = pool(PolicyKind::default());
    let mut onto = Pinned::default();
    let mut claimed = pool.claim(4).unwrap();
    assert_eq!(claimed.register_onto(&names(&[1]), Asked(&pool), &mut onto), Ok(1));
    assert_eq!(claimed.register(&names(&[2, 3]), Asked(&pool)).unwrap().len(), 2);
    assert_eq!(claimed.cache(&names(&[4]), Asked(&pool)), Ok(1));
    std::fmt::write(&mut Asked(&pool), format_args!("{pool:?}")).unwrap();
    assert!(format!("{pool:?}").contains("registered: 4"));
}
