//! A device thread without device and thread, for the model checker, which provides its own
//! threads.

use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use super::completion::{Completion, Filler, ResultCell, Task, TaskError, quietly};
use super::queue::Queue;
use super::room::Room;

/// The queue of a device thread. The caller of [`work_off`](ModelThread::work_off) runs its tasks.
#[derive(Clone)]
pub struct ModelThread(Arc<Queue<()>>);

impl ModelThread {
    /// Creates a queue with room for that many tasks.
    pub fn new(tasks_max: usize) -> Self {
        Self(Arc::new(Queue::new(tasks_max)))
    }

    /// Like `DeviceThread::submit`. A refused task is returned.
    ///
    /// # Errors
    /// The task.
    pub fn submit<T, F>(&self, task: F) -> Result<Completion<T>, F>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let cell = Arc::new(ResultCell::new());
        let filler = Filler::new(&cell);
        let boxed = |task: F| {
            let work = Task::new(task, filler);
            Box::new(move |(): &()| work.run(|task| Ok(task()))) as super::queue::Work<()>
        };
        let id = self.0.push(task, boxed).map_err(|(_, task)| task)?;
        let queue = Arc::clone(&self.0);
        Ok(Completion::new(cell, queue, id, Arc::new(OnceLock::new())))
    }

    /// Runs tasks until the queue is closed and empty.
    pub fn work_off(&self) {
        self.0.work_off(&(), |work, context| quietly(|| work(context)));
    }

    /// Like dropping a `DeviceThread`.
    pub fn close(&self) {
        self.0.close();
    }

    /// Like `DeviceThread::close`, without the thread.
    pub fn close_and_wait(&self) {
        self.0.close();
        self.0.wait_finished();
    }

    /// Like `DeviceThread::cancel_waiting`.
    pub fn cancel_waiting(&self) -> usize {
        let tasks = self.0.take_all();
        let count = tasks.len();
        drop(tasks);
        count
    }

    /// Like `DeviceThread::room`.
    pub fn room(&self) -> Room<'_, ()> {
        Room::new(&self.0)
    }

    /// Number of waiting tasks.
    pub fn waiting(&self) -> usize {
        self.0.len()
    }
}

/// Polls a completion like its future does, but with a known mistake, for the test in which loom
/// finds it.
pub fn poll_in_two_steps<T>(
    completion: &Completion<T>,
    context: &Context<'_>,
) -> Poll<Result<T, TaskError>> {
    match completion.cell() {
        Some(cell) => cell.poll_in_two_steps(context.waker()),
        None => Poll::Ready(Err(TaskError::Taken)),
    }
}
