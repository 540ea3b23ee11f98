//! A group: its pool of blocks, its block table, and what is noted of its blocks.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, Range};

use kv_pool::policy::RecordId;
use kv_pool::tenants::{TenantError, TenantId, TenantQuota};
use kv_pool::{
    BlockHash, BlockId, BlockPool, ClaimError, Claimed, Epoch, Location, PoolBuilder, Tier, guard,
};
use kv_tier::{GroupFormat, GroupKind, HostShareWriter, UNPLANNED};
use smallvec::SmallVec;

use crate::blocks::Blocks;
use crate::options::{GroupOptions, common_multiple, repeated, row_width};
use crate::plan::{BlockCopy, CopyFor, PlanDraft};
use crate::suspend::Away;
use crate::table::Table;
use crate::{AdmitError, GroupId, ManagerOptions, Missing, OptionsError, Row};

/// What a block of a group is, and what of a sequence the group keeps. It never changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) id: GroupId,
    pub(crate) kind: GroupKind,
    pub(crate) block_tokens: u32,
    /// Names that the tokens of a block have: those of blocks of the smallest size.
    pub(crate) stride: usize,
    /// Whether a draft model writes it.
    pub(crate) is_draft: bool,
    /// A common multiple of the block sizes of all groups.
    aligned: u64,
    /// Blocks of the device.
    pub(crate) capacity: u64,
    /// Whether the device blocks lie in memory that other groups have, too.
    pub(crate) shares: bool,
}

/// Layers that share one block table and one rule for what they keep.
#[derive(Debug)]
pub(crate) struct Group {
    shape: Shape,
    /// Whether it was made with host blocks.
    has_host: bool,
    watermark: usize,
    /// Device blocks that are kept for all tenants together.
    reserved: u64,
    /// The tenants by number, each as the manager gives it out, which is as the first group's pool knows it, and as this pool
    /// knows it.
    tenants: Vec<(TenantId, TenantId)>,
    pub(crate) pool: BlockPool,
    pub(crate) table: Table,
    /// The step that each record's content was written in, for content that got its name there.
    written: Vec<u64>,
    /// Who last wrote each device block, if blocks are scrubbed between tenants.
    writers: Vec<Writer>,
    /// The epochs that are not complete, each with the step that it was begun for.
    epochs: VecDeque<(u64, Epoch)>,
    /// Set once the host tier is shared with readers outside of the engine.
    share: Option<HostShareWriter>,
}

impl Deref for Group {
    type Target = Shape;

    #[inline]
    fn deref(&self) -> &Shape {
        &self.shape
    }
}

/// The groups of a manager, in their order.
#[derive(Debug)]
pub(crate) struct Groups {
    all: Vec<Group>,
    /// A draft model writes some of them.
    has_draft: bool,
}

impl Deref for Groups {
    type Target = [Group];

    #[inline]
    fn deref(&self) -> &[Group] {
        &self.all
    }
}

impl DerefMut for Groups {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Group] {
        &mut self.all
    }
}

/// Who has last written a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Writer {
    Nobody,
    Tenant(TenantId),
    /// Content came back for nobody in particular.
    Unknown,
}

/// What a sequence has of a group.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Blocks from the first on that have been offered to the prefix index.
    pub(crate) named: usize,
    pub(crate) blocks: Blocks,
    /// Of a window: the certain end from which on the next block can leave. Of a state: the next checkpoint.
    pub(crate) turn: u64,
    pub(crate) away: Away,
}

/// Ends in the tokens of a sequence that others are to go on behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    pub(crate) prompt: u64,
    /// Tokens that are declared to be [shared](crate::Content::shared_tokens).
    pub(crate) shared: u64,
}

impl Groups {
    /// The groups of a manager. `options` were checked.
    pub(crate) fn new(
        options: &ManagerOptions,
        mut build: impl FnMut(PoolBuilder) -> PoolBuilder,
    ) -> Result<Self, OptionsError> {
        let aligned = options.groups.iter().map(|group| u64::from(group.block_tokens));
        let aligned = aligned.fold(1, common_multiple);
        let groups = (0..).map(GroupId).zip(&options.groups);
        let groups = groups.map(|(id, own)| Group::new(id, own, aligned, options, &mut build));
        let has_draft = options.groups.iter().any(|group| group.draft_model);
        Ok(Self { all: groups.collect::<Result<_, _>>()?, has_draft })
    }

