//! The result of a task: a future of any runtime, which a thread can also wait for.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;

use cuda_driver::{DeviceError, DriverError};

use super::queue::Cancel;
use super::waits::{Awaited, Waiting};
use crate::sync::{Condvar, Mutex, lock, wait};

/// The reason why a task has no result, or its thread was not closed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// The task panicked. The thread continues with the next one.
    #[error("the task panicked: {message}")]
    Panicked {
        /// The panic message, if it is text.
        message: String,
    },
    /// The task was cancelled before it began.
    #[error("the task was cancelled before it began")]
    Cancelled,
    /// The device was lost before the task began; it was not run.
    #[error("the device is lost: {first}")]
    Lost {
        /// The error that lost it.
        first: DriverError,
    },
    /// The device's context could not be bound; the task was not run.
    #[error("the device's context could not be bound")]
    Device(#[source] DeviceError),
    /// A task waited on its own thread for a later task, or on another device's thread whose task waits for this
    /// thread: the later task would never have begun. It will run, and its result is dropped.
    #[error(
        "a task of a device's thread cannot wait for another one of the same thread, or of one that waits for it"
    )]
    WaitsForItself,
    /// A task of the thread asked for it, or one of a device's thread for which a task of this thread waits: it would
    /// wait for itself. Nothing has changed.
    #[error(
        "a task of a device's thread cannot wait for the end of its thread, or of one that waits for it"
    )]
    FromItsOwnTask,
    /// The result was taken before: a ready future returns it once.
    #[error("the result was taken before")]
    Taken,
}

cuda_driver::messages::one_line_debug!(TaskError);

/// The result of one task, passed from the worker to one receiver.
pub(crate) struct ResultCell<T> {
    state: Mutex<ResultState<T>>,
    done: Condvar,
}

enum ResultState<T> {
    /// Not done; holds the waker of the receiver.
    Pending(Option<Waker>),
    Done(Result<T, TaskError>),
    /// The receiver has the result.
    Taken,
    /// The receiver was dropped.
    Abandoned,
}

impl<T> ResultCell<T> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(ResultState::Pending(None)), done: Condvar::new() }
    }

    /// Stores the result and wakes the receiver. Results, wakers and their destructors are foreign
    /// code: none of it runs under the lock, and no panic leaves this function.
    fn fill(&self, result: Result<T, TaskError>) {
        let mut state = lock(&self.state);
        let before = match *state {
            ResultState::Pending(_) => std::mem::replace(&mut *state, ResultState::Done(result)),
            _ => ResultState::Done(result),
        };
        drop(state);
        self.done.notify_all();
        quietly(|| match before {
            ResultState::Pending(Some(waker)) => waker.wake(),
            other => drop(other),
        });
    }

    fn take(&self) -> Option<Result<T, TaskError>> {
        take(&mut lock(&self.state))
    }

    /// Returns the result, or registers `waker`.
    fn poll(&self, waker: &Waker) -> Poll<Result<T, TaskError>> {
        let waker = waker.clone();
        let mut state = lock(&self.state);
        if let Some(result) = take(&mut state) {
            drop(state);
            return Poll::Ready(result);
        }
        let before = std::mem::replace(&mut *state, ResultState::Pending(Some(waker)));
        drop(state);
        drop(before);
        Poll::Pending
    }

    /// Like [`poll`](ResultCell::poll), with a mistake that loses a wake-up: it checks first, and
    /// registers later in a second step.
    #[cfg(loom)]
    pub(crate) fn poll_in_two_steps(&self, waker: &Waker) -> Poll<Result<T, TaskError>> {
        if let Some(result) = self.take() {
            return Poll::Ready(result);
        }
        let mut state = lock(&self.state);
        if let ResultState::Pending(kept) = &mut *state {
            *kept = Some(waker.clone());
        }
        Poll::Pending
    }

    /// Waits for the result.
    pub(crate) fn wait(&self) -> Result<T, TaskError> {
        let mut state = lock(&self.state);
        loop {
            if let Some(result) = take(&mut state) {
                return result;
            }
            state = wait(&self.done, state);
        }
    }

    /// Drops the receiver's part, and a result that is already stored.
    fn abandon(&self) {
        let before = std::mem::replace(&mut *lock(&self.state), ResultState::Abandoned);
        drop(before);
    }

    fn is_done(&self) -> bool {
        !matches!(*lock(&self.state), ResultState::Pending(_))
    }
}

impl<T: Send> Awaited for ResultCell<T> {
    fn is_over(&self) -> bool {
        self.is_done()
    }
}

/// The result, unless it is not there yet.
fn take<T>(state: &mut ResultState<T>) -> Option<Result<T, TaskError>> {
    match state {
        ResultState::Pending(_) => None,
        ResultState::Done(_) => match std::mem::replace(state, ResultState::Taken) {
            ResultState::Done(result) => Some(result),
            _ => None,
        },
        ResultState::Taken | ResultState::Abandoned => Some(Err(TaskError::Taken)),
    }
}

