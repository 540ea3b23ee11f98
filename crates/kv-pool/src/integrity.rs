//! The invariants of the pool, written down as a check.

use std::collections::HashMap;

use crate::blocks::{BlockPhase, Flag};
use crate::list::List;
use crate::state::PoolState;
use crate::{IntegrityError, RecordId, Tier};

pub(crate) fn check(state: &PoolState) -> Result<(), IntegrityError> {
    check_places(state)?;
    check_copies(state)?;
    check_counts(state)?;
    check_references(state)?;
    check_index(state)?;
    check_chains(state)?;
    check_block_ids(state)?;
    check_budgets(state)?;
    if !state.watch.expiries_are_consistent() {
        return Err(IntegrityError::Expiries);
    }
    match state.counters.misuses {
        0 => Ok(()),
        count => Err(IntegrityError::Misuse { count }),
    }
}

/// Every block is in the list that its place names, once, and in no other.
fn check_places(state: &PoolState) -> Result<(), IntegrityError> {
    let blocks = &state.blocks;
    let mut listed = vec![false; blocks.len()];
    // Stops at a block that is met twice, so a torn list that has become a ring ends as well.
    let mut meet = |id: RecordId, place: BlockPhase, tier: Option<Tier>| {
        let twice = std::mem::replace(&mut listed[id.index()], true);
        let elsewhere = tier.is_some_and(|tier| tier != blocks.tier(id));
        if twice || elsewhere || blocks.place(id) != place {
            return Err(misplaced(id, blocks.place(id)));
        }
        Ok(())
    };
    let mut meet_all =
        |list: &List, place, tier| list.iter(blocks).try_for_each(|id| meet(id, place, tier));
    meet_all(&state.retiring, BlockPhase::Retiring, None)?;
    for tier in Tier::ALL {
        meet_all(&state.tier(tier).shadowed, BlockPhase::Shadowed, Some(tier))?;
    }
    for tier in Tier::ALL {
        for (id, class) in state.tier(tier).queues.iter(blocks) {
            let expected = blocks.is(id, Flag::NAMED).then(|| blocks.priority(id));
            meet(id, BlockPhase::Queued, Some(tier))?;
            if class != expected || blocks.is(id, Flag::PASSED) {
                return Err(misplaced(id, blocks.place(id)));
            }
        }
        for (id, class) in state.passed_over(tier) {
            meet(id, BlockPhase::Queued, Some(tier))?;
            if class != Some(blocks.priority(id)) || !blocks.is(id, Flag::PASSED) {
                return Err(misplaced(id, blocks.place(id)));
            }
        }
    }
    for (id, listed) in blocks.ids().zip(listed) {
        let place = blocks.place(id);
        let in_list =
            matches!(place, BlockPhase::Queued | BlockPhase::Shadowed | BlockPhase::Retiring);
        // A policy's order is its own.
        let by_policy = place == BlockPhase::Queued
            && blocks.is(id, Flag::NAMED)
            && !blocks.is(id, Flag::PASSED)
            && state.watch.policies[blocks.tier(id).index()].is_some();
        if listed != (in_list && !by_policy) {
            return Err(misplaced(id, place));
        }
    }
    for tier in Tier::ALL {
        let Some(held_back) = &state.tier(tier).held_back else { continue };
        let mut left =
            state.ordered_by_policy(tier).filter(|&id| state.facts(id).has_children).count();
        if left != held_back.len {
            return Err(IntegrityError::Count { tier, counted: left, recorded: held_back.len });
        }
        for id in held_back.list.iter(blocks) {
            let right = blocks.is(id, Flag::HELD_BACK) && blocks.tier(id) == tier;
            let next = left.checked_sub(1).filter(|_| right && state.facts(id).has_children);
            left = next.ok_or_else(|| misplaced(id, blocks.place(id)))?;
        }
    }
    Ok(())
}

