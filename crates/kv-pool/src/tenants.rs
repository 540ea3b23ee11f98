//! Whose blocks are whose, and how many of them each tenant may have.

use std::fmt;

use crate::Tier;

const TIERS: usize = Tier::ALL.len();

/// Somebody whose blocks are counted apart. Numbers are given out by the pool, from 0 up.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct TenantId(pub(crate) u16);

impl TenantId {
    /// Whoever is no tenant: it has no quota, and nothing is kept for it.
    pub const NOBODY: Self = Self(0);

    /// The number, 0 for [`NOBODY`](Self::NOBODY).
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How many blocks of one tier a tenant may have.
///
/// A block is held as long as anybody uses it, and cached when it has content and nobody does. It
/// counts for the tenant that claimed it, also when others use it too.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TenantQuota {
    /// The most blocks that are held at once.
    pub held_max: u64,
    /// The most blocks that stay cached. Beyond it the tenant's own give way.
    pub cached_max: u64,
    /// As many blocks are kept for the tenant: it can always hold so many, and others never evict
    /// its cached ones while it has no more than that.
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

/// Why a tenant does not get what it asks for.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TenantError {
    /// There is no such tenant.
    #[error("there is no tenant {tenant}, only {count}")]
    Unknown {
        /// The tenant that was named.
        tenant: TenantId,
        /// How many there are.
        count: usize,
    },
    /// There are as many tenants as can be counted.
    #[error("there are {count} tenants already")]
    TooMany {
        /// How many there are.
        count: usize,
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
        /// Blocks that it asks for.
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

/// Whether one tenant's claim may evict another's cached block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EvictionVerdict {
    /// It may: the block is the claimant's own, or its owner has more than is kept for it.
    Allowed,
    /// The owner has no more than is kept for it.
    Kept {
        /// The owner.
        owner: TenantId,
        /// What it has.
        counts: TenantCounts,
        /// What is kept for it.
        reserved: u64,
    },
}

/// What one tenant of a batch is to hold beside what it holds already.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) tenant: TenantId,
    /// Blocks that are claimed for it.
    pub(crate) claimed: u64,
    /// Cached blocks of its own that are used again, by whomever.
    pub(crate) reused: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    quota: TenantQuota,
    counts: TenantCounts,
}

