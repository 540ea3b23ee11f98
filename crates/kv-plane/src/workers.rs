//! Who carries out what a cache decides.

use kv_manager::{BudgetError, Budgeted, Checked, GroupId, Manager, Outcome};
use kv_pool::Tier;

use crate::{CloseErrors, DemandError, KvCacheOptions, StepError};

/// Carries out what the [manager](crate::KvCache::manager) of a cache decides: [in this process](crate::InProcess), or in
/// worker processes (`Processes`, with the feature `processes`).
///
/// A [`KvCache`](crate::KvCache) makes the calls, in the order of its steps, and hands them its manager where they are to say
/// what has become of earlier ones.
pub trait Workers: Sized {
    /// What the engine adds to the plan of a step for those who carry it out.
    type Work<'a>;

    /// What is left to say when everything is released.
    type Closed;

    /// The options of the cache.
    fn options(&self) -> &KvCacheOptions;

    /// Device blocks of the first group that have memory on every device, within the budget.
    fn ready_blocks(&mut self) -> u64;

    /// Whether device blocks within the budget had no memory when that was looked at last.
    fn can_grow(&self) -> bool;

    /// Has memory mapped under the first `blocks` device blocks of the first group, as far as there is any; how many blocks have
    /// memory then. A cache asks for as many as are in use, and those that a call is about to claim.
    ///
    /// # Errors
    /// [`DemandError`] if memory is left and could not be mapped.
    fn grow(&mut self, blocks: u64) -> Result<u64, DemandError>;

    /// Changes the budget of a tier of a group; how many blocks the manager was told to hand out, and what came of it.
    ///
    /// # Errors
    /// [`BudgetError`]; nothing has changed then.
    fn set_budget(
        &mut self,
        manager: &mut Manager,
        of: (GroupId, Tier),
        blocks: u64,
    ) -> Result<(u64, Budgeted), BudgetError>;

    /// Waits for host memory that is still on its way, and tells the manager of it. Nothing where it is waited for at the start.
    fn wait_for_host(&mut self, _manager: &mut Manager) {}

    /// Whether a step can be carried out with what the engine adds to it, before anything is decided.
    ///
    /// # Errors
    /// [`StepError`]; nothing has changed then.
    fn check_step(&self, _work: Option<&Self::Work<'_>>) -> Result<(), StepError> {
        Ok(())
    }

    /// Carries out a plan, up to the engine's own work.
    ///
    /// # Errors
    /// [`StepError`]: the step has failed then.
    fn carry_out(
        &mut self,
        plan: Checked<'_>,
        work: Option<Self::Work<'_>>,
    ) -> Result<(), StepError>;

    /// Says that the engine's work for the last plan is enqueued, or that it is not. Nothing if that was said.
    ///
    /// # Errors
    /// [`StepError`]; the call can be made again.
    fn finish(&mut self, outcome: Outcome) -> Result<(), StepError>;

    /// Steps that were finished and not yet seen to complete.
    fn in_flight(&self) -> usize;

    /// Waits until at most `most` steps are in flight, and tells the manager what is complete.
    ///
    /// # Errors
    /// [`StepError`] if that will never be known.
    fn complete(&mut self, manager: &mut Manager, most: usize) -> Result<(), StepError>;

    /// Tells the manager which loads have ended so far, before a sequence that waits for some is committed. Nothing where the
    /// completion of a step comes behind that.
    fn settle(&mut self, _manager: &mut Manager) {}

    /// Sees to tiers and memory between two steps: what has come, and what lies beyond a budget.
    ///
    /// # Errors
    /// [`StepError`]; the next step tries again.
    fn tend(&mut self, manager: &mut Manager) -> Result<(), StepError>;

    /// Waits for the work that is enqueued and releases everything.
    ///
    /// # Errors
    /// Every refusal. What is not provably at rest is left to the drop.
    fn close(self) -> Result<Self::Closed, CloseErrors>;
}
