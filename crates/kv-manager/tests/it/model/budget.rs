//! Budgets that fall and rise at any moment, and workers that lose memory as soon as the manager says so.

use kv_pool::BudgetError as PoolError;

use super::engine::Engine;
use crate::prelude::*;

const GROUP: GroupId = GroupId(0);

impl Engine {
    /// Gives a tier another budget, mostly a larger one again after a smaller one.
    pub fn swing(&mut self) {
        let tier = [Tier::Primary, Tier::Primary, Tier::Secondary][self.random.index(3)];
        if let Some(memory) = self.size.shared.clone().filter(|_| tier == Tier::Primary) {
            return self.swing_granules(memory.granules);
        }
        let capacity = self.size.of(tier);
        let least = if tier == Tier::Primary { capacity / 3 } else { 0 };
        let blocks =
            if self.random.chance(40) { capacity } else { self.random.from(least, capacity) };
        self.budget(tier, blocks);
        let refused = self.manager.set_budget(GROUP, tier, capacity + 1).unwrap_err();
        let over = PoolError::OverCapacity { tier, requested: capacity + 1, capacity };
        assert_eq!(refused, BudgetError::Pool(over));
    }

    /// Gives the groups another number of granules together.
    fn swing_granules(&mut self, most: u32) {
        let granules = if self.random.chance(40) {
            most
        } else {
            self.random.from(u64::from(most / 3), most.into()) as u32
        };
        let offloaded = self.manager.stats().offloaded_blocks;
        let budgeted = self.manager.set_granules(granules).unwrap();
        self.saw_if(budgeted.in_use > 0, "granules that leave later");
        self.saw_if(budgeted.leaving > 0, "granules that leave");
        let moved = self.manager.stats().offloaded_blocks > offloaded;
        self.saw_if(moved, "content of granules that leaves for host memory");
        let refused = self.manager.set_granules(most + 1).unwrap_err();
        assert_eq!(refused, BudgetError::OverGranules { granules: most + 1, most });
        let divided = PoolError::Divided { tier: Tier::Primary };
        let refused = self.manager.set_budget(GROUP, Tier::Primary, 1).unwrap_err();
        assert_eq!(refused, BudgetError::Pool(divided));
    }

    /// Blocks of a group that have memory when nothing is moving.
    pub fn owned(&self, group: u16, device: usize) -> usize {
        let Some(memory) = &self.size.shared else { return device };
        let owners = self.manager.granules().iter();
        let owned = owners.filter(|&&owner| owner == Some(GroupId(group))).count();
        owned * memory.granule_blocks[usize::from(group)] as usize
    }

    /// Checks that nothing that is not complete uses a granule which a plan takes from a group.
    pub fn check_moves(&mut self, plan: &StepPlan) {
        let Some(memory) = self.size.shared.clone() else { return assert!(plan.moves.is_empty()) };
        for one in &plan.moves {
            let Some(from) = one.from else { continue };
            self.saw("a granule that was taken");
            let blocks = memory.granule_blocks[usize::from(from.0)] as usize;
            let lies_there = |id: BlockId| id.index() / blocks == one.granule as usize;
            for job in self.jobs.iter().filter(|job| job.plan.step > self.completed()) {
                let of_lines = job.lines.iter().flat_map(|line| line.blocks_of(from));
                let copies = job.plan.copies.iter().filter(|copy| copy.group == from);
                let ends = copies.flat_map(|copy| [copy.from, copy.to]);
                let ends = ends.filter(|end| end.tier == Tier::Primary).map(|end| end.id);
                let scrubs = job.plan.scrubs.iter().filter(|scrub| scrub.group == from);
                let mut all = of_lines.chain(ends).chain(scrubs.map(|scrub| scrub.block));
                assert!(!all.any(lies_there), "step {} uses {one:?}", job.plan.step);
            }
        }
        self.saw_if(plan.moves.iter().any(|one| one.to.is_some()), "a granule that was given");
        // What others have is not given to a second group.
        let owners = self.manager.granules();
        let owned = owners.iter().flatten().count();
        assert!(owned <= memory.granules as usize);
    }

    /// Sets a budget. The workers have the memory first.
    pub fn budget(&mut self, tier: Tier, blocks: u64) {
        if tier == Tier::Primary && self.size.shared.is_some() {
            return;
        }
        let at = tier.index();
        let beyond = |engine: &Self| {
            let stats = engine.manager.pool(GroupId(0)).unwrap().stats();
            [stats.primary, stats.secondary][at].beyond
        };
        let before = beyond(self);
        if blocks as usize > self.mapped[at] {
            self.mapped[at] = blocks as usize;
            self.map_all();
        }
        let offloaded = self.manager.stats().offloaded_blocks;
        let budgeted = self.manager.set_budget(GROUP, tier, blocks).unwrap();
        assert!(beyond(self) <= budgeted.in_use + budgeted.leaving);
        assert!(beyond(self) >= budgeted.in_use);
        self.saw_if(budgeted.in_use > 0, "a budget that blocks in use exceed");
        self.saw_if(budgeted.leaving > 0, "a budget that took blocks");
        self.saw_if(
            self.manager.stats().offloaded_blocks > offloaded,
            "a budget that took content to host memory",
        );
        let back = before > 0 && beyond(self) == 0;
        self.saw_if(back, "a larger budget before all had left");
    }

    /// Takes away the memory that the manager says nobody needs.
    pub fn unmap(&mut self) {
        for tier in [Tier::Primary, Tier::Secondary] {
            if tier == Tier::Primary && self.size.shared.is_some() {
                continue;
            }
            let from = self.manager.unmappable_from(GROUP, tier).unwrap() as usize;
            assert!(from <= self.mapped[tier.index()], "{from} blocks of {tier:?} are needed");
            if from < self.mapped[tier.index()] {
                self.mapped[tier.index()] = from;
                self.saw(match tier {
                    Tier::Primary => "memory of the device that was taken away",
                    _ => "memory of the host that was taken away",
                });
            }
        }
        self.map_all();
    }

    fn map_all(&mut self) {
        let mapped = self.mapped;
        self.workers.iter_mut().flatten().for_each(|worker| worker.map(mapped));
    }
}
