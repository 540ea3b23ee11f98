//! Corners that comparison with the reference has found: several rules meet in one operation.

use std::time::Duration;

use crate::common::{CountedClock, OneClaimed, Order, Registration};
use crate::common::{cache, checked, claim, name, named, priority};
use kv_pool::{
    BlockPool, Naming, PoolConfig, Priority, Tier,
    events::{PoolEvent, Reading},
    retention::Retention,
    tenants::TenantQuota,
};

const FIVE_MS: Duration = Duration::from_millis(5);

fn timed(config: &PoolConfig) -> (BlockPool, CountedClock) {
    let clock = CountedClock::default();
    (BlockPool::builder(config).clock(clock.clone()).build().unwrap(), clock)
}

fn for_five_ms(value: u8) -> Retention {
    Retention { priority: priority(value), duration: Some(FIVE_MS) }
}

#[test]
fn a_block_kept_in_host_memory_does_not_give_way_to_the_content_of_others() {
    let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(1) };
    let pool = BlockPool::new(&config).unwrap();
    let tenant = pool.add_tenant().unwrap();
    let quota = TenantQuota { reserved: 1, ..TenantQuota::NONE };
    pool.set_quota(tenant, Tier::Secondary, quota).unwrap();
    let mut own = pool.claim_for(tenant, 1).unwrap();
    drop(own.register(&[name(1)], Naming::default()).unwrap());
    let mut block = claim(&pool);
    block.take_offload().unwrap().commit();
    drop(named(block, 2, Priority::DEFAULT));
    // The content of nobody finds no room beside what is kept.
    let mut block = claim(&pool);
    assert!(block.evicted(0) && block.take_offload().is_none());
    assert!(pool.find_and_pin(name(1), Tier::Secondary).is_some());
    checked(&pool);
}

#[test]
fn a_head_that_is_moved_to_the_room_of_its_own_tail_stays_whole() {
    let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(2) };
    let pool = BlockPool::new(&config).unwrap();
    cache(&pool, 1, Priority::DEFAULT);
    cache(&pool, 3, priority(80));
    let mut tail = pool.claim_in(Tier::Secondary, 1).unwrap();
    let tail = tail.register(&[name(2)], Naming::after(name(1))).unwrap();
    // There is no room for the head, and its tail is in use: it waits, and the other one goes.
    let other = claim(&pool);
    assert_eq!(pool.match_prefix(&[name(3)]).len(), 0);
    drop(tail);
    let mut block = claim(&pool);
    block.take_offload().unwrap().commit();
    checked(&pool);
    assert_eq!(pool.match_prefix(&[name(2)]).len(), 0, "the tail went first");
    assert!(pool.find_and_pin(name(1), Tier::Secondary).is_some());
    drop((other, block));
    checked(&pool);
    assert_eq!(pool.claimable(), 2);
}

#[test]
fn the_next_of_a_list_follows_the_block_with_the_name() {
    let config = PoolConfig { secondary_blocks: 2, ..PoolConfig::primary_only(2) };
    let pool = BlockPool::new(&config).unwrap();
    // In use in the secondary tier, content 1 keeps its name there.
    let mut far = pool.claim_in(Tier::Secondary, 1).unwrap();
    let far = far.register(&[name(1)], Naming::default()).unwrap();
    let mut near = pool.claim(2).unwrap();
    let near = near.register(&[name(1), name(2)], Naming::default()).unwrap();
    let snapshot = pool.snapshot();
    let view = |hash| snapshot.blocks.iter().find(|block| block.hash == Some(hash)).unwrap();
    assert_eq!(view(name(2)).parent, Some(far.records().next().unwrap()));
    assert_eq!(view(name(1)).children, 1);
    drop((near, far));
    checked(&pool);
}

