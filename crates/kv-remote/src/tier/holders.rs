//! Which members have said that they hold which blocks.

use std::collections::HashMap;

use crate::wire::Key as Block;

/// Members, at most: one bit for each.
pub(super) const MEMBERS_MAX: usize = 64;

/// The members that hold each block.
#[derive(Debug, Default)]
pub(super) struct Holders {
    of: HashMap<Block, u64>,
}

impl Holders {
    /// Whether a member holds a block.
    pub(super) fn has(&self, member: usize, block: Block) -> bool {
        self.of.get(&block).is_some_and(|members| members & 1 << member != 0)
    }

    /// A member holds a block; whether none did before.
    pub(super) fn add(&mut self, member: usize, block: Block) -> bool {
        let members = self.of.entry(block).or_default();
        let first = *members == 0;
        *members |= 1 << member;
        first
    }

    /// A member holds a block no more; whether it was the last one.
    pub(super) fn remove(&mut self, member: usize, block: Block) -> bool {
        let Some(members) = self.of.get_mut(&block) else { return false };
        *members &= !(1 << member);
        let last = *members == 0;
        if last {
            self.of.remove(&block);
        }
        last
    }

    /// Nothing is known of a block any more.
    pub(super) fn forget(&mut self, block: Block) {
        self.of.remove(&block);
    }

    /// A member holds nothing any more: appends the blocks that no other holds.
    pub(super) fn forget_member(&mut self, member: usize, dropped: &mut Vec<Block>) {
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
    use kv_manager::GroupId;
    use kv_pool::BlockHash;

    use super::*;

    #[test]
    fn a_block_is_gained_with_its_first_holder_and_lost_with_its_last() {
        let block = |name: u128| (GroupId(0), BlockHash::from_u128(name));
        let mut holders = Holders::default();
        assert!(
            holders.add(0, block(1)) && !holders.add(63, block(1)) && holders.add(63, block(2))
        );
        assert!(!holders.remove(0, block(1)) && !holders.remove(0, block(1)));
        assert!(holders.remove(63, block(1)) && !holders.remove(63, block(1)));
        holders.add(1, block(3));
        assert!(holders.has(1, block(3)) && !holders.has(2, block(3)) && !holders.has(1, block(9)));
        let mut dropped = Vec::new();
        holders.forget_member(63, &mut dropped);
        assert_eq!(dropped, [block(2)]);
        holders.forget(block(3));
        assert!(holders.add(1, block(3)));
    }
}
