//! The contexts that this process has opened. All of them may read memory that one of them
//! registered.
//!
//! `cuMemHostUnregister` waits only for the work of the context that registered the memory. On
//! driver 580, a pending copy of another device then lost that device.

use parking_lot::Mutex;

use crate::guard;

use crate::current::Bound;
use crate::{Driver, DriverResult};

/// The driver library of a context.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Library {
    /// NVIDIA's library, through any driver object.
    Cuda,
    /// A simulated machine, identified by the address of its driver object.
    Object(usize),
}

impl Library {
    fn of(driver: &dyn Driver) -> Self {
        match driver.name() {
            "cuda" => Self::Cuda,
            _ => Self::Object(std::ptr::from_ref(driver).addr()),
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Opened {
    library: Library,
    /// # Invariants
    /// Alive while it is listed, since its device drops its `Noted` before it releases the context.
    context: u64,
}

/// Held while devices are waited for, so that none of their contexts ends meanwhile. Opening or
/// closing a device waits as long; the step path does neither.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// One device's entry in the list of contexts. A drop takes out this entry, and no other device's
/// on the same context.
#[derive(Debug)]
pub(crate) struct Noted(Opened);

/// Notes a context, once for each device that uses it.
pub(crate) fn note(driver: &dyn Driver, context: u64) -> Noted {
    let opened = Opened { library: Library::of(driver), context };
    OPENED.lock().push(opened);
    Noted(opened)
}

impl Drop for Noted {
    fn drop(&mut self) {
        let mut opened = OPENED.lock();
        if let Some(place) = opened.iter().position(|other| *other == self.0) {
            guard!(
                "driver.own-entry",
                { opened.swap_remove(place); },
                else opened.retain(|other| *other != self.0)
            );
        }
    }
}

/// Waits until every context of the driver's library except the current one has completed its work.
/// Lost devices have stopped.
///
/// # Ordering
/// Waits on the host for all devices.
///
/// # Errors
/// An error of the driver; some context may then still have work.
pub(crate) fn settle(driver: &dyn Driver) -> DriverResult<()> {
    let current = driver.ctx_get_current()?;
    let opened = OPENED.lock();
    let library = Library::of(driver);
    let others = opened.iter().filter(|other| other.library == library && other.context != current);
    for other in others {
        // SAFETY: the context is alive while it is in the list (its invariant), which is locked.
        let bound = unsafe { Bound::enter(driver, other.context) };
        match bound.and_then(|_bound| driver.ctx_synchronize()) {
            Err(error) if !error.code.is_sticky() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
