//! The bounded queue between the threads that submit tasks and the one thread that runs them.

use std::collections::VecDeque;
use std::task::{Poll, Waker};

use super::completion::quietly;
use crate::sync::{Condvar, Mutex, lock, wait};

/// A task, boxed. Dropping it without calling it is how a task is cancelled.
pub(crate) type Work<C> = Box<dyn FnOnce(&C) + Send>;

/// Why a queue took no task.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PushRefused {
    /// It holds as many as it may.
    Full,
    /// It takes no more.
    Closed,
}

/// Tasks in the order of their submission, for one worker.
pub(crate) struct Queue<C> {
    state: Mutex<QueueState<C>>,
    /// Notified when a task is pushed, and when the queue is closed.
    changed: Condvar,
    /// Notified when the worker has ended.
    finished: Condvar,
    tasks_max: usize,
}

struct QueueState<C> {
    /// # Invariants
    /// At most `tasks_max`, ids rising from front to back.
    tasks: VecDeque<(u64, Work<C>)>,
    next_id: u64,
    is_closed: bool,
    is_finished: bool,
    /// The wakers that wait for room, each once. All are woken whenever there may be room. If only one were woken, and
    /// its task did not come back, the others would wait for ever.
    for_room: Vec<(u64, Waker)>,
}

impl<C> QueueState<C> {
    /// The wakers to wake, outside the lock, now that there may be room.
    fn take_waiting(&mut self) -> Vec<(u64, Waker)> {
        std::mem::take(&mut self.for_room)
    }
}

fn wake_all(waiting: Vec<(u64, Waker)>) {
    waiting.into_iter().for_each(|(_, waker)| quietly(|| waker.wake()));
}

impl<C> Queue<C> {
    /// An empty queue with room for `tasks_max` tasks.
    pub(crate) fn new(tasks_max: usize) -> Self {
        let state = QueueState {
            tasks: VecDeque::new(),
            next_id: 0,
            is_closed: false,
            is_finished: false,
            for_room: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            finished: Condvar::new(),
            tasks_max,
        }
    }

    /// Puts a task behind all others, and returns its id. Never waits.
    pub(crate) fn push<F>(
        &self,
        task: F,
        boxed: impl FnOnce(F) -> Work<C>,
    ) -> Result<u64, (PushRefused, F)> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err((PushRefused::Closed, task));
        }
        if state.tasks.len() >= self.tasks_max {
            return Err((PushRefused::Full, task));
        }
        let id = state.next_id;
        state.next_id += 1;
        state.tasks.push_back((id, boxed(task)));
        drop(state);
        self.changed.notify_one();
        Ok(id)
    }

    /// The task that was submitted first, once there is one; `None` when the queue is closed and empty.
    pub(crate) fn pop(&self) -> Option<Work<C>> {
        let mut state = lock(&self.state);
        loop {
            if let Some((_, work)) = state.tasks.pop_front() {
                let waiting = state.take_waiting();
                drop(state);
                wake_all(waiting);
                return Some(work);
            }
            if state.is_closed {
                return None;
            }
            state = wait(&self.changed, state);
        }
    }

    /// Takes one task out, if it has not begun. The caller drops it, outside the lock.
    pub(crate) fn take(&self, id: u64) -> Option<Work<C>> {
        let mut state = lock(&self.state);
        let index = state.tasks.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let work = state.tasks.remove(index).map(|(_, work)| work);
        let waiting = state.take_waiting();
        drop(state);
        wake_all(waiting);
        work
    }

    /// Takes every task out that has not begun.
    pub(crate) fn take_all(&self) -> Vec<Work<C>> {
        let mut state = lock(&self.state);
        let tasks = state.tasks.drain(..).map(|(_, work)| work).collect();
        let waiting = state.take_waiting();
        drop(state);
        wake_all(waiting);
        tasks
    }

    /// Whether a task would be taken or refused for good; if neither, `waker` is woken when that changes.
    /// `id` is the caller's place among the waiting ones.
    pub(crate) fn poll_room(&self, id: &mut Option<u64>, waker: &Waker) -> Poll<()> {
        let waker = waker.clone();
        let mut state = lock(&self.state);
        let own = id.and_then(|id| state.for_room.iter().position(|(other, _)| *other == id));
        let before = own.map(|index| state.for_room.swap_remove(index));
        let is_over = state.is_closed || state.tasks.len() < self.tasks_max;
        if !is_over {
            let number = id.unwrap_or(state.next_id);
            state.next_id = state.next_id.max(number + 1);
            *id = Some(number);
            state.for_room.push((number, waker));
        }
        drop(state);
        drop(before);
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Waits no more.
    pub(crate) fn leave_room(&self, id: u64) {
        let mut state = lock(&self.state);
        let own = state.for_room.iter().position(|(other, _)| *other == id);
        let before = own.map(|index| state.for_room.swap_remove(index));
        drop(state);
        drop(before);
    }

    /// Takes no more tasks; those that are in the queue still run.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let waiting = state.take_waiting();
        drop(state);
        self.changed.notify_all();
        wake_all(waiting);
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// Tasks that have not begun.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).tasks.len()
    }

    pub(crate) fn tasks_max(&self) -> usize {
        self.tasks_max
    }

    /// Runs tasks in order until the queue is closed and empty: the worker's whole life.
    pub(crate) fn work_off(&self, context: &C, run: impl Fn(Work<C>, &C)) {
        while let Some(work) = self.pop() {
            run(work, context);
        }
        lock(&self.state).is_finished = true;
        self.finished.notify_all();
    }

    /// Waits until the worker is done for good.
    pub(crate) fn wait_finished(&self) {
        let mut state = lock(&self.state);
        while !state.is_finished {
            state = wait(&self.finished, state);
        }
    }
}

/// What a completion may ask of the queue that its task went into.
pub(crate) trait Cancel: Send + Sync {
    /// Takes the task out and drops it, unless it has begun; whether it had not.
    fn cancel(&self, id: u64) -> bool;
}

impl<C> Cancel for Queue<C> {
    fn cancel(&self, id: u64) -> bool {
        // Dropped here, after the lock: what the task owns may take its time, or submit tasks.
        self.take(id).is_some()
    }
}
