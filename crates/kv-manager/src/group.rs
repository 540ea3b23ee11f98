//! A group: its pool of blocks, its block table, and what is noted of its blocks.

use std::borrow::Cow;
use std::collections::VecDeque;

use kv_pool::policy::RecordId;
use kv_pool::tenants::TenantId;
use kv_pool::{BlockHash, BlockPool, Claimed, Epoch, Location, PoolBuilder, Tier};

use crate::blocks::Blocks;
use crate::manager::Writer;
use crate::options::repeated;
use crate::plan::{BlockCopy, StepPlan};
use crate::stats::ManagerStats;
use crate::table::Table;
use crate::{GroupId, ManagerOptions, Missing, OptionsError, Row};

/// Layers that share one block table and one rule for what they keep.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) id: GroupId,
    pub(crate) block_tokens: u32,
    /// Names that the tokens of a block have: those of blocks of the smallest size.
    pub(crate) stride: usize,
    pub(crate) pool: BlockPool,
    pub(crate) table: Table,
    /// The step that each record's content was written in, for content that got its name there.
    pub(crate) written: Vec<u64>,
    /// Who last wrote each device block, if blocks are scrubbed between tenants.
    pub(crate) writers: Vec<Writer>,
    /// The epochs that are not complete, each with the step that it was begun for.
    epochs: VecDeque<(u64, Epoch)>,
}

/// What a sequence has of a group.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Blocks from the first on that have been offered to the prefix index.
    pub(crate) named: usize,
    pub(crate) blocks: Blocks,
    /// While the sequence is suspended: host blocks with the content of blocks from `host_first` on.
    pub(crate) host: Claimed,
    pub(crate) host_first: usize,
}

impl Group {
    pub(crate) fn new(
        options: &ManagerOptions,
        build: impl FnOnce(PoolBuilder) -> PoolBuilder,
    ) -> Result<Self, OptionsError> {
        let pool = build(BlockPool::builder(&options.pool)).build()?;
        let [third, fourth] = options.pool.further_blocks;
        let device = options.pool.primary_blocks as usize;
        let records = device + (options.pool.secondary_blocks + third + fourth) as usize;
        Ok(Self {
            id: GroupId::default(),
            block_tokens: options.block_tokens,
            stride: 1,
            pool,
            table: Table::new(options.sequences_max, options.blocks_per_sequence_max)?,
            written: repeated(0, records)?,
            writers: repeated(Writer::Nobody, if options.scrubs { device } else { 0 })?,
            epochs: VecDeque::with_capacity(options.steps_in_flight_max.min(64) as usize + 2),
        })
    }

    /// Blocks of `tokens` tokens.
    pub(crate) fn blocks_for(&self, tokens: u64) -> usize {
        tokens.div_ceil(u64::from(self.block_tokens)) as usize
    }

    /// Blocks that the first `tokens` tokens fill.
    pub(crate) fn full_blocks(&self, tokens: u64) -> usize {
        (tokens / u64::from(self.block_tokens)) as usize
    }

    /// Tokens of so many full blocks.
    #[inline]
    pub(crate) fn tokens_of(&self, blocks: usize) -> u64 {
        blocks as u64 * u64::from(self.block_tokens)
    }

    /// Begins the epoch of a step.
    pub(crate) fn begin_epoch(&mut self, step: u64) {
        self.epochs.push_back((step, self.pool.begin_epoch()));
    }

    /// Ends the epochs of all steps up to this one.
    pub(crate) fn end_epochs(&mut self, step: u64) {
        let mut last = None;
        while let Some(&(begun_for, epoch)) = self.epochs.front()
            && begun_for <= step
        {
            last = Some(epoch);
            self.epochs.pop_front();
        }
        let Some(epoch) = last else { return };
        // The epoch is of this pool.
        let ended = self.pool.complete_epoch(epoch);
        debug_assert!(ended.is_ok(), "{ended:?}");
    }

    /// Claims device blocks for a tenant. Nothing is planned of what comes before the first write to them.
    pub(crate) fn take(&self, tenant: TenantId, count: usize) -> Result<Claimed, Missing> {
        let claimed = match (tenant, count) {
            (TenantId::NOBODY, 1) => self.pool.claim_one(),
            _ => self.pool.claim_for(tenant, count),
        };
        claimed.map_err(|reason| Missing { group: self.id, reason })
    }

    /// Plans what comes before the first write to claimed blocks: moves of what was evicted, and scrubs.
    pub(crate) fn plan_claimed(
        &mut self,
        plan: &mut StepPlan,
        stats: &mut ManagerStats,
        tenant: TenantId,
        claimed: &mut Claimed,
    ) {
        self.plan_offloads(plan, stats, claimed);
        if self.writers.is_empty() {
            return;
        }
        for id in claimed.ids() {
            let now = Writer::Tenant(tenant);
            let before = std::mem::replace(&mut self.writers[id.index()], now);
            if before != Writer::Nobody && before != now {
                plan.scrubs.push((plan.copies.len() as u32, id));
                stats.scrubbed_blocks += 1;
            }
        }
    }

    /// Plans the moves of what was evicted from claimed blocks.
    pub(crate) fn plan_offloads(
        &self,
        plan: &mut StepPlan,
        stats: &mut ManagerStats,
        claimed: &mut Claimed,
    ) {
        while let Some(offload) = claimed.take_offload() {
            let at = |tier, id| Location { tier, id };
            let (from, to) = (at(Tier::Primary, offload.from()), at(Tier::Secondary, offload.to()));
            self.plan_copy(plan, from, to, self.block_tokens);
            stats.offloaded_blocks += 1;
            // Every later use of either block comes later in the plans.
            offload.commit();
        }
    }

    /// Plans a copy of what no step in flight writes.
    pub(crate) fn plan_copy(&self, plan: &mut StepPlan, from: Location, to: Location, tokens: u32) {
        plan.copies.push(BlockCopy { from, to, tokens, written_by: 0 });
    }

    /// Writes a sequence's row of the block table, from block `first` on.
    pub(crate) fn write_row(&mut self, plan: &mut StepPlan, row: Row, held: &Held, first: usize) {
        self.table.write(plan, row, first, &held.blocks);
    }

    /// The step that a record's content comes from, if that is later than `completed`.
    pub(crate) fn pending(&self, record: RecordId, completed: u64) -> Option<u64> {
        let step = self.written.get(record.index()).copied()?;
        (step > completed).then_some(step)
    }
}

/// Every `stride`th of the names, from block `first` up to block `end` of `stride` names each: a block's name is
/// that of its last part, which chains all before.
pub(crate) fn names_of(
    all: &[BlockHash],
    stride: usize,
    first: usize,
    end: usize,
) -> Cow<'_, [BlockHash]> {
    match stride {
        1 => Cow::Borrowed(all.get(first..end).unwrap_or_default()),
        _ => {
            let parts = all.get(first * stride..end * stride).unwrap_or_default();
            Cow::Owned(parts.chunks_exact(stride).map(|parts| parts[stride - 1]).collect())
        }
    }
}
