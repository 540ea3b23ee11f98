//! Content on its way between tiers: operations on names see it, its block ids wait for the copy, and a
//! reader of the events never loses sight of it.

use crate::common::mirror::Mirror;
use crate::common::{Moved, One, OneClaimed, OneMove, Registration};
use crate::common::{
    cache, cache_secondary, checked, claim, displace, find, name, named, pool, priority,
    with_policy,
};
use kv_pool::{
    BlockHash, BlockId, BlockPool, Claimed, HandleError, Location, Naming, Pinned, PoolConfig,
    Priority, Tier, moves::Offload, policy::PolicyKind,
};

/// The names of content 1, and of content that follows it.
fn chain(blocks: u32) -> Vec<BlockHash> {
    let mut parent = BlockHash::ROOT;
    (0..blocks)
        .map(|block| {
            parent = BlockHash::chain(parent, &[1 + block]);
            parent
        })
        .collect()
}

#[test]
fn a_prefix_ends_before_its_first_block_that_is_on_its_way() {
    const BLOCKS: u32 = 24;
    let pool = pool(BLOCKS.into(), BLOCKS.into());
    let names = chain(BLOCKS);
    drop(pool.claim(names.len()).unwrap().register(&names, Naming::default()).unwrap());
    // The tail goes first. A lookup finds the first names by the index and guesses the next ones.
    let mut on_their_way = Vec::new();
    for found in (1..names.len()).rev() {
        // Found again, the head is evicted last of all.
        assert_eq!(pool.match_prefix(&names[..found]).len(), found);
        on_their_way.push(displace(&pool));
        assert_eq!(pool.match_prefix(&names).len(), found);
        checked(&pool);
    }
    on_their_way.into_iter().for_each(|(_, offload)| offload.commit());
    assert_eq!(pool.match_prefix(&names).len(), names.len());
}

/// Caches a chain in the primary tier, and has its first block evicted.
fn with_head_on_its_way(pool: &BlockPool, names: &[BlockHash]) -> (Claimed, BlockId) {
    let mut blocks = pool.claim(names.len()).unwrap();
    drop(blocks.register(names, Priority::DEFAULT).unwrap());
    let held = pool.match_prefix(names);
    let head = held.ids().next().unwrap();
    let tail: Vec<_> = (1..names.len()).map(|at| held.pin(at).unwrap()).collect();
    drop(held);
    let claimed = pool.claim(1).unwrap();
    assert_eq!(claimed.ids().next(), Some(head));
    pool.release(tail);
    (claimed, head)
}

fn logged(primary: u64, secondary: u64) -> (BlockPool, Mirror) {
    let config = PoolConfig { secondary_blocks: secondary, ..PoolConfig::primary_only(primary) };
    let pool = BlockPool::builder(&config).events(256).build().unwrap();
    let mirror = Mirror::of(&pool);
    (pool, mirror)
}

#[test]
fn removal_with_successors_begins_at_content_on_its_way() {
    let (pool, names) = (pool(3, 1), chain(3));
    let (mut claimed, _) = with_head_on_its_way(&pool, &names);
    let offload = claimed.take_offload().unwrap();
    assert_eq!(pool.remove_with_successors(names[0]), 3);
    checked(&pool);
    offload.commit();
    drop(claimed.register(&names[..1], Priority::DEFAULT).unwrap());
    assert_eq!(pool.match_prefix(&names).len(), 1, "a successor was found");
    checked(&pool);
}

#[test]
fn removal_reaches_successors_named_while_their_head_is_on_its_way() {
    let (pool, names) = (pool(3, 1), chain(3));
    let mut blocks = pool.claim(2).unwrap();
    let (mut claimed, _) = with_head_on_its_way(&pool, &names[..1]);
    let offload = claimed.take_offload().unwrap();
    drop(blocks.register(&names[1..], Naming::after(names[0])).unwrap());
    assert_eq!(pool.remove_with_successors(names[0]), 3);
    drop((offload, blocks));
    drop(claimed.register(&names[..1], Priority::DEFAULT).unwrap());
    assert_eq!(pool.match_prefix(&names).len(), 1, "a successor was found");
    checked(&pool);
}

