//! Memory under host blocks: usable as it is pinned, shared with readers in other threads, and given back by
//! a budget.

use std::sync::Arc;

use cuda_driver::guard;
use cuda_driver::host_pages::PinError;
use kv_manager::{BudgetError, Budgeted, GroupId, Manager, PlanError, StepPlan};
use kv_pool::{BlockId, Tier};
use kv_tier::HostShare;

use crate::group::GroupPart;
use crate::part::Part;
use crate::tiers::pinned_memory;
use crate::{InProcess, KvCache, KvCacheOptions, KvWorker};

/// How much of the host tier of each group is handed out.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) groups: Vec<PinnedGroup>,
    /// The first refusal that nobody has asked for.
    refused: Option<PinError>,
}

/// How much of a group's host memory is handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinnedGroup {
    /// The budget: most host blocks that are handed out.
    budget: u64,
    /// Usable blocks within the budget, as the manager knows it.
    pub(crate) told_blocks: u64,
    /// Whether memory beyond the budget is still pinned.
    gives_back: bool,
    /// Host blocks that readers may read, if the tier is shared: those below the memory that is given back.
    shared_blocks: u64,
}

impl Pinned {
    /// All host blocks of each group, as the manager begins.
    pub(crate) fn new(options: &KvCacheOptions) -> Self {
        let group = |blocks| PinnedGroup {
            budget: blocks,
            told_blocks: blocks,
            gives_back: false,
            shared_blocks: u64::MAX,
        };
        let groups = options.groups.iter().map(|of| group(of.host_blocks.into())).collect();
        Self { groups, refused: None }
    }
}

impl KvCache {
    /// Shares the host tier with readers in other threads, such as those that serve other hosts: blocks that are cached there are
    /// lent by name, and are neither evicted nor written meanwhile. Records of the blocks are those of
    /// [tiers below](crate::LowerTiers), for the same model.
    ///
    /// What is pinned later is lent, too. Memory beyond a [budget](Self::set_budget) is given back when nobody reads it any more. The
    /// share stays usable when the cache is dropped, and keeps the host memory then.
    #[must_use]
    pub fn share_host(&mut self) -> Arc<HostShare> {
        let Self { manager, workers: InProcess { worker, share: shared, .. }, .. } = self;
        let groups = 0..manager.formats().len();
        let memory =
            groups.map(|group| pinned_memory(worker.parts(), GroupId(group as u16), u64::MAX));
        let Some(share) = manager.share_host(worker.tiers.format(), memory.collect()) else {
            unreachable!("there is memory of each group")
        };
        shared.get_or_insert(share).clone()
    }

    /// Why host memory was not pinned, if that was refused since the last call. The cache goes on with the
    /// host blocks that it has; [`set_budget`](Self::set_budget) tries again.
    pub fn take_host_refusal(&mut self) -> Option<PinError> {
        self.workers.pinned.refused.take()
    }

    /// Waits until no more host memory will be pinned; how many host blocks are usable then. Steps need
    /// no such wait: [`begin_step`](Self::begin_step) takes over what is pinned.
    ///
    /// # Ordering
    /// Waits on the host for the threads that pin memory.
    ///
    /// # Errors
    /// [`PinError`] if memory was refused; what was pinned is used all the same.
    #[track_caller]
    pub fn wait_for_host(&mut self) -> Result<u64, PinError> {
        let _site = cuda_driver::site::enter();
        let waited = self.workers.worker.wait_for_host();
        self.workers.take_pinned(&mut self.manager);
        waited
    }
}

impl InProcess {
    /// Has blocks of a group be read where they are by now: the first so many.
    fn share_memory(&self, manager: &Manager, group: GroupId, blocks: u64) {
        if self.share.is_some() {
            let memory = pinned_memory(self.worker.parts(), group, blocks);
            let is_read = manager.set_shared_memory(group, memory);
            debug_assert!(is_read, "a group's blocks keep their length");
        }
    }

    /// Gives the manager the host blocks that have memory by now.
    pub(crate) fn take_pinned(&mut self, manager: &mut Manager) {
        if let Err(error) = self.worker.poll_host() {
            tracing::warn!(%error, "the host tier stays smaller than it was to be");
            self.pinned.refused.get_or_insert(error);
        }
        for id in 0..self.pinned.groups.len() {
            let (group, id) = (self.pinned.groups[id], id as u16);
            let usable = self.worker.host_blocks(GroupId(id)).min(group.budget);
            let told = guard!("cache.host-blocks-have-memory", usable, else group.budget);
            if told == group.told_blocks {
                continue;
            }
            // Before a block is handed out that is in it.
            self.share_memory(manager, GroupId(id), u64::MAX);
            self.pinned.groups[usize::from(id)].shared_blocks = u64::MAX;
            match manager.set_budget(GroupId(id), Tier::Secondary, told) {
                Ok(_) => self.pinned.groups[usize::from(id)].told_blocks = told,
                Err(error) => {
                    tracing::error!(%error, "the manager knows other host blocks than there are");
                }
            }
        }
    }

