//! Memory that comes and goes: how many blocks of a tier may be handed out.

use crate::state::PoolState;
use crate::{BlockPool, BudgetError, Claimed, Tier};

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
        Ok(self.set_checked_budget(&mut state, tier, blocks as u32))
    }

    pub(crate) fn set_checked_budget(
        &self,
        state: &mut PoolState,
        tier: Tier,
        blocks: u32,
    ) -> Withdrawn {
        let mut list = state.spares.take_claims(&self.shared);
        state.set_budget(tier, blocks, &mut list.claims);
        let in_use = u64::from(state.tier(tier).beyond()) - list.claims.len() as u64;
        if list.claims.is_empty() {
            state.spares.keep_claims(list);
            return Withdrawn { leaving: Claimed::default(), in_use };
        }
        Withdrawn { leaving: Claimed::list(tier, list), in_use }
    }

    /// The first block id of a tier behind all that may be in use, in constant time: its
    /// [budget](Self::set_budget), or the one behind the last block beyond the budget that has not left. What
    /// lies from there on may lose its memory.
    #[must_use]
    pub fn blocks_end(&self, tier: Tier) -> u64 {
        self.shared.state.lock().tier(tier).end().into()
    }
}
