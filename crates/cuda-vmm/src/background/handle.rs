//! A source's registration with a worker: waking, stepping, and its health.

use cuda_driver::guard;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::{Fault, Health, Owner, Progress, Shared, WorkSource};

/// A source, as its worker sees it.
pub(super) struct Attached {
    /// Set by a thread that has work for the source. Cleared before the step that will see the
    /// work.
    woken: AtomicBool,
    detached: AtomicBool,
    /// Serialises the source's work on every thread. Held across its driver calls. The step path
    /// never takes it. `None` once the source was detached.
    source: Mutex<Option<Arc<dyn WorkSource>>>,
    /// Never held across a step.
    status: Mutex<AttachedStatus>,
}

#[derive(Debug, Default)]
struct AttachedStatus {
    health: Health,
    next: Next,
}

/// When a source should be stepped again without a wake-up, ordered by urgency, least urgent first.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Next {
    #[default]
    Never,
    /// After a refusal that may be temporary.
    Retry,
    /// The source waits for something that wakes no thread, such as an event.
    Soon,
    Now,
}

impl Attached {
    pub(super) fn new(source: Arc<dyn WorkSource>) -> Self {
        Self {
            woken: AtomicBool::new(true),
            detached: AtomicBool::new(false),
            source: Mutex::new(Some(source)),
            status: Mutex::default(),
        }
    }

    /// Returns whether the source was not woken before.
    fn wake(&self) -> bool {
        // SeqCst: the partner is `is_woken` after the thread has set `asleep`; see `Shared::rouse`.
        !self.woken.swap(true, Ordering::SeqCst)
    }

    pub(super) fn is_detached(&self) -> bool {
        self.detached.load(Ordering::SeqCst)
    }

    pub(super) fn next(&self) -> Next {
        if self.woken.load(Ordering::SeqCst) { Next::Now } else { self.status.lock().next }
    }

    pub(super) fn health(&self) -> Health {
        self.status.lock().health.clone()
    }

    pub(super) fn fail(&self, cause: Fault) {
        self.status.lock().health.note(Err(cause));
    }

    /// Runs one step on the calling thread. Does nothing for a source that was detached or has
    /// failed.
    pub(super) fn step(&self) {
        // Before the step, so that a demand that comes meanwhile causes another step. An exchange,
        // so that it reads the last wake-up and with it the demand.
        self.woken.swap(false, Ordering::SeqCst);
        let stepped = self.alone(|source| source.step());
        let mut status = self.status.lock();
        status.next = match &stepped {
            Ok(Progress::Done) => Next::Never,
            Ok(Progress::Waiting) => Next::Soon,
            Ok(Progress::More) => Next::Now,
            Err(fault) if fault.is_fatal() => Next::Never,
            Err(_) => Next::Retry,
        };
        if stepped.is_ok() {
            status.health.note(Ok(()));
        }
    }

    /// Runs work of the source while no other work of it runs. Records a fault, and turns a panic
    /// into one.
    fn alone<T>(&self, work: impl FnOnce(&dyn WorkSource) -> Result<T, Fault>) -> Result<T, Fault> {
        self.alone_with(self.source.lock(), work)
    }

    fn alone_with<T>(
        &self,
        held: MutexGuard<'_, Option<Arc<dyn WorkSource>>>,
        work: impl FnOnce(&dyn WorkSource) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let outcome = match (&*held, self.health()) {
            (None, _) => return Err(Fault::Stopped),
            (_, Health::Failed { cause }) if cause != Fault::Stopped => return Err(cause),
            // State that a panic left half-changed is not touched again: the source has failed for
            // good.
            (Some(source), _) => {
                let once = || bound(&**source, work);
                let caught = |once| catch_unwind(AssertUnwindSafe(once));
                guard!("vmm.panic-ends-one-source", caught(once), else Ok(once()))
            }
        };
        let outcome = outcome.unwrap_or_else(|payload| Err(panicked(payload.as_ref())));
        if let Err(fault) = &outcome {
            tracing::debug!(%fault, "background work was refused");
            self.fail(fault.clone());
        }
        drop(held);
        if self.is_detached() {
            self.let_go();
        }
        outcome
    }

