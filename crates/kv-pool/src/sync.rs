//! The locks and counters of the pool: the real ones, or those of a model checker.
//!
//! Everything in this crate that two threads can touch at once goes through here, so that loom and
//! shuttle run the very code that is shipped.

#[cfg(not(any(loom, shuttle)))]
mod imp {
    pub(crate) use std::sync::Arc;

    pub(crate) use parking_lot::Mutex;
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::sync::Arc;

    pub(crate) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

    /// The checker's lock with the face of the real one.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            match self.0.lock() {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            }
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}

#[cfg(all(shuttle, not(loom)))]
mod imp {
    pub(crate) use shuttle::sync::Arc;

    pub(crate) type MutexGuard<'a, T> = shuttle::sync::MutexGuard<'a, T>;

    /// The checker's lock with the face of the real one.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            match self.0.lock() {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            }
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}

pub(crate) use imp::{Arc, Mutex};

/// What only this owner has left, or `None` while there are others. Of several owners that go at
/// once, one gets it.
pub(crate) fn into_inner<T>(shared: Arc<T>) -> Option<T> {
    #[cfg(not(loom))]
    return Arc::into_inner(shared);
    // The checker knows no such step. It takes these for two, which is a weaker promise.
    #[cfg(loom)]
    return Arc::try_unwrap(shared).ok();
}
