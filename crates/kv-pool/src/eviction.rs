//! Which block goes next: empty ones, then least recently released first in the lowest priority.

use crate::blocks::{Blocks, Kind};
use crate::list::List;
use crate::{Priority, RecordId, Tier};

/// What a queued block is queued as: the priority of its content, `None` without content. Blocks
/// leave in the order of their classes, so those without content come before all others.
pub(crate) type Class = Option<Priority>;

const EMPTY: usize = 0;
const CLASSES: usize = Priority::COUNT + 1;

/// The unreferenced blocks of one tier, in the order in which they will be handed out.
///
/// One list a class, and a bit for each list that is not empty, so every operation takes the same
/// time however many blocks or priorities there are. The class that a block was inserted with is
/// the caller's to remember: it names the list, whatever the block's priority is by now.
#[derive(Debug)]
pub(crate) struct EvictionQueues {
    lists: Box<[List; CLASSES]>,
    occupied: u128,
    len: usize,
    empty: usize,
}

impl EvictionQueues {
    pub(crate) fn new() -> Self {
        Self { lists: Box::new([List::EMPTY; CLASSES]), occupied: 0, len: 0, empty: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Blocks without content.
    #[inline]
    pub(crate) fn empty(&self) -> usize {
        self.empty
    }

    /// Inserts a block that will be handed out after all others of its class.
    #[inline]
    pub(crate) fn insert_last(&mut self, blocks: &mut Blocks, block: RecordId, class: Class) {
        self.lists[index(class)].push_back(blocks, block);
        self.inserted(class);
    }

    /// Inserts a block that will be handed out before all others of its class.
    #[inline]
    pub(crate) fn insert_first(&mut self, blocks: &mut Blocks, block: RecordId, class: Class) {
        self.lists[index(class)].push_front(blocks, block);
        self.inserted(class);
    }

    /// Takes out a block that was inserted with `class`.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut Blocks, block: RecordId, class: Class) {
        self.remove_at(blocks, block, index(class));
    }

    /// Finds and takes out the next block, in one step.
    #[inline]
    pub(crate) fn pop(&mut self, blocks: &mut Blocks) -> Option<RecordId> {
        let lowest = self.occupied.trailing_zeros() as usize;
        self.pop_at(blocks, lowest)
    }

    /// The same, of blocks with content.
    #[inline]
    pub(crate) fn pop_cached(&mut self, blocks: &mut Blocks) -> Option<RecordId> {
        let lowest = (self.occupied & !(1 << EMPTY)).trailing_zeros() as usize;
        self.pop_at(blocks, lowest)
    }

    /// The class and the block that [`pop`](Self::pop) would take.
    #[inline]
    pub(crate) fn first(&self) -> Option<(usize, RecordId)> {
        let lowest = self.occupied.trailing_zeros() as usize;
        Some((lowest, self.lists.get(lowest)?.front()?))
    }

    /// The class of the block that [`pop_cached`](Self::pop_cached) would take.
    #[inline]
    pub(crate) fn first_cached(&self) -> Option<usize> {
        let lowest = (self.occupied & !(1 << EMPTY)).trailing_zeros() as usize;
        (lowest < CLASSES).then_some(lowest)
    }

    /// Takes out up to `count` of the next blocks without content, up to the first of which `take` does
    /// not say what lay behind it; how many.
    #[inline]
    pub(crate) fn pop_run_empty(
        &mut self,
        blocks: &mut Blocks,
        count: usize,
        take: impl FnMut(&mut Blocks, RecordId) -> Option<u32>,
    ) -> usize {
        let list = &mut self.lists[EMPTY];
        let taken = list.pop_run_front(blocks, count, take);
        if list.is_empty() {
            self.occupied &= !(1 << EMPTY);
        }
        self.len -= taken;
        self.empty -= taken;
        taken
    }

    /// Releases claimed blocks of a tier without content, as [`insert_first`](Self::insert_first) one
    /// after the other, up to the first that there is more to; how many.
    #[inline]
    pub(crate) fn push_run_empty(
        &mut self,
        blocks: &mut Blocks,
        run: impl Iterator<Item = RecordId>,
        tier: Tier,
    ) -> usize {
        let count = self.lists[EMPTY]
            .push_run_front(blocks, run, |blocks, id, front| blocks.release_empty(id, tier, front));
        self.occupied |= u128::from(count > 0) << EMPTY;
        self.len += count;
        self.empty += count;
        count
    }

    /// Takes out the first block of a class that has one.
    #[inline]
    pub(crate) fn pop_class(&mut self, blocks: &mut Blocks, class: usize) {
        self.pop_at(blocks, class);
    }

    /// Inserts a block with content that will be handed out before all others of its class.
    #[inline]
    pub(crate) fn push_cached_first(&mut self, blocks: &mut Blocks, block: RecordId, class: usize) {
        let Some(list) = self.lists.get_mut(class) else { return };
        let first = list.is_empty();
        list.push_front(blocks, block);
        if first {
            self.occupied |= 1 << class;
        }
        self.len += 1;
    }

    /// Every block with the class that it is queued by, in the order of [`pop`](Self::pop).
    pub(crate) fn iter<'a>(
        &'a self,
        blocks: &'a Blocks,
    ) -> impl Iterator<Item = (RecordId, Class)> + 'a {
        let priorities = (0..=Priority::MAX.get()).filter_map(Priority::new).map(Some);
        std::iter::once(None).chain(priorities).flat_map(move |class| {
            self.lists[index(class)].iter(blocks).map(move |block| (block, class))
        })
    }

    #[inline]
    fn inserted(&mut self, class: Class) {
        self.occupied |= 1 << index(class);
        self.len += 1;
        self.empty += usize::from(class.is_none());
    }

    /// Takes note of `count` blocks in a row that have left the list of `class` already.
    #[inline]
    pub(crate) fn unlinked(
        &mut self,
        blocks: &mut Blocks,
        class: usize,
        before: u32,
        after: u32,
        count: usize,
    ) {
        let Some(list) = self.lists.get_mut(class) else { return };
        list.close(blocks, before, after);
        if list.is_empty() {
            self.occupied &= !(1 << class);
        }
        self.len -= count;
        self.empty -= if class == EMPTY { count } else { 0 };
    }

    /// Releases blocks with content as far as they are of one kind and have no other reference, as
    /// [`push_cached`](Self::push_cached) one after the other; how many.
    #[inline]
    pub(crate) fn push_run_cached(
        &mut self,
        blocks: &mut Blocks,
        run: impl Iterator<Item = RecordId>,
        kind: Kind,
        stamp: u32,
    ) -> usize {
        let class = kind.class();
        let Some(list) = self.lists.get_mut(class) else { return 0 };
        let count = list.push_run_back(blocks, run, |blocks, id, back| {
            blocks.queue_last(id, kind, stamp, back)
        });
        self.len += count;
        self.occupied |= u128::from(count > 0) << class;
        count
    }

    /// Inserts a block with content that will be handed out after all others of its class.
    #[inline]
    pub(crate) fn push_cached(&mut self, blocks: &mut Blocks, block: RecordId, class: usize) {
        let Some(list) = self.lists.get_mut(class) else { return };
        let first = list.is_empty();
        list.push_back(blocks, block);
        if first {
            self.occupied |= 1 << class;
        }
        self.len += 1;
    }

    /// The next blocks with content, as far as they are of one class.
    pub(crate) fn next_cached<'a>(
        &'a self,
        blocks: &'a Blocks,
    ) -> impl Iterator<Item = RecordId> + 'a {
        let lowest = (self.occupied & !(1 << EMPTY)).trailing_zeros() as usize;
        self.lists.get(lowest).into_iter().flat_map(|list| list.iter(blocks))
    }

    #[inline]
    fn pop_at(&mut self, blocks: &mut Blocks, index: usize) -> Option<RecordId> {
        let list = self.lists.get_mut(index)?;
        let block = list.pop_front(blocks)?;
        if list.is_empty() {
            self.occupied &= !(1 << index);
        }
        self.len -= 1;
        self.empty -= usize::from(index == EMPTY);
        Some(block)
    }

    #[inline]
    pub(crate) fn remove_at(&mut self, blocks: &mut Blocks, block: RecordId, index: usize) {
        let list = &mut self.lists[index];
        list.remove(blocks, block);
        if list.is_empty() {
            self.occupied &= !(1 << index);
        }
        self.len -= 1;
        self.empty -= usize::from(index == EMPTY);
    }
}

