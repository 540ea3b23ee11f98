//! Budgets that fall and rise while blocks are in use.

use std::cmp::Reverse;

use kv_pool::{BudgetError, Tier};

use super::driver::Driver;
use super::reference::{Model, ModelClaim, NEVER_USED, Now, PRIMARY};

impl Model {
    /// Blocks of a tier that are in use beyond its budget.
    pub fn beyond_in_use(&self, tier: usize) -> usize {
        self.count(tier, |block| block.now != Now::Absent && block.block_id >= self.budgets[tier])
    }

    /// Primary blocks that are in use, or may be.
    pub fn room(&self) -> u64 {
        (self.budgets[PRIMARY] + self.beyond_in_use(PRIMARY)) as u64
    }

    /// The first block id of a tier behind all that may be in use.
    pub fn end(&self, tier: usize) -> usize {
        let there = self.blocks.iter().filter(|b| b.tier == tier && b.now != Now::Absent);
        let ends = there.map(|block| block.block_id + 1);
        ends.max().unwrap_or(0).max(self.budgets[tier])
    }

    /// An unused block beyond the budget leaves, without its content.
    pub fn leave(&mut self, block: usize) {
        if self.blocks[block].content.is_some() {
            // Content that was on its way has arrived.
            self.blocks[block].now = Now::Claimed;
            self.seen_leaving += 1;
            self.unname(block);
            self.counters.dropped += 1;
        }
        self.blocks[block].now = Now::Absent;
        (self.blocks[block].duration, self.blocks[block].expiry) = (None, None);
    }

    /// The blocks that leave at once, as claims, and those of them that were evicted after what follows them.
    pub fn set_budget(&mut self, tier: usize, budget: usize) -> (Vec<ModelClaim>, usize) {
        self.budgets[tier] = budget;
        let here = |id: &usize| self.blocks[*id].tier == tier;
        let beyond: Vec<usize> = self.ids().filter(here).filter(|&id| self.is_beyond(id)).collect();
        let mut gone: Vec<usize> = self.ids().filter(here).collect();
        gone.retain(|&id| self.blocks[id].now == Now::Absent && !self.is_beyond(id));
        gone.sort_by_key(|&id| self.blocks[id].block_id);
        for id in gone {
            let late = if self.blocks[id].appeared { 0 } else { NEVER_USED };
            self.blocks[id].now = Now::Unused(late + self.tick());
        }
        let (mut leaving, mut followed) = (Vec::new(), Vec::new());
        for &id in &beyond {
            if !self.blocks[id].appeared {
                self.blocks[id].now = Now::Absent;
            }
        }
        let mut unused: Vec<usize> = beyond.into_iter().filter(|&id| self.is_unused(id)).collect();
        unused.sort_by_key(|&id| {
            let block = &self.blocks[id];
            let worth = (block.priority, block.unused_at, Reverse(block.depth));
            (block.content.map(|_| worth), block.block_id)
        });
        for id in unused {
            if !self.claim_leaving(tier, id, false, &mut leaving) {
                followed.push(id);
            }
        }
        for &id in followed.iter().rev() {
            self.claim_leaving(tier, id, true, &mut leaving);
        }
        (leaving, followed.len())
    }

    fn claim_leaving(
        &mut self,
        tier: usize,
        id: usize,
        last: bool,
        leaving: &mut Vec<ModelClaim>,
    ) -> bool {
        let claim = if self.blocks[id].content.is_none() {
            self.claimed(id, 0, false, None)
        } else if tier == PRIMARY
            && self.blocks[id].priority >= self.least
            && let Some(target) = self.make_room()
        {
            self.displace(id, target, 0)
        } else if self.children(id) > 0 && !last {
            return false;
        } else {
            self.counters.dropped += 1;
            self.count_evicted(id);
            self.unname(id);
            self.claimed(id, 0, true, None)
        };
        leaving.push(claim);
        true
    }
}

impl Driver {
    pub fn set_budget(&mut self) {
        let at = self.random.one_of(&[0, 0, 0, 0, 1, 1, 2]);
        let (tier, capacity) = (Tier::ALL[at], self.capacities[at]);
        let budget = match self.random.below(3) {
            0 => capacity,
            _ => self.random.below(capacity + 2),
        };
        let reserved: u64 = self.model.tenants.iter().map(|quota| quota.reserved).sum();
        let set = self.pool.set_budget(tier, budget);
        if budget > capacity {
            assert!(matches!(set, Err(BudgetError::OverCapacity { .. })), "{set:?}");
            return self.seen.saw("a budget was refused", 1);
        }
        if at == PRIMARY && budget < reserved {
            assert!(matches!(set, Err(BudgetError::BelowReserved { .. })), "{set:?}");
            return self.seen.saw("a budget was refused", 1);
        }
        let there = self.model.count(at, |block| block.now != Now::Absent && block.appeared);
        let (claims, followed) = self.model.set_budget(at, budget as usize);
        let back = self.model.count(at, |block| block.now != Now::Absent && block.appeared);
        let withdrawn = set.unwrap();
        let seen: Vec<_> = withdrawn.leaving.records().map(|record| record.index()).collect();
        assert_eq!(seen, claims.iter().map(|claim| claim.block).collect::<Vec<_>>());
        for (index, claim) in claims.iter().enumerate() {
            assert_eq!(withdrawn.leaving.evicted(index), claim.evicted);
        }
        let in_use = self.model.beyond_in_use(at) - claims.len();
        assert_eq!(withdrawn.in_use, in_use as u64);
        let moved = claims.iter().filter(|claim| claim.moving.is_some()).count();
        self.seen.saw("left beyond a budget", claims.len() as u64);
        self.seen.saw("left beyond a budget with its content moved down", moved as u64);
        self.seen.saw("left beyond a budget after what follows it", followed as u64);
        self.seen.saw("in use beyond a budget", in_use as u64);
        self.seen.saw("brought back by a budget", back.saturating_sub(there) as u64);
        self.held_lists.push((withdrawn.leaving, claims));
    }
}
