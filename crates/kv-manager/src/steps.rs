//! Beginning, finishing and completing steps.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::manager::InFlight;
use crate::{Manager, StepError};
use kv_pool::guard;

/// A step that is being put together, from [`Manager::begin_step`] to [`Manager::finish_step`].
///
/// Dropping it, as an early return does, counts as finishing it: what it staged may have been carried
/// out. No call takes a step back, because such a claim could not be checked.
#[derive(Debug)]
#[must_use = "finish the step when its work is enqueued"]
pub struct OpenStep {
    number: u64,
    latest: Arc<Mutex<Latest>>,
}

/// The state of a manager's latest step, shared with the holder of the step.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Latest {
    /// There was none yet, or it is over and has been taken in.
    #[default]
    Over,
    Open {
        staged: bool,
    },
    /// Its holder has finished or dropped it.
    Left {
        staged: bool,
    },
}

impl OpenStep {
    /// The step's number; the first is 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OpenStep {
    fn drop(&mut self) {
        let mut latest = self.latest.lock();
        if let Latest::Open { staged } = *latest {
            *latest = Latest::Left { staged };
        }
    }
}

impl Manager {
    /// Begins a step.
    ///
    /// # Errors
    /// [`StepError::StillOpen`] before the last step was finished or dropped; [`StepError::Busy`] while as
    /// many steps are in flight as may be.
    pub fn begin_step(&mut self) -> Result<OpenStep, StepError> {
        if self.has_open_step() {
            return Err(StepError::StillOpen { step: self.latest_step });
        }
        self.take_in_left();
        let in_flight = self.in_flight.len();
        if let Some(oldest) = self.in_flight.front()
            && in_flight >= self.options.steps_in_flight_max as usize
        {
            let oldest = oldest.step;
            return Err(self.busy(in_flight, oldest));
        }
        // The pool's clock advances once a step, and expired priorities end.
        self.latest_step += 1;
        for group in &mut self.groups {
            let now = group.pool.tick();
            group.pool.refresh();
            self.lower.tick(now);
            group.begin_epoch(self.latest_step);
        }
        self.free_left();
        *self.latest.lock() = Latest::Open { staged: false };
        Ok(OpenStep { number: self.latest_step, latest: Arc::clone(&self.latest) })
    }

    /// Ends a step.
    ///
    /// # Errors
    /// [`StepError::Foreign`] for a step of another manager, which is dropped.
    pub fn finish_step(&mut self, step: OpenStep) -> Result<(), StepError> {
        if !Arc::ptr_eq(&step.latest, &self.latest) {
            return Err(StepError::Foreign { step: step.number });
        }
        drop(step);
        self.take_in_left();
        Ok(())
    }

    /// Takes in that the last step was dropped, if it was and no step has begun since: blocks that were
    /// released in it can be claimed when the steps before it are complete.
    pub fn end_dropped_step(&mut self) {
        self.take_in_left();
    }

    /// Whether a step was begun and neither finished nor dropped.
    #[must_use]
    pub fn has_open_step(&self) -> bool {
        matches!(*self.latest.lock(), Latest::Open { .. })
    }

    /// Whether `step` is open here, and was not staged yet.
    #[must_use]
    pub fn is_unstaged(&self, step: &OpenStep) -> bool {
        self.open(step) == Some(false)
    }

    /// Whether `step` is this manager's open step: then, whether it is staged.
    pub(crate) fn open(&self, step: &OpenStep) -> Option<bool> {
        let own = Arc::ptr_eq(&step.latest, &self.latest) && step.number == self.latest_step;
        match *self.latest.lock() {
            Latest::Open { staged } if own => Some(staged),
            _ => None,
        }
    }

    /// Ends the epoch of a step that its holder has left.
    fn take_in_left(&mut self) {
        let mut latest = self.latest.lock();
        let Latest::Left { staged } = *latest else { return };
        *latest = Latest::Over;
        drop(latest);
        if staged {
            return;
        }
        // No worker is told of a step without a plan: its epoch ends with the last plan. What was decided in
        // it is in the next plan, before every later use of the blocks that it concerns.
        match self.in_flight.back_mut() {
            Some(last) => {
                last.ends = self.latest_step;
                self.groups.iter_mut().for_each(|group| group.join_epochs(last.step));
            }
            None => self.end_epochs(self.latest_step),
        }
    }

    /// Takes in which steps are complete.
    pub(crate) fn advance(&mut self) {
        let completed = self.completed_by_all();
        while self.in_flight.front().is_some_and(|oldest| oldest.step <= completed) {
            let Some(InFlight { step, ends, mut names, tokens, .. }) = self.in_flight.pop_front()
            else {
                break;
            };
            self.completed = step;
            self.lower.note_computed(tokens);
            self.want_stored(&names);
            names.clear();
            self.spare_names.push(names);
            self.end_epochs(ends);
        }
        self.lower.note_completed(self.completed);
        if let Some(share) = self.shared_host() {
            share.complete(self.completed);
        }
        if let Some(mut feed) = self.home.feed() {
            feed.completed = self.completed;
        }
    }

    /// Withdraws what a failed step has named, and those after it, which may have read its KV.
    pub(crate) fn fail(&mut self, step: u64) {
        let (next, mut oldest) = (self.next_number, None);
        let last = guard!("manager.a-failure-voids-later-steps", u64::MAX, else step);
        for staged in
            self.in_flight.iter_mut().filter(|staged| (step..=last).contains(&staged.step))
        {
            // Another worker may have said so before.
            if std::mem::replace(&mut staged.failed, true) {
                continue;
            }
            let oldest = *oldest.get_or_insert_with(|| self.eras.begin(next));
            self.failures.note(staged.step, next, oldest);
            self.stats.failed_steps += 1;
            for (group, name) in staged.names.drain(..) {
                guard!("manager.a-failure-withdraws-names", {
                    self.groups[group].pool.remove_with_successors(name);
                });
            }
        }
        self.end_paces();
    }

    /// Ends the epochs of all steps up to this one.
    fn end_epochs(&mut self, step: u64) {
        self.groups.iter_mut().for_each(|group| group.end_epochs(step));
    }
}
