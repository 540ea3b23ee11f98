//! The contexts that this process has opened, because memory that one of them registered may be read by
//! all of them.
//!
//! `cuMemHostUnregister` waits for the work of the context that registered the memory, and of no other:
//! on driver 580, a copy of another device that was under way then lost that device.

use parking_lot::Mutex;

use crate::device::Bound;
use crate::{Driver, DriverResult};

/// A context of a driver object, which is told from others by its address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Opened {
    driver: usize,
    /// # Invariants
    /// Alive until `forget`, since its device forgets it before it lets go of it.
    context: u64,
}

/// Held while devices are waited for, so that none of their contexts ends meanwhile. Who opens or
/// closes a device waits as long; the step path does neither.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

fn address(driver: &dyn Driver) -> usize {
    std::ptr::from_ref(driver).addr()
}

/// Notes a context, once for each device that uses it.
pub(crate) fn note(driver: &dyn Driver, context: u64) {
    OPENED.lock().push(Opened { driver: address(driver), context });
}

/// Forgets a context that is about to be let go of, for one of the devices that use it.
pub(crate) fn forget(driver: &dyn Driver, context: u64) {
    let ended = Opened { driver: address(driver), context };
    let mut opened = OPENED.lock();
    if let Some(place) = opened.iter().position(|other| *other == ended) {
        opened.swap_remove(place);
    }
}

/// Waits until every context of `driver` but the current one has done its work. Devices that are lost
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
    let others =
        opened.iter().filter(|other| other.driver == address(driver) && other.context != current);
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
