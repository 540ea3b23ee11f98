//! Budgets: tiers that get fewer blocks, or more, while steps are in flight.

use kv_pool::Tier;
use kv_pool::guard;
use smallvec::SmallVec;

use crate::plan::StepPlan;
use crate::{BudgetError, GroupId, Manager};

/// What came of a budget.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Budgeted {
    /// Blocks beyond the budget that nobody used. They leave with the step that is staged next, which copies
    /// their content to host memory if that is worth it and has room.
    pub leaving: u64,
    /// Blocks beyond the budget that are in use: by sequences, transfers and steps that are not complete. They
    /// leave when they are not in use any more.
    pub in_use: u64,
}

/// Of each tier of each group, the first block id behind all that a plan copies, loads or scrubs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Reach(SmallVec<[[u64; Tier::ALL.len()]; 1]>);

impl Reach {
    pub(crate) fn of(plan: &StepPlan) -> Self {
        let mut reach = Self::default();
        for copy in &plan.copies {
            reach.extend(copy.group, copy.from.tier, copy.from.id.index());
            reach.extend(copy.group, copy.to.tier, copy.to.id.index());
        }
        for load in &plan.layer_loads {
            reach.extend(load.group, Tier::Primary, load.to.index());
            reach.extend(load.group, Tier::Secondary, load.from.index());
        }
        for scrub in &plan.scrubs {
            reach.extend(scrub.group, Tier::Primary, scrub.block.index());
        }
        reach
    }

    fn extend(&mut self, group: GroupId, tier: Tier, id: usize) {
        let group = usize::from(group.0);
        if self.0.len() <= group {
            self.0.resize(group + 1, [0; Tier::ALL.len()]);
        }
        let end = &mut self.0[group][tier.index()];
        *end = (*end).max(id as u64 + 1);
    }

    fn end(&self, group: GroupId, tier: Tier) -> u64 {
        self.0.get(usize::from(group.0)).map_or(0, |ends| ends[tier.index()])
    }
}

impl Manager {
    /// Has a tier hand out only block ids below `blocks` from now on: fewer than before, or more, up to as
    /// many as [the options](crate::GroupOptions::pool) say. A tier begins with all of them. To give it more,
    /// make the memory ready first. To take memory away, set the budget, and then take what
    /// [`unmappable_from`](Self::unmappable_from) names.
    ///
    /// Nothing is moved to another block, and no sequence is disturbed: blocks in use beyond the budget
    /// leave when they are released and the steps that use them are complete. To have a sequence release
    /// its blocks, suspend or drop it. A larger budget takes them back at any time.
    ///
    /// Looks at all blocks, so it is not for every step.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    pub fn set_budget(
        &mut self,
        group: GroupId,
        tier: Tier,
        blocks: u64,
    ) -> Result<Budgeted, BudgetError> {
        let Self { groups, plan, .. } = self;
        let group = groups.get(usize::from(group.0)).ok_or(BudgetError::NoGroup { group })?;
        let mut withdrawn = group.pool.set_budget(tier, blocks)?;
        group.plan_offloads(plan, &mut withdrawn.leaving);
        Ok(Budgeted { leaving: withdrawn.leaving.len() as u64, in_use: withdrawn.in_use })
    }

    /// The first block id of a tier from which on no block is in use, can be claimed, or is read or written
    /// by a plan that some worker has not completed, nor by the next one: the tier's budget, or more. The
    /// memory from there on can be taken away, until a larger budget is set. Ask after every step.
    ///
    /// # Errors
    /// [`BudgetError::NoGroup`].
    pub fn unmappable_from(&self, group: GroupId, tier: Tier) -> Result<u64, BudgetError> {
        let groups = &self.groups;
        let group = groups.get(usize::from(group.0)).ok_or(BudgetError::NoGroup { group })?;
        let next = Reach::of(self.plan.next());
        // Of blocks that are released, copies may be planned and not staged yet.
        let in_flight = self
            .steps
            .reaches()
            .skip(guard!("manager.plans-in-flight-need-memory", 0, else usize::MAX));
        let plans = in_flight.chain([&next]);
        let plans = plans.map(|reach| reach.end(group.id, tier)).max();
        let in_use =
            guard!("manager.blocks-in-use-need-memory", group.pool.blocks_end(tier), else 0);
        Ok(in_use.max(plans.unwrap_or(0)))
    }
}
