//! Device memory that all groups share: whose each granule is, and how one goes from group to group.
//!
//! A group gets a free granule before anything cached is evicted for it. It takes one from another group only
//! when its claim would be refused otherwise: one that no sequence, transfer or step uses, the coldest first.
//! So a granule never leaves a group that could keep it, and none goes to and fro while there is room.

use std::collections::HashSet;

use kv_pool::tenants::{TenantError, TenantId};
use kv_pool::{BlockHash, BlockId, ClaimError, GranuleUse, Priority, Tier, guard};
use smallvec::SmallVec;

use crate::group::{Group, Writer};
use crate::hit::Extent;
use crate::plan::{PlanDraft, StepPlan};
use crate::{
    BudgetError, Budgeted, GranuleMove, GroupId, Manager, Missing, OptionsError, SharedMemory,
};

/// Whose each granule is.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Blocks of a granule in each group.
    blocks: Vec<u32>,
    owners: Vec<Option<GroupId>>,
    /// Granules that the groups may have, all together.
    budget: usize,
    /// Granules that they have.
    owned: usize,
    /// Granules that nobody has, the next one last.
    free: Vec<u32>,
    /// Of each granule, the last step whose plan copies from or to it.
    touched: Vec<u64>,
    /// Granules that were taken from a pool, and whose blocks may still be in use.
    leaving: Vec<u32>,
}

/// What is to be claimed of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) count: usize,
    /// Blocks that are to be left.
    pub(crate) leave: usize,
}

/// The same of all groups.
pub(crate) type Wants = SmallVec<[Wanted; 4]>;

/// What a group has, and could give.
#[derive(Debug)]
struct Has {
    /// Blocks of a granule.
    blocks: usize,
    empty: usize,
    claimable: usize,
    /// Granules that nothing uses, the coldest first.
    idle: Vec<Idle>,
}

/// A granule that nothing uses, in the order in which they go.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Idle {
    priority: Option<Priority>,
    used: std::cmp::Reverse<u32>,
    granule: u32,
}

/// What all groups have.
#[derive(Debug)]
struct Supply {
    free: usize,
    groups: SmallVec<[Has; 4]>,
}

/// How many granules a group gets at least, and gives at most, so that the quotas can be kept.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    gets: usize,
    gives: usize,
}

/// Granules that each group gets, and those that it gives.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    gets: Vec<usize>,
    gives: Vec<Vec<u32>>,
}

impl Shared {
    pub(crate) fn new(options: &SharedMemory) -> Result<Self, OptionsError> {
        let granules = options.granules as usize;
        let mut free = crate::options::repeated(0, granules)?;
        free.iter_mut().zip((0..options.granules).rev()).for_each(|(one, granule)| *one = granule);
        Ok(Self {
            blocks: options.granule_blocks.clone(),
            owners: crate::options::repeated(None, granules)?,
            budget: granules,
            owned: 0,
            free,
            touched: crate::options::repeated(0, granules)?,
            leaving: Vec::new(),
        })
    }

    /// Granules that can be handed out.
    fn free(&self) -> usize {
        let budget =
            guard!("manager.granules-keep-the-budget", self.budget, else self.owners.len());
        budget.saturating_sub(self.owned)
    }

    /// The granules that a plan copies from or to, or scrubs, of any group.
    fn touched_by(&self, plan: &StepPlan) -> impl Iterator<Item = usize> {
        let copies =
            plan.copies.iter().flat_map(|copy| [copy.from, copy.to].map(|at| (copy.group, at)));
        let scrubs = plan.scrubs.iter().map(|scrub| (scrub.group, scrub.block));
        let near = copies.filter(|(_, at)| at.tier == Tier::Primary);
        let loads = plan.layer_loads.iter().map(|load| (load.group, load.to));
        let ids = near.map(|(group, at)| (group, at.id)).chain(scrubs).chain(loads);
        ids.map(|(group, id)| id.index() / self.blocks[usize::from(group.0)] as usize)
    }

    /// Notes what a plan copies, which has been staged.
    pub(crate) fn staged(&mut self, plan: &StepPlan) {
        let touched: SmallVec<[usize; 16]> = self.touched_by(plan).collect();
        touched.into_iter().for_each(|granule| self.touched[granule] = plan.step);
    }

