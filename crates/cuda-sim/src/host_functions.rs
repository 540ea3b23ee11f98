//! Host functions that a stream calls.

use std::cell::{Cell, RefCell};

use cuda_driver::{ErrorCode, HostAccess, HostFunction};

use crate::state::{Answer, Machine};
use crate::work::Work;

thread_local! {
    /// Whether this thread is inside a host function that a stream called.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// The accesses to pinned memory that the host function reported.
    static ACCESSES: RefCell<Vec<HostAccess>> = const { RefCell::new(Vec::new()) };
}

/// A host function and its argument.
///
/// # Invariants
/// `function` may be called with `user_data` once, on any thread: the caller of `launch_host_func`
/// promised it, and [`HostCall::new`] is only called there.
#[derive(Debug)]
pub(crate) struct HostCall {
    function: HostFunction,
    user_data: u64,
}

impl HostCall {
    /// # Safety
    /// - From now on, `function` may be called once with `user_data`, on any thread.
    pub(crate) unsafe fn new(function: HostFunction, user_data: u64) -> Self {
        Self { function, user_data }
    }

    /// Calls the function on this thread, which holds the machine's lock. A driver call inside the
    /// function is refused before it asks for the lock. Returns the accesses that the function
    /// reported.
    pub(crate) fn run(self) -> Vec<HostAccess> {
        let user_data = std::ptr::with_exposed_provenance_mut(self.user_data as usize);
        let outer = INSIDE.replace(true);
        // SAFETY: by the invariants the function may be called once with this argument, and `self`
        // is consumed.
        unsafe { (self.function)(user_data) };
        INSIDE.set(outer);
        ACCESSES.take()
    }
}

/// Refuses a driver call made from inside a host function.
pub(crate) fn refuse_inside() -> Answer<()> {
    if INSIDE.get() { Err(ErrorCode::NOT_PERMITTED) } else { Ok(()) }
}

/// Adds an access to the running operation, if this thread is inside a host function.
pub(crate) fn told_inside(access: HostAccess) -> bool {
    let inside = INSIDE.get();
    if inside {
        ACCESSES.with_borrow_mut(|accesses| accesses.push(access));
    }
    inside
}

impl Machine {
    pub(crate) fn launch_host(&mut self, stream: u64, call: HostCall) -> Answer<()> {
        let (stream, _) = self.stream(stream)?;
        self.enqueue(stream, "cuLaunchHostFunc", Work::CallHost(call));
        Ok(())
    }
}
