//! ARC: two LRU lists whose share of the blocks follows the misses of what each of them lately lost.

use super::ghosts::{GhostList, Ghosts};
use super::queues::{Queue, Queues};
use super::table;
use kv_pool::BlockHash;
use kv_pool::ConfigError;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};

/// Looked up once lately.
const RECENT: Queue = Queue(0);
/// Looked up at least twice lately.
const FREQUENT: Queue = Queue(1);
/// Names evicted from [`RECENT`].
const RECENT_GHOSTS: GhostList = GhostList(0);
/// Names evicted from [`FREQUENT`].
const FREQUENT_GHOSTS: GhostList = GhostList(1);

/// What a policy knows of the last lookup that found nothing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Missed {
    /// Nothing is remembered of it.
    Unknown,
    Ghost(GhostList),
}

/// The adaptive replacement cache (Megiddo and Modha, 2003), with the whole-number steps of its
/// first publication.
///
/// It adapts when a lookup misses what it remembers, so the caller must report
/// [`missed`](EvictionPolicy::missed) lookups before it asks for a victim. Priorities are not
/// looked at.
#[derive(Debug)]
pub struct AdaptiveReplacement {
    lists: Queues<2>,
    ghosts: Ghosts<2>,
    /// Names of the cached content, and whether it came back while it was remembered.
    cached: Vec<(BlockHash, bool)>,
    /// Length that [`RECENT`] is steered to, from 0 to the number of blocks.
    recent_target: usize,
    last_missed: Missed,
}

impl AdaptiveReplacement {
    /// A policy for blocks with indices below `blocks`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there are too many, or no memory for the tables.
    pub fn new(blocks: u64) -> Result<Self, ConfigError> {
        let lists = Queues::new(blocks)?;
        let cached = table(lists.blocks(), (BlockHash::ROOT, false), blocks)?;
        // One more for the time between an eviction and the insertion that it makes room for.
        let ghosts = Ghosts::new(lists.blocks() + 1, blocks)?;
        Ok(Self { lists, ghosts, cached, recent_target: 0, last_missed: Missed::Unknown })
    }

    fn evict_from(&mut self, list: Queue) -> Option<RecordId> {
        let block = self.lists.pop_front(list)?;
        let hash = self.cached[block.index()].0;
        let recent = self.lists.members(RECENT) + 1;
        if list == FREQUENT {
            self.ghosts.push_back(FREQUENT_GHOSTS, hash);
        } else if self.last_missed != Missed::Unknown || recent < self.lists.blocks() {
            // A list of recent blocks that fills the cache has no room for ghosts.
            self.ghosts.push_back(RECENT_GHOSTS, hash);
        }
        Some(block)
    }

    /// Forgets names until both lists and their ghosts are as short as they must be with a block
    /// more on the recent one.
    fn trim(&mut self) {
        let blocks = self.lists.blocks();
        while self.lists.members(RECENT) + self.ghosts.len(RECENT_GHOSTS) >= blocks
            && self.ghosts.len(RECENT_GHOSTS) > 0
        {
            self.ghosts.pop_front(RECENT_GHOSTS);
        }
        let cached = self.lists.members(RECENT) + self.lists.members(FREQUENT);
        let excess = |ghosts: &Ghosts<2>| {
            let remembered = ghosts.len(RECENT_GHOSTS) + ghosts.len(FREQUENT_GHOSTS);
            cached + remembered >= 2 * blocks && ghosts.len(FREQUENT_GHOSTS) > 0
        };
        while excess(&self.ghosts) {
            self.ghosts.pop_front(FREQUENT_GHOSTS);
        }
    }
}

impl EvictionPolicy for AdaptiveReplacement {
    fn name(&self) -> &'static str {
        "arc"
    }

    fn missed(&mut self, hash: BlockHash, _now: PolicyTime) {
        let recent_ghosts = self.ghosts.len(RECENT_GHOSTS);
        let frequent_ghosts = self.ghosts.len(FREQUENT_GHOSTS);
        self.last_missed = match self.ghosts.list_of(hash) {
            Some(RECENT_GHOSTS) => {
                let step = (frequent_ghosts / recent_ghosts).max(1);
                self.recent_target = self.lists.blocks().min(self.recent_target + step);
                Missed::Ghost(RECENT_GHOSTS)
            }
            Some(list) => {
                let step = (recent_ghosts / frequent_ghosts).max(1);
                self.recent_target = self.recent_target.saturating_sub(step);
                Missed::Ghost(list)
            }
            None => Missed::Unknown,
        };
    }

    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        if !self.lists.knows(block) {
            return;
        }
        let came_back = self.ghosts.remove(facts.hash).is_some();
        self.cached[block.index()] = (facts.hash, came_back);
        if !came_back {
            self.trim();
        }
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        let Some(cached) = self.cached.get_mut(block.index()) else { return };
        if cached.0 != facts.hash {
            *cached = (facts.hash, false);
        }
        let frequent = cached.1 || facts.found > 0;
        self.lists.push_back(if frequent { FREQUENT } else { RECENT }, block, facts);
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        self.lists.children(block, has_children);
    }

    fn held(&mut self, block: RecordId) {
        self.lists.remove(block);
    }

    fn removed(&mut self, block: RecordId) {
        self.lists.remove(block);
    }

    fn victim(&mut self, _now: PolicyTime) -> Option<RecordId> {
        let recent = self.lists.members(RECENT);
        let at_target =
            self.last_missed == Missed::Ghost(FREQUENT_GHOSTS) && recent == self.recent_target;
        let (first, second) = if recent > 0 && (recent > self.recent_target || at_target) {
            (RECENT, FREQUENT)
        } else {
            (FREQUENT, RECENT)
        };
        self.evict_from(first).or_else(|| self.evict_from(second))
    }

    fn len(&self) -> usize {
        self.lists.evictable_len()
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
    fn what_comes_back_is_frequent_and_stays_while_new_blocks_pass() {
        let mut policy = AdaptiveReplacement::new(4).unwrap();
        let place = |policy: &mut AdaptiveReplacement, block: RecordId, name: u32| {
            policy.missed(facts(name).hash, NOW);
            policy.stored(block, &facts(name));
            policy.evictable(block, &facts(name));
        };
        for index in 0..4 {
            place(&mut policy, RecordId::from_index(index), index);
        }
        // Block 3 is found again, so that the recent list has room for ghosts.
        policy.held(RecordId::from_index(3));
        policy.evictable(RecordId::from_index(3), &BlockFacts { found: 1, ..facts(3) });
        let first = policy.victim(NOW).unwrap();
        assert_eq!(first.index(), 0);
        place(&mut policy, first, 4);
        let second = policy.victim(NOW).unwrap();
        assert_eq!(second.index(), 1);
        // Name 0 comes back: its block is frequent, and the recent list may be longer.
        place(&mut policy, second, 0);
        assert_eq!(policy.recent_target, 1);
        let order: Vec<_> = std::iter::from_fn(|| policy.victim(NOW)).collect();
        let order: Vec<usize> = order.into_iter().map(RecordId::index).collect();
        assert_eq!(order, [2, 3, 1, 0]);
    }
}
