//! One worker thread for a device, for programs whose tasks migrate between threads.

mod completion;
mod queue;
mod room;
mod waits;

#[cfg(loom)]
pub mod model;

use cuda_driver::guard;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, ThreadId};

use cuda_driver::{Device, DriverError};
use parking_lot::Mutex;

pub use completion::{Completion, TaskError};
use completion::{Filler, ResultCell, Task, message_of, quietly};
use queue::{PushRefused, Queue};
pub use room::Room;
use waits::{Awaited, Waiting};

/// Options of a device thread.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DeviceThreadOptions {
    /// Maximum number of waiting tasks, at least one; further tasks are refused
    /// ([`Refusal::Full`]).
    pub tasks_max: usize,
    /// Name of the thread, without a NUL; `None` means `gpu` and the ordinal.
    pub name: Option<String>,
}

impl Default for DeviceThreadOptions {
    fn default() -> Self {
        Self { tasks_max: 1024, name: None }
    }
}

/// The reason why a thread was not started.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SpawnThreadError {
    /// The queue would have no capacity.
    #[error(
        "cannot start a device thread with room for {tasks_max} waiting tasks: at least 1 is needed"
    )]
    NoTasks {
        /// Requested number of waiting tasks.
        tasks_max: usize,
    },
    /// The name contains a NUL, where the operating system would end it.
    #[error("a device's thread cannot be named {name:?}, which has a NUL")]
    Name {
        /// The name.
        name: String,
    },
    /// The operating system refused.
    #[error("the thread of GPU {ordinal} could not be started")]
    System {
        /// Ordinal of the device.
        ordinal: i32,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

cuda_driver::messages::one_line_debug!(SpawnThreadError);

/// The reason why a task was refused.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The maximum number of tasks is waiting. Wait for [room](DeviceThread::room) and submit
    /// again.
    #[error("the queue of the device's thread is full: {tasks_max} tasks wait")]
    Full {
        /// Maximum number of waiting tasks.
        tasks_max: usize,
    },
    /// The thread takes no more tasks.
    #[error("the device's thread was closed")]
    Closed,
    /// The device is lost.
    #[error("the device is lost: {first}")]
    Lost {
        /// The error that lost it.
        first: DriverError,
    },
}

cuda_driver::messages::one_line_debug!(Refusal);

/// A refused task, with the reason.
#[derive(thiserror::Error)]
#[error("{refusal}")]
pub struct SubmitError<F> {
    /// The reason.
    pub refusal: Refusal,
    /// The task, which did not run.
    pub task: F,
}

