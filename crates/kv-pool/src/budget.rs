//! Memory that comes and goes: how many blocks of a tier may be handed out.

use crate::{BlockPool, BudgetError, Claimed, Priority, Tier};

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
        if list.claims.is_empty() {
            state.spares.keep_claims(list);
            return Ok(Withdrawn { leaving: Claimed::default(), in_use });
        }
        Ok(Withdrawn { leaving: Claimed::list(tier, list), in_use })
    }

    /// Gives a tier that was [divided](crate::PoolBuilder::granules) the memory of a granule: its block ids
    /// can be claimed, the ones without content from last. A granule that the tier has changes nothing. In a time
    /// in proportion to the granule's blocks.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    pub fn grant(&self, tier: Tier, granule: u64) -> Result<(), BudgetError> {
        self.shared.state.lock().grant(tier, granule)
    }

    /// Takes a granule from a tier. Its blocks leave as those beyond a [budget](Self::set_budget) do: what
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
        let mut state = self.shared.state.lock();
        let mut list = state.spares.take_claims(&self.shared);
        let in_use = match state.withdraw(tier, granule, &mut list.claims) {
            Ok(in_use) => in_use,
            Err(error) => {
                state.spares.keep_claims(list);
                return Err(error);
            }
        };
        if list.claims.is_empty() {
            state.spares.keep_claims(list);
            return Ok(Withdrawn { leaving: Claimed::default(), in_use });
        }
        Ok(Withdrawn { leaving: Claimed::list(tier, list), in_use })
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
        self.shared.state.lock().vacate(tier, granules)
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

    /// What the blocks of each granule of a tier are used for, in a time in proportion to the tier's blocks. Empty for a tier that was not divided.
    #[must_use]
    pub fn granules(&self, tier: Tier) -> Vec<GranuleUse> {
        self.shared.state.lock().granule_uses(tier)
    }

    /// The first block id of a tier behind all that may be in use, in constant time: its
    /// [budget](Self::set_budget), or the one behind the last block beyond the budget that has not left. What
    /// lies from there on may lose its memory.
    #[must_use]
    pub fn blocks_end(&self, tier: Tier) -> u64 {
        self.shared.state.lock().tier(tier).end().into()
    }
}
