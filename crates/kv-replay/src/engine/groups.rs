//! The groups of a run's model: layers with full attention, with a sliding window, and with a recurrent state.

use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::manager::ManagerOptions;
use kv_plane::{BuildError, GroupKind, GroupOptions, KvCacheOptions, SharedMemory};

use super::{RunError, counted};
use crate::config::RunConfig;
use crate::shape::KV_COUNT;

/// Blocks of a sequence's states that are in use at a time, at most, beside those behind drafts: the one that is written, and
/// checkpoints that are copied.
pub(super) const STATES_PER_SEQUENCE: u64 = 4;

/// Trace blocks between the checkpoints of a state.
const CHECKPOINT_BLOCKS: u32 = 4;

pub(super) fn shapes(config: &RunConfig) -> Result<Vec<(KvShape, Reads)>, RunError> {
    let groups = all(config, 1)?;
    Ok(groups.iter().map(|group| (group.shape, Reads::of(group))).collect())
}

/// The groups of a model whose requests have up to `blocks` blocks. The first has full attention.
pub(super) fn all(config: &RunConfig, blocks: u64) -> Result<Vec<GroupOptions>, RunError> {
    let as_said = [
        counted("--device-blocks", config.device_blocks)?,
        counted("--host-blocks", config.host_blocks)?,
    ];
    let longest = counted("the longest request, in blocks,", blocks)?;
    let group = |kind, shape, [device_blocks, host_blocks]: [u32; 2], draft_model| GroupOptions {
        kind,
        host_blocks,
        blocks_per_sequence_max: longest,
        draft_model,
        ..GroupOptions::new(shape, device_blocks)
    };
    let first = kv_shape(config, config.shape.layers - config.window_layers())?;
    let mut groups = vec![group(GroupKind::Full, first, as_said, false)];
    if let Some(tokens) = config.window {
        let kind = GroupKind::Window { tokens, sinks: 0 };
        let shape = kv_shape(config, config.window_layers())?;
        groups.push(group(kind, shape, as_said, false));
    }
    if config.state_layers > 0 {
        let drafts = config.life.drafts;
        let states = u64::from(config.max_batch) * (STATES_PER_SEQUENCE + u64::from(drafts));
        let what = "the states of --max-batch requests";
        let blocks = [counted(what, states)?, counted(what, states.min(config.host_blocks))?];
        let checkpoint_tokens = config.block_tokens * CHECKPOINT_BLOCKS;
        let kind = GroupKind::State { checkpoint_tokens, drafts };
        groups.push(group(kind, state_shape(config)?, blocks, false));
    }
    if config.draft_layers > 0 {
        let shape = kv_shape(config, config.draft_layers)?;
        groups.push(group(GroupKind::Full, shape, as_said, true));
    }
    Ok(groups)
}

/// How the groups share the memory of each of `devices` devices, between which the layers are divided; `None` where
/// each group has memory of its own.
pub(super) fn shared(config: &RunConfig, devices: usize) -> Result<Option<SharedMemory>, RunError> {
    let Some(bytes) = config.device_memory else { return Ok(None) };
    Ok(KvCacheOptions::of(all(config, 1)?)
        .sharing(bytes, devices)
        .map_err(BuildError::from)?
        .shared)
}

/// The same options with memory that the groups share, if they do.
pub(super) fn sharing(options: KvCacheOptions, memory: Option<SharedMemory>) -> KvCacheOptions {
    let Some(memory) = memory else { return options };
    let groups = options.groups.iter().zip(blocks_of(&memory));
    let groups = groups.map(|(&group, device_blocks)| GroupOptions { device_blocks, ..group });
    KvCacheOptions { groups: groups.collect(), shared: Some(memory), ..options }
}

/// Device blocks of each group, if it had all of the shared memory.
pub(super) fn blocks_of(memory: &SharedMemory) -> Vec<u32> {
    memory.granule_blocks.iter().map(|of| of.saturating_mul(memory.granules)).collect()
}

fn kv_shape(config: &RunConfig, layers: u32) -> Result<KvShape, RunError> {
    let row_bytes = config.shape.row_bytes()?;
    let (kv_count, block_tokens) = (KV_COUNT as u32, config.block_tokens);
    Ok(KvShape::new(KvShapeOptions { layers, kv_count, row_bytes, block_tokens })?)
}

/// A state of a layer has as many bytes as keys and values of some tokens, in one row of each.
fn state_shape(config: &RunConfig) -> Result<KvShape, RunError> {
    let (row_bytes, tokens) = (config.shape.row_bytes()?, u64::from(config.state_tokens));
    let row_bytes = row_bytes.saturating_mul(tokens);
    let (layers, kv_count) = (config.state_layers, KV_COUNT as u32);
    Ok(KvShape::new(KvShapeOptions { layers, kv_count, row_bytes, block_tokens: 1 })?)
}

/// What a reader of a part of the model reads.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reads {
    All,
    /// So many tokens, which end with its own.
    Last(u32),
    /// The state before its tokens.
    State,
    /// All tokens that the draft model has KV for.
    Drafted,
}

impl Reads {
    pub(super) fn of(group: &GroupOptions) -> Self {
        match group.kind {
            _ if group.draft_model => Self::Drafted,
            GroupKind::Window { tokens, .. } => Self::Last(tokens),
            GroupKind::State { .. } => Self::State,
            _ => Self::All,
        }
    }

    /// Checksums of a sequence of `tokens` tokens: one for each entry of its row of the block table.
    pub(super) fn checksums(self, tokens: u64, block_tokens: u64) -> usize {
        match self {
            Self::State => 1,
            _ => tokens.div_ceil(block_tokens) as usize,
        }
    }

    /// The first block that tokens from `start` on read.
    pub(super) fn first_block(self, start: u64, block_tokens: u64) -> usize {
        let Self::Last(tokens) = self else { return 0 };
        (start.saturating_sub(u64::from(tokens) - 1) / block_tokens) as usize
    }
}

/// Granules that the longest request needs at most, if nothing else is in use.
pub(super) fn granules_of_longest(options: &ManagerOptions, shared: &SharedMemory) -> u64 {
    let groups = options.groups.iter().zip(&shared.granule_blocks);
    let needed = groups.map(|(group, &of)| {
        let blocks = match group.kind {
            GroupKind::State { drafts, .. } => STATES_PER_SEQUENCE + u64::from(drafts),
            // One more for a block that is copied.
            _ => u64::from(group.blocks_per_sequence_max) + 1,
        };
        blocks.div_ceil(of.into())
    });
    needed.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_ends_with_the_token_that_reads_it() {
        let window = Reads::Last(4);
        let first = |start| window.first_block(start, 4);
        // Token 6 reads tokens 3 to 6, token 7 reads 4 to 7.
        assert_eq!([0, 3, 6, 7, 10, 11].map(first), [0, 0, 0, 1, 1, 2]);
        assert_eq!(Reads::Last(1).first_block(4, 4), 1);
        assert_eq!(Reads::All.first_block(100, 4), 0);
    }
}
