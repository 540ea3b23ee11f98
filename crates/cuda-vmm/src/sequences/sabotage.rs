//! Switches that disable protections, for tests that must see the harm; absent from release builds.

use std::sync::atomic::{AtomicBool, Ordering};

use super::SequenceSpace;

#[derive(Debug, Default)]
pub(super) struct Sabotage {
    rest_at_once: AtomicBool,
    panic: AtomicBool,
}

impl Sabotage {
    pub(super) fn rests_at_once(&self) -> bool {
        self.rest_at_once.load(Ordering::Relaxed)
    }

    pub(super) fn panic_if_asked(&self) {
        assert!(!self.panic.load(Ordering::Relaxed), "asked to panic");
    }
}

impl SequenceSpace {
    /// From now on a finished sequence counts as at rest, even if work uses it.
    pub fn sabotage_rest_at_once(&self) {
        self.core.sabotage.rest_at_once.store(true, Ordering::Relaxed);
    }

    /// Makes the next step of the work panic.
    pub fn sabotage_panic(&self) {
        self.core.sabotage.panic.store(true, Ordering::Relaxed);
        self.handle.waker().wake_now();
    }
}
