//! Tenants: what each holds and has cached, and whose cached blocks give way.

use crate::blocks::{Flag, Place};
use crate::state::State;
use crate::tenants::Tenants;
use crate::{BlockId, EvictionVerdict, TenantError, TenantId, Tier};

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
    /// A list for blocks that a claim passes over, empty between claims.
    kept: Vec<(BlockId, bool)>,
}

impl Tenancy {
    pub(crate) fn new(tenants: Tenants, blocks: usize) -> Self {
        Self {
            tenants,
            links: vec![[NONE; 2]; blocks],
            ends: vec![[[NONE; 2]; Tier::COUNT]],
            kept: Vec::new(),
        }
    }

    pub(crate) fn take_kept(&mut self) -> Vec<(BlockId, bool)> {
        std::mem::take(&mut self.kept)
    }

    pub(crate) fn keep_kept(&mut self, mut kept: Vec<(BlockId, bool)>) {
        kept.clear();
        self.kept = kept;
    }

    /// Makes room for one more tenant.
    pub(crate) fn grow(&mut self) {
        self.ends.push([[NONE; 2]; Tier::COUNT]);
    }

    fn push(&mut self, id: BlockId, tenant: TenantId, tier: Tier) {
        let [front, back] = &mut self.ends[usize::from(tenant.0)][tier.index()];
        self.links[id.index()] = [*back, NONE];
        match *back {
            NONE => *front = id.0,
            last => self.links[last as usize][1] = id.0,
        }
        *back = id.0;
    }

    fn remove(&mut self, id: BlockId, tenant: TenantId, tier: Tier) {
        let [front, back] = &mut self.ends[usize::from(tenant.0)][tier.index()];
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

    fn oldest(&self, tenant: TenantId, tier: Tier) -> impl Iterator<Item = BlockId> + '_ {
        let [mut at, _] = self.ends[usize::from(tenant.0)][tier.index()];
        std::iter::from_fn(move || {
            let id = (at != NONE).then_some(BlockId(at))?;
            at = self.links[id.index()][1];
            Some(id)
        })
    }
}

impl State {
    /// The tenants. The first call counts what is there.
    pub(crate) fn tenancy(&mut self) -> &mut Tenancy {
        if self.watch.tenancy.is_none() {
            let capacities = self.tiers.each_ref().map(|tier| u64::from(tier.ready));
            let blocks = self.blocks.len();
            self.plain = false;
            self.watch.tenancy = Some(Tenancy::new(Tenants::new(capacities), blocks));
            for id in self.blocks.ids() {
                self.recount(id);
            }
        }
        let (tenants, blocks) = (Tenants::new([0; Tier::COUNT]), 0);
        self.watch.tenancy.get_or_insert_with(|| Tenancy::new(tenants, blocks))
    }

    pub(crate) fn add_tenant(&mut self) -> Result<TenantId, TenantError> {
        let tenancy = self.tenancy();
        let tenant = tenancy.tenants.add()?;
        tenancy.grow();
        Ok(tenant)
    }

    /// Counts a block for its tenant as what it is by now.
    #[inline]
    pub(crate) fn account(&mut self, id: BlockId) {
        if self.watch.tenancy.is_some() {
            self.recount(id);
        }
    }

    pub(crate) fn recount(&mut self, id: BlockId) {
        let blocks = &mut self.blocks;
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (tenant, tier) = (TenantId(blocks.tenant(id)), blocks.tier(id));
        let (held, cached) = match blocks.place(id) {
            Place::Absent => (false, false),
            Place::Queued | Place::Shadowed => (false, blocks.is(id, Flag::NAMED)),
            _ => (true, false),
        };
        if blocks.is(id, Flag::COUNTED_HELD) && !held {
            blocks.clear(id, Flag::COUNTED_HELD);
            tenancy.tenants.unhold(tenant, tier);
        }
        if blocks.is(id, Flag::COUNTED_CACHED) && !cached {
            blocks.clear(id, Flag::COUNTED_CACHED);
            tenancy.tenants.uncache(tenant, tier);
            tenancy.remove(id, tenant, tier);
        }
        if held && !blocks.is(id, Flag::COUNTED_HELD) {
            blocks.set(id, Flag::COUNTED_HELD);
            tenancy.tenants.hold(tenant, tier);
        }
        if cached && !blocks.is(id, Flag::COUNTED_CACHED) {
            blocks.set(id, Flag::COUNTED_CACHED);
            tenancy.tenants.cache(tenant, tier);
            tenancy.push(id, tenant, tier);
        }
    }

    /// Counts a block no more, before it changes its tenant or its tier.
    pub(crate) fn uncount(&mut self, id: BlockId) {
        let blocks = &mut self.blocks;
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let (tenant, tier) = (TenantId(blocks.tenant(id)), blocks.tier(id));
        if blocks.is(id, Flag::COUNTED_HELD) {
            blocks.clear(id, Flag::COUNTED_HELD);
            tenancy.tenants.unhold(tenant, tier);
        }
        if blocks.is(id, Flag::COUNTED_CACHED) {
            blocks.clear(id, Flag::COUNTED_CACHED);
            tenancy.tenants.uncache(tenant, tier);
            tenancy.remove(id, tenant, tier);
        }
    }

    /// Whether a claim of `by` must pass over this victim, which is kept for its owner.
    #[inline]
    pub(crate) fn is_kept(&self, id: BlockId, by: TenantId) -> bool {
        let Some(tenancy) = &self.watch.tenancy else { return false };
        let owner = TenantId(self.blocks.tenant(id));
        let verdict = tenancy.tenants.may_evict(by, owner, self.blocks.tier(id));
        verdict != EvictionVerdict::Allowed
    }

    /// Drops cached blocks of a tenant that has more of them than it may, the oldest first, but none
    /// that others follow while there is another within reach.
    pub(crate) fn give_way(&mut self, tenant: TenantId, tier: Tier) {
        loop {
            let Some(tenancy) = &self.watch.tenancy else { return };
            if tenancy.tenants.cached_beyond(tenant, tier) == 0 {
                return;
            }
            let leaf = |&id: &BlockId| self.blocks.children(id) == 0;
            let leaf = tenancy.oldest(tenant, tier).take(LOOKS_MAX).find(leaf);
            let Some(id) = leaf.or_else(|| tenancy.oldest(tenant, tier).next()) else { return };
            self.forget(id);
        }
    }
}
