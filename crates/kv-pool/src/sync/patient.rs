//! The pool's lock: who finds it taken waits before it looks again, longer each time.
//!
//! What a lock guards lies in the caches of the processor that has used it last, and to fetch it from
//! there costs as much as many operations. A lock that is handed on at every operation, as one does
//! whose waiters look all the time, or are woken in turn, is slower with two threads than with one.
//! Here the owner mostly goes on for a while, until one of those who wait looks at the right moment;
//! it then owns the state for a while. So nobody waits for long in a lock that is seldom taken, and
//! in one that is always taken throughput comes before order. The times are short beside a step of
//! an engine, and after [`PARK_AFTER`] a thread sleeps until the lock is handed to it, fairly.

use std::cell::Cell;
use std::hint::spin_loop;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

/// The first wait of a thread that has not waited before.
const SHORTEST: Duration = Duration::from_nanos(250);
const LONGEST: Duration = Duration::from_micros(50);
/// From this on a waiting thread lets others have its processor: the owner may be one of them.
const YIELD_FROM: Duration = Duration::from_micros(8);
/// How long a thread waits before it sleeps.
const PARK_AFTER: Duration = Duration::from_micros(500);

thread_local! {
    /// How long this thread waits first: half of what it had to wait the last time.
    static PATIENCE: Cell<Duration> = const { Cell::new(SHORTEST) };
}

#[derive(Debug)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| self.wait())
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock()
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        let start = Instant::now();
        let mut now = start;
        // A thread that is ending has no memory of its own any more, and waits as a new one does.
        let mut patience = PATIENCE.try_with(Cell::get).unwrap_or(SHORTEST);
        while now - start < PARK_AFTER {
            let until = now + patience;
            while now < until {
                if patience < YIELD_FROM {
                    spin_loop();
                } else {
                    std::thread::yield_now();
                }
                now = Instant::now();
            }
            if let Some(guard) = self.0.try_lock() {
                let next = (patience / 2).max(SHORTEST);
                // Without the memory there is nothing to remember.
                let _ = PATIENCE.try_with(|cell| cell.set(next));
                return guard;
            }
            patience = (patience * 2).min(LONGEST);
        }
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn no_addition_is_lost_and_who_waits_beyond_the_limit_is_woken() {
        let (lock, held) = (Mutex::new(0_u64), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !held.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    (0..10_000).for_each(|_| *lock.lock() += 1);
                });
            }
            // The others come while this is held, and must sleep before it is let go.
            let guard = lock.lock();
            held.store(true, Ordering::Release);
            let start = Instant::now();
            while start.elapsed() < 4 * PARK_AFTER {
                std::thread::yield_now();
            }
            assert!(lock.try_lock().is_none());
            drop(guard);
        });
        assert_eq!(*lock.lock(), 30_000);
    }
}
