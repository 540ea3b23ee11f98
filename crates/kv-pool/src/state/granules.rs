//! Granules: equal ranges of a tier's block ids that are given to it and taken from it one by one.
//!
//! All blocks of such a tier have appeared from the start, and are absent until their granule is granted.

use std::collections::TryReserveError;

use crate::blocks::BlockPhase;
use crate::guard;
use crate::state::{Claim, PoolState};
use crate::{BlockId, BudgetError, GranuleUse, Location, Priority, RecordId, Tier};

/// Which granules a tier has.
#[derive(Debug)]
pub(crate) struct Granules {
    /// Blocks of a granule, 1 or more.
    blocks: u32,
    granted: Vec<bool>,
    /// The record of each of the tier's blocks.
    records: Vec<RecordId>,
}

impl Granules {
    /// Whether the `n`th block of the tier lies in a granule that the tier has.
    #[inline]
    pub(crate) fn has(&self, n: u32) -> bool {
        self.granted.get((n / self.blocks) as usize).copied().unwrap_or(false)
    }

    /// Notes which record the `n`th block of the tier is from now on.
    #[inline]
    pub(crate) fn note(&mut self, n: u32, id: RecordId) {
        self.records[n as usize] = id;
    }

    /// The record that the `n`th block of the tier is.
    pub(crate) fn record(&self, n: u32) -> RecordId {
        self.records[n as usize]
    }

    /// The records of a granule's blocks, of which it has so many.
    fn records(&self, granule: usize, blocks: u32) -> std::ops::Range<usize> {
        let first = granule * self.blocks as usize;
        debug_assert!(first + blocks as usize <= self.records.len());
        first..first + blocks as usize
    }
}

impl PoolState {
    /// Has a tier that is new begin without blocks, to be given granules of so many.
    pub(crate) fn divide(&mut self, tier: Tier, blocks: u32) -> Result<(), TryReserveError> {
        let state = &mut self.tiers[tier.index()];
        let (count, blocks) = (state.capacity, blocks.max(1));
        let mut granted = Vec::new();
        let granules = count.div_ceil(blocks) as usize;
        granted.try_reserve_exact(granules)?;
        granted.resize(granules, false);
        let mut records = Vec::new();
        records.try_reserve_exact(count as usize)?;
        records.extend((0..count).map(|n| RecordId(state.base + n)));
        for n in 0..count {
            let id = RecordId(state.base + n);
            self.blocks.set_location(id, Location { tier, id: BlockId(n) });
            self.blocks.set_priority(id, Priority::DEFAULT);
            state.note_gone(n);
        }
        state.counts[BlockPhase::Absent as usize] += count;
        (state.appeared, state.budget) = (count, 0);
        state.granules = Some(Granules { blocks, granted, records });
        Ok(())
    }

    /// The number of a granule of a tier, and of its blocks.
    pub(crate) fn granule(&self, tier: Tier, granule: u64) -> Result<(usize, u32), BudgetError> {
        let state = self.tier(tier);
        let Some(of) = &state.granules else { return Err(BudgetError::Undivided { tier }) };
        let granules = of.granted.len() as u64;
        match usize::try_from(granule) {
            Ok(index) if granule < granules => {
                let first = granule as u32 * of.blocks;
                Ok((index, of.blocks.min(state.capacity - first)))
            }
            _ => Err(BudgetError::NoGranule { tier, granule, granules }),
        }
    }

    /// Gives a tier a granule, unless it has it.
    pub(crate) fn grant(&mut self, tier: Tier, granule: u64) -> Result<(), BudgetError> {
        let (index, blocks) = self.granule(tier, granule)?;
        if self.mark_granule(tier, index, true) {
            self.tiers[tier.index()].budget += blocks;
            let records = self.granule_records(tier, index, blocks);
            self.tell_tenants_of(tier, &records, true);
            for (n, id) in records {
                // What was in use when the granule was taken has not left.
                if self.blocks.place(id) == BlockPhase::Absent {
                    self.come_back(id, n);
                }
            }
            self.plain = self.is_plain_now();
        }
        Ok(())
    }

