//! Budgets: how many block ids of a tier may be handed out, and how the others leave it.
//!
//! A block id at or above the budget, or in a granule that the tier has not, is never handed out. One that nobody uses leaves at once, one in
//! use when its last user lets go of it and the epoch of that release is complete. Its block is
//! [`Absent`](BlockPhase::Absent) then, as before it was first used. Growth brings it back.

use std::cmp::Reverse;

use crate::blocks::{BlockPhase, Flag};
use crate::claim::ClaimList;
use crate::eviction::EMPTY;
use crate::guard;
use crate::state::{Claim, PoolState};
use crate::tenants::Tenant;
use crate::{BlockPool, BudgetError, Claimed, RecordId, Tier};

/// The block ids of a tier that have left it.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    /// A bit for each of the first block ids, which grows when block ids leave. In each list behind it, a bit for
    /// each word of the list before that has all its bits. So the last block id that is there is found in as many
    /// steps as there are lists: no more than six.
    levels: Vec<Vec<u64>>,
    /// The block ids that have been used and have not left lie below this one, or below the budget.
    end: u32,
}

impl Gone {
    fn note(&mut self, n: u32, gone: bool) {
        let mut n = n as usize;
        for level in 0.. {
            if level == self.levels.len() {
                self.levels.push(Vec::new());
            }
            let bits = &mut self.levels[level];
            let (word, bit) = (n / 64, 1 << (n % 64));
            if word >= bits.len() {
                bits.resize(word + 1, 0);
            }
            let before = bits[word];
            bits[word] = if gone { before | bit } else { before & !bit };
            if (before == u64::MAX) == (bits[word] == u64::MAX) {
                break;
            }
            n = word;
        }
    }

    /// The bits of a word that are clear: of block ids, or of words with block ids, that are there.
    fn here(&self, level: usize, word: usize) -> u64 {
        #[cfg(test)]
        crate::steps::step();
        !self.levels.get(level).and_then(|bits| bits.get(word)).copied().unwrap_or(0)
    }

    /// Lowers the end to behind the last block id from `budget` on that has not left.
    fn settle(&mut self, budget: u32) {
        if self.end > budget {
            self.end = guard!(
                "pool.end-stays-above-what-is-used",
                self.end_of(self.end as usize).max(budget),
                else budget
            );
        }
    }

    /// The block id behind the last one below `end` that has not left.
    fn end_of(&self, mut end: usize) -> u32 {
        let mut level = 0;
        while end > 0 {
            let (word, last) = ((end - 1) / 64, (end - 1) % 64);
            let below = u64::MAX >> (63 - last);
            let mut here = self.here(level, word) & below;
            if here != 0 {
                let mut at = word;
                loop {
                    at = at * 64 + (63 - here.leading_zeros()) as usize;
                    let Some(lower) = level.checked_sub(1) else { return at as u32 + 1 };
                    (level, here) = (lower, self.here(lower, at));
                }
            }
            (level, end) = (level + 1, word);
        }
        0
    }
}

/// What a [budget](BlockPool::set_budget) takes from a tier.
///
/// # Ordering
///
/// The blocks of `leaving` leave as all do that are beyond the budget: when they are dropped, once the epoch
/// that is current then is complete. A block that is the source of an [`Offload`](crate::moves::Offload) is
/// kept until that has ended, too.
#[derive(Debug, Default)]
pub struct Withdrawn {
    /// The blocks beyond the budget that nobody used. [`Claimed::take_offload`] takes their content to the
    /// secondary tier; what is not taken there is lost.
    pub leaving: Claimed,
    /// How many blocks beyond the budget are in use, or are released and wait for their epoch.
    pub in_use: u64,
}

