//! Disables protections of a move, so that tests see the harm.

use std::cell::Cell;

/// A protection of a move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Protection {
    /// The move reads its source after the work that wrote it.
    SourceOrder,
    /// The move owns its ends until it has completed.
    SourceHeld,
}

thread_local! {
    static OUT: Cell<Option<Protection>> = const { Cell::new(None) };
}

/// Disables one protection for the moves of this thread, or enables all again.
pub fn take_out(protection: Option<Protection>) {
    OUT.set(protection);
}

pub(super) fn is_out(protection: Protection) -> bool {
    OUT.get() == Some(protection)
}
