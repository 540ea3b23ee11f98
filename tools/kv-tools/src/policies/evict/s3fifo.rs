//! S3-FIFO: three first-in, first-out queues, the first of which filters out what is looked up once.

use super::ghosts::{GhostList, Ghosts};
use super::queues::{Queue, Queues};
use super::table;
use kv_pool::BlockHash;
use kv_pool::ConfigError;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};

const SMALL: Queue = Queue(0);
const MAIN: Queue = Queue(1);
/// Chosen already, for reasons of the main queue's length, before anybody asked.
const OVERDUE: Queue = Queue(2);
/// Names that left the small queue for good.
const LEFT_SMALL: GhostList = GhostList(0);

/// The small queue's part of the blocks: one in so many.
const SMALL_ONE_IN: usize = 10;

/// Hits that are counted for a block; more make no difference.
const FREQUENCY_MAX: u8 = 3;

/// S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, 2023), with a tenth of the blocks in the small queue.
///
/// New blocks enter the small queue. From its end a block that was found more than once goes on to
/// the main queue, any other is evicted and remembered as a ghost; content that comes back while it
/// is remembered enters the main queue at once. The end of the main queue goes round again as often
/// as it was found. A block that is held, or has children, keeps its turn until it is not.
///
/// As published, one miss may evict more than one block: those come as
/// [`overdue`](EvictionPolicy::overdue). Priorities are not looked at.
#[derive(Debug)]
pub struct S3Fifo {
    queues: Queues<3>,
    ghosts: Ghosts<1>,
    /// Names of the cached content, and hits of each block up to [`FREQUENCY_MAX`].
    cached: Vec<(BlockHash, u8)>,
    small_max: usize,
}

impl S3Fifo {
    /// A policy for blocks with indices below `blocks`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, ConfigError> {
        let queues = Queues::new(blocks)?;
        let len = queues.blocks();
        let cached = table(len, (BlockHash::ROOT, 0), blocks)?;
        let ghosts = Ghosts::new(len, blocks)?;
        Ok(Self { queues, ghosts, cached, small_max: (len / SMALL_ONE_IN).max(1) })
    }

    /// The first block of the small queue that was found at most once; those before it go on to the
    /// main queue, which may make one there overdue.
    fn next_of_small(&mut self) -> Option<RecordId> {
        while let Some(block) = self.queues.front(SMALL) {
            let (hash, frequency) = self.cached[block.index()];
            if frequency <= 1 {
                self.queues.remove(block);
                self.ghosts.push_back(LEFT_SMALL, hash);
                return Some(block);
            }
            self.queues.move_back(MAIN, block);
            if self.queues.members(MAIN) > self.queues.blocks() - self.small_max
                && let Some(overdue) = self.next_of_main()
            {
                self.queues.move_back(OVERDUE, overdue);
            }
        }
        None
    }

    /// The first block of the main queue whose hits are used up, which stays a member.
    fn next_of_main(&mut self) -> Option<RecordId> {
        while let Some(block) = self.queues.front(MAIN) {
            match &mut self.cached[block.index()].1 {
                0 => return Some(block),
                frequency => *frequency -= 1,
            }
            self.queues.move_back(MAIN, block);
        }
        None
    }
}

impl EvictionPolicy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        if !self.queues.knows(block) {
            return;
        }
        self.cached[block.index()] = (facts.hash, 0);
        let remembered = self.ghosts.remove(facts.hash).is_some();
        self.queues.enter(if remembered { MAIN } else { SMALL }, block);
    }

    fn found(&mut self, block: RecordId, _now: PolicyTime) {
        if let Some((_, frequency)) = self.cached.get_mut(block.index()) {
            *frequency = FREQUENCY_MAX.min(*frequency + 1);
        }
        if self.queues.queue_of(block) == Some(OVERDUE) {
            self.queues.move_back(MAIN, block);
        }
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        if self.queues.queue_of(block).is_none() {
            self.stored(block, facts);
        }
        self.queues.mark(block, true, facts.has_children);
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.queues.children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.queues.mark(block, false, false);
    }

    fn removed(&mut self, block: RecordId) {
        self.queues.remove(block);
    }

    fn victim(&mut self, _now: PolicyTime) -> Option<RecordId> {
        if let Some(overdue) = self.queues.pop_front(OVERDUE) {
            return Some(overdue);
        }
        let small_first = self.queues.members(SMALL) >= self.small_max;
        if (small_first || self.queues.members(MAIN) == 0)
            && let Some(block) = self.next_of_small()
        {
            return Some(block);
        }
        if let Some(block) = self.next_of_main() {
            self.queues.remove(block);
            return Some(block);
        }
        // All of the main queue is held or has children, so that the small one goes there, or further.
        if let Some(block) = self.next_of_small().or_else(|| self.queues.pop_front(OVERDUE)) {
            return Some(block);
        }
        let block = self.next_of_main()?;
        self.queues.remove(block);
        Some(block)
    }

    fn overdue(&self) -> usize {
        self.queues.members(OVERDUE)
    }

    fn len(&self) -> usize {
        self.queues.evictable_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: PolicyTime = PolicyTime { lookups: 0, ms: 0 };

    fn facts(index: u32) -> BlockFacts {
        BlockFacts::new(BlockHash::from_u128(u128::from(index)))
    }

    #[test]
    fn what_was_found_twice_or_comes_back_outlives_newer_blocks() {
        let mut policy = S3Fifo::new(10).unwrap();
        for index in 0..10 {
            policy.stored(RecordId::from_index(index), &facts(index));
            policy.evictable(RecordId::from_index(index), &facts(index));
        }
        for _ in 0..2 {
            policy.found(RecordId::from_index(0), NOW);
        }
        let victim = policy.victim(NOW).unwrap();
        assert_eq!(victim.index(), 1);
        // The evicted content comes back and goes straight to the main queue.
        policy.stored(victim, &facts(1));
        policy.evictable(victim, &facts(1));
        policy.held(RecordId::from_index(3));
        let order: Vec<_> = std::iter::from_fn(|| policy.victim(NOW)).collect();
        let order: Vec<usize> = order.into_iter().map(RecordId::index).collect();
        assert_eq!(order, [2, 4, 5, 6, 7, 8, 9, 1, 0]);
        policy.evictable(RecordId::from_index(3), &facts(3));
        assert_eq!(policy.victim(NOW), Some(RecordId::from_index(3)));
    }
}