fn index(class: Class) -> usize {
    class.map_or(EMPTY, |priority| 1 + priority.index())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Class = Some(Priority::MIN);
    const MAX: Class = Some(Priority::MAX);
    const DEFAULT: Class = Some(Priority::DEFAULT);

    fn queues(blocks: u32) -> (EvictionQueues, Blocks) {
        let mut links = Blocks::new(blocks as usize).unwrap();
        let mut queues = EvictionQueues::new();
        for block in 0..blocks {
            queues.insert_last(&mut links, RecordId(block), DEFAULT);
        }
        (queues, links)
    }

    #[test]
    fn equal_priorities_leave_in_the_order_of_their_release() {
        let (mut queues, mut links) = queues(8);
        let first = queues.pop(&mut links).unwrap();
        let second = queues.pop(&mut links).unwrap();
        queues.insert_last(&mut links, second, DEFAULT);
        queues.insert_last(&mut links, first, DEFAULT);
        for _ in 0..6 {
            let untouched = queues.pop(&mut links).unwrap();
            assert!(untouched != first && untouched != second);
        }
        assert_eq!(queues.pop(&mut links), Some(second));
        assert_eq!(queues.pop(&mut links), Some(first));
        assert_eq!(queues.pop(&mut links), None);
        assert_eq!(queues.len(), 0);
    }

    #[test]
    fn lower_priorities_leave_first_whenever_they_were_released() {
        let (mut queues, mut links) = queues(2);
        let high = queues.pop(&mut links).unwrap();
        let low = queues.pop(&mut links).unwrap();
        queues.insert_last(&mut links, high, MAX);
        queues.insert_last(&mut links, low, MIN);
        assert_eq!(queues.pop(&mut links), Some(low));
        assert_eq!(queues.pop(&mut links), Some(high));
    }

    #[test]
    fn blocks_without_content_leave_before_the_lowest_priority() {
        let mut links = Blocks::new(3).unwrap();
        let mut queues = EvictionQueues::new();
        queues.insert_last(&mut links, RecordId(0), MIN);
        queues.insert_last(&mut links, RecordId(1), None);
        queues.insert_last(&mut links, RecordId(2), None);
        assert_eq!((queues.len(), queues.empty()), (3, 2));
        let order: Vec<_> = std::iter::from_fn(|| queues.pop(&mut links)).collect();
        assert_eq!(order, [RecordId(1), RecordId(2), RecordId(0)]);
        assert_eq!((queues.len(), queues.empty()), (0, 0));
    }

    #[test]
    fn a_block_released_to_the_front_is_next_and_one_to_the_back_is_not() {
        let (mut queues, mut links) = queues(3);
        let block = queues.pop(&mut links).unwrap();
        queues.insert_first(&mut links, block, DEFAULT);
        assert_eq!(queues.pop(&mut links), Some(block));
        queues.insert_last(&mut links, block, DEFAULT);
        assert_ne!(queues.pop(&mut links), Some(block));
    }

    #[test]
    fn removal_from_the_middle_leaves_the_counts_right() {
        let (mut queues, mut links) = queues(3);
        queues.remove(&mut links, RecordId(1), DEFAULT);
        assert_eq!(queues.len(), 2);
        let left: Vec<u32> = queues.iter(&links).map(|(block, _)| block.0).collect();
        assert_eq!(left, [0, 2]);
    }
}
