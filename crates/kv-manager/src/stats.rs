//! Counts: what was asked, found and moved, what blocks are doing, and what requests and steps waited for.

use kv_pool::Tier;
use kv_pool::stats::TierStats;

use crate::Manager;
use crate::request::{Answer, Waiting};

/// What a manager has done so far, and what its blocks are doing now. Blocks are of all groups together.
///
/// Bytes by way are these counts of blocks times the bytes of a block, which the manager does not know.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ManagerStats {
    /// Steps staged.
    pub steps: u64,
    /// Steps that failed at a worker.
    pub failed_steps: u64,
    /// Tokens of admitted prompts.
    pub prompt_tokens: u64,
    /// Of these, tokens that were found in the cache, in any tier.
    pub cached_tokens: u64,
    /// Of these, tokens that lay in host memory. What was loaded from a tier below for the request is among them;
    /// [`LowerStats::loaded_blocks`](crate::LowerStats::loaded_blocks) counts that. The others lay on the device. With
    /// several groups, those of the group that had most of them there.
    pub host_tokens: u64,
    /// Tokens that were computed though they were cached: when their block of the first group became full, another block
    /// bore its name.
    pub twice_tokens: u64,
    /// Blocks copied to host memory because they were evicted from the device.
    pub offloaded_blocks: u64,
    /// Blocks copied back from host memory.
    pub onboarded_blocks: u64,
    /// Blocks copied because a fork or a cached block shared them.
    pub copied_on_write: u64,
    /// Blocks of suspended sequences copied to host memory.
    pub suspended_blocks: u64,
    /// Device blocks scrubbed between tenants.
    pub scrubbed_blocks: u64,
    /// Granules of shared memory that groups were given.
    pub granted_granules: u64,
    /// Of these, granules that were taken from another group for it.
    pub taken_granules: u64,
    /// What was waited for.
    pub stalls: Stalls,
    /// What blocks are doing now, on the device and in host memory.
    pub blocks: [BlockStates; 2],
}

/// What requests and steps have waited for, in answers: the manager has no clock, and an engine that asks once a
/// step counts steps.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Stalls {
    /// Requests that waited for a prefix that another sequence computes.
    pub prefix: u64,
    /// Requests that waited for a load from a tier below host memory.
    pub load: u64,
    /// Requests and reservations for which there was no room.
    pub room: u64,
    /// Requests for which no row of the block table was free.
    pub row: u64,
    /// Steps that could not begin, because as many were in flight as may be.
    pub busy: u64,
}

/// What the blocks of a tier are doing. Each is counted in one of `free`, `cached`, `in_use` and `retiring`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct BlockStates {
    /// Without content, and unused.
    pub free: u64,
    /// With content that a lookup may find, and unused.
    pub cached: u64,
    /// In use by sequences, pins and transfers.
    pub in_use: u64,
    /// Released, while steps that may use them are not complete.
    pub retiring: u64,
    /// Of those that are retiring or in use, blocks that nobody has a use for, and that a lost worker or a transfer
    /// whose deadline has passed may still read or write.
    pub quarantined: u64,
}

impl BlockStates {
    fn add(&mut self, tier: &TierStats) {
        self.free += tier.empty;
        self.cached += tier.cached;
        self.in_use += tier.pinned + tier.claimed;
        self.retiring += tier.retiring;
    }
}

impl Manager {
    /// Counts so far, and what blocks are doing. Takes the lock of each group's pool once.
    #[must_use]
    pub fn stats(&self) -> ManagerStats {
        let mut stats = self.stats;
        self.plan.count(&mut stats);
        for group in self.groups.iter() {
            let pool = group.pool.stats();
            stats.blocks[Tier::Primary.index()].add(&pool.primary);
            stats.blocks[Tier::Secondary.index()].add(&pool.secondary);
        }
        if self.steps.workers().has_unfenced_loss() {
            stats.blocks.iter_mut().for_each(|tier| tier.quarantined = tier.retiring);
        }
        stats.blocks[Tier::Secondary.index()].quarantined += self.lower_stats().quarantined_blocks;
        stats
    }

    /// Counts what came of a request.
    pub(crate) fn count(&mut self, answer: &Answer) {
        let stats = &mut self.stats;
        match answer {
            Answer::Admitted(sequence) => stats.host_tokens += sequence.host_tokens,
            Answer::Waiting(Waiting::Prefix { .. }) => stats.stalls.prefix += 1,
            Answer::Waiting(Waiting::Load { .. }) => stats.stalls.load += 1,
            Answer::NoRoom(_) | Answer::Waiting(Waiting::Bound(_)) => stats.stalls.room += 1,
            Answer::NoRow => stats.stalls.row += 1,
            Answer::Refused(_) => {}
        }
    }
}