    #[inline]
    pub(crate) fn has_draft(&self) -> bool {
        self.has_draft
    }

    /// The only group, if it keeps all: it decides alone, what it finds is a prefix, and a part of a sequence is of use.
    #[inline]
    pub(crate) fn alone(&self) -> Option<&Group> {
        match &self.all[..] {
            [group] if group.is_chained() => Some(group),
            _ => None,
        }
    }

    /// Adds a tenant in all groups.
    pub(crate) fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        let added = self.all.iter().rev().map(|group| group.pool.add_tenant());
        // The last one is of the first group, whose numbers are those that are given out.
        let added: SmallVec<[TenantId; 4]> = added.collect::<Result<_, _>>()?;
        let tenant = added.last().copied().unwrap_or_default();
        for (group, own) in self.all.iter_mut().rev().zip(added) {
            group.tenants.push((tenant, own));
        }
        Ok(tenant)
    }

    /// What is shared of the host tier.
    pub(crate) fn share(&self) -> Option<&HostShareWriter> {
        self.all[0].share.as_ref()
    }

    /// Shares the host tier.
    pub(crate) fn set_share(&mut self, share: &HostShareWriter) {
        self.all.iter_mut().for_each(|group| group.share = Some(share.clone()));
    }
}

impl Group {
    fn new(
        id: GroupId,
        own: &GroupOptions,
        aligned: u64,
        options: &ManagerOptions,
        build: &mut impl FnMut(PoolBuilder) -> PoolBuilder,
    ) -> Result<Self, OptionsError> {
        let mut builder = build(BlockPool::builder(&own.pool));
        if let Some(shared) = &options.shared {
            builder = builder.granules(Tier::Primary, shared.granule_blocks[usize::from(id.0)]);
        }
        let pool = builder.build()?;
        let [third, fourth] = own.pool.further_blocks;
        let device = own.pool.primary_blocks as usize;
        let records = device + (own.pool.secondary_blocks + third + fourth) as usize;
        let width = row_width(own.kind, own.blocks_per_sequence_max);
        let shape = Shape {
            id,
            kind: own.kind,
            block_tokens: own.block_tokens,
            stride: (own.block_tokens / options.unit()) as usize,
            is_draft: own.draft_model,
            aligned,
            capacity: own.pool.primary_blocks,
            shares: options.shared.is_some(),
        };
        Ok(Self {
            shape,
            has_host: own.pool.secondary_blocks > 0,
            watermark: own.watermark_blocks as usize,
            reserved: 0,
            tenants: vec![(TenantId::NOBODY, TenantId::NOBODY)],
            pool,
            table: Table::new(id, options.sequences_max, width)?,
            written: repeated(0, records)?,
            writers: repeated(Writer::Nobody, if options.scrubs { device } else { 0 })?,
            epochs: VecDeque::with_capacity(options.steps_in_flight_max.min(64) as usize + 2),
            share: None,
        })
    }

    /// Whether content is cached, and on the device.
    pub(crate) fn is_near(&self, name: BlockHash) -> bool {
        self.pool.locate(name).is_some_and(|(_, at)| at.tier == Tier::Primary)
    }

    pub(crate) fn is_cached(&self, name: BlockHash) -> bool {
        self.pool.locate(name).is_some()
    }

    /// Bounds what a tenant may hold in a tier.
    pub(crate) fn set_quota(
        &mut self,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), TenantError> {
        let tenant = self.tenant(tenant);
        let before = self.pool.quota(tenant, tier)?.reserved;
        self.pool.set_quota(tenant, tier, quota)?;
        if tier == Tier::Primary {
            self.reserved = self.reserved - before + quota.reserved;
        }
        Ok(())
    }

    /// The tenant as this pool knows it. One of another manager stays what it is, and no pool takes it.
    pub(crate) fn tenant(&self, tenant: TenantId) -> TenantId {
        let is_own = |given| guard!("manager.knows-its-tenants", given == tenant, else true);
        match self.tenants.get(usize::from(tenant.number())) {
            Some(&(given, own)) if is_own(given) => own,
            _ => tenant,
        }
    }

    /// Whether there are blocks in other tiers than the device's.
    pub(crate) fn has_far(&self) -> bool {
        self.written.len() as u64 > self.capacity
    }

