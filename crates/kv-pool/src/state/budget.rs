//! Budgets: how many block ids of a tier may be handed out, and how the others leave it.
//!
//! A block id at or above the budget, or in a granule that the tier has not, is never handed out. One that nobody uses leaves at once, one in
//! use when its last user lets go of it and the epoch of that release is complete. Its block is
//! [`Absent`](BlockPhase::Absent) then, as before it was first used. Growth brings it back.

use std::cmp::Reverse;

use crate::blocks::{BlockPhase, Flag};
use crate::state::{Claim, PoolState};
use crate::tenants::Tenant;
use crate::{BudgetError, RecordId, Tier};

/// The block ids of a tier that have left it.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    /// A bit for each of the first block ids, which grows when block ids leave.
    bits: Vec<u64>,
    /// The block ids that have been used and have not left lie below this one, or below the budget.
    end: u32,
}

impl Gone {
    fn is_gone(&self, n: u32) -> bool {
        let word = self.bits.get(n as usize / 64).copied().unwrap_or(0);
        word >> (n % 64) & 1 == 1
    }

    fn note(&mut self, n: u32, gone: bool) {
        let (word, bit) = (n as usize / 64, 1 << (n % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        if gone {
            self.bits[word] |= bit;
        } else {
            self.bits[word] &= !bit;
        }
    }

    /// Lowers the end to behind the last block id from `budget` on that has not left.
    fn settle(&mut self, budget: u32) {
        while self.end > budget && self.is_gone(self.end - 1) {
            self.end -= 1;
        }
    }
}

impl PoolState {
    /// Checks a budget against what the tier was made for, and what is kept for tenants.
    pub(crate) fn check_budget(&self, tier: Tier, blocks: u64) -> Result<(), BudgetError> {
        let capacity = u64::from(self.tier(tier).capacity);
        if self.tier(tier).granules.is_some() {
            return Err(BudgetError::Divided { tier });
        }
        if blocks > capacity {
            return Err(BudgetError::OverCapacity { tier, requested: blocks, capacity });
        }
        self.check_reserved(tier, blocks)
    }

    /// Checks that a tier keeps as many blocks as are kept for tenants.
    pub(super) fn check_reserved(&self, tier: Tier, blocks: u64) -> Result<(), BudgetError> {
        let tenancy = self.watch.tenancy.as_ref();
        let reserved = tenancy.map_or(0, |tenancy| tenancy.tenants.reserved(tier));
        if blocks < reserved {
            return Err(BudgetError::BelowReserved { tier, requested: blocks, reserved });
        }
        Ok(())
    }

    /// Gives a tier a budget that was checked, and claims the blocks beyond it that nobody uses.
    pub(crate) fn set_budget(&mut self, tier: Tier, budget: u32, leaving: &mut Vec<Claim>) {
        let state = &mut self.tiers[tier.index()];
        let before = std::mem::replace(&mut state.budget, budget);
        // Block ids that were never used are in no list, and need nothing.
        let used_beyond = state.appeared > before.min(budget);
        if used_beyond {
            state.gone.end = state.appeared;
            state.gone.settle(budget);
        }
        self.tell_tenants(tier);
        match budget < before {
            _ if !used_beyond => {}
            true => self.claim_beyond(tier, leaving),
            false => self.bring_back(tier),
        }
        self.plain = self.is_plain_now();
    }

    /// Whether a block lies at a block id that is not to be handed out.
    #[inline]
    pub(crate) fn is_beyond(&self, id: RecordId) -> bool {
        let location = self.blocks.location(id);
        let tier = self.tier(location.tier);
        tier.is_beyond(tier.nth(location.id))
    }

    /// Ends the stay of a block that nobody uses beyond the budget of its tier. Its content is lost.
    pub(super) fn leave(&mut self, id: RecordId) {
        if self.blocks.bears_a_name(id) {
            self.unname(id);
            self.counters.dropped += 1;
        }
        self.untime(id);
        self.put(id, BlockPhase::Absent);
        let location = self.blocks.location(id);
        let tier = &mut self.tiers[location.tier.index()];
        tier.note_gone(tier.nth(location.id));
        self.plain = self.is_plain_now();
    }

    /// Whether the short ways are open: no tenants, no policies, and no block to be looked at for whether it
    /// is to leave.
    pub(super) fn is_plain_now(&self) -> bool {
        let settled = self.tiers.iter().all(|tier| tier.beyond() == 0);
        settled && self.watch.tenancy.is_none() && !self.has_notes()
    }

    /// Blocks that have been used at least once.
    pub(crate) fn appeared(&self) -> impl Iterator<Item = RecordId> + use<> {
        let ranges = self.tiers.each_ref().map(|tier| tier.base..tier.base + tier.appeared);
        ranges.into_iter().flatten().map(RecordId)
    }

    /// Claims the blocks beyond a tier's budget that nobody uses, those without content first. Of the others
    /// the least valuable is evicted first, and a block after those that follow it.
    pub(super) fn claim_beyond(&mut self, tier: Tier, leaving: &mut Vec<Claim>) {
        let blocks = &self.blocks;
        let unused = |&id: &RecordId| blocks.tier(id) == tier && self.is_unused(id);
        let mut ids: Vec<_> =
            self.appeared().filter(unused).filter(|&id| self.is_beyond(id)).collect();
        let now = self.watch.now_ms() as u32;
        ids.sort_by_cached_key(|&id| {
            let at = blocks.location(id).id.index();
            let worth = blocks.is(id, Flag::NAMED).then(|| {
                let age = now.wrapping_sub(blocks.stamp(id));
                (blocks.priority(id), Reverse(age), Reverse(blocks.depth(id)))
            });
            (worth, at)
        });
        let followed: Vec<_> =
            ids.into_iter().filter(|&id| !self.claim_leaving(id, false, leaving)).collect();
        for id in followed.into_iter().rev() {
            self.claim_leaving(id, true, leaving);
        }
    }

    /// Claims an unused block that is to leave; whether it did. Content that would be lost while others
    /// follow it stays for now, unless it is `last`.
    fn claim_leaving(&mut self, id: RecordId, last: bool, leaving: &mut Vec<Claim>) -> bool {
        let tier = self.blocks.tier(id);
        if !self.blocks.is(id, Flag::NAMED) {
            self.take_out(id);
            leaving.push(self.claimed(id, Tenant::NOBODY, false));
            return true;
        }
        let target = self.offload_target(tier, id);
        if target.is_none() && self.blocks.children(id) > 0 && !last {
            return false;
        }
        self.take_out(id);
        // The end of what follows it must not look for it in a list.
        self.put(id, BlockPhase::Queued);
        leaving.push(match target {
            Some(target) => self.displace(id, target, Tenant::NOBODY),
            None => {
                self.drop_content(id);
                self.claimed(id, Tenant::NOBODY, true)
            }
        });
        true
    }

    /// Makes the block ids claimable that have left a tier and lie within its budget again, the lowest first.
    pub(super) fn bring_back(&mut self, tier: Tier) {
        let blocks = &self.blocks;
        let gone = |&id: &RecordId| {
            blocks.tier(id) == tier && blocks.place(id) == BlockPhase::Absent && !self.is_beyond(id)
        };
        let mut ids: Vec<_> = self.appeared().filter(gone).collect();
        ids.sort_by_key(|&id| blocks.location(id).id);
        for id in ids {
            let n = self.tier(tier).nth(self.blocks.location(id).id);
            self.come_back(id, n);
        }
    }

    /// Makes a block claimable that has left its tier, where it is the `n`th.
    pub(super) fn come_back(&mut self, id: RecordId, n: u32) {
        self.put(id, BlockPhase::Queued);
        let state = &mut self.tiers[self.blocks.tier(id).index()];
        state.gone.note(n, false);
        state.gone.end = state.gone.end.max(n + 1);
        state.queues.insert_last(&mut self.blocks, id, None);
    }

    /// Tells the tenants of a tier's budget, and how many blocks within it are in use.
    pub(super) fn tell_tenants(&mut self, tier: Tier) {
        if self.watch.tenancy.is_none() {
            return;
        }
        let held = |&id: &RecordId| {
            self.blocks.tier(id) == tier
                && self.blocks.is(id, Flag::COUNTED_HELD)
                && !self.is_beyond(id)
        };
        let held = self.appeared().filter(held).count() as u64;
        let budget = self.tier(tier).budget;
        if let Some(tenancy) = &mut self.watch.tenancy {
            tenancy.tenants.set_capacity(tier, budget.into(), held);
        }
    }
}

impl super::TierState {
    /// Block ids from the budget on that have been used and have not left.
    pub(crate) fn beyond(&self) -> u32 {
        let used = self.appeared.saturating_sub(self.budget);
        used.saturating_sub(self.counts[BlockPhase::Absent as usize])
    }

    /// Notes that the `n`th block id has left.
    pub(super) fn note_gone(&mut self, n: u32) {
        self.gone.note(n, true);
        let least = if self.granules.is_some() { 0 } else { self.budget };
        self.gone.settle(least);
    }

    /// The first block id behind all that may be in use.
    pub(crate) fn end(&self) -> u32 {
        let ragged = self.granules.is_some() || self.beyond() > 0;
        let end = if ragged { self.gone.end } else { self.budget };
        match end {
            0 => 0,
            n => self.block_id(n - 1).0 + 1,
        }
    }
}
