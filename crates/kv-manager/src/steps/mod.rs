//! The steps of a manager: which is open, which are in flight, how far the workers have come, and
//! which sequences a failure or a loss concerns.

mod eras;
mod open;
mod workers;

use std::collections::VecDeque;

use kv_pool::{BlockHash, guard};

pub(crate) use eras::Era;
pub use open::OpenStep;
pub use workers::WorkerId;

use crate::budget::Reach;
use crate::pace::Pulse;
use crate::plan::StepPlan;
use crate::{Completion, CompletionError, SequenceError, StepError};
use eras::{Eras, Failures};
use open::Latest;
use workers::Workers;

/// Names that a step makes true, each with its group.
pub(crate) type StepNames = Vec<(usize, BlockHash)>;

/// A staged step that is not complete.
#[derive(Debug)]
struct InFlight {
    step: u64,
    /// The latest step whose epochs end with it: itself, or one behind it without a plan.
    ends: u64,
    names: StepNames,
    reach: Reach,
    tokens: u64,
    /// A worker has said so, of this step or of one before it.
    failed: bool,
}

/// A step that all workers have completed.
#[derive(Debug)]
pub(crate) struct Completed {
    /// The latest step whose epochs end with it.
    pub(crate) ends: u64,
    /// What it has made true.
    pub(crate) names: StepNames,
    /// Tokens that it has computed.
    pub(crate) tokens: u64,
}

/// Where the epoch of a step without a plan ends.
#[derive(Debug)]
pub(crate) enum EpochEnd {
    /// With this step, which is in flight.
    With(u64),
    /// At once: it is this step's, and nothing is in flight.
    Now(u64),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Steps {
    latest: Latest,
    latest_staged: u64,
    completed: u64,
    in_flight: VecDeque<InFlight>,
    in_flight_max: usize,
    /// Empty lists of names, kept for their memory.
    spare_names: Vec<StepNames>,
    workers: Workers,
    eras: Eras,
    failures: Failures,
    /// The number of the sequence that comes next.
    next_number: u64,
    /// Sequences below this number are lost, with this worker.
    lost: Option<(u64, WorkerId)>,
    /// Another one with whatever concerns all sequences.
    pulse: Pulse,
}

impl Steps {
    pub(crate) fn new(workers: u16, in_flight_max: u32) -> Self {
        Self {
            latest: Latest::default(),
            latest_staged: 0,
            completed: 0,
            in_flight: VecDeque::with_capacity(in_flight_max.min(64) as usize),
            in_flight_max: in_flight_max as usize,
            spare_names: Vec::new(),
            workers: Workers::new(workers),
            eras: Eras::default(),
            failures: Failures::default(),
            next_number: 0,
            lost: None,
            pulse: Pulse::draw(),
        }
    }

    /// The latest step that has a plan; 0 for none.
    pub(crate) fn latest_staged(&self) -> u64 {
        self.latest_staged
    }

    /// The latest step that all workers have completed; 0 for none.
    #[inline]
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    pub(crate) fn failures(&self) -> &Failures {
        &self.failures
    }

    #[inline]
    pub(crate) fn pulse(&self) -> Pulse {
        self.pulse
    }

    /// Ends the pace of every sequence.
    pub(crate) fn end_paces(&mut self) {
        guard!("manager.failures-end-all-paces", self.pulse = Pulse::draw());
    }

    /// Begins a step, of which the one before is over.
    pub(crate) fn begin(&mut self) -> Result<OpenStep, StepError> {
        let in_flight = self.in_flight.len();
        match self.in_flight.front() {
            Some(oldest) if in_flight >= self.in_flight_max => {
                Err(StepError::Busy { in_flight, oldest: oldest.step })
            }
            _ => Ok(self.latest.begin_next()),
        }
    }

    pub(crate) fn check_left(&self) -> Result<(), StepError> {
        match self.latest.open() {
            Some(_) => Err(StepError::StillOpen { step: self.latest.number() }),
            None => Ok(()),
        }
    }

    /// Whether `step` was begun here.
    pub(crate) fn began(&self, step: &OpenStep) -> bool {
        self.latest.is_of(step)
    }

    /// Whether `step` is the open one: then, whether it is staged.
    pub(crate) fn open(&self, step: &OpenStep) -> Option<bool> {
        let is_latest = self.began(step) && step.number() == self.latest.number();
        self.latest.open().filter(|_| is_latest)
    }

    /// Takes in that the holder of a step has left it; of one without a plan, where its epoch ends.
    /// No worker is told of it. What was decided in it is in the next plan, before every later use
    /// of the blocks that it concerns.
    pub(crate) fn take_left(&mut self) -> Option<EpochEnd> {
        let is_staged = self.latest.take_left()?;
        let step = self.latest.number();
        (!is_staged).then(|| match self.in_flight.back_mut() {
            Some(last) => {
                last.ends = step;
                EpochEnd::With(last.step)
            }
            None => EpochEnd::Now(step),
        })
    }

