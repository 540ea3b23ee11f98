//! Tenants: what each holds and has cached, and whose cached blocks give way.

use std::collections::TryReserveError;

use crate::blocks::{BlockPhase, Flag};
use crate::eviction::EvictionQueues;
use crate::state::PoolState;
use crate::tenants::{Need, Tenant, Tenants};
use crate::{Priority, RecordId, TenantCounts, TenantError, TenantId, TenantQuota, Tier};

const NONE: u32 = u32::MAX;

/// How many of a tenant's cached blocks are looked at for one that no other follows.
const LOOKS_MAX: usize = 16;

/// The counts, and each tenant's cached blocks of each tier, the longest unused first.
#[derive(Debug)]
pub(crate) struct Tenancy {
    pub(crate) tenants: Tenants,
    /// Before and after, by block.
    links: Vec<[u32; 2]>,
    /// Front and back, by tenant and tier.
    ends: Vec<[[u32; 2]; Tier::COUNT]>,
    passed: PassedOver,
    /// A list for the needs of a lookup, empty between lookups.
    needs: Vec<Need>,
}

/// Unused blocks that came up for eviction while they were kept for their tenants. They are not looked
/// at again before their tenant has more than is kept for it, or claims: so a claim passes over each
/// of them once, however many there are.
#[derive(Debug)]
struct PassedOver {
    /// The queues of each tenant, by tier, for the tenants that have had such blocks.
    queues: [Vec<(Tenant, EvictionQueues)>; Tier::COUNT],
    /// When a block was passed over, which is the order among tenants.
    turns: Vec<u64>,
    last_turn: u64,
}

impl PassedOver {
    fn of(&mut self, tenant: Tenant, tier: Tier) -> &mut EvictionQueues {
        let queues = &mut self.queues[tier.index()];
        let known = queues.iter().position(|&(owner, _)| owner == tenant);
        let at = known.unwrap_or_else(|| {
            queues.push((tenant, EvictionQueues::new()));
            queues.len() - 1
        });
        &mut queues[at].1
    }
}

/// Why a victim is the next one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Turn {
    /// It is the first in the order of its tier.
    Queue,
    /// It was passed over before, because it was kept for its tenant.
    PassedOver,
    /// There is nothing else: others follow it.
    Last,
}

impl Tenancy {
    fn new(tenants: Tenants, blocks: usize) -> Result<Self, TryReserveError> {
        let (mut links, mut turns) = (Vec::new(), Vec::new());
        links.try_reserve_exact(blocks)?;
        turns.try_reserve_exact(blocks)?;
        links.resize(blocks, [NONE; 2]);
        turns.resize(blocks, 0);
        let passed =
            PassedOver { queues: [const { Vec::new() }; Tier::COUNT], turns, last_turn: 0 };
        let ends = vec![[[NONE; 2]; Tier::COUNT]];
        Ok(Self { tenants, links, ends, passed, needs: Vec::new() })
    }

    /// Makes room for one more tenant.
    pub(crate) fn grow(&mut self) {
        self.ends.push([[NONE; 2]; Tier::COUNT]);
    }

    fn push(&mut self, id: RecordId, tenant: Tenant, tier: Tier) {
        let [front, back] = &mut self.ends[tenant.index()][tier.index()];
        self.links[id.index()] = [*back, NONE];
        match *back {
            NONE => *front = id.0,
            last => self.links[last as usize][1] = id.0,
        }
        *back = id.0;
    }

