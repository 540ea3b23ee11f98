//! What a model checker watches: its own lock with the face of the real one, and shared ownership
//! with a count of owners that it sees change.
//!
//! Neither checker has all of `Arc`: loom's knows no `into_inner`, and shuttle's is the standard
//! one, whose steps it does not see. Here the standard one holds the value, and beside it stands the
//! checker's own counter, which every operation goes through first, in the memory orders of the
//! standard implementation. A checker runs one thread at a time and switches between threads at its
//! own types only, so the two counts agree wherever another thread can look.

use std::ops::Deref;
use std::sync::Arc as Shared;

#[cfg(loom)]
use loom::sync as checker;
#[cfg(not(loom))]
use shuttle::sync as checker;

pub(crate) use checker::MutexGuard;
use checker::atomic::AtomicUsize;
pub(super) use checker::atomic::{Ordering, fence};

/// The checker's lock with the face of the real one.
#[derive(Debug)]
pub(crate) struct Mutex<T>(checker::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(checker::Mutex::new(value))
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

#[derive(Debug)]
struct Inner<T> {
    owners: AtomicUsize,
    value: T,
}

/// The part of [`std::sync::Arc`] that this crate uses.
#[derive(Debug)]
pub(crate) struct Arc<T> {
    /// `None` once this owner is no more.
    inner: Option<Shared<Inner<T>>>,
}

impl<T> Arc<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: Some(Shared::new(Inner { owners: AtomicUsize::new(1), value })) }
    }

    pub(crate) fn strong_count(this: &Self) -> usize {
        this.inner().owners.load(Ordering::Relaxed)
    }

    pub(crate) fn get_mut(this: &mut Self) -> Option<&mut T> {
        if this.inner().owners.load(Ordering::Acquire) != 1 {
            return None;
        }
        let inner = this.inner.as_mut().and_then(Shared::get_mut);
        Some(&mut inner.expect("the counts agree").value)
    }

    pub(crate) fn into_inner(mut this: Self) -> Option<T> {
        let inner = this.inner.take()?;
        let last = leave(&inner);
        let value = Shared::into_inner(inner).map(|inner| inner.value);
        assert_eq!(value.is_some(), last, "the counts agree");
        value
    }

    pub(crate) fn ptr_eq(this: &Self, other: &Self) -> bool {
        Shared::ptr_eq(this.inner(), other.inner())
    }

    fn inner(&self) -> &Shared<Inner<T>> {
        self.inner.as_ref().expect("an owner that is no more is not used")
    }
}

/// Counts one owner less; whether it was the last.
fn leave<T>(inner: &Inner<T>) -> bool {
    let last = inner.owners.fetch_sub(1, Ordering::Release) == 1;
    if last {
        // What other owners did happens before the value is dropped: they left with `Release`.
        fence(Ordering::Acquire);
    }
    last
}

impl<T> Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner().value
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Self {
        self.inner().owners.fetch_add(1, Ordering::Relaxed);
        Self { inner: self.inner.clone() }
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        let last = leave(&inner);
        // A failed check unwinds through here, and must stay the failure that is reported.
        assert!(last == (Shared::strong_count(&inner) == 1) || std::thread::panicking());
    }
}

impl<T: Default> Default for Arc<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}