    /// The open step has this plan, which computes so many tokens and makes these names true.
    pub(crate) fn stage(&mut self, plan: &StepPlan, tokens: u64, names: StepNames) {
        let (step, reach) = (plan.step, Reach::of(plan));
        self.latest.stage();
        self.latest_staged = step;
        self.in_flight.push_back(InFlight {
            step,
            ends: step,
            names,
            reach,
            tokens,
            failed: false,
        });
    }

    /// What the plans use that are not complete, in their order.
    pub(crate) fn reaches(&self) -> impl Iterator<Item = &Reach> {
        self.in_flight.iter().map(|staged| &staged.reach)
    }

    /// The first step from `step` on that is not complete.
    pub(crate) fn in_flight_from(&self, step: u64) -> Option<u64> {
        self.in_flight.iter().map(|staged| staged.step).find(|&staged| staged >= step)
    }

    /// Takes the names that a step in flight makes true, to be added to and
    /// [kept](Self::keep_names); without a step, none.
    pub(crate) fn take_names(&mut self, step: Option<u64>) -> StepNames {
        match self.names_of(step) {
            Some(names) => std::mem::take(names),
            None => self.spare_names.pop().unwrap_or_default(),
        }
    }

    /// Keeps the names that a step makes true; without a step, their memory.
    pub(crate) fn keep_names(&mut self, step: Option<u64>, mut names: StepNames) {
        match self.names_of(step) {
            Some(kept) => *kept = names,
            None => {
                names.clear();
                self.spare_names.push(names);
            }
        }
    }

    fn names_of(&mut self, step: Option<u64>) -> Option<&mut StepNames> {
        let step = step?;
        self.in_flight.iter_mut().find(|staged| staged.step == step).map(|staged| &mut staged.names)
    }

    /// Whether a completion says something new.
    pub(crate) fn is_news(&self, completion: &Completion) -> Result<bool, CompletionError> {
        let &Completion { worker, step, .. } = completion;
        let (completed, latest) = (self.workers.completed(worker)?, self.latest_staged);
        if step > latest {
            return Err(CompletionError::NotStaged { step, latest });
        }
        Ok(guard!("manager.outcomes-count-once", step > completed, else true))
    }

    pub(crate) fn complete(&mut self, worker: WorkerId, step: u64) -> Result<(), CompletionError> {
        self.workers.complete(worker, step)
    }

    /// The next step that is complete, of those in flight.
    pub(crate) fn pop_completed(&mut self) -> Option<Completed> {
        // With no worker left, nobody uses what the plans were about.
        let completed = self.workers.completed_by_all().unwrap_or(self.latest_staged);
        let InFlight { step, ends, names, tokens, .. } =
            self.in_flight.pop_front_if(|oldest| oldest.step <= completed)?;
        self.completed = step;
        Some(Completed { ends, names, tokens })
    }

    /// Notes that a step has failed, and those after it, which may have read its KV. Withdraws what
    /// they have named; how many failures are new.
    pub(crate) fn fail(&mut self, step: u64, mut withdraw: impl FnMut(usize, BlockHash)) -> u64 {
        let (mut count, mut era) = (0, None);
        let last = guard!("manager.a-failure-voids-later-steps", u64::MAX, else step);
        for staged in &mut self.in_flight {
            // Another worker may have said so before.
            let is_void = (step..=last).contains(&staged.step);
            if !is_void || std::mem::replace(&mut staged.failed, true) {
                continue;
            }
            let next = self.next_number;
            let oldest = *era.get_or_insert_with(|| self.eras.begin(next));
            self.failures.note(staged.step, next, oldest);
            count += 1;
            staged.names.drain(..).for_each(|(group, name)| withdraw(group, name));
        }
        self.end_paces();
        count
    }

    pub(crate) fn lose(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        self.workers.lose(worker)
    }

    pub(crate) fn fence(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        self.workers.fence(worker)
    }

    pub(crate) fn join(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        self.workers.join(worker, self.latest_staged)
    }

    /// Loses all sequences, of which `worker` has no share; the number from which on sequences are not lost.
    pub(crate) fn lose_sequences(&mut self, worker: WorkerId) -> u64 {
        self.lost = Some((self.next_number, worker));
        self.end_paces();
        self.next_number
    }

    /// Checks that the sequence of this number is not lost.
    pub(crate) fn check_kept(&self, number: u64) -> Result<(), SequenceError> {
        let lost = self.lost.filter(|&(below, _)| {
            guard!("manager.sequences-of-a-loss-are-lost", number < below, else false)
        });
        lost.map_or(Ok(()), |(_, worker)| Err(SequenceError::Lost { worker }))
    }

    /// The number of a sequence that is new.
    pub(crate) fn number_sequence(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// The era of sequences that are admitted now.
    pub(crate) fn era(&self) -> Era {
        self.eras.present()
    }

    /// Begins an era: the number of its first sequence, and the one from which on there are
    /// sequences of before.
    pub(crate) fn begin_era(&mut self) -> (u64, u64) {
        (self.next_number, self.eras.begin(self.next_number))
    }
}
