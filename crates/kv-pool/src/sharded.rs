//! Several pools that share the blocks of each tier, for more threads than one lock serves.

use std::cmp::Reverse;
use std::num::NonZeroUsize;

use crate::sync::Arc;
use crate::tenants::Tenant;
use crate::{
    BlockHash, BlockPool, BudgetError, ClaimError, Claimed, ConfigError, PoolConfig, PoolStats,
    Tier, Withdrawn,
};

/// The most shards that a pool can be divided into: each has queues of its own, some 4 KiB.
const SHARDS_MAX: usize = 4096;

/// Pools side by side: what has one key lies in one of them, and threads that work on different
/// keys do not wait for each other.
///
/// Each shard is a [`BlockPool`] with a lock, an index and an eviction order of its own, and all that
/// a pool promises holds in it. Block ids are numbered through all of them: block id `n` of a tier is of
/// shard `n` modulo the number of shards. What a shard hands out, and all that is done with it, is as
/// of any pool. Block ids are those of the shard.
///
/// The key says where to look, so content is found by the key that it was named under and by no
/// other. It should be the same for requests that share content: the name of the first block of a
/// conversation, or, where all begin with the same system prompt, of the first block that differs.
/// What has two keys is cached twice.
///
/// What is given up: the block that is evicted is the one whose turn it is in its shard, not in all
/// of them, and [`stats`](Self::stats) adds up shards that are looked at one after the other.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use kv_pool::{BlockHash, Naming, PoolConfig, ShardedPool};
///
/// let shards = NonZeroUsize::new(4).unwrap();
/// let pool = ShardedPool::new(&PoolConfig::primary_only(64), shards)?;
/// let prompt = [BlockHash::chain(BlockHash::ROOT, &[1, 2]), BlockHash::ROOT];
/// let own = pool.shard(prompt[0]);
///
/// let mut new = own.claim(1)?;
/// drop(new.register(&prompt[..1], Naming::default())?);
/// assert_eq!(own.match_prefix(&prompt).len(), 1);
///
/// // More than a quarter of the blocks: the rest is lent by other shards.
/// let claimed = pool.claim(prompt[0], 20)?;
/// assert_eq!(claimed[0].len(), 16);
/// assert_eq!(claimed[1..].iter().map(|lent| lent.len()).sum::<usize>(), 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardedPool {
    shards: Arc<Vec<BlockPool>>,
}

/// Block ids of a shard below `upto`, where block id `n` is of shard `n` modulo `shards`.
fn share(upto: u64, shard: usize, shards: usize) -> u64 {
    (upto + shards as u64 - 1 - shard as u64) / shards as u64
}

