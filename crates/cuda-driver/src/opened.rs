//! The contexts that this process has opened, because memory that one of them registered may be read by
//! all of them.
//!
//! `cuMemHostUnregister` waits for the work of the context that registered the memory, and of no other:
//! on driver 580, a copy of another device that was under way then lost that device.

use parking_lot::Mutex;

use crate::current::Bound;
use crate::{Driver, DriverResult};

/// Whose contexts are of one process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Library {
    /// NVIDIA's, through whatever driver object.
    Cuda,
    /// A simulated machine's, which a driver object stands for; told from others by its address.
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
    /// Alive while it is listed, since its device drops its `Noted` before it lets go of it.
    context: u64,
}

/// Held while devices are waited for, so that none of their contexts ends meanwhile. Who opens or
/// closes a device waits as long; the step path does neither.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// One device's entry in the list of contexts, which is taken out when this is dropped: once, and no
/// other device's on the same context.
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
            opened.swap_remove(place);
        }
    }
}

/// Waits until every context of the driver's library but the current one has done its work. Devices that are lost
/// have stopped.
///
/// # Ordering
/// Waits on the host for all devices.
///
/// # Errors
/// What the driver answers; some context may then still be at work.
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
