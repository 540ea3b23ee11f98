//! Queues of blocks, each block in at most one of them, from which those with children are kept back.
//!
//! What list-based policies share: constant-time moves between queues, and the rule that tails go
//! before heads. A block that comes up at the front but may not go is set aside: it stays a member
//! of its queue without a place in it, and gets the place at the front when it may go.

use super::{check_blocks, table};
use kv_pool::ConfigError;
use kv_pool::policy::{BlockFacts, RecordId};

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
    /// Nobody holds it.
    evictable: bool,
    has_children: bool,
    /// A member of its queue without a place in it.
    aside: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    front: u32,
    back: u32,
    /// Members, those set aside among them.
    members: usize,
}

/// `N` queues of blocks, at most 255.
#[derive(Debug)]
pub(super) struct Queues<const N: usize> {
    /// # Invariants
    ///
    /// The nodes of one queue that are not set aside form a list in both directions between that
    /// queue's ends.
    nodes: Vec<Node>,
    ends: [Ends; N],
    evictable: usize,
}

impl<const N: usize> Queues<N> {
    /// Empty queues for blocks with indices below `blocks`.
    pub(super) fn new(blocks: u64) -> Result<Self, ConfigError> {
        let absent = Node {
            before: NONE,
            after: NONE,
            queue: NO_QUEUE,
            evictable: false,
            has_children: false,
            aside: false,
        };
        Ok(Self {
            nodes: table(check_blocks(blocks)?, absent, blocks)?,
            ends: [Ends { front: NONE, back: NONE, members: 0 }; N],
            evictable: 0,
        })
    }

    /// How many blocks the queues were made for.
    pub(super) fn blocks(&self) -> usize {
        self.nodes.len()
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

    /// Members of `queue`.
    pub(super) fn members(&self, queue: Queue) -> usize {
        self.ends[usize::from(queue.0)].members
    }

    /// Members that nobody holds.
    pub(super) fn evictable_len(&self) -> usize {
        self.evictable
    }

    /// Puts a block that may be evicted at the back of `queue`, out of the queue that it was in.
    pub(super) fn push_back(&mut self, queue: Queue, block: RecordId, facts: &BlockFacts) {
        self.remove(block);
        self.link_back(queue, block);
        self.evictable += 1;
        let node = &mut self.nodes[block.index()];
        node.evictable = true;
        node.has_children = facts.has_children;
    }

    /// Puts a block that somebody holds at the back of `queue`, out of the queue that it was in.
    pub(super) fn enter(&mut self, queue: Queue, block: RecordId) {
        self.remove(block);
        self.link_back(queue, block);
    }

    /// Moves the member `block` to the back of `queue`, whether it may be evicted or not.
    pub(super) fn move_back(&mut self, queue: Queue, block: RecordId) {
        self.unlink(block);
        self.link_back(queue, block);
    }

    /// The member `block` keeps its place, and whether it may be evicted changes.
    pub(super) fn mark(&mut self, block: RecordId, evictable: bool, has_children: bool) {
        let Some(node) = self.nodes.get_mut(block.index()) else { return };
        if node.queue == NO_QUEUE {
            return;
        }
        self.evictable = self.evictable + usize::from(evictable) - usize::from(node.evictable);
        node.evictable = evictable;
        node.has_children = has_children;
        if node.aside && evictable && !has_children {
            let queue = node.queue;
            self.unlink(block);
            self.link_front(queue, block);
        }
    }

    /// As [`mark`](Self::mark), for a block that nobody holds.
    pub(super) fn children(&mut self, block: RecordId, has_children: bool) {
        if self.nodes.get(block.index()).is_some_and(|node| node.evictable) {
            self.mark(block, true, has_children);
        }
    }

    /// Takes `block` out of the queue that it is a member of, if any.
    pub(super) fn remove(&mut self, block: RecordId) {
        if self.queue_of(block).is_some() {
            self.unlink(block);
            self.evictable -= usize::from(self.nodes[block.index()].evictable);
            self.nodes[block.index()].evictable = false;
        }
    }

    /// The first block of `queue` that has a place, whether it may be evicted or not.
    pub(super) fn oldest(&self, queue: Queue) -> Option<RecordId> {
        let front = self.ends[usize::from(queue.0)].front;
        (front != NONE).then_some(RecordId::from_index(front))
    }

    /// The first block of `queue` that may be evicted, which stays. Those before it are set aside.
    pub(super) fn front(&mut self, queue: Queue) -> Option<RecordId> {
        loop {
            let front = self.ends[usize::from(queue.0)].front;
            let node = self.nodes.get(front as usize)?;
            let block = RecordId::from_index(front);
            if node.evictable && !node.has_children {
                return Some(block);
            }
            self.detach(block);
            self.nodes[block.index()].aside = true;
        }
    }

    /// Takes out the first block of `queue` that may be evicted. Those before it are set aside.
    pub(super) fn pop_front(&mut self, queue: Queue) -> Option<RecordId> {
        let block = self.front(queue)?;
        self.remove(block);
        Some(block)
    }

    fn link_back(&mut self, queue: Queue, block: RecordId) {
        let ends = &mut self.ends[usize::from(queue.0)];
        let before = std::mem::replace(&mut ends.back, block.index() as u32);
        ends.members += 1;
        match before {
            NONE => ends.front = block.index() as u32,
            _ => self.nodes[before as usize].after = block.index() as u32,
        }
        let node = &mut self.nodes[block.index()];
        (node.before, node.after) = (before, NONE);
        (node.queue, node.aside) = (queue, false);
    }

    fn link_front(&mut self, queue: Queue, block: RecordId) {
        let ends = &mut self.ends[usize::from(queue.0)];
        let after = std::mem::replace(&mut ends.front, block.index() as u32);
        ends.members += 1;
        match after {
            NONE => ends.back = block.index() as u32,
            _ => self.nodes[after as usize].before = block.index() as u32,
        }
        let node = &mut self.nodes[block.index()];
        (node.before, node.after) = (NONE, after);
        (node.queue, node.aside) = (queue, false);
    }

    /// Ends the membership of `block`, which is a member of some queue.
    fn unlink(&mut self, block: RecordId) {
        let Node { queue, aside, .. } = self.nodes[block.index()];
        if !aside {
            self.detach(block);
        }
        self.ends[usize::from(queue.0)].members -= 1;
        let node = &mut self.nodes[block.index()];
        (node.queue, node.aside) = (NO_QUEUE, false);
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
