//! Which block goes next: least recently released first, within the lowest priority.

use crate::list::{Links, List};
use crate::{BlockId, Priority};

/// The unreferenced blocks of one tier, in the order in which they will be handed out.
///
/// One list a priority, and a bit for each list that is not empty, so every operation takes the
/// same time however many blocks or priorities there are. The priority that a block was inserted
/// with is the caller's to remember: it names the list, whatever the block's priority is by now.
#[derive(Debug)]
pub(crate) struct EvictionQueues {
    lists: Box<[List; Priority::COUNT]>,
    occupied: u128,
    len: usize,
}

impl EvictionQueues {
    pub(crate) fn new() -> Self {
        Self { lists: Box::new([List::EMPTY; Priority::COUNT]), occupied: 0, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Inserts a block that will be handed out after all others of its priority.
    pub(crate) fn insert_last(&mut self, links: &mut Links, block: BlockId, priority: Priority) {
        self.lists[priority.index()].push_back(links, block);
        self.inserted(priority);
    }

    /// Inserts a block that will be handed out before all others of its priority.
    pub(crate) fn insert_first(&mut self, links: &mut Links, block: BlockId, priority: Priority) {
        self.lists[priority.index()].push_front(links, block);
        self.inserted(priority);
    }

    /// Takes out a block that was inserted with `priority`.
    pub(crate) fn remove(&mut self, links: &mut Links, block: BlockId, priority: Priority) {
        let list = &mut self.lists[priority.index()];
        list.remove(links, block);
        if list.is_empty() {
            self.occupied &= !(1 << priority.index());
        }
        self.len -= 1;
    }

    /// Finds and takes out the next block, in one step.
    pub(crate) fn pop(&mut self, links: &mut Links) -> Option<BlockId> {
        let lowest = self.occupied.trailing_zeros() as u8;
        let priority = Priority::new(lowest)?;
        let block = self.lists[priority.index()].front()?;
        self.remove(links, block, priority);
        Some(block)
    }

    /// Every block with the priority that it is queued by, in the order of [`pop`](Self::pop).
    pub(crate) fn iter<'a>(
        &'a self,
        links: &'a Links,
    ) -> impl Iterator<Item = (BlockId, Priority)> + 'a {
        (0..=Priority::MAX.get()).filter_map(Priority::new).flat_map(move |priority| {
            self.lists[priority.index()].iter(links).map(move |block| (block, priority))
        })
    }

    fn inserted(&mut self, priority: Priority) {
        self.occupied |= 1 << priority.index();
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P5: Priority = Priority::MIN;

    fn queues(blocks: u32) -> (EvictionQueues, Links) {
        let mut links = Links::new(blocks as usize);
        let mut queues = EvictionQueues::new();
        for block in 0..blocks {
            queues.insert_last(&mut links, BlockId(block), Priority::DEFAULT);
        }
        (queues, links)
    }

    #[test]
    fn equal_priorities_leave_in_the_order_of_their_release() {
        let (mut queues, mut links) = queues(8);
        let first = queues.pop(&mut links).unwrap();
        let second = queues.pop(&mut links).unwrap();
        queues.insert_last(&mut links, second, Priority::DEFAULT);
        queues.insert_last(&mut links, first, Priority::DEFAULT);
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
        queues.insert_last(&mut links, high, Priority::MAX);
        queues.insert_last(&mut links, low, P5);
        assert_eq!(queues.pop(&mut links), Some(low));
        assert_eq!(queues.pop(&mut links), Some(high));
    }

    #[test]
    fn a_block_released_to_the_front_is_next_and_one_to_the_back_is_not() {
        let (mut queues, mut links) = queues(3);
        let block = queues.pop(&mut links).unwrap();
        queues.insert_first(&mut links, block, Priority::DEFAULT);
        assert_eq!(queues.pop(&mut links), Some(block));
        queues.insert_last(&mut links, block, Priority::DEFAULT);
        assert_ne!(queues.pop(&mut links), Some(block));
    }

    #[test]
    fn removal_from_the_middle_leaves_the_counts_right() {
        let (mut queues, mut links) = queues(3);
        queues.remove(&mut links, BlockId(1), Priority::DEFAULT);
        assert_eq!(queues.len(), 2);
        let left: Vec<u32> = queues.iter(&links).map(|(block, _)| block.0).collect();
        assert_eq!(left, [0, 2]);
    }
}
