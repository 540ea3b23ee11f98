//! Work, counted for tests: how often an operation looks at the record of a block, at a line of the index, or at what
//! is known of a tenant.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

#[inline]
pub(crate) fn step() {
    STEPS.set(STEPS.get() + 1);
}

/// What `act` returns, and how many steps it has taken.
pub(crate) fn steps<T>(act: impl FnOnce() -> T) -> (T, u64) {
    let before = STEPS.get();
    let done = act();
    (done, STEPS.get() - before)
}
