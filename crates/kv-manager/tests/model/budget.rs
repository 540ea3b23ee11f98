//! Budgets that fall and rise at any moment, and workers that lose memory as soon as the manager says so.

use kv_manager::{BudgetError, GroupId};
use kv_pool::{BudgetError as PoolError, Tier};

use crate::engine::Engine;

const GROUP: GroupId = GroupId(0);

impl Engine {
    /// Gives a tier another budget, mostly a larger one again after a smaller one.
    pub fn swing(&mut self) {
        let tier = [Tier::Primary, Tier::Primary, Tier::Secondary][self.random.index(3)];
        let capacity = self.size.of(tier);
        let least = if tier == Tier::Primary { capacity / 3 } else { 0 };
        let blocks = match self.random.chance(40) {
            true => capacity,
            false => self.random.from(least, capacity),
        };
        self.budget(tier, blocks);
        let refused = self.manager.set_budget(GROUP, tier, capacity + 1).unwrap_err();
        let over = PoolError::OverCapacity { tier, requested: capacity + 1, capacity };
        assert_eq!(refused, BudgetError::Pool(over));
    }

    /// Sets a budget. The workers have the memory first.
    pub fn budget(&mut self, tier: Tier, blocks: u64) {
        let at = tier.index();
        let beyond = |engine: &Self| {
            let stats = engine.manager.pool().stats();
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
