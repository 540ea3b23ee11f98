//! A thread that makes driver calls ahead of need, so that the step path makes none.
//!
//! An [`ElasticPool`](crate::ElasticPool) and a [`SequenceSpace`](crate::sequences::SequenceSpace) have such
//! calls to make. A [`Worker`] steps them, one bounded piece of work at a time, when they are woken. Several
//! may share one worker. The thread holds them and device handles, and nothing of any other runtime.
//!
//! A worker made by [`Worker::manual`] has no thread: [`Worker::poll`] takes the same steps on the
//! calling thread, so a test decides when ahead of need is.
//!
//! A fault is a state, [`Health`], of the pool or space that met it.

mod handle;
mod health;
one_line_debug!(SpawnError);

#[cfg(test)]
mod tests;

use cuda_driver::messages::one_line_debug;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use cuda_driver::Device;
use handle::{Attached, Next};
pub(crate) use handle::{Waker, WorkHandle};
pub use health::{Fault, Health};
use parking_lot::Mutex;

/// Something with work to be done ahead of need.
pub(crate) trait WorkSource: Send + Sync + 'static {
    /// Does one bounded piece of work. Never called twice at once.
    ///
    /// # Errors
    /// [`Fault`]: what could not be done, and so is tried again unless it
    /// [is fatal](Fault::is_fatal). It must have been undone.
    fn step(&self) -> Result<Progress, Fault>;

    /// The device whose context is kept current while the source works, so that its driver calls need not
    /// bind it one by one.
    fn device(&self) -> Option<&Device> {
        None
    }
}

/// What a step leaves to do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Progress {
    /// Nothing until the source is woken.
    Done,
    /// Something that waits for what wakes nobody, such as an event: worth another step soon.
    Waiting,
    /// Something that can be done at once.
    More,
}

/// How a worker's thread rests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WorkerOptions {
    /// How long the thread naps when it has nothing to do. It returns from a nap by itself, so that
    /// waking it ahead of need costs the step path no system call.
    pub nap: Duration,
    /// Naps in a row with nothing to do after which it sleeps until it is woken.
    pub naps_before_sleep: u32,
    /// How long it waits before it tries again what was refused.
    pub retry: Duration,
}

impl Default for WorkerOptions {
    /// Naps of 500 µs for a second, and ten milliseconds before trying again.
    fn default() -> Self {
        Self {
            nap: Duration::from_micros(500),
            naps_before_sleep: 2_000,
            retry: Duration::from_millis(10),
        }
    }
}

/// The thread could not be started.
#[derive(thiserror::Error)]
#[error("no thread for work ahead of need")]
pub struct SpawnError {
    /// What the operating system answered.
    #[source]
    pub source: std::io::Error,
}

/// Steps its sources ahead of need, on a thread of its own or, without one, when polled. A cheap
/// handle: clones are the same worker.
///
/// # Drop
/// The thread is told to stop when the last clone is dropped and no pool or space has the worker any more.
/// Nothing waits for it. [`close`](Worker::close) waits. Close workers before the process exits: a thread in
/// the midst of a driver call then meets a driver that is gone.
#[derive(Clone, Debug)]
pub struct Worker {
    owner: Arc<Owner>,
}

