//! What a caller can rely on: who is evicted, what is found, what is pinned, and what a refusal says.

use crate::common::{One, OneClaimed, Registration};
use crate::common::{cache, checked, claim, find, name, named, pool, priority, write};
use kv_pool::{
    Admission, Admit, BLOCKS_MAX, BlockHash, BlockId, BlockPool, Budget, BudgetError, ClaimError,
    ConfigError, EpochError, Naming, Pinned, PoolConfig, Priority, Tier, policy::RecordId,
    stats::PinCost,
};

mod eviction {
    use super::*;

    #[test]
    fn a_claim_takes_from_the_primary_tier_alone() {
        let pool = pool(8, 4);
        assert_eq!((pool.claimable(), pool.stats().secondary.claimable()), (8, 4));
        let block = claim(&pool);
        assert_eq!((pool.claimable(), pool.stats().secondary.claimable()), (7, 4));
        assert!(!block.evicted(0));
        checked(&pool);
    }

    #[test]
    fn every_block_id_is_handed_out_once_before_any_returns() {
        let pool = pool(8, 4);
        let mut block_ids: Vec<_> =
            pool.claim(8).unwrap().ids().map(|block_id| block_id.index()).collect();
        block_ids.sort_unstable();
        assert_eq!(block_ids, (0..8).collect::<Vec<_>>());
        let all = pool.claim(8).unwrap();
        let exhausted = ClaimError::Exhausted { requested: 1, claimable: 0, retiring: 0 };
        assert_eq!(pool.claim(1).unwrap_err(), exhausted);
        assert!(pool.claim(0).unwrap().is_empty());
        drop(all);
        assert_eq!(pool.claimable(), 8);
    }

    #[test]
    fn a_pin_takes_what_nobody_used_from_what_can_be_claimed() {
        let pool = pool(8, 0);
        (1..5).for_each(|content| cache(&pool, content, Priority::DEFAULT));
        let used = find(&pool, 2).unwrap();
        let names = [1, 2, 3, 9].map(name);
        let (before, cost) = (pool.claimable(), pool.pin_cost(&names));
        let _pins = [1, 2, 3].map(|content| find(&pool, content).unwrap());
        let two = PinCost { unused: 2, ..PinCost::default() };
        assert_eq!((cost, before - pool.claimable()), (two, 2));
        assert_eq!(pool.pin_cost(&names), PinCost::default());
        drop(used);
    }

    #[test]
    fn a_block_that_one_owner_has_pinned_can_be_made_its_claim_without_its_name() {
        let pool = pool(8, 0);
        cache(&pool, 1, Priority::DEFAULT);
        let names = [name(1)];
        let pin = pool.match_prefix(&names);
        let id = pin.ids().next();
        // Others hold it: with a clone, and with a reference of their own.
        let clone = pin.clone();
        let pin = pin.unname().unwrap_err();
        drop(clone);
        let other = find(&pool, 1).unwrap();
        let pin = pin.unname().unwrap_err();
        assert_eq!((pin.ids().next(), find(&pool, 1).is_some()), (id, true));
        drop(other);
        let claimed = pin.unname().unwrap();
        assert_eq!((claimed.ids().next(), claimed.len()), (id, 1));
        assert!(find(&pool, 1).is_none() && !claimed.evicted(0));
        pool.check_integrity().unwrap();
        // It can be named again, by what is written to it.
        assert_eq!(claimed.cache(&[name(2)], Naming::default()), Ok(1));
        assert_eq!(find(&pool, 2).unwrap().block_id().index(), id.unwrap().index());
        assert_eq!((pool.claimable(), pool.stats().counters.misuses), (8, 0));
        pool.check_integrity().unwrap();
        cache(&pool, 3, Priority::DEFAULT);
        let mut two = pool.match_prefix(&[name(2)]);
        two.append(pool.match_prefix(&[name(3)])).unwrap();
        assert_eq!(two.unname().unwrap_err().len(), 2, "one block at a time");
        assert!(Pinned::default().unname().is_err());
    }

