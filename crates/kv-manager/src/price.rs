//! What a sequence takes of all groups: priced before anything is pinned, claimed or moved, and paid as it was priced.
//!
//! A refusal changes nothing then. A pin that is given back cannot be claimed until the step is complete, though nobody
//! has used it: who asked in every step, in vain, would keep the running sequences from blocks that are theirs.

use kv_pool::tenants::{TenantError, TenantId};
use kv_pool::{BlockHash, ClaimError, Claimed, Tier, guard};
use smallvec::SmallVec;

use crate::group::{Group, Groups};
use crate::growing::Memory;
use crate::hit::{Extent, Extents};
use crate::shared::{Moves, Wanted, Wants};
use crate::{Manager, Missing};

/// Blocks to be claimed of each group.
pub(crate) type Counts = SmallVec<[usize; 4]>;

/// What can be paid.
pub(crate) struct Price {
    pub(crate) counts: Counts,
    /// Granules of shared memory that move before, for this and for what was due.
    pub(crate) moves: Moves,
}

/// What is wanted of each group beside what is due, within the tenant's own bound.
pub(crate) struct WithinBound {
    /// Blocks that the tenant itself claims.
    pub(crate) counts: Counts,
    pub(crate) wanted: Wants,
    tenants: SmallVec<[TenantId; 4]>,
    /// Whether others leave it to them.
    quotas: Result<(), Missing>,
}

/// Claims that are decided and not made yet, whose pins are there. Others are priced beside them.
pub(crate) struct Due {
    counts: Counts,
    /// Those for whom they are.
    tenants: SmallVec<[TenantId; 4]>,
    /// Whether blocks are left for running sequences.
    pub(crate) leaves: bool,
}

impl Due {
    /// Adds what was priced beside it.
    pub(crate) fn add(&mut self, tenant: TenantId, counts: &[usize]) {
        self.counts.iter_mut().zip(counts).for_each(|(all, own)| *all += own);
        if !self.tenants.contains(&tenant) {
            self.tenants.push(tenant);
        }
    }

    /// Blocks of a group that are to be claimed.
    pub(crate) fn of(&self, group: usize) -> usize {
        self.counts[group]
    }

    /// Whether a refusal beside it is one behind it, too. Of several tenants, each is priced as if all were its own: so
    /// whatever is claimed first, the others can be.
    pub(crate) fn is_exact_for(&self, tenant: TenantId) -> bool {
        self.tenants.iter().all(|&one| one == tenant)
    }
}

impl Manager {
    /// Checks that there is what a tenant wants of each group, and that nothing of it is kept for others.
    pub(crate) fn price(
        &self,
        (tenant, names): (TenantId, &[BlockHash]),
        extents: &[Extent],
        counts: Counts,
        due: &Due,
    ) -> Result<Price, Missing> {
        let bounded = self.groups.within_bound((tenant, names), extents, counts, due)?;
        let WithinBound { counts, wanted, tenants, quotas } = bounded;
        if self.shared.is_some() {
            let moves = self.moves_for((&tenants, names), extents, &wanted)?;
            return Ok(Price { counts, moves });
        }
        for ((group, extent), wanted) in self.groups.iter().zip(extents).zip(&wanted) {
            let room = group.pool.claimable().saturating_sub(wanted.leave);
            let unused = guard!("manager.pins-take-room", extent.unused, else 0);
            let needed = unused.saturating_add(wanted.count);
            if needed > room {
                return Err(group.exhausted(needed, room));
            }
        }
        quotas?;
        Ok(Price { counts, moves: Moves::default() })
    }

    /// The same, with more memory where its owner has some.
    pub(crate) fn price_in(
        &mut self,
        memory: &mut Memory<'_>,
        of: (TenantId, &[BlockHash]),
        extents: &[Extent],
        counts: Counts,
        due: &Due,
    ) -> Result<Price, Missing> {
        if memory.is_there() {
            return self.price(of, extents, counts, due);
        }
        let bounded = self.groups.within_bound(of, extents, counts.clone(), due)?;
        self.grow_for(memory, extents, &bounded.wanted)?;
        match self.price(of, extents, counts.clone(), due) {
            Err(missing) if self.grow_beside_kept(memory, &missing)? => {
                self.price(of, extents, counts, due)
            }
            priced => priced,
        }
    }

    /// Whether there is room for a sequence that computes so many tokens anew.
    pub(crate) fn has_room_for(
        &mut self,
        memory: &mut Memory<'_>,
        tenant: TenantId,
        tokens: u64,
        due: &Due,
    ) -> bool {
        let counts = self.groups.iter().map(|group| group.peak(tokens, 1)).collect();
        let nothing = self.groups.nothing_found();
        self.price_in(memory, (tenant, &[]), &nothing, counts, due).is_ok()
    }

    /// Claims so much of each group, or nothing, for a sequence that has its row, and plans what comes before the first write.
    pub(crate) fn claim(
        &mut self,
        memory: &mut Memory<'_>,
        tenant: TenantId,
        counts: Counts,
    ) -> Result<SmallVec<[Claimed; 4]>, Missing> {
        let is_one = self.shared.is_none() && counts.iter().filter(|&&count| count > 0).count() < 2;
        let mut all =
            if memory.is_there() && guard!("manager.claims-all-or-none", is_one, else true) {
                // The pool says whether it is there, and takes it.
                self.groups.take_each(tenant, &counts)?
            } else {
                let (nothing, due) = (self.groups.nothing_found(), self.groups.nothing_due(false));
                let price = self.price_in(memory, (tenant, &[]), &nothing, counts, &due)?;
                self.pay(tenant, &price)?
            };
        for (index, claimed) in all.iter_mut().enumerate() {
            if !claimed.is_empty() {
                self.groups[index].plan_claimed(&mut self.plan, tenant, claimed);
            }
        }
        Ok(all)
    }

