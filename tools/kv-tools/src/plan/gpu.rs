//! One simulated GPU without its bytes: a manager that decides which blocks it has, and iterations that take their time.
//!
//! It schedules as [`engine`](kv_replay::engine) does, and asks the same manager in the same order. So what is found, evicted,
//! stored and preempted is the same. It leaves out what moves no block: calls, tables and kernels of the cache. Iterations
//! that generate and are alike are one step.

mod admission;
mod alike;
mod disk;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kv_plane::manager::{
    Completion, ComputeRate, LowerOptions, Manager, ManagerOptions, Outcome, Room, WorkerId,
};
use kv_plane::{GroupId, OpenStep, Tokens};
use kv_pool::clock::ManualClock;
use kv_pool::store::StoreRules;
use kv_pool::{PoolConfig, Tier};

use super::jobs::{Job, Part};
use super::rules::Rules;
use super::{Choice, PlanError};
use disk::Disk;
use kv_replay::trace::Trace;

/// Between two looks at files while nothing else goes on.
const LOOK_NS: u64 = 1_000_000;

/// Stores to files that are open at a time, as in a run.
const STORES_OPEN_MAX: u32 = 4;

/// What an iteration does, or several equal ones.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    number: u64,
    begun_ns: u64,
    /// What has to be moved before it begins, beyond the end of the one before, and what each iteration computes.
    moves_ns: u64,
    each_ns: u64,
    iterations: u64,
}

/// What is planned for a step so far.
#[derive(Clone, Copy, Debug, Default)]
struct Planned {
    /// Tokens, those that are skipped included.
    tokens: u64,
    prompt_tokens: u64,
    loaded: u64,
    /// A request was not admitted for want of room.
    refused: bool,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event {
    FirstToken,
    End,
}

/// What was counted on all GPUs together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) lookups: u64,
    pub(super) hits: u64,
    pub(super) host_hits: u64,
    /// Blocks that came from files, into host memory first.
    pub(super) disk_reads: u64,
    pub(super) stored: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) generated_tokens: u64,
    pub(super) busy_ns: u64,
    pub(super) iterations: u64,
}

pub(super) struct Gpu {
    manager: Manager,
    /// The files below its host memory.
    disk: Option<Disk>,
    tokens: u64,
    clock: ManualClock,
    /// What the clock shows.
    clock_ns: u64,
    /// Requests that have arrived, of which nothing else is known.
    arrived: VecDeque<usize>,
    /// Requests to be admitted, preempted ones first.
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    /// What has computed its last token, until the host has seen that.
    over: Vec<Job>,
    step: Option<Step>,
    /// The latest step that was staged.
    staged: u64,
    /// When the last iteration began: the next one was planned then.
    planned_ns: u64,
    /// The device has nothing to do.
    idle: bool,
}

