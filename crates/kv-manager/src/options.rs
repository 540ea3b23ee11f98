//! How large a manager is.

use std::ops::RangeInclusive;

use kv_pool::{BlockHasher, PoolConfig};
use kv_tier::GroupKind;

use crate::lower::TIERS_MAX;
use crate::{BatchRow, GroupId, LowerOptions, OptionsError, Start};

/// Checks what can be checked of a group alone.
pub(crate) fn check_kind(group: GroupId, kind: GroupKind) -> Result<(), OptionsError> {
    let field = match kind {
        GroupKind::Window { tokens: 0, .. } => "a window's tokens",
        GroupKind::State { checkpoint_tokens: 0, .. } => "checkpoint_tokens",
        _ => return Ok(()),
    };
    Err(OptionsError::GroupZero { group, field })
}

/// Entries of a row for `blocks` blocks of a sequence.
pub(crate) fn row_width(kind: GroupKind, blocks: u32) -> u32 {
    if let GroupKind::State { drafts, .. } = kind { drafts.saturating_add(1) } else { blocks }
}

/// The ranges of a sequence's blocks of `block_tokens` tokens that a row of a batch needs, which begins behind
/// `start` tokens or later, and ends with token `end`.
pub(crate) fn needed_blocks(
    kind: GroupKind,
    batch: &BatchRow,
    (start, end): (u64, u64),
    block_tokens: u64,
) -> [(u64, u64); 2] {
    let blocks = end.div_ceil(block_tokens);
    match kind {
        GroupKind::Window { tokens, sinks } => {
            let first = start.saturating_sub(u64::from(tokens) - 1) / block_tokens;
            let sinks = u64::from(sinks).div_ceil(block_tokens).min(blocks);
            [(0, sinks), (first.min(blocks), blocks)]
        }
        GroupKind::State { .. } => {
            let input = match batch.start {
                Start::At(1..) => u64::from(batch.input),
                _ => 0,
            };
            [(0, 1 + u64::from(batch.drafts)), (input, input + 1)]
        }
        GroupKind::Full => [(0, blocks), (0, 0)],
    }
}

/// What a group of layers is made with.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// What it keeps of a sequence.
    pub kind: GroupKind,
    /// Tokens of a block, 1 or more. The smallest block size of all groups divides the others.
    ///
    /// For [`State`](GroupKind::State), checkpoints are behind multiples of so many tokens.
    pub block_tokens: u32,
    /// Blocks of each tier.
    pub pool: PoolConfig,
    /// Entries of a row of the block table: places of blocks that one sequence can have.
    pub blocks_per_sequence_max: u32,
    /// Device blocks that admission leaves for the growth of running sequences, while there are any.
    pub watermark_blocks: u32,
    /// Whether a draft model of its own writes it, which may compute later than the model, or not at all in a step. Its KV
    /// has an end of its own ([`Sequence::draft_end`](crate::Sequence::draft_end)), which is the same for all such groups
    /// and moves with [`commit_draft`](crate::Manager::commit_draft) only. Of kind [`Full`](GroupKind::Full).
    pub draft_model: bool,
}

impl GroupOptions {
    /// Layers of full attention, with these blocks of so many tokens: 2,048 of a sequence at most.
    #[must_use]
    pub fn new(block_tokens: u32, pool: PoolConfig) -> Self {
        Self {
            kind: GroupKind::Full,
            block_tokens,
            pool,
            blocks_per_sequence_max: 2048,
            watermark_blocks: 0,
            draft_model: false,
        }
    }
}

/// Device memory that the blocks of all groups lie in.
///
/// It is divided into granules. Each is one group's at a time, and holds blocks of that group only, so no block is
/// padded to another group's size. Block `b` of a group lies in granule `b / granule_blocks`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SharedMemory {
    /// Granules of the memory, 1 or more.
    pub granules: u32,
    /// Blocks of a granule in each group, in their order; 1 or more. Where blocks of several groups have so many
    /// bytes together, a granule of as many bytes has no room to spare.
    pub granule_blocks: Vec<u32>,
}

/// What a [`Manager`](crate::Manager) is made with.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// The groups of the model's layers, 1 or more: one if all layers are alike. The place of a group in this list is its
    /// [`GroupId`].
    pub groups: Vec<GroupOptions>,
    /// Rows of the block tables: sequences that can be running at a time.
    pub sequences_max: u32,
    /// Workers that carry out every plan, 1 or more. Each holds a share of every block.
    pub workers: u16,
    /// Steps that are staged and not complete, at most. A pipeline needs as many as it has stages.
    pub steps_in_flight_max: u32,
    /// Device blocks that [pins](crate::Manager::pin) hold at most, all together, of all groups.
    pub pinned_blocks_max: u64,
    /// Whether a block is overwritten with zeros, on the device, before another tenant gets it.
    pub scrubs: bool,
    /// Events that are kept for [readers](crate::Manager::events) that have not read them: a block's each, rounded
    /// up to a power of two. 0 keeps none, and [`Manager::events`](crate::Manager::events) gives no readers.
    ///
    /// With events, a manager keeps the token ids of every block that has a name: `4 * block_tokens + 64`
    /// bytes of host memory for each block of the pool, and 64 for each event. For each block in a tier below
    /// host memory it keeps as much, so a large tier needs memory for them: 16 tokens a block are 128 MB for each
    /// million blocks.
    pub events_max: usize,
    /// How blocks are named. Managers that exchange names use the same.
    pub hasher: BlockHasher,
    /// Ids that stand for something else, such as those of pictures, and mean nothing by themselves. Where ids are given, it
    /// is refused that such come without an [input](crate::Tokens::With) that begins with the first of them.
    pub placeholder_ids: Vec<RangeInclusive<u32>>,
    /// The tiers below host memory.
    pub lower: LowerOptions,
    /// Device memory that two groups or more share; `None` where each group has memory of its own. The pool of each
    /// group then has `granules * granule_blocks` device blocks, of which the group is given those that it needs.
    pub shared: Option<SharedMemory>,
}

