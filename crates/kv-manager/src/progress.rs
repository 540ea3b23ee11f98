//! Beginning, finishing and completing steps, and the loss of workers.

use kv_pool::guard;

use crate::steps::EpochEnd;
use crate::{Completion, CompletionError, Manager, OpenStep, Outcome, StepError, WorkerId};

impl Manager {
    /// Begins a step.
    ///
    /// # Errors
    /// [`StepError::StillOpen`] before the last step was finished or dropped; [`StepError::Busy`] while as
    /// many steps are in flight as may be.
    pub fn begin_step(&mut self) -> Result<OpenStep, StepError> {
        self.steps.check_left()?;
        self.end_dropped_step();
        let step = self.steps.begin().inspect_err(|_| self.stats.stalls.busy += 1)?;
        // The pool's clock advances once a step, and expired priorities end.
        for group in self.groups.iter_mut() {
            let now = group.pool.tick();
            group.pool.refresh();
            self.lower.tick(now);
            group.begin_epoch(step.number());
        }
        self.free_left();
        Ok(step)
    }

    /// Ends a step.
    ///
    /// # Errors
    /// [`StepError::Foreign`] for a step of another manager, which is dropped.
    pub fn finish_step(&mut self, step: OpenStep) -> Result<(), StepError> {
        if !self.steps.began(&step) {
            return Err(StepError::Foreign { step: step.number() });
        }
        drop(step);
        self.end_dropped_step();
        Ok(())
    }

    /// Takes in that the last step was dropped, if it was and no step has begun since: blocks that were
    /// released in it can be claimed when the steps before it are complete.
    pub fn end_dropped_step(&mut self) {
        match self.steps.take_left() {
            Some(EpochEnd::With(last)) => {
                self.groups.iter_mut().for_each(|group| group.join_epochs(last));
            }
            Some(EpochEnd::Now(step)) => self.end_epochs(step),
            None => {}
        }
    }

    /// Whether a step was begun and neither finished nor dropped.
    #[must_use]
    pub fn has_open_step(&self) -> bool {
        self.steps.check_left().is_err()
    }

    /// Whether `step` is open here, and was not staged yet.
    #[must_use]
    pub fn is_unstaged(&self, step: &OpenStep) -> bool {
        self.steps.open(step) == Some(false)
    }

    /// The latest step that all workers have completed; 0 for none.
    #[must_use]
    pub fn completed_step(&self) -> u64 {
        self.steps.completed()
    }

    /// Takes in which steps are complete.
    pub(crate) fn advance(&mut self) {
        while let Some(step) = self.steps.pop_completed() {
            self.lower.note_computed(step.tokens);
            self.lower.want_stored(&step.names);
            self.steps.keep_names(None, step.names);
            self.end_epochs(step.ends);
        }
        let completed = self.steps.completed();
        self.lower.note_completed(completed);
        if let Some(share) = self.groups.share() {
            share.complete(completed);
        }
        if let Some(mut feed) = self.home.feed() {
            feed.complete(completed);
        }
    }

    /// Ends the epochs of all steps up to this one.
    fn end_epochs(&mut self, step: u64) {
        self.groups.iter_mut().for_each(|group| group.end_epochs(step));
    }

    /// Takes in what a worker says of a step. A step is complete when every worker has completed it;
    /// blocks that were released during it can then be claimed.
    ///
    /// What is known already changes nothing. Of a step that failed at any worker, the names are
    /// withdrawn, with those of all content that follows. The sequences concerned are told by their next
    /// call ([`SequenceError::Redo`](crate::SequenceError::Redo)).
    ///
    /// # Errors
    /// [`CompletionError`]; nothing was taken in.
    pub fn complete(&mut self, completion: Completion) -> Result<(), CompletionError> {
        if !self.steps.is_news(&completion)? {
            return Ok(());
        }
        let Completion { worker, step, outcome } = completion;
        if outcome == Outcome::Failed {
            let (groups, stats) = (&self.groups, &mut self.stats);
            stats.failed_steps += self.steps.fail(step, |group, name| {
                guard!("manager.a-failure-withdraws-names", {
                    groups[group].pool.remove_with_successors(name);
                });
            });
        }
        guard!("manager.unsettled-loads-are-wrong", self.lower.end_unsettled(worker, step));
        self.steps.complete(worker, step)?;
        self.advance();
        Ok(())
    }

    /// Gives up a worker that does not answer, or whose process has ended. All sequences are lost, since
    /// it holds a share of each, and all cached content is forgotten.
    ///
    /// Its blocks are not handed out again before it is [fenced](Self::fence_worker).
    ///
    /// # Errors
    /// [`CompletionError::NoWorker`], and [`CompletionError::Lost`] for a worker that is lost already.
    pub fn lose_worker(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        self.steps.lose(worker)?;
        self.lose_all(worker);
        Ok(())
    }

    /// Says that a lost worker writes nothing any more: its process has ended, or its devices are idle.
    /// It is not waited for any longer.
    ///
    /// # Errors
    /// [`CompletionError::NoWorker`], and [`CompletionError::NotLost`].
    pub fn fence_worker(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        self.steps.fence(worker)?;
        guard!("manager.a-fence-ends-tickets", self.fence_tickets(worker));
        self.advance();
        Ok(())
    }

    /// Counts a worker that takes the place of a fenced one. It begins with a
    /// [snapshot](Manager::snapshot), which is taken before the next step is staged, and carries out the
    /// plans after it. Sequences that were admitted without it are lost, and what they have cached is
    /// forgotten: it has no share of them.
    ///
    /// # Errors
    /// [`CompletionError::NoWorker`], and [`CompletionError::NotLost`] for one that is not fenced.
    pub fn join_worker(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        self.steps.join(worker)?;
        guard!("manager.a-joiner-has-no-share", self.lose_all(worker));
        self.advance();
        Ok(())
    }

    /// Gives up all that was computed so far, of which `worker` has no share.
    fn lose_all(&mut self, worker: WorkerId) {
        let below = self.steps.lose_sequences(worker);
        self.home.void_below(below);
        if let Some(share) = self.groups.share() {
            // Before names are given up, and before steps count as complete that nobody carries out.
            guard!("manager.a-loss-ends-the-share", share.end());
        }
        guard!("manager.a-loss-forgets", self.forget_all());
        guard!("manager.a-loss-forgets-below", self.forget_all_below());
        self.plan.drop_all_loads();
    }
}
