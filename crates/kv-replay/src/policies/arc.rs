//! ARC: two LRU lists whose share of the cache follows the hits on what each of them lately lost.

use super::queues::{Queue, Queues};
use super::{Block, BlockPolicy, Capacity, Lookups};

/// Cached, looked up once lately.
const RECENT: Queue = Queue(0);
/// Cached, looked up at least twice lately.
const FREQUENT: Queue = Queue(1);
/// Evicted from [`RECENT`]; remembered, but not cached.
const RECENT_GHOSTS: Queue = Queue(2);
/// Evicted from [`FREQUENT`]; remembered, but not cached.
const FREQUENT_GHOSTS: Queue = Queue(3);

/// The adaptive replacement cache (Megiddo and Modha, 2003), with the whole-number steps of its first publication.
pub(super) struct Arc {
    lists: Queues<4>,
    capacity: usize,
    /// Length that [`RECENT`] is steered to, from 0 to the capacity.
    recent_target: usize,
}

impl Arc {
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        Self {
            lists: Queues::new(lookups.distinct()),
            capacity: capacity.blocks(),
            recent_target: 0,
        }
    }

    /// Evicts from one of the two lists, into its ghosts: from [`RECENT`] if that is longer than it should be.
    fn replace(&mut self, missed_in: Option<Queue>) {
        let recent = self.lists.len(RECENT);
        let at_target = missed_in == Some(FREQUENT_GHOSTS) && recent == self.recent_target;
        if recent > 0 && (recent > self.recent_target || at_target) {
            self.move_oldest(RECENT, RECENT_GHOSTS);
        } else {
            self.move_oldest(FREQUENT, FREQUENT_GHOSTS);
        }
    }

    fn move_oldest(&mut self, from: Queue, to: Queue) {
        if let Some(block) = self.lists.pop_front(from) {
            self.lists.push_back(to, block);
        }
    }

    /// Makes room for a block of which nothing is remembered.
    fn admit_unknown(&mut self) {
        let once = self.lists.len(RECENT) + self.lists.len(RECENT_GHOSTS);
        let twice = self.lists.len(FREQUENT) + self.lists.len(FREQUENT_GHOSTS);
        if once == self.capacity {
            if self.lists.len(RECENT) < self.capacity {
                self.lists.pop_front(RECENT_GHOSTS);
                self.replace(None);
            } else {
                self.lists.pop_front(RECENT);
            }
        } else if once + twice >= self.capacity {
            if once + twice == 2 * self.capacity {
                self.lists.pop_front(FREQUENT_GHOSTS);
            }
            self.replace(None);
        }
    }
}

impl BlockPolicy for Arc {
    fn access(&mut self, block: Block) -> bool {
        let found = self.lists.queue_of(block);
        let (recent_ghosts, frequent_ghosts) =
            (self.lists.len(RECENT_GHOSTS), self.lists.len(FREQUENT_GHOSTS));
        match found {
            Some(RECENT | FREQUENT) => {
                self.lists.push_back(FREQUENT, block);
                return true;
            }
            Some(RECENT_GHOSTS) => {
                let step = (frequent_ghosts / recent_ghosts).max(1);
                self.recent_target = self.capacity.min(self.recent_target + step);
            }
            Some(_) => {
                let step = (recent_ghosts / frequent_ghosts).max(1);
                self.recent_target = self.recent_target.saturating_sub(step);
            }
            None => {
                self.admit_unknown();
                self.lists.push_back(RECENT, block);
                return false;
            }
        }
        self.replace(found);
        self.lists.push_back(FREQUENT, block);
        false
    }
}