/// Entries of a block table, at most: 4 GiB of block ids.
const TABLE_MAX: u64 = 1 << 30;

/// Groups, at most.
const GROUPS_MAX: usize = 64;

impl ManagerOptions {
    /// One [group of full attention](GroupOptions::new); one worker, two steps in flight, 256 sequences; no pins, and no
    /// events.
    #[must_use]
    pub fn new(block_tokens: u32, pool: PoolConfig) -> Self {
        Self::of(vec![GroupOptions::new(block_tokens, pool)])
    }

    /// The same with these groups.
    #[must_use]
    pub fn of(groups: Vec<GroupOptions>) -> Self {
        Self {
            groups,
            sequences_max: 256,
            workers: 1,
            steps_in_flight_max: 2,
            pinned_blocks_max: 0,
            scrubs: false,
            events_max: 0,
            hasher: BlockHasher::FAST,
            placeholder_ids: Vec::new(),
            lower: LowerOptions::default(),
            shared: None,
        }
    }

    /// The groups with their ids.
    fn numbered(&self) -> impl Iterator<Item = (GroupId, &GroupOptions)> {
        (0..).map(GroupId).zip(&self.groups)
    }

    /// Tokens of the smallest block of any group: those of a name. The options were checked.
    pub(crate) fn unit(&self) -> u32 {
        self.groups.iter().map(|group| group.block_tokens).min().unwrap_or(1)
    }

    fn check_shared(&self, shared: &SharedMemory) -> Result<(), OptionsError> {
        let (given, groups) = (shared.granule_blocks.len(), self.groups.len());
        if groups < 2 || given != groups {
            return Err(OptionsError::SharedGroups { given, groups });
        }
        for ((group, own), &blocks) in self.numbered().zip(&shared.granule_blocks) {
            if shared.granules == 0 || blocks == 0 {
                let field = if blocks == 0 { "granule_blocks" } else { "granules" };
                return Err(OptionsError::Zero { field });
            }
            let expected = u64::from(shared.granules) * u64::from(blocks);
            let blocks = own.pool.primary_blocks;
            if blocks != expected {
                return Err(OptionsError::SharedBlocks { group, blocks, expected });
            }
        }
        Ok(())
    }

    /// Checks what a manager can be made with, but for the memory that it takes. A worker that gets its plans from
    /// another process is to have groups that pass, too.
    ///
    /// # Errors
    /// [`OptionsError`] names the number that cannot be.
    pub fn check(&self) -> Result<(), OptionsError> {
        check_groups(self.groups.len())?;
        for (field, value) in [
            ("sequences_max", self.sequences_max),
            ("workers", self.workers.into()),
            ("steps_in_flight_max", self.steps_in_flight_max),
        ] {
            if value == 0 {
                return Err(OptionsError::Zero { field });
            }
        }
        let tiers = self.lower.tiers;
        if tiers > TIERS_MAX {
            return Err(OptionsError::Tiers { tiers, max: TIERS_MAX });
        }
        let mut aligned = 1;
        for (group, own) in self.numbered() {
            self.check_group(group, own)?;
            aligned = common_multiple(aligned, own.block_tokens.into());
        }
        for (group, own) in self.numbered() {
            if let GroupKind::State { checkpoint_tokens: tokens, .. } = own.kind
                && !u64::from(tokens).is_multiple_of(aligned)
            {
                return Err(OptionsError::Unaligned { group, tokens, unit: aligned });
            }
        }
        self.shared.as_ref().map_or(Ok(()), |shared| self.check_shared(shared))
    }

    fn check_group(&self, group: GroupId, own: &GroupOptions) -> Result<(), OptionsError> {
        for (field, value) in [
            ("block_tokens", own.block_tokens),
            ("blocks_per_sequence_max", own.blocks_per_sequence_max),
        ] {
            if value == 0 {
                return Err(OptionsError::GroupZero { group, field });
            }
        }
        check_kind(group, own.kind)?;
        if own.draft_model && own.kind != GroupKind::Full {
            return Err(OptionsError::DraftKind { group, kind: own.kind });
        }
        let (tokens, unit) = (own.block_tokens, self.unit());
        if !tokens.is_multiple_of(unit) {
            return Err(OptionsError::Unaligned { group, tokens, unit: unit.into() });
        }
        check_table(group, self.sequences_max, row_width(own.kind, own.blocks_per_sequence_max))
    }
}

/// Checks that so many groups are possible.
pub(crate) fn check_groups(groups: usize) -> Result<(), OptionsError> {
    if !(1..=GROUPS_MAX).contains(&groups) {
        return Err(OptionsError::Groups { groups, max: GROUPS_MAX });
    }
    Ok(())
}

/// The least common multiple of two numbers that are not 0, or the most there is.
pub(crate) fn common_multiple(one: u64, other: u64) -> u64 {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (one / divisor).saturating_mul(other)
}

/// Checks that a block table of this size is possible.
pub(crate) fn check_table(group: GroupId, rows: u32, width: u32) -> Result<(), OptionsError> {
    if u64::from(rows) * u64::from(width) > TABLE_MAX {
        return Err(OptionsError::TableTooLarge { group, rows, width });
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
