//! Tenants: what each holds and has cached, and whose cached blocks give way.

use std::collections::{BTreeSet, TryReserveError};

use crate::blocks::{BlockPhase, Blocks, Flag};
use crate::eviction::EvictionQueues;
use crate::guard;
use crate::hold::BlockAt;
use crate::state::PoolState;
use crate::tenants::{Tenant, Tenants};
use crate::{
    BlockPool, PoolView, RecordId, TenantCounts, TenantError, TenantId, TenantQuota, Tier,
};

const NONE: u32 = u32::MAX;

/// A tenant's cached blocks of a tier, in two lists: those that may be given up next, and those that
/// others follow and that came up before.
const FREE: usize = 0;
const FOLLOWED: usize = 1;
const LISTS: usize = 2;

/// Front and back of a list.
type Ends = [u32; 2];
const EMPTY: Ends = [NONE; 2];

/// The counts, and each tenant's cached blocks of each tier, the longest unused first.
#[derive(Debug)]
pub(crate) struct Tenancy {
    pub(crate) tenants: Tenants,
    /// Before and after, by block.
    links: Vec<[u32; 2]>,
    /// By tenant and tier.
    ends: Vec<[[Ends; LISTS]; Tier::COUNT]>,
    passed: PassedOver,
}

/// Unused blocks that came up for eviction while they were kept for their tenants. They are not looked
/// at again before their tenant has more than is kept for it, or claims: so a claim passes over each
/// of them once, however many there are, and looks at one tenant, however many have some.
#[derive(Debug)]
struct PassedOver {
    /// By tenant and tier, for the tenants that have had such blocks.
    queues: Vec<[Option<Box<OwnPassed>>; Tier::COUNT]>,
    /// The first such block of each tenant whose blocks anybody may evict by now.
    firsts: [BTreeSet<Rank>; Tier::COUNT],
    counts: [usize; Tier::COUNT],
    /// When a block was passed over, which is the order among tenants.
    turns: Vec<u64>,
    last_turn: u64,
}

/// The class of a tenant's first block that was passed over, its turn, and the tenant.
type Rank = (usize, u64, u16);

/// A tenant's blocks that were passed over.
#[derive(Debug)]
struct OwnPassed {
    queues: EvictionQueues,
    /// Its place in [`PassedOver::firsts`].
    rank: Option<Rank>,
}

impl PassedOver {
    fn of(&mut self, tenant: Tenant, tier: Tier) -> &mut EvictionQueues {
        let own = &mut self.queues[tenant.index()][tier.index()];
        let new = || Box::new(OwnPassed { queues: EvictionQueues::new(), rank: None });
        &mut own.get_or_insert_with(new).queues
    }
}

impl Tenancy {
    fn new(tenants: Tenants, blocks: usize) -> Result<Self, TryReserveError> {
        let (mut links, mut turns) = (Vec::new(), Vec::new());
        links.try_reserve_exact(blocks)?;
        turns.try_reserve_exact(blocks)?;
        links.resize(blocks, [NONE; 2]);
        turns.resize(blocks, 0);
        let passed = PassedOver {
            queues: Vec::new(),
            firsts: Default::default(),
            counts: [0; Tier::COUNT],
            turns,
            last_turn: 0,
        };
        let mut tenancy = Self { tenants, links, ends: Vec::new(), passed };
        tenancy.grow();
        Ok(tenancy)
    }

    /// Makes room for one more tenant.
    pub(crate) fn grow(&mut self) {
        self.ends.push([[EMPTY; LISTS]; Tier::COUNT]);
        self.passed.queues.push([const { None }; Tier::COUNT]);
    }

    fn push(&mut self, id: RecordId, tenant: Tenant, tier: Tier, list: usize) {
        let [front, back] = &mut self.ends[tenant.index()][tier.index()][list];
        self.links[id.index()] = [*back, NONE];
        match *back {
            NONE => *front = id.0,
            last => self.links[last as usize][1] = id.0,
        }
        *back = id.0;
    }

    fn push_front(&mut self, id: RecordId, tenant: Tenant, tier: Tier) {
        let [front, back] = &mut self.ends[tenant.index()][tier.index()][FREE];
        self.links[id.index()] = [NONE, *front];
        match *front {
            NONE => *back = id.0,
            first => self.links[first as usize][0] = id.0,
        }
        *front = id.0;
    }

