//! The budget of device blocks, which falls and rises again where a run asks for that.

use kv_plane::GroupId;
use kv_pool::Tier;

use super::Scheduler;
use crate::engine::RunError;
use crate::engine::cache::Compute;
use crate::engine::groups::granules_of_longest;
use crate::report::RunReport;

/// Number of iterations for which a budget of device blocks holds.
const BUDGET_ITERATIONS: u64 = 64;

impl<C: Compute> Scheduler<'_, C> {
    /// Changes the budget of device blocks, if it is time to: it falls by the swing, and rises again. The
    /// longest request has room in any case.
    pub(super) fn swing(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let percent = u64::from(self.life.budget_swing);
        if percent == 0 {
            return Ok(());
        }
        let options = self.cache.manager().options();
        let first = &options.groups[0];
        let (all, least) = match &options.shared {
            None => (first.pool.primary_blocks, first.blocks_per_sequence_max.into()),
            Some(shared) => (shared.granules.into(), granules_of_longest(options, shared)),
        };
        let shares = options.shared.is_some();
        let low = (all - all * percent / 100).max(least).min(all);
        if self.iteration.is_multiple_of(BUDGET_ITERATIONS) {
            let falls = (self.iteration / BUDGET_ITERATIONS) % 2 == 1;
            let budget = if falls { low } else { all };
            match shares {
                true => self.cache.set_granules(budget as u32)?,
                false => self.cache.set_budget(GroupId(0), Tier::Primary, budget)?,
            };
            report.budget_changes += 1;
        }
        if report.budget_changes > 0 {
            let mapped = self.cache.mapped_blocks();
            let before = match report.fewest_device_blocks {
                0 => u64::MAX,
                fewest => fewest,
            };
            report.fewest_device_blocks = before.min(mapped);
        }
        Ok(())
    }
}