    /// Takes granules none of whose blocks are in use from a tier, all or none, with what is cached there.
    pub(crate) fn vacate(&mut self, tier: Tier, granules: &[u64]) -> Result<(), BudgetError> {
        let mut leaving = Vec::new();
        for &granule in granules {
            let (index, blocks) = self.granule(tier, granule)?;
            let uses = self.granule_use(tier, index, blocks);
            if guard!("pool.granule-in-use-is-not-vacated", uses.in_use > 0, else false) {
                return Err(BudgetError::InUse { tier, granule, in_use: uses.in_use });
            }
            leaving.extend(uses.granted.then_some((granule, blocks)));
        }
        // A granule may be named twice.
        leaving.sort_unstable();
        leaving.dedup();
        let leaving = leaving.into_iter().map(|(_, blocks)| blocks).sum::<u32>();
        self.check_reserved(tier, u64::from(self.tier(tier).budget - leaving))?;
        for &granule in granules {
            let (index, blocks) = self.granule(tier, granule)?;
            if !self.mark_granule(tier, index, false) {
                continue;
            }
            self.tiers[tier.index()].budget -= blocks;
            for (_, id) in self.granule_records(tier, index, blocks) {
                self.take_out(id);
                // The end of what follows it must not look for it in a list.
                self.put(id, BlockPhase::Queued);
                if self.blocks.bears_a_name(id) {
                    self.drop_content(id);
                }
                self.leave(id);
            }
        }
        self.tell_tenants_of(tier, &[], false);
        self.plain = self.is_plain_now();
        Ok(())
    }

    /// The blocks of a granule: each one's number in the tier, and its record.
    fn granule_records(&self, tier: Tier, index: usize, blocks: u32) -> Vec<(u32, RecordId)> {
        let Some(of) = &self.tier(tier).granules else { return Vec::new() };
        let range = of.records(index, blocks);
        (range.start as u32..).zip(of.records[range].iter().copied()).collect()
    }

    /// Takes a granule from a tier that has it, and claims those of its blocks that nobody uses; how many
    /// others it has.
    pub(crate) fn withdraw(
        &mut self,
        tier: Tier,
        granule: u64,
        leaving: &mut Vec<Claim>,
    ) -> Result<u64, BudgetError> {
        let (index, blocks) = self.granule(tier, granule)?;
        let uses = self.granule_use(tier, index, blocks);
        if uses.granted {
            self.check_reserved(tier, u64::from(self.tier(tier).budget - blocks))?;
            self.mark_granule(tier, index, false);
            self.tiers[tier.index()].budget -= blocks;
            let records = self.granule_records(tier, index, blocks);
            self.tell_tenants_of(tier, &records, false);
            self.claim_all(records.into_iter().map(|(_, id)| id).collect(), leaving);
            guard!("pool.short-ways-close-with-a-granule", self.plain = self.is_plain_now());
        }
        Ok(uses.in_use.into())
    }

    /// What the blocks of each granule are used for.
    pub(crate) fn granule_uses(&self, tier: Tier) -> Vec<GranuleUse> {
        let state = self.tier(tier);
        let Some(of) = &state.granules else { return Vec::new() };
        let blocks = |index: usize| of.blocks.min(state.capacity - index as u32 * of.blocks);
        let granules = 0..of.granted.len();
        granules.map(|index| self.granule_use(tier, index, blocks(index))).collect()
    }

    /// What the blocks of a granule are used for.
    pub(crate) fn granule_use(&self, tier: Tier, index: usize, blocks: u32) -> GranuleUse {
        let Some(of) = &self.tier(tier).granules else { return GranuleUse::default() };
        let mut uses = GranuleUse { granted: of.granted[index], ..GranuleUse::default() };
        let (now, mut unused_ms) = (self.watch.now_ms() as u32, u32::MAX);
        for &id in &of.records[of.records(index, blocks)] {
            match self.blocks.place(id) {
                BlockPhase::Absent => {}
                BlockPhase::Queued | BlockPhase::Shadowed if self.blocks.bears_a_name(id) => {
                    uses.cached += 1;
                    uses.priority = uses.priority.max(Some(self.blocks.priority(id)));
                    unused_ms = unused_ms.min(now.wrapping_sub(self.blocks.stamp(id)));
                }
                BlockPhase::Queued | BlockPhase::Shadowed => uses.empty += 1,
                _ => uses.in_use += 1,
            }
        }
        uses.unused_ms = if uses.cached > 0 { unused_ms } else { 0 };
        uses
    }

    /// Notes whether a tier has a granule; whether that is new.
    fn mark_granule(&mut self, tier: Tier, index: usize, granted: bool) -> bool {
        let granules = self.tiers[tier.index()].granules.as_mut();
        let Some(mark) = granules.and_then(|of| of.granted.get_mut(index)) else { return false };
        std::mem::replace(mark, granted) != granted
    }
}
