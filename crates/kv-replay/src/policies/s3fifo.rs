//! S3-FIFO: three first-in, first-out queues, the first of which filters out what is looked up only once.

use super::queues::{Queue, Queues};
use super::{Block, BlockPolicy, Capacity, Lookups};

const SMALL: Queue = Queue(0);
const MAIN: Queue = Queue(1);
/// Blocks that left the small queue for good; remembered, but not cached.
const GHOST: Queue = Queue(2);

/// The small queue's part of the capacity: one in so many blocks.
const SMALL_ONE_IN: usize = 10;

/// Hits that are counted for a block; more make no difference.
const FREQUENCY_MAX: u8 = 3;

/// S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, 2023).
///
/// New blocks enter the small queue. From its end a block that was hit more than once goes on to the main queue, any
/// other is evicted and remembered as a ghost; a ghost that is looked up enters the main queue at once. The end of
/// the main queue goes round again as often as it was hit.
pub(super) struct S3Fifo {
    queues: Queues<3>,
    /// Hits of each cached block, up to [`FREQUENCY_MAX`].
    frequency: Vec<u8>,
    capacity: usize,
    small_max: usize,
}

impl S3Fifo {
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        let capacity = capacity.blocks();
        Self {
            queues: Queues::new(lookups.distinct()),
            frequency: vec![0; lookups.distinct()],
            capacity,
            small_max: (capacity / SMALL_ONE_IN).max(1),
        }
    }

    fn cached_len(&self) -> usize {
        self.queues.len(SMALL) + self.queues.len(MAIN)
    }

    fn evict(&mut self) {
        let small_is_full = self.queues.len(SMALL) >= self.small_max;
        if (small_is_full || self.queues.len(MAIN) == 0) && self.evict_from_small() {
            return;
        }
        self.evict_from_main();
    }

    /// Evicts the first block of the small queue that was hit at most once, and promotes those before it; whether
    /// there was one.
    fn evict_from_small(&mut self) -> bool {
        while let Some(block) = self.queues.pop_front(SMALL) {
            if self.frequency[block.index()] <= 1 {
                self.queues.push_back(GHOST, block);
                if self.queues.len(GHOST) > self.capacity {
                    self.queues.pop_front(GHOST);
                }
                return true;
            }
            self.queues.push_back(MAIN, block);
            if self.queues.len(MAIN) > self.capacity - self.small_max {
                self.evict_from_main();
            }
        }
        false
    }

    fn evict_from_main(&mut self) {
        while let Some(block) = self.queues.pop_front(MAIN) {
            match &mut self.frequency[block.index()] {
                0 => return,
                frequency => *frequency -= 1,
            }
            self.queues.push_back(MAIN, block);
        }
    }
}

impl BlockPolicy for S3Fifo {
    fn access(&mut self, block: Block) -> bool {
        if matches!(self.queues.queue_of(block), Some(SMALL | MAIN)) {
            let frequency = &mut self.frequency[block.index()];
            *frequency = FREQUENCY_MAX.min(*frequency + 1);
            return true;
        }
        while self.cached_len() >= self.capacity {
            self.evict();
        }
        self.frequency[block.index()] = 0;
        // Asked only now: the evictions above may have pushed this very block out of the ghosts.
        let remembered = self.queues.queue_of(block) == Some(GHOST);
        self.queues.push_back(if remembered { MAIN } else { SMALL }, block);
        false
    }
}