    fn remove(&mut self, id: RecordId, tenant: Tenant, tier: Tier, list: usize) {
        let [front, back] = &mut self.ends[tenant.index()][tier.index()][list];
        let [before, after] = self.links[id.index()];
        match before {
            NONE => *front = after,
            before => self.links[before as usize][1] = after,
        }
        match after {
            NONE => *back = before,
            after => self.links[after as usize][0] = before,
        }
    }

    fn oldest(&self, tenant: Tenant, tier: Tier, list: usize) -> Option<RecordId> {
        let [front, _] = self.ends[tenant.index()][tier.index()][list];
        (front != NONE).then_some(RecordId(front))
    }

    /// Counts a block as cached no more.
    fn uncache(&mut self, blocks: &mut Blocks, id: RecordId, tenant: Tenant, tier: Tier) {
        let list = if blocks.is(id, Flag::FOLLOWED) { FOLLOWED } else { FREE };
        blocks.clear(id, Flag::FOLLOWED);
        blocks.clear(id, Flag::COUNTED_CACHED);
        self.tenants.uncache(tenant, tier);
        self.remove(id, tenant, tier, list);
    }

    /// Notes which of a tenant's blocks that were passed over is the first, if anybody may evict it.
    fn rank(&mut self, tenant: Tenant, tier: Tier) {
        let PassedOver { queues, firsts, turns, .. } = &mut self.passed;
        let Some(own) = &mut queues[tenant.index()][tier.index()] else { return };
        let open = self.tenants.may_be_evicted(tenant, tier);
        let first = own.queues.first().filter(|_| open);
        let now = first.map(|(class, id)| (class, turns[id.index()], tenant.0));
        if now == own.rank {
            return;
        }
        let firsts = &mut firsts[tier.index()];
        if let Some(before) = own.rank {
            firsts.remove(&before);
        }
        firsts.extend(now);
        own.rank = now;
    }
}

impl BlockPool {
    /// Adds a tenant without bounds, which blocks can be claimed for and counted by.
    ///
    /// # Errors
    /// [`TenantError::TooMany`] or [`TenantError::OutOfMemory`].
    pub fn add_tenant(&self) -> Result<TenantId, TenantError> {
        let mut state = self.shared.state.lock();
        let mark = state.mark;
        let tenancy = state.tenancy()?;
        let tenant = tenancy.tenants.add()?;
        tenancy.grow();
        Ok(TenantId::of(mark, tenant))
    }

    /// Gives a tenant another quota for a tier. Blocks that it holds beyond it stay until they are released;
    /// cached ones give way at once, in a time in proportion to them.
    ///
    /// # Errors
    /// [`TenantError`] names what cannot be; nothing has changed then.
    pub fn set_quota(
        &self,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), TenantError> {
        let mut state = self.shared.state.lock();
        let tenant = state.tenant(tenant)?;
        if state.watch.tenancy.is_none() {
            // Before there are tables for tenants, which a refusal is not to make.
            guard!("pool.refused-quota-makes-no-tables", {
                state.no_tenants().check_quota(tenant, tier, quota)?;
            });
        }
        let tenancy = state.tenancy()?;
        tenancy.tenants.set_quota(tenant, tier, quota)?;
        tenancy.rank(tenant, tier);
        state.give_way(tenant, tier);
        Ok(())
    }
}

impl PoolView {
    /// The quota of a tenant.
    ///
    /// # Errors
    /// [`TenantError::Foreign`].
    pub fn quota(&self, tenant: TenantId, tier: Tier) -> Result<TenantQuota, TenantError> {
        let state = self.shared.state.lock();
        let tenant = state.tenant(tenant)?;
        let tenancy = state.watch.tenancy.as_ref();
        Ok(tenancy.map_or(TenantQuota::NONE, |tenancy| tenancy.tenants.quota(tenant, tier)))
    }

