//! The locks and counters of the pool: the real ones, or those of a model checker.
//!
//! Everything in this crate that two threads can touch at once goes through here, so that loom and
//! shuttle run the very code that is shipped.

#[cfg(any(loom, shuttle))]
mod checked;

#[cfg(any(loom, shuttle))]
pub(crate) use checked::{Arc, Mutex, MutexGuard};
#[cfg(any(loom, shuttle))]
use checked::{Ordering, fence};
#[cfg(not(any(loom, shuttle)))]
mod patient;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use parking_lot::MutexGuard;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use patient::Mutex;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::Arc;
#[cfg(not(any(loom, shuttle)))]
use std::sync::atomic::{Ordering, fence};

/// Whether there is no other owner. What the others did before they went happens before the return.
#[inline]
pub(crate) fn is_sole<T>(shared: &Arc<T>) -> bool {
    let sole = Arc::strong_count(shared) == 1;
    if sole {
        // Owners leave with `Release`, and the count that was read is what the last of them left.
        fence(Ordering::Acquire);
    }
    sole
}