impl<F> fmt::Debug for SubmitError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A thread that runs tasks on one device, in the order of their submission, one after another.
///
/// All handles of this workspace may be used on any thread. Use this type to keep driver calls,
/// which may wait, off the threads of an async runtime, or to run all calls of a device in one
/// order. The device's context is current in each task, for libraries that need it.
///
/// # Nesting
/// A task may submit tasks to its own thread. That never waits, and a full queue is refused there
/// too. A task cannot wait for tasks of its own thread, nor for those of another device's thread whose task waits for
/// this thread ([`TaskError::WaitsForItself`]): of threads that wait for each other in a circle, the last is refused.
/// That holds for [`Completion::wait`] and [`close`](DeviceThread::close). One deadlock cannot be detected: a task that
/// blocks on a runtime, or on a channel, which waits for such tasks.
///
/// # Loss
/// Once the device is lost, tasks are refused. Waiting tasks are not run: their completions return
/// the cause, and their captured values are dropped.
///
/// # Drop
/// A drop never waits. No more tasks are taken, the waiting tasks still run, and the thread ends by itself.
/// [`close`](DeviceThread::close) waits for its end. A program should close it before `main` returns, because the
/// driver ends with the process even while a thread uses it.
pub struct DeviceThread {
    device: Device,
    queue: Arc<Queue<Device>>,
    worker: Arc<OnceLock<ThreadId>>,
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceThread {
    /// Starts a thread for `device`.
    ///
    /// # Errors
    /// [`SpawnThreadError`], with the invalid option or the operating system's error.
    pub fn spawn(device: &Device, options: DeviceThreadOptions) -> Result<Self, SpawnThreadError> {
        let DeviceThreadOptions { tasks_max, name } = options;
        let ordinal = device.ordinal();
        if tasks_max == 0 {
            return Err(SpawnThreadError::NoTasks { tasks_max });
        }
        let name = name.unwrap_or_else(|| format!("gpu{ordinal}"));
        if name.contains('\0') {
            return Err(SpawnThreadError::Name { name });
        }
        let queue = Arc::new(Queue::new(tasks_max));
        let spawned = thread::Builder::new().name(name).spawn({
            let (queue, device) = (Arc::clone(&queue), device.clone());
            move || queue.work_off(&device, |work, device| quietly(|| work(device)))
        });
        let handle = spawned.map_err(|source| SpawnThreadError::System { ordinal, source })?;
        let worker = Arc::new(OnceLock::new());
        let _ = worker.set(handle.thread().id());
        Ok(Self { device: device.clone(), queue, worker, handle: Mutex::new(Some(handle)) })
    }

    /// Number of waiting tasks.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Appends a task to the queue. Never waits.
    ///
    /// # Ordering
    /// Tasks run in the order of submission. Work that they enqueue on streams is ordered by the
    /// streams: a task ends when it returns, not when the device's work does.
    ///
    /// # Errors
    /// [`SubmitError`] with the task, if too many tasks wait, after [`close`](DeviceThread::close),
    /// and at once on a lost device.
    pub fn submit<T, F>(&self, task: F) -> Result<Completion<T>, SubmitError<F>>
    where
        F: FnOnce(&Device) -> T + Send + 'static,
        T: Send + 'static,
    {
        if let Some(first) = guard!("multigpu.lost-thread-refuses", self.device.poison(), else None)
        {
            return Err(SubmitError { refusal: Refusal::Lost { first }, task });
        }
        let cell = Arc::new(ResultCell::new());
        let filler = Filler::new(&cell);
        let pushed = self.queue.push(task, |task| {
            let work = Task::new(task, filler);
            Box::new(move |device: &Device| work.run(|task| run(device, task)))
        });
        match pushed {
            Ok(id) => {
                let queue = Arc::clone(&self.queue);
                Ok(Completion::new(cell, queue, id, Arc::clone(&self.worker)))
            }
            Err((refused, task)) => {
                let refusal = match refused {
                    PushRefused::Full => Refusal::Full { tasks_max: self.queue.tasks_max() },
                    PushRefused::Closed => Refusal::Closed,
                };
                Err(SubmitError { refusal, task })
            }
        }
    }

    /// Waits for room after a refusal: a future of any runtime. It does not reserve a place in the
    /// queue.
    pub fn room(&self) -> Room<'_> {
        Room::new(&self.queue)
    }

    /// Cancels every task that has not begun, and returns their number. Their completions return
    /// [`TaskError::Cancelled`]. Their captured values are dropped here.
    pub fn cancel_waiting(&self) -> usize {
        let tasks = self.queue.take_all();
        let count = tasks.len();
        tasks.into_iter().for_each(|task| quietly(|| drop(task)));
        count
    }

    /// Accepts no more tasks, waits until the accepted ones have run, and for the thread to end.
    ///
    /// May be called by several threads at once, and again.
    ///
    /// # Errors
    /// [`TaskError::FromItsOwnTask`].
    pub fn close(&self) -> Result<(), TaskError> {
        let queue = Arc::clone(&self.queue) as Arc<dyn Awaited>;
        let waiting = self.worker.get().map(|&worker| Waiting::begin(worker, queue));
        if let Some(None) = waiting {
            return Err(TaskError::FromItsOwnTask);
        }
        self.queue.close();
        self.queue.wait_finished();
        // Held meanwhile, so that others who close wait for the thread's end too. No task runs any more.
        let mut handle = self.handle.lock();
        if let Some(handle) = handle.take() {
            // The thread cannot have panicked: `work_off` catches panics of its tasks.
            let _ = handle.join();
        }
        Ok(())
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl fmt::Debug for DeviceThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceThread")
            .field("device", &self.device)
            .field("waiting", &self.waiting())
            .field("closed", &self.queue.is_closed())
            .finish_non_exhaustive()
    }
}

/// Runs a task with the device's context current, unless the device is lost.
fn run<T>(device: &Device, task: impl FnOnce(&Device) -> T) -> Result<T, TaskError> {
    if let Some(first) = device.poison() {
        quietly(|| drop(task));
        return Err(TaskError::Lost { first });
    }
    let mut task = Some(task);
    let bound = device.clean_up(|_| {
        let task = task.take();
        // Calls made by a task count as calls of the program.
        let _site = cuda_driver::site::leave();
        Ok(task.map(|task| catch_unwind(AssertUnwindSafe(|| task(device)))))
    });
    match bound {
        Ok(Some(Ok(result))) => Ok(result),
        Ok(Some(Err(payload))) => {
            let message = message_of(&*payload).to_owned();
            quietly(|| drop(payload));
            Err(TaskError::Panicked { message })
        }
        // No result means that the closure was not called.
        Ok(None) => Err(TaskError::Cancelled),
        Err(error) => {
            quietly(|| drop(task));
            Err(TaskError::Device(error))
        }
    }
}
