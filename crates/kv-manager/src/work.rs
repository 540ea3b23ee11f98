//! Work, counted for tests: names that are made or looked up, prompts and granules that are looked at. The block pools count
//! their own.

use std::cell::Cell;

thread_local! {
    static LOOKS: Cell<u64> = const { Cell::new(0) };
}

pub(crate) fn looks(count: usize) {
    LOOKS.set(LOOKS.get() + count as u64);
}

/// What `act` returns, and at how much it has looked.
pub(crate) fn looks_of<T>(act: impl FnOnce() -> T) -> (T, u64) {
    let before = LOOKS.get();
    let done = act();
    (done, LOOKS.get() - before)
}
