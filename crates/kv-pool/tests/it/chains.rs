//! Content that follows other content: tails go before heads, batches match before they claim, and
//! removal reaches what follows.

use crate::common::{One, OneClaimed, Registration};
use crate::common::{checked, claim, pool, priority};
use kv_pool::{
    Admit, BlockHash, BlockPool, ClaimError, Naming, Partial, Pinned, RegisterError, Tier,
};

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
fn a_head_of_low_priority_outlives_its_tail() {
    let pool = pool(4, 0);
    let names = chain(1, 2);
    drop(hold(&pool, &names[..1], priority(0)));
    drop(hold(&pool, &names[1..], Naming::after(names[0]).keep(priority(100))));
    let empty = pool.claim(2).unwrap();
    let first = claim(&pool);
    assert!(first.evicted(0));
    assert_eq!(cached(&pool, &names), 1, "the tail went");
    checked(&pool);
    drop((empty, first));
}

#[test]
fn a_head_that_was_passed_over_is_next_when_its_tail_is_gone() {
    let pool = pool(3, 0);
    let (names, other) = (chain(1, 2), chain(2, 1));
    drop(hold(&pool, &names[..1], priority(0)));
    drop(hold(&pool, &names[1..], Naming::after(names[0]).keep(priority(1))));
    drop(hold(&pool, &other, priority(0)));
    // The head comes up, waits, and is the first again after its tail.
    let order: Vec<_> = pool.claim(3).unwrap().ids().map(|block_id| block_id.index()).collect();
    assert_eq!(order, [2, 1, 0]);
    checked(&pool);
}

#[test]
fn a_head_whose_tail_is_in_use_goes_only_when_nothing_else_is_left() {
    let pool = pool(2, 0);
    let names = chain(1, 2);
    let head = hold(&pool, &names[..1], Naming::default());
    let tail = hold(&pool, &names[1..], Naming::after(names[0]));
    drop(head);
    let block = claim(&pool);
    assert!(block.evicted(0), "memory that nobody uses is never refused");
    checked(&pool);
    assert_eq!(tail.pin(0).unwrap().hash(0), Some(names[1]));
    // Computed again, the head is found with its tail, and goes after it as before.
    let Registration::New(head) = block.register_one(names[0], priority(0)) else {
        panic!("twice")
    };
    drop(tail);
    assert_eq!(cached(&pool, &names), 2);
    drop(head);
    drop(claim(&pool));
    assert_eq!(cached(&pool, &names), 1);
    checked(&pool);
}

#[test]
fn a_root_with_many_children_goes_last() {
    let pool = pool(101, 0);
    let root = chain(0, 1);
    drop(hold(&pool, &root, priority(0)));
    for child in 1..=100 {
        let name = BlockHash::chain(root[0], &[child]);
        drop(hold(&pool, &[name], Naming::after(root[0])));
    }
    let all = pool.claim(101).unwrap();
    assert_eq!(all.ids().next_back().unwrap().index(), 0);
    checked(&pool);
}