#[test]
fn a_duration_goes_on_while_the_content_moves() {
    let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(1) };
    let (pool, clock) = timed(&config);
    let Registration::New(pin) = claim(&pool).register_one(name(1), for_five_ms(80)) else {
        panic!("twice")
    };
    drop(pin);
    assert_eq!(clock.reads(), 1);
    clock.advance(Duration::from_millis(3));
    let mut block = claim(&pool);
    block.take_offload().unwrap().commit();
    assert_eq!(clock.reads(), 1);
    clock.advance(Duration::from_millis(2));
    assert_eq!(pool.refresh(), 1);
    checked(&pool);
}

#[test]
fn a_duration_given_to_a_block_without_a_name_ends_with_its_use() {
    let (pool, _) = timed(&PoolConfig::primary_only(1));
    let mut claimed = pool.claim(1).unwrap();
    let pins = claimed.register(&[name(1)], Priority::DEFAULT).unwrap();
    pool.remove(name(1));
    pool.retain(&pins, for_five_ms(80));
    drop(pins);
    drop(named(claim(&pool), 2, priority(90)));
    assert!(pool.snapshot().blocks.iter().all(|block| block.expiry.is_none()));
}

#[test]
fn content_is_told_of_behind_what_it_was_named_after_also_if_that_is_not_cached() {
    let builder = BlockPool::builder(&PoolConfig::primary_only(4)).events(16);
    let pool = builder.build().unwrap();
    let mut events = pool.events().unwrap();
    let gone = name(9);
    drop(pool.claim(2).unwrap().register(&[name(1), name(2)], Naming::after(gone)).unwrap());
    drop(claim(&pool).register_one(name(3), Naming::default()));
    let mut readings = Vec::new();
    events.read(16, &mut readings);
    let parents: Vec<_> = readings
        .iter()
        .map(|reading| match reading {
            Reading::Event { event: PoolEvent::Stored { parent, .. }, .. } => *parent,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(parents, [gone, name(1), kv_pool::BlockHash::ROOT]);
}

#[test]
fn content_that_is_named_after_itself_follows_nothing() {
    let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(3) };
    let is_alone = |pool: &BlockPool| {
        let snapshot = pool.snapshot();
        let view = snapshot.blocks.iter().find(|block| block.hash == Some(name(1))).unwrap();
        assert_eq!((view.parent, view.children), (None, 0));
        checked(pool);
    };
    // Twice in one list, where the second is the first's duplicate.
    let pool = BlockPool::new(&config).unwrap();
    let mut claimed = pool.claim(2).unwrap();
    let pins = claimed.register(&[name(1), name(1)], Naming::after(name(9))).unwrap();
    is_alone(&pool);
    drop((pins, claimed));
    is_alone(&pool);
    // And where it comes near to the block of its own name.
    let pool = BlockPool::new(&config).unwrap();
    let mut far = pool.claim_in(Tier::Secondary, 1).unwrap();
    drop(far.register(&[name(1)], Naming::default()).unwrap());
    drop(far);
    let mut near = pool.claim(1).unwrap();
    let pins = near.register(&[name(1)], Naming::after(name(1))).unwrap();
    is_alone(&pool);
    drop((pins, near));
    is_alone(&pool);
}

#[test]
fn content_in_the_block_of_what_others_followed_is_followed_by_nobody() {
    let builder = BlockPool::builder(&PoolConfig::primary_only(2));
    let pool = builder.policy(Tier::Primary, Box::new(Order::default())).build().unwrap();
    drop(pool.claim(2).unwrap().register(&[name(1), name(2)], Naming::default()).unwrap());
    assert!(pool.remove(name(1)));
    cache(&pool, 3, Priority::DEFAULT);
    // What followed the content before is let go of later.
    assert_eq!(pool.match_prefix(&[name(2)]).len(), 1);
    let claimed = claim(&pool);
    assert_eq!((pool.locate(name(3)), pool.prefix_len(&[name(2)])), (None, 1));
    drop(claimed);
    checked(&pool);
}
