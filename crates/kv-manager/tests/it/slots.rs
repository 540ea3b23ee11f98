//! Token slots of sequences.

#![allow(clippy::reversed_empty_ranges, reason = "a caller may ask for any two numbers")]

use crate::prelude::*;

#[test]
fn slots_are_those_of_the_blocks_and_end_with_them() {
    let mut manager = manager(8, 0);
    let other = common::manager(8, 0);
    let first = admit(&mut manager, 0..5);
    let second = admit(&mut manager, 20..30);
    let mut slots = Vec::new();
    manager.slot_mapping(GroupId(0), &second, 3..9, &mut slots).unwrap();
    let slot = |(index, offset)| second.block(GroupId(0), index).unwrap().slot(BLOCK, offset);
    assert_eq!(slots, [(0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)].map(slot));
    manager.slot_mapping(GroupId(0), &first, 5..8, &mut slots).unwrap();
    assert_eq!(slots.len(), 9, "behind those that were there, up to the end of the last block");
    manager.slot_mapping(GroupId(0), &first, 8..8, &mut slots).unwrap();
    for (start, end) in [(0, 9), (8, 9), (3, 2), (0, u64::MAX), (u64::MAX, 0)] {
        let error = manager.slot_mapping(GroupId(0), &first, start..end, &mut slots).unwrap_err();
        assert_eq!(error, SlotError { start, end, tokens: 8 });
    }
    let error = other.slot_mapping(GroupId(0), &first, 0..1, &mut slots).unwrap_err();
    assert_eq!(error, SlotError { start: 0, end: 1, tokens: 0 });
    assert_eq!(slots.len(), 9, "what is refused adds nothing");
}
