//! Time as an input: what durations are measured by, and a clock that a test moves by hand.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A clock that never goes back. For a pool whose clock does, time stands still meanwhile.
///
/// Times are durations since an origin that the clock chooses; only their differences mean
/// anything. A pool reads its clock under its lock, so [`now`](Clock::now) must neither block nor
/// call the pool.
///
/// A clock may panic. Where an operation has changed nothing yet, as [`tick`](crate::BlockPool::tick) and
/// [`refresh`](crate::BlockPool::refresh) have not when they read it, the panic goes to the caller, and the pool is
/// whole. Where a release begins a duration, the panic ends in
/// the pool, and the duration begins at the time that was read last. The same where it is read for a
/// [store policy](crate::store::StorePolicy).
pub trait Clock: fmt::Debug + Send + Sync {
    /// The time since the clock's origin. Never less than an earlier answer, on any thread.
    fn now(&self) -> Duration;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Duration {
        (**self).now()
    }
}

/// The monotonic clock of the operating system, counted from the moment of construction.
#[derive(Clone, Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock whose time is zero now.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// A clock that stands still until it is told to go on. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    nanos: Arc<AtomicU64>,
}

impl ManualClock {
    /// A clock at time zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Goes on by `by`, to at most 2^64 nanoseconds (584 years) after the origin.
    pub fn advance(&self, by: Duration) {
        let by = nanos(by);
        // Whoever learns of the advance from this thread sees it; no other memory is published.
        let add = |now: u64| Some(now.saturating_add(by));
        let result = self.nanos.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        debug_assert!(result.is_ok(), "the update never declines");
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
}

/// Whole nanoseconds; what is longer than 584 years is 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