impl Share {
    /// Blocks that must be free for the tenant to hold what is kept for it.
    fn unmet(&self) -> u64 {
        self.quota.reserved.saturating_sub(self.counts.held)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Whole {
    capacity: u64,
    held: u64,
    reserved: u64,
    /// The sum of all shares' unmet parts.
    unmet: u64,
}

/// All tenants of a pool. Every answer and every count takes constant time.
#[derive(Debug)]
pub(crate) struct Tenants {
    shares: Vec<[Share; TIERS]>,
    wholes: [Whole; TIERS],
}

impl Tenants {
    /// Nobody but [`TenantId::NOBODY`], in tiers of so many blocks.
    pub(crate) fn new(capacities: [u64; TIERS]) -> Self {
        let wholes = capacities.map(|capacity| Whole { capacity, ..Whole::default() });
        Self { shares: vec![[Share::default(); TIERS]], wholes }
    }

    /// Adds a tenant without bounds.
    pub(crate) fn add(&mut self) -> Result<TenantId, TenantError> {
        let count = self.shares.len();
        let number = u16::try_from(count).map_err(|_| TenantError::TooMany { count })?;
        self.shares.push([Share::default(); TIERS]);
        Ok(TenantId(number))
    }

    /// Says that a tier has so many blocks now. Never fewer than before.
    pub(crate) fn grow(&mut self, tier: Tier, capacity: u64) {
        let whole = &mut self.wholes[tier.index()];
        whole.capacity = whole.capacity.max(capacity);
    }

    /// Gives a tenant another quota. Blocks that it has beyond it stay until they are released.
    pub(crate) fn set_quota(
        &mut self,
        tenant: TenantId,
        tier: Tier,
        quota: TenantQuota,
    ) -> Result<(), TenantError> {
        let TenantQuota { reserved, held_max, .. } = quota;
        if reserved > held_max {
            return Err(TenantError::ReservedOverHeldMax { reserved, held_max });
        }
        let share = self.share(tenant, tier)?;
        let whole = self.wholes[tier.index()];
        let others = whole.reserved - share.quota.reserved;
        let total = others.saturating_add(reserved);
        if total > whole.capacity {
            let capacity = whole.capacity;
            return Err(TenantError::OverReserved { tier, reserved: total, capacity });
        }
        self.wholes[tier.index()].reserved = total;
        self.change(tenant, tier, |share| share.quota = quota);
        Ok(())
    }

    pub(crate) fn quota(&self, tenant: TenantId, tier: Tier) -> Result<TenantQuota, TenantError> {
        Ok(self.share(tenant, tier)?.quota)
    }

    pub(crate) fn counts(&self, tenant: TenantId, tier: Tier) -> Result<TenantCounts, TenantError> {
        Ok(self.share(tenant, tier)?.counts)
    }

    /// Whether a tenant may hold `count` more blocks. If so, and blocks in use are all counted,
    /// there are as many that it may take: free ones, its own, or such as
    /// [`may_evict`](Self::may_evict) allows.
    pub(crate) fn admit(
        &self,
        tenant: TenantId,
        tier: Tier,
        count: u64,
    ) -> Result<(), TenantError> {
        let share = self.share(tenant, tier)?;
        if count == 0 {
            return Ok(());
        }
        let (held, held_max) = (share.counts.held, share.quota.held_max);
        if held.saturating_add(count) > held_max {
            return Err(TenantError::HeldMax { tenant, tier, held, requested: count, held_max });
        }
        let whole = &self.wholes[tier.index()];
        let unheld = whole.capacity.saturating_sub(whole.held);
        let kept = whole.unmet - share.unmet();
        if count.saturating_add(kept) > unheld {
            let requested = count;
            return Err(TenantError::KeptForOthers { tenant, tier, requested, unheld, kept });
        }
        Ok(())
    }

    /// Whether all of a batch may be held together; how many more blocks may be. Each tenant is named
    /// once. What is kept for a tenant of the batch is kept from the others of the batch, too.
    pub(crate) fn admit_batch(&self, tier: Tier, batch: &[Need]) -> Result<u64, TenantError> {
        let whole = &self.wholes[tier.index()];
        let (mut requested, mut reused, mut kept) = (0_u64, 0, whole.unmet);
        for need in batch {
            let Need { tenant, claimed, .. } = *need;
            let share = self.share(tenant, tier)?;
            let (held, held_max) = (share.counts.held + need.reused, share.quota.held_max);
            if claimed > 0 && held.saturating_add(claimed) > held_max {
                return Err(TenantError::HeldMax {
                    tenant,
                    tier,
                    held,
                    requested: claimed,
                    held_max,
                });
            }
            requested += claimed;
            reused += need.reused;
            let sole = batch.iter().all(|other| other.tenant == tenant || other.claimed == 0);
            let own = if sole && claimed > 0 { 0 } else { share.quota.reserved };
            kept = kept - share.unmet() + own.saturating_sub(held + claimed);
        }
        let unheld = whole.capacity.saturating_sub(whole.held + reused);
        let slack = unheld.checked_sub(requested.saturating_add(kept));
        match batch.iter().find(|need| need.claimed > 0) {
            Some(&Need { tenant, .. }) if slack.is_none() => {
                Err(TenantError::KeptForOthers { tenant, tier, requested, unheld, kept })
            }
            _ => Ok(slack.unwrap_or(0)),
        }
    }

    /// Whether a claim of `by` may evict a cached block of `owner`. Both are tenants.
    pub(crate) fn may_evict(&self, by: TenantId, owner: TenantId, tier: Tier) -> EvictionVerdict {
        let Share { quota, counts } = self.shares[usize::from(owner.0)][tier.index()];
        if by == owner || counts.held + counts.cached > quota.reserved {
            EvictionVerdict::Allowed
        } else {
            EvictionVerdict::Kept { owner, counts, reserved: quota.reserved }
        }
    }

    /// How many of its own cached blocks a tenant must give up to stay within its quota.
    pub(crate) fn cached_beyond(&self, tenant: TenantId, tier: Tier) -> u64 {
        let Share { quota, counts } = self.shares[usize::from(tenant.0)][tier.index()];
        counts.cached.saturating_sub(quota.cached_max)
    }

    /// Counts a block as in use. `tenant` is one.
    pub(crate) fn hold(&mut self, tenant: TenantId, tier: Tier) {
        self.wholes[tier.index()].held += 1;
        self.change(tenant, tier, |share| share.counts.held += 1);
    }

    /// Counts a block as not in use any more.
    pub(crate) fn unhold(&mut self, tenant: TenantId, tier: Tier) {
        subtract_one(&mut self.wholes[tier.index()].held);
        self.change(tenant, tier, |share| subtract_one(&mut share.counts.held));
    }

    /// Counts a block as cached.
    pub(crate) fn cache(&mut self, tenant: TenantId, tier: Tier) {
        self.change(tenant, tier, |share| share.counts.cached += 1);
    }

    /// Counts a block as not cached any more.
    pub(crate) fn uncache(&mut self, tenant: TenantId, tier: Tier) {
        self.change(tenant, tier, |share| subtract_one(&mut share.counts.cached));
    }

    fn share(&self, tenant: TenantId, tier: Tier) -> Result<&Share, TenantError> {
        let unknown = TenantError::Unknown { tenant, count: self.shares.len() };
        Ok(&self.shares.get(usize::from(tenant.0)).ok_or(unknown)?[tier.index()])
    }

    fn change(&mut self, tenant: TenantId, tier: Tier, change: impl FnOnce(&mut Share)) {
        let share = &mut self.shares[usize::from(tenant.0)][tier.index()];
        let whole = &mut self.wholes[tier.index()];
        whole.unmet -= share.unmet();
        change(share);
        whole.unmet += share.unmet();
    }
}

fn subtract_one(count: &mut u64) {
    debug_assert!(*count > 0, "more blocks leave than came");
    *count = count.saturating_sub(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIER: Tier = Tier::Primary;

    fn tenants(capacity: u64, quotas: &[TenantQuota]) -> Tenants {
        let mut tenants = Tenants::new([capacity; TIERS]);
        for &quota in quotas {
            let tenant = tenants.add().unwrap();
            tenants.set_quota(tenant, TIER, quota).unwrap();
        }
        tenants
    }

    fn reserved(reserved: u64) -> TenantQuota {
        TenantQuota { reserved, ..TenantQuota::NONE }
    }

    fn hold(tenants: &mut Tenants, tenant: TenantId, count: u64) {
        (0..count).for_each(|_| tenants.hold(tenant, TIER));
    }

    #[test]
    fn a_tenant_holds_as_many_as_it_may_and_the_refusal_says_why() {
        let mut tenants = tenants(10, &[TenantQuota { held_max: 3, ..TenantQuota::NONE }]);
        let tenant = TenantId(1);
        hold(&mut tenants, tenant, 2);
        assert_eq!(tenants.admit(tenant, TIER, 1), Ok(()));
        let error = tenants.admit(tenant, TIER, 2).unwrap_err();
        let expected =
            TenantError::HeldMax { tenant, tier: TIER, held: 2, requested: 2, held_max: 3 };
        assert_eq!(error, expected);
        assert_eq!(
            error.to_string(),
            "tenant 1 holds 2 blocks of the Primary tier and asks for 2 more, but may hold 3"
        );
        tenants.unhold(tenant, TIER);
        assert_eq!(tenants.admit(tenant, TIER, 2), Ok(()));
        assert_eq!(tenants.admit(TenantId::NOBODY, TIER, 9), Ok(()));
    }

    #[test]
    fn what_is_kept_for_one_tenant_is_refused_to_the_others() {
        let mut tenants = tenants(10, &[reserved(4), reserved(3)]);
        let (first, second) = (TenantId(1), TenantId(2));
        assert_eq!(tenants.admit(first, TIER, 7), Ok(()));
        assert_eq!(tenants.admit(TenantId::NOBODY, TIER, 3), Ok(()));
        hold(&mut tenants, first, 5);
        assert_eq!(tenants.admit(first, TIER, 2), Ok(()));
        let error = tenants.admit(first, TIER, 3).unwrap_err();
        let expected = TenantError::KeptForOthers {
            tenant: first,
            tier: TIER,
            requested: 3,
            unheld: 5,
            kept: 3,
        };
        assert_eq!(error, expected);
        assert_eq!(
            error.to_string(),
            "3 blocks of the Primary tier were asked for by tenant 1, 5 are not in use and 3 of them \
             are kept for others"
        );
        assert_eq!(tenants.admit(second, TIER, 5), Ok(()));
        assert!(tenants.admit(second, TIER, 6).is_err());
    }

    #[test]
    fn cached_blocks_within_the_reserve_are_evicted_by_their_owner_only() {
        let mut tenants = tenants(10, &[reserved(2), reserved(0)]);
        let (first, second) = (TenantId(1), TenantId(2));
        (0..3).for_each(|_| tenants.cache(first, TIER));
        tenants.cache(second, TIER);
        assert_eq!(tenants.may_evict(second, first, TIER), EvictionVerdict::Allowed);
        tenants.uncache(first, TIER);
        let counts = TenantCounts { held: 0, cached: 2 };
        let kept = EvictionVerdict::Kept { owner: first, counts, reserved: 2 };
        assert_eq!(tenants.may_evict(second, first, TIER), kept);
        assert_eq!(tenants.may_evict(TenantId::NOBODY, first, TIER), kept);
        assert_eq!(tenants.may_evict(first, first, TIER), EvictionVerdict::Allowed);
        assert_eq!(tenants.may_evict(first, second, TIER), EvictionVerdict::Allowed);
    }

    #[test]
    fn a_tenant_gives_up_its_own_cached_blocks_beyond_its_quota() {
        let mut tenants = tenants(10, &[TenantQuota { cached_max: 2, ..TenantQuota::NONE }]);
        let tenant = TenantId(1);
        (0..2).for_each(|_| tenants.cache(tenant, TIER));
        assert_eq!(tenants.cached_beyond(tenant, TIER), 0);
        tenants.cache(tenant, TIER);
        assert_eq!(tenants.cached_beyond(tenant, TIER), 1);
        assert_eq!(tenants.counts(tenant, TIER), Ok(TenantCounts { held: 0, cached: 3 }));
        assert_eq!(tenants.counts(tenant, Tier::Secondary), Ok(TenantCounts::default()));
    }

    #[test]
    fn quotas_that_cannot_be_kept_are_refused() {
        let mut tenants = tenants(10, &[reserved(6), reserved(4)]);
        let tenant = TenantId(2);
        assert_eq!(
            tenants.set_quota(tenant, TIER, reserved(5)),
            Err(TenantError::OverReserved { tier: TIER, reserved: 11, capacity: 10 })
        );
        let low = TenantQuota { held_max: 1, ..reserved(2) };
        assert_eq!(
            tenants.set_quota(tenant, TIER, low),
            Err(TenantError::ReservedOverHeldMax { reserved: 2, held_max: 1 })
        );
        let unknown = TenantId(3);
        assert_eq!(
            tenants.admit(unknown, TIER, 0),
            Err(TenantError::Unknown { tenant: unknown, count: 3 })
        );
        assert_eq!(tenants.quota(tenant, TIER), Ok(reserved(4)));
        tenants.grow(TIER, 11);
        assert_eq!(tenants.set_quota(tenant, TIER, reserved(5)), Ok(()));
    }

    #[test]
    fn there_are_no_more_tenants_than_numbers() {
        let mut tenants = Tenants::new([1; TIERS]);
        let last = (1..=u16::MAX).map(|_| tenants.add().unwrap()).last();
        assert_eq!(last.map(TenantId::number), Some(u16::MAX));
        assert_eq!(tenants.add(), Err(TenantError::TooMany { count: 65_536 }));
    }

    /// Plays claims, releases and evictions that the verdicts allow: what is kept can always be
    /// had, and an admitted claim always finds blocks.
    #[test]
    fn whoever_is_admitted_finds_blocks_and_the_reserve_is_always_there() {
        const CAPACITY: u64 = 12;
        let mut random = 3_u64;
        let mut below = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        for _ in 0..200 {
            let quotas = [reserved(below(5)), reserved(below(5)), reserved(0)];
            let mut tenants = tenants(CAPACITY, &quotas);
            for _ in 0..200 {
                let by = TenantId(below(4) as u16);
                let counts = tenants.counts(by, TIER).unwrap();
                match below(3) {
                    0 if counts.held > 0 => {
                        tenants.unhold(by, TIER);
                        tenants.cache(by, TIER);
                    }
                    _ if tenants.admit(by, TIER, 1) == Ok(()) => {
                        take_one(&mut tenants, by, CAPACITY)
                    }
                    _ => {}
                }
                for (number, quota) in (1..).zip(quotas) {
                    let tenant = TenantId(number);
                    let held = tenants.counts(tenant, TIER).unwrap().held;
                    let more = quota.reserved.saturating_sub(held);
                    assert_eq!(tenants.admit(tenant, TIER, more), Ok(()), "{tenants:?}");
                }
            }
        }
    }

    fn take_one(tenants: &mut Tenants, by: TenantId, capacity: u64) {
        let all = (0..4).map(TenantId);
        let counts = |tenant| tenants.counts(tenant, TIER).unwrap();
        let used: u64 = all.clone().map(|t| counts(t).held + counts(t).cached).sum();
        if used == capacity {
            let victim = all.clone().find(|&owner| {
                counts(owner).cached > 0
                    && tenants.may_evict(by, owner, TIER) == EvictionVerdict::Allowed
            });
            let victim = victim.unwrap_or_else(|| panic!("nothing to evict: {tenants:?}"));
            tenants.uncache(victim, TIER);
        }
        tenants.hold(by, TIER);
    }
}
