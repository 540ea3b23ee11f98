//! Whose blocks are whose, and how many of them each tenant may have.

use std::fmt;

use crate::Tier;
use crate::guard;
use crate::ids::PoolMark;

const TIERS: usize = Tier::ALL.len();

/// A tenant of a pool, whose blocks are counted apart. Numbers are given out by the pool, from 1 up.
///
/// A tenant is of the pool that added it: another pool does not take it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct TenantId {
    pool: PoolMark,
    number: u16,
}

impl TenantId {
    /// The tenant of all that belongs to no other one, in every pool.
    pub const NOBODY: Self = Self { pool: PoolMark::ALL, number: 0 };

    /// The number, 0 for [`NOBODY`](Self::NOBODY).
    #[must_use]
    pub const fn number(self) -> u16 {
        self.number
    }

    /// The tenant of a number that the pool of this mark has given out.
    pub(crate) fn of(pool: PoolMark, tenant: Tenant) -> Self {
        match tenant {
            Tenant::NOBODY => Self::NOBODY,
            Tenant(number) => Self { pool, number },
        }
    }

    /// The tenant in the pool of this mark.
    pub(crate) fn within(self, pool: PoolMark) -> Result<Tenant, TenantError> {
        if self == Self::NOBODY || guard!("pool.tenant-of-this-pool", self.pool == pool, else true)
        {
            Ok(Tenant(self.number))
        } else {
            Err(TenantError::Foreign { tenant: self })
        }
    }
}

impl Default for TenantId {
    fn default() -> Self {
        Self::NOBODY
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

/// What a tenant may have cached in a tier beside what it has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum MayCache {
    More,
    /// As much, and no more.
    NoMore,
    /// Never anything.
    Nothing,
}

/// A tenant of this pool. Others get here as errors of [`TenantId::within`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Tenant(pub(crate) u16);

impl Tenant {
    pub(crate) const NOBODY: Self = Self(0);

    #[inline]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// How many blocks of one tier a tenant may have.
///
/// A block is held as long as anybody uses it, and cached when it has content and nobody does. It
/// counts for the tenant that claimed it, also when others use it too. So a lookup finds cached
/// content only if its tenant may hold it, and if enough is left of what is kept for others; content
/// in use is found by all. Content that moves between tiers is not asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TenantQuota {
    /// The most blocks that are held at once.
    pub held_max: u64,
    /// The most blocks that stay cached. Beyond it the tenant's own give way, the oldest first and none that
    /// others follow while there is another. So content that comes to the secondary tier takes the place of the
    /// tenant's own there, or none.
    pub cached_max: u64,
    /// As many blocks are kept for the tenant: it can always hold so many, and others never evict
    /// its cached ones while it has no more than that. Blocks that others have in use when a quota is set, or when a
    /// [budget](crate::BlockPool::set_budget) falls, stay theirs until they let go of them: then nobody else gets them.
    pub reserved: u64,
}

impl TenantQuota {
    /// No bound, and nothing kept.
    pub const NONE: Self = Self { held_max: u64::MAX, cached_max: u64::MAX, reserved: 0 };
}

impl Default for TenantQuota {
    fn default() -> Self {
        Self::NONE
    }
}

/// How many blocks of one tier a tenant has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TenantCounts {
    /// Blocks in use.
    pub held: u64,
    /// Blocks with content that nobody uses.
    pub cached: u64,
}

/// How many blocks of one tier a tenant may hold.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TenantRoom {
    /// More than it holds now, by its own bound alone.
    pub own: u64,
    /// The same, beside what must stay for others. Whether there are as many is not looked at.
    pub now: u64,
    /// In all, if nobody else held any.
    pub ever: u64,
}

