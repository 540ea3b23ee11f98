//! Groups with blocks of unequal sizes and numbers: what is checked, counted and bounded is each group's own.

use std::num::NonZeroU32;

use kv_plane::tier::{Direction, Transfer};

use crate::prelude::*;

const SECOND: GroupId = GroupId(1);

/// Blocks of eight tokens, and of four.
fn shapes() -> [KvShape; 2] {
    [shape(2, 32, 8), shape(1, 32, 4)]
}

/// Two groups that keep all, with so many host blocks, and a tier below.
fn unequal(host: [u32; 2]) -> KvCacheOptions {
    let mut tiers = LowerTiers::new(b"a model");
    tiers.push(|| Box::new(MemoryTier::new(MemoryTierOptions::default())));
    let [first, second] = shapes();
    let mut options = KvCacheOptions { tiers, ..options(first, 8, host[0]) };
    options.groups.push(group(GroupKind::Full, second, 16, host[1]));
    options
}

#[test]
fn a_plan_may_name_the_host_blocks_of_each_group_and_no_others() {
    for (host, group) in [([2, 8], SECOND), ([8, 2], SECOND), ([8, 2], GroupId(0))] {
        let machine = Machine::new(1, 1, shapes()[0]);
        let mut worker = machine.rig.worker(unequal(host));
        worker.grow_to(8).unwrap();
        let blocks = u64::from(host[usize::from(group.0)]);
        let store = |step, id: u64| {
            let blocks = vec![(BlockHash::from_u128(7), BlockId::new(id as u32).unwrap())];
            let (tier, direction) = (Tier::Third, Direction::Store);
            let transfer = Transfer { ticket: TicketId(step), tier, group, direction, blocks };
            StepPlan { step, after: step - 1, transfers: vec![transfer], ..StepPlan::default() }
        };
        let beyond = worker.carry_out(&store(1, blocks), |_, _| Ok(())).unwrap_err();
        let StepError::Plan(PlanError::Block { tier, id, blocks: there, .. }) = beyond else {
            panic!("{beyond}")
        };
        assert_eq!((tier, id.index() as u64, there), (Tier::Secondary, blocks, blocks));
        worker.carry_out(&store(1, blocks - 1), |_, _| Ok(())).unwrap();
        worker.finish(Outcome::Done).unwrap();
        assert_eq!(worker.wait().unwrap(), Some((1, Outcome::Done)));
        worker.close().unwrap();
        machine.assert_clean();
    }
}

fn idle(cache: &mut KvCache) {
    for _ in 0..8 {
        one_step(cache, &mut []);
    }
}

/// A sequence with these ids, computed.
fn computed(cache: &mut KvCache, ids: Vec<u32>) -> Sequence {
    let mut sequence = admitted(cache, Request::new(ids), 64);
    one_step(cache, &mut [&mut sequence]);
    sequence
}

