//! Least recently used: once as a prefix cache sees it, once block by block.

use super::queues::{Queue, Queues};
use super::{Block, BlockPolicy, Capacity, Lookups, Policy, RequestBlocks};

const CACHED: Queue = Queue(0);

/// Cached blocks, the least recently used at the front.
struct Recency {
    queue: Queues<1>,
    capacity: usize,
}

impl Recency {
    fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        Self { queue: Queues::new(lookups.distinct()), capacity: capacity.blocks() }
    }

    fn contains(&self, block: Block) -> bool {
        self.queue.queue_of(block).is_some()
    }

    fn touch(&mut self, block: Block) {
        self.queue.push_back(CACHED, block);
    }

    /// Caches `block`, which is not cached, in place of the least recently used one if need be.
    fn insert(&mut self, block: Block) {
        if self.queue.len(CACHED) >= self.capacity {
            self.queue.pop_front(CACHED);
        }
        self.queue.push_back(CACHED, block);
    }
}

/// LRU as a prefix cache sees it.
///
/// A cached block is of use only if every block before it is cached too, so the hits of a request are its leading run
/// of cached blocks. The rest is then inserted, and at the end the request's blocks are released from the last to the
/// first, which makes its head the most recently used: tails are evicted before heads.
pub(super) struct PrefixLru {
    cached: Recency,
}

impl PrefixLru {
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        Self { cached: Recency::new(lookups, capacity) }
    }
}

impl Policy for PrefixLru {
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64 {
        let hits = request.blocks.iter().take_while(|&&block| self.cached.contains(block)).count();
        for &block in &request.blocks[hits..] {
            if !self.cached.contains(block) {
                self.cached.insert(block);
            }
        }
        // A request larger than the cache has lost some of its own blocks by now.
        for &block in request.blocks.iter().rev() {
            if self.cached.contains(block) {
                self.cached.touch(block);
            }
        }
        hits as u64
    }
}

/// LRU, block by block.
pub(super) struct BlockLru {
    cached: Recency,
}

impl BlockLru {
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        Self { cached: Recency::new(lookups, capacity) }
    }
}

impl BlockPolicy for BlockLru {
    fn access(&mut self, block: Block) -> bool {
        let hit = self.cached.contains(block);
        if hit {
            self.cached.touch(block);
        } else {
            self.cached.insert(block);
        }
        hit
    }
}