    #[test]
    fn an_empty_block_is_claimed_next_and_cached_content_last() {
        let pool = pool(8, 0);
        let empty = claim(&pool);
        let block_id = empty.block_id();
        drop(empty);
        assert_eq!(claim(&pool).block_id(), block_id);

        cache(&pool, 1, Priority::DEFAULT);
        let cached = find(&pool, 1).unwrap().block_id();
        let others = pool.claim(7).unwrap();
        assert!(others.ids().all(|block_id| block_id != cached));
        assert!((0..7).all(|at| !others.evicted(at)));
        assert_eq!(pool.empty(), 0);
        let last = claim(&pool);
        assert!(last.block_id() == cached && last.evicted(0));
    }

    #[test]
    fn equal_priorities_leave_in_the_order_of_their_release() {
        let pool = pool(8, 0);
        let (first, second) = (write(&pool, 1), write(&pool, 2));
        let block_ids = [second.block_id(), first.block_id()];
        drop(second);
        drop(first);
        let untouched = pool.claim(6).unwrap();
        let order = pool.claim(2).unwrap();
        assert_eq!(order.ids().collect::<Vec<_>>(), block_ids);
        drop(untouched);
        checked(&pool);
    }

    #[test]
    fn lower_priorities_leave_first_however_lately_released() {
        let pool = pool(2, 0);
        let high = named(claim(&pool), 1, priority(80));
        let low = named(claim(&pool), 2, priority(5));
        let block_ids = [low.block_id(), high.block_id()];
        drop(high);
        drop(low);
        let order = pool.claim(2).unwrap();
        assert_eq!(order.ids().collect::<Vec<_>>(), block_ids);
    }

    #[test]
    fn a_priority_outlives_later_uses() {
        let pool = pool(2, 0);
        cache(&pool, 1, priority(5));
        cache(&pool, 2, Priority::DEFAULT);
        // Used last, and still the first to go.
        let block_id = find(&pool, 1).unwrap().block_id();
        assert_eq!(claim(&pool).block_id(), block_id);
    }

    #[test]
    fn the_tail_of_a_request_leaves_before_its_head() {
        let pool = pool(3, 0);
        let pins: Vec<_> = (0..3).map(|content| write(&pool, content)).collect();
        let block_ids: Vec<_> = pins.iter().map(|pin| pin.block_id()).rev().collect();
        pool.release(pins);
        let order: Vec<_> = pool.claim(3).unwrap().ids().collect();
        assert_eq!(order, block_ids);
    }

    #[test]
    fn a_use_makes_content_young() {
        let pool = pool(2, 0);
        cache(&pool, 1, Priority::DEFAULT);
        cache(&pool, 2, Priority::DEFAULT);
        drop(find(&pool, 1).unwrap());
        let victim = claim(&pool);
        assert!(find(&pool, 2).is_none());
        assert!(find(&pool, 1).is_some());
        drop(victim);
    }

    #[test]
    fn a_victim_is_forgotten_alone() {
        let pool = pool(3, 0);
        let hashes: Vec<_> = (0..3).map(name).collect();
        for content in 0..3 {
            cache(&pool, content, Priority::DEFAULT);
        }
        let victim = claim(&pool);
        assert!(pool.match_prefix(&hashes).is_empty(), "the prefix is broken at its first block");
        assert_eq!(pool.match_prefix(&hashes[1..]).len(), 2);
        drop(victim);
    }

    #[test]
    fn a_refused_claim_changes_nothing() {
        let pool = pool(4, 1);
        let held = write(&pool, 0);
        for content in 1..4 {
            cache(&pool, content, Priority::DEFAULT);
        }
        let before = pool.stats();
        let exhausted = ClaimError::Exhausted { requested: 4, claimable: 3, retiring: 0 };
        assert_eq!(pool.claim(4).unwrap_err(), exhausted);
        assert!(matches!(
            pool.claim(usize::MAX).unwrap_err(),
            ClaimError::Exhausted { requested: usize::MAX, .. }
        ));
        assert_eq!(pool.stats(), before);
        assert!((1..4).all(|content| find(&pool, content).is_some()));
        drop(held);
        checked(&pool);
    }

    #[test]
    fn pinned_content_is_never_evicted() {
        let pool = pool(2, 0);
        let pin = write(&pool, 1);
        let again = pin.clone();
        drop(pin);
        let other = claim(&pool);
        assert_ne!(other.block_id(), again.block_id());
        assert!(pool.claim(1).is_err());
        drop(again);
        assert!(claim(&pool).evicted(0));
    }
}

mod growth {
    use super::*;

