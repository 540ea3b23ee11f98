//! The locks and counters of the pool: the real ones, or those of a model checker.
//!
//! Everything in this crate that two threads can touch at once goes through here, so that loom and
//! shuttle run the very code that is shipped.

#[cfg(any(loom, shuttle))]
mod checked;

#[cfg(any(loom, shuttle))]
pub(crate) use checked::{Arc, Mutex};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use parking_lot::Mutex;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::Arc;

/// What only this owner has left, or `None` while there are others. Of several owners that go at
/// once, one gets it.
pub(crate) fn into_inner<T>(shared: Arc<T>) -> Option<T> {
    Arc::into_inner(shared)
}