/// Every copy under way has a block for the id that it writes, and one for the id that it reads.
fn check_copies(state: &PoolState) -> Result<(), IntegrityError> {
    let blocks = &state.blocks;
    for id in blocks.ids() {
        let (place, copying) = (blocks.place(id), blocks.is(id, Flag::COPYING));
        let pairs = place == BlockPhase::Moving || copying;
        // Each is one of a pair, so what is in a list, and has links, is not.
        let listed =
            matches!(place, BlockPhase::Queued | BlockPhase::Shadowed | BlockPhase::Retiring);
        let (draining, other) = (place == BlockPhase::Draining, blocks.partner(id));
        let paired = pairs
            && !listed
            && other.index() < blocks.len()
            && blocks.partner(other) == id
            && blocks.is(other, Flag::COPYING) != copying
            && (blocks.place(other) == BlockPhase::Moving) == copying;
        if pairs != paired || draining && !copying {
            return Err(misplaced(id, place));
        }
    }
    for &id in state.stand_ins.values() {
        if blocks.place(id) != BlockPhase::Moving || blocks.bears_a_name(id) {
            return Err(misplaced(id, blocks.place(id)));
        }
    }
    Ok(())
}

/// The counts are those of the blocks, and the lists are as long as they say. They are known to end.
fn check_counts(state: &PoolState) -> Result<(), IntegrityError> {
    let mut counts = [[0_u32; BlockPhase::COUNT]; Tier::COUNT];
    for id in state.blocks.ids() {
        counts[state.blocks.tier(id).index()][state.blocks.place(id) as usize] += 1;
    }
    for tier in Tier::ALL {
        let own = state.tier(tier);
        for (place, &counted) in counts[tier.index()].iter().enumerate() {
            let recorded = own.counts[place];
            if place != BlockPhase::Absent as usize && counted != recorded {
                let (counted, recorded) = (counted as usize, recorded as usize);
                return Err(IntegrityError::Count { tier, counted, recorded });
            }
        }
        let (counted, recorded) = (own.queues.iter(&state.blocks).count(), own.queues.len());
        let by_policy = match &state.watch.policies[tier.index()] {
            None => 0,
            Some(policy) => match policy.len() {
                Some(len) => len,
                None => state.ordered_by_policy(tier).count(),
            },
        };
        let queued = recorded + by_policy + state.passed_over(tier).count();
        if counted != recorded || queued != own.count(BlockPhase::Queued) {
            return Err(IntegrityError::Count { tier, counted, recorded });
        }
        let cached = own.queues.iter(&state.blocks).filter(|(_, class)| class.is_some()).count();
        let counted = own.queues.len() - own.queues.empty();
        if cached != counted {
            return Err(IntegrityError::Cached { tier, counted, cached });
        }
    }
    Ok(())
}

fn misplaced(block: RecordId, place: BlockPhase) -> IntegrityError {
    IntegrityError::Phase { block, place: format!("{place:?}") }
}

/// A block is referenced exactly if it is pinned.
fn check_references(state: &PoolState) -> Result<(), IntegrityError> {
    for block in state.blocks.ids() {
        let place = state.blocks.place(block);
        let references = match place {
            BlockPhase::Pinned | BlockPhase::Claimed | BlockPhase::Draining => {
                state.blocks.references(block)
            }
            // The word is a link.
            _ => continue,
        };
        if (references > 0) != (place == BlockPhase::Pinned) {
            return Err(IntegrityError::References {
                block,
                references,
                place: format!("{place:?}"),
            });
        }
    }
    Ok(())
}

/// Every name leads to the block that bears it. Only resting, pinned and moving blocks bear one, of
/// which lookups do not find the moving ones.
fn check_index(state: &PoolState) -> Result<(), IntegrityError> {
    let blocks = &state.blocks;
    for id in state.index.iter() {
        if !blocks.bears_a_name(id) {
            return Err(IntegrityError::Index { hash: blocks.hash(id) });
        }
    }
    let mut named = 0;
    for id in blocks.ids() {
        let (place, hash) = (blocks.place(id), blocks.hash(id));
        if !blocks.bears_a_name(id) {
            continue;
        }
        named += 1;
        let nameless = matches!(place, BlockPhase::Absent | BlockPhase::Claimed);
        // One or the other, never both.
        let expected = place == BlockPhase::Moving;
        let wrong =
            blocks.is(id, Flag::EXPECTED) != expected || blocks.is(id, Flag::NAMED) == expected;
        if nameless || wrong || state.bearer(hash) != Some(id) {
            return Err(IntegrityError::Index { hash });
        }
    }
    if state.index.iter().count() != named || state.index.len() != named {
        return Err(IntegrityError::Names { named, indexed: state.index.len() });
    }
    Ok(())
}