    /// What a tenant holds and has cached.
    ///
    /// # Errors
    /// [`TenantError::Foreign`].
    pub fn tenant_counts(&self, tenant: TenantId, tier: Tier) -> Result<TenantCounts, TenantError> {
        let state = self.shared.state.lock();
        let tenant = state.tenant(tenant)?;
        if let Some(tenancy) = &state.watch.tenancy {
            return Ok(tenancy.tenants.counts(tenant, tier));
        }
        // A pool without tenants is all nobody's.
        let tier = state.tier(tier);
        let cached = (tier.claimable() - tier.empty()) as u64;
        let blocks = u64::from(tier.budget) + u64::from(tier.beyond());
        Ok(TenantCounts { held: blocks - tier.claimable() as u64, cached })
    }
}

impl PoolState {
    /// The tenant of this pool that an id names.
    #[inline]
    pub(crate) fn tenant(&self, id: TenantId) -> Result<Tenant, TenantError> {
        id.within(self.mark)
    }

    /// The tenants. The first call counts what is there.
    fn tenancy(&mut self) -> Result<&mut Tenancy, TenantError> {
        if self.watch.tenancy.is_none() {
            let (tenants, blocks) = (self.no_tenants(), self.blocks.len());
            let tenancy = Tenancy::new(tenants, blocks);
            self.watch.tenancy = Some(tenancy.map_err(|_| TenantError::OutOfMemory { blocks })?);
            (self.open, self.plain) = (false, false);
            for id in self.appeared() {
                self.recount(id);
            }
        }
        let Some(tenancy) = &mut self.watch.tenancy else { unreachable!("it was made above") };
        Ok(tenancy)
    }

    /// Nobody but nobody, before anything is counted.
    fn no_tenants(&self) -> Tenants {
        Tenants::new(self.mark, self.tiers.each_ref().map(|tier| u64::from(tier.budget)))
    }

    /// Counts a block for its tenant as what it is by now.
    #[inline]
    pub(crate) fn account(&mut self, id: RecordId) {
        if self.watch.tenancy.is_some() {
            self.recount(id);
        }
    }

    pub(crate) fn recount(&mut self, id: RecordId) {
        let beyond = self.is_beyond(id);
        let blocks = &mut self.blocks;
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (tenant, tier) = (Tenant(blocks.tenant(id)), blocks.tier(id));
        let (held, cached) = match blocks.place(id) {
            BlockPhase::Absent => (false, false),
            BlockPhase::Queued | BlockPhase::Shadowed => (false, blocks.is(id, Flag::NAMED)),
            _ => (true, false),
        };
        let comes = held && blocks.is(id, Flag::EXPECTED);
        if blocks.is(id, Flag::COUNTED_HELD) && !held {
            blocks.clear(id, Flag::COUNTED_HELD);
            tenancy.tenants.unhold(tenant, tier, beyond);
        }
        if blocks.is(id, Flag::COUNTED_CACHED) && !cached {
            tenancy.uncache(blocks, id, tenant, tier);
        }
        if held && !blocks.is(id, Flag::COUNTED_HELD) {
            blocks.set(id, Flag::COUNTED_HELD);
            tenancy.tenants.hold(tenant, tier, beyond);
        }
        if cached && !blocks.is(id, Flag::COUNTED_CACHED) {
            blocks.set(id, Flag::COUNTED_CACHED);
            tenancy.tenants.cache(tenant, tier);
            tenancy.push(id, tenant, tier, FREE);
        }
        if comes != blocks.is(id, Flag::COUNTED_COMING) {
            if comes {
                blocks.set(id, Flag::COUNTED_COMING)
            } else {
                blocks.clear(id, Flag::COUNTED_COMING)
            }
            tenancy.tenants.come(tenant, tier, comes);
        }
        tenancy.rank(tenant, tier);
    }

    /// Counts a block no more, before it changes its tenant or its tier.
    pub(crate) fn uncount(&mut self, id: RecordId) {
        if self.watch.tenancy.is_none() {
            return;
        }
        let beyond = self.is_beyond(id);
        let blocks = &mut self.blocks;
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (tenant, tier) = (Tenant(blocks.tenant(id)), blocks.tier(id));
        if blocks.is(id, Flag::COUNTED_HELD) {
            blocks.clear(id, Flag::COUNTED_HELD);
            tenancy.tenants.unhold(tenant, tier, beyond);
        }
        if blocks.is(id, Flag::COUNTED_CACHED) {
            tenancy.uncache(blocks, id, tenant, tier);
        }
        if blocks.is(id, Flag::COUNTED_COMING) {
            blocks.clear(id, Flag::COUNTED_COMING);
            tenancy.tenants.come(tenant, tier, false);
        }
        tenancy.rank(tenant, tier);
    }

