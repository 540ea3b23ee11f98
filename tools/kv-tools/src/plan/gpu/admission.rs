//! How requests come in: in order, together, as many as rows, tokens and blocks allow.

use std::collections::VecDeque;

use kv_plane::{Answer, Request as Asked};

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
        let asking = self.waiting.iter_mut().take(rows);
        let mut asked: Vec<Asked> = asking.filter_map(|job| job.asked.take()).collect();
        if asked.is_empty() {
            return Ok(());
        }
        let answers = self.manager.admit(&mut asked, budget);
        let mut answers = answers.into_iter();
        let mut admitted = Vec::new();
        let mut kept = VecDeque::new();
        for asked in asked {
            let Some(mut job) = self.waiting.pop_front() else { break };
            match answers.next() {
                Some(Answer::Admitted(sequence)) => {
                    job.sequence = Some(sequence);
                    admitted.push(job);
                    continue;
                }
                Some(Answer::NoRoom(_)) => planned.refused = true,
                Some(Answer::Refused(error)) => return Err(PlanError::manager(error)),
                Some(Answer::Waiting(_) | Answer::NoRow) | None => {}
            }
            job.asked = Some(asked);
            kept.push_back(job);
        }
        kept.append(&mut self.waiting);
        self.waiting = kept;
        for job in admitted {
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
            self.manager.reserve(sequence, chunk as u32).map_err(PlanError::manager)?;
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
