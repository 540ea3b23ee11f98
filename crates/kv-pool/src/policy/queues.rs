//! Queues of blocks, each block in at most one of them, from which those with children are kept back.
//!
//! Constant-time moves, and the rule that tails go before heads: a block that comes up at the front but
//! may not go is set aside. It stays a member of its queue without a place in it, and gets the place at
//! the front when it may go.

use super::error::{check_blocks, table};
use super::{BlockFacts, PolicyError};
use crate::RecordId;

/// One of the queues, by number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Queue(pub(super) u8);

/// No neighbour: the end of a queue.
const NONE: u32 = u32::MAX;

/// The queue of a block that is in none.
const NO_QUEUE: Queue = Queue(u8::MAX);

#[derive(Clone, Copy, Debug)]
struct Node {
    before: u32,
    after: u32,
    queue: Queue,
    has_children: bool,
    /// A member of its queue without a place in it.
    aside: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    front: u32,
    back: u32,
}

/// `N` queues of blocks that nobody holds, at most 255.
#[derive(Debug)]
pub(super) struct Queues<const N: usize> {
    /// # Invariants
    ///
    /// The nodes of one queue that are not set aside form a list in both directions between that
    /// queue's ends.
    nodes: Vec<Node>,
    ends: [Ends; N],
    /// Members of all queues, those set aside among them.
    members: usize,
}

impl<const N: usize> Queues<N> {
    /// Empty queues for blocks with indices below `blocks`.
    pub(super) fn new(blocks: u64) -> Result<Self, PolicyError> {
        let absent =
            Node { before: NONE, after: NONE, queue: NO_QUEUE, has_children: false, aside: false };
        Ok(Self {
            nodes: table(check_blocks(blocks)?, absent, blocks)?,
            ends: [Ends { front: NONE, back: NONE }; N],
            members: 0,
        })
    }

    /// Whether there is such a block at all.
    pub(super) fn knows(&self, block: RecordId) -> bool {
        block.index() < self.nodes.len()
    }

    /// The queue that `block` is a member of.
    pub(super) fn queue_of(&self, block: RecordId) -> Option<Queue> {
        let queue = self.nodes.get(block.index())?.queue;
        (queue != NO_QUEUE).then_some(queue)
    }

    /// Members of all queues.
    pub(super) fn len(&self) -> usize {
        self.members
    }

    /// Puts a known block at the back of `queue`, out of the queue that it was in.
    pub(super) fn push_back(&mut self, queue: Queue, block: RecordId, facts: &BlockFacts) {
        self.remove(block);
        let ends = &mut self.ends[usize::from(queue.0)];
        let before = std::mem::replace(&mut ends.back, block.0);
        match before {
            NONE => ends.front = block.0,
            _ => self.nodes[before as usize].after = block.0,
        }
        let has_children = facts.has_children;
        self.nodes[block.index()] = Node { before, after: NONE, queue, has_children, aside: false };
        self.members += 1;
    }

    /// Says whether a member has children. One that was set aside and has none gets its place again.
    pub(super) fn children(&mut self, block: RecordId, has_children: bool) {
        let Some(queue) = self.queue_of(block) else { return };
        let node = &mut self.nodes[block.index()];
        node.has_children = has_children;
        if node.aside && !has_children {
            self.link_front(queue, block);
        }
    }

    /// Takes `block` out of the queue that it is a member of, if any.
    pub(super) fn remove(&mut self, block: RecordId) {
        if self.queue_of(block).is_none() {
            return;
        }
        if !self.nodes[block.index()].aside {
            self.detach(block);
        }
        let node = &mut self.nodes[block.index()];
        (node.queue, node.aside) = (NO_QUEUE, false);
        self.members -= 1;
    }

    /// The first block of `queue` that may go, which stays. Those before it are set aside.
    pub(super) fn front(&mut self, queue: Queue) -> Option<RecordId> {
        loop {
            let front = self.ends[usize::from(queue.0)].front;
            let node = self.nodes.get(front as usize)?;
            let block = RecordId(front);
            if !node.has_children {
                return Some(block);
            }
            self.detach(block);
            self.nodes[block.index()].aside = true;
        }
    }

    /// Takes out the first block of `queue` that may go. Those before it are set aside.
    pub(super) fn pop_front(&mut self, queue: Queue) -> Option<RecordId> {
        let block = self.front(queue)?;
        self.remove(block);
        Some(block)
    }

    fn link_front(&mut self, queue: Queue, block: RecordId) {
        let ends = &mut self.ends[usize::from(queue.0)];
        let after = std::mem::replace(&mut ends.front, block.0);
        match after {
            NONE => ends.back = block.0,
            _ => self.nodes[after as usize].before = block.0,
        }
        let node = &mut self.nodes[block.index()];
        (node.before, node.after, node.aside) = (NONE, after, false);
    }

    /// Takes away the place of `block`, which has one, but not its membership.
    fn detach(&mut self, block: RecordId) {
        let Node { queue, before, after, .. } = self.nodes[block.index()];
        let ends = &mut self.ends[usize::from(queue.0)];
        match before {
            NONE => ends.front = after,
            _ => self.nodes[before as usize].after = after,
        }
        match after {
            NONE => ends.back = before,
            _ => self.nodes[after as usize].before = before,
        }
    }
}