impl Gpu {
    /// # Errors
    ///
    /// [`PlanError`] for more blocks than a policy or a manager can have.
    pub(super) fn new(choice: &Choice, rules: &Rules, longest: u64) -> Result<Self, PlanError> {
        let (device, host) = (choice.device_blocks, choice.host_blocks);
        let clock = ManualClock::new();
        let make = || choice.policy.make(device.saturating_add(host)).map_err(PlanError::Pool);
        let policies = [(Tier::Primary, make()?), (Tier::Secondary, make()?)];
        let store = rules.store.make(StoreRules::new(host)).map_err(PlanError::Pool)?;
        let mut made = Some((policies, store.filter(|_| host > 0)));
        let disk = (choice.disk_blocks > 0).then(|| Disk::new(choice.disk_blocks));
        let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(device) };
        let mut options = ManagerOptions {
            lower: LowerOptions {
                tiers: disk.is_some().into(),
                stores_open_max: STORES_OPEN_MAX,
                compute: ComputeRate::Measured,
                ..LowerOptions::default()
            },
            sequences_max: rules.max_batch,
            ..ManagerOptions::new(rules.block_tokens, pool)
        };
        options.groups[0].blocks_per_sequence_max = u32::try_from(longest).unwrap_or(u32::MAX);
        let build = |builder: kv_pool::PoolBuilder| {
            let builder = builder.clock(Arc::new(clock.clone()));
            let Some((policies, store)) = made.take() else { return builder };
            let add = |builder: kv_pool::PoolBuilder, (tier, policy)| builder.policy(tier, policy);
            let builder = policies.into_iter().fold(builder, add);
            match store {
                Some(store) => builder.store_policy(store),
                None => builder,
            }
        };
        let mut manager = Manager::with_pool(options, build).map_err(PlanError::manager)?;
        let rules_below = StoreRules::new(choice.disk_blocks);
        if let Some(store) = rules.store.make(rules_below).map_err(PlanError::Pool)?
            && disk.is_some()
        {
            manager.set_store_policy(Tier::Third, store).map_err(PlanError::manager)?;
        }
        Ok(Self {
            manager,
            disk,
            tokens: rules.block_tokens.into(),
            clock,
            clock_ns: 0,
            arrived: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            over: Vec::new(),
            step: None,
            staged: 0,
            planned_ns: 0,
            idle: true,
        })
    }

    /// Requests that are here and not done.
    pub(super) fn outstanding(&self) -> usize {
        self.arrived.len() + self.waiting.len() + self.running.len()
    }

    /// Whether no step is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.step.is_none()
    }

    /// When the step in progress ends or, without one, a transfer that requests may wait for; none if the GPU has nothing to do.
    pub(super) fn ends_ns(&self) -> Option<u64> {
        let Some(step) = self.step else {
            let ends_ns = self.disk.as_ref().filter(|_| self.outstanding() > 0)?.ends_ns()?;
            // A request waits for a while only. As in a run, that is looked at now and then.
            return Some(ends_ns.min(self.planned_ns.saturating_add(LOOK_NS)));
        };
        let computes = step.each_ns.saturating_mul(step.iterations);
        Some(step.begun_ns.saturating_add(step.moves_ns).saturating_add(computes))
    }

    /// A request arrives. Equal iterations go on up to the one behind that in which it arrives, which is planned already.
    pub(super) fn arrive(&mut self, request: usize, now_ns: u64) {
        self.arrived.push_back(request);
        if let Some(step) = &mut self.step
            && step.each_ns > 0
        {
            let since = now_ns.saturating_sub(step.begun_ns.saturating_add(step.moves_ns));
            step.iterations = step.iterations.min(since / step.each_ns + 2);
        }
    }

    /// Ends the step in progress, and says what came of which request.
    ///
    /// # Errors
    ///
    /// [`PlanError::Manager`], which would be a fault of the simulation.
    pub(super) fn complete(
        &mut self,
        counts: &mut Counts,
        mut tell: impl FnMut(usize, Event),
    ) -> Result<(), PlanError> {
        let (Some(ends_ns), Some(step)) = (self.ends_ns(), self.step.take()) else { return Ok(()) };
        self.planned_ns = ends_ns.saturating_sub(step.each_ns);
        counts.busy_ns += ends_ns - step.begun_ns;
        counts.iterations += step.iterations;
        for job in &mut self.running {
            match std::mem::replace(&mut job.part, Part::Nothing) {
                Part::EndOfPrompt if !std::mem::replace(&mut job.answers, true) => {
                    tell(job.number, Event::FirstToken);
                }
                // An arrival may have ended it sooner than was planned.
                Part::Answer if step.iterations > 1 => {
                    let Some((_, ids)) = job.outcomes.back_mut() else { continue };
                    job.end -= ids.saturating_sub(step.iterations);
                    *ids = step.iterations;
                }
                _ => {}
            }
            if job.end >= job.total {
                tell(job.number, Event::End);
                job.over_in = Some(step.number);
            }
        }
        if step.iterations > 1 {
            // What was open before has long been seen.
            self.release(step.number - 1);
            self.see(step.number)?;
        } else if step.number > 1 {
            self.see(step.number - 1)?;
        }
        self.over.extend(self.running.extract_if(.., |job| job.over_in.is_some()));
        Ok(())
    }

    /// The host sees steps complete up to this one.
    fn see(&mut self, step: u64) -> Result<(), PlanError> {
        let completion = Completion { worker: WorkerId(0), step, outcome: Outcome::Done };
        self.manager.complete(completion).map_err(PlanError::manager)
    }

    /// Gives back the blocks of requests whose last token was in a step up to this one. Nobody asks for an answer again.
    fn release(&mut self, step: u64) {
        let over = |job: &mut Job| job.over_in.is_some_and(|at| at <= step);
        for mut job in self.over.extract_if(.., over) {
            drop(job.sequence.take());
            self.manager.forget(job.names(job.prompt, job.total, self.tokens));
        }
    }

    /// Commits the ids that have come out of steps that the host has seen.
    fn commit(&mut self) -> Result<(), PlanError> {
        let step = self.manager.completed_step();
        for job in &mut self.running {
            while let Some((at, ids)) = job.outcomes.pop_front_if(|(at, _)| *at <= step) {
                let Some(mut sequence) = job.sequence.take() else { break };
                let known = sequence.known();
                let names = job.names(known, known + ids, self.tokens);
                let ids = Tokens::Named { count: ids, names };
                let committed = self.manager.commit(&mut sequence, at, ids);
                job.sequence = Some(sequence);
                committed.map_err(PlanError::manager)?;
            }
        }
        Ok(())
    }

    /// Waits for the device: nothing is open any more.
    fn drain(&mut self, now_ns: u64) -> Result<(), PlanError> {
        if self.staged > 0 {
            self.see(self.staged)?;
            self.release(self.staged);
        }
        self.planned_ns = now_ns;
        Ok(())
    }

    /// Begins the next step at this moment, if there is something to do.
    ///
    /// # Errors
    ///
    /// [`PlanError::Manager`], which would be a fault of the simulation.
    pub(super) fn begin(
        &mut self,
        trace: &Trace,
        rules: &Rules,
        now_ns: u64,
        counts: &mut Counts,
    ) -> Result<(), PlanError> {
        if self.idle {
            self.planned_ns = now_ns;
        }
        self.idle = !self.plan(trace, rules, now_ns, counts)?;
        if self.idle {
            // The host waits for the device, which holds what requests wait for.
            self.drain(now_ns)?;
            self.idle = !self.plan(trace, rules, now_ns, counts)?;
        }
        Ok(())
    }

    /// Has the clock show a time, unless it is later. As in a run, ages are those of arrivals, and with files those of this machine.
    fn show(&mut self, ns: u64) {
        self.clock.advance(Duration::from_nanos(ns.saturating_sub(self.clock_ns)));
        self.clock_ns = self.clock_ns.max(ns);
    }

    fn offloaded(&self) -> u64 {
        self.manager.pool(GroupId(0)).map_or(0, |pool| pool.counters().offloaded)
    }

    /// Plans a step; whether it computes anything.
    fn plan(
        &mut self,
        trace: &Trace,
        rules: &Rules,
        now_ns: u64,
        counts: &mut Counts,
    ) -> Result<bool, PlanError> {
        if self.outstanding() == 0 {
            return Ok(false);
        }
        let before = self.offloaded();
        let loaded = self.manager.lower_stats().loaded_blocks[0];
        if self.disk.is_some() {
            self.show(self.planned_ns);
        }
        if let Some(disk) = &mut self.disk {
            disk.tell(&mut self.manager, self.planned_ns).map_err(PlanError::manager)?;
        }
        counts.disk_reads += self.manager.lower_stats().loaded_blocks[0] - loaded;
        let step = self.manager.begin_step().map_err(PlanError::manager)?;
        self.release(self.staged.saturating_sub(1));
        self.commit()?;
        let mut planned = Planned::default();
        self.advance_running(rules, &mut planned)?;
        self.admit_waiting(trace, rules, &mut planned, counts)?;
        if planned.tokens == 0 {
            if self.manager.has_decided() {
                self.manager.stage(&step, &mut []).map_err(PlanError::manager)?;
                self.begin_transfers(rules, now_ns);
                self.staged = step.number();
            }
            self.manager.finish_step(step).map_err(PlanError::manager)?;
            return Ok(false);
        }
        let iterations = self.alike(&planned)?;
        let generates = self.stage(step, iterations)?;
        let stored = self.offloaded() - before;
        counts.stored += stored;
        // Both ways at once, beside the iteration in which they were planned.
        let moves_ns = rules.load_ns(planned.loaded).max(rules.store_ns(stored));
        let moves_ns = self.planned_ns.saturating_add(moves_ns).saturating_sub(now_ns);
        self.begin_transfers(rules, now_ns.saturating_add(moves_ns));
        let cost = rules.model.of_iteration(planned.prompt_tokens, generates);
        let each_ns = u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
        let number = self.staged;
        self.step = Some(Step { number, begun_ns: now_ns, moves_ns, each_ns, iterations });
        Ok(true)
    }

    /// Begins what the last plan asks of the files.
    fn begin_transfers(&mut self, rules: &Rules, now_ns: u64) {
        if let Some(disk) = &mut self.disk {
            disk.begin(self.manager.last_plan(), rules, now_ns);
        }
    }

    /// Gives every running request its next tokens, within the budget.
    fn advance_running(&mut self, rules: &Rules, planned: &mut Planned) -> Result<(), PlanError> {
        let mut index = 0;
        while index < self.running.len() {
            let left = u64::from(rules.step_tokens) - planned.tokens;
            let job = &mut self.running[index];
            index += 1;
            let Some(sequence) = &mut job.sequence else { continue };
            let wanted = match sequence.to_compute() {
                0 | 1 => 1.min(job.total.saturating_sub(sequence.upper())),
                more => more,
            };
            let wanted = wanted.min(left) as u32;
            if wanted == 0 {
                continue;
            }
            match self.manager.reserve(sequence, wanted) {
                Ok(Room::Given(_)) => job.plan(0, planned),
                Ok(Room::Lacks(_)) => {
                    let pool = self.manager.pool(GroupId(0));
                    let retiring = pool.is_some_and(|pool| pool.stats().primary.retiring > 0);
                    if retiring || !self.over.is_empty() || self.running.len() == 1 {
                        continue;
                    }
                    // It was admitted last, and is computed again later.
                    if let Some(mut last) = self.running.pop() {
                        last.preempt(self.tokens);
                        self.waiting.push_front(last);
                    }
                }
                Err(error) => return Err(PlanError::manager(error)),
            }
        }
        Ok(())
    }

    /// Stages the step; whether it generates.
    fn stage(&mut self, step: OpenStep, iterations: u64) -> Result<bool, PlanError> {
        let number = step.number();
        let mut batch = Vec::with_capacity(self.running.len());
        let mut generates = false;
        for job in self.running.iter_mut().filter(|job| job.part != Part::Nothing) {
            let Some(sequence) = &mut job.sequence else { continue };
            generates |= job.part == Part::Answer;
            if sequence.upper() + u64::from(sequence.next()) >= sequence.known() {
                let ids = if job.part == Part::Answer { iterations } else { 1 };
                job.outcomes.push_back((number, ids));
            }
            batch.push(sequence);
        }
        self.manager.stage(&step, &mut batch).map_err(PlanError::manager)?;
        self.manager.finish_step(step).map_err(PlanError::manager)?;
        self.staged = number;
        Ok(generates)
    }
}

impl Job {
    /// Plans the tokens that were reserved, with `skip` cached tokens before them.
    fn plan(&mut self, skip: u64, planned: &mut Planned) {
        let Some(sequence) = &self.sequence else { return };
        if sequence.resolved() == sequence.upper() {
            self.end = sequence.upper();
        }
        let (start, tokens) = (self.end, u64::from(sequence.next()));
        self.end += tokens;
        planned.tokens += skip + tokens;
        planned.prompt_tokens += self.end.min(self.prompt).saturating_sub(start);
        self.part = match self.end {
            end if end > self.prompt => Part::Answer,
            end if end == self.prompt => Part::EndOfPrompt,
            _ => Part::Prompt,
        };
    }
}
