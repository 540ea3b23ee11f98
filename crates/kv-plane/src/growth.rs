//! Memory under device blocks: mapped ahead of need, or by the call that needs it.

use std::ops::RangeInclusive;

use cuda_driver::guard;
use cuda_vmm::limit::LimitStats;
use cuda_vmm::{GrowError, MemoryLimit};
use kv_manager::{BudgetError, Budgeted, GroupId, Growing, Manager};
use kv_pool::{
    PoolView, Tier,
    tenants::{TenantError, TenantId, TenantQuota},
};

use crate::{DemandError, InProcess, KvCache, KvWorker, QuotaError, Workers};

/// Most calls without memory between two that ask for it again.
const PAUSE_CALLS_MAX: u32 = 1024;

/// Memory has run out. It may come back unannounced: another user of the device frees memory, or a
/// limit has room again.
///
/// Every call that lacks memory looks at the limit. The device is asked less often, because a
/// refusal is a driver call on the step's path: by the first such call, and after each refusal only
/// after twice as many calls as before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shortage {
    /// The limit when memory was asked for last.
    limit: Option<LimitStats>,
    /// Calls that lack memory until one asks the device, whatever the limit says.
    calls_left: u32,
    /// The value at which `calls_left` began.
    pause_calls: u32,
}

impl Shortage {
    /// A refusal under `limit`. `before` is the refusal before it, if no memory came since.
    pub(crate) fn after(before: Option<Self>, limit: Option<LimitStats>) -> Self {
        let pause_calls =
            before.map_or(1, |before| before.pause_calls.saturating_mul(2).min(PAUSE_CALLS_MAX));
        Self { limit, calls_left: pause_calls, pause_calls }
    }

    /// Counts a call that lacks memory, and says whether it is to ask for memory.
    pub(crate) fn is_over(&mut self, now: Option<LimitStats>) -> bool {
        self.calls_left = self.calls_left.saturating_sub(1);
        let has_room = self.limit.zip(now).is_some_and(|(then, now)| {
            now.revision != then.revision || now.used_bytes < then.used_bytes
        });
        let is_asked = self.calls_left == 0;
        has_room || guard!("cache.memory-is-asked-for-again", is_asked, else false)
    }
}

/// How far the memory of a cache has grown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grown {
    /// The budget: most blocks with memory that are handed out.
    budget: u64,
    /// Blocks with memory, within the budget.
    pub(crate) ready_blocks: u64,
    /// Whether memory beyond the budget is still mapped.
    gives_back: bool,
    /// Calls that found too few blocks ready.
    pub(crate) stalls: u64,
    /// Memory ran out, and may have come back since.
    shortage: Option<Shortage>,
}