    /// Whether a claim of `by` must pass over this victim, which is kept for its owner.
    #[inline]
    pub(crate) fn is_kept(&self, id: RecordId, by: Tenant) -> bool {
        let Some(tenancy) = &self.watch.tenancy else { return false };
        let owner = Tenant(self.blocks.tenant(id));
        !tenancy.tenants.may_evict(by, owner, self.blocks.tier(id))
    }

    /// Whether the owner of a block may hold it, if nobody does yet. Whoever comes to use cached
    /// content, it counts for its owner, and takes from what is kept for others.
    #[inline]
    pub(crate) fn may_use(&self, id: RecordId) -> bool {
        let Some(tenancy) = &self.watch.tenancy else { return true };
        let (owner, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
        !self.is_unused(id) || tenancy.tenants.most(owner, tier) > 0
    }

    /// How many of the first blocks of a list may be used together. One that is there twice counts once.
    pub(crate) fn usable(&mut self, found: &[BlockAt]) -> usize {
        if self.watch.tenancy.is_none() {
            return found.len();
        }
        let mut usable = 0;
        for at in found {
            let id = at.block();
            let counts = !self.blocks.is(id, Flag::MARK) && self.is_unused(id);
            if let Some(tenancy) = self.watch.tenancy.as_mut().filter(|_| counts) {
                let owner = Tenant(self.blocks.tenant(id));
                if !tenancy.tenants.reuse(owner, self.blocks.tier(id)) {
                    break;
                }
            }
            self.blocks.set(id, Flag::MARK);
            usable += 1;
        }
        found[..usable].iter().for_each(|at| self.blocks.clear(at.block(), Flag::MARK));
        if let Some(tenancy) = &mut self.watch.tenancy {
            tenancy.tenants.end_lookup();
        }
        usable
    }

    /// Whether nobody uses this block.
    #[inline]
    pub(crate) fn is_unused(&self, id: RecordId) -> bool {
        matches!(self.blocks.place(id), BlockPhase::Queued | BlockPhase::Shadowed)
    }

    /// The same of a block of the primary tier.
    pub(crate) fn is_unused_near(&self, block: RecordId) -> bool {
        self.blocks.tier(block) == Tier::Primary && self.is_unused(block)
    }

    /// Every block that was passed over in a tier, with the class that it is queued by.
    pub(crate) fn passed_over(&self, tier: Tier) -> impl Iterator<Item = (RecordId, usize)> + '_ {
        let all = self.watch.tenancy.iter().flat_map(|own| &own.passed.queues);
        let queues = all.filter_map(move |own| own[tier.index()].as_ref());
        queues.flat_map(|own| own.queues.iter(&self.blocks))
    }

    /// How many blocks were passed over in a tier.
    pub(crate) fn passed_count(&self, tier: Tier) -> usize {
        self.watch.tenancy.as_ref().map_or(0, |own| own.passed.counts[tier.index()])
    }

    /// Sets a victim aside that is kept for its owner. It goes first in its priority when it is kept
    /// no longer, for it is older than all that have not come up.
    pub(crate) fn pass_over(&mut self, id: RecordId) {
        self.change_passed(id, 1, |passed, blocks, (owner, tier)| {
            passed.last_turn += 1;
            passed.turns[id.index()] = passed.last_turn;
            let class = blocks.class(id);
            passed.of(owner, tier).push_back(blocks, id, class);
            blocks.set(id, Flag::PASSED);
        });
    }

    /// Takes a block out of those that were passed over.
    pub(crate) fn take_out_passed(&mut self, id: RecordId) {
        self.change_passed(id, -1, |passed, blocks, (owner, tier)| {
            let class = blocks.class(id);
            passed.of(owner, tier).remove(blocks, id, class);
            blocks.clear(id, Flag::PASSED);
        });
    }