    /// Gives a granule another owner.
    fn hand(&mut self, plan: &mut PlanDraft, granule: u32, to: Option<GroupId>, taken: bool) {
        let from = std::mem::replace(&mut self.owners[granule as usize], to);
        self.owned += usize::from(to.is_some());
        self.owned -= usize::from(from.is_some());
        plan.hand(GranuleMove { granule, from, to }, taken);
        if to.is_none() {
            self.free.push(granule);
        }
    }
}

impl Has {
    /// Takes off what a pin would take.
    fn pin(&mut self, extent: &Extent) {
        self.claimable = self.claimable.saturating_sub(extent.unused);
        let granule = |id: &BlockId| (id.index() / self.blocks) as u32;
        let pinned: HashSet<u32> = extent.near.iter().map(granule).collect();
        let is_idle = |idle: &Idle| !pinned.contains(&idle.granule);
        guard!("manager.pinned-granules-are-not-idle", self.idle.retain(is_idle));
    }
}

impl Supply {
    /// Which granules have to move so that so much can be claimed of each group; the group that lacks room, and
    /// the blocks that can be had there, if that is impossible.
    fn plan(&self, wanted: &[Wanted], bounds: &[Bounds]) -> Result<Moves, (usize, usize)> {
        let granules = |blocks: usize, has: &Has| blocks.div_ceil(has.blocks);
        let each = || self.groups.iter().zip(wanted).zip(bounds);
        let must = |((has, wanted), bounds): ((&Has, &Wanted), &Bounds)| {
            let blocks = wanted.count.saturating_add(wanted.leave).saturating_sub(has.claimable);
            granules(blocks, has).max(bounds.gets)
        };
        let mut gets: SmallVec<[usize; 4]> = each().map(must).collect();
        let needed = gets.iter().fold(0_usize, |all, &more| all.saturating_add(more));
        let mut gives: SmallVec<[usize; 4]> = gets.iter().map(|_| 0).collect();
        if needed <= self.free {
            // Free memory comes before what is cached.
            let mut left = self.free - needed;
            for (((has, wanted), _), gets) in each().zip(&mut gets) {
                let more = granules(wanted.count.saturating_sub(has.empty), has);
                let more = more.saturating_sub(*gets).min(left);
                *gets += more;
                left -= more;
            }
            return Ok(self.moves(gets, &gives));
        }
        let mut more = needed - self.free;
        let spare = |((has, wanted), bounds): ((&Has, &Wanted), &Bounds)| {
            let keeps = wanted.count.saturating_add(wanted.leave);
            let spare = has.idle.len().min(has.claimable.saturating_sub(keeps) / has.blocks);
            spare.min(bounds.gives)
        };
        let spare: SmallVec<[usize; 4]> = each().map(spare).collect();
        if spare.iter().sum::<usize>() < more {
            let mut left = self.free + spare.iter().sum::<usize>();
            for (index, (has, wanted)) in self.groups.iter().zip(wanted).enumerate() {
                if gets[index] > left {
                    let room = has.claimable + left * has.blocks;
                    return Err((index, room.saturating_sub(wanted.leave)));
                }
                left -= gets[index];
            }
        }
        // The coldest of all that can be spared go first.
        while more > 0 {
            let next = |(index, has): (usize, &Has)| {
                let idle = has.idle.get(gives[index]).filter(|_| gives[index] < spare[index])?;
                Some((*idle, index))
            };
            let Some((_, index)) = self.groups.iter().enumerate().filter_map(next).min() else {
                break;
            };
            gives[index] += 1;
            more -= 1;
        }
        Ok(self.moves(gets, &gives))
    }

    fn moves(&self, gets: SmallVec<[usize; 4]>, gives: &[usize]) -> Moves {
        let granules = |(has, &count): (&Has, &usize)| {
            has.idle.iter().take(count).map(|idle| idle.granule).collect()
        };
        Moves {
            gets: gets.into_vec(),
            gives: self.groups.iter().zip(gives).map(granules).collect(),
        }
    }
}