impl<W: Workers> KvCache<W> {
    /// Makes a call of the manager, which asks for memory if it needs some.
    #[track_caller]
    pub(crate) fn growing<T>(
        &mut self,
        call: impl FnOnce(Growing<'_, DemandError>) -> Result<T, DemandError>,
    ) -> Result<T, DemandError> {
        if !self.workers.can_grow() {
            return call(self.manager.growing(None));
        }
        let _site = cuda_driver::site::enter();
        self.take_mapped();
        let Self { manager, workers, told_blocks, .. } = self;
        let pool = manager.pool(GroupId(0));
        let answer = call(manager.growing(Some(&mut |group, count| {
            if group != GroupId(0) {
                // The memory of further groups is there.
                return Ok(u64::MAX);
            }
            let used = told_blocks.saturating_sub(empty(pool.as_ref()));
            *told_blocks = workers.grow(used.saturating_add(count as u64))?;
            Ok(*told_blocks)
        })));
        if answer.is_err() {
            // What was mapped before a refusal is used all the same.
            self.take_mapped();
        }
        answer
    }

    /// Tells the workers how many blocks are in use: memory ahead of need is mapped behind these.
    pub(crate) fn note_use(&mut self) {
        if !self.workers.can_grow() {
            return;
        }
        let used = self.take_mapped().saturating_sub(empty(self.manager.pool(GroupId(0)).as_ref()));
        // What was mapped meanwhile is told: without more to map, nobody asks again.
        if let Err(error) = self.grow_to(used) {
            tracing::warn!(%error, "a worker was not told how much memory is in use");
        }
    }

    /// Gives the manager the blocks that have memory by now. The devices' pages may hold different
    /// numbers of blocks, so the blocks that all devices have count.
    pub(crate) fn take_mapped(&mut self) -> u64 {
        let ready = self.workers.ready_blocks();
        self.tell(ready);
        ready
    }

    fn grow_to(&mut self, blocks: u64) -> Result<(), DemandError> {
        let ready = self.workers.grow(blocks);
        // What was mapped before a refusal is used all the same.
        let told = ready.as_ref().copied().unwrap_or_else(|_| self.workers.ready_blocks());
        self.tell(told);
        ready.map(drop)
    }

    /// Has the manager hand out the device blocks that have memory.
    pub(crate) fn tell(&mut self, ready: u64) {
        if self.told_blocks == ready {
            return;
        }
        match self.manager.set_budget(GroupId::default(), Tier::Primary, ready) {
            Ok(_) => self.told_blocks = ready,
            Err(error) => {
                tracing::error!(%error, "the manager has fewer blocks than there is memory");
            }
        }
    }

    /// Has a tier hand out only `blocks` blocks of a group from now on: fewer than before, or more, up to as many as the
    /// options say. Memory beyond the budget is given back by later steps, as soon as no sequence, copy or
    /// step in flight uses it: on the device page by page, on the host in slabs of up to 512 MiB. Device memory that is mapped when the
    /// cache is made stays mapped, as that of [groups](crate::KvCacheOptions::groups) behind the first does. What is
    /// cached on the device and not in use goes to host memory, as far as that has room. Nothing is moved to
    /// another block, and no sequence is disturbed: to have a sequence release its blocks, suspend or drop
    /// it. Content that is in use then is lost to later requests when it is released. A larger budget is
    /// mapped when it is needed, and pinned in the background. Device memory that groups share has a budget of
    /// [granules](Self::set_granules) instead. Tiers below host memory have no budget of blocks.
    ///
    /// # Ordering
    /// Does not wait. Without [threads that pin](crate::HostPinning::threads), more host memory is pinned now.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    #[track_caller]
    pub fn set_budget(
        &mut self,
        group: GroupId,
        tier: Tier,
        blocks: u64,
    ) -> Result<Budgeted, BudgetError> {
        let _site = cuda_driver::site::enter();
        match tier {
            Tier::Primary => {
                let of = (group, tier);
                let (told, budgeted) = self.workers.set_budget(&mut self.manager, of, blocks)?;
                if group.0 == 0 {
                    self.told_blocks = told;
                }
                Ok(budgeted)
            }
            Tier::Secondary => {
                Ok(self.workers.set_budget(&mut self.manager, (group, tier), blocks)?.1)
            }
            // The manager has no blocks there, and says so.
            _ => guard!(
                "cache.budgets-are-of-their-tier",
                self.manager.set_budget(group, tier, blocks),
                else {
                    let of = (group, Tier::Secondary);
                    Ok(self.workers.set_budget(&mut self.manager, of, blocks)?.1)
                }
            ),
        }
    }

    /// Has the groups share only so many granules from now on, where they
    /// [share memory](crate::KvCacheOptions::shared); see
    /// [`Manager::set_granules`](kv_manager::Manager::set_granules). The memory stays the cache's: its pages are
    /// given back when it is closed.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    pub fn set_granules(&mut self, granules: u32) -> Result<Budgeted, BudgetError> {
        self.manager.set_granules(granules)
    }

