//! Emptied lists, kept for the next user: in steady state nothing is allocated.

use crate::claim::ClaimList;
use crate::hold::Hold;
use crate::sync::Arc;
use crate::view::Shared;

/// Lists that are kept of each kind.
const LISTS_MAX: usize = 1024;
/// Kept lists of each kind have room for as many blocks as the pool has twice, and for this many more.
const ROOM_MIN: usize = 4096;

/// Emptied lists of one kind, up to a number of lists and a number of blocks that they have room for.
#[derive(Debug)]
struct Stack<T> {
    lists: Vec<T>,
    lists_max: usize,
    room: usize,
    room_max: usize,
}

impl<T> Stack<T> {
    const fn new(lists_max: usize, room_max: usize) -> Self {
        Self { lists: Vec::new(), lists_max, room: 0, room_max }
    }

    #[inline]
    fn take(&mut self, room: impl FnOnce(&T) -> usize) -> Option<T> {
        let list = self.lists.pop()?;
        self.room -= room(&list);
        Some(list)
    }

    /// Keeps a list with room for so many blocks, or drops it.
    #[inline]
    fn keep(&mut self, list: T, room: usize) {
        if self.lists.len() < self.lists_max && self.room + room <= self.room_max {
            self.room += room;
            self.lists.push(list);
        }
    }
}

/// Holds and lists that nobody uses. Each owns the pool, so that taking and keeping one touches no
/// count of owners. Who keeps one owns the pool besides: it must outlive the lock that is held.
#[derive(Debug)]
pub(crate) struct Spares {
    /// For one block each; as many as were ever out at once.
    singles: Stack<Arc<Hold>>,
    holds: Stack<Arc<Hold>>,
    claims: Stack<Box<ClaimList>>,
}

impl Spares {
    /// For a pool of so many blocks.
    pub(crate) fn new(blocks: usize) -> Self {
        let room = 2 * blocks + ROOM_MIN;
        Self {
            singles: Stack::new(blocks, 0),
            holds: Stack::new(LISTS_MAX, room),
            claims: Stack::new(LISTS_MAX, room),
        }
    }

    /// Gives all spares away, and keeps none from now on: a pool without a handle is not to own itself.
    pub(crate) fn close(&mut self) -> Self {
        let none =
            Self { singles: Stack::new(0, 0), holds: Stack::new(0, 0), claims: Stack::new(0, 0) };
        std::mem::replace(self, none)
    }

    /// A hold without another owner, for one block.
    #[inline]
    pub(crate) fn take_single(&mut self, pool: &Arc<Shared>) -> Arc<Hold> {
        match self.singles.take(|_| 0) {
            Some(hold) => hold,
            None => Hold::new(pool),
        }
    }

    /// A hold without another owner, with an empty list.
    #[inline]
    pub(crate) fn take_hold(&mut self, pool: &Arc<Shared>) -> Arc<Hold> {
        match self.holds.take(|hold| hold.blocks.capacity()) {
            Some(hold) => hold,
            None => Hold::new(pool),
        }
    }

    /// Keeps a hold without another owner and without blocks.
    #[inline]
    pub(crate) fn keep_hold(&mut self, hold: Arc<Hold>) {
        match hold.blocks.capacity() {
            0 => self.singles.keep(hold, 0),
            room => self.holds.keep(hold, room),
        }
    }

    /// An empty list for blocks that are claimed now.
    #[inline]
    pub(crate) fn take_claims(&mut self, pool: &Arc<Shared>) -> Box<ClaimList> {
        match self.claims.take(|list| list.claims.capacity()) {
            Some(list) => list,
            None => ClaimList::new(pool),
        }
    }

    /// Keeps an empty list.
    #[inline]
    pub(crate) fn keep_claims(&mut self, list: Box<ClaimList>) {
        let room = list.claims.capacity();
        self.claims.keep(list, room);
    }
}
