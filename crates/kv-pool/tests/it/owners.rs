//! Who owns a pin and a pool: stocks of pins, and pools whose handles are gone before their pins.

use crate::common::{cache, checked, find, name, pool};
use kv_pool::{
    BlockPool, HandleError, Naming, Pinned, PoolConfig, Priority, Tier, moves::Onboarded,
};
use kv_testkit::alloc::bytes;

#[test]
fn a_block_is_held_until_all_clones_and_lists_of_it_are_gone() {
    let pool = pool(1, 0);
    cache(&pool, 1, Priority::DEFAULT);
    let list = pool.match_prefix(&[name(1)]);
    let (single, clone) = (list.pin(0).unwrap(), list.clone());
    assert!(single.locations().eq(list.locations()) && single.records().eq(clone.records()));
    drop(list);
    let mut joined = single.clone();
    joined.append(single).unwrap();
    drop(clone);
    assert_eq!((joined.len(), pool.claimable()), (2, 0));
    let rest = joined.split_off(1);
    drop(joined);
    assert_eq!(pool.claimable(), 0, "one reference is out still");
    std::thread::scope(|scope| scope.spawn(move || drop(rest)).join().unwrap());
    assert_eq!(pool.claimable(), 1);
    checked(&pool);
}

/// A list of which some blocks are read elsewhere: those stay, and the others move, in one step.
#[test]
fn of_a_list_the_blocks_that_nobody_else_has_move() {
    let pool = pool(3, 3);
    let mut blocks = pool.claim(3).unwrap();
    let names: Vec<_> = (1..4).map(name).collect();
    drop(blocks.register(&names, Naming::default()).unwrap());
    let mut evicted = pool.claim(3).unwrap();
    while let Some(offload) = evicted.take_offload() {
        offload.commit();
    }
    let reader = pool.find_and_pin(names[1], Tier::Secondary).unwrap();
    let far = pool.match_prefix(&names);
    let refused = pool.begin_onboard(far, evicted.split_off(1)).unwrap_err();
    let expected = HandleError::Lengths { sources: 3, targets: 2 };
    assert_eq!(refused.reason, expected);
    let (far, rest) = (refused.pinned, refused.target);
    evicted.append(rest).unwrap();
    let ids: Vec<_> = evicted.ids().collect();
    let onboard = pool.begin_onboard(far, evicted).unwrap();
    assert!(onboard.pairs().map(|(_, to)| to.id).eq(ids.iter().copied()));
    let Onboarded { pinned, copies } = onboard.commit();
    let tiers: Vec<_> = pinned.locations().map(|at| at.tier).collect();
    assert_eq!(tiers, [Tier::Primary, Tier::Secondary, Tier::Primary]);
    assert_eq!(pinned.locations().nth(1), reader.locations().next());
    assert!(copies.ids().eq([ids[1]]));
    checked(&pool);
    drop((pinned, copies, reader));
    checked(&pool);
    assert_eq!(pool.claimable(), 3);
}

/// The first block whose content is there already stops a list, and stays its owner's.
#[test]
fn blocks_are_named_behind_others_up_to_the_first_duplicate() {
    let pool = pool(8, 0);
    let names: Vec<_> = (1..7).map(name).collect();
    let (mut held, mut clone) = (Pinned::default(), None);
    let there = pool.claim_one().unwrap().register(&names[4..5], Priority::DEFAULT).unwrap();
    let mut blocks = pool.claim(6).unwrap();
    let ids: Vec<_> = blocks.ids().collect();
    for (at, &hash) in names[..4].iter().enumerate() {
        let naming = Naming { parent: at.checked_sub(1).map(|at| names[at]), ..Naming::default() };
        assert_eq!(blocks.register_onto(&[hash], naming, &mut held), Ok(1));
        // The clone keeps what was there when it was made.
        clone = clone.or_else(|| (at == 1).then(|| held.clone()));
    }
    assert_eq!(clone.unwrap().len(), 2);
    assert_eq!(blocks.register_onto(&names[4..], Naming::after(names[3]), &mut held), Ok(0));
    assert!(blocks.ids().eq(ids[4..].iter().copied()), "the duplicate is still claimed");
    drop((blocks.take_first(), there));
    assert_eq!(blocks.register_onto(&names[5..], Naming::after(names[4]), &mut held), Ok(1));
    assert!(blocks.is_empty() && held.len() == 5);
    assert_eq!(blocks.register_onto(&[], Naming::default(), &mut held), Ok(0));
    let refused = blocks.register_onto(&names[..1], Naming::default(), &mut held).unwrap_err();
    assert_eq!(refused, HandleError::Names { names: 1, blocks: 0 });
    assert_eq!(pool.match_prefix(&names).len(), 6);
    assert_eq!(pool.stats().primary.pinned, 5);
    checked(&pool);
    // A list of one takes others behind it, too.
    held.truncate(0);
    let mut one = find(&pool, 1).unwrap();
    let mut more = pool.claim_one().unwrap();
    assert_eq!(more.register_onto(&[name(9)], Naming::default(), &mut one), Ok(1));
    assert_eq!((one.len(), pool.stats().primary.pinned), (2, 2));
    drop((held, one, more));
    assert_eq!(pool.claimable(), 8);
    checked(&pool);
}

/// Uses a pool in all ways that leave something spare behind, and hands out what holds it.
fn used() -> (BlockPool, impl Sized) {
    let pool = BlockPool::new(&PoolConfig::primary_only(64)).unwrap();
    for content in 0..200 {
        let pin = pool.claim_one().unwrap().register(&[name(content)], Naming::default()).unwrap();
        drop((pin.clone(), pin));
    }
    let pins: Vec<_> = (190..200).map(|content| find(&pool, content).unwrap()).collect();
    drop(pins);
    let held = (find(&pool, 199).unwrap(), pool.match_prefix(&[name(198)]), pool.claim_one());
    let more = (pool.claim(3).unwrap(), find(&pool, 197).unwrap());
    (pool, (held, more))
}

#[test]
fn nothing_is_left_of_a_pool_when_its_handles_and_pins_are_gone() {
    // What the first thread to wait, print or measure allocates is not the pool's.
    drop(used());
    let before = bytes();
    let (pool, held) = used();
    assert!(bytes() > before + 4_000, "the pool is seen to take memory");
    drop(held);
    drop(pool);
    assert_eq!(bytes(), before, "pins first");

    let (pool, held) = used();
    let another = pool.clone();
    drop(pool);
    drop(held);
    assert!(bytes() > before + 4_000, "a handle is a handle");
    drop(another);
    assert_eq!(bytes(), before, "a clone of the handle last");

    let (pool, held) = used();
    drop(pool);
    assert!(bytes() > before + 4_000, "pins keep it");
    drop(held);
    assert_eq!(bytes(), before, "handles first");
}
