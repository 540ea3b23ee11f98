//! Requests that end.

use cuda_driver::guard;

use super::Scheduler;
use crate::engine::cache::Compute;
use crate::report::RunReport;

impl<C: Compute> Scheduler<'_, C> {
    /// Ends requests whose time has come, in whatever step they are.
    pub(super) fn cancel(&mut self, report: &mut RunReport) {
        for (&number, request) in &mut self.live {
            if request.over_in.is_some() || request.dies.is_none_or(|at| at > self.iteration) {
                continue;
            }
            request.sequence = None;
            request.outcomes.clear();
            (request.request, request.cancelled) = (None, true);
            // The last one that may read it. Steps in which nothing runs are not complete before another one is.
            request.over_in = Some(self.launched);
            guard!("replay.cancelled-gives-back", self.handover.forget(number));
            report.cancelled += 1;
            if let Some(arrivals) = &mut self.arrivals {
                arrivals.cancel(number);
            }
        }
        let over =
            |number: &usize| self.live.get(number).is_none_or(|request| request.over_in.is_some());
        self.running.retain(|number| !over(number));
        self.waiting.retain(|number| !over(number));
        self.asleep.retain(|number| !over(number));
    }

    pub(super) fn retire_finished(&mut self, step: u64) {
        let over = |number: &usize| {
            let request = self.live.get(number);
            request.is_none_or(|request| request.over_in.is_some_and(|at| at <= step))
        };
        self.running.retain(|number| !over(number));
    }
}
