//! Several queues of blocks, each block in at most one of them, with every operation in constant time.
//!
//! Policies move blocks between queues and take them from the middle. One pair of links for each block, in a table
//! shared by all queues, does that without allocation, and tells in which queue a block is.

use super::Block;

/// One of the queues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Queue(pub(super) usize);

/// No node: the end of a queue.
const NONE: usize = usize::MAX;

#[derive(Clone, Copy)]
struct Node {
    /// The queue that the block is in, [`NONE`] if in none.
    queue: usize,
    before: usize,
    after: usize,
}

#[derive(Clone, Copy)]
struct Ends {
    front: usize,
    back: usize,
    len: usize,
}

/// `N` queues of blocks.
pub(super) struct Queues<const N: usize> {
    /// # Invariants
    ///
    /// The nodes of one queue form a list in both directions between that queue's ends.
    nodes: Vec<Node>,
    ends: [Ends; N],
}

impl<const N: usize> Queues<N> {
    /// Empty queues for blocks with numbers below `distinct`.
    pub(super) fn new(distinct: usize) -> Self {
        Self {
            nodes: vec![Node { queue: NONE, before: NONE, after: NONE }; distinct],
            ends: [Ends { front: NONE, back: NONE, len: 0 }; N],
        }
    }

    /// Puts `block` at the back of `queue`, out of the queue that it was in.
    pub(super) fn push_back(&mut self, queue: Queue, block: Block) {
        self.remove(block);
        let node = block.index();
        let ends = &mut self.ends[queue.0];
        let before = ends.back;
        ends.back = node;
        ends.len += 1;
        match before {
            NONE => ends.front = node,
            _ => self.nodes[before].after = node,
        }
        self.nodes[node] = Node { queue: queue.0, before, after: NONE };
    }

    /// Takes `block` out of the queue that it is in, if any.
    pub(super) fn remove(&mut self, block: Block) {
        let Node { queue, before, after } = self.nodes[block.index()];
        if queue == NONE {
            return;
        }
        let ends = &mut self.ends[queue];
        ends.len -= 1;
        match before {
            NONE => ends.front = after,
            _ => self.nodes[before].after = after,
        }
        match after {
            NONE => ends.back = before,
            _ => self.nodes[after].before = before,
        }
        self.nodes[block.index()].queue = NONE;
    }

    /// Takes the block at the front of `queue`.
    pub(super) fn pop_front(&mut self, queue: Queue) -> Option<Block> {
        let front = self.ends[queue.0].front;
        if front == NONE {
            return None;
        }
        let block = Block(front);
        self.remove(block);
        Some(block)
    }

    /// The queue that `block` is in.
    pub(super) fn queue_of(&self, block: Block) -> Option<Queue> {
        match self.nodes[block.index()].queue {
            NONE => None,
            queue => Some(Queue(queue)),
        }
    }

    pub(super) fn len(&self, queue: Queue) -> usize {
        self.ends[queue.0].len
    }
}