/// Content that is computed again while an older copy is far, or on its way there, keeps what
/// follows it.
#[test]
fn content_computed_again_keeps_its_successors() {
    for arrived in [true, false] {
        let (pool, names) = (pool(2, 1), chain(2));
        let (mut claimed, _) = with_head_on_its_way(&pool, &names);
        let mut offload = claimed.take_offload();
        if arrived {
            offload.take().unwrap().commit();
        }
        drop(claimed.register(&names[..1], Priority::DEFAULT).unwrap());
        checked(&pool);
        assert_eq!(pool.remove_with_successors(names[0]), 2, "arrived: {arrived}");
        drop(offload);
        drop(pool.claim(1).unwrap().register(&names[..1], Priority::DEFAULT).unwrap());
        assert_eq!(pool.match_prefix(&names).len(), 1, "arrived: {arrived}");
        checked(&pool);
    }
}

#[test]
fn content_computed_again_on_its_way_has_its_block_ids_wait_for_the_copy() {
    for commits in [true, false] {
        // Computed again in the very block that it was evicted from, or in another.
        for elsewhere in [true, false] {
            let pool = pool(2, 2);
            let other = claim(&pool);
            drop(named(claim(&pool), 1, Priority::DEFAULT));
            let (evictor, offload) = displace(&pool);
            let (block, spare) = if elsewhere { (other, evictor) } else { (evictor, other) };
            let block_id = block.block_id();
            let pin = named(block, 1, Priority::DEFAULT);
            assert_eq!((pin.location().tier, pin.block_id()), (Tier::Primary, block_id));
            checked(&pool);
            drop((pin, spare));
            checked(&pool);
            // Neither end of the copy is anybody else's.
            let near = pool.claim(pool.claimable()).unwrap();
            assert!(
                near.ids().all(|block_id| block_id != offload.from()),
                "the copy reads the block id"
            );
            let empty = pool.stats().secondary.claimable() as usize;
            let far = pool.claim_in(Tier::Secondary, empty).unwrap();
            assert!(
                far.ids().all(|block_id| block_id != offload.to()),
                "the copy writes the block id"
            );
            drop((near, far));
            if commits {
                offload.commit()
            } else {
                drop(offload)
            }
            checked(&pool);
            let stats = pool.stats();
            assert_eq!((stats.primary.claimable(), stats.secondary.claimable()), (2, 2));
        }
    }
}

#[test]
fn two_offloads_of_one_name_end_in_any_order() {
    for newer_first in [true, false] {
        let pool = pool(2, 2);
        let kept = claim(&pool);
        drop(named(claim(&pool), 1, Priority::DEFAULT));
        let (block, first) = displace(&pool);
        drop(named(kept, 1, Priority::DEFAULT));
        let (again, second) = displace(&pool);
        assert_ne!(first.to(), second.to());
        checked(&pool);
        if newer_first {
            let to = second.to();
            second.commit();
            assert_eq!(find(&pool, 1).unwrap().block_id(), to);
            first.commit();
            assert_eq!(find(&pool, 1).unwrap().block_id(), to);
        } else {
            let to = second.to();
            first.commit();
            assert!(find(&pool, 1).is_none(), "an older copy came back");
            second.commit();
            assert_eq!(find(&pool, 1).unwrap().block_id(), to);
        }
        drop((block, again));
        checked(&pool);
    }
}

#[test]
fn a_block_id_that_an_offload_reads_waits_also_when_its_content_moves_down() {
    let pool = pool(1, 2);
    drop(named(claim(&pool), 1, Priority::DEFAULT));
    let (block, offload) = displace(&pool);
    let pin = named(block, 2, Priority::DEFAULT);
    let target = pool.claim_in(Tier::Secondary, 1).unwrap();
    let Moved::Moved(pin) = pool.begin_onboard(pin, target).unwrap().commit_one() else {
        panic!("nobody else had it pinned")
    };
    assert_eq!(pin.location().tier, Tier::Secondary);
    checked(&pool);
    assert!(pool.claim_one().is_err(), "block id {:?} is read by the copy", offload.from());
    offload.commit();
    checked(&pool);
    assert!(pool.claim_one().is_ok(), "nobody reads the block id");
}

#[test]
fn a_block_id_that_an_offload_reads_is_no_target_of_a_move() {
    let pool = pool(2, 2);
    let kept = claim(&pool);
    cache(&pool, 1, Priority::DEFAULT);
    let (other, offload) = displace(&pool);
    offload.commit();
    drop((kept, other));
    let far = pool.find_and_pin(name(1), Tier::Secondary).unwrap();
    cache(&pool, 2, Priority::DEFAULT);
    cache(&pool, 3, Priority::DEFAULT);
    let (target, offload) = displace(&pool);
    let refused = pool.begin_onboard(far, target).unwrap_err();
    assert_eq!(refused.reason, HandleError::TargetNotEmpty);
    offload.commit();
    let onboard = pool.begin_onboard(refused.pinned, refused.target).unwrap();
    assert!(matches!(onboard.commit_one(), Moved::Moved(_)));
    checked(&pool);
}