    /// [`set_budget`](KvCache::set_budget) of host blocks.
    pub(crate) fn set_host_budget(
        &mut self,
        manager: &mut Manager,
        group: GroupId,
        blocks: u64,
    ) -> Result<(u64, Budgeted), BudgetError> {
        let of = self.worker.options().groups.get(usize::from(group.0));
        let most = of.map_or(0, |of| of.host_blocks.into());
        // The manager refuses more than there can be.
        let told = if blocks > most { blocks } else { blocks.min(self.worker.host_blocks(group)) };
        let budgeted = manager.set_budget(group, Tier::Secondary, told)?;
        // The manager has no other groups.
        if let Some(of) = self.pinned.groups.get_mut(usize::from(group.0)) {
            (of.budget, of.told_blocks, of.gives_back) = (blocks, told, true);
        }
        self.give_back_host(manager);
        self.take_pinned(manager);
        Ok((told, budgeted))
    }

    /// Gives back memory beyond the budgets of host blocks that nothing uses any more.
    pub(crate) fn give_back_host(&mut self, manager: &Manager) {
        for at in 0..self.pinned.groups.len() {
            let (PinnedGroup { budget, gives_back, .. }, group) =
                (self.pinned.groups[at], GroupId(at as u16));
            if !gives_back {
                continue;
            }
            let from = match manager.unmappable_from(group, Tier::Secondary) {
                Ok(from) => guard!("cache.used-host-blocks-stay", from.max(budget), else budget),
                Err(error) => {
                    tracing::error!(%error, "a group is not there");
                    continue;
                }
            };
            // Nobody reads what is given back: it cannot be lent, and what is lent is below.
            if self.pinned.groups[at].shared_blocks != from {
                guard!(
                    "cache.given-back-memory-is-not-lent",
                    self.share_memory(manager, group, from)
                );
                self.pinned.groups[at].shared_blocks = from;
            }
            let all = self.worker.resize_host(group, from);
            self.pinned.groups[at].gives_back = !all || from > budget;
        }
    }
}

impl KvWorker {
    /// Host blocks of a group that are usable on every device, from block 0 on. They grow while memory is pinned in the
    /// background. A manager in another process is to hand out no others
    /// ([`Manager::set_budget`](kv_manager::Manager::set_budget)): a plan that names others is carried out
    /// once they are pinned.
    #[must_use]
    pub fn host_blocks(&self, group: GroupId) -> u64 {
        let groups = self.parts.iter().filter_map(|part| part.groups.get(usize::from(group.0)));
        groups.map(GroupPart::host_blocks).min().unwrap_or(0)
    }

    /// Takes over host memory that was pinned since the last call; how many blocks of the first group are
    /// usable then. Never waits.
    ///
    /// # Errors
    /// [`PinError`], once for each device that refuses: its tier stays as it is.
    pub fn poll_host(&mut self) -> Result<u64, PinError> {
        self.take_host(false)
    }

    /// The same, after waiting until no more host memory will be pinned.
    ///
    /// # Errors
    /// As [`poll_host`](Self::poll_host).
    #[track_caller]
    pub fn wait_for_host(&mut self) -> Result<u64, PinError> {
        let _site = cuda_driver::site::enter();
        self.take_host(true)
    }

    fn take_host(&mut self, waits: bool) -> Result<u64, PinError> {
        let mut refused = Ok(());
        for Part { streams, groups, .. } in &mut self.parts {
            for group in groups {
                refused = refused.and(group.take_host(&streams.compute, waits));
            }
        }
        refused.map(|()| self.host_blocks(GroupId(0)))
    }

    /// Wants `blocks` host blocks of a group on every device; whether no memory beyond is left.
    fn resize_host(&mut self, group: GroupId, blocks: u64) -> bool {
        let mut all = true;
        for part in &mut self.parts {
            match part.groups[usize::from(group.0)].resize_host(blocks) {
                Ok(back) => all &= back,
                Err(error) => tracing::warn!(%error, "the host tier was not resized"),
            }
        }
        all
    }

    /// Checks that the host blocks of a plan have memory, and waits for it if they do not yet.
    pub(crate) fn check_pinned(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        let Some(_) = self.without_memory(plan) else { return Ok(()) };
        if let Err(error) = self.wait_for_host() {
            tracing::warn!(%error, "the host tier stays smaller than it was to be");
        }
        let Some((group, block)) = self.without_memory(plan) else { return Ok(()) };
        let (step, tier, blocks) = (plan.step, Tier::Secondary, self.host_blocks(group));
        // Nothing of the plan is carried out, so it is none that could be finished.
        Err(PlanError::Block { step, tier, id: block, blocks })
    }

    /// A host block of a plan that is not pinned.
    fn without_memory(&self, plan: &StepPlan) -> Option<(GroupId, BlockId)> {
        let ends =
            plan.copies.iter().flat_map(|copy| [(copy.group, copy.from), (copy.group, copy.to)]);
        let far = ends.filter(|(_, end)| end.tier != Tier::Primary);
        let moved = plan.transfers.iter().flat_map(|transfer| {
            let group = guard!("cache.transfers-name-their-group", transfer.group, else GroupId(0));
            transfer.blocks.iter().map(move |&(_, id)| (group, id))
        });
        let loaded = plan.layer_loads.iter().map(|load| (load.group, load.from));
        let mut ids = far.map(|(group, end)| (group, end.id)).chain(moved).chain(loaded);
        ids.find(|&(group, id)| id.index() as u64 >= self.host_blocks(group))
    }
}
