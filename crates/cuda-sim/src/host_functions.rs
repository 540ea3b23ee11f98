//! Functions of the host that a stream calls.

use std::cell::Cell;

use cuda_driver::{ErrorCode, HostFunction};

use crate::state::{Answer, State};
use crate::work::Work;

thread_local! {
    /// Whether this thread is inside a function that a stream called.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A function to be called, and its argument.
///
/// # Invariants
/// `function` may be called with `user_data` once, on any thread: the caller of
/// `launch_host_func` promised it, and [`HostCall::new`] is only called there.
#[derive(Debug)]
pub(crate) struct HostCall {
    function: HostFunction,
    user_data: u64,
}

impl HostCall {
    /// # Safety
    /// - `function` may be called with `user_data` once, on any thread, from now on.
    pub(crate) unsafe fn new(function: HostFunction, user_data: u64) -> Self {
        Self { function, user_data }
    }

    /// Calls it on this thread, which holds the machine's lock: a driver call in it is refused
    /// before it asks for the lock.
    pub(crate) fn run(self) {
        let user_data = std::ptr::with_exposed_provenance_mut(self.user_data as usize);
        let outer = INSIDE.replace(true);
        // SAFETY: it may be called with this argument once (invariants), and `self` is consumed.
        unsafe { (self.function)(user_data) };
        INSIDE.set(outer);
    }
}

/// Refuses a driver call that a host function makes.
pub(crate) fn refuse_inside() -> Answer<()> {
    if INSIDE.get() { Err(ErrorCode::NOT_PERMITTED) } else { Ok(()) }
}

impl State {
    pub(crate) fn launch_host(&mut self, stream: u64, call: HostCall) -> Answer<()> {
        let (stream, _) = self.stream(stream)?;
        self.enqueue(stream, "cuLaunchHostFunc", Work::CallHost(call));
        Ok(())
    }
}