#[test]
fn bytes_that_tiers_store_are_those_of_each_groups_blocks() {
    let machine = Machine::new(1, 1, shapes()[0]);
    let mut cache = machine.rig.cache(unequal([8, 16]));
    let sequence = computed(&mut cache, (0..16).collect());
    idle(&mut cache);
    assert_eq!(cache.manager().lower_stats().stored_blocks, [2 + 4, 0]);
    let [first, second] = shapes().map(|shape| shape.block_bytes());
    let ways = cache.stats().ways;
    assert_eq!((ways.stored, ways.loaded), ([2 * first + 4 * second, 0], [0, 0]));
    drop(sequence);
    // Others take its place on the device and in host memory, and it is loaded again.
    for other in 1..5 {
        drop(computed(&mut cache, (other * 100..other * 100 + 64).collect()));
        idle(&mut cache);
    }
    let mut queue = VecDeque::from([Request::new((0..17).collect())]);
    let loaded = (0..20).find_map(|_| {
        idle(&mut cache);
        cache.admit(&mut queue, 64).unwrap().admitted.pop()
    });
    assert_eq!(loaded.unwrap().1.cached_tokens(), 16);
    let loaded = |id| cache.manager().lower_blocks(GroupId(id)).unwrap().loaded[0];
    let [of_first, of_second] = [0, 1].map(loaded);
    assert!(of_first > 0 && of_second > of_first, "{of_first} and {of_second}");
    assert_eq!(cache.stats().ways.loaded, [of_first * first + of_second * second, 0]);
    cache.close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_budget_of_a_tier_below_host_memory_is_refused_and_means_no_other_tier() {
    let machine = Machine::new(1, 1, shapes()[0]);
    let mut cache = machine.rig.cache(unequal([8, 16]));
    for tier in [Tier::Third, Tier::Fourth] {
        let refused = cache.set_budget(GroupId(0), tier, 1).unwrap_err().to_string();
        assert!(refused.contains("more than the 0"), "{refused}");
        // It has none, so it keeps none.
        cache.set_budget(GroupId(0), tier, 0).unwrap();
        idle(&mut cache);
        let host = cache.manager().pool(GroupId(0)).unwrap().stats().secondary;
        assert_eq!((cache.stats().host_blocks, host.empty), (8, 8));
    }
    cache.close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_hint_maps_memory_for_the_blocks_that_its_names_are_of() {
    let machine = Machine::new(1, 1, shapes()[0]);
    let mut cache = machine.rig.cache(unequal([8, 16]));
    let ids: Vec<u32> = (0..64).collect();
    let unit = NonZeroU32::new(shapes()[1].block_tokens()).unwrap();
    let names: Vec<_> = BlockHasher::FAST.prefix(BlockHash::ROOT, &ids, unit).collect();
    assert_eq!(cache.prefetch(&names).unwrap(), 0);
    assert_eq!(cache.stats().ready_blocks, 0, "nobody has it");
    drop(computed(&mut cache, ids));
    cache.set_budget(GroupId(0), Tier::Primary, 0).unwrap();
    idle(&mut cache);
    let stats = cache.manager().pool(GroupId(0)).unwrap().stats();
    assert_eq!((stats.secondary.cached, cache.stats().ready_blocks), (8, 0), "{stats:?}");
    cache.set_budget(GroupId(0), Tier::Primary, 8).unwrap();
    assert_eq!(cache.prefetch(&names[..8]).unwrap(), 4);
    assert_eq!(cache.stats().ready_blocks, 4, "of eight tokens each");
    cache.close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_request_that_no_row_has_room_for_maps_no_memory_however_long_it_is() {
    let one = shape(4, 128, 1);
    let machine = Machine::new(1, 1, one);
    let mut options = unequal([8, 16]);
    options.groups.iter_mut().for_each(|group| group.shape = one);
    let most = u64::from(options.groups[0].blocks_per_sequence_max);
    let mut cache = machine.rig.cache(options);
    let there = cache.manager().formats();
    for tokens in [most + 1, u64::MAX - 1] {
        let request = || Request::named(tokens, Vec::new());
        let mut queue = VecDeque::from([request(), request(), request()]);
        let admission = cache.admit(&mut queue, u64::MAX).unwrap();
        assert_eq!((admission.refused.len(), queue.len()), (3, 0), "{admission:?}");
        let (answer, _) = cache.adopt(&mut request(), 1, &there).unwrap();
        assert!(matches!(answer, Answer::Refused(_)), "{answer:?}");
    }
    assert_eq!(cache.stats().ready_blocks, 0);
    // A sequence that is not suspended needs no room to be resumed.
    let mut sequence = computed(&mut cache, (0..3).collect());
    assert_eq!(cache.stats().ready_blocks, 4);
    cache.resume(&mut sequence).unwrap_err();
    assert_eq!(cache.stats().ready_blocks, 4);
    drop(sequence);
    cache.close().unwrap();
    machine.assert_clean();
}
