//! The real driver, found and loaded at run time.

mod api;
mod batch;
mod calls;
mod descriptors;
pub mod interop;
mod jit;
mod library;

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::{Driver, DriverError, ErrorCode, Unavailable};
use api::Api;
use batch::BatchCall;

// Sizes and host addresses pass between `u64` and `usize` unchanged.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// NVIDIA's driver library (`libcuda`), as a [`Driver`].
///
/// The library is loaded when [`load`](CudaDriver::load) is called, so programs build and start on
/// machines without one. All calls are looked up then, so a `CudaDriver` lacks no call. The
/// exception is `cuMemcpyBatchAsync`, which drivers before 12.8 do not have; it then returns an
/// error.
///
/// A result code is kept as the number that the library returned, so a driver newer than this
/// crate may answer with codes that this crate has no name for.
///
/// ```
/// match cuda_driver::CudaDriver::load() {
///     Ok(driver) => assert_eq!(cuda_driver::Driver::name(&driver), "cuda"),
///     Err(unavailable) => assert!(!unavailable.to_string().is_empty()),
/// }
/// ```
pub struct CudaDriver {
    api: Api,
    batch: BatchCall,
}

impl CudaDriver {
    /// Finds the driver library, loads and initialises it.
    ///
    /// The library stays loaded until the process ends. Loading again is cheap.
    ///
    /// # Errors
    /// [`Unavailable`] says what is missing: the library, one of its calls, a working installation
    /// or a device.
    pub fn load() -> Result<Self, Unavailable> {
        let library = library::find().ok_or(Unavailable::NoLibrary)?;
        let mut address_of = |symbol: &'static str| -> *mut c_void {
            // SAFETY: the address is only carried here; `Api::resolve` gives it its type.
            let found = unsafe { library.get::<*mut c_void>(symbol) };
            found.map_or(ptr::null_mut(), |address| *address)
        };
        // SAFETY: the addresses come from the driver library, which is never unloaded (`library`).
        let api = unsafe { Api::resolve(&mut address_of) }?;
        // SAFETY: as above.
        let batch = unsafe { BatchCall::resolve(&mut address_of) };
        // SAFETY: takes no pointers; the flags must be 0.
        unsafe { api.cuInit(0) }.map_err(unavailable)?;
        let driver = Self { api, batch };
        let count = driver.device_get_count().map_err(unavailable)?;
        if count < 1 {
            return Err(Unavailable::NoDevice);
        }
        driver.check_ordinals(count).map_err(Unavailable::Init)?;
        Ok(driver)
    }

    /// As [`load`](CudaDriver::load), as the `Arc` that [`Device::open`](crate::Device::open)
    /// takes.
    ///
    /// # Errors
    /// As [`load`](CudaDriver::load).
    pub fn probe() -> Result<Arc<dyn Driver>, Unavailable> {
        Ok(Arc::new(Self::load()?))
    }

    /// Checks an assumption of `calls`: a `CUdevice` is the device's ordinal.
    fn check_ordinals(&self, count: i32) -> Result<(), DriverError> {
        for ordinal in 0..count {
            let mut device = -1;
            // SAFETY: `device` is live and of the type that the call writes.
            unsafe { self.api.cuDeviceGet(&mut device, ordinal) }?;
            if device != ordinal {
                return Err(DriverError::new("cuDeviceGet", ErrorCode::INVALID_DEVICE));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver").finish_non_exhaustive()
    }
}

/// The caller's error for an answer to initialisation.
fn unavailable(error: DriverError) -> Unavailable {
    match error.code {
        ErrorCode::NO_DEVICE => Unavailable::NoDevice,
        _ => Unavailable::Init(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_devices_is_told_from_a_broken_installation() {
        let no_device = DriverError::new("cuInit", ErrorCode::NO_DEVICE);
        assert_eq!(unavailable(no_device), Unavailable::NoDevice);
        let stub = DriverError::new("cuInit", ErrorCode::STUB_LIBRARY);
        assert_eq!(unavailable(stub), Unavailable::Init(stub));
    }

    #[test]
    fn the_driver_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<CudaDriver>();
    }
}
