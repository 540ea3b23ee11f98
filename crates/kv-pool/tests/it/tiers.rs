//! What moves between the tiers, what must not, and what becomes of it.

use crate::common::{Moved, One, OneClaimed, OneMove, Registration};
use crate::common::{
    cache, cache_secondary, checked, claim, displace, find, name, name_of, named, pool, write,
};
use kv_pool::{BlockPool, HandleError, Naming, PoolConfig, Priority, Tier};

#[test]
fn content_moves_also_when_its_move_lets_a_block_go_before_it() {
    let [head, tail, dropped, moves] = [1, 2, 3, 4];
    let pool = pool(4, 1);
    let first = write(&pool, head);
    let second = claim(&pool).register(&[name(tail)], Naming::after(name(head))).unwrap();
    drop((second, first));
    cache(&pool, dropped, Priority::DEFAULT);
    cache(&pool, moves, Priority::DEFAULT);
    let (of_tail, offload) = displace(&pool);
    offload.commit();
    // With no room in the second tier the head waits for the tail, and what comes next is dropped.
    let reader = pool.find_and_pin(name(tail), Tier::Secondary).unwrap();
    let of_dropped = claim(&pool);
    assert!(find(&pool, dropped).is_none() && pool.counters().dropped == 1);
    drop(reader);
    // The move evicts the tail, and the head comes to the front of the queue that the content leaves.
    let (of_moves, offload) = displace(&pool);
    checked(&pool);
    offload.commit();
    assert!(find(&pool, tail).is_none());
    let tier_of = |content| find(&pool, content).unwrap().location().tier;
    assert_eq!((tier_of(head), tier_of(moves)), (Tier::Primary, Tier::Secondary));
    drop((of_tail, of_dropped, of_moves));
    checked(&pool);
}

#[test]
fn an_offload_that_is_dropped_gives_the_content_up() {
    let pool = pool(1, 1);
    // The token alone, the block with the token, and the block when it gets another name.
    for give_up in 0..3 {
        cache(&pool, 1, Priority::DEFAULT);
        let mut block = claim(&pool);
        match give_up {
            0 => drop(block.take_offload()),
            1 => drop(block),
            _ => drop(named(block, 2, Priority::DEFAULT)),
        }
        assert!(find(&pool, 1).is_none());
        let secondary = pool.stats().secondary;
        assert_eq!((secondary.empty, secondary.claimed), (1, 0), "{give_up}");
        checked(&pool);
    }
    assert_eq!(pool.counters().dropped, 3);
}

#[test]
fn content_somebody_else_has_pinned_is_copied() {
    let pool = pool(1, 1);
    cache_secondary(&pool, 1);
    let pin = find(&pool, 1).unwrap();
    let onboard = pool.begin_onboard(pin, claim(&pool)).unwrap();
    let to = onboard.to();
    // The reader comes while the copy runs.
    let reader = pool.find_and_pin(name(1), Tier::Secondary).unwrap();
    let Moved::Copied { copy, source } = onboard.commit_one() else {
        panic!("a pinned block was moved");
    };
    assert_eq!(copy.block_id(), to);
    assert_eq!(source.location(), reader.location());
    assert_eq!(find(&pool, 1).unwrap().location(), reader.location());
    checked(&pool);
    // The copy has no name, and gets none as long as the other is in use.
    let Registration::Duplicate(own) = copy.register_one(name(1), Priority::DEFAULT) else {
        panic!("a pinned block lost its name");
    };
    drop((reader, source));
    // When the readers are gone, the copy may be the one that others find.
    assert_eq!(named(own, 1, Priority::DEFAULT).location().tier, Tier::Primary);
    checked(&pool);
}

#[test]
fn a_refused_onboarding_returns_pin_and_block_unharmed() {
    let (ours, other) = (pool(2, 1), pool(1, 0));
    let pin = write(&ours, 1);
    let (location, target) = (pin.location(), claim(&ours));
    let block_ids = (pin.block_id(), target.block_id());

    let refused = ours.begin_onboard(pin, target).unwrap_err();
    assert_eq!(refused.reason, HandleError::SameTier { location });
    assert_eq!((refused.pinned.block_id(), refused.target.block_id()), block_ids);
    drop(refused.target);

    let refused = ours.begin_onboard(refused.pinned, claim(&other)).unwrap_err();
    assert_eq!(refused.reason, HandleError::DifferentPools);
    let refused = other.begin_onboard(refused.pinned, refused.target).unwrap_err();
    assert_eq!(refused.reason, HandleError::DifferentPools);
    assert_eq!(name_of(&ours, &refused.pinned), Some(name(1)));
    drop(refused);
    assert_eq!((ours.claimable(), other.claimable()), (2, 1));
    checked(&ours);
    checked(&other);
}