/// Why a tenant does not get what it asks for.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TenantError {
    /// Another pool has added that tenant.
    #[error("tenant {tenant} is of another pool")]
    Foreign {
        /// The tenant that was named.
        tenant: TenantId,
    },
    /// There are as many tenants as can be counted.
    #[error("there are {count} tenants already")]
    TooMany {
        /// How many there are.
        count: usize,
    },
    /// The host has not enough memory to count blocks by tenant.
    #[error("no host memory to count {blocks} blocks by tenant")]
    OutOfMemory {
        /// Blocks of all tiers.
        blocks: usize,
    },
    /// Its own bound is too low.
    #[error(
        "tenant {tenant} holds {held} blocks of the {tier:?} tier and asks for {requested} more, but may hold {held_max}"
    )]
    HeldMax {
        /// The tenant.
        tenant: TenantId,
        /// The tier.
        tier: Tier,
        /// Blocks that it holds.
        held: u64,
        /// Blocks that it asks for, cached ones of its own that it would use again among them.
        requested: u64,
        /// The most that it may hold.
        held_max: u64,
    },
    /// What is left is kept for others.
    #[error(
        "{requested} blocks of the {tier:?} tier were asked for by tenant {tenant}, {unheld} are not in use and {kept} of them are kept for others"
    )]
    KeptForOthers {
        /// The tenant.
        tenant: TenantId,
        /// The tier.
        tier: Tier,
        /// Blocks that it asks for.
        requested: u64,
        /// Blocks that nobody uses.
        unheld: u64,
        /// Blocks that must stay so for other tenants.
        kept: u64,
    },
    /// More is to be kept than there is.
    #[error("{reserved} blocks are to be kept in the {tier:?} tier, which has {capacity}")]
    OverReserved {
        /// The tier.
        tier: Tier,
        /// Blocks to be kept for all tenants together.
        reserved: u64,
        /// Blocks of the tier.
        capacity: u64,
    },
    /// The bound on blocks in use is below what is to be kept.
    #[error("{reserved} blocks are to be kept for a tenant that may hold {held_max}")]
    ReservedOverHeldMax {
        /// Blocks to be kept.
        reserved: u64,
        /// The most that it may hold.
        held_max: u64,
    },
}

crate::error::one_line_debug!(TenantError);

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    quota: TenantQuota,
    counts: TenantCounts,
    /// Cached blocks of its own that the lookup under way uses again.
    reused: u64,
    /// Content on its way to the tier, which will be cached there.
    coming: u64,
}

impl Share {
    /// Blocks that must be free for the tenant to hold what is kept for it.
    fn unmet(&self) -> u64 {
        self.quota.reserved.saturating_sub(self.counts.held)
    }