    #[test]
    fn block_ids_can_be_claimed_when_they_have_memory() {
        let pool = BlockPool::new(&PoolConfig::primary_only(4)).unwrap();
        pool.set_budget(Tier::Primary, 2).unwrap();
        assert_eq!((pool.claimable(), pool.stats().primary.blocks), (2, 2));
        pool.set_budget(Tier::Primary, 3).unwrap();
        assert_eq!((pool.claimable(), pool.stats().primary.blocks), (3, 3));
        let over = BudgetError::OverCapacity { tier: Tier::Primary, requested: 5, capacity: 4 };
        assert_eq!(pool.set_budget(Tier::Primary, 5).unwrap_err(), over);
        assert_eq!(pool.claimable(), 3);
        pool.set_budget(Tier::Primary, 4).unwrap();
        let block_ids: Vec<_> =
            pool.claim(4).unwrap().ids().map(|block_id| block_id.index()).collect();
        assert_eq!(block_ids, [0, 1, 2, 3]);
        checked(&pool);
    }

    #[test]
    fn new_block_ids_are_claimed_before_content_of_any_priority_is_evicted() {
        let pool = BlockPool::new(&PoolConfig::primary_only(2)).unwrap();
        pool.set_budget(Tier::Primary, 1).unwrap();
        cache(&pool, 1, Priority::MIN);
        pool.set_budget(Tier::Primary, 2).unwrap();
        assert_eq!(pool.empty(), 1);
        let block = claim(&pool);
        assert_eq!((block.block_id().index(), block.evicted(0)), (1, false));
        assert!(find(&pool, 1).is_some());
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let refused = |primary_blocks, secondary_blocks| {
            let config = PoolConfig { primary_blocks, secondary_blocks, ..PoolConfig::default() };
            BlockPool::new(&config).unwrap_err()
        };
        assert_eq!(refused(0, 4), ConfigError::NoBlocks);
        for secondary in [BLOCKS_MAX, u64::MAX] {
            assert_eq!(
                refused(1, secondary),
                ConfigError::TooManyBlocks { primary: 1, secondary, further: [0; 2] }
            );
        }
    }
}

mod names {
    use super::*;

    #[test]
    fn the_longest_cached_prefix_is_pinned_and_no_more() {
        let pool = pool(4, 0);
        let pins = [1, 2, 4].map(|content| write(&pool, content));
        drop(pins);
        let found = pool.match_prefix(&[1, 2, 3, 4].map(name));
        assert_eq!(
            (0..2).map(|at| found.pin(at).unwrap().hash(0)).collect::<Vec<_>>(),
            [Some(name(1)), Some(name(2))]
        );
        assert_eq!(pool.stats().primary.pinned, 2);
        assert_eq!((pool.counters().lookups, pool.counters().hits), (4, 2));
        assert!(pool.match_prefix(&[]).is_empty());
    }

    #[test]
    fn equal_content_resolves_to_the_block_that_has_the_name() {
        let pool = pool(2, 0);
        let first = write(&pool, 1);
        let own = claim(&pool);
        let own_block_id = own.block_id();
        let Registration::Duplicate { existing, own } = own.register_one(name(1), priority(90))
        else {
            panic!("the name was given twice");
        };
        assert_eq!((existing.block(), existing.location()), (first.block(), first.location()));
        assert_eq!(own.block_id(), own_block_id);
        assert_eq!(pool.counters().duplicates, 1);
        // The block is still its owner's, and can bear another name.
        drop(named(own, 2, Priority::DEFAULT));
        drop(first);
        assert_eq!(pool.stats().primary.pinned, 1, "the duplicate's pin counts");
        drop(existing);
        checked(&pool);
    }

    #[test]
    fn removed_content_is_not_found_and_what_is_pinned_stays() {
        let pool = pool(3, 0);
        assert!(!pool.remove(name(1)));

        let pin = write(&pool, 1);
        let block_id = pin.block_id();
        assert!(pool.remove(name(1)));
        assert!(!pool.remove(name(1)));
        assert!(find(&pool, 1).is_none());
        assert_eq!((pin.hash(0), pin.block_id()), (None, block_id));
        let again = write(&pool, 1);
        assert_ne!(again.block_id(), block_id);
        drop(pin);
        assert_eq!(claim(&pool).block_id(), block_id, "without a name it is empty");
        drop(again);
        checked(&pool);
    }

