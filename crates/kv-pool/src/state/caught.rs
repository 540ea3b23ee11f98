//! Code of the caller's that runs under the pool's lock, and may panic.
//!
//! A panic that left an operation half done would leave blocks in no list, or have handles dropped while
//! the lock is held that they need. So it ends here.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::guard;
use crate::policy::EvictionPolicy;

/// What `call` returns; `None` if it panics.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => Some(answer),
        Err(payload) => {
            // To drop it would run code of the caller's again.
            guard!(
                "pool.panic-is-not-dropped-under-the-lock",
                std::mem::forget(payload),
                else drop(payload)
            );
            None
        }
    }
}

/// A policy, which is asked until it panics.
#[derive(Debug)]
pub(crate) struct Guarded<P: ?Sized>(Option<Box<P>>);

impl<P: ?Sized> Guarded<P> {
    pub(super) fn new(policy: Box<P>) -> Self {
        Self(Some(policy))
    }

    /// What the policy answers; `None` if it panics, or has done so before.
    pub(super) fn ask<T>(&mut self, call: impl FnOnce(&mut P) -> T) -> Option<T> {
        let policy = self.0.as_deref_mut()?;
        let answer = guard!(
            "pool.policy-panics-end-in-the-pool",
            caught(|| call(policy)),
            else Some(call(policy))
        );
        if answer.is_none() {
            self.end();
        }
        answer
    }

    /// The same of what has no answer.
    pub(super) fn tell(&mut self, call: impl FnOnce(&mut P)) {
        self.ask(call);
    }

    /// Drops the policy, which may panic, too.
    pub(super) fn end(&mut self) {
        let policy = self.0.take();
        caught(|| drop(policy));
    }
}

impl Guarded<dyn EvictionPolicy> {
    /// The policy's own count of its blocks, unless it has panicked.
    pub(crate) fn len(&self) -> Option<usize> {
        Some(self.0.as_ref()?.len())
    }
}
