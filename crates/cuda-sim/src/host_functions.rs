//! Functions of the host that a stream calls.

use std::cell::{Cell, RefCell};

use cuda_driver::{ErrorCode, HostAccess, HostFunction};

use crate::state::{Answer, Machine};
use crate::work::Work;

thread_local! {
    /// Whether this thread is inside a function that a stream called.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// What it told of the pinned memory that it touched.
    static ACCESSES: RefCell<Vec<HostAccess>> = const { RefCell::new(Vec::new()) };
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
    /// before it asks for the lock. The answer is what it told of the memory that it touched.
    pub(crate) fn run(self) -> Vec<HostAccess> {
        let user_data = std::ptr::with_exposed_provenance_mut(self.user_data as usize);
        let outer = INSIDE.replace(true);
        // SAFETY: it may be called with this argument once (invariants), and `self` is consumed.
        unsafe { (self.function)(user_data) };
        INSIDE.set(outer);
        ACCESSES.take()
    }
}

/// Refuses a driver call that a host function makes.
pub(crate) fn refuse_inside() -> Answer<()> {
    if INSIDE.get() { Err(ErrorCode::NOT_PERMITTED) } else { Ok(()) }
}

/// Keeps an access for the operation that runs, if this thread is inside a host function.
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
