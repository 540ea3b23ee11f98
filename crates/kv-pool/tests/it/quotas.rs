//! What tenants are promised holds for every way to come to hold a block: claims, lookups, loans, and names that are cached
//! already.

use crate::common::{OneClaimed, Registration};
use crate::common::{checked, name, pool};
use kv_pool::{
    BlockHash, BlockPool, ClaimError, Naming, Tier,
    tenants::{TenantError, TenantId, TenantQuota},
};

fn names(range: std::ops::Range<u32>) -> Vec<BlockHash> {
    range.map(name).collect()
}

/// Writes one content after the other for a tenant and lets go of it.
fn cache_for(pool: &BlockPool, tenant: TenantId, contents: std::ops::Range<u32>) {
    for content in contents {
        let block = pool.claim_for(tenant, 1).unwrap();
        assert!(block.cache_one(name(content), Naming::default()));
    }
}

fn reserved(reserved: u64) -> TenantQuota {
    TenantQuota { reserved, ..TenantQuota::NONE }
}

fn at_most(held_max: u64) -> TenantQuota {
    TenantQuota { held_max, ..TenantQuota::NONE }
}

/// Eight blocks with cached content of the first tenant; four of them are kept for the second.
fn beside_a_reserve() -> (BlockPool, [TenantId; 2]) {
    let pool = pool(8, 0);
    let tenants = [0; 2].map(|_| pool.add_tenant().unwrap());
    pool.set_quota(tenants[1], Tier::Primary, reserved(4)).unwrap();
    cache_for(&pool, tenants[0], 0..8);
    (pool, tenants)
}

/// Eight blocks with cached content of a tenant that may hold four.
fn beyond_a_bound() -> (BlockPool, TenantId) {
    let pool = pool(16, 0);
    let tenant = pool.add_tenant().unwrap();
    cache_for(&pool, tenant, 0..8);
    pool.set_quota(tenant, Tier::Primary, at_most(4)).unwrap();
    (pool, tenant)
}

fn held(pool: &BlockPool, tenant: TenantId) -> u64 {
    pool.tenant_counts(tenant, Tier::Primary).unwrap().held
}

#[test]
fn a_lookup_finds_what_its_owner_may_hold() {
    let (pool, [ours, theirs]) = beside_a_reserve();
    let found = pool.match_prefix(&names(0..8));
    assert_eq!((found.len(), held(&pool, ours)), (4, 4));
    // What is held already is found by all.
    assert_eq!(pool.match_prefix(&names(0..8)).len(), 4);
    assert!(pool.find_and_pin(name(4), Tier::Primary).is_none());
    assert!(pool.match_prefix(&names(4..6)).is_empty());
    assert!(pool.match_prefix(&names(4..5)).is_empty());
    assert!(pool.lend(&names(4..6), Tier::Primary).is_none());
    assert_eq!(pool.claim_for(theirs, 4).unwrap().len(), 4);
    drop(found);
    assert_eq!(pool.match_prefix(&names(0..4)).len(), 4);
    checked(&pool);

    let (pool, tenant) = beyond_a_bound();
    let loan = pool.lend(&names(0..8), Tier::Primary).unwrap();
    assert_eq!((loan.blocks.len(), held(&pool, tenant)), (4, 4));
    assert!(pool.end_loan(loan.id));
    let pins: Vec<_> = (0..8).map(|at| pool.find_and_pin(name(at), Tier::Primary)).collect();
    assert_eq!(pins.iter().flatten().count(), 4);
    checked(&pool);
}

#[test]
fn a_name_that_is_cached_already_goes_to_the_new_block_if_its_owner_may_not_hold_the_old() {
    let (pool, tenant) = beyond_a_bound();
    let holds = pool.match_prefix(&names(0..4));
    let block = pool.claim_one().unwrap();
    let Registration::New(pin) = block.register_one(name(5), Naming::default()) else {
        panic!("its owner holds more than it may")
    };
    assert_eq!(held(&pool, tenant), 4);
    // In use, it is shared as ever.
    let block = pool.claim_one().unwrap();
    let known = block.register_one(name(1), Naming::default());
    assert!(matches!(known, Registration::Duplicate(_)));
    assert_eq!(held(&pool, tenant), 4);
    drop((holds, pin, known));
    checked(&pool);
}

