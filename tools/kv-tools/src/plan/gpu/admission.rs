//! How requests come in: in order, together, as many as rows, tokens and blocks allow.

use std::collections::VecDeque;

use kv_plane::manager::Waiting;
use kv_plane::{Admission, NoRoom, Request as Asked};

use super::{Counts, Gpu, Planned};
use crate::plan::PlanError;
use crate::plan::jobs::Job;
use crate::plan::rules::Rules;
use kv_replay::engine::GRID_TOKENS;
use kv_replay::trace::Trace;

impl Gpu {
    /// Admits waiting requests in order, together, until rows, the budget or the pool are full.
    pub(super) fn admit_waiting(
        &mut self,
        trace: &Trace,
        rules: &Rules,
        planned: &mut Planned,
        counts: &mut Counts,
    ) -> Result<(), PlanError> {
        let budget = u64::from(rules.step_tokens) - planned.tokens;
        let rows = self.manager.free_rows();
        if budget == 0 || rows == 0 {
            return Ok(());
        }
        while self.waiting.len() < rows
            && let Some(number) = self.arrived.pop_front_if(|number| {
                rules.arrival_ns(&trace.requests[*number]) <= self.planned_ns
            })
        {
            let request = &trace.requests[number];
            self.waiting.push_back(Job::new(number, request, self.tokens, trace.block_tokens));
        }
        let rows = rows.min(self.waiting.len());
        let asking = self.waiting.drain(..rows);
        let asked = asking.filter_map(|mut job| Some((job.asked.take()?, job)));
        let mut queue: VecDeque<(Job, Asked)> = asked.map(|(asked, job)| (job, asked)).collect();
        if queue.is_empty() {
            return Ok(());
        }
        let Admission { admitted, refused, waiting, no_room } =
            self.manager.admit(&mut queue, budget);
        for (mut job, asked) in queue.into_iter().rev() {
            job.asked = Some(asked);
            self.waiting.push_front(job);
        }
        if let Some((_, error)) = refused.into_iter().next() {
            return Err(PlanError::manager(error));
        }
        let is_bound = |waiting: &(usize, Waiting)| matches!(waiting.1, Waiting::Bound(_));
        let lacks_blocks = matches!(no_room, Some((_, NoRoom::Blocks(_))));
        planned.refused |= lacks_blocks || waiting.iter().any(is_bound);
        for ((mut job, _), sequence) in admitted {
            job.sequence = Some(sequence);
            self.enter(job, trace, rules, planned, counts)?;
        }
        Ok(())
    }

    /// Has an admitted request run: with the tokens after its cached prefix, in a chunk that begins on the grid.
    fn enter(
        &mut self,
        mut job: Job,
        trace: &Trace,
        rules: &Rules,
        planned: &mut Planned,
        counts: &mut Counts,
    ) -> Result<(), PlanError> {
        let request = &trace.requests[job.number];
        if self.disk.is_none() {
            self.show(rules.arrival_ns(request) / 1_000_000 * 1_000_000);
        }
        let Some(sequence) = &mut job.sequence else { return Ok(()) };
        let left = u64::from(rules.step_tokens) - planned.tokens;
        let skipped = sequence.resolved() % GRID_TOKENS;
        let skip = if skipped < left { skipped } else { 0 };
        let chunk = u64::from(sequence.next()).min(left - skip);
        if chunk < sequence.next().into() {
            let room = self.manager.reserve(sequence, chunk as u32).map_err(PlanError::manager)?;
            room.given().map_err(PlanError::manager)?;
        }
        planned.loaded += sequence.onboarded_blocks() as u64;
        if !std::mem::replace(&mut job.counted, true) {
            // The last token of a prompt is always computed.
            counts.lookups += job.prompt.saturating_sub(1) / self.tokens;
            counts.hits += sequence.cached_tokens() / self.tokens;
            counts.host_hits += sequence.onboarded_blocks() as u64;
            counts.prompt_tokens += job.prompt;
            counts.cached_tokens += sequence.cached_tokens();
            counts.generated_tokens += request.output_length;
        }
        if chunk > 0 {
            job.plan(skip, planned);
        }
        self.running.push(job);
        Ok(())
    }
}