/// Ends the thread when nobody holds it any more.
pub(crate) struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread and the handles share.
struct Shared {
    /// Held to look at the list only, never across a step.
    entries: Mutex<Vec<Arc<Attached>>>,
    /// Whether the thread sleeps until it is unparked, rather than naps.
    asleep: AtomicBool,
    stop: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Worker {
    /// A worker with a thread.
    ///
    /// # Errors
    /// [`SpawnError`].
    pub fn spawn(options: WorkerOptions) -> Result<Self, SpawnError> {
        let worker = Self::manual();
        let shared = Arc::clone(&worker.owner.shared);
        let thread = thread::Builder::new()
            .name("cuda-vmm-worker".to_owned())
            .spawn(move || shared.serve(options))
            .map_err(|source| SpawnError { source })?;
        // Nobody else has seen the worker yet, so it is empty.
        let _ = worker.owner.shared.thread.set(thread.thread().clone());
        *worker.owner.thread.lock() = Some(thread);
        Ok(worker)
    }

    /// A worker without a thread: its sources are stepped by [`poll`](Worker::poll) alone.
    #[must_use]
    pub fn manual() -> Self {
        let shared = Arc::new(Shared {
            entries: Mutex::default(),
            asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            thread: OnceLock::new(),
        });
        Self { owner: Arc::new(Owner { shared, thread: Mutex::new(None) }) }
    }

    /// Takes a source on; it counts as woken.
    pub(crate) fn attach(&self, source: Arc<dyn WorkSource>) -> WorkHandle {
        let shared = &self.owner.shared;
        let entry = Arc::new(Attached::new(source));
        shared.entries.lock().push(Arc::clone(&entry));
        if shared.stop.load(Ordering::SeqCst) {
            entry.fail(Fault::Stopped);
        }
        let waker = Waker { entry, shared: Arc::clone(shared) };
        waker.shared.rouse();
        WorkHandle::new(waker, Arc::clone(&self.owner))
    }

    /// Takes one step of every source that is woken, has more to do, waits, or was refused
    /// something; returns whether any source has more to do at once.
    ///
    /// It is how a worker without a thread is driven; beside a thread it helps.
    #[track_caller]
    pub fn poll(&self) -> bool {
        let _site = cuda_driver::site::enter();
        self.owner.shared.round(Next::Retry) == Next::Now
    }

    /// The worst health of its sources.
    #[must_use]
    pub fn health(&self) -> Health {
        let entries = self.owner.shared.entries.lock().clone();
        entries.iter().fold(Health::Healthy, |worst, entry| worst.or(entry.health()))
    }

    /// Ends the work: the thread stops after the step that it is in, and is waited for. Sources that
    /// are still attached have failed then, by [`Fault::Stopped`], but may be worked on by their
    /// owners.
    ///
    /// # Ordering
    /// Never call it from within a step.
    pub fn close(self) {
        self.owner.stop();
        let thread = self.owner.thread.lock().take();
        if let Some(thread) = thread {
            // Steps catch their panics; should the loop itself panic, its guard has told the sources.
            drop(thread.join());
        }
        self.owner.shared.fail_all(&Fault::Stopped);
    }
}

impl Owner {
    fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.unpark();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner")
            .field("thread", &self.shared.thread)
            .field("sources", &self.shared.entries.lock().len())
            .finish()
    }
}

/// Tells the sources when the thread ends, however it does.
struct LastWords<'a>(&'a Shared);

impl Drop for LastWords<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::SeqCst);
        self.0.fail_all(&Fault::Stopped);
    }
}

impl Shared {
    /// The thread.
    fn serve(&self, options: WorkerOptions) {
        let _last_words = LastWords(self);
        let (mut due, mut idle_naps) = (Next::Retry, 0_u32);
        let mut retried = Instant::now();
        while !self.stop.load(Ordering::SeqCst) {
            let next = self.round(due);
            due = Next::Now;
            if next == Next::Now {
                idle_naps = 0;
                continue;
            }
            idle_naps = if next == Next::Soon { 0 } else { idle_naps.saturating_add(1) };
            if idle_naps > options.naps_before_sleep {
                self.sleep((next == Next::Retry).then_some(options.retry));
            } else {
                thread::park_timeout(options.nap);
            }
            due = Next::Soon;
            if retried.elapsed() >= options.retry {
                due = Next::Retry;
                retried = Instant::now();
            }
        }
    }

    /// Steps every source that is `due` or more urgent; returns the most urgent need left.
    fn round(&self, due: Next) -> Next {
        let entries: Vec<_> = {
            let mut entries = self.entries.lock();
            entries.retain(|entry| !entry.is_detached());
            entries.iter().filter(|entry| entry.next() >= due).cloned().collect()
        };
        entries.iter().for_each(|entry| entry.step());
        let entries = self.entries.lock();
        entries.iter().map(|entry| entry.next()).max().unwrap_or_default()
    }

    fn sleep(&self, at_most: Option<Duration>) {
        // SeqCst, as in `rouse`: either the waker sees `asleep`, or this sees what it woke.
        self.asleep.store(true, Ordering::SeqCst);
        let woken = self.entries.lock().iter().any(|entry| entry.next() == Next::Now);
        if !woken && !self.stop.load(Ordering::SeqCst) {
            match at_most {
                Some(at_most) => thread::park_timeout(at_most),
                None => thread::park(),
            }
        }
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Ends a sleep, not a nap. Call it after what the thread should see was stored, `SeqCst`.
    fn rouse(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            self.unpark();
        }
    }

    fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn forget(&self, gone: &Arc<Attached>) {
        self.entries.lock().retain(|entry| !Arc::ptr_eq(entry, gone));
    }

    fn fail_all(&self, cause: &Fault) {
        let entries = self.entries.lock().clone();
        entries.iter().for_each(|entry| entry.fail(cause.clone()));
    }
}