/// Every block counts the blocks that follow it, and what was set aside for them has some.
fn check_chains(state: &PoolState) -> Result<(), IntegrityError> {
    let blocks = &state.blocks;
    let mut children = vec![0_u32; blocks.len()];
    for id in blocks.ids() {
        if let Some(parent) = blocks.parent(id) {
            children[parent.index()] += 1;
        }
    }
    for (block, counted) in blocks.ids().zip(children) {
        let recorded = blocks.children(block);
        let idle = blocks.place(block) == BlockPhase::Shadowed && recorded == 0;
        let leftover = blocks.is(block, Flag::MARK);
        if counted != recorded || idle || leftover {
            return Err(IntegrityError::Children { block, recorded, counted });
        }
    }
    let counted = blocks.ids().filter(|&id| blocks.is_orphan(id)).count();
    let recorded = blocks.orphans();
    if counted != recorded {
        return Err(IntegrityError::Orphans { recorded, counted });
    }
    Ok(())
}

/// Beyond its tier's budget, a block is in use or has left, and what has left lies there.
fn check_budgets(state: &PoolState) -> Result<(), IntegrityError> {
    let mut gone = [0; Tier::COUNT];
    for block in state.appeared() {
        let (place, location) = (state.blocks.place(block), state.blocks.location(block));
        let (beyond, tier) = (state.is_beyond(block), location.tier);
        let absent = place == BlockPhase::Absent;
        gone[tier.index()] += usize::from(absent);
        if beyond && state.is_unused(block) || absent && !beyond {
            let (place, id) = (format!("{place:?}"), location.id.index());
            let budget = state.tier(tier).budget;
            return Err(IntegrityError::Budget { block, place, tier, id, budget });
        }
    }
    for tier in Tier::ALL {
        let (counted, recorded) = (gone[tier.index()], state.tier(tier).count(BlockPhase::Absent));
        if counted != recorded {
            return Err(IntegrityError::Count { tier, counted, recorded });
        }
    }
    Ok(())
}

