//! What happens to the pool as a whole: removal, epochs, time, tenants, loans.

use std::rc::Rc;
use std::time::Duration;

use kv_pool::{
    Pinned, Tier,
    policy::ReuseHint,
    tenants::{TenantError, TenantQuota},
};

use super::blocks::{names, retention};
use super::driver::Driver;
use super::reference::{Now, name};

impl Driver {
    pub fn remove(&mut self) {
        let hurries = self.random.below(2) == 0;
        let on_its_way = if hurries { self.on_its_way() } else { None };
        let content = on_its_way.unwrap_or_else(|| self.random.content());
        match self.random.below(8) {
            0..4 => {
                let bearer = self.model.bearer(content);
                let on_its_way =
                    |id: usize| matches!(self.model.blocks[id].now, Now::Moving { .. });
                let on_its_way = bearer.is_some_and(on_its_way);
                let removed = self.pool.remove_with_successors(name(content));
                assert_eq!(removed, self.model.remove_with_successors(content));
                self.seen.saw("removed with successors", u64::from(removed > 1));
                let both = on_its_way && removed > 1;
                self.seen.saw("removed on its way with successors", both.into());
            }
            _ => {
                let on_its_way =
                    |now| matches!(now, Now::Moving { content: Some(c), .. } if c == content);
                let on_its_way = self.model.blocks.iter().any(|block| on_its_way(block.now));
                self.seen.saw("removed on its way", on_its_way.into());
                assert_eq!(self.pool.remove(name(content)), self.model.remove(content));
            }
        }
    }

    pub fn begin_epoch(&mut self) {
        let epoch = self.pool.begin_epoch();
        self.model.begun += 1;
        assert_eq!(epoch.number(), self.model.begun);
        self.epochs.push(epoch);
    }

    /// In any order: an epoch may be completed after a later one.
    pub fn complete_epoch(&mut self) {
        let Some(epoch) = self.random.pick(&mut self.epochs) else { return };
        self.pool.complete_epoch(epoch).unwrap();
        self.model.complete(epoch.number());
    }

    pub fn retain(&mut self) {
        let Some((pins, blocks, owner)) = self.random.pick(&mut self.pin_lists) else { return };
        if self.random.below(3) == 0 {
            let ended = Pinned::hint([&pins], 0..usize::MAX, ReuseHint::Over);
            assert_eq!(ended, self.model.hint_over(&blocks, Rc::strong_count(&owner) == 1));
            self.seen.saw("over", ended as u64);
            self.pin_lists.push((pins, blocks, owner));
            return;
        }
        let (priority, duration) = (self.random.priority(), self.random.duration());
        self.pool.retain(&pins, retention(priority, duration));
        self.model.retain(&blocks, priority, duration);
        self.pin_lists.push((pins, blocks, owner));
    }

    pub fn pass_time(&mut self) {
        let passed = self.random.below(12);
        self.clock.advance(Duration::from_millis(passed));
        self.model.time += passed;
        if self.random.below(2) == 0 {
            let ended = self.pool.refresh();
            assert_eq!(ended, self.model.refresh());
            self.seen.saw("priority ended", ended as u64);
        } else {
            let now = self.model.read_clock();
            assert_eq!(self.pool.tick(), Duration::from_millis(now));
        }
        let passed_over = |now| matches!(now, Now::Shadowed(_));
        let passed_over = self.model.blocks.iter().filter(|block| passed_over(block.now)).count();
        self.seen.saw("passed over for its successors", passed_over as u64);
        let passed_over = |now| matches!(now, Now::PassedOver(_));
        let passed_over = self.model.blocks.iter().filter(|block| passed_over(block.now)).count();
        self.seen.saw("passed over for its tenant", passed_over as u64);
    }

    pub fn set_quota(&mut self) {
        if self.tenants.len() == 1 {
            return;
        }
        let tenant = 1 + self.random.below(self.tenants.len() as u64 - 1) as usize;
        let quota = TenantQuota {
            held_max: self.random.one_of(&[1, 3, 6, u64::MAX, u64::MAX]),
            cached_max: self.random.one_of(&[0, 2, 4, u64::MAX, u64::MAX]),
            reserved: self.random.one_of(&[0, 0, 1, 2, 4]),
        };
        let others: u64 = self.model.tenants.iter().map(|quota| quota.reserved).sum();
        let reserved = others - self.model.tenants[tenant].reserved + quota.reserved;
        let set = self.pool.set_quota(self.tenants[tenant], Tier::Primary, quota);
        if quota.reserved > quota.held_max {
            assert!(matches!(set, Err(TenantError::ReservedOverHeldMax { .. })), "{set:?}");
        } else if reserved > self.model.budgets[0] as u64 {
            assert!(matches!(set, Err(TenantError::OverReserved { .. })), "{set:?}");
        } else {
            set.unwrap();
            self.model.tenants[tenant] = quota;
            let dropped = self.model.counters.dropped;
            self.model.give_way(tenant, 0);
            self.seen.saw("tenant gave way", self.model.counters.dropped - dropped);
        }
    }

    pub fn loan(&mut self) {
        if self.random.below(2) == 0 { self.end_loan() } else { self.lend() }
    }

    fn lend(&mut self) {
        let (first, len) = (self.random.content(), 1 + self.random.below(4) as u32);
        let contents: Vec<u32> = (first..first + len).collect();
        let tier = self.random.one_of(&[Tier::Primary, Tier::Secondary]);
        let found = contents.iter().map_while(|&content| self.model.find(content));
        let found: Vec<_> =
            found.take_while(|&id| self.model.blocks[id].tier == tier.index()).collect();
        let found = self.model.usable(found);
        let loan = self.pool.lend(&names(&contents), tier);
        assert_eq!(loan.is_some(), !found.is_empty());
        let Some(loan) = loan else { return };
        assert_eq!(loan.blocks.len(), found.len());
        for (at, &id) in loan.blocks.iter().zip(&found) {
            self.model.pin(id);
            assert_eq!((at.tier.index(), at.id.index()), self.model.at(id));
        }
        self.loans.push((loan, found));
    }

    pub fn end_loan(&mut self) {
        let Some((loan, blocks)) = self.random.pick(&mut self.loans) else { return };
        assert!(self.pool.end_loan(loan.id) && !self.pool.end_loan(loan.id));
        blocks.iter().rev().for_each(|&block| self.model.unpin(block));
    }
}
