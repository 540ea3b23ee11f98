//! Closing a device: who may close it, the order of the steps, and the outcome.

use crate::guard;

use crate::current::Bound;
use crate::device::{Inner, Object, Retired};
use crate::opened;
use crate::{Device, Driver, DriverError, DriverResult, ErrorCode, HostRegion, LiveHandles, site};

/// The error that lost a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Loss {
    /// The first error, with the call that returned it.
    pub error: DriverError,
    /// Number of the loss within the process. Of several lost devices, the one with the least
    /// number was the first whose loss this process saw.
    pub order: u64,
}

/// A device that was closed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Closed {
    /// Dropped buffers and modules that were freed.
    pub freed: usize,
    /// The error that lost the device, if it was lost. The driver returns it from every call of the
    /// clean-up, and does the work all the same.
    pub lost: Option<DriverError>,
}

/// Why a device was not closed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Objects made from the device are alive.
    #[error("the device is in use: {alive}")]
    InUse {
        /// The device, open as before.
        device: Device,
        /// The live objects.
        alive: LiveHandles,
    },
    /// The device is closed, and the driver refused a part of the clean-up, now or when an object
    /// was dropped.
    #[error("the device was closed, and a call of its clean-up was refused")]
    Refused(#[source] DriverError),
}

crate::messages::one_line_debug!(CloseError);

impl Device {
    /// Closes the device: frees the memory of dropped buffers, unloads dropped modules and releases the context.
    ///
    /// Dropping the last handle does the same, without the outcome.
    ///
    /// # Ordering
    /// Waits in the driver for the work that uses the freed memory.
    ///
    /// # Errors
    /// [`CloseError::InUse`] with the device, while other handles of it, or of objects made from
    /// it, are alive. [`CloseError::Refused`] after every step was tried, with the first refusal,
    /// or else with that of the first object that was given up when it was dropped. The error of a
    /// lost device is no refusal.
    #[track_caller]
    pub fn close(self) -> Result<Closed, CloseError> {
        let alive = self.alive();
        let mut inner = match std::sync::Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(inner) => return Err(CloseError::InUse { device: Self { inner }, alive }),
        };
        let freed = inner.retired.get_mut().len();
        let ended = inner.end().and(guard!("driver.given-up-told", inner.given_up(), else Ok(())));
        let lost = inner.loss.get().map(|loss| loss.error);
        match ended {
            Err(error) if !error.code.is_sticky() => {
                Err(CloseError::Refused(error.on_device(inner.ordinal)))
            }
            Err(error) => Ok(Closed { freed, lost: lost.or(Some(error)) }),
            Ok(()) => Ok(Closed { freed, lost }),
        }
    }
}

impl Inner {
    /// The refusal of the first object that was given up when it was dropped.
    fn given_up(&self) -> DriverResult<()> {
        self.given_up.get().map_or(Ok(()), |error| Err(*error))
    }

    /// Frees retired memory, releases the context and drops its owner. Takes every step even if one
    /// before it failed, and returns the first refusal. A second call does nothing.
    #[track_caller]
    fn end(&mut self) -> DriverResult<()> {
        let _site = guard!("driver.close-site", site::enter(), else site::leave());
        let mut left =
            Left { retired: std::mem::take(self.retired.get_mut()), regions: Vec::new() };
        let mut outcome = Ok(());
        if !left.retired.is_empty() {
            let mut bound = None;
            let entered = twice(|| {
                // SAFETY: the context is alive until the release below (invariant of `context`).
                bound = Some(unsafe { Bound::enter(&*self.driver, self.context) }?);
                Ok(())
            });
            outcome = match entered {
                Ok(()) => free_all(&*self.driver, &mut left),
                Err(error) => {
                    refused(error, "what was dropped was not freed");
                    Err(error)
                }
            };
            // A device that cannot be asked, or did not free it, may still use registered memory.
            std::mem::forget(left.retired);
        }
        drop(self.noted.take());
        if std::mem::take(&mut self.retained) {
            // SAFETY: `open` retained it once and this is its one release (see `once`); every handle made
            // from this device holds a clone of it, so none is left.
            let released = once(|| unsafe { self.driver.device_primary_ctx_release(self.ordinal) });
            if let Err(error) = released {
                refused(error, "a primary context was not released");
                outcome = outcome.and(Err(error));
            }
        }
        self.owner.let_go(&*self.driver);
        outcome
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Refusals are logged, since a destructor returns no result.
        let _ = self.end();
    }
}

/// What there is to free, and what is left of it.
pub(crate) struct Left {
    /// Not freed yet: the calls, if they were made, certainly did nothing.
    pub(crate) retired: Vec<Retired>,
    /// Regions that the device is done with, for the caller to drop.
    pub(crate) regions: Vec<Box<dyn HostRegion>>,
}