    /// Adds a tenant, with its own block counts and at first without bounds. Requests name it as
    /// [`Request::tenant`](kv_manager::Request::tenant); counts are those of the [pool](kv_manager::Manager::pool). Nobody else finds its
    /// content, and nobody at all after a restart or on other hosts; see
    /// [`Manager::add_tenant`](kv_manager::Manager::add_tenant).
    ///
    /// # Errors
    /// [`TenantError::TooMany`].
    pub fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        self.manager.add_tenant()
    }

    /// The same for a tenant that is known by `key` after a restart and on other hosts; see
    /// [`Manager::add_tenant_with_key`](kv_manager::Manager::add_tenant_with_key).
    ///
    /// # Errors
    /// [`TenantError::TooMany`].
    pub fn add_tenant_with_key(&mut self, key: &[u8]) -> Result<TenantId, TenantError> {
        self.manager.add_tenant_with_key(key)
    }

    /// Says which ids stand for something else, such as a picture, in place of those that were said before: from now on they are
    /// refused where nothing is given for what they stand; see
    /// [`ManagerOptions::placeholder_ids`](kv_manager::ManagerOptions::placeholder_ids).
    pub fn set_placeholder_ids(&mut self, ids: Vec<RangeInclusive<u32>>) {
        self.manager.set_placeholder_ids(ids);
    }

    /// Bounds the blocks of a group that a tenant may hold and have cached in one tier, and reserves blocks for it.
    /// Reserved device blocks of the first group get their memory now, as those of the others have it; for reserved host
    /// blocks that are still being pinned, the call waits.
    ///
    /// # Errors
    /// [`QuotaError`]; the quota is then as it was.
    pub fn set_quota(
        &mut self,
        group: GroupId,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), QuotaError> {
        let set = self.manager.set_quota(group, tenant, tier, quota);
        let Err(BudgetError::Tenant(TenantError::OverReserved { reserved, .. })) = set else {
            return Ok(set?);
        };
        let of = self.options().groups[usize::from(group.0)];
        match tier {
            Tier::Secondary if reserved <= of.host_blocks.into() => {
                self.workers.wait_for_host(&mut self.manager);
            }
            Tier::Primary if group.0 == 0 && reserved <= of.device_blocks.into() => {
                self.grow_to(reserved)?;
            }
            _ => return Ok(set?),
        }
        Ok(self.manager.set_quota(group, tenant, tier, quota)?)
    }
}

impl InProcess {
    /// [`set_budget`](KvCache::set_budget) of device blocks.
    pub(crate) fn set_device_budget(
        &mut self,
        manager: &mut Manager,
        blocks: u64,
    ) -> Result<(u64, Budgeted), BudgetError> {
        let Self { worker, grown, .. } = self;
        let most = u64::from(worker.options().first().device_blocks);
        let ready = worker.ready_blocks(GroupId(0));
        // The manager refuses more than there can be.
        let told = if blocks > most { blocks } else { blocks.min(ready) };
        let budgeted = manager.set_budget(GroupId::default(), Tier::Primary, told)?;
        (grown.budget, grown.ready_blocks) = (blocks, told);
        grown.gives_back = blocks < ready;
        for part in &worker.parts {
            if blocks == most {
                part.first().resume_growing(&worker.options().growth);
            } else {
                part.first().hold_growth(told);
            }
        }
        Ok((told, budgeted))
    }

    /// Gives back memory beyond the budget that nothing uses any more.
    pub(crate) fn give_back(&mut self, manager: &Manager) {
        if !self.grown.gives_back {
            return;
        }
        let from = match manager.unmappable_from(GroupId::default(), Tier::Primary) {
            Ok(from) => from.max(self.grown.budget),
            Err(error) => return tracing::error!(%error, "the first group is not there"),
        };
        let all = self.worker.shrink_to(from);
        self.grown.gives_back = !all || from > self.grown.budget;
    }
}

impl Grown {
    /// Nothing yet, of at most `blocks` blocks.
    pub(crate) fn new(blocks: u64) -> Self {
        Self { budget: blocks, ready_blocks: 0, gives_back: false, stalls: 0, shortage: None }
    }

    /// All of `blocks` blocks, which are handed out as granules.
    pub(crate) fn granted(blocks: u64) -> Self {
        Self { ready_blocks: blocks, ..Self::new(blocks) }
    }

    /// Whether there are device blocks without memory.
    pub(crate) fn can_grow(&self) -> bool {
        self.ready_blocks < self.budget
    }