    /// Records of content, in all tiers.
    pub(crate) fn records(&self) -> usize {
        self.written.len()
    }

    /// Blocks that are left for running sequences.
    pub(crate) fn watermark(&self) -> usize {
        self.watermark
    }

    #[cfg(test)]
    pub(crate) fn set_watermark(&mut self, blocks: usize) {
        self.watermark = blocks;
    }

    /// Notes that a record's content is written in a step, or complete with step 0.
    #[inline]
    pub(crate) fn note_written(&mut self, record: RecordId, step: u64) {
        self.written[record.index()] = step;
    }

    /// Notes who has last written these blocks, if blocks are scrubbed between tenants.
    pub(crate) fn note_writer(&mut self, blocks: impl Iterator<Item = usize>, writer: Writer) {
        if !self.writers.is_empty() {
            blocks.for_each(|block| self.writers[block] = writer);
        }
    }

    /// Says, before anybody can find it there, that a host block is filled by the plan of this step.
    pub(crate) fn note_filled(&self, block: BlockId, step: u64) {
        if let Some(share) = &self.share {
            share.fill(self.id, block, step);
        }
    }

    /// Checks that a sequence of so many tokens can be admitted for a tenant at some time, whatever the other groups need.
    pub(crate) fn check_ever(&self, tenant: TenantId, tokens: u64) -> Result<(), AdmitError> {
        let (blocks, max) = (self.blocks_for(tokens) as u64, self.table.width() as u64);
        if blocks > max {
            return Err(AdmitError::TooLong { blocks, max });
        }
        let (blocks, capacity) = (self.peak(tokens, 1) as u64, self.capacity);
        if blocks > capacity {
            return Err(AdmitError::NeverFits { blocks, capacity });
        }
        let most = self.pool.tenant_room(self.tenant(tenant), Tier::Primary)?.ever;
        if guard!("manager.refuses-what-never-fits-its-tenant", blocks > most, else false) {
            return Err(AdmitError::NeverFitsTenant { group: self.id, blocks, most });
        }
        Ok(())
    }

    /// Blocks that a sequence of so many tokens takes at least, with those that are kept for tenants.
    pub(crate) fn least(&self, tenant: TenantId, tokens: u64) -> u64 {
        let own = self.pool.quota(self.tenant(tenant), Tier::Primary);
        let kept = self.reserved - own.map_or(0, |own| own.reserved);
        let peak = (self.peak(tokens, 1) as u64).saturating_add(kept);
        // What is kept for the tenant itself stays there, too.
        peak.max(self.reserved)
    }

    /// Begins the epoch of a step.
    pub(crate) fn begin_epoch(&mut self, step: u64) {
        self.epochs.push_back((step, self.pool.begin_epoch()));
    }

