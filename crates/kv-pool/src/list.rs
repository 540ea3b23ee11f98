//! Doubly linked lists of blocks, whose links lie in the blocks' records.
//!
//! A block is in at most one list at a time, so one pair of links a block serves all lists, and
//! nothing is allocated after construction.

use std::cell::Cell;

use crate::RecordId;
use crate::blocks::Blocks;

const NONE: u32 = u32::MAX;

/// One list. Which blocks it holds is recorded by its owner; it does not check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    front: u32,
    back: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { front: NONE, back: NONE };

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.front == NONE
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<RecordId> {
        (self.front != NONE).then_some(RecordId(self.front))
    }

    #[inline]
    pub(crate) fn push_back(&mut self, blocks: &mut Blocks, block: RecordId) {
        blocks.set_links(block, self.back, NONE);
        match self.back {
            NONE => self.front = block.0,
            back => blocks.set_after(RecordId(back), block.0),
        }
        self.back = block.0;
    }

    /// Adds blocks at the back, in their order, up to the first that `queue` does not make a block
    /// whose links are the one that it is given and none; how many.
    #[inline]
    pub(crate) fn push_run_back(
        &mut self,
        blocks: &mut Blocks,
        run: impl Iterator<Item = RecordId>,
        queue: impl Fn(&mut Blocks, RecordId, u32) -> bool,
    ) -> usize {
        let (mut count, mut back) = (0, self.back);
        for block in run {
            if !queue(blocks, block, back) {
                break;
            }
            match back {
                NONE => self.front = block.0,
                back => blocks.set_after(RecordId(back), block.0),
            }
            back = block.0;
            count += 1;
        }
        self.back = back;
        count
    }

    /// Adds the first blocks of another list at the back, in their order, up to the first that `queue` does not make
    /// a block whose links are the one that it is given and none, and says what lay behind it; how many.
    #[inline]
    pub(crate) fn take_run(
        &mut self,
        blocks: &mut Blocks,
        from: &mut Self,
        queue: impl Fn(&mut Blocks, RecordId, u32) -> Option<u32>,
    ) -> usize {
        let next = Cell::new(from.front);
        let run = std::iter::from_fn(|| (next.get() != NONE).then_some(RecordId(next.get())));
        let count = self.push_run_back(blocks, run, |blocks, id, back| {
            let after = queue(blocks, id, back);
            after.inspect(|&after| next.set(after)).is_some()
        });
        from.close(blocks, NONE, next.get());
        count
    }

    #[inline]
    pub(crate) fn push_front(&mut self, blocks: &mut Blocks, block: RecordId) {
        blocks.set_links(block, NONE, self.front);
        match self.front {
            NONE => self.back = block.0,
            front => blocks.set_before(RecordId(front), block.0),
        }
        self.front = block.0;
    }

    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut Blocks, block: RecordId) {
        let (before, after) = (blocks.before(block), blocks.after(block));
        blocks.set_links(block, 0, 0);
        self.close(blocks, before, after);
    }

    /// Takes out the first block.
    #[inline]
    pub(crate) fn pop_front(&mut self, blocks: &mut Blocks) -> Option<RecordId> {
        let front = self.front()?;
        // The other link was written a moment ago, by the last call; a read of both would wait.
        let after = blocks.after(front);
        blocks.set_links(front, 0, 0);
        self.front = after;
        match after {
            NONE => self.back = NONE,
            after => blocks.set_before(RecordId(after), NONE),
        }
        Some(front)
    }

    /// Adds blocks at the front, one before the other, up to the first that `queue` does not make a block
    /// whose links are none and the one that it is given; how many.
    #[inline]
    pub(crate) fn push_run_front(
        &mut self,
        blocks: &mut Blocks,
        run: impl Iterator<Item = RecordId>,
        queue: impl Fn(&mut Blocks, RecordId, u32) -> bool,
    ) -> usize {
        let (mut count, mut front) = (0, self.front);
        for block in run {
            if !queue(blocks, block, front) {
                break;
            }
            match front {
                NONE => self.back = block.0,
                front => blocks.set_before(RecordId(front), block.0),
            }
            front = block.0;
            count += 1;
        }
        self.front = front;
        count
    }

    /// Takes out up to `count` blocks from the front, up to the first of which `take`, which clears its
    /// links, does not say what lay behind it; how many.
    #[inline]
    pub(crate) fn pop_run_front(
        &mut self,
        blocks: &mut Blocks,
        count: usize,
        mut take: impl FnMut(&mut Blocks, RecordId) -> Option<u32>,
    ) -> usize {
        let (mut taken, mut front) = (0, self.front);
        while taken < count
            && front != NONE
            && let Some(after) = take(blocks, RecordId(front))
        {
            front = after;
            taken += 1;
        }
        self.front = front;
        match front {
            NONE => self.back = NONE,
            front => blocks.set_before(RecordId(front), NONE),
        }
        taken
    }

    /// Closes the gap that a block has left between two others.
    #[inline]
    pub(crate) fn close(&mut self, blocks: &mut Blocks, before: u32, after: u32) {
        match before {
            NONE => self.front = after,
            before => blocks.set_after(RecordId(before), after),
        }
        match after {
            NONE => self.back = before,
            after => blocks.set_before(RecordId(after), before),
        }
    }

    /// The blocks from front to back.
    pub(crate) fn iter<'a>(&self, blocks: &'a Blocks) -> impl Iterator<Item = RecordId> + use<'a> {
        let mut at = self.front;
        std::iter::from_fn(move || {
            let block = (at != NONE).then_some(RecordId(at))?;
            at = blocks.after(block);
            Some(block)
        })
    }
}
