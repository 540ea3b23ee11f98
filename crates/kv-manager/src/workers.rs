//! The workers: how far each has come, and what the loss of one means.

use crate::{Completion, CompletionError, Manager, Outcome};
use kv_pool::guard;

/// A worker, counted from 0.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct WorkerId(pub u16);

/// How far a worker has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Worker {
    /// It carries out plans, and has completed all up to this step.
    Runs(u64),
    /// It is lost, and may still be writing: steps after this one stay incomplete.
    Lost(u64),
    /// It is lost and writes nothing any more.
    Fenced,
}

impl Manager {
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
        let Completion { worker, step, outcome } = completion;
        let latest = self.latest_staged;
        let completed = match *self.worker(worker)? {
            Worker::Runs(completed) => completed,
            Worker::Lost(_) | Worker::Fenced => return Err(CompletionError::Lost { worker }),
        };
        if step > latest {
            return Err(CompletionError::NotStaged { step, latest });
        }
        if guard!("manager.outcomes-count-once", step <= completed, else false) {
            return Ok(());
        }
        if outcome == Outcome::Failed {
            self.fail(step);
        }
        guard!("manager.unsettled-loads-are-wrong", self.end_unsettled(worker, step));
        *self.worker(worker)? = Worker::Runs(step);
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
    pub fn lose_worker(&mut self, worker: crate::WorkerId) -> Result<(), CompletionError> {
        match *self.worker(worker)? {
            Worker::Runs(completed) => *self.worker(worker)? = Worker::Lost(completed),
            Worker::Lost(_) | Worker::Fenced => return Err(CompletionError::Lost { worker }),
        }
        self.lose_all(worker);
        Ok(())
    }

    /// Says that a lost worker writes nothing any more: its process has ended, or its devices are idle.
    /// It is not waited for any longer.
    ///
    /// # Errors
    /// [`CompletionError::NoWorker`], and [`CompletionError::NotLost`].
    pub fn fence_worker(&mut self, worker: crate::WorkerId) -> Result<(), CompletionError> {
        match *self.worker(worker)? {
            Worker::Lost(_) => *self.worker(worker)? = Worker::Fenced,
            Worker::Runs(_) | Worker::Fenced => return Err(CompletionError::NotLost { worker }),
        }
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
    pub fn join_worker(&mut self, worker: crate::WorkerId) -> Result<(), CompletionError> {
        let latest = self.latest_staged;
        match self.worker(worker)? {
            state @ Worker::Fenced => *state = Worker::Runs(latest),
            Worker::Runs(_) | Worker::Lost(_) => return Err(CompletionError::NotLost { worker }),
        }
        guard!("manager.a-joiner-has-no-share", self.lose_all(worker));
        self.advance();
        Ok(())
    }

    /// Gives up all that was computed so far, of which `worker` has no share.
    fn lose_all(&mut self, worker: crate::WorkerId) {
        self.lost = Some((self.next_number, worker));
        self.end_paces();
        self.home.void_below(self.next_number);
        if let Some(share) = self.shared_host() {
            // Before names are given up, and before steps count as complete that nobody carries out.
            guard!("manager.a-loss-ends-the-share", share.end());
        }
        guard!("manager.a-loss-forgets", self.forget_all());
        guard!("manager.a-loss-forgets-below", self.forget_all_below());
        // A worker that joins anew has none of the loads.
        self.plan.layer_loads.clear();
    }

    fn worker(&mut self, worker: crate::WorkerId) -> Result<&mut Worker, CompletionError> {
        let workers = self.workers.len();
        let state = self.workers.get_mut(usize::from(worker.0));
        state.ok_or(CompletionError::NoWorker { worker, workers })
    }

    /// The latest step that all workers have completed.
    pub(crate) fn completed_by_all(&self) -> u64 {
        let completed = self.workers.iter().filter_map(|worker| match worker {
            Worker::Runs(completed) => Some(*completed),
            Worker::Lost(completed) => {
                guard!("manager.the-lost-are-waited-for", Some(*completed), else None)
            }
            Worker::Fenced => None,
        });
        // With no worker left, nobody uses what the plans were about.
        completed.min().unwrap_or(self.latest_staged)
    }
}