    /// Drops the source. If the source is at work, the working thread drops it afterwards.
    fn let_go(&self) {
        let source = self.source.try_lock().and_then(|mut held| held.take());
        // Dropped outside the lock, because this may be the source's last holder.
        drop(source);
    }
}

/// Runs `work` with the context of the source's device current. If it cannot be bound, each driver
/// call reports that itself.
fn bound<T>(source: &dyn WorkSource, work: impl FnOnce(&dyn WorkSource) -> T) -> T {
    let mut work = Some(work);
    let mut once = || work.take().map(|work| work(source));
    let done = source.device().and_then(|device| device.while_current(&mut once).ok());
    match done.flatten().or_else(once) {
        Some(done) => done,
        None => unreachable!("the work was done twice"),
    }
}

fn panicked(payload: &(dyn std::any::Any + Send)) -> Fault {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Fault::Panicked { message: text.unwrap_or("no message").into() }
}

/// Wakes one source's worker. A cheap handle, for any thread.
#[derive(Clone)]
pub(crate) struct Waker {
    pub(super) entry: Arc<Attached>,
    pub(super) shared: Arc<Shared>,
}

impl Waker {
    /// Reports work ahead of need. Costs one atomic exchange, and a system call only if the thread
    /// is asleep: it returns from naps by itself.
    pub(crate) fn wake(&self) {
        if self.entry.wake() {
            self.shared.rouse();
        }
    }

    /// Reports work that a caller needs now. Also ends a nap, by a system call.
    pub(crate) fn wake_now(&self) {
        self.entry.wake();
        self.shared.unpark();
    }

    /// The state of the source's work.
    #[must_use]
    pub(crate) fn health(&self) -> Health {
        self.entry.health()
    }

    /// Runs work of the source on the calling thread: alone, like a step, with a panic turned into
    /// [`Fault::Panicked`] and a fault recorded in the [`health`](Waker::health).
    ///
    /// # Ordering
    /// Waits for a running step, so call it on the step path only if that must stall anyway. Never
    /// call it from within a step or from within `work`.
    ///
    /// # Errors
    /// The fault of `work`; [`Fault::Stopped`] for a detached source; the fault by which the source
    /// failed earlier.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        self.entry.alone(|_| work())
    }

    /// Like [`run`](Waker::run), but does nothing while other work of the source runs.
    pub(crate) fn try_run<T>(
        &self,
        work: impl FnOnce() -> Result<T, Fault>,
    ) -> Option<Result<T, Fault>> {
        let held = self.entry.source.try_lock()?;
        Some(self.entry.alone_with(held, |_| work()))
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").field("health", &self.health()).finish_non_exhaustive()
    }
}

/// A source's registration with a worker. While it is held, the source is stepped and the worker's
/// thread runs. A source must not hold its own registration.
///
/// Dropping it detaches the source without waiting for a running step.
#[derive(Debug)]
#[must_use = "dropping it takes the source away from the worker"]
pub(crate) struct WorkHandle {
    waker: Waker,
    _owner: Arc<Owner>,
}

impl WorkHandle {
    pub(super) fn new(waker: Waker, owner: Arc<Owner>) -> Self {
        Self { waker, _owner: owner }
    }

    /// The handle that wakes this source's worker.
    #[must_use]
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// The state of the source's work.
    #[must_use]
    pub(crate) fn health(&self) -> Health {
        self.waker.health()
    }

    /// Detaches the source, after waiting for a running step. No step starts afterwards.
    pub(crate) fn detach(self) {
        self.waker.entry.detached.store(true, Ordering::SeqCst);
        let entry = &self.waker.entry;
        let source = guard!(
            "vmm.detach-waits",
            entry.source.lock().take(),
            else entry.source.try_lock().and_then(|mut held| held.take())
        );
        drop(source);
    }
}

impl Drop for WorkHandle {
    fn drop(&mut self) {
        // SeqCst: if the lock is taken now, its holder checks the flag after unlocking.
        self.waker.entry.detached.store(true, Ordering::SeqCst);
        // Others may hold wakers of the source. No step will ever do what they ask for.
        self.waker.shared.forget(&self.waker.entry);
        guard!("vmm.dropped-source-fails", self.waker.entry.fail(Fault::Stopped));
        self.waker.entry.let_go();
    }
}