    /// Takes in the blocks that the worker's threads have mapped.
    pub(crate) fn take_mapped(&mut self, worker: &KvWorker) {
        self.ready_blocks = worker.ready_blocks(GroupId(0)).min(self.budget);
    }

    /// Grows to `blocks` blocks with memory, or as many as there can be; how many have memory then.
    pub(crate) fn grow_to(&mut self, worker: &KvWorker, blocks: u64) -> Result<u64, DemandError> {
        self.take_mapped(worker);
        let ready = self.ready_blocks;
        let mut wanted = blocks.min(self.budget);
        let limit = worker.options().memory.limit.as_ref().map(MemoryLimit::stats);
        if wanted > ready && self.shortage.as_mut().is_some_and(|short| !short.is_over(limit)) {
            wanted = ready;
        }
        // A worker with a larger demand may take the shared memory for one device.
        let told = if worker.shares_a_limit() { wanted.min(ready) } else { wanted };
        for part in &worker.parts {
            part.first().demand(told)?;
        }
        if wanted <= ready {
            return Ok(ready);
        }
        self.stalls += 1;
        let mut reached = wanted;
        if self.shortage.is_some() {
            // Ask for one block first: a search would be refused many times.
            reached = worker.grow_parts(ready + 1)?;
        }
        if reached > ready {
            reached = worker.grow_parts(wanted)?;
        }
        self.take_mapped(worker);
        if reached < wanted {
            let before = self.shortage.filter(|_| reached <= ready);
            self.shortage = Some(Shortage::after(before, limit));
            for part in &worker.parts {
                part.first().stop_growing();
                part.first().demand(self.ready_blocks)?;
            }
        } else if self.shortage.take().is_some()
            && self.budget == u64::from(worker.options().first().device_blocks)
        {
            for part in &worker.parts {
                part.first().resume_growing(&worker.options().growth);
            }
        }
        Ok(self.ready_blocks)
    }
}

impl KvWorker {
    /// Unmaps the blocks from `blocks` on, on every device, and gives their memory back as far as the steps that
    /// may use it are complete. Whether all of it is back: if not, a later call gives back more. No plan may
    /// name these blocks any more before [`grow_to`](Self::grow_to) has mapped them again; a manager says which
    /// they are by [`unmappable_from`](kv_manager::Manager::unmappable_from). Tensors of the engine stay, and
    /// block 0, which padding names. Nothing is mapped ahead of need from now on.
    #[track_caller]
    pub fn shrink_to(&mut self, blocks: u64) -> bool {
        let _site = cuda_driver::site::enter();
        let mut all = true;
        for part in &self.parts {
            all &= part.first().shrink_to(blocks);
        }
        all
    }

    /// Makes `blocks` blocks ready on every device, or as many as all have memory for.
    ///
    /// Under one limit the devices grow a page at a time, in turn. Otherwise the first device would
    /// take the memory that the others need, and no block would become ready on all of them.
    pub(crate) fn grow_parts(&self, blocks: u64) -> Result<u64, GrowError> {
        let grow = |blocks: u64| {
            self.parts
                .iter()
                .try_fold(blocks, |most, part| Ok(part.first().grow_towards(most)?.min(most)))
        };
        if !guard!("cache.devices-grow-in-turn", self.shares_a_limit(), else false) {
            return grow(blocks);
        }
        let page_blocks =
            self.parts.iter().map(|part| part.first().page_blocks()).max().unwrap_or(1);
        let mut level = self.ready_blocks(GroupId(0));
        while level < blocks {
            let next = blocks.min(level.saturating_add(page_blocks));
            let reached = grow(next)?;
            if reached < next {
                return Ok(reached);
            }
            level = next;
        }
        Ok(blocks)
    }

    /// Whether several devices take their memory from one limit.
    fn shares_a_limit(&self) -> bool {
        self.parts.len() > 1 && self.options.memory.limit.is_some()
    }
}

/// Blocks without content.
fn empty(pool: Option<&PoolView>) -> u64 {
    pool.map_or(0, |pool| pool.empty() as u64)
}