/// No block id belongs to two blocks.
fn check_block_ids(state: &PoolState) -> Result<(), IntegrityError> {
    let mut owners = HashMap::new();
    for id in state.appeared() {
        let location = state.blocks.location(id);
        let (tier, block_id) = (location.tier, location.id.index());
        let noted = state.tier(tier).record(location.id).unwrap_or(id);
        if owners.insert((tier, block_id), ()).is_some() || noted != id {
            return Err(IntegrityError::SharedId { tier, id: block_id });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Claim, Named};
    use crate::{BlockHash, BlockId, Location, Naming, PoolConfig};

    const HASH: BlockHash = BlockHash::from_u128(7);

    /// Block 0 is pinned and named, 1 follows it and is cached, 2 and 3 are empty; 4 is secondary.
    fn state() -> PoolState {
        let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(4) };
        let mut state = PoolState::plain(&config).unwrap();
        let mut claims: Vec<Claim> = Vec::new();
        state.claim(Tier::Primary, crate::tenants::Tenant::NOBODY, 4, &mut claims);
        let (first, second) = (RecordId(0), RecordId(1));
        assert_eq!(state.register(first, HASH, None, &Naming::default()), Named::New(first));
        let next = BlockHash::from_u128(8);
        let naming = Naming::after(HASH);
        assert_eq!(state.register(second, next, Some(first), &naming), Named::New(second));
        state.unpin(RecordId(1));
        state.release_claimed(RecordId(3));
        state.release_claimed(RecordId(2));
        assert_eq!(check(&state), Ok(()));
        state
    }

    fn damaged(damage: impl FnOnce(&mut PoolState)) -> IntegrityError {
        let mut state = state();
        damage(&mut state);
        check(&state).unwrap_err()
    }

    #[test]
    fn a_block_missing_from_its_list_or_listed_twice_is_found() {
        let missing = damaged(|state| state.put(RecordId(1), BlockPhase::Claimed));
        let place = "Claimed".to_owned();
        assert_eq!(missing, IntegrityError::Phase { block: RecordId(1), place });
        // Into a ring: a check that did not stop at the second meeting would never end.
        let ring = damaged(|state| {
            state.tiers[0].queues.insert_first(&mut state.blocks, RecordId(3), None);
        });
        assert!(matches!(ring, IntegrityError::Phase { block: RecordId(3), .. }), "{ring}");
        let lost = damaged(|state| {
            state.tiers[0].queues.pop(&mut state.blocks);
        });
        assert!(matches!(lost, IntegrityError::Phase { block: RecordId(2), .. }), "{lost}");
        let unlisted = damaged(|state| {
            state.tiers[0].queues.pop(&mut state.blocks);
            state.retiring.push_back(&mut state.blocks, RecordId(2));
        });
        assert!(matches!(unlisted, IntegrityError::Phase { block: RecordId(2), .. }), "{unlisted}");
    }

    #[test]
    fn wrong_counts_are_found() {
        let count = damaged(|state| state.tiers[0].counts[BlockPhase::Retiring as usize] += 1);
        assert_eq!(count, IntegrityError::Count { tier: Tier::Primary, counted: 0, recorded: 1 });
        let references = damaged(|state| state.blocks.set_references(RecordId(0), 0));
        assert!(matches!(references, IntegrityError::References { references: 0, .. }));
        let misuse = damaged(|state| state.unpin(RecordId(1)));
        assert_eq!(misuse, IntegrityError::Misuse { count: 1 });
        let children = damaged(|state| state.blocks.set_children(RecordId(0), 2));
        let block = RecordId(0);
        assert_eq!(children, IntegrityError::Children { block, recorded: 2, counted: 1 });
    }

    #[test]
    fn an_index_that_disagrees_with_the_blocks_is_found() {
        let index = IntegrityError::Index { hash: HASH };
        assert_eq!(damaged(|state| state.blocks.clear(RecordId(0), Flag::NAMED)), index);
        assert_eq!(damaged(|state| state.index.forget_all()), index);
        let unexpected = damaged(|state| state.blocks.set(RecordId(0), Flag::EXPECTED));
        assert_eq!(unexpected, index);
    }

    /// Block 1 is on its way to the secondary tier, and 4, which is claimed, has the block id that it left.
    fn moving() -> PoolState {
        let mut state = state();
        for _ in 0..3 {
            state.claim_one(Tier::Primary, crate::tenants::Tenant::NOBODY).unwrap();
        }
        assert_eq!(state.blocks.place(RecordId(1)), BlockPhase::Moving);
        assert_eq!(check(&state), Ok(()));
        state
    }

    #[test]
    fn a_copy_that_no_block_id_waits_for_is_found() {
        let damages: [fn(&mut PoolState); 5] = [
            |state| state.blocks.part(RecordId(1), RecordId(4)),
            |state| state.blocks.clear(RecordId(4), Flag::COPYING),
            |state| state.blocks.pair(RecordId(1), RecordId(2)),
            |state| state.blocks.set_after(RecordId(4), u32::MAX),
            |state| _ = state.stand_ins.insert(BlockId(0), RecordId(1)),
        ];
        for (at, damage) in damages.into_iter().enumerate() {
            let mut state = moving();
            damage(&mut state);
            let error = check(&state).unwrap_err();
            assert!(matches!(error, IntegrityError::Phase { .. }), "{at}: {error}");
        }
    }

    #[test]
    fn a_name_on_its_way_that_the_index_has_lost_is_found() {
        let mut state = moving();
        state.index.remove(&state.blocks, RecordId(1));
        let hash = BlockHash::from_u128(8);
        assert_eq!(check(&state), Err(IntegrityError::Index { hash }));
    }

    #[test]
    fn a_block_id_of_two_blocks_is_found() {
        let location = Location { tier: Tier::Primary, id: BlockId(1) };
        let shared = damaged(|state| state.blocks.set_location(RecordId(0), location));
        assert_eq!(shared, IntegrityError::SharedId { tier: Tier::Primary, id: 1 });
    }
}
