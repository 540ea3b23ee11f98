//! Switches that disable protections, for tests that must see the harm; absent from release builds.

use std::sync::atomic::{AtomicBool, Ordering};

use super::SequenceSpace;

#[derive(Debug, Default)]
pub(super) struct Sabotage {
    rest_at_once: AtomicBool,
}

impl Sabotage {
    pub(super) fn rests_at_once(&self) -> bool {
        self.rest_at_once.load(Ordering::Relaxed)
    }
}

impl SequenceSpace {
    /// From now on a finished sequence counts as at rest, even if work uses it.
    pub fn sabotage_rest_at_once(&self) {
        self.core.sabotage.rest_at_once.store(true, Ordering::Relaxed);
    }
}