#[test]
fn a_target_that_still_holds_content_is_refused() {
    let pool = pool(1, 2);
    cache_secondary(&pool, 1);
    cache(&pool, 2, Priority::DEFAULT);
    let refused = pool.begin_onboard(find(&pool, 1).unwrap(), claim(&pool)).unwrap_err();
    assert_eq!(refused.reason, HandleError::TargetNotEmpty);
    let mut target = refused.target;
    target.take_offload().unwrap().commit();
    let onboard = pool.begin_onboard(refused.pinned, target).unwrap();
    assert!(matches!(onboard.commit_one(), Moved::Moved(_)));
    assert!(find(&pool, 2).is_some());
    checked(&pool);
}

#[test]
fn a_pinned_secondary_copy_keeps_its_name() {
    let pool = pool(1, 1);
    cache_secondary(&pool, 1);
    let reader = pool.find_and_pin(name(1), Tier::Secondary).unwrap();
    let Registration::Duplicate(own) = claim(&pool).register_one(name(1), Priority::DEFAULT) else {
        panic!("a pinned block lost its name");
    };
    drop(own);
    assert_eq!(name_of(&pool, &reader), Some(name(1)));
    checked(&pool);
}

#[test]
fn content_removed_on_its_way_does_not_come_back() {
    let pool = pool(1, 1);
    cache(&pool, 1, Priority::DEFAULT);
    let (block, offload) = displace(&pool);
    assert!(pool.remove(name(1)));
    assert!(!pool.remove(name(1)));
    offload.commit();
    drop(block);
    assert!(find(&pool, 1).is_none());
    assert_eq!((pool.counters().offloaded, pool.counters().dropped), (0, 1));
    checked(&pool);
}

#[test]
fn one_block_and_several_count_the_same_names() {
    for together in [false, true] {
        let pool = pool(2, 2);
        let names = [name(1), name(2)];
        drop(pool.claim(2).unwrap().register(&names, Naming::default()).unwrap());
        let mut claimed = pool.claim(2).unwrap();
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
        }
        drop(claimed);
        let before = pool.counters();
        // Computed again, it takes its names back from the far copies.
        let named = if together {
            pool.claim(2).unwrap().cache(&names, Naming::default()).unwrap()
        } else {
            names.iter().filter(|&&name| claim(&pool).cache_one(name, Naming::default())).count()
        };
        let after = pool.counters();
        assert_eq!((named, after.registered - before.registered), (2, 2));
        assert_eq!(after.duplicates, before.duplicates);
        checked(&pool);
    }
}

#[test]
fn moves_are_counted_by_the_tier_that_they_end_in() {
    let config =
        PoolConfig { secondary_blocks: 2, further_blocks: [2, 0], ..PoolConfig::primary_only(2) };
    let pool = BlockPool::new(&config).unwrap();
    cache(&pool, 1, Priority::DEFAULT);
    let counted = |to: Tier| {
        let before = pool.counters();
        let (source, target) = (find(&pool, 1).unwrap(), pool.claim_in(to, 1).unwrap());
        drop(pool.begin_onboard(source, target).unwrap().commit());
        assert_eq!(find(&pool, 1).unwrap().location().tier, to);
        let after = pool.counters();
        (after.offloaded - before.offloaded, after.onboarded - before.onboarded)
    };
    // Ahead of need, content leaves the primary tier; between the others it is neither.
    assert_eq!(counted(Tier::Secondary), (1, 0));
    assert_eq!(counted(Tier::Third), (0, 0));
    assert_eq!(counted(Tier::Secondary), (0, 0));
    assert_eq!(counted(Tier::Primary), (0, 1));
    assert_eq!(counted(Tier::Third), (0, 0));
    checked(&pool);
}

#[test]
fn claimed_blocks_of_two_tiers_are_not_joined() {
    let pool = pool(2, 2);
    let mut near = pool.claim(1).unwrap();
    let far = near.append(pool.claim_in(Tier::Secondary, 1).unwrap()).unwrap_err();
    assert_eq!((near.len(), far.len(), far.tier()), (1, 1, Tier::Secondary));
    near.append(pool.claim(1).unwrap()).unwrap();
    assert_eq!((near.len(), near.tier()), (2, Tier::Primary));
}
