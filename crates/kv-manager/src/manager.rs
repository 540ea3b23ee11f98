//! The manager's state, and what can be asked of it at any time.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kv_pool::tenants::{TenantError, TenantId, TenantQuota};
use kv_pool::{BlockHash, PoolBuilder, PoolView, Slot, TableEntry, Tier, guard};
use smallvec::SmallVec;

use crate::ends::Redo;
use crate::events::Feed;
use crate::group::{Group, Groups, names_of};
use crate::lower::Lower;
use crate::names::Namer;
use crate::plan::{PlanDraft, Snapshot, SnapshotTable, StepPlan};
use crate::rows::Home;
use crate::shared::Shared;
use crate::stats::ManagerStats;
use crate::steps::Steps;
use crate::{
    BudgetError, GroupId, ManagerOptions, OptionsError, Sequence, SequenceError, SlotError,
};

/// Decides which block holds what; see the [crate's documentation](crate).
#[derive(Debug)]
pub struct Manager {
    pub(crate) options: ManagerOptions,
    pub(crate) namer: Namer,
    pub(crate) groups: Groups,
    pub(crate) home: Home,
    pub(crate) plan: PlanDraft,
    pub(crate) steps: Steps,
    /// Blocks that pins hold.
    pub(crate) pinned: Arc<AtomicU64>,
    pub(crate) lower: Lower,
    pub(crate) shared: Option<Shared>,
    pub(crate) stats: ManagerStats,
}

impl Manager {
    /// A manager in which no block has content, with priority LRU in each tier.
    ///
    /// # Errors
    /// [`OptionsError`] names the number that cannot be.
    pub fn new(options: ManagerOptions) -> Result<Self, OptionsError> {
        Self::with_pool(options, |builder| builder)
    }