    fn remove(&mut self, id: RecordId, tenant: Tenant, tier: Tier) {
        let [front, back] = &mut self.ends[tenant.index()][tier.index()];
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

    fn oldest(&self, tenant: Tenant, tier: Tier) -> impl Iterator<Item = RecordId> + '_ {
        let [mut at, _] = self.ends[tenant.index()][tier.index()];
        std::iter::from_fn(move || {
            let id = (at != NONE).then_some(RecordId(at))?;
            at = self.links[id.index()][1];
            Some(id)
        })
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
            let capacities = self.tiers.each_ref().map(|tier| u64::from(tier.budget));
            let (tenants, blocks) = (Tenants::new(self.mark, capacities), self.blocks.len());
            let tenancy = Tenancy::new(tenants, blocks);
            self.watch.tenancy = Some(tenancy.map_err(|_| TenantError::OutOfMemory { blocks })?);
            self.plain = false;
            for id in self.appeared() {
                self.recount(id);
            }
        }
        let Some(tenancy) = &mut self.watch.tenancy else { unreachable!("it was made above") };
        Ok(tenancy)
    }

    pub(crate) fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        let mark = self.mark;
        let tenancy = self.tenancy()?;
        let tenant = tenancy.tenants.add()?;
        tenancy.grow();
        Ok(TenantId::of(mark, tenant))
    }

    pub(crate) fn set_quota(
        &mut self,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), TenantError> {
        let tenant = self.tenant(tenant)?;
        self.tenancy()?.tenants.set_quota(tenant, tier, quota)?;
        self.give_way(tenant, tier);
        Ok(())
    }

    pub(crate) fn quota(&self, tenant: TenantId, tier: Tier) -> Result<TenantQuota, TenantError> {
        let tenant = self.tenant(tenant)?;
        let tenancy = self.watch.tenancy.as_ref();
        Ok(tenancy.map_or(TenantQuota::NONE, |tenancy| tenancy.tenants.quota(tenant, tier)))
    }

    pub(crate) fn tenant_counts(
        &self,
        tenant: TenantId,
        tier: Tier,
    ) -> Result<TenantCounts, TenantError> {
        let tenant = self.tenant(tenant)?;
        if let Some(tenancy) = &self.watch.tenancy {
            return Ok(tenancy.tenants.counts(tenant, tier));
        }
        // A pool without tenants is all nobody's.
        let tier = self.tier(tier);
        let cached = (tier.claimable() - tier.empty()) as u64;
        let blocks = u64::from(tier.budget) + u64::from(tier.beyond());
        Ok(TenantCounts { held: blocks - tier.claimable() as u64, cached })
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
        if blocks.is(id, Flag::COUNTED_HELD) && !held {
            blocks.clear(id, Flag::COUNTED_HELD);
            tenancy.tenants.unhold(tenant, tier, beyond);
        }
        if blocks.is(id, Flag::COUNTED_CACHED) && !cached {
            blocks.clear(id, Flag::COUNTED_CACHED);
            tenancy.tenants.uncache(tenant, tier);
            tenancy.remove(id, tenant, tier);
        }
        if held && !blocks.is(id, Flag::COUNTED_HELD) {
            blocks.set(id, Flag::COUNTED_HELD);
            tenancy.tenants.hold(tenant, tier, beyond);
        }
        if cached && !blocks.is(id, Flag::COUNTED_CACHED) {
            blocks.set(id, Flag::COUNTED_CACHED);
            tenancy.tenants.cache(tenant, tier);
            tenancy.push(id, tenant, tier);
        }
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
            blocks.clear(id, Flag::COUNTED_CACHED);
            tenancy.tenants.uncache(tenant, tier);
            tenancy.remove(id, tenant, tier);
        }
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

    /// The same beside what is needed; it is needed from now on if so.
    #[inline]
    pub(crate) fn may_use_beside(&self, id: RecordId, needs: &mut Vec<Need>) -> bool {
        let Some(tenancy) = &self.watch.tenancy else { return true };
        let (owner, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
        !self.is_unused(id) || tenancy.tenants.reuse(owner, tier, needs)
    }

    /// How many of the first blocks of a list may be used together.
    pub(crate) fn usable(&mut self, found: &[crate::hold::BlockAt]) -> usize {
        let Some(tenancy) = &mut self.watch.tenancy else { return found.len() };
        let mut needs = std::mem::take(&mut tenancy.needs);
        let may = |at: &&crate::hold::BlockAt| self.may_use_beside(at.block(), &mut needs);
        let usable = found.iter().take_while(may).count();
        needs.clear();
        if let Some(tenancy) = &mut self.watch.tenancy {
            tenancy.needs = needs;
        }
        usable
    }

    /// Whether nobody uses this block.
    #[inline]
    pub(crate) fn is_unused(&self, id: RecordId) -> bool {
        matches!(self.blocks.place(id), BlockPhase::Queued | BlockPhase::Shadowed)
    }

    /// Every block that was passed over in a tier, with the class that it is queued by.
    pub(crate) fn passed_over(
        &self,
        tier: Tier,
    ) -> impl Iterator<Item = (RecordId, Option<Priority>)> + '_ {
        let queues =
            self.watch.tenancy.iter().flat_map(move |own| &own.passed.queues[tier.index()]);
        queues.flat_map(|(_, queues)| queues.iter(&self.blocks))
    }

    /// How many blocks were passed over in a tier.
    pub(crate) fn passed_count(&self, tier: Tier) -> usize {
        let queues =
            self.watch.tenancy.iter().flat_map(move |own| &own.passed.queues[tier.index()]);
        queues.map(|(_, queues)| queues.len()).sum()
    }

    /// Sets a victim aside that is kept for its owner. It goes first in its priority when it is kept
    /// no longer, for it is older than all that have not come up.
    pub(crate) fn pass_over(&mut self, id: RecordId) {
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (owner, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
        tenancy.passed.last_turn += 1;
        tenancy.passed.turns[id.index()] = tenancy.passed.last_turn;
        let class = Some(self.blocks.priority(id));
        tenancy.passed.of(owner, tier).insert_last(&mut self.blocks, id, class);
        self.blocks.set(id, Flag::PASSED);
    }

    /// Puts a block back that was the first of those that were passed over.
    pub(crate) fn put_back_passed(&mut self, id: RecordId) {
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (owner, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
        let class = Some(self.blocks.priority(id));
        tenancy.passed.of(owner, tier).insert_first(&mut self.blocks, id, class);
        self.blocks.set(id, Flag::PASSED);
    }

    /// Takes a block out of those that were passed over.
    pub(crate) fn take_out_passed(&mut self, id: RecordId) {
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (owner, tier) = (Tenant(self.blocks.tenant(id)), self.blocks.tier(id));
        let class = Some(self.blocks.priority(id));
        tenancy.passed.of(owner, tier).remove(&mut self.blocks, id, class);
        self.blocks.clear(id, Flag::PASSED);
    }

    /// The class and the block that goes first of those that were passed over: of all, or of those
    /// that `by` may take now.
    pub(crate) fn first_passed(&self, tier: Tier, by: Option<Tenant>) -> Option<(usize, RecordId)> {
        let tenancy = self.watch.tenancy.as_ref()?;
        let may = |owner| by.is_none_or(|by| tenancy.tenants.may_evict(by, owner, tier));
        let queues = tenancy.passed.queues[tier.index()].iter();
        let firsts = queues.filter(|&&(owner, _)| may(owner)).filter_map(|(_, own)| own.first());
        firsts.min_by_key(|&(class, id)| (class, tenancy.passed.turns[id.index()]))
    }

    /// Drops cached blocks of a tenant that has more of them than it may, the oldest first, but none
    /// that others follow while there is another within reach.
    pub(crate) fn give_way(&mut self, tenant: Tenant, tier: Tier) {
        loop {
            let Some(tenancy) = &self.watch.tenancy else { return };
            if tenancy.tenants.cached_beyond(tenant, tier) == 0 {
                return;
            }
            let leaf = |&id: &RecordId| self.blocks.children(id) == 0;
            let leaf = tenancy.oldest(tenant, tier).take(LOOKS_MAX).find(leaf);
            let Some(id) = leaf.or_else(|| tenancy.oldest(tenant, tier).next()) else { return };
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
            let block = pool.claim_for(tenant, 1).unwrap().pop().unwrap();
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

    #[test]
    fn questions_about_tenants_leave_a_pool_without_them_as_it_is() {
        let pool = BlockPool::new(&PoolConfig::primary_only(8)).unwrap();
        cache(&pool, TenantId::NOBODY, 0..4);
        let held = pool.claim(3).unwrap();
        let counts = TenantCounts { held: 3, cached: 4 };
        assert_eq!(pool.tenant_counts(TenantId::NOBODY, TIER), Ok(counts));
        assert_eq!(pool.quota(TenantId::NOBODY, TIER), Ok(TenantQuota::NONE));
        let state = pool.shared.state.lock();
        assert!(state.plain && state.watch.tenancy.is_none());
        drop(state);
        // A pool that has some counts the same.
        pool.add_tenant().unwrap();
        assert_eq!(pool.tenant_counts(TenantId::NOBODY, TIER), Ok(counts));
        drop(held);
    }
}