    /// Of these, as many as the lookup under way uses again.
    fn met(&self) -> u64 {
        self.unmet().min(self.reused)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Whole {
    /// The tier's budget.
    capacity: u64,
    /// Blocks in use, without those beyond the budget.
    held: u64,
    reserved: u64,
    /// The sum of all shares' unmet parts.
    unmet: u64,
    /// The sums of what the lookup under way uses again.
    reused: u64,
    met: u64,
}

/// All tenants of a pool. The end of a lookup takes time in proportion to its tenants; every answer and every
/// count takes constant time.
#[derive(Debug)]
pub(crate) struct Tenants {
    pool: PoolMark,
    shares: Vec<[Share; TIERS]>,
    wholes: [Whole; TIERS],
    /// Whose blocks the lookup under way uses again; empty between lookups.
    reusers: Vec<(Tenant, Tier)>,
}

impl Tenants {
    /// Nobody but [`Tenant::NOBODY`], in the pool of this mark with tiers of so many blocks.
    pub(crate) fn new(pool: PoolMark, capacities: [u64; TIERS]) -> Self {
        let wholes = capacities.map(|capacity| Whole { capacity, ..Whole::default() });
        let shares = vec![[Share::default(); TIERS]];
        Self { pool, shares, wholes, reusers: Vec::new() }
    }

    /// Adds one without bounds.
    pub(crate) fn add(&mut self) -> Result<Tenant, TenantError> {
        let count = self.shares.len();
        let number = u16::try_from(count).map_err(|_| TenantError::TooMany { count })?;
        self.shares.push([Share::default(); TIERS]);
        Ok(Tenant(number))
    }

    /// Says that a tier has so many blocks now, and that so many of them are in use.
    pub(crate) fn set_capacity(&mut self, tier: Tier, capacity: u64, held: u64) {
        let whole = &mut self.wholes[tier.index()];
        (whole.capacity, whole.held) = (capacity, held);
    }

    /// Blocks of a tier that are in use, without those beyond its budget.
    pub(crate) fn held(&self, tier: Tier) -> u64 {
        self.wholes[tier.index()].held
    }

    /// Blocks of a tier that are kept for all tenants together.
    pub(crate) fn reserved(&self, tier: Tier) -> u64 {
        self.wholes[tier.index()].reserved
    }

    /// Gives a tenant another quota. Blocks that it has beyond it stay until they are released.
    pub(crate) fn set_quota(
        &mut self,
        tenant: Tenant,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), TenantError> {
        self.wholes[tier.index()].reserved = self.check_quota(tenant, tier, quota)?;
        self.change(tenant, tier, |share| share.quota = quota);
        Ok(())
    }

    /// Whether a tenant may be given a quota; what is kept for all tenants together then.
    pub(crate) fn check_quota(
        &self,
        tenant: Tenant,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<u64, TenantError> {
        let TenantQuota { reserved, held_max, .. } = quota;
        if reserved > held_max {
            return Err(TenantError::ReservedOverHeldMax { reserved, held_max });
        }
        let whole = self.wholes[tier.index()];
        let others = whole.reserved - self.share(tenant, tier).quota.reserved;
        let total = others.saturating_add(reserved);
        if total > whole.capacity {
            let capacity = whole.capacity;
            return Err(TenantError::OverReserved { tier, reserved: total, capacity });
        }
        Ok(total)
    }

    pub(crate) fn quota(&self, tenant: Tenant, tier: Tier) -> TenantQuota {
        self.share(tenant, tier).quota
    }

    pub(crate) fn counts(&self, tenant: Tenant, tier: Tier) -> TenantCounts {
        self.share(tenant, tier).counts
    }

    /// How many more blocks a tenant may hold. If blocks in use are all counted, there are as many
    /// that it may take: free ones, its own, or such as [`may_evict`](Self::may_evict) allows.
    pub(crate) fn most(&self, tenant: Tenant, tier: Tier) -> u64 {
        let Share { quota, counts, .. } = self.share(tenant, tier);
        let unkept = self.unheld(tier, 0).saturating_sub(self.kept(tier, Some(tenant)));
        quota.held_max.saturating_sub(counts.held).min(unkept)
    }

    /// How many blocks a tenant may hold, now and at most, of a tier that was made for so many.
    pub(crate) fn room(&self, tenant: Tenant, tier: Tier, capacity: u64) -> TenantRoom {
        let Share { quota, counts, .. } = *self.share(tenant, tier);
        let of_others = self.wholes[tier.index()].reserved - quota.reserved;
        let ever = quota.held_max.min(capacity.saturating_sub(of_others));
        let own = quota.held_max.saturating_sub(counts.held);
        TenantRoom { own, now: self.most(tenant, tier), ever }
    }

    /// Whether one more cached block of `owner` may be in use beside those that the lookup uses again; it is one of
    /// them from now on if so. Whoever uses it, it counts for its owner, and is asked for as by its owner.
    pub(crate) fn reuse(&mut self, owner: Tenant, tier: Tier) -> bool {
        let Share { quota, counts, reused, .. } = *self.share(owner, tier);
        let room =
            self.unheld(tier, self.wholes[tier.index()].reused) > self.kept(tier, Some(owner));
        let may = room && counts.held.saturating_add(reused) < quota.held_max;
        if may {
            if reused == 0 {
                self.reusers.push((owner, tier));
            }
            self.set_reused(owner, tier, reused + 1);
        }
        may
    }

    /// Forgets what the lookup uses again.
    pub(crate) fn end_lookup(&mut self) {
        while let Some((tenant, tier)) = self.reusers.pop() {
            self.set_reused(tenant, tier, 0);
        }
    }

    fn set_reused(&mut self, tenant: Tenant, tier: Tier, reused: u64) {
        let before = self.share(tenant, tier).reused;
        self.change(tenant, tier, |share| share.reused = reused);
        let whole = &mut self.wholes[tier.index()];
        whole.reused = whole.reused - before + reused;
    }

    /// Whether a tenant may claim so many blocks once cached ones are in use, so many of each owner, in a tier that has
    /// `resized` blocks more, or fewer.
    pub(crate) fn check(
        &self,
        (tenant, tier): (Tenant, Tier),
        requested: u64,
        pinned: &[(Tenant, u64)],
        resized: i64,
    ) -> Result<(), TenantError> {
        let Whole { capacity, held, reserved, unmet, .. } = self.wholes[tier.index()];
        let capacity = capacity.saturating_add_signed(resized);
        if resized < 0 && reserved > capacity {
            return Err(TenantError::OverReserved { tier, reserved, capacity });
        }
        let Share { quota, counts, .. } = *self.share(tenant, tier);
        let (mut own, mut all, mut met) = (0, 0, 0);
        for &(owner, count) in pinned {
            all += count;
            if owner == tenant {
                own += count;
            } else {
                met += self.share(owner, tier).unmet().min(count);
            }
        }
        if requested == 0 {
            return Ok(());
        }
        let (held_by, held_max, needed) =
            (counts.held, quota.held_max, requested.saturating_add(own));
        let kept = unmet - self.share(tenant, tier).unmet() - met;
        let unheld = capacity.saturating_sub(held.saturating_add(all));
        let tenant = self.id(tenant);
        if held_by.saturating_add(needed) > held_max {
            let (held, requested) = (held_by, needed);
            return Err(TenantError::HeldMax { tenant, tier, held, requested, held_max });
        }
        if unheld < requested.saturating_add(kept) {
            return Err(TenantError::KeptForOthers { tenant, tier, requested, unheld, kept });
        }
        Ok(())
    }

    /// Whether a claim of `by` may evict a cached block of `owner`: it is the claimant's own, or the
    /// owner has more than is kept for it.
    pub(crate) fn may_evict(&self, by: Tenant, owner: Tenant, tier: Tier) -> bool {
        by == owner || self.may_be_evicted(owner, tier)
    }

    /// Whether anybody may evict a cached block of `owner`.
    pub(crate) fn may_be_evicted(&self, owner: Tenant, tier: Tier) -> bool {
        let Share { quota, counts, .. } = self.share(owner, tier);
        counts.held + counts.cached > quota.reserved
    }

    /// How many of its own cached blocks a tenant must give up to stay within its quota.
    pub(crate) fn cached_beyond(&self, tenant: Tenant, tier: Tier) -> u64 {
        let Share { quota, counts, .. } = self.share(tenant, tier);
        counts.cached.saturating_sub(quota.cached_max)
    }

    /// Whether a tenant may have one more block cached in a tier, beside what is on its way there.
    pub(crate) fn may_cache(&self, tenant: Tenant, tier: Tier) -> MayCache {
        let &Share { quota, counts, coming, .. } = self.share(tenant, tier);
        let cached =
            counts.cached + guard!("pool.coming-content-counts-for-its-tenant", coming, else 0);
        match quota.cached_max {
            0 => MayCache::Nothing,
            most if cached < most => MayCache::More,
            _ => MayCache::NoMore,
        }
    }

    /// Counts content on its way to a tier, or no more.
    pub(crate) fn come(&mut self, tenant: Tenant, tier: Tier, comes: bool) {
        let coming = &mut self.shares[tenant.index()][tier.index()].coming;
        if comes { *coming += 1 } else { subtract_one(coming) }
    }

    /// Counts a block as in use, which may lie beyond the budget.
    pub(crate) fn hold(&mut self, tenant: Tenant, tier: Tier, beyond: bool) {
        self.wholes[tier.index()].held += u64::from(!beyond);
        self.change(tenant, tier, |share| share.counts.held += 1);
    }

    /// Counts a block as not in use any more.
    pub(crate) fn unhold(&mut self, tenant: Tenant, tier: Tier, beyond: bool) {
        if !beyond {
            subtract_one(&mut self.wholes[tier.index()].held);
        }
        self.change(tenant, tier, |share| subtract_one(&mut share.counts.held));
    }

    /// Counts a block as cached.
    pub(crate) fn cache(&mut self, tenant: Tenant, tier: Tier) {
        self.change(tenant, tier, |share| share.counts.cached += 1);
    }

    /// Counts a block as not cached any more.
    pub(crate) fn uncache(&mut self, tenant: Tenant, tier: Tier) {
        self.change(tenant, tier, |share| subtract_one(&mut share.counts.cached));
    }

    /// Blocks that nobody uses, and nobody will when `more` are in use.
    fn unheld(&self, tier: Tier, more: u64) -> u64 {
        let Whole { capacity, held, .. } = self.wholes[tier.index()];
        capacity.saturating_sub(held.saturating_add(more))
    }

    /// Blocks that must stay free for all tenants but `except`, beside what the lookup uses again.
    fn kept(&self, tier: Tier, except: Option<Tenant>) -> u64 {
        let Whole { unmet, met, .. } = self.wholes[tier.index()];
        let own = except.map(|tenant| self.share(tenant, tier));
        unmet - met - own.map_or(0, |own| own.unmet() - own.met())
    }

    fn id(&self, tenant: Tenant) -> TenantId {
        TenantId::of(self.pool, tenant)
    }

    fn share(&self, tenant: Tenant, tier: Tier) -> &Share {
        #[cfg(test)]
        crate::steps::step();
        &self.shares[tenant.index()][tier.index()]
    }

    fn change(&mut self, tenant: Tenant, tier: Tier, change: impl FnOnce(&mut Share)) {
        let share = &mut self.shares[tenant.index()][tier.index()];
        let whole = &mut self.wholes[tier.index()];
        whole.unmet -= share.unmet();
        whole.met -= share.met();
        change(share);
        whole.unmet += share.unmet();
        whole.met += share.met();
    }
}

fn subtract_one(count: &mut u64) {
    debug_assert!(*count > 0, "more blocks leave than came");
    *count = count.saturating_sub(1);
}

#[cfg(test)]
mod tests;
