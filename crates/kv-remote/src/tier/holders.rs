//! Which members have said that they hold which blocks.

use std::collections::HashMap;

use kv_pool::guard;

use crate::message::Block;

/// Members, at most: one bit for each.
pub(crate) const MEMBERS_MAX: usize = 64;

/// Blocks of one member that are kept in mind, at most.
pub(super) const NAMES_MAX: u64 = 1 << 22;

/// The members that hold each block.
#[derive(Debug)]
pub(super) struct Holders {
    of: HashMap<Block, u64>,
    /// Blocks of each member.
    counts: [u64; MEMBERS_MAX],
}

impl Default for Holders {
    fn default() -> Self {
        Self { of: HashMap::new(), counts: [0; MEMBERS_MAX] }
    }
}

impl Holders {
    /// Whether a member holds a block.
    pub(super) fn has(&self, member: usize, block: Block) -> bool {
        self.of.get(&block).is_some_and(|members| members & 1 << member != 0)
    }

    /// A member that holds so many blocks at most holds a block; whether none did before. One that says that it holds more is not
    /// believed.
    pub(super) fn add(&mut self, member: usize, block: Block, max: u64) -> bool {
        let Some(count) = self.counts.get_mut(member) else { return false };
        let boasts =
            guard!("remote.bounds-what-is-believed", *count >= max.min(NAMES_MAX), else false);
        if boasts && !self.of.contains_key(&block) {
            return false;
        }
        let members = self.of.entry(block).or_default();
        let first = *members == 0;
        *count += u64::from(*members & 1 << member == 0);
        *members |= 1 << member;
        first
    }

    /// A member holds a block no more; whether it was the last one.
    pub(super) fn remove(&mut self, member: usize, block: Block) -> bool {
        if !self.has(member, block) {
            return false;
        }
        let Some(members) = self.of.get_mut(&block) else { return false };
        *members &= !(1 << member);
        let last = *members == 0;
        if let Some(count) = self.counts.get_mut(member) {
            *count -= 1;
        }
        if last {
            self.of.remove(&block);
        }
        last
    }

    /// Nothing is known of a block any more.
    pub(super) fn forget(&mut self, block: Block) {
        for member in 0..MEMBERS_MAX {
            self.remove(member, block);
        }
    }

    /// A member holds nothing any more: appends the blocks that no other holds.
    pub(super) fn forget_member(&mut self, member: usize, dropped: &mut Vec<Block>) {
        if let Some(count) = self.counts.get_mut(member) {
            *count = 0;
        }
        self.of.retain(|block, members| {
            *members &= !(1 << member);
            if *members == 0 {
                dropped.push(*block);
            }
            *members != 0
        });
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::{BlockHash, GroupId};

    use super::*;

    fn block(name: u128) -> Block {
        (GroupId(0), BlockHash::from_u128(name))
    }

    #[test]
    fn a_block_is_gained_with_its_first_holder_and_lost_with_its_last() {
        let mut holders = Holders::default();
        let mut add = |member, block| holders.add(member, block, 9);
        assert!(add(0, block(1)) && !add(63, block(1)) && add(63, block(2)));
        assert!(!holders.remove(0, block(1)) && !holders.remove(0, block(1)));
        assert!(holders.remove(63, block(1)) && !holders.remove(63, block(1)));
        holders.add(1, block(3), 9);
        assert!(holders.has(1, block(3)) && !holders.has(2, block(3)) && !holders.has(1, block(9)));
        let mut dropped = Vec::new();
        holders.forget_member(63, &mut dropped);
        assert_eq!(dropped, [block(2)]);
        holders.forget(block(3));
        assert!(holders.add(1, block(3), 9));
    }

    #[test]
    fn a_member_is_believed_as_many_blocks_as_it_has_room_for_and_no_more() {
        let mut holders = Holders::default();
        assert_eq!((0..100).filter(|name| holders.add(0, block(*name), 10)).count(), 10);
        assert!(!holders.add(0, block(5), 10) && holders.has(0, block(5)), "said again");
        // What it gives up makes room for what it says next, whichever way it goes.
        assert!(holders.remove(0, block(5)) && !holders.remove(0, block(5)));
        holders.forget(block(6));
        assert!(!holders.add(1, block(7), 10) && !holders.remove(0, block(7)));
        assert_eq!((200..300).filter(|name| holders.add(0, block(*name), 10)).count(), 3);
        let mut dropped = Vec::new();
        holders.forget_member(0, &mut dropped);
        assert_eq!((dropped.len(), holders.add(0, block(1), 1)), (10, true));
        assert!(!holders.add(0, block(2), 1) && !holders.add(2, block(400), 0));
        // And what each of them says again counts once.
        for member in [0, 1, MEMBERS_MAX - 1] {
            let mut holders = Holders::default();
            (0..5).for_each(|_| _ = holders.add(member, block(1), 2));
            assert!(holders.add(member, block(2), 2) && !holders.add(member, block(3), 2));
        }
    }
}