    /// The same with pools that `build` changes: other policies, a clock, a log of events. It is called once for
    /// each group, in their order.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pool(
        options: ManagerOptions,
        mut build: impl FnMut(PoolBuilder) -> PoolBuilder,
    ) -> Result<Self, OptionsError> {
        options.check()?;
        let events_max = options.events_max;
        let build = |builder| match events_max {
            0 => build(builder),
            events => build(builder).events(events),
        };
        let groups = Groups::new(&options, build)?;
        let feed = match events_max {
            0 => None,
            events => Some(Feed::new(&groups, events)?),
        };
        Ok(Self {
            namer: Namer::new(&options),
            home: Home::new(options.sequences_max, &groups, feed)?,
            plan: PlanDraft::default(),
            steps: Steps::new(options.workers, options.steps_in_flight_max),
            pinned: Arc::default(),
            lower: Lower::new(options.lower, groups.len()),
            shared: options.shared.as_ref().map(Shared::new).transpose()?,
            stats: ManagerStats::default(),
            groups,
            options,
        })
    }

    /// The options that the manager was made with.
    #[must_use]
    pub fn options(&self) -> &ManagerOptions {
        &self.options
    }

    /// A view of the block pool of a group: statistics, events and lookups. It cannot release blocks in use. `None` if there
    /// is no such group.
    #[must_use]
    pub fn pool(&self, group: GroupId) -> Option<PoolView> {
        Some(self.groups.get(usize::from(group.0))?.pool.view())
    }

    /// Rows that no sequence has.
    #[must_use]
    pub fn free_rows(&self) -> usize {
        self.home.free_rows()
    }

    /// Adds a tenant, whose blocks are counted apart and whose content nobody else finds: its names have a salt of its own,
    /// which is drawn at random. So nobody finds its content after a restart either, or on other hosts, not even the tenant:
    /// [a key](Self::add_tenant_with_key) says who it is there.
    ///
    /// # Errors
    /// [`TenantError`].
    pub fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        self.add_tenant_by(None)
    }

    /// Adds a tenant that is known by this key wherever names are shared: in files that are opened again, and on other
    /// hosts. It is not secret, must not be given to two tenants, and is as it is whatever other tenants there are: the number
    /// of a customer, say. Two tenants with the same key find each other's content.
    ///
    /// # Errors
    /// [`TenantError`].
    pub fn add_tenant_with_key(&mut self, key: &[u8]) -> Result<TenantId, TenantError> {
        self.add_tenant_by(Some(key))
    }

    fn add_tenant_by(&mut self, key: Option<&[u8]>) -> Result<TenantId, TenantError> {
        let tenant = self.groups.add_tenant()?;
        self.namer.add_tenant(tenant, key);
        Ok(tenant)
    }

    /// Has other ids refused from now on that come without what they
    /// [stand for](ManagerOptions::placeholder_ids).
    pub fn set_placeholder_ids(&mut self, ids: Vec<RangeInclusive<u32>>) {
        self.options.placeholder_ids.clone_from(&ids);
        self.namer.set_placeholders(ids);
        self.steps.end_paces();
    }

    /// Bounds what a tenant may hold in a tier of a group.
    ///
    /// # Errors
    /// [`BudgetError::NoGroup`], and [`BudgetError::Tenant`]; the bounds are as they were.
    pub fn set_quota(
        &mut self,
        group: GroupId,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), BudgetError> {
        let index = usize::from(group.0);
        let group = self.groups.get_mut(index).ok_or(BudgetError::NoGroup { group })?;
        Ok(group.set_quota(tenant, tier, quota)?)
    }

    /// What a worker begins with that was started anew: the block tables, and whose each granule is. Tables may be ahead of the last plan
    /// by changes that the next one repeats.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let table = |group: &Group| {
            let (width, ids) = (group.table.width() as u32, group.table.ids().to_vec());
            SnapshotTable { width, ids }
        };
        let tables = self.groups.iter().map(table).collect();
        Snapshot { step: self.steps.latest_staged(), tables, granules: self.staged_owners() }
    }

    /// The device blocks of a sequence in a group, as its row of the block table has them: none behind them, and none for a
    /// block that is needed no more. Nothing while it is suspended, or if another manager admitted it.
    #[must_use]
    pub fn block_ids(&self, group: GroupId, sequence: &Sequence) -> &[TableEntry] {
        match (&sequence.row, self.groups.get(usize::from(group.0))) {
            (Some(row), Some(group)) if self.home.is(&sequence.home) => group.table.row(row.row()),
            _ => &[],
        }
    }

    /// Appends the slots of a sequence's tokens in a group to `slots`: slot `s` is token `s % block_tokens` of
    /// device block `s / block_tokens`, and [`Slot::NONE`] is that of a token whose block is needed no more.
    ///
    /// # Errors
    /// [`SlotError`], for a group that there is not, too; nothing was appended then.
    pub fn slot_mapping(
        &self,
        group: GroupId,
        sequence: &Sequence,
        tokens: Range<u64>,
        slots: &mut Vec<Slot>,
    ) -> Result<(), SlotError> {
        let Range { start, end } = tokens;
        let ids = self.block_ids(group, sequence);
        let own = self.groups.get(usize::from(group.0)).map_or(1, |group| group.block_tokens);
        let block_tokens = u64::from(own);
        let room = match ids {
            [] => 0,
            _ => sequence.block_count(group) as u64 * block_tokens,
        };
        if start > end || end > room || ids.is_empty() {
            return Err(SlotError { start, end, tokens: room });
        }
        slots.reserve((end - start) as usize);
        let mut at = start;
        while at < end {
            let block = at / block_tokens;
            let next = end.min((block + 1) * block_tokens);
            // The sequence has blocks for all of its room.
            let id = ids[block as usize].block();
            let offsets = (at - block * block_tokens) as u32..(next - block * block_tokens) as u32;
            let slot = |offset| id.map_or(Slot::NONE, |id| id.slot(own, offset));
            slots.extend(offsets.map(slot));
            at = next;
        }
        Ok(())
    }

    /// The plan of the last step that was staged.
    #[must_use]
    pub fn last_plan(&self) -> &StepPlan {
        self.plan.last()
    }

    /// Whether a plan without sequences would tell the workers something: what has been decided since that one, or stores
    /// that wait for an idle link.
    #[must_use]
    pub fn has_decided(&self) -> bool {
        !self.plan.next().is_empty() || self.would_store()
    }

    /// Forgets all cached content, because the model's weights were changed. Nothing that sequences have
    /// computed before is named any more, and no name of before is found, in any tier. Sequences that are
    /// running keep their KV.
    pub fn reset(&mut self) {
        self.home.enter(self.namer.begin_generation());
        self.forget_all();
        self.forget_all_below();
    }

    /// How often it was [reset](Self::reset): KV that was computed elsewhere before the latest one is of another model.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.namer.generation()
    }

    /// Forgets the content with these names, in every tier and on its way; how many there were. Those who hold
    /// blocks of it keep them, and no sequence of before names them again, nor a twin of one. As long as there are such
    /// sequences, the names are kept for that.
    pub fn forget(&mut self, names: &[BlockHash]) -> usize {
        let (next, oldest) = self.steps.begin_era();
        self.home.void_names(names, next, oldest);
        let mut forget = |name| {
            let pools = self.groups.iter().map(|group| group.pool.remove(name));
            // In all groups.
            pools.fold(false, |any, removed| any | removed) | self.forget_below(name)
        };
        names.iter().filter(|&&name| forget(name)).count()
    }

    pub(crate) fn forget_all(&mut self) {
        // No reader sees the names go one by one.
        let mut feed = self.home.feed();
        for group in self.groups.iter() {
            for block in group.pool.snapshot().blocks {
                let expected = block.expected.map(|(name, _)| name);
                for name in block.hash.into_iter().chain(expected) {
                    group.pool.remove(name);
                }
            }
        }
        if let Some(feed) = &mut feed {
            feed.note_clear();
        }
    }

    /// Says what a sequence's named blocks are worth from their release on, and their copies in tiers below host
    /// memory when they come back. Nothing of another manager's sequence.
    pub fn retain(
        &mut self,
        sequence: &Sequence,
        retention: impl Into<kv_pool::retention::Retention>,
    ) {
        let retention = retention.into();
        let is_foreign = !self.home.is(&sequence.home);
        if guard!("manager.hints-are-of-its-own-sequences", is_foreign, else false) {
            return;
        }
        for (group, held) in self.groups.iter().zip(sequence.held.iter()) {
            for pinned in held.blocks.shared() {
                group.pool.retain(pinned, retention);
            }
        }
        let known = self.namer.current(&sequence.known);
        for (index, held) in sequence.held.iter().enumerate() {
            let group = &self.groups[index];
            let (id, stride) = (group.id, group.stride);
            // Of a state, any of its checkpoints.
            let named = if group.is_state() { usize::MAX } else { held.named };
            let names = names_of(known, stride, 0, named.min(known.len() / stride));
            self.lower.retain_below(id, &names, retention);
        }
    }

    /// Checks that the sequence is of this manager and not lost, and sets it back if a step of it failed.
    pub(crate) fn look_at(&mut self, sequence: &mut Sequence) -> Result<(), SequenceError> {
        sequence.pace.end();
        self.check_whole(sequence)?;
        if (sequence.failures_seen < self.steps.failures().count()
            || sequence.has_loaded(self.steps.latest_staged()))
            && let Some(from) = self.set_back(sequence)
        {
            return Err(SequenceError::Redo { from });
        }
        Ok(())
    }

    /// The same, for what a suspended sequence cannot do.
    pub(crate) fn look_at_running(&mut self, sequence: &mut Sequence) -> Result<(), SequenceError> {
        if sequence.suspended && self.home.is(&sequence.home) {
            return Err(SequenceError::Suspended);
        }
        if self.home.is(&sequence.home) {
            self.look_at_arriving(sequence)?;
        }
        self.look_at(sequence)
    }

    /// The same, for what cannot be done before the loads of a sequence have ended.
    pub(crate) fn look_at_loaded(&mut self, sequence: &mut Sequence) -> Result<(), SequenceError> {
        self.look_at_running(sequence)?;
        let loads = guard!("manager.copies-wait-for-loads", sequence.loads(), else None);
        loads.map_or(Ok(()), |ticket| Err(SequenceError::Loading { ticket }))
    }

    pub(crate) fn check_whole(&self, sequence: &Sequence) -> Result<(), SequenceError> {
        if !self.home.is(&sequence.home) {
            return Err(SequenceError::Foreign);
        }
        self.steps.check_kept(sequence.number)
    }

    /// Sets a sequence back behind what failed steps and loads have spoilt; where its KV ends then, if it was in any.
    fn set_back(&mut self, sequence: &mut Sequence) -> Option<u64> {
        let mut parts: SmallVec<[Redo; 2]> = self.end_layers(sequence).into_iter().collect();
        let known = sequence.known.tokens();
        for step in self.steps.failures().since(sequence.failures_seen) {
            guard!("manager.failures-take-drafts-back", sequence.draft.fail(step));
            let own = sequence.ends.redo(step, known);
            let read = sequence.depends.iter().filter(|(on, _)| *on == step);
            let read = read.map(|&(_, token)| token).min();
            let read = read.map(|from| sequence.ends.redo_from(from, step, known));
            parts.extend(own.into_iter().chain(read));
        }
        sequence.failures_seen = self.steps.failures().count();
        let redo = parts.iter().map(|part| part.from).min();
        for part in parts {
            let known = &mut sequence.known;
            guard!("manager.ids-of-void-steps-go", known.truncate(&self.namer, part.known));
        }
        // The id that came out behind the last known token is forgotten, so its output is wanted again.
        let from = redo?.min(sequence.known.tokens().saturating_sub(1));
        Some(self.cut(sequence, from))
    }

    /// Writes the rows of a sequence in all block tables.
    pub(crate) fn write_rows(&mut self, sequence: &Sequence) {
        let Some(row) = sequence.row() else { return };
        for (group, held) in self.groups.iter_mut().zip(sequence.held.iter()) {
            group.write_row(&mut self.plan, row, held, 0);
        }
    }
}
