//! Protections of a move taken out, so that tests can show what they are for.

use std::cell::Cell;

/// What keeps a move right.
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

/// Takes one protection out of the moves of this thread, or puts all back.
pub fn take_out(protection: Option<Protection>) {
    OUT.set(protection);
}

pub(super) fn is_out(protection: Protection) -> bool {
    OUT.get() == Some(protection)
}