    /// Takes the epochs of all steps behind this one for one, since they end together.
    pub(crate) fn join_epochs(&mut self, step: u64) {
        let last = self.epochs.len().saturating_sub(1);
        if let Some(at) = last.checked_sub(1).filter(|&at| self.epochs[at].0 > step) {
            guard!("manager.idle-epochs-are-one", {
                self.epochs.remove(at);
            });
        }
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

    /// Checks that a tenant can claim so many blocks of a tier.
    pub(crate) fn check_claimable(
        &self,
        tier: Tier,
        tenant: TenantId,
        count: usize,
    ) -> Result<(), Missing> {
        if tier == Tier::Secondary && count > 0 && !self.has_host {
            let reason = ClaimError::NoTier { tier, requested: count };
            return Err(Missing { group: self.id, reason });
        }
        let checked = self.pool.check_claim(tier, self.tenant(tenant), count);
        checked.map_err(|reason| Missing { group: self.id, reason })
    }

    pub(crate) fn exhausted(&self, requested: usize, claimable: usize) -> Missing {
        let retiring = self.pool.stats().primary.retiring as usize;
        let reason = ClaimError::Exhausted { requested, claimable, retiring };
        Missing { group: self.id, reason }
    }

    /// Claims device blocks for a tenant. Nothing is planned of what comes before the first write to them.
    pub(crate) fn take(&self, tenant: TenantId, count: usize) -> Result<Claimed, Missing> {
        let claimed = match (tenant, count) {
            (TenantId::NOBODY, 1) => self.pool.claim_one(),
            _ => self.pool.claim_for(self.tenant(tenant), count),
        };
        claimed.map_err(|reason| Missing { group: self.id, reason })
    }

    /// Plans what comes before the first write to claimed blocks: moves of what was evicted, and scrubs.
    pub(crate) fn plan_claimed(
        &mut self,
        plan: &mut PlanDraft,
        tenant: TenantId,
        claimed: &mut Claimed,
    ) {
        plan.drop_loads(self.id, claimed);
        self.plan_offloads(plan, claimed);
        if self.writers.is_empty() {
            return;
        }
        for id in claimed.ids() {
            let now = Writer::Tenant(tenant);
            let before = std::mem::replace(&mut self.writers[id.index()], now);
            let is_foreign = before != Writer::Nobody && before != now;
            if guard!("manager.scrubs-for-another-tenant", is_foreign, else false) {
                plan.scrub(self.id, id);
            }
        }
    }

    /// Plans the moves of what was evicted from claimed blocks.
    pub(crate) fn plan_offloads(&self, plan: &mut PlanDraft, claimed: &mut Claimed) {
        while let Some(offload) = claimed.take_offload() {
            let (from, to) = (near(offload.from()), far(offload.to()));
            guard!("manager.evicts-by-copy", self.plan_copy(plan, CopyFor::Eviction, from, to));
            guard!("manager.offloads-are-lent-late", self.note_filled(offload.to(), UNPLANNED));
            // Every later use of either block comes later in the plans.
            offload.commit();
        }
    }

    /// Plans a copy of a block that no step in flight writes.
    pub(crate) fn plan_copy(
        &self,
        plan: &mut PlanDraft,
        of: CopyFor,
        from: Location,
        to: Location,
    ) {
        let (group, tokens) = (self.id, self.block_tokens);
        plan.copy(of, BlockCopy { group, from, to, tokens, written_by: 0 });
    }

    /// Writes a sequence's row of the block table, from block `first` on.
    pub(crate) fn write_row(&mut self, plan: &mut PlanDraft, row: Row, held: &Held, first: usize) {
        self.table.write(plan, row, first, &held.blocks);
    }

    /// The step that a record's content comes from, if that is later than `completed`.
    pub(crate) fn pending(&self, record: RecordId, completed: u64) -> Option<u64> {
        let step = self.written.get(record.index()).copied()?;
        (step > completed).then_some(step)
    }
}

impl Shape {
    /// What its blocks are.
    pub(crate) fn format(&self) -> GroupFormat {
        GroupFormat { kind: self.kind, block_tokens: self.block_tokens, draft_model: self.is_draft }
    }

    pub(crate) fn is_state(&self) -> bool {
        matches!(self.kind, GroupKind::State { .. })
    }

    pub(crate) fn is_window(&self) -> bool {
        matches!(self.kind, GroupKind::Window { .. })
    }

    /// Whether content is named as the successor of what comes before it, which is kept as long. What is behind
    /// a window is worth less than the window.
    pub(crate) fn is_chained(&self) -> bool {
        self.kind == GroupKind::Full
    }

    /// Places of the blocks of `tokens` tokens, those that are needed no more included.
    pub(crate) fn blocks_for(&self, tokens: u64) -> usize {
        if self.is_state() {
            usize::from(tokens > 0)
        } else {
            tokens.div_ceil(u64::from(self.block_tokens)) as usize
        }
    }

    /// Whole blocks of the first `tokens` tokens, by which content is named.
    pub(crate) fn whole_blocks(&self, tokens: u64) -> usize {
        (tokens / u64::from(self.block_tokens)) as usize
    }

    /// Places of blocks that the first `tokens` tokens fill. A state is never full.
    pub(crate) fn full_blocks(&self, tokens: u64) -> usize {
        if self.is_state() { 0 } else { self.whole_blocks(tokens) }
    }

    /// The first blocks that all tokens read.
    pub(crate) fn sink_blocks(&self) -> usize {
        match self.kind {
            GroupKind::Window { sinks, .. } => sinks.div_ceil(self.block_tokens) as usize,
            _ => 0,
        }
    }

    pub(crate) fn window_tokens(&self) -> u64 {
        match self.kind {
            GroupKind::Window { tokens, .. } => tokens.into(),
            _ => u64::MAX,
        }
    }

