//! Prefixes that are found by a guess where their blocks lie in a row, and names that are given and let go in one step.

use crate::common::{OneClaimed, Registration};
use crate::common::{checked, claim, pool, priority};
use kv_pool::{BlockHash, BlockPool, Naming, Pinned};

/// The names of the first `blocks` blocks of a prompt.
fn chain(prompt: u32, blocks: u32) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    (0..blocks)
        .map(|block| {
            parent = BlockHash::chain(parent, &[prompt, block]);
            parent
        })
        .collect()
}

fn hold(pool: &BlockPool, names: &[BlockHash], naming: impl Into<Naming>) -> Pinned {
    let mut claimed = pool.claim(names.len()).unwrap();
    let pins = claimed.register(names, naming).unwrap();
    assert!(claimed.is_empty());
    pins
}

fn cached(pool: &BlockPool, names: &[BlockHash]) -> usize {
    pool.match_prefix(names).len()
}

#[test]
fn content_is_named_and_released_in_one_step() {
    let pool = pool(3, 0);
    let names = chain(1, 2);
    assert!(claim(&pool).cache_one(names[0], priority(0)));
    assert!(claim(&pool).cache_one(names[1], Naming::after(names[0])));
    assert!(!claim(&pool).cache_one(names[0], priority(0)), "it is there");
    assert_eq!((pool.stats().primary.pinned, pool.claimable(), pool.empty()), (0, 3, 1));
    checked(&pool);
    drop(pool.claim(2).unwrap());
    assert_eq!(cached(&pool, &names), 1, "the tail first");
}

#[test]
fn a_prefix_ends_where_a_name_was_removed_though_its_blocks_lie_in_a_row() {
    for removed in 0..24 {
        let pool = pool(24, 0);
        let names = chain(1, 24);
        drop(hold(&pool, &names, Naming::default()));
        assert!(pool.remove(names[removed]));
        assert_eq!(cached(&pool, &names), removed);
        // And where the next block in the row bears another name.
        let other = hold(&pool, &chain(2, 1), Naming::default());
        assert_eq!(cached(&pool, &names), removed);
        drop(other);
        checked(&pool);
    }
}

#[test]
fn a_prefix_is_found_whole_wherever_its_blocks_lie() {
    let pool = pool(40, 0);
    let names = chain(1, 40);
    // Rows of every length and step, forwards and backwards.
    let mut free: Vec<_> = pool.claim(40).unwrap().into_iter().map(Some).collect();
    let order = (0..13).chain((13..25).rev()).chain((25..40).step_by(2)).chain((26..40).step_by(2));
    let mut parent = None;
    for (at, &name) in order.zip(&names) {
        let naming = Naming { parent, ..Naming::default() };
        let Registration::New(pin) = free[at].take().unwrap().register_one(name, naming) else {
            panic!("every name is new")
        };
        drop(pin);
        parent = Some(name);
    }
    let found = pool.match_prefix(&names);
    assert_eq!(found.len(), 40);
    let single = names.iter().map(|&name| pool.match_prefix(&[name]).ids().next().unwrap());
    assert!(found.ids().eq(single));
    drop(found);
    checked(&pool);
}