    fn change_passed(
        &mut self,
        id: RecordId,
        more: isize,
        change: impl FnOnce(&mut PassedOver, &mut Blocks, (Tenant, Tier)),
    ) {
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (owner, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
        change(&mut tenancy.passed, &mut self.blocks, (owner, tier));
        let count = &mut tenancy.passed.counts[tier.index()];
        *count = count.saturating_add_signed(more);
        tenancy.rank(owner, tier);
    }

    /// The class and the block that goes first of those that were passed over and that `by` may take now.
    pub(crate) fn first_passed(&self, tier: Tier, by: Tenant) -> Option<(usize, RecordId)> {
        let passed = &self.watch.tenancy.as_ref()?.passed;
        let first = |tenant: usize| passed.queues[tenant][tier.index()].as_ref()?.queues.first();
        let own = first(by.index()).map(|(class, id)| (class, passed.turns[id.index()], by.0));
        let open = passed.firsts[tier.index()].first().copied();
        let (_, _, tenant) = open.into_iter().chain(own).min()?;
        first(tenant.into())
    }

    /// The cached block of a tenant that gives way next: the oldest that no other follows, or if there is
    /// none, the one that came up first.
    pub(super) fn next_to_give_way(&mut self, tenant: Tenant, tier: Tier) -> Option<RecordId> {
        let tenancy = self.watch.tenancy.as_mut()?;
        while let Some(id) = tenancy.oldest(tenant, tier, FREE) {
            if guard!(
                "pool.tail-gives-way-before-its-head",
                self.blocks.children(id) == 0,
                else true
            ) {
                return Some(id);
            }
            tenancy.remove(id, tenant, tier, FREE);
            tenancy.push(id, tenant, tier, FOLLOWED);
            self.blocks.set(id, Flag::FOLLOWED);
        }
        tenancy.oldest(tenant, tier, FOLLOWED)
    }

    /// The last block that followed this one is gone: it is the next to give way, if it came up before.
    #[inline]
    pub(super) fn follow_no_more(&mut self, id: RecordId) {
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        if self.blocks.is(id, Flag::FOLLOWED) {
            let (tenant, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
            self.blocks.clear(id, Flag::FOLLOWED);
            tenancy.remove(id, tenant, tier, FOLLOWED);
            tenancy.push_front(id, tenant, tier);
        }
    }

    /// Drops cached blocks of a tenant that has more of them than it may, the oldest first, but none
    /// that others follow while there is another.
    pub(crate) fn give_way(&mut self, tenant: Tenant, tier: Tier) {
        loop {
            let Some(tenancy) = &self.watch.tenancy else { return };
            if tenancy.tenants.cached_beyond(tenant, tier) == 0 {
                return;
            }
            let Some(id) = self.next_to_give_way(tenant, tier) else { return };
            self.forget(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockHash, BlockPool, Naming, PoolConfig, integrity};

    const TIER: Tier = Tier::Primary;

    fn cache(pool: &BlockPool, tenant: TenantId, contents: std::ops::Range<u32>) {
        for content in contents {
            let block = pool.claim_for(tenant, 1).unwrap();
            let name = [BlockHash::from_u128(content.into())];
            assert_eq!(block.cache(&name, Naming::default()), Ok(1));
        }
    }

    #[test]
    fn a_claim_looks_at_a_kept_block_once() {
        const KEPT: u32 = 100;
        let pool = BlockPool::new(&PoolConfig::primary_only(u64::from(KEPT) + 8)).unwrap();
        let owner = pool.add_tenant().unwrap();
        let quota = TenantQuota { reserved: KEPT.into(), ..TenantQuota::NONE };
        pool.set_quota(owner, TIER, quota).unwrap();
        cache(&pool, owner, 0..KEPT);
        cache(&pool, TenantId::NOBODY, KEPT..KEPT + 8);
        let claimed: Vec<_> = (0..4)
            .map(|_| {
                let claimed = pool.claim_one().unwrap();
                let state = pool.shared.state.lock();
                // The next claim begins with a block that it may take.
                let (_, next) = state.tier(TIER).queues.first().unwrap();
                assert!(!state.is_kept(next, Tenant::NOBODY));
                assert_eq!(state.passed_over(TIER).count(), KEPT as usize);
                integrity::check(&state).unwrap();
                drop(state);
                claimed
            })
            .collect();
        drop(claimed);
    }
}
