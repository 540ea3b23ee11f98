//! The invariants of the pool, written down as a check.

use std::collections::HashMap;

use crate::state::{Place, State};
use crate::{BlockId, IntegrityError, Tier};

pub(crate) fn check(state: &State) -> Result<(), IntegrityError> {
    check_places(state)?;
    check_counts(state)?;
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
    let mut listed = vec![false; state.blocks.len()];
    // Stops at a block that is met twice, so a torn list that has become a ring ends as well.
    let mut meet = |id: BlockId, place: Place, tier: Tier| {
        let block = &state.blocks[id.index()];
        let twice = std::mem::replace(&mut listed[id.index()], true);
        if twice || tier != block.location.tier || block.place != place {
            return Err(misplaced(id, block.place));
        }
        Ok(())
    };
    for id in state.retiring.iter(&state.links) {
        let block = &state.blocks[id.index()];
        match block.place {
            Place::Retiring(_) => meet(id, block.place, block.location.tier)?,
            place => return Err(misplaced(id, place)),
        }
    }
    for tier in Tier::ALL {
        for (id, class) in state.queues[tier.index()].iter(&state.links) {
            let block = &state.blocks[id.index()];
            if class.is_some() != block.hash.is_some() {
                return Err(misplaced(id, block.place));
            }
            meet(id, Place::Queued(class), tier)?;
        }
    }
    for (index, (block, listed)) in state.blocks.iter().zip(listed).enumerate() {
        if listed != matches!(block.place, Place::Queued(_) | Place::Retiring(_)) {
            return Err(misplaced(BlockId(index as u32), block.place));
        }
    }
    Ok(())
}

/// The lists are as long as they say. They are known to end, so they can be counted.
fn check_counts(state: &State) -> Result<(), IntegrityError> {
    for tier in Tier::ALL {
        let queues = &state.queues[tier.index()];
        let of_tier = |id: &BlockId| state.blocks[id.index()].location.tier == tier;
        let retiring = state.retiring.iter(&state.links).filter(of_tier).count();
        let queued = queues.iter(&state.links).count();
        for (counted, recorded) in [(queued, queues.len()), (retiring, state.retiring.len(tier))] {
            if counted != recorded {
                return Err(IntegrityError::Count { tier, counted, recorded });
            }
        }
        let cached = queues.iter(&state.links).filter(|(_, class)| class.is_some()).count();
        let counted = queues.len() - queues.empty();
        if cached != counted {
            return Err(IntegrityError::Cached { tier, counted, cached });
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

/// Every name leads to the block that bears it, and only resting or pinned blocks bear one, and
/// only moving ones wait for theirs.
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
    for (&id, &hash) in &state.moving {
        if state.blocks[id.index()].place != Place::Moving {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockHash, Location, PoolConfig, Priority, SlotIndex};

    const HASH: BlockHash = BlockHash::from_u128(7);

    /// Block 0 is pinned and named, the others are empty; block 4 is secondary.
    fn state() -> State {
        let config = PoolConfig { secondary_blocks: 1, ..PoolConfig::primary_only(4) };
        let mut state = State::new(&config).unwrap();
        let block = state.claim(1)[0].block;
        assert_eq!(state.register(block, HASH, Priority::DEFAULT), None);
        assert_eq!(check(&state), Ok(()));
        state
    }

    fn damaged(damage: impl FnOnce(&mut State)) -> IntegrityError {
        let mut state = state();
        damage(&mut state);
        check(&state).unwrap_err()
    }

    #[test]
    fn a_block_missing_from_its_list_or_listed_twice_is_found() {
        let missing = damaged(|state| state.blocks[1].place = Place::Claimed);
        let place = "Claimed".to_owned();
        assert_eq!(missing, IntegrityError::Place { block: BlockId(1), place });
        // Into a ring: a check that did not stop at the second meeting would never end.
        let ring = damaged(|state| {
            state.queues[0].insert_first(&mut state.links, BlockId(3), None);
        });
        assert!(matches!(ring, IntegrityError::Place { block: BlockId(3), .. }), "{ring}");
        let lost = damaged(|state| {
            state.queues[0].pop(&mut state.links);
        });
        assert!(matches!(lost, IntegrityError::Place { block: BlockId(1), .. }), "{lost}");
        let unlisted = damaged(|state| {
            state.queues[0].pop(&mut state.links);
            state.retiring.insert(&mut state.links, BlockId(1), Tier::Primary);
        });
        assert!(matches!(unlisted, IntegrityError::Place { block: BlockId(1), .. }), "{unlisted}");
    }

    #[test]
    fn wrong_counts_are_found() {
        let retiring = damaged(|state| {
            state.queues[0].pop(&mut state.links);
            state.blocks[1].place = Place::Retiring(state.current);
            state.retiring.insert(&mut state.links, BlockId(1), Tier::Secondary);
        });
        assert_eq!(
            retiring,
            IntegrityError::Count { tier: Tier::Primary, counted: 1, recorded: 0 }
        );
        let references = damaged(|state| state.blocks[1].references = 2);
        assert!(matches!(references, IntegrityError::References { references: 2, .. }));
        let misuse = damaged(|state| state.unpin(BlockId(1)));
        assert_eq!(misuse, IntegrityError::Misuse { count: 1 });
    }

    #[test]
    fn an_index_that_disagrees_with_the_blocks_is_found() {
        let index = IntegrityError::Index { hash: HASH };
        assert_eq!(damaged(|state| state.blocks[0].hash = None), index);
        assert_eq!(damaged(|state| state.index.clear()), index);
        assert_eq!(damaged(|state| assert_eq!(state.moving.insert(BlockId(1), HASH), None)), index);
    }

    #[test]
    fn a_slot_of_two_blocks_is_found() {
        let location = Location { tier: Tier::Primary, slot: SlotIndex(1) };
        let shared = damaged(|state| state.blocks[0].location = location);
        assert_eq!(shared, IntegrityError::SharedSlot { tier: Tier::Primary, slot: 1 });
    }
}
