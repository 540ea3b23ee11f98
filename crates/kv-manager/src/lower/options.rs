//! How the tiers below host memory are used, and what has come of it.

use std::time::Duration;

use kv_tier::BlockFault;

use super::ComputeRate;

/// Tiers below host memory, at most: [`Tier::Third`](kv_pool::Tier::Third) and [`Tier::Fourth`](kv_pool::Tier::Fourth).
pub(crate) const TIERS_MAX: u8 = 2;

/// How a manager uses the tiers below host memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LowerOptions {
    /// How many such tiers every worker has, from 0 to 2, the nearest first.
    pub tiers: u8,
    /// Store tickets that are open at a time, for each tier. 0 stores nothing.
    pub stores_open_max: u32,
    /// Load tickets that are open at a time, for each tier. 0 loads nothing.
    pub loads_open_max: u32,
    /// Blocks of a ticket, at most.
    pub ticket_blocks_max: u32,
    /// The shortest prefix, in blocks, that is worth loading instead of computing it.
    pub load_blocks_min: u32,
    /// Names that wait to be stored, for each tier. Beyond these, those that have waited longest are given up.
    pub queue_max: usize,
    /// How long a request waits for its loads, all together, by the pool's clock as of the latest step. Then it is
    /// computed.
    pub wait_max: Duration,
    /// How fast the engine computes: a load that would take longer than computing the same tokens is not begun, of a
    /// prefix as much is loaded as saves most time, and no request waits longer than computing would have taken.
    pub compute: ComputeRate,
}

impl Default for LowerOptions {
    /// No tier. For those that are asked for: two tickets each way, of up to 64 blocks, and a wait of a second.
    fn default() -> Self {
        Self {
            tiers: 0,
            stores_open_max: 2,
            loads_open_max: 8,
            ticket_blocks_max: 64,
            load_blocks_min: 1,
            queue_max: 1 << 16,
            wait_max: Duration::from_secs(1),
            compute: ComputeRate::Unknown,
        }
    }
}

/// Blocks of one group that were moved to tiers below host memory and back: the nearer tier first.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LowerBlocks {
    /// Blocks that were stored, on all workers.
    pub stored: [u64; 2],
    /// Blocks that were loaded and are right, on all workers.
    pub loaded: [u64; 2],
}

/// Counts of the tiers below host memory. Arrays have an entry for [`Tier::Third`](kv_pool::Tier::Third) and one for the fourth.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LowerStats {
    /// Names that can be loaded now.
    pub names: [u64; 2],
    /// Blocks that were stored, on all workers, of all groups together: see
    /// [`Manager::lower_blocks`](crate::Manager::lower_blocks).
    pub stored_blocks: [u64; 2],
    /// Blocks that were loaded and are right, on all workers.
    pub loaded_blocks: [u64; 2],
    /// Blocks that the store policy has refused.
    pub refused_blocks: [u64; 2],
    /// Of these, as far as the policy remembers them, blocks that were computed again since.
    pub regretted_blocks: [u64; 2],
    /// Names that tiers have dropped by themselves.
    pub dropped_names: [u64; 2],
    /// Blocks of stores that were not stored at some worker.
    pub unstored_blocks: u64,
    /// Blocks of loads that were not right at some worker, by the first fault, as in [`BlockFault::ALL`]: each was a miss.
    pub faults: [u64; BlockFault::ALL.len()],
    /// Blocks that were on their way when they were forgotten, or when their worker was lost.
    pub void_blocks: u64,
    /// Times that a request began to wait for a load.
    pub waits: u64,
    /// Blocks that a tier had for a request, and that were not loaded because computing them was to be faster.
    pub declined_blocks: u64,
    /// Times that a wait ended by its deadline.
    pub late: u64,
    /// Requests that were admitted while loads brought a part of their prefix.
    pub entered: u64,
    /// Of these, sequences that were set back because a load was wrong or late.
    pub redone: u64,
    /// Tickets that are open now.
    pub open_tickets: u64,
    /// Host blocks that open tickets hold now.
    pub ticket_blocks: u64,
    /// Of these, blocks of tickets whose deadline has passed, or with a lost worker: nobody waits for them, and
    /// nobody is given them.
    pub quarantined_blocks: u64,
    /// Loaded blocks that are kept in host memory for the request that waited for them.
    pub kept_blocks: u64,
}
