//! The registry: which physical GPU has which instance.

use std::collections::HashMap;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError, Driver, DriverError};
use parking_lot::Mutex;

/// Why a device could not be had.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The ordinal names no device.
    #[error("device {ordinal} was asked for, but there are {count}")]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: i32,
        /// How many devices the driver reports.
        count: i32,
    },
    /// The GPU already has an instance on another context.
    #[error(
        "GPU {ordinal} is in use on context {registered:#x}, so {adopted:#x} cannot be adopted"
    )]
    OtherContext {
        /// CUDA's ordinal of the GPU.
        ordinal: i32,
        /// The context of the registered instance.
        registered: u64,
        /// The context that was to be adopted.
        adopted: u64,
    },
    /// The driver does not tell its devices.
    #[error("the driver refused to tell its devices")]
    Driver(#[from] DriverError),
    /// The device could not be opened.
    #[error("device {ordinal} could not be opened")]
    Open {
        /// The ordinal asked for.
        ordinal: i32,
        /// Why.
        #[source]
        source: DeviceError,
    },
    /// The context could not be adopted.
    #[error("context {context:#x} could not be adopted")]
    Adopt {
        /// The context passed in.
        context: u64,
        /// Why.
        #[source]
        source: DeviceError,
    },
}

/// Hands out one instance per physical GPU of a driver.
///
/// Instances stay open as long as the registry lives, so their identity is stable. One lock guards
/// the map; it is held while a device is opened, so that two first users get the same instance.
#[derive(Debug)]
pub struct DeviceRegistry {
    driver: Arc<dyn Driver>,
    count: i32,
    by_uuid: Mutex<HashMap<[u8; 16], Device>>,
}

impl DeviceRegistry {
    /// A registry over `driver`, with nothing opened yet.
    ///
    /// # Errors
    /// [`RegistryError::Driver`] when the driver does not tell how many devices there are.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self, RegistryError> {
        let count = driver.device_get_count()?;
        Ok(Self { driver, count, by_uuid: Mutex::new(HashMap::new()) })
    }

    /// How many devices there are, opened or not.
    #[must_use]
    pub fn count(&self) -> i32 {
        self.count
    }

    /// The driver that the devices are reached through.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The instance of device `ordinal`, opened on its primary context at the first call.
    ///
    /// # Errors
    /// [`RegistryError::NoSuchDevice`], or [`RegistryError::Open`] with what the driver answered.
    pub fn device(&self, ordinal: i32) -> Result<Device, RegistryError> {
        if ordinal < 0 || ordinal >= self.count {
            return Err(RegistryError::NoSuchDevice { ordinal, count: self.count });
        }
        let uuid = self.driver.device_get_info(ordinal)?.uuid;
        // Opening a device takes a fraction of a second once; the lock is not on any step's path.
        let mut by_uuid = self.by_uuid.lock();
        if let Some(device) = by_uuid.get(&uuid) {
            return Ok(device.clone());
        }
        let device = Device::open(Arc::clone(&self.driver), ordinal)
            .map_err(|source| RegistryError::Open { ordinal, source })?;
        by_uuid.insert(uuid, device.clone());
        Ok(device)
    }

    /// Registers a context that the host program already has as the instance of its GPU.
    ///
    /// # Errors
    /// [`RegistryError::OtherContext`] when the GPU has an instance on another context: two
    /// instances of one GPU are what this registry exists to prevent.
    ///
    /// # Safety
    /// - `context` is a live `CUcontext` of the driver's library, and outlives the registry and
    ///   every handle made from the device.
    pub unsafe fn adopt(&self, context: u64) -> Result<Device, RegistryError> {
        // SAFETY: the caller promises a live context that outlives the device.
        let device = unsafe { Device::adopt(Arc::clone(&self.driver), context) }
            .map_err(|source| RegistryError::Adopt { context, source })?;
        let mut by_uuid = self.by_uuid.lock();
        if let Some(registered) = by_uuid.get(&device.info().uuid) {
            if registered.context() == context {
                return Ok(registered.clone());
            }
            return Err(RegistryError::OtherContext {
                ordinal: device.ordinal(),
                registered: registered.context(),
                adopted: context,
            });
        }
        by_uuid.insert(device.info().uuid, device.clone());
        Ok(device)
    }
}