impl BlockPool {
    /// Has a tier hand out only block ids below `blocks` from now on: fewer than before, or more, up to as
    /// many as the tier was made for. Memory for new ones is there when this is called.
    ///
    /// Blocks beyond the budget leave the tier. Those that nobody uses are [withdrawn](Withdrawn) at once;
    /// their content is evicted as a claim would evict it, also what is kept for a tenant. The others leave
    /// when their last user lets go of them and the epoch of that release is complete. Until then, lookups find
    /// them and may pin them again; their content is lost when they leave. [`blocks_end`](Self::blocks_end)
    /// says how far the tier's blocks have left. A block that has left comes back, empty, with a larger budget.
    ///
    /// To set the same budget again changes nothing. For maintenance: holds the lock for a time in proportion
    /// to the blocks of all tiers, if block ids beyond the lower one of the two budgets were ever used.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use kv_pool::{BlockPool, PoolConfig, Tier};
    ///
    /// let pool = BlockPool::new(&PoolConfig::primary_only(8))?;
    /// let in_use = pool.claim(6)?;
    /// let withdrawn = pool.set_budget(Tier::Primary, 4)?;
    /// assert_eq!((withdrawn.in_use, pool.claimable()), (2, 0));
    /// drop(in_use);
    /// assert_eq!((pool.claimable(), pool.blocks_end(Tier::Primary)), (4, 4));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_budget(&self, tier: Tier, blocks: u64) -> Result<Withdrawn, BudgetError> {
        let mut state = self.shared.state.lock();
        state.check_budget(tier, blocks)?;
        let mut list = state.spares.take_claims(&self.shared);
        state.set_budget(tier, blocks as u32, &mut list.claims);
        let in_use = u64::from(state.tier(tier).beyond()) - list.claims.len() as u64;
        Ok(state.withdrawn(tier, list, in_use))
    }

    /// The first block id of a tier behind all that may be in use, in constant time: its
    /// [budget](Self::set_budget), or the one behind the last block beyond the budget that has not left. What
    /// lies from there on may lose its memory.
    #[must_use]
    pub fn blocks_end(&self, tier: Tier) -> u64 {
        self.shared.state.lock().tier(tier).end().into()
    }
}

impl PoolState {
    /// What leaves a tier, with how many others of its blocks are in use.
    pub(super) fn withdrawn(&mut self, tier: Tier, list: Box<ClaimList>, in_use: u64) -> Withdrawn {
        if list.claims.is_empty() {
            self.spares.keep_claims(list);
            return Withdrawn { leaving: Claimed::default(), in_use };
        }
        Withdrawn { leaving: Claimed::list(tier, list), in_use }
    }

    /// Checks a budget against what the tier was made for, and what is kept for tenants.
    pub(crate) fn check_budget(&self, tier: Tier, blocks: u64) -> Result<(), BudgetError> {
        let capacity = u64::from(self.tier(tier).capacity);
        if self.tier(tier).granules.is_some() {
            return Err(BudgetError::Divided { tier });
        }
        if guard!("pool.budget-within-capacity", blocks > capacity, else false) {
            return Err(BudgetError::OverCapacity { tier, requested: blocks, capacity });
        }
        self.check_reserved(tier, blocks)
    }