    /// Moves granules and claims what was priced. Nothing is missing unless others have pinned content meanwhile.
    pub(crate) fn pay(
        &mut self,
        tenant: TenantId,
        price: &Price,
    ) -> Result<SmallVec<[Claimed; 4]>, Missing> {
        self.move_granules(&price.moves);
        self.groups.take_each(tenant, &price.counts)
    }
}

impl Groups {
    pub(crate) fn nothing_due(&self, leaves: bool) -> Due {
        let counts = self.iter().map(|_| 0).collect();
        Due { counts, tenants: SmallVec::new(), leaves }
    }

    /// What a tenant wants to claim of each group once what `extents` say is pinned, beside what is due and what is left for
    /// running sequences, if its own bound allows that.
    ///
    /// What is the tenant's own affair stops nobody else. So this comes first, and whoever asks for memory, moves granules
    /// or prices has passed here.
    pub(crate) fn within_bound(
        &self,
        (tenant, names): (TenantId, &[BlockHash]),
        extents: &[Extent],
        counts: Counts,
        due: &Due,
    ) -> Result<WithinBound, Missing> {
        let wanted = |(index, group): (usize, &Group)| {
            let earlier = guard!("manager.priced-beside-what-is-due", due.counts[index], else 0);
            let count = earlier.saturating_add(counts[index]);
            // What takes nothing leaves what there is.
            let takes = count > 0 || extents[index].unused > 0;
            Wanted { count, leave: if takes && due.leaves { group.watermark() } else { 0 } }
        };
        let wanted: Wants = self.iter().enumerate().map(wanted).collect();
        let mut tenants = due.tenants.clone();
        if !tenants.contains(&tenant) {
            tenants.push(tenant);
        }
        let quotas = guard!(
            "manager.priced-by-quotas",
            self.check_quotas((&tenants, names), extents, &wanted, |_| 0),
            else Ok(())
        );
        match quotas {
            Err(missing) if missing.is_bound() => Err(missing),
            quotas => Ok(WithinBound { counts, wanted, tenants, quotas }),
        }
    }

    /// Nothing is found in any group.
    pub(crate) fn nothing_found(&self) -> Extents {
        self.iter().map(|_| Extent::default()).collect()
    }

    /// Blocks to be claimed of each group for a prompt whose first chunk ends behind `end` tokens.
    pub(crate) fn to_claim(&self, extents: &[Extent], prompt: u64, end: u64) -> Counts {
        let each = self.iter().zip(extents);
        each.map(|(group, extent)| group.to_claim(extent, prompt, end)).collect()
    }

    /// Checks that the quotas let each of these tenants claim so much of each group when what `extents` say is pinned, and
    /// the groups have so many blocks more than now, or fewer. A bound of any group is said before what others keep.
    pub(crate) fn check_quotas(
        &self,
        (tenants, names): (&[TenantId], &[BlockHash]),
        extents: &[Extent],
        wanted: &[Wanted],
        resized: impl Fn(usize) -> i64,
    ) -> Result<(), Missing> {
        let mut first = Ok(());
        for (index, group) in self.iter().enumerate() {
            let (count, resized) = (wanted[index].count, resized(index));
            if count == 0 && resized >= 0 {
                continue;
            }
            let pins = extents.get(index).map(|extent| group.pinned_names(names, extent));
            let pins: SmallVec<[&[BlockHash]; 2]> =
                pins.iter().flatten().map(AsRef::as_ref).collect();
            for &tenant in tenants {
                let checked = group.pool.check_quota(group.tenant(tenant), &pins, count, resized);
                let missing =
                    |reason: TenantError| Missing { group: group.id, reason: reason.into() };
                let Err(missing) = checked.map_err(missing) else { continue };
                if guard!("manager.bounds-are-said-first", missing.is_bound(), else false) {
                    return Err(missing);
                }
                first = first.and(Err(missing));
            }
        }
        first
    }

    /// Claims so much of each group.
    pub(crate) fn take_each(
        &self,
        tenant: TenantId,
        counts: &[usize],
    ) -> Result<SmallVec<[Claimed; 4]>, Missing> {
        let take = |(group, &count): (&Group, &usize)| match count {
            0 => Ok(Claimed::default()),
            count => group.take(tenant, count),
        };
        self.iter().zip(counts).map(take).collect()
    }

    /// Whether a tenant may not hold a block more of each group.
    pub(crate) fn is_at_bound(&self, tenant: TenantId) -> bool {
        self.iter().any(|group| {
            let room = group.pool.tenant_room(group.tenant(tenant), Tier::Primary);
            room.is_ok_and(|room| room.own == 0)
        })
    }
}

impl Missing {
    /// Whether it is what the tenant itself may hold.
    pub(crate) fn is_bound(&self) -> bool {
        matches!(self.reason, ClaimError::Tenant(TenantError::HeldMax { .. }))
    }

    /// Whether nothing that comes back by itself would change it.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self.reason,
            ClaimError::Exhausted { retiring: 0, .. }
                | ClaimError::Tenant(
                    TenantError::HeldMax { .. } | TenantError::KeptForOthers { .. }
                )
        )
    }
}

impl Group {
    /// Blocks to be claimed behind what was found, for a prompt whose first chunk ends behind `end` tokens.
    fn to_claim(&self, found: &Extent, prompt: u64, end: u64) -> usize {
        if self.is_state() {
            return 1;
        }
        let end = if self.is_window() { end } else { prompt };
        found.far + self.blocks_for(end).saturating_sub(found.end + found.gone)
    }
}