/// Content that a tenant may keep in host memory, or may not.
fn cached_in_host_memory(cached_max: u64) -> TenantQuota {
    TenantQuota { cached_max, ..TenantQuota::NONE }
}

/// Four primary blocks with content of a tenant, and four secondary ones with content of nobody.
fn beside_others_in_host_memory(cached_max: u64) -> (BlockPool, TenantId) {
    let pool = pool(4, 4);
    cache_for(&pool, TenantId::NOBODY, 0..4);
    drop(claim_and_move(&pool, 4));
    let tenant = pool.add_tenant().unwrap();
    pool.set_quota(tenant, Tier::Secondary, cached_in_host_memory(cached_max)).unwrap();
    cache_for(&pool, tenant, 10..14);
    (pool, tenant)
}

fn cached(pool: &BlockPool, range: std::ops::Range<u32>) -> usize {
    range.filter(|&content| pool.locate(name(content)).is_some()).count()
}

#[test]
fn content_that_its_tenant_may_not_keep_in_host_memory_takes_no_place_there() {
    for (cached_max, kept) in [(0, 0), (1, 1), (2, 2), (9, 4)] {
        let (pool, _) = beside_others_in_host_memory(cached_max);
        // All at once: what is on its way counts, too.
        let mut claimed = pool.claim(4).unwrap();
        let mut moved = 0;
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
            moved += 1;
        }
        assert_eq!((moved, cached(&pool, 10..14)), (kept, kept), "of {cached_max}");
        assert_eq!(cached(&pool, 0..4), 4 - kept, "nothing is lost for what is not kept");
        drop(claimed);
        checked(&pool);
    }
}

#[test]
fn content_in_host_memory_takes_the_place_of_its_own_tenant_s_when_that_has_enough() {
    let (pool, tenant) = beside_others_in_host_memory(2);
    for round in 0..3 {
        drop(claim_and_move(&pool, 4));
        cache_for(&pool, tenant, 20 + 4 * round..24 + 4 * round);
        let counts = pool.tenant_counts(tenant, Tier::Secondary).unwrap();
        assert_eq!((counts.cached, cached(&pool, 0..4)), (2, 2));
        // Of four that come down in a round, two have no place, and two take that of what came before them.
        assert_eq!(pool.counters().dropped, 4 * u64::from(round + 1), "round {round}");
        checked(&pool);
    }
}

/// Claims blocks, and moves what they have evicted.
fn claim_and_move(pool: &BlockPool, count: usize) -> kv_pool::Claimed {
    let mut claimed = pool.claim(count).unwrap();
    while let Some(offload) = claimed.take_offload() {
        offload.commit();
    }
    claimed
}

#[test]
fn content_that_follows_what_its_tenant_has_in_host_memory_does_not_take_that_place() {
    let pool = pool(2, 2);
    cache_for(&pool, TenantId::NOBODY, 10..12);
    drop(claim_and_move(&pool, 2));
    let tenant = pool.add_tenant().unwrap();
    pool.set_quota(tenant, Tier::Secondary, cached_in_host_memory(1)).unwrap();
    let all = names(0..2);
    let mut pins = pool.claim_for(tenant, 2).unwrap().register(&all, Naming::default()).unwrap();
    let tail = pins.split_off(1);
    drop(pins);
    drop(claim_and_move(&pool, 1));
    assert_eq!((pool.prefix_len(&all), cached(&pool, 10..12)), (2, 1));
    drop(tail);
    drop(claim_and_move(&pool, 2));
    assert_eq!((pool.prefix_len(&all), cached(&pool, 10..12)), (1, 1));
    checked(&pool);
}

