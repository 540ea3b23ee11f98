//! The bounded queue between the threads that submit tasks and the one thread that runs them.

use cuda_driver::guard;
use std::collections::VecDeque;
use std::task::{Poll, Waker};

use super::completion::quietly;
use super::waits::Awaited;
use crate::sync::{Condvar, Mutex, lock, wait};

/// A task, boxed. A task is cancelled by dropping it without calling it.
pub(crate) type Work<C> = Box<dyn FnOnce(&C) + Send>;

/// The reason why a queue refused a task.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PushRefused {
    /// It holds the maximum number of tasks.
    Full,
    /// It accepts no more tasks.
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
    /// The wakers that wait for room, each once. All are woken whenever there may be room. If only
    /// one were woken, and its task did not retry, the others would wait for ever.
    for_room: Vec<(u64, Waker)>,
}

impl<C> QueueState<C> {
    /// Removes the wakers to wake, outside the lock, because there may be room.
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

    /// Appends a task and returns its id. Never waits.
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

    /// Waits for the first task and removes it; `None` when the queue is closed and empty.
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

    /// Removes one task, if it has not begun. The caller drops it outside the lock.
    pub(crate) fn take(&self, id: u64) -> Option<Work<C>> {
        let mut state = lock(&self.state);
        let index = state.tasks.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let work = state.tasks.remove(index).map(|(_, work)| work);
        let waiting = state.take_waiting();
        drop(state);
        wake_all(waiting);
        work
    }

    /// Removes every task that has not begun.
    pub(crate) fn take_all(&self) -> Vec<Work<C>> {
        let mut state = lock(&self.state);
        let tasks = state.tasks.drain(..).map(|(_, work)| work).collect();
        let waiting = state.take_waiting();
        drop(state);
        wake_all(waiting);
        tasks
    }

    /// Returns whether a task would be accepted, or refused for good. Otherwise registers `waker`,
    /// to be woken when that changes. `id` is the caller's place among the waiting ones.
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

    /// Stops waiting.
    pub(crate) fn leave_room(&self, id: u64) {
        let mut state = lock(&self.state);
        let own = state.for_room.iter().position(|(other, _)| *other == id);
        let before = own.map(|index| state.for_room.swap_remove(index));
        drop(state);
        drop(before);
    }

    /// Accepts no more tasks. Tasks in the queue still run.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let waiting = state.take_waiting();
        drop(state);
        self.changed.notify_all();
        guard!("multigpu.close-wakes-room", wake_all(waiting));
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// Number of tasks that have not begun.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).tasks.len()
    }

    pub(crate) fn tasks_max(&self) -> usize {
        self.tasks_max
    }

    /// Runs tasks in order until the queue is closed and empty. This is the worker's main loop.
    pub(crate) fn work_off(&self, context: &C, run: impl Fn(Work<C>, &C)) {
        while let Some(work) = self.pop() {
            run(work, context);
        }
        lock(&self.state).is_finished = true;
        self.finished.notify_all();
    }

    /// Waits until the worker has ended.
    pub(crate) fn wait_finished(&self) {
        let mut state = lock(&self.state);
        while !state.is_finished {
            state = wait(&self.finished, state);
        }
    }
}

impl<C> Awaited for Queue<C> {
    fn is_over(&self) -> bool {
        lock(&self.state).is_finished
    }
}

/// The calls that a completion makes on the queue of its task.
pub(crate) trait Cancel: Send + Sync {
    /// Removes and drops the task, unless it has begun; returns whether it was removed.
    fn cancel(&self, id: u64) -> bool;
}

impl<C> Cancel for Queue<C> {
    fn cancel(&self, id: u64) -> bool {
        // Dropped here, without the lock: dropping the task's captured values may take long, or
        // submit tasks.
        self.take(id).is_some()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Who waits for room learns of both, though no task begins.
    #[test]
    fn who_waits_for_room_is_woken_by_the_end_and_when_tasks_are_taken_back() {
        let full = || {
            let queue = Queue::<()>::new(1);
            assert!(queue.push((), |()| Box::new(|(): &()| ())).is_ok());
            queue
        };
        let ends: [fn(&Queue<()>); 2] = [Queue::close, |queue| drop(queue.take_all())];
        for end in ends {
            let (queue, wakes) = (full(), Arc::new(Wakes::default()));
            let waker = Waker::from(Arc::clone(&wakes));
            let mut place = None;
            assert!(queue.poll_room(&mut place, &waker).is_pending());
            end(&queue);
            assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
            assert!(queue.poll_room(&mut place, &waker).is_ready());
        }
    }
}