    #[test]
    fn removed_content_that_waits_for_eviction_is_empty() {
        let pool = pool(2, 0);
        cache(&pool, 1, priority(90));
        cache(&pool, 2, Priority::MIN);
        let block_id = find(&pool, 1).unwrap().block_id();
        assert!(pool.remove(name(1)));
        assert_eq!((pool.empty(), pool.stats().primary.cached), (1, 1));
        checked(&pool);
        let block = claim(&pool);
        assert_eq!((block.block_id(), block.evicted(0)), (block_id, false));
    }

    #[test]
    fn removed_content_that_retires_is_empty_afterwards() {
        let pool = pool(1, 0);
        let epoch = pool.begin_epoch();
        cache(&pool, 1, Priority::DEFAULT);
        assert!(pool.remove(name(1)));
        checked(&pool);
        assert_eq!(pool.stats().primary.retiring, 1);
        pool.complete_epoch(epoch).unwrap();
        assert_eq!(pool.empty(), 1);
        checked(&pool);
    }

    #[test]
    fn a_reader_finds_content_of_the_tier_that_it_asks_for() {
        let pool = pool(2, 1);
        cache(&pool, 1, Priority::DEFAULT);
        assert!(pool.find_and_pin(name(1), Tier::Secondary).is_none());
        assert!(pool.find_and_pin(name(2), Tier::Primary).is_none());
        let pin = pool.find_and_pin(name(1), Tier::Primary).unwrap();
        assert_eq!(pin.location().tier, Tier::Primary);
        // A second pin of a block in use takes nothing from the queues.
        let claimable = pool.claimable();
        let again = pool.find_and_pin(name(1), Tier::Primary).unwrap();
        assert_eq!((again.block(), pool.claimable()), (pin.block(), claimable));
    }
}

mod epochs {
    use super::*;

    #[test]
    fn released_is_not_claimable_before_the_epoch_is_complete() {
        let pool = pool(2, 0);
        let epoch = pool.begin_epoch();
        cache(&pool, 1, Priority::DEFAULT);
        drop(claim(&pool));
        let exhausted = ClaimError::Exhausted { requested: 1, claimable: 0, retiring: 2 };
        assert_eq!(pool.claim(1).unwrap_err(), exhausted);
        assert_eq!(pool.stats().primary.retiring, 2);
        pool.complete_epoch(epoch).unwrap();
        pool.complete_epoch(epoch).unwrap();
        assert_eq!((pool.claimable(), pool.empty()), (2, 1));
        checked(&pool);
    }

    #[test]
    fn a_release_waits_for_the_epoch_that_was_current_then() {
        let pool = pool(2, 0);
        let first = pool.begin_epoch();
        let early = claim(&pool);
        let late = claim(&pool);
        drop(early);
        let second = pool.begin_epoch();
        drop(late);
        assert_eq!((first.number(), second.number()), (1, 2));
        pool.complete_epoch(first).unwrap();
        assert_eq!(pool.claimable(), 1);
        pool.complete_epoch(second).unwrap();
        assert_eq!(pool.claimable(), 2);
    }

    #[test]
    fn retiring_content_can_be_pinned_and_waits_anew_after_it() {
        let pool = pool(1, 0);
        let first = pool.begin_epoch();
        cache(&pool, 1, Priority::DEFAULT);
        let second = pool.begin_epoch();
        let pin = find(&pool, 1).unwrap();
        pool.complete_epoch(first).unwrap();
        assert_eq!(pool.claimable(), 0);
        checked(&pool);
        drop(pin);
        assert_eq!(pool.claimable(), 0, "the second use is not over");
        pool.complete_epoch(second).unwrap();
        assert_eq!(pool.claimable(), 1);
    }

    #[test]
    fn an_epoch_completes_those_before_it() {
        let pool = pool(1, 0);
        pool.begin_epoch();
        drop(claim(&pool));
        let second = pool.begin_epoch();
        pool.complete_epoch(second).unwrap();
        assert_eq!(pool.claimable(), 1);
        // With no work under way, released is free at once.
        drop(claim(&pool));
        assert_eq!(pool.claimable(), 1);
    }
}