#[test]
fn a_list_names_consecutive_blocks_and_shares_what_is_there() {
    let pool = pool(8, 0);
    let names = chain(1, 4);
    let first = hold(&pool, &names[..2], Naming::default());
    let mut claimed = pool.claim(4).unwrap();
    let spare = claimed.ids().next_back().unwrap();
    let pins = claimed.register(&names[..3], Naming::default()).unwrap();
    assert_eq!(claimed.ids().collect::<Vec<_>>(), [spare]);
    assert!(pins.locations().take(2).eq(first.locations()));
    assert_eq!((pool.counters().duplicates, pool.counters().registered), (2, 3));
    // Two of the four went back.
    assert_eq!(pool.claimable(), 8 - 2 - 1 - 1);
    let refused = claimed.register(&names[2..], Naming::default()).unwrap_err();
    assert_eq!(refused, RegisterError::TooMany { names: 2, blocks: 1 });
    assert_eq!(claimed.len(), 1);
    checked(&pool);
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
fn lists_of_pins_are_cloned_joined_and_cut() {
    let (ours, other) = (pool(8, 0), pool(2, 0));
    let names = chain(1, 4);
    let mut head = hold(&ours, &names[..2], Naming::default());
    let reader = head.clone();
    let tail = hold(&ours, &names[2..], Naming::after(names[1]));
    head.append(tail).unwrap();
    assert_eq!((head.len(), reader.len()), (4, 2));
    checked(&ours);
    let foreign = hold(&other, &names[..1], Naming::default());
    let foreign = head.append(foreign).unwrap_err();
    assert_eq!((head.len(), foreign.len()), (4, 1));
    let second = head.clone();
    head.truncate(1);
    assert_eq!(ours.stats().primary.pinned, 4, "the clone holds what was cut off");
    drop(second);
    assert_eq!(ours.stats().primary.pinned, 2, "the reader holds two");
    let singles: Vec<_> = reader.into_iter().collect();
    assert_eq!(singles.len(), 2);
    drop(head);
    assert_eq!(ours.stats().primary.pinned, 2);
    drop(singles);
    assert_eq!((ours.stats().primary.pinned, ours.claimable()), (0, 8));
    let mut empty = Pinned::default();
    empty.truncate(0);
    empty.append(Pinned::default()).unwrap();
    assert!(empty.is_empty() && empty.pin(0).is_none());
    checked(&ours);
    checked(&other);
}

mod batches {
    use super::*;

    fn admit<'a>(prefix: &'a [BlockHash], blocks: usize) -> Admit<'a> {
        Admit { prefix, blocks, ..Admit::default() }
    }

    #[test]
    fn no_sequence_takes_what_another_has_found() {
        let pool = pool(6, 0);
        let [old, late] = [1, 2].map(|prompt| chain(prompt, 3));
        drop(hold(&pool, &old, Naming::default()));
        drop(hold(&pool, &late, Naming::default()));
        // One after the other, the first would evict what the second finds.
        let mut admitted = pool.admit(&[admit(&[], 3), admit(&old, 3)]).unwrap();
        assert_eq!(admitted[1].prefix.len(), 3);
        assert_eq!((admitted[0].claimed.len(), admitted[1].claimed.len()), (3, 0));
        checked(&pool);
        admitted.clear();
        assert_eq!(cached(&pool, &late), 0);
    }

    #[test]
    fn a_refused_batch_changes_nothing() {
        let pool = pool(4, 0);
        let names = chain(1, 2);
        drop(hold(&pool, &names, Naming::default()));
        let before = pool.stats();
        // The prefix that both find is taken once.
        let refused = pool.admit(&[admit(&names, 4), admit(&names, 3)]).unwrap_err();
        let exhausted = ClaimError::Exhausted { requested: 3, claimable: 2, retiring: 0 };
        assert_eq!(refused, exhausted);
        assert_eq!(pool.stats(), before);
        checked(&pool);
        let admitted = pool.admit(&[admit(&names, 3), admit(&names, 3)]).unwrap();
        assert_eq!((admitted.len(), pool.claimable()), (2, 0));
    }

    #[test]
    fn what_lies_elsewhere_is_given_a_block_to_move_to() {
        let pool = pool(2, 2);
        let names = chain(1, 2);
        drop(hold(&pool, &names, Naming::default()));
        let mut claimed = pool.claim(2).unwrap();
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
        }
        drop(claimed);
        let mut admitted = pool.admit(&[admit(&names, 2)]).unwrap();
        let admitted = admitted.remove(0);
        assert_eq!((admitted.prefix.len(), admitted.claimed.len()), (2, 2));
        assert!(admitted.prefix.locations().all(|at| at.tier == Tier::Secondary));
        checked(&pool);
    }

    #[test]
    fn an_unused_leaf_is_taken_over_once_and_copied_otherwise() {
        let pool = pool(8, 0);
        let names = chain(1, 2);
        let short = [9, 8].map(|tokens| BlockHash::chain(names[0], &[tokens]));
        drop(hold(&pool, &names[..1], Naming::default()));
        let block_id = hold(&pool, &short[1..], Naming::after(names[0])).ids().next().unwrap();
        let request = Admit { prefix: &names[..1], partial: &short, blocks: 3, ..Admit::default() };
        let admitted = pool.admit(&[request, request]).unwrap();
        let [first, second] = &admitted[..] else { panic!("two were asked for") };
        assert!(matches!(first.partial, Some(Partial::TakenOver { candidate: 1 })));
        assert_eq!((first.claimed.len(), first.claimed.ids().next()), (2, Some(block_id)));
        assert!(second.partial.is_none(), "it has lost its name");
        assert_eq!(second.claimed.len(), 2);
        checked(&pool);
        drop(admitted);

        // In use, it is copied.
        let reader = hold(&pool, &short[..1], Naming::after(names[0]));
        let admitted = pool.admit(&[request]).unwrap().remove(0);
        let Some(Partial::Copy { candidate: 0, source }) = &admitted.partial else {
            panic!("{:?}", admitted.partial)
        };
        assert_eq!(source.block(), reader.records().next().unwrap());
        assert_eq!(admitted.claimed.len(), 2);
        drop(reader);
        // With a successor, too.
        let next = hold(&pool, &[BlockHash::chain(short[0], &[1])], Naming::after(short[0]));
        drop((admitted, next));
        let admitted = pool.admit(&[request]).unwrap().remove(0);
        assert!(matches!(admitted.partial, Some(Partial::Copy { .. })));
        checked(&pool);
    }
}

mod removal {
    use super::*;

    #[test]
    fn what_follows_goes_with_it_or_stays() {
        let pool = pool(16, 0);
        let (names, other) = (chain(1, 4), chain(2, 2));
        let branch = [BlockHash::chain(names[1], &[77])];
        let held = hold(&pool, &names, Naming::default());
        drop(hold(&pool, &branch, Naming::after(names[1])));
        drop(hold(&pool, &other, Naming::default()));
        assert!(pool.remove(names[2]));
        assert_eq!(cached(&pool, &names), 2);
        checked(&pool);
        assert_eq!(pool.remove_with_successors(names[1]), 2);
        assert_eq!((cached(&pool, &names), cached(&pool, &branch)), (1, 0));
        assert_eq!(cached(&pool, &names[3..]), 1, "it followed what was removed before");
        assert_eq!(cached(&pool, &other), 2);
        assert_eq!(pool.remove_with_successors(names[1]), 0);
        drop(held);
        checked(&pool);
    }

    #[test]
    fn a_tenants_content_goes_and_no_other() {
        let pool = pool(8, 0);
        let [ours, theirs] = [1, 2].map(|_| pool.add_tenant().unwrap());
        let [a, b] = [1, 2].map(|prompt| chain(prompt, 3));
        for (tenant, names) in [(ours, &a), (theirs, &b)] {
            let mut claimed = pool.claim_for(tenant, 3).unwrap();
            drop(claimed.register(names, Naming::default()).unwrap());
        }
        assert_eq!(pool.remove_tenant(ours).unwrap(), 3);
        assert_eq!((cached(&pool, &a), cached(&pool, &b)), (0, 3));
        checked(&pool);
    }
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