#[test]
fn the_first_blocks_of_a_prompt_stay_in_host_memory_when_its_tenant_may_not_keep_all() {
    let pool = pool(4, 8);
    let tenant = pool.add_tenant().unwrap();
    pool.set_quota(tenant, Tier::Secondary, cached_in_host_memory(2)).unwrap();
    let all = names(0..4);
    drop(pool.claim_for(tenant, 4).unwrap().register(&all, Naming::default()).unwrap());
    drop(claim_and_move(&pool, 4));
    assert_eq!(pool.prefix_len(&all), 2);
    checked(&pool);
}

#[test]
fn a_tail_is_given_up_before_its_head_however_many_heads_were_let_go_first() {
    let pool = pool(64, 0);
    let tenant = pool.add_tenant().unwrap();
    let all = names(0..40);
    let pins = pool.claim_for(tenant, 40).unwrap().register(&all, Naming::default()).unwrap();
    // From head to tail, as nobody should.
    pins.into_iter().for_each(drop);
    for cached_max in [39, 20, 3, 0] {
        let quota = TenantQuota { cached_max, ..TenantQuota::NONE };
        pool.set_quota(tenant, Tier::Primary, quota).unwrap();
        assert_eq!(pool.prefix_len(&all), cached_max as usize);
        checked(&pool);
    }
}

#[test]
fn a_block_whose_last_successor_is_gone_is_given_up_in_its_turn() {
    let pool = pool(8, 0);
    let tenant = pool.add_tenant().unwrap();
    let all = names(0..3);
    let pins = pool.claim_for(tenant, 3).unwrap().register(&all, Naming::default()).unwrap();
    pins.into_iter().for_each(drop);
    cache_for(&pool, tenant, 10..11);
    let at_most = |cached_max| {
        let quota = TenantQuota { cached_max, ..TenantQuota::NONE };
        pool.set_quota(tenant, Tier::Primary, quota).unwrap();
    };
    at_most(3);
    assert_eq!((pool.prefix_len(&all), cached(&pool, 10..11)), (2, 1));
    // Removed, the tail stands before nobody: the head is older than the other content.
    assert!(pool.remove(name(1)));
    at_most(1);
    assert_eq!((pool.prefix_len(&all), cached(&pool, 10..11)), (0, 1));
    checked(&pool);
}

#[test]
fn the_last_of_several_names_is_one_that_its_owner_may_hold() {
    let (pool, tenant) = beyond_a_bound();
    let holds = pool.match_prefix(&names(0..3));
    let found = pool.match_last(&names(0..8)).map(|(at, pins)| (at, pins.len()));
    assert_eq!(found, Some((7, 1)), "one more may be held");
    let fourth = pool.match_last(&names(0..8)).unwrap();
    assert_eq!((fourth.0, held(&pool, tenant)), (7, 4));
    // No other now, but what is held already.
    assert_eq!(pool.match_last(&names(3..7)).map(|(at, _)| at), None);
    assert_eq!(pool.match_last(&names(1..7)).map(|(at, _)| at), Some(1));
    assert_eq!(held(&pool, tenant), 4);
    drop((holds, fourth));
    checked(&pool);
}

#[test]
fn a_prefix_that_names_a_block_twice_counts_it_for_its_owner_once() {
    let pool = pool(8, 0);
    let owner = pool.add_tenant().unwrap();
    pool.set_quota(owner, Tier::Primary, at_most(2)).unwrap();
    cache_for(&pool, owner, 0..2);
    let asked = [name(0), name(0), name(1)];
    assert_eq!(pool.prefix_len(&asked), 3);
    let found = pool.match_prefix(&asked);
    assert_eq!((found.len(), held(&pool, owner)), (3, 2));
    checked(&pool);
}