    /// Checks that a tier keeps as many blocks as are kept for tenants.
    pub(super) fn check_reserved(&self, tier: Tier, blocks: u64) -> Result<(), BudgetError> {
        let tenancy = self.watch.tenancy.as_ref();
        let reserved = tenancy.map_or(0, |tenancy| tenancy.tenants.reserved(tier));
        if guard!("pool.budget-keeps-the-reserve", blocks < reserved, else false) {
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
        self.find_short_ways();
    }

    /// Whether a block lies at a block id that is not to be handed out.
    #[inline]
    pub(crate) fn is_beyond(&self, id: RecordId) -> bool {
        let location = self.blocks.location(id);
        let tier = self.tier(location.tier);
        tier.is_beyond(location.id)
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
        tier.note_gone(location.id.0);
        self.find_short_ways();
    }

    /// Finds out which short ways are open: where there are tenants, or blocks to be looked at for whether they are to
    /// leave, none; where there is a policy, those on which it is not asked.
    pub(super) fn find_short_ways(&mut self) {
        let settled = guard!(
            "pool.short-ways-close-beyond-a-budget",
            self.tiers.iter().all(|tier| tier.beyond() == 0),
            else true
        );
        self.open = settled && self.watch.tenancy.is_none();
        self.plain = self.open && !self.has_notes();
    }

    /// Blocks that have been used at least once.
    pub(crate) fn appeared(&self) -> impl Iterator<Item = RecordId> + use<> {
        let ranges = self.tiers.each_ref().map(|tier| tier.base..tier.base + tier.appeared);
        ranges.into_iter().flatten().map(RecordId)
    }

    /// Claims the blocks beyond a tier's budget that nobody uses, those without content first. Of the others
    /// the least valuable is evicted first, and a block after those that follow it.
    fn claim_beyond(&mut self, tier: Tier, leaving: &mut Vec<Claim>) {
        let beyond = |&id: &RecordId| self.blocks.tier(id) == tier && self.is_beyond(id);
        let ids = self.appeared().filter(beyond).collect();
        self.claim_all(ids, leaving);
    }

    /// The same of these blocks, all of them beyond the budget of their tier.
    pub(super) fn claim_all(&mut self, mut ids: Vec<RecordId>, leaving: &mut Vec<Claim>) {
        ids.retain(|&id| self.is_unused(id));
        let blocks = &self.blocks;
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
        if target.is_err() && self.blocks.children(id) > 0 && !last {
            return false;
        }
        self.take_out(id);
        // The end of what follows it must not look for it in a list.
        self.put(id, BlockPhase::Queued);
        leaving.push(match target {
            Ok(target) => self.displace(id, target, Tenant::NOBODY),
            Err(lost) => {
                self.count_lost(lost);
                self.drop_content(id);
                self.claimed(id, Tenant::NOBODY, true)
            }
        });
        true
    }

    /// Makes the block ids claimable that have left a tier and lie within its budget again, the lowest first.
    fn bring_back(&mut self, tier: Tier) {
        let blocks = &self.blocks;
        let gone = |&id: &RecordId| {
            blocks.tier(id) == tier && blocks.place(id) == BlockPhase::Absent && !self.is_beyond(id)
        };
        let mut ids: Vec<_> = self.appeared().filter(gone).collect();
        ids.sort_by_key(|&id| blocks.location(id).id);
        for id in ids {
            let n = self.blocks.location(id).id.0;
            self.come_back(id, n);
        }
    }

    /// Makes a block claimable that has left its tier, where it is the `n`th.
    pub(super) fn come_back(&mut self, id: RecordId, n: u32) {
        self.put(id, BlockPhase::Queued);
        let state = &mut self.tiers[self.blocks.tier(id).index()];
        state.gone.note(n, false);
        state.gone.end = state.gone.end.max(n + 1);
        state.queues.push_back(&mut self.blocks, id, EMPTY);
    }

    /// Tells the tenants of a tier's budget, from which blocks went beyond it or came back.
    pub(super) fn tell_tenants_of(&mut self, tier: Tier, changed: &[(u32, RecordId)], came: bool) {
        let Some(tenancy) = &mut self.watch.tenancy else { return };
        let held = |(_, id): &&(u32, RecordId)| self.blocks.is(*id, Flag::COUNTED_HELD);
        let (before, changed) =
            (tenancy.tenants.held(tier), changed.iter().filter(held).count() as u64);
        let held = if came { before + changed } else { before.saturating_sub(changed) };
        tenancy.tenants.set_capacity(tier, self.tiers[tier.index()].budget.into(), held);
    }

    /// Tells the tenants of a tier's budget, and how many blocks within it are in use.
    fn tell_tenants(&mut self, tier: Tier) {
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
        if ragged { self.gone.end } else { self.budget }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_lies_behind_the_last_block_id_that_is_there() {
        let mut random = 5_u64;
        for blocks in [1, 63, 64, 65, 4096, 70_000_u32] {
            let (mut gone, mut naive) = (Gone::default(), vec![false; blocks as usize]);
            for _ in 0..300 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Mostly whole ranges, so that words fill at every level.
                let from = (random >> 33) as u32 % blocks;
                let to = from + 1 + (random >> 20) as u32 % (blocks - from);
                let leave = random >> 60 < 11;
                for n in from..to {
                    gone.note(n, leave);
                    naive[n as usize] = leave;
                }
                gone.end = blocks;
                gone.settle(0);
                let last = naive.iter().rposition(|gone| !gone);
                assert_eq!(gone.end, last.map_or(0, |last| last as u32 + 1));
                let budget = random as u32 % (blocks + 1);
                gone.end = blocks;
                gone.settle(budget);
                assert_eq!(gone.end, last.map_or(0, |last| last as u32 + 1).max(budget));
            }
        }
    }
}
