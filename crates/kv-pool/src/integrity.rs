//! The invariants of the pool, written down as a check.

use std::collections::HashMap;

use crate::state::{Place, State};
use crate::{BlockId, IntegrityError, Tier};

/// Released blocks of `tier` that cannot be claimed yet. Counts the list.
pub(crate) fn retiring(state: &State, tier: Tier) -> usize {
    let list = state.retiring.iter(&state.links);
    list.filter(|id| state.blocks[id.index()].location.tier == tier).count()
}

pub(crate) fn check(state: &State) -> Result<(), IntegrityError> {
    check_places(state)?;
    check_references(state)?;
    check_index(state)?;
    check_slots(state)?;
    match state.counters.misuses {
        0 => Ok(()),
        count => Err(IntegrityError::Misuse { count }),
    }
}

/// Every block is in the list that its place names, once, and in no other.
fn check_places(state: &State) -> Result<(), IntegrityError> {
    let mut listed: HashMap<BlockId, Place> = HashMap::new();
    let mut lists = Vec::new();
    for tier in Tier::ALL {
        for (id, priority) in state.queues[tier.index()].iter(&state.links) {
            lists.push((id, Place::Queued(priority), Some(tier)));
        }
    }
    for id in state.retiring.iter(&state.links) {
        lists.push((id, state.blocks[id.index()].place, None));
    }
    for (id, place, tier) in lists {
        let block = &state.blocks[id.index()];
        let twice = listed.insert(id, place).is_some();
        let elsewhere = tier.is_some_and(|tier| tier != block.location.tier);
        if twice || elsewhere || block.place != place {
            return Err(misplaced(id, block.place));
        }
    }
    for tier in Tier::ALL {
        let queued = state.queues[tier.index()].iter(&state.links);
        let cached = queued.filter(|(id, _)| state.blocks[id.index()].hash.is_some()).count();
        if cached != state.cached[tier.index()] {
            return Err(IntegrityError::Cached {
                tier,
                counted: state.cached[tier.index()],
                cached,
            });
        }
    }
    for (index, block) in state.blocks.iter().enumerate() {
        let in_a_list = matches!(block.place, Place::Queued(_) | Place::Retiring(_));
        let id = BlockId(index as u32);
        if in_a_list != listed.contains_key(&id) {
            return Err(misplaced(id, block.place));
        }
    }
    Ok(())
}

fn misplaced(block: BlockId, place: Place) -> IntegrityError {
    IntegrityError::Place { block, place: format!("{place:?}") }
}

/// A block is referenced exactly if it is pinned.
fn check_references(state: &State) -> Result<(), IntegrityError> {
    for (index, block) in state.blocks.iter().enumerate() {
        if (block.references > 0) != (block.place == Place::Pinned) {
            return Err(IntegrityError::References {
                block: BlockId(index as u32),
                references: block.references,
                place: format!("{:?}", block.place),
            });
        }
    }
    Ok(())
}

/// Every name leads to the block that bears it, and only resting or pinned blocks bear one.
fn check_index(state: &State) -> Result<(), IntegrityError> {
    for (&hash, id) in &state.index {
        if state.blocks[id.index()].hash != Some(hash) {
            return Err(IntegrityError::Index { hash });
        }
    }
    for (index, block) in state.blocks.iter().enumerate() {
        let Some(hash) = block.hash else { continue };
        let nameless = matches!(block.place, Place::Absent | Place::Claimed | Place::Moving);
        if nameless || state.index.get(&hash) != Some(&BlockId(index as u32)) {
            return Err(IntegrityError::Index { hash });
        }
    }
    Ok(())
}

/// No slot belongs to two blocks.
fn check_slots(state: &State) -> Result<(), IntegrityError> {
    let mut owners = HashMap::new();
    for block in &state.blocks {
        let (tier, slot) = (block.location.tier, block.location.slot.index());
        if owners.insert((tier, slot), ()).is_some() {
            return Err(IntegrityError::SharedSlot { tier, slot });
        }
    }
    Ok(())
}