#[test]
fn pins_of_another_pool_go_back_to_theirs() {
    let (ours, other) = (pool(2, 0), pool(2, 0));
    let foreign: Vec<_> = (1..3).map(|content| write(&other, content)).collect();
    let tail = foreign[1].block_id();
    let mut pins = vec![write(&ours, 1)];
    pins.extend(foreign);
    pins.push(write(&ours, 2));
    ours.release(pins);
    assert_eq!((ours.claimable(), other.claimable()), (2, 2));
    assert_eq!(claim(&other).block_id(), tail);
    assert!(find(&other, 1).is_some());
    checked(&ours);
    checked(&other);
}

#[test]
fn errors_say_their_numbers() {
    let pool = pool(2, 1);
    let epoch = pool.begin_epoch();
    drop(claim(&pool));
    assert_eq!(
        pool.claim(3).unwrap_err().to_string(),
        "3 blocks were asked for, 1 can be claimed and 1 more once the work that uses them is complete"
    );
    assert_eq!(EpochError::Foreign { epoch }.to_string(), "epoch 1 was begun by another pool");
    assert_eq!(
        pool.set_budget(Tier::Secondary, 9).unwrap_err().to_string(),
        "9 blocks are more than the 1 that the Secondary tier was made for"
    );
    let refused = pool.begin_onboard(write(&pool, 1), write_target(&pool, epoch)).unwrap_err();
    assert!(refused.to_string().starts_with("the block to onboard is already at"), "{refused}");
}

fn write_target(pool: &BlockPool, epoch: kv_pool::Epoch) -> kv_pool::Claimed {
    pool.complete_epoch(epoch).unwrap();
    claim(pool)
}

/// Admission leaves what it is told to leave, however much of the prompt is cached, and whatever else the
/// pool knows of: with events no block is looked at at ease.
#[test]
fn admission_leaves_blocks_for_those_who_grow() {
    for (events, cached, pinned) in
        [false, true].into_iter().flat_map(|e| [(e, 0, false), (e, 3, false), (e, 3, true)])
    {
        let builder = BlockPool::builder(&PoolConfig::primary_only(16));
        let pool = if events { builder.events(64) } else { builder }.build().unwrap();
        let names: Vec<_> = (0..3).map(name).collect();
        let prefix = &names[..cached];
        let held = pool.claim(cached).unwrap().register(prefix, Priority::DEFAULT).unwrap();
        let held = pinned.then_some(held);
        let room = if pinned { 13 } else { 16 };
        for blocks in cached..=16 {
            for leave in [0, 1, 5, 16, 17, usize::MAX] {
                let request = Admit { prefix, blocks, ..Admit::default() };
                let taken = if pinned { blocks - cached } else { blocks };
                let fits = taken.saturating_add(leave) <= room || taken == 0;
                let budget = Budget { to_write_max: usize::MAX, leave };
                let Admission { admitted, refused } = pool.admit_fitting(&[request], budget);
                assert_eq!(admitted.len(), usize::from(fits), "{blocks} {leave}");
                assert_eq!(refused.is_some(), !fits);
                if fits {
                    let left = pool.claimable();
                    assert!(left >= leave || taken == 0, "{blocks} {leave} {left}");
                }
                drop(admitted);
                assert_eq!(pool.claimable(), room);
                // Of two, the second is refused when the first has left no more than that.
                let two = pool.admit_fitting(&[request, request], budget);
                assert!(pool.claimable() >= leave || taken == 0 || two.admitted.is_empty());
            }
        }
        drop(held);
        checked(&pool);
    }
}

#[test]
fn counters_account_for_every_name() {
    let pool = pool(2, 1);
    for content in 0..9 {
        let mut block = claim(&pool);
        if let Some(offload) = block.take_offload() {
            offload.commit();
        }
        drop(named(block, content, Priority::DEFAULT));
        let (stats, names) =
            (pool.stats(), pool.stats().primary.cached + pool.stats().secondary.cached);
        assert_eq!(stats.counters.registered - stats.counters.dropped, names);
    }
    assert_eq!(pool.counters().misuses, 0);
}

#[test]
fn handles_cross_threads() {
    fn crosses<T: Send + Sync>() {}
    crosses::<BlockPool>();
    crosses::<kv_pool::Pinned>();
    crosses::<kv_pool::Pinned>();
    crosses::<kv_pool::Claimed>();
    crosses::<kv_pool::Claimed>();
    crosses::<kv_pool::moves::Offload>();
    crosses::<kv_pool::moves::Onboard>();
    crosses::<(BlockHash, RecordId, BlockId)>();
}