/// The worker's end of a cell. It is filled exactly once: by a result, or by
/// [`TaskError::Cancelled`] if the task is dropped before it has begun.
pub(crate) struct Filler<T>(Option<Arc<ResultCell<T>>>);

impl<T> Filler<T> {
    pub(crate) fn new(cell: &Arc<ResultCell<T>>) -> Self {
        Self(Some(Arc::clone(cell)))
    }

    pub(crate) fn fill(mut self, result: Result<T, TaskError>) {
        if let Some(cell) = self.0.take() {
            cell.fill(result);
        }
    }
}

impl<T> Drop for Filler<T> {
    fn drop(&mut self) {
        if let Some(cell) = self.0.take() {
            cell.fill(Err(TaskError::Cancelled));
        }
    }
}

/// A task and the end of its cell. Dropped in this order: who is told that the task was cancelled finds its captured
/// values gone.
pub(crate) struct Task<F, T> {
    task: F,
    filler: Filler<T>,
}

impl<F, T> Task<F, T> {
    pub(crate) fn new(task: F, filler: Filler<T>) -> Self {
        Self { task, filler }
    }

    pub(crate) fn run(self, run: impl FnOnce(F) -> Result<T, TaskError>) {
        let Self { task, filler } = self;
        filler.fill(run(task));
    }
}

/// Runs foreign code (results, wakers, destructors) and catches its panics.
pub(crate) fn quietly(code: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(code)) {
        // The payload is leaked, because its destructor could panic as well.
        tracing::warn!(message = message_of(&*payload), "a destructor or waker panicked");
        std::mem::forget(payload);
    }
}

/// The message of a panic, if it is text.
pub(crate) fn message_of(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text in the panic")
}

/// The result of a task that was submitted to a [`DeviceThread`](crate::threads::DeviceThread).
///
/// It is a future of any runtime. Without a runtime, [`wait`](Completion::wait) blocks.
///
/// # Drop
/// Cancels the task if it has not begun. A task that has begun runs to its end, and its result is dropped on the
/// device's thread. [`detach`](Completion::detach) lets it run in any case.
#[must_use = "dropping it cancels the task; detach it to let it run"]
pub struct Completion<T> {
    /// `None` once the receiver is done.
    cell: Option<Arc<ResultCell<T>>>,
    queue: Arc<dyn Cancel>,
    id: u64,
    /// The thread that runs the task; not set in a model checker.
    worker: Arc<OnceLock<ThreadId>>,
}

impl<T> Completion<T> {
    pub(crate) fn new(
        cell: Arc<ResultCell<T>>,
        queue: Arc<dyn Cancel>,
        id: u64,
        worker: Arc<OnceLock<ThreadId>>,
    ) -> Self {
        Self { cell: Some(cell), queue, id, worker }
    }

    #[cfg(loom)]
    pub(crate) fn cell(&self) -> Option<&ResultCell<T>> {
        self.cell.as_deref()
    }

    /// Waits on the host until the task has ended.
    ///
    /// # Errors
    /// [`TaskError`]; [`TaskError::WaitsForItself`] at once on the thread that runs the task, and on a device's thread
    /// for which that one waits, unless the task has ended.
    pub fn wait(mut self) -> Result<T, TaskError>
    where
        T: Send + 'static,
    {
        let Some(cell) = self.cell.take() else { return Err(TaskError::Taken) };
        let Some(&worker) = self.worker.get() else { return cell.wait() };
        let Some(_waiting) = Waiting::begin(worker, Arc::clone(&cell) as Arc<dyn Awaited>) else {
            return cell.take().unwrap_or_else(|| {
                cell.abandon();
                Err(TaskError::WaitsForItself)
            });
        };
        cell.wait()
    }

    /// Cancels the task. Its captured values are dropped here.
    ///
    /// # Errors
    /// The completion, if the task has begun or ended.
    pub fn cancel(mut self) -> Result<(), Self> {
        if !self.queue.cancel(self.id) {
            return Err(self);
        }
        self.cell = None;
        Ok(())
    }

    /// Lets the task run without a receiver. Its result is dropped on the device's thread.
    pub fn detach(mut self) {
        if let Some(cell) = self.cell.take() {
            cell.abandon();
        }
    }

    /// Whether the task has ended, in any way.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.cell.as_ref().is_none_or(|cell| cell.is_done())
    }
}

impl<T> Future for Completion<T> {
    type Output = Result<T, TaskError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &self.cell {
            Some(cell) => cell.poll(context.waker()),
            None => Poll::Ready(Err(TaskError::Taken)),
        }
    }
}

impl<T> Drop for Completion<T> {
    fn drop(&mut self) {
        let Some(cell) = self.cell.take() else { return };
        // The receiver is dropped first, so a task that begins now finds no receiver.
        quietly(|| {
            cell.abandon();
            self.queue.cancel(self.id);
        });
    }
}

impl<T> fmt::Debug for Completion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion").field("id", &self.id).field("done", &self.is_done()).finish()
    }
}