impl Manager {
    /// Whose each granule of [shared memory](crate::ManagerOptions::shared) is; empty where groups have memory of
    /// their own.
    #[must_use]
    pub fn granules(&self) -> &[Option<GroupId>] {
        self.shared.as_ref().map_or(&[], |shared| &shared.owners)
    }

    /// Has the groups share only so many granules from now on: fewer than before, or more, up to as many as the
    /// options say. To give them more, make the memory ready first; a granule's memory can be taken away as soon as
    /// a plan says that it is nobody's.
    ///
    /// Granules that nobody has go first, then those that are not in use, the coldest first; their content is copied
    /// to host memory by the next plan, if that is worth it and has room. Those in use follow when their
    /// blocks are released and the steps that use them are complete. A larger budget keeps what has not left.
    ///
    /// Looks at all blocks, so it is not for every step.
    ///
    /// # Errors
    /// [`BudgetError`]: the groups have memory of their own, or the options say fewer granules. Nothing has changed
    /// then.
    pub fn set_granules(&mut self, granules: u32) -> Result<Budgeted, BudgetError> {
        let Some(shared) = &mut self.shared else { return Err(BudgetError::NotShared) };
        let most = shared.owners.len();
        if granules as usize > most {
            return Err(BudgetError::OverGranules { granules, most: most as u32 });
        }
        shared.budget = granules as usize;
        self.keep_leaving();
        let mut budgeted = Budgeted::default();
        let mut candidates = self.to_leave();
        while let Some(shared) = &self.shared
            && shared.owned - shared.leaving.len() > shared.budget
            && let Some((group, granule)) = candidates.pop()
        {
            let one = self.withdraw(group, granule);
            budgeted.leaving += one.leaving;
            budgeted.in_use += one.in_use;
        }
        self.free_left();
        Ok(budgeted)
    }