/// Frees every entry, even after a refusal, and returns the first refusal.
pub(crate) fn free_all(driver: &dyn Driver, left: &mut Left) -> DriverResult<()> {
    let retired = std::mem::take(&mut left.retired);
    let has = |wanted: fn(&Retired) -> bool| retired.iter().any(wanted);
    // The driver waits for all devices before it frees memory, and for one device before it
    // unregisters memory. It waits for no device before this crate's own memory is freed.
    let registered = has(|memory| matches!(memory, Retired::Registered(_)));
    let settled = if guard!("driver.all-contexts-waited", registered, else false) {
        twice(|| opened::settle(driver))
    } else {
        Ok(())
    };
    let lent = has(|memory| matches!(memory, Retired::Lent(_)));
    let waited = if guard!("driver.lent-waited", lent, else false) {
        twice(|| driver.ctx_synchronize())
    } else {
        Ok(())
    };
    let mut outcome = Ok(());
    for mut memory in retired {
        let freed = match &mut memory {
            Retired::Device(address, uses) => {
                // The driver waits for work that is enqueued, and not for a call that is about to do so.
                guard!("driver.free-waits-calls", uses.wait());
                // SAFETY: an address enters the list when the one buffer that owned it is dropped,
                // and leaves it before this call, which is made once (see `once`). It enters the list
                // again only where the call did nothing.
                once(|| unsafe { driver.mem_free(*address) })
            }
            // SAFETY: as above; the dropped buffer was the only way to reach the memory.
            Retired::Host(host) => once(|| unsafe { driver.mem_free_host(*host) }),
            Retired::Registered(region) => {
                let host = region.address();
                settled.and_then(|()| {
                    // SAFETY: a region enters the list once, when the one buffer that owned it is
                    // dropped, which was the only way to reach it; since then all devices have done
                    // what they had to do. The memory is still ours at a second attempt, so what that
                    // finds registered at the address is this region or nothing.
                    twice(|| unsafe { driver.mem_host_unregister(host) })
                })
            }
            Retired::Lent(_) => waited,
            // SAFETY: an object enters the list when its last handle is dropped, a module at once and
            // another where it is certain that it was not destroyed, so it is live; it leaves the list
            // before this call, made once.
            Retired::Object(object) => once(|| unsafe { destroy(driver, *object) }),
        };
        if let Err(error) = freed {
            refused(error, "what was dropped was not freed");
            outcome = outcome.and(Err(error));
        }
        match freed {
            Err(error) if error.code.is_of_call_not_made() => {
                guard!("driver.refused-kept", left.retired.push(memory));
            }
            // Host memory that the device may still use is never freed. No work of a stopped device
            // uses it.
            Err(error) if guard!("driver.in-use-kept", !error.code.is_sticky(), else false) => {
                std::mem::forget(memory);
            }
            _ => match memory {
                Retired::Registered(region) => left.regions.push(region),
                Retired::Lent(bytes) => drop(bytes),
                Retired::Device(..) | Retired::Host(_) | Retired::Object(_) => {}
            },
        }
    }
    outcome
}

/// # Safety
/// - The object is live, and nothing uses its handle after this call, unless the answer
///   [says that it did nothing](ErrorCode::is_of_call_not_made).
pub(crate) unsafe fn destroy(driver: &dyn Driver, object: Object) -> DriverResult<()> {
    match object {
        // SAFETY: the caller's promise; work that is enqueued still runs.
        Object::Stream(raw) => unsafe { driver.stream_destroy(raw) },
        // SAFETY: the caller's promise.
        Object::Event(raw) => unsafe { driver.event_destroy(raw) },
        // SAFETY: the caller's promise; kernels hold a handle, so none of them is left either.
        Object::Module(raw) => unsafe { driver.module_unload(raw) },
        // SAFETY: the caller's promise; launches that are enqueued still run.
        Object::GraphExec(raw) => unsafe { driver.graph_exec_destroy(raw) },
        Object::Addresses(base, bytes) => {
            let freed = driver.mem_address_free(base, bytes);
            freed.map_err(|error| error.of_range(base, bytes))
        }
        // SAFETY: the caller's promise; memory that is mapped lives on until it is unmapped.
        Object::PhysicalMemory(handle) => unsafe { driver.mem_release(handle) },
    }
}

/// Makes the call that ends a driver's object or memory, and repeats it only if the answer says
/// that the first call did nothing. Any other error may be of earlier work. The object may then be
/// gone, and its number another object's.
pub(crate) fn once(mut call: impl FnMut() -> DriverResult<()>) -> DriverResult<()> {
    call().or_else(|error| if error.code.is_of_call_not_made() { call() } else { Err(error) })
}

/// Repeats a refused call that waits, binds, or acts on memory that is still ours. Without the
/// second attempt the memory would stay until the context ends, or for ever. A lost device returns
/// its error again.
fn twice(mut call: impl FnMut() -> DriverResult<()>) -> DriverResult<()> {
    call().or_else(|error| if error.code.is_sticky() { Err(error) } else { call() })
}

/// Logs a refusal of clean-up. If the device is lost, or the driver is ending with the process, the
/// level is lower, since the memory is gone with its context.
pub(crate) fn refused(error: DriverError, what: &'static str) {
    if error.code.is_sticky() || error.code == ErrorCode::DEINITIALIZED {
        tracing::debug!(%error, "{what}");
    } else {
        tracing::warn!(%error, "{what}");
    }
}
