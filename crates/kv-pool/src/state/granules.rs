//! Granules: equal ranges of a tier's block ids that are given to it and taken from it one by one.
//!
//! All blocks of such a tier have appeared from the start, and are absent until their granule is granted.

use std::collections::TryReserveError;

use crate::blocks::BlockPhase;
use crate::guard;
use crate::state::{PoolState, Withdrawn};
use crate::{BlockId, BlockPool, BudgetError, Location, Priority, RecordId, Tier};

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

/// What the blocks of a granule are used for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct GranuleUse {
    /// Whether the tier has the granule.
    pub granted: bool,
    /// Blocks without content that can be claimed.
    pub empty: u32,
    /// Blocks with cached content that nobody uses.
    pub cached: u32,
    /// Blocks that are in use, or are released and wait for their epoch or for a copy.
    pub in_use: u32,
    /// The highest priority of the cached blocks; `None` without one.
    pub priority: Option<Priority>,
    /// For how long the cached block that was released last has been unused, in milliseconds of the pool's clock;
    /// 0 without one.
    pub unused_ms: u32,
}

impl BlockPool {
    /// Gives a tier that was [divided](crate::PoolBuilder::granules) the memory of a granule: its block ids
    /// can be claimed, the ones without content from last. A granule that the tier has changes nothing. In a time
    /// in proportion to the granule's blocks.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    pub fn grant(&self, tier: Tier, granule: u64) -> Result<(), BudgetError> {
        let mut guard = self.shared.state.lock();
        let state = &mut *guard;
        let (index, blocks) = state.granule(tier, granule)?;
        if state.mark_granule(tier, index, true) {
            state.tiers[tier.index()].budget += blocks;
            let records = state.granule_records(tier, index, blocks);
            state.tell_tenants_of(tier, &records, true);
            for (n, id) in records {
                // What was in use when the granule was taken has not left.
                if state.blocks.place(id) == BlockPhase::Absent {
                    state.come_back(id, n);
                }
            }
            state.find_short_ways();
        }
        Ok(())
    }

    /// Takes a granule from a tier. Its blocks leave as those beyond a [budget](BlockPool::set_budget) do: what
    /// nobody uses at once, the rest when its last user lets go of it and that epoch is complete. A granule that
    /// the tier has not changes nothing, and tells how many of its blocks have not left.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use kv_pool::{BlockPool, PoolConfig, Tier};
    ///
    /// let builder = BlockPool::builder(&PoolConfig::primary_only(12));
    /// let pool = builder.granules(Tier::Primary, 4).build()?;
    /// assert_eq!(pool.claimable(), 0);
    /// pool.grant(Tier::Primary, 2)?;
    /// let block = pool.claim(1)?;
    /// assert_eq!(block.ids().next().map(|id| id.index()), Some(8));
    /// let withdrawn = pool.withdraw(Tier::Primary, 2)?;
    /// assert_eq!((withdrawn.leaving.len(), withdrawn.in_use), (3, 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn withdraw(&self, tier: Tier, granule: u64) -> Result<Withdrawn, BudgetError> {
        let mut guard = self.shared.state.lock();
        let state = &mut *guard;
        let (index, blocks) = state.granule(tier, granule)?;
        let uses = state.granule_use(tier, index, blocks);
        if uses.granted {
            state.check_reserved(tier, u64::from(state.tier(tier).budget - blocks))?;
        }
        let mut list = state.spares.take_claims(&self.shared);
        if uses.granted {
            state.mark_granule(tier, index, false);
            state.tiers[tier.index()].budget -= blocks;
            let records = state.granule_records(tier, index, blocks);
            state.tell_tenants_of(tier, &records, false);
            let ids = records.into_iter().map(|(_, id)| id).collect();
            state.claim_all(ids, &mut list.claims);
            guard!("pool.short-ways-close-with-a-granule", state.find_short_ways());
        }
        Ok(state.withdrawn(tier, list, uses.in_use.into()))
    }

    /// Takes granules from a tier at once, all or none, with what is cached there: that content is lost. A
    /// granule that the tier has not changes nothing. In a time in proportion to the granules' blocks.
    ///
    /// # Errors
    /// [`BudgetError`]: a block of a granule is [in use](GranuleUse::in_use), or what is left would be less than is
    /// kept for tenants. Nothing has changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use kv_pool::{BlockPool, PoolConfig, Tier};
    ///
    /// let builder = BlockPool::builder(&PoolConfig::primary_only(12));
    /// let pool = builder.granules(Tier::Primary, 4).build()?;
    /// pool.grant(Tier::Primary, 0)?;
    /// pool.grant(Tier::Primary, 2)?;
    /// pool.vacate(Tier::Primary, &[2])?;
    /// let block = pool.claim(1)?;
    /// assert!(pool.vacate(Tier::Primary, &[0]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn vacate(&self, tier: Tier, granules: &[u64]) -> Result<(), BudgetError> {
        let mut guard = self.shared.state.lock();
        let state = &mut *guard;
        let mut leaving = Vec::new();
        for &granule in granules {
            let (index, blocks) = state.granule(tier, granule)?;
            let uses = state.granule_use(tier, index, blocks);
            if guard!("pool.granule-in-use-is-not-vacated", uses.in_use > 0, else false) {
                return Err(BudgetError::InUse { tier, granule, in_use: uses.in_use });
            }
            leaving.extend(uses.granted.then_some((granule, blocks)));
        }
        // A granule may be named twice.
        leaving.sort_unstable();
        leaving.dedup();
        let leaving = leaving.into_iter().map(|(_, blocks)| blocks).sum::<u32>();
        state.check_reserved(tier, u64::from(state.tier(tier).budget - leaving))?;
        for &granule in granules {
            let (index, blocks) = state.granule(tier, granule)?;
            if !state.mark_granule(tier, index, false) {
                continue;
            }
            state.tiers[tier.index()].budget -= blocks;
            for (_, id) in state.granule_records(tier, index, blocks) {
                state.take_out(id);
                // The end of what follows it must not look for it in a list.
                state.put(id, BlockPhase::Queued);
                if state.blocks.bears_a_name(id) {
                    state.drop_content(id);
                }
                state.leave(id);
            }
        }
        state.tell_tenants_of(tier, &[], false);
        state.find_short_ways();
        Ok(())
    }

    /// What the blocks of a granule are used for.
    ///
    /// # Errors
    /// [`BudgetError::Undivided`] and [`BudgetError::NoGranule`].
    pub fn granule(&self, tier: Tier, granule: u64) -> Result<GranuleUse, BudgetError> {
        let state = self.shared.state.lock();
        let (index, blocks) = state.granule(tier, granule)?;
        Ok(state.granule_use(tier, index, blocks))
    }

    /// What the blocks of each granule of a tier are used for, in a time in proportion to the tier's blocks. Empty for
    /// a tier that was not divided.
    #[must_use]
    pub fn granules(&self, tier: Tier) -> Vec<GranuleUse> {
        let state = self.shared.state.lock();
        let of = state.tier(tier).granules.as_ref();
        let granules = 0..of.map_or(0, |of| of.granted.len() as u64);
        let parts = granules.filter_map(|granule| state.granule(tier, granule).ok());
        parts.map(|(index, blocks)| state.granule_use(tier, index, blocks)).collect()
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

    /// The blocks of a granule: each one's number in the tier, and its record.
    fn granule_records(&self, tier: Tier, index: usize, blocks: u32) -> Vec<(u32, RecordId)> {
        let Some(of) = &self.tier(tier).granules else { return Vec::new() };
        let range = of.records(index, blocks);
        (range.start as u32..).zip(of.records[range].iter().copied()).collect()
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
