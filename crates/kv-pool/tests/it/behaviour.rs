//! What a caller can rely on: who is evicted, what is found, what is pinned, and what a refusal says.

use crate::common::One;
use crate::common::{cache, checked, claim, find, name, pool, write};
use kv_pool::{
    BlockPool, ClaimError, HandleError, Naming, Pinned, Priority, Tier, stats::PinCost,
    tenants::TenantError,
};

mod eviction {
    use super::*;

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
    let foreign = TenantError::Foreign { tenant: self::pool(1, 0).add_tenant().unwrap() };
    let error = ClaimError::from(foreign.clone());
    assert_eq!(format!("{error:?}"), format!("{error}: {foreign}"), "one line with the cause");
    assert_eq!(HandleError::Epoch { epoch }.to_string(), "epoch 1 was begun by another pool");
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

#[test]
fn handles_cross_threads() {
    fn crosses<T: Send + Sync>() {}
    crosses::<BlockPool>();
    crosses::<(Pinned, kv_pool::Claimed)>();
    crosses::<(kv_pool::moves::Offload, kv_pool::moves::Onboard)>();
}
