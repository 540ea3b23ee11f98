//! Doubly linked lists of blocks, whose links lie in one vector.
//!
//! A block is in at most one list at a time, so one pair of links a block serves all lists, and
//! nothing is allocated after construction.

use std::collections::TryReserveError;

use crate::BlockId;

const NONE: u32 = u32::MAX;

/// The links of every block.
#[derive(Debug)]
pub(crate) struct Links(Vec<Link>);

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

impl Links {
    pub(crate) fn new(blocks: usize) -> Result<Self, TryReserveError> {
        let mut links = Vec::new();
        links.try_reserve_exact(blocks)?;
        links.resize(blocks, Link { before: NONE, after: NONE });
        Ok(Self(links))
    }
}

/// One list. Which blocks it holds is recorded by its owner; it does not check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    front: u32,
    back: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { front: NONE, back: NONE };

    pub(crate) fn is_empty(&self) -> bool {
        self.front == NONE
    }

    pub(crate) fn front(&self) -> Option<BlockId> {
        (self.front != NONE).then_some(BlockId(self.front))
    }

    pub(crate) fn push_back(&mut self, links: &mut Links, block: BlockId) {
        links.0[block.index()] = Link { before: self.back, after: NONE };
        match self.back {
            NONE => self.front = block.0,
            back => links.0[back as usize].after = block.0,
        }
        self.back = block.0;
    }

    pub(crate) fn push_front(&mut self, links: &mut Links, block: BlockId) {
        links.0[block.index()] = Link { before: NONE, after: self.front };
        match self.front {
            NONE => self.back = block.0,
            front => links.0[front as usize].before = block.0,
        }
        self.front = block.0;
    }

    pub(crate) fn remove(&mut self, links: &mut Links, block: BlockId) {
        let Link { before, after } = links.0[block.index()];
        match before {
            NONE => self.front = after,
            before => links.0[before as usize].after = after,
        }
        match after {
            NONE => self.back = before,
            after => links.0[after as usize].before = before,
        }
    }

    /// The blocks from front to back.
    pub(crate) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = BlockId> + 'a {
        let mut at = self.front;
        std::iter::from_fn(move || {
            let block = (at != NONE).then_some(BlockId(at))?;
            at = links.0[block.index()].after;
            Some(block)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_from_every_position_keeps_the_order_of_the_rest() {
        for removed in 0..4 {
            let mut links = Links::new(4).unwrap();
            let mut list = List::EMPTY;
            for block in [1, 2, 3] {
                list.push_back(&mut links, BlockId(block));
            }
            list.push_front(&mut links, BlockId(0));
            list.remove(&mut links, BlockId(removed));
            let rest: Vec<u32> = list.iter(&links).map(|block| block.0).collect();
            let expected: Vec<u32> = (0..4).filter(|&block| block != removed).collect();
            assert_eq!(rest, expected);

            list.push_back(&mut links, BlockId(removed));
            assert_eq!(list.iter(&links).last(), Some(BlockId(removed)));
        }
    }
}
