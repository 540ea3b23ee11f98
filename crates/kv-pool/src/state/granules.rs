//! Granules: equal ranges of a tier's block ids that are given to it and taken from it one by one.
//!
//! All blocks of such a tier have appeared from the start, and are absent until their granule is granted.

use std::collections::TryReserveError;

use crate::blocks::BlockPhase;
use crate::state::{Claim, PoolState};
use crate::{BudgetError, GranuleUse, Location, Priority, RecordId, Tier};

/// Which granules a tier has.
#[derive(Debug)]
pub(crate) struct Granules {
    /// Blocks of a granule, 1 or more.
    blocks: u32,
    granted: Vec<bool>,
}

impl Granules {
    /// Whether the `n`th block of the tier lies in a granule that the tier has.
    #[inline]
    pub(crate) fn has(&self, n: u32) -> bool {
        self.granted.get((n / self.blocks) as usize).copied().unwrap_or(false)
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
        for n in 0..count {
            let id = RecordId(state.base + n);
            self.blocks.set_location(id, Location { tier, id: state.block_id(n) });
            self.blocks.set_priority(id, Priority::DEFAULT);
            state.note_gone(n);
        }
        state.counts[BlockPhase::Absent as usize] += count;
        (state.appeared, state.budget) = (count, 0);
        state.granules = Some(Granules { blocks, granted });
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
            let state = &mut self.tiers[tier.index()];
            state.budget += blocks;
            self.tell_tenants(tier);
            self.bring_back(tier);
            self.plain = self.is_plain_now();
        }
        Ok(())
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
        let uses = self.granule_uses(tier).get(index).copied().unwrap_or_default();
        if uses.granted {
            self.check_reserved(tier, u64::from(self.tier(tier).budget - blocks))?;
            self.mark_granule(tier, index, false);
            self.tiers[tier.index()].budget -= blocks;
            self.tell_tenants(tier);
            // All that nobody uses, and no more: other granules that were withdrawn have no such blocks.
            self.claim_beyond(tier, leaving);
            self.plain = self.is_plain_now();
        }
        Ok(uses.in_use.into())
    }

    /// What the blocks of each granule are used for.
    pub(crate) fn granule_uses(&self, tier: Tier) -> Vec<GranuleUse> {
        let state = self.tier(tier);
        let Some(of) = &state.granules else { return Vec::new() };
        let granted = of.granted.iter();
        let mut uses: Vec<_> =
            granted.map(|&granted| GranuleUse { granted, ..GranuleUse::default() }).collect();
        for id in self.appeared().filter(|&id| self.blocks.tier(id) == tier) {
            let granule = state.nth(self.blocks.location(id).id) / of.blocks;
            let Some(uses) = uses.get_mut(granule as usize) else { continue };
            match self.blocks.place(id) {
                BlockPhase::Absent => {}
                BlockPhase::Queued | BlockPhase::Shadowed if self.blocks.bears_a_name(id) => {
                    uses.cached += 1;
                }
                BlockPhase::Queued | BlockPhase::Shadowed => uses.empty += 1,
                _ => uses.in_use += 1,
            }
        }
        uses
    }

    /// Notes whether a tier has a granule; whether that is new.
    fn mark_granule(&mut self, tier: Tier, index: usize, granted: bool) -> bool {
        let granules = self.tiers[tier.index()].granules.as_mut();
        let Some(mark) = granules.and_then(|of| of.granted.get_mut(index)) else { return false };
        std::mem::replace(mark, granted) != granted
    }
}