#[test]
fn a_far_block_id_that_is_read_waits_when_a_nearer_copy_takes_its_place() {
    let pool = pool(1, 1);
    cache_secondary(&pool, 1);
    let epoch = pool.begin_epoch();
    // Work of this epoch reads the far block id.
    drop(pool.find_and_pin(name(1), Tier::Secondary).unwrap());
    drop(named(claim(&pool), 1, Priority::DEFAULT));
    checked(&pool);
    let secondary = pool.stats().secondary;
    assert_eq!((secondary.retiring, secondary.claimable()), (1, 0));
    pool.complete_epoch(epoch).unwrap();
    assert_eq!(pool.stats().secondary.empty, 1);
    checked(&pool);
}

#[test]
fn content_on_its_way_is_neither_found_nor_lent() {
    let pool = pool(1, 1);
    cache(&pool, 1, Priority::DEFAULT);
    let (block, offload) = displace(&pool);
    for tier in [Tier::Primary, Tier::Secondary] {
        assert!(pool.find_and_pin(name(1), tier).is_none());
        assert!(pool.lend(&[name(1)], tier).is_none());
    }
    assert!(find(&pool, 1).is_none());
    drop(block);
    offload.commit();
    assert!(pool.lend(&[name(1)], Tier::Secondary).is_some());
}

#[test]
fn a_mirror_keeps_a_name_whose_recomputation_overtakes_its_offload() {
    for commits in [true, false] {
        let (pool, mut mirror) = logged(1, 1);
        drop(named(claim(&pool), 1, Priority::DEFAULT));
        let (block, offload) = displace(&pool);
        assert!(mirror.get(name(1)).is_some(), "it is to be found again");
        let pin = named(block, 1, priority(80));
        assert_eq!(mirror.get(name(1)), Some((pin.location(), priority(80))));
        if commits {
            offload.commit()
        } else {
            drop(offload)
        }
        assert_eq!(mirror.get(name(1)), Some((pin.location(), priority(80))));
    }
}

/// What a random program holds of a pool under a policy.
#[derive(Debug, Default)]
struct Hands {
    claimed: Vec<Claimed>,
    offloads: Vec<Offload>,
    pins: Vec<Pinned>,
}

/// SplitMix64, below a bound.
fn below(seed: &mut u64, bound: usize) -> usize {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed ^ (mixed >> 27)) >> 33) as usize % bound
}

fn pick<T>(from: &mut Vec<T>, seed: &mut u64) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(below(seed, from.len())))
}

impl Hands {
    fn act(&mut self, pool: &BlockPool, names: &[BlockHash], seed: &mut u64) {
        let at = below(seed, names.len());
        match below(seed, 9) {
            0 | 1 => self.claimed.extend(pool.claim_one()),
            2 => {
                let offload = self.claimed.iter_mut().find_map(Claimed::take_offload);
                self.offloads.extend(offload);
            }
            3 => match (pick(&mut self.offloads, seed), below(seed, 3)) {
                (Some(offload), 0 | 1) => offload.commit(),
                (given_up, _) => drop(given_up),
            },
            4 | 5 => {
                let Some(block) = pick(&mut self.claimed, seed) else { return };
                let naming = at
                    .checked_sub(1)
                    .map_or_else(Naming::default, |before| Naming::after(names[before]));
                match block.register_one(names[at], naming) {
                    Registration::New(pin) => self.pins.push(pin),
                    Registration::Duplicate(own) => self.claimed.push(own),
                }
            }
            6 => {
                drop(pick(&mut self.pins, seed));
                self.pins.extend(pool.match_prefix(&names[..=at]));
            }
            7 if below(seed, 3) == 0 => drop(pool.remove_with_successors(names[at])),
            7 => drop(self.pins.split_off(self.pins.len() / 2)),
            _ => self.move_one(pool, seed),
        }
    }