    /// The first block behind the sinks that a token behind `start` others reads, or one among them.
    pub(crate) fn first_read(&self, start: u64) -> usize {
        match self.kind {
            GroupKind::Window { tokens, .. } => {
                self.whole_blocks(start.saturating_sub(u64::from(tokens) - 1))
            }
            _ => 0,
        }
    }

    /// The most blocks that a sequence of `tokens` tokens has, if it is computed `chunk` tokens at a time.
    pub(crate) fn peak(&self, tokens: u64, chunk: u64) -> usize {
        let all = self.blocks_for(tokens);
        match self.kind {
            GroupKind::Window { tokens: window, .. } => {
                let window = u64::from(window - 1).saturating_add(chunk);
                all.min(self.blocks_for(window).saturating_add(1 + self.sink_blocks()))
            }
            _ => all,
        }
    }

    /// Whether a sequence that has all blocks but those in `gone` can go on behind `end` tokens that it has KV for.
    pub(crate) fn covers(&self, gone: &Range<usize>, end: u64) -> bool {
        gone.is_empty() || self.blocks_for(end) <= gone.start || self.first_read(end) >= gone.end
    }

    /// Tokens that block `index` of a sequence is filled with, whose KV ends behind `end` tokens, as a copy counts them.
    pub(crate) fn filled(&self, index: usize, end: u64) -> Option<u32> {
        let left = end.checked_sub(self.tokens_of(index)).filter(|&left| left > 0);
        let tokens = if self.is_state() { Some(u64::MAX) } else { left };
        Some(tokens?.min(self.block_tokens.into()) as u32)
    }

    /// The [turn](Held::turn) of a sequence with these marks whose KV ends behind `tokens` tokens.
    pub(crate) fn turn(&self, tokens: u64, marks: Marks) -> u64 {
        if self.is_window() { 0 } else { self.next_checkpoint(tokens, marks) }
    }

    /// The next position of a checkpoint behind `tokens` tokens, in a sequence with these marks.
    pub(crate) fn next_checkpoint(&self, tokens: u64, marks: Marks) -> u64 {
        let GroupKind::State { checkpoint_tokens, .. } = self.kind else { return u64::MAX };
        let next = (tokens / u64::from(checkpoint_tokens) + 1) * u64::from(checkpoint_tokens);
        // The last token of a prompt is computed in any case.
        let last = marks.prompt.saturating_sub(1);
        let shared = guard!("manager.shared-prefixes-have-checkpoints", marks.shared, else 0);
        let ends = [shared.min(last), last].map(|end| end / self.aligned * self.aligned);
        ends.into_iter().filter(|&end| end > tokens).fold(next, u64::min)
    }

    /// Tokens of so many full blocks.
    #[inline]
    pub(crate) fn tokens_of(&self, blocks: usize) -> u64 {
        blocks as u64 * u64::from(self.block_tokens)
    }
}

/// Where a device block lies.
pub(crate) fn near(id: BlockId) -> Location {
    Location { tier: Tier::Primary, id }
}

/// Where a block of host memory lies.
pub(crate) fn far(id: BlockId) -> Location {
    Location { tier: Tier::Secondary, id }
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

#[cfg(test)]
mod tests {
    use kv_pool::PoolConfig;

    use crate::{Manager, ManagerOptions};

    #[test]
    fn an_idle_engine_behind_a_worker_that_says_nothing_keeps_no_epochs() {
        let pool = PoolConfig::primary_only(8);
        let mut manager = Manager::new(ManagerOptions::new(16, pool)).unwrap();
        for _ in 0..100 {
            let open = manager.begin_step().unwrap();
            manager.finish_step(open).unwrap();
            assert_eq!(manager.groups[0].epochs.len(), 0, "nothing is in flight");
        }
        for staged in 0..2 {
            let open = manager.begin_step().unwrap();
            manager.stage(&open, &mut []).unwrap();
            drop(open);
            manager.end_dropped_step();
            for _ in 0..100 * (1 - staged) {
                drop(manager.begin_step().unwrap());
                manager.end_dropped_step();
                assert_eq!(manager.groups[0].epochs.len(), 2, "the plan's, and one behind it");
            }
        }
        assert_eq!(manager.groups[0].epochs.len(), 3);
    }
}
