//! How large a manager is.

use kv_pool::{BlockHasher, PoolConfig};

use crate::lower::TIERS_MAX;
use crate::{LowerOptions, OptionsError};

/// What a [`Manager`](crate::Manager) is made with.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Tokens of a block, 1 or more.
    pub block_tokens: u32,
    /// Blocks of each tier.
    pub pool: PoolConfig,
    /// Rows of the block table: sequences that can be running at a time.
    pub sequences_max: u32,
    /// Entries of a row: blocks that one sequence can have.
    pub blocks_per_sequence_max: u32,
    /// Workers that carry out every plan, 1 or more. Each holds a share of every block.
    pub workers: u16,
    /// Steps that are staged and not complete, at most. A pipeline needs as many as it has stages.
    pub steps_in_flight_max: u32,
    /// Device blocks that admission leaves for the growth of running sequences, while there are any.
    pub watermark_blocks: u32,
    /// Device blocks that [pins](crate::Manager::pin) hold at most, all together.
    pub pinned_blocks_max: u64,
    /// Whether a block is overwritten with zeros, on the device, before another tenant gets it.
    pub scrubs: bool,
    /// Events that are kept for [readers](crate::Manager::events) that have not read them: a block's each, rounded
    /// up to a power of two. 0 keeps none, and [`Manager::events`](crate::Manager::events) gives no readers.
    ///
    /// With events, a manager keeps the token ids of every block that has a name: `4 * block_tokens + 64`
    /// bytes of host memory for each block of the pool, and 64 for each event.
    pub events_max: usize,
    /// How blocks are named. Managers that exchange names use the same.
    pub hasher: BlockHasher,
    /// The tiers below host memory.
    pub lower: LowerOptions,
}

impl Default for ManagerOptions {
    /// 16 tokens a block, one worker, two steps in flight, 256 sequences of up to 2,048 blocks; no blocks, no
    /// pins, and no events.
    fn default() -> Self {
        Self {
            block_tokens: 16,
            pool: PoolConfig::default(),
            sequences_max: 256,
            blocks_per_sequence_max: 2048,
            workers: 1,
            steps_in_flight_max: 2,
            watermark_blocks: 0,
            pinned_blocks_max: 0,
            scrubs: false,
            events_max: 0,
            hasher: BlockHasher::FAST,
            lower: LowerOptions::default(),
        }
    }
}

/// Entries of a block table, at most: 4 GiB of block ids.
const TABLE_MAX: u64 = 1 << 30;

impl ManagerOptions {
    pub(crate) fn check(&self) -> Result<(), OptionsError> {
        let zero = [
            ("block_tokens", u64::from(self.block_tokens)),
            ("sequences_max", u64::from(self.sequences_max)),
            ("blocks_per_sequence_max", u64::from(self.blocks_per_sequence_max)),
            ("workers", u64::from(self.workers)),
            ("steps_in_flight_max", u64::from(self.steps_in_flight_max)),
        ];
        if let Some((field, _)) = zero.into_iter().find(|&(_, value)| value == 0) {
            return Err(OptionsError::Zero { field });
        }
        let tiers = self.lower.tiers;
        if tiers > TIERS_MAX {
            return Err(OptionsError::Tiers { tiers, max: TIERS_MAX });
        }
        check_table(self.sequences_max, self.blocks_per_sequence_max)
    }
}

/// Checks that a block table of this size is possible.
pub(crate) fn check_table(rows: u32, width: u32) -> Result<(), OptionsError> {
    if u64::from(rows) * u64::from(width) > TABLE_MAX {
        return Err(OptionsError::TableTooLarge { rows, width });
    }
    Ok(())
}

/// So many times `value`, if there is memory.
pub(crate) fn repeated<T: Clone>(value: T, count: usize) -> Result<Vec<T>, OptionsError> {
    let mut all = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    all.try_reserve_exact(count).map_err(|_| OptionsError::OutOfMemory { bytes })?;
    all.resize(count, value);
    Ok(all)
}