impl ShardedPool {
    /// A pool of `config`, divided among `shards`: about twice as many as threads use it at once.
    ///
    /// # Errors
    /// [`ConfigError`]; [`ConfigError::FewerThanShards`] if there is not a primary block for each shard,
    /// [`ConfigError::TooManyShards`] if there are more than 4,096.
    pub fn new(config: &PoolConfig, shards: NonZeroUsize) -> Result<Self, ConfigError> {
        config.check()?;
        let (count, primary_blocks) = (shards.get(), config.primary_blocks);
        if count > SHARDS_MAX {
            return Err(ConfigError::TooManyShards { shards: count, max: SHARDS_MAX });
        }
        // The first shard has the most blocks, the last one the fewest.
        if primary_blocks < count as u64 {
            return Err(ConfigError::FewerThanShards { primary_blocks, shards: count });
        }
        let shard = |at| {
            let share = |blocks| share(blocks, at, count);
            let part = PoolConfig {
                primary_blocks: share(config.primary_blocks),
                secondary_blocks: share(config.secondary_blocks),
                further_blocks: config.further_blocks.map(share),
                ..config.clone()
            };
            BlockPool::builder(&part).every_id(count as u32, at as u32).build()
        };
        let shards = (0..count).map(shard).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { shards: Arc::new(shards) })
    }

    /// The shard of a key.
    #[must_use]
    #[inline]
    pub fn shard(&self, key: BlockHash) -> &BlockPool {
        &self.shards[self.home(key)]
    }

    /// The number of the shard of a key.
    #[inline]
    fn home(&self, key: BlockHash) -> usize {
        // The index uses other bits: those of a shard are not to be alike in it.
        let mixed = key.mixed().wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 32;
        (mixed as usize * self.shards.len()) >> 32
    }

    /// All shards; shard `n` has the block ids that are `n` modulo their number.
    #[must_use]
    pub fn shards(&self) -> &[BlockPool] {
        &self.shards
    }

    /// Claims `count` primary blocks for content of `key`: of its shard, and what that lacks of those
    /// that can spare most. The first list is of the key's shard, whose content can be named there. The
    /// others are blocks that other shards lend, a list for each: they serve for content that no lookup
    /// is to find, for a name given to them would be known to their shard, where nobody looks for it.
    ///
    /// Takes the lock of the key's shard. If that has too few, takes the locks of all shards together,
    /// so that the blocks are claimed in one step, or none is.
    ///
    /// # Errors
    /// [`ClaimError::Exhausted`] if all shards together had too few at that moment, without those that
    /// a shard keeps for its tenants; nothing was evicted then.
    pub fn claim(&self, key: BlockHash, count: usize) -> Result<Vec<Claimed>, ClaimError> {
        let home = self.home(key);
        if let Ok(own) = self.shards[home].claim(count) {
            return Ok(vec![own]);
        }
        const TIER: Tier = Tier::Primary;
        const BY: Tenant = Tenant::NOBODY;
        // In the order of the shards, which is the order of all who take more than one.
        let mut states: Vec<_> =
            self.shards.iter().map(|shard| shard.shared.state.lock()).collect();
        let most: Vec<_> = states.iter().map(|state| state.most_claimable(TIER, BY)).collect();
        let claimable = most.iter().sum();
        if count > claimable {
            let retiring = states.iter().map(|state| state.tier(TIER).retiring()).sum();
            return Err(ClaimError::Exhausted { requested: count, claimable, retiring });
        }
        let own =
            states[home].claim_list(&self.shards[home].shared, TIER, BY, count.min(most[home]));
        let mut lenders: Vec<_> = (0..most.len()).filter(|&at| at != home).collect();
        lenders.sort_by_key(|&at| Reverse(most[at]));
        let (mut missing, mut lists) = (count - own.claims.len(), vec![own]);
        for at in lenders {
            let part = missing.min(most[at]);
            if part == 0 {
                break;
            }
            missing -= part;
            lists.push(states[at].claim_list(&self.shards[at].shared, TIER, BY, part));
        }
        // A list that is dropped takes its shard's lock.
        drop(states);
        Ok(lists.into_iter().map(|list| Claimed::list(TIER, list)).collect())
    }

    /// [`BlockPool::set_budget`] for the block ids below `blocks` of a tier, with what leaves each shard.
    /// Takes the locks of all shards together.
    ///
    /// # Errors
    /// [`BudgetError`]; no shard has changed then. [`BudgetError::BelowReserved`] is of one shard.
    pub fn set_budget(&self, tier: Tier, blocks: u64) -> Result<Vec<Withdrawn>, BudgetError> {
        let mut states: Vec<_> =
            self.shards.iter().map(|shard| shard.shared.state.lock()).collect();
        let capacity = states.iter().map(|state| u64::from(state.tier(tier).capacity)).sum();
        if blocks > capacity {
            return Err(BudgetError::OverCapacity { tier, requested: blocks, capacity });
        }
        let count = self.shards.len();
        for (at, state) in states.iter().enumerate() {
            state.check_budget(tier, share(blocks, at, count))?;
        }
        let set = |(at, state): (usize, &mut _)| {
            self.shards[at].set_checked_budget(state, tier, share(blocks, at, count) as u32)
        };
        Ok(states.iter_mut().map(|state| &mut **state).enumerate().map(set).collect())
    }

    /// The sum over all shards, which are looked at one after the other.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let all = self.shards.iter().map(BlockPool::stats);
        all.fold(PoolStats::default(), |sum, one| PoolStats {
            primary: sum.primary.plus(&one.primary),
            secondary: sum.secondary.plus(&one.secondary),
            further: [0, 1].map(|tier| sum.further[tier].plus(&one.further[tier])),
            counters: sum.counters.plus(&one.counters),
        })
    }
}