#[test]
fn a_reserve_that_others_have_in_use_when_the_budget_falls_is_there_as_soon_as_they_let_go() {
    let pool = pool(8, 0);
    let owner = pool.add_tenant().unwrap();
    pool.set_quota(owner, Tier::Primary, reserved(4)).unwrap();
    let mut others = pool.claim(4).unwrap();
    drop(pool.set_budget(Tier::Primary, 4).unwrap());
    for free in 0..4 {
        assert!(pool.claim_for(owner, free + 1).is_err());
        assert!(pool.claim(1).is_err(), "nobody else has what is let go of");
        drop(others.take_first());
        assert_eq!(pool.claim_for(owner, free + 1).unwrap().len(), free + 1);
    }
    checked(&pool);
}

#[test]
fn a_look_at_the_quotas_says_what_a_claim_behind_pins_is_answered() {
    let mut met = [0; 3];
    let cases = (0..192_u64)
        .map(|at| (at % 4 + 1, at / 4 % 4 * 2, (at / 16 % 3) as u32, (at / 48 + 1) as usize));
    for (held_max, kept, pinned, count) in cases {
        let pool = pool(8, 0);
        let [one, other] = [0; 2].map(|_| pool.add_tenant().unwrap());
        cache_for(&pool, one, 0..2);
        pool.set_quota(one, Tier::Primary, at_most(held_max)).unwrap();
        pool.set_quota(other, Tier::Primary, reserved(kept)).unwrap();
        let names = names(0..pinned);
        let checked = pool.check_quota(one, &[&names, &[name(99)]], count, 0);
        let pins: Option<Vec<_>> =
            names.iter().map(|&name| pool.find_and_pin(name, Tier::Primary)).collect();
        let Some(pins) = pins else { continue };
        let claimed = pool.claim_for(one, count).map(drop);
        match &claimed {
            Err(ClaimError::Exhausted { .. }) => continue,
            Err(ClaimError::Tenant(TenantError::HeldMax { .. })) => {
                met[1] += 1;
                assert!(matches!(checked, Err(TenantError::HeldMax { .. })), "{checked:?}");
            }
            claimed => {
                met[if claimed.is_ok() { 0 } else { 2 }] += 1;
                assert_eq!(checked.is_err(), claimed.is_err(), "{checked:?}, {claimed:?}");
            }
        }
        drop(pins);
    }
    assert!(met.iter().all(|&met| met > 5), "{met:?}");
}

#[test]
fn the_quotas_of_a_tier_of_another_size_can_be_looked_at() {
    let (pool, [first, second]) = beside_a_reserve();
    // Four of eight blocks are kept for the second.
    assert_eq!(pool.check_quota(first, &[], 4, 0), Ok(()));
    assert!(matches!(pool.check_quota(first, &[], 5, 0), Err(TenantError::KeptForOthers { .. })));
    assert_eq!(pool.check_quota(first, &[], 5, 1), Ok(()));
    assert!(pool.check_quota(first, &[], 4, -1).is_err());
    assert_eq!(pool.check_quota(second, &[], 4, -4), Ok(()));
    let over = TenantError::OverReserved { tier: Tier::Primary, reserved: 4, capacity: 3 };
    assert_eq!(pool.check_quota(second, &[], 0, -5), Err(over));
    let room = pool.tenant_room(first, Tier::Primary).unwrap();
    assert_eq!((room.ever, room.now, room.own), (4, 4, u64::MAX));
    let held = pool.claim_for(first, 2).unwrap();
    pool.set_quota(first, Tier::Primary, at_most(3)).unwrap();
    let room = pool.tenant_room(first, Tier::Primary).unwrap();
    assert_eq!((room.ever, room.now, room.own), (3, 1, 1));
    assert_eq!(pool.tenant_room(second, Tier::Primary).unwrap().ever, 8);
    let foreign = beside_a_reserve().1[0];
    assert_eq!(
        pool.tenant_room(foreign, Tier::Primary).unwrap_err(),
        TenantError::Foreign { tenant: foreign }
    );
    assert_eq!(
        pool.check_quota(foreign, &[], 0, 0).unwrap_err(),
        TenantError::Foreign { tenant: foreign }
    );
    drop(held);
}