    fn move_one(&mut self, pool: &BlockPool, seed: &mut u64) {
        let Some(pin) = pick(&mut self.pins, seed) else { return };
        let to = if pin.location().tier == Tier::Primary { Tier::Secondary } else { Tier::Primary };
        let Ok(mut target) = pool.claim_in(to, 1) else { return };
        drop(target.take_offload());
        match pool.begin_onboard(pin, target).unwrap().commit_one() {
            Moved::Moved(pin) => self.pins.push(pin),
            Moved::Copied { copy, source } => {
                self.claimed.push(copy);
                self.pins.push(source);
            }
        }
    }
}

/// Whatever policy decides who is next, the pool stays whole and a mirror true.
#[test]
fn names_and_block_ids_keep_together_under_every_policy() {
    let names = chain(12);
    for (mut seed, kind) in (0..100).zip(PolicyKind::ALL.into_iter().cycle()) {
        let config = PoolConfig { secondary_blocks: 4, ..PoolConfig::primary_only(6) };
        let mut builder = BlockPool::builder(&config).events(256);
        for tier in [Tier::Primary, Tier::Secondary] {
            builder = with_policy(builder, tier, kind, 10);
        }
        let pool = builder.build().unwrap();
        let (mut hands, mut mirror) = (Hands::default(), Mirror::of(&pool));
        for _ in 0..400 {
            hands.act(&pool, &names, &mut seed);
            checked(&pool);
            for view in &pool.snapshot().blocks {
                if let Some(name) = view.hash {
                    assert_eq!(mirror.get(name), Some((view.location, view.priority)), "{kind:?}");
                }
            }
        }
        drop(hands);
        checked(&pool);
        let stats = pool.stats();
        for tier in [stats.primary, stats.secondary] {
            assert_eq!(tier.claimable(), tier.blocks, "{kind:?}");
        }
    }
}

#[test]
fn a_mirror_that_begins_at_a_snapshot_knows_what_is_on_its_way() {
    for committed in [true, false] {
        let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(2) };
        let pool = BlockPool::builder(&config).events(64).build().unwrap();
        cache(&pool, 1, priority(50));
        cache(&pool, 2, priority(60));
        let from = pool.find_and_pin(name(1), Tier::Primary).unwrap().location();
        let (block, offload) = displace(&pool);
        let to = Location { tier: Tier::Secondary, id: offload.to() };
        let mut mirror = Mirror::from_now(&pool);
        assert_eq!(mirror.get(name(1)), Some((from, priority(50))));
        if committed {
            offload.commit();
        } else {
            drop(offload);
        }
        // The mirror checks that each event follows from what it knows.
        assert_eq!(mirror.get(name(1)), committed.then_some((to, priority(50))));
        assert_eq!(mirror.names, Mirror::from_now(&pool).names);
        drop(block);
        checked(&pool);
    }
}

/// Only a nearer copy takes a name over: what is cached nearer, or as near, stays the one that lookups find.
#[test]
fn a_copy_that_is_no_nearer_is_a_duplicate() {
    for tier in [Tier::Secondary, Tier::Third] {
        let config = PoolConfig {
            secondary_blocks: 2,
            further_blocks: [1, 0],
            ..PoolConfig::primary_only(1)
        };
        let pool = BlockPool::new(&config).unwrap();
        cache_secondary(&pool, 1);
        let known = find(&pool, 1).unwrap().location();
        let mut blocks = pool.claim_in(tier, 1).unwrap();
        let own = blocks.ids().next();
        let pins = blocks.register(&[name(1)], Priority::DEFAULT).unwrap();
        assert_eq!(find(&pool, 1).unwrap().location(), known);
        // The list gives its block back where the other is as near, and keeps it without a name if not.
        let block_id = if tier == Tier::Secondary { Some(known.id) } else { own };
        assert_eq!((pins.ids().next(), pins.locations().next().unwrap().tier), (block_id, tier));
        drop(pins);
        checked(&pool);
    }
}

#[test]
fn content_on_its_way_is_no_duplicate() {
    let pool = pool(1, 2);
    cache(&pool, 1, Priority::DEFAULT);
    let (block, offload) = displace(&pool);
    // As near as the copy will be, and there already.
    let own = pool.claim_in(Tier::Secondary, 1).unwrap();
    let block_id = own.block_id();
    let pin = named(own, 1, Priority::DEFAULT);
    assert_eq!(pin.block_id(), block_id);
    checked(&pool);
    offload.commit();
    assert_eq!(find(&pool, 1).unwrap().block_id(), block_id);
    drop((pin, block));
    checked(&pool);
    assert_eq!(pool.stats().secondary.claimable(), 2);
}
