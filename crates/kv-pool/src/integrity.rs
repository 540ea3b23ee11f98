//! The invariants of the pool, written down as a check.

use std::collections::HashMap;

use crate::blocks::{BlockPhase, Flag};
use crate::eviction::EMPTY;
use crate::list::List;
use crate::state::PoolState;
use crate::{BlockHash, IntegrityError, RecordId, Tier};

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
        return broken("the times at which priorities end are in the wrong order".to_owned());
    }
    match state.counters.misuses {
        0 => Ok(()),
        count => broken(format!("{count} releases of blocks that were not held")),
    }
}

fn broken(rule: String) -> Result<(), IntegrityError> {
    Err(IntegrityError(rule))
}

/// A block is in a list that its place does not name, or missing from the one it names.
fn misplaced(block: RecordId, place: BlockPhase) -> IntegrityError {
    IntegrityError(format!("block {} is {place:?}, but the lists say otherwise", block.index()))
}

/// A list holds more or fewer blocks than its count says.
fn miscounted(tier: Tier, counted: usize, recorded: usize) -> Result<(), IntegrityError> {
    broken(format!(
        "a list of the {tier:?} tier holds {counted} blocks, but its count says {recorded}"
    ))
}

fn misindexed(hash: BlockHash) -> Result<(), IntegrityError> {
    broken(format!("the index and the blocks disagree about {hash:?}"))
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
            meet(id, BlockPhase::Queued, Some(tier))?;
            if class != blocks.class(id) || blocks.is(id, Flag::PASSED) {
                return Err(misplaced(id, blocks.place(id)));
            }
        }
        for (id, class) in state.passed_over(tier) {
            meet(id, BlockPhase::Queued, Some(tier))?;
            if class != blocks.class(id) || !blocks.is(id, Flag::PASSED) {
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
            return miscounted(tier, left, held_back.len);
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
                return miscounted(tier, counted as usize, recorded as usize);
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
            return miscounted(tier, counted, recorded);
        }
        let cached = own.queues.iter(&state.blocks).filter(|(_, class)| *class != EMPTY).count();
        let counted = own.queues.len() - own.queues.empty();
        if cached != counted {
            return broken(format!(
                "{cached} unused blocks of the {tier:?} tier have content, {counted} were counted"
            ));
        }
    }
    Ok(())
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
            return broken(format!(
                "block {} has {references} references and is {place:?}",
                block.index()
            ));
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
            return misindexed(blocks.hash(id));
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
            return misindexed(hash);
        }
    }
    let indexed = state.index.len();
    if state.index.iter().count() != named || indexed != named {
        return broken(format!("{named} blocks have names, and the index has {indexed}"));
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
            let block = block.index();
            return broken(format!(
                "block {block} counts {recorded} successors, and has {counted}"
            ));
        }
    }
    let counted = blocks.ids().filter(|&id| blocks.is_orphan(id)).count();
    let recorded = blocks.orphans();
    if counted != recorded {
        return broken(format!(
            "{counted} blocks have lost the one that they followed, {recorded} were counted"
        ));
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
            let (block, id, budget) = (block.index(), location.id.index(), state.tier(tier).budget);
            return broken(format!(
                "block {block} is {place:?} at block id {id} of the {tier:?} tier, whose budget is {budget}"
            ));
        }
    }
    for tier in Tier::ALL {
        let (counted, recorded) = (gone[tier.index()], state.tier(tier).count(BlockPhase::Absent));
        if counted != recorded {
            return miscounted(tier, counted, recorded);
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
            return broken(format!(
                "block id {block_id} of the {tier:?} tier belongs to two records"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Claim, Named};
    use crate::tenants::Tenant;
    use crate::{BlockId, Location, Naming, PoolConfig};

    const FIRST: RecordId = RecordId(0);
    const SECOND: RecordId = RecordId(1);

    /// Block 0 is pinned and named, 1 follows it and is cached, 2 and 3 are empty; 4 is secondary.
    fn state() -> PoolState {
        let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(4) };
        let mut state = PoolState::plain(&config).unwrap();
        let mut claims: Vec<Claim> = Vec::new();
        state.claim(Tier::Primary, Tenant::NOBODY, 4, &mut claims);
        let [hash, next] = [7, 8].map(BlockHash::from_u128);
        assert_eq!(state.register(FIRST, hash, None, &Naming::default()), Named::New(FIRST));
        let naming = Naming::after(hash);
        assert_eq!(state.register(SECOND, next, Some(FIRST), &naming), Named::New(SECOND));
        state.unpin(SECOND);
        state.release_claimed(RecordId(3));
        state.release_claimed(RecordId(2));
        state
    }

    /// Block 1 is on its way to the secondary tier, and 4, which is claimed, has the block id that it left.
    fn moving() -> PoolState {
        let mut state = state();
        for _ in 0..3 {
            state.claim_one(Tier::Primary, Tenant::NOBODY).unwrap();
        }
        assert_eq!(state.blocks.place(SECOND), BlockPhase::Moving);
        state
    }

    /// What is done to a state, and what the check then says.
    type Damage = (fn(&mut PoolState), &'static str);

    fn each_is_found(whole: fn() -> PoolState, damages: &[Damage]) {
        assert_eq!(check(&whole()), Ok(()));
        for (at, (damage, says)) in damages.iter().enumerate() {
            let mut state = whole();
            damage(&mut state);
            let error = check(&state).unwrap_err().to_string();
            assert!(error.contains(says), "damage {at}: {error}");
        }
    }

    #[test]
    fn whatever_is_wrong_is_found() {
        each_is_found(
            state,
            &[
                (|state| state.put(SECOND, BlockPhase::Claimed), "block 1 is Claimed"),
                // Into a ring: a check that did not stop at the second meeting would never end.
                (
                    |state| {
                        let queues = &mut state.tiers[0].queues;
                        queues.push_front(&mut state.blocks, RecordId(3), EMPTY);
                    },
                    "block 3 is Queued",
                ),
                (|state| _ = state.tiers[0].queues.pop(&mut state.blocks), "block 2 is Queued"),
                (
                    |state| {
                        state.tiers[0].queues.pop(&mut state.blocks);
                        state.retiring.push_back(&mut state.blocks, RecordId(2));
                    },
                    "block 2 is Queued",
                ),
                (|state| state.tiers[0].counts[BlockPhase::Retiring as usize] += 1, "count says 1"),
                (|state| state.blocks.set_references(FIRST, 0), "has 0 references"),
                (|state| state.unpin(SECOND), "1 releases of blocks that were not held"),
                (|state| state.blocks.set_children(FIRST, 2), "counts 2 successors, and has 1"),
                (|state| state.blocks.clear(FIRST, Flag::NAMED), "disagree"),
                (|state| state.index.forget_all(), "disagree"),
                (|state| state.blocks.set(FIRST, Flag::EXPECTED), "disagree"),
                (
                    |state| {
                        let location = Location { tier: Tier::Primary, id: BlockId(1) };
                        state.blocks.set_location(FIRST, location);
                    },
                    "belongs to two records",
                ),
            ],
        );
    }

    #[test]
    fn a_copy_that_no_block_id_waits_for_is_found() {
        each_is_found(
            moving,
            &[
                (|state| state.blocks.part(SECOND, RecordId(4)), "the lists say otherwise"),
                (|state| state.blocks.clear(RecordId(4), Flag::COPYING), "the lists say otherwise"),
                (|state| state.blocks.pair(SECOND, RecordId(2)), "the lists say otherwise"),
                (|state| state.blocks.set_after(RecordId(4), u32::MAX), "the lists say otherwise"),
                (|state| _ = state.stand_ins.insert(BlockId(0), SECOND), "the lists say otherwise"),
                (|state| state.index.remove(&state.blocks, SECOND), "disagree"),
            ],
        );
    }
}