    /// All granules that groups have, in the order in which they are to leave, the first one last.
    fn to_leave(&self) -> Vec<(usize, u32)> {
        let Some(shared) = &self.shared else { return Vec::new() };
        let mut all = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            for (uses, granule) in group.pool.granules(Tier::Primary).into_iter().zip(0_u32..) {
                if uses.granted && !shared.leaving.contains(&granule) {
                    all.push(((uses.in_use, idle(granule, &uses)), index, granule));
                }
            }
        }
        all.sort_unstable_by(|one, other| other.cmp(one));
        all.into_iter().map(|(_, group, granule)| (group, granule)).collect()
    }

    /// Takes a granule from a group's pool. Its blocks leave when nobody uses them any more.
    fn withdraw(&mut self, group: usize, granule: u32) -> Budgeted {
        let Self { groups, plan, shared: Some(shared), .. } = self else {
            return Budgeted::default();
        };
        let group = &groups[group];
        match group.pool.withdraw(Tier::Primary, granule.into()) {
            Ok(mut withdrawn) => {
                group.plan_offloads(plan, &mut withdrawn.leaving);
                shared.leaving.push(granule);
                Budgeted { leaving: withdrawn.leaving.len() as u64, in_use: withdrawn.in_use }
            }
            // It holds what is kept for a tenant.
            Err(_) => Budgeted::default(),
        }
    }

    /// Leaves granules to their groups that were to leave, as many as the budget has room for.
    fn keep_leaving(&mut self) {
        let Self { groups, shared: Some(shared), .. } = self else { return };
        while shared.owned - shared.leaving.len() < shared.budget
            && let Some(granule) = shared.leaving.pop()
            && let Some(group) = shared.owners[granule as usize]
        {
            let kept = groups[usize::from(group.0)].pool.grant(Tier::Primary, granule.into());
            debug_assert!(kept.is_ok(), "{kept:?}");
        }
    }

    /// Frees the granules that have left their groups: nobody uses a block there, and all copies from there are
    /// complete.
    pub(crate) fn free_left(&mut self) {
        let Some(shared) = self.shared.as_ref().filter(|shared| !shared.leaving.is_empty()) else {
            return;
        };
        let busy = self.busy_granules(shared);
        let has_left = |&granule: &u32| {
            let owner = shared.owners[granule as usize]?;
            let pool = &self.groups[usize::from(owner.0)].pool;
            let uses = pool.granule(Tier::Primary, granule.into()).ok()?;
            let is_unused = guard!("manager.granules-wait-for-blocks", uses.in_use == 0, else true);
            (is_unused && !busy(granule as usize)).then_some(granule)
        };
        let left: SmallVec<[u32; 8]> = shared.leaving.iter().filter_map(has_left).collect();
        drop(busy);
        let Self { shared: Some(shared), plan, .. } = self else { return };
        shared.leaving.retain(|granule| !left.contains(granule));
        left.into_iter().for_each(|granule| shared.hand(plan, granule, None, false));
    }

    /// Whether a plan that is not complete, or the next one, copies from or to a granule.
    fn busy_granules<'a>(&'a self, shared: &'a Shared) -> impl Fn(usize) -> bool + 'a {
        let mut next: SmallVec<[usize; 16]> = shared.touched_by(self.plan.next()).collect();
        next.sort_unstable();
        move |granule| {
            let copies = shared.touched[granule] > self.steps.completed();
            guard!("manager.granules-wait-for-copies", copies, else false)
                || next.binary_search(&granule).is_ok()
        }
    }

    /// What all groups have; with `idle`, also what they could give.
    fn supply(&self, shared: &Shared, with_idle: bool) -> Supply {
        let has = |(group, &blocks): (&Group, &u32)| Has {
            blocks: blocks as usize,
            empty: group.pool.empty(),
            claimable: group.pool.claimable(),
            idle: if with_idle { self.idle_of(shared, group) } else { Vec::new() },
        };
        let groups = self.groups.iter().zip(&shared.blocks).map(has).collect();
        Supply { free: shared.free(), groups }
    }

    fn idle_of(&self, shared: &Shared, group: &Group) -> Vec<Idle> {
        let busy = self.busy_granules(shared);
        let uses = group.pool.granules(Tier::Primary).into_iter().zip(0_u32..);
        let unused = uses
            .filter(|(uses, granule)| uses.granted && uses.in_use == 0 && !busy(*granule as usize));
        let mut all: Vec<_> = unused.map(|(uses, granule)| idle(granule, &uses)).collect();
        all.sort_unstable();
        all
    }

    /// The moves after which each of these tenants can claim so much of each group once what `extents` say is pinned. A
    /// granule that is moved has lost its content, so the quotas are looked at before: what is kept for others takes
    /// further granules, and none that a group must keep for them leaves it.
    pub(crate) fn moves_for(
        &self,
        of: (&[TenantId], &[BlockHash]),
        extents: &[Extent],
        wanted: &[Wanted],
    ) -> Result<Moves, Missing> {
        let Some(shared) = &self.shared else { return Ok(Moves::default()) };
        let supply = |with_idle| {
            let mut supply = self.supply(shared, with_idle);
            supply.groups.iter_mut().zip(extents).for_each(|(has, extent)| has.pin(extent));
            supply
        };
        let (mut now, mut with_idle) = (supply(false), false);
        let all = Bounds { gets: 0, gives: usize::MAX };
        let mut bounds: SmallVec<[Bounds; 4]> = wanted.iter().map(|_| all).collect();
        let mut forbidden = None;
        loop {
            let moves = match now.plan(wanted, &bounds) {
                Ok(moves) => moves,
                Err(_) if !with_idle => {
                    (now, with_idle) = (supply(true), true);
                    continue;
                }
                Err((group, room)) => {
                    let exhausted = || self.groups[group].exhausted(wanted[group].count, room);
                    return Err(forbidden.unwrap_or_else(exhausted));
                }
            };
            let resized = |index: usize| {
                let (gets, gives) = (moves.gets[index], moves.gives[index].len());
                (gets as i64 - gives as i64) * now.groups[index].blocks as i64
            };
            let of = (guard!("manager.quotas-before-granules", of.0, else &[]), of.1);
            let Err(missing) = self.groups.check_quotas(of, extents, wanted, resized) else {
                return Ok(moves);
            };
            let short = match &missing.reason {
                ClaimError::Tenant(TenantError::KeptForOthers {
                    requested, unheld, kept, ..
                }) => requested.saturating_add(*kept).saturating_sub(*unheld),
                ClaimError::Tenant(TenantError::OverReserved { reserved, capacity, .. }) => {
                    reserved.saturating_sub(*capacity)
                }
                _ => return Err(missing),
            };
            // Each time, a group gets more or gives less, so there is an end.
            let index = usize::from(missing.group.0);
            let granules = usize::try_from(short).unwrap_or(usize::MAX);
            let granules = granules.div_ceil(now.groups[index].blocks).max(1);
            let (gets, gives) = (moves.gets[index], moves.gives[index].len());
            if gives > 0 {
                bounds[index].gives = gives.saturating_sub(granules);
            } else {
                bounds[index] = Bounds { gets: gets.saturating_add(granules), gives: 0 };
                forbidden.get_or_insert(missing);
            }
        }
    }

    /// Moves granules as it was planned.
    pub(crate) fn move_granules(&mut self, moves: &Moves) {
        let Self { groups, plan, shared: Some(shared), .. } = self else { return };
        // While a smaller budget takes its effect, none is free, and one that is given can be got all the same.
        let mut left = shared.free();
        for (group, gives) in groups.iter().zip(&moves.gives).filter(|(_, gives)| !gives.is_empty())
        {
            let granules: Vec<u64> = gives.iter().copied().map(u64::from).collect();
            if group.pool.vacate(Tier::Primary, &granules).is_err() {
                // Others have pinned content there meanwhile. Whoever lacks it is told when it claims.
                continue;
            }
            left += gives.len();
            for &granule in gives {
                shared.hand(plan, granule, None, true);
            }
        }
        for (group, &gets) in groups.iter_mut().zip(&moves.gets) {
            let gets = gets.min(left);
            left -= gets;
            for _ in 0..gets {
                let Some(granule) = shared.free.pop() else { break };
                let granted = group.pool.grant(Tier::Primary, granule.into());
                debug_assert!(granted.is_ok(), "{granted:?}");
                shared.hand(plan, granule, Some(group.id), false);
                // A granule that gets another owner is zeroed.
                let blocks = shared.blocks[usize::from(group.id.0)] as usize;
                let first = granule as usize * blocks;
                group.note_writer(first..first + blocks, Writer::Nobody);
            }
        }
    }

    /// Granules that a sequence of `tokens` tokens needs at least, beside what is kept for tenants, and those that
    /// there are, if they do not suffice.
    pub(crate) fn never_fits(&self, tenant: TenantId, tokens: u64) -> Option<(u64, u64)> {
        let shared = self.shared.as_ref()?;
        let needed =
            |(group, &blocks): (&Group, &u32)| group.least(tenant, tokens).div_ceil(blocks.into());
        let needed: u64 = self.groups.iter().zip(&shared.blocks).map(needed).sum();
        let granules = shared.owners.len() as u64;
        (needed > granules).then_some((needed, granules))
    }

    /// Whose each granule is by the last plan.
    pub(crate) fn staged_owners(&self) -> Vec<Option<GroupId>> {
        let mut owners = self.granules().to_vec();
        for &GranuleMove { granule, from, .. } in self.plan.next().moves.iter().rev() {
            guard!("manager.snapshots-are-of-the-last-plan", owners[granule as usize] = from);
        }
        owners
    }
}

fn idle(granule: u32, uses: &GranuleUse) -> Idle {
    Idle { priority: uses.priority, used: std::cmp::Reverse(uses.unused_ms), granule }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_granule_with_what_is_to_be_pinned_is_given_to_nobody() {
        let idle = |granule| Idle { priority: None, used: std::cmp::Reverse(0), granule };
        let idle = [2, 0, 1].map(idle).to_vec();
        let mut has = Has { blocks: 4, empty: 0, claimable: 12, idle };
        let near = [4, 5].map(BlockId::from).to_vec();
        has.pin(&Extent { unused: 2, near, ..Extent::default() });
        let left: Vec<_> = has.idle.iter().map(|idle| idle.granule).collect();
        assert_eq!((has.claimable, left), (10, vec![2, 0]));
    }
}
