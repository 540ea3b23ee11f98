//! How far each worker has come.

use kv_pool::guard;

use crate::CompletionError;

/// A worker, counted from 0.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct WorkerId(pub u16);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Worker {
    /// It carries out plans, and has completed all up to this step.
    Runs(u64),
    /// It is lost, and may still be writing: steps after this one stay incomplete.
    Lost(u64),
    /// It is lost and writes nothing any more.
    Fenced,
}

/// All workers, each in its state.
#[derive(Debug)]
pub(crate) struct Workers(Vec<Worker>);

impl Workers {
    pub(super) fn new(count: u16) -> Self {
        Self(vec![Worker::Runs(0); count.into()])
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether a worker is lost that may still be writing.
    pub(crate) fn has_unfenced_loss(&self) -> bool {
        self.0.iter().any(|state| matches!(state, Worker::Lost(_)))
    }

    pub(crate) fn unfenced(&self) -> impl Iterator<Item = WorkerId> {
        let all = self.0.iter().zip(0..);
        all.filter(|(state, _)| **state != Worker::Fenced).map(|(_, id)| WorkerId(id))
    }

    /// The latest step that a worker has completed, which carries out plans.
    pub(crate) fn completed(&self, worker: WorkerId) -> Result<u64, CompletionError> {
        let (at, workers) = (usize::from(worker.0), self.count());
        match self.0.get(at).ok_or(CompletionError::NoWorker { worker, workers })? {
            Worker::Runs(completed) => Ok(*completed),
            Worker::Lost(_) | Worker::Fenced => Err(CompletionError::Lost { worker }),
        }
    }

    /// The latest step that all workers have completed; `None` if none is left.
    pub(super) fn completed_by_all(&self) -> Option<u64> {
        let completed = self.0.iter().filter_map(|state| match state {
            Worker::Runs(completed) => Some(*completed),
            Worker::Lost(completed) => {
                guard!("manager.the-lost-are-waited-for", Some(*completed), else None)
            }
            Worker::Fenced => None,
        });
        completed.min()
    }

    pub(super) fn complete(&mut self, worker: WorkerId, step: u64) -> Result<(), CompletionError> {
        self.completed(worker)?;
        *self.state(worker)? = Worker::Runs(step);
        Ok(())
    }

    pub(super) fn lose(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        *self.state(worker)? = Worker::Lost(self.completed(worker)?);
        Ok(())
    }

    pub(super) fn fence(&mut self, worker: WorkerId) -> Result<(), CompletionError> {
        match self.state(worker)? {
            state @ Worker::Lost(_) => *state = Worker::Fenced,
            Worker::Runs(_) | Worker::Fenced => return Err(CompletionError::NotLost { worker }),
        }
        Ok(())
    }

    /// Has another one take the place of a worker that is fenced; it begins behind step `latest`.
    pub(super) fn join(&mut self, worker: WorkerId, latest: u64) -> Result<(), CompletionError> {
        match self.state(worker)? {
            state @ Worker::Fenced => *state = Worker::Runs(latest),
            Worker::Runs(_) | Worker::Lost(_) => return Err(CompletionError::NotLost { worker }),
        }
        Ok(())
    }

    fn state(&mut self, worker: WorkerId) -> Result<&mut Worker, CompletionError> {
        let workers = self.count();
        let state = self.0.get_mut(usize::from(worker.0));
        state.ok_or(CompletionError::NoWorker { worker, workers })
    }
}
