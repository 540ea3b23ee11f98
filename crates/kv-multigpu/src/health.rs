//! The state of each device, and the results of closing it.

use cuda_driver::{Closed, DriverError, LiveHandles};

use crate::RegistryError;
use crate::identity::{DeviceKind, DeviceUuid};

/// The state of a device, as this process knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum DeviceState {
    /// It has not been opened yet.
    Unopened,
    /// It can be handed out.
    Open,
    /// It is not handed out any more. Handles made from it may still be alive.
    Draining,
    /// A sticky error lost it. It can be drained and closed.
    Lost {
        /// The first error, with the call that returned it.
        first: DriverError,
        /// Ordinal of another device that was lost earlier by the same error: the cause is there.
        /// NVIDIA's driver returns the error of one device's fault in all contexts of the process.
        after: Option<i32>,
    },
    /// Its context was released.
    Closed {
        /// The error that lost it, if any.
        lost: Option<DriverError>,
    },
}

/// One device of a report.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct DeviceEntry {
    /// CUDA's ordinal in this process.
    pub ordinal: i32,
    /// Its UUID.
    pub uuid: DeviceUuid,
    /// Its marketing name.
    pub name: String,
    /// PCI bus id, `domain:bus:device.function`; for a part of a GPU, that of the GPU.
    pub pci_bus_id: String,
    /// All memory of the device, in bytes.
    pub total_bytes: u64,
    /// Whether it is a whole GPU.
    pub kind: DeviceKind,
    /// NVML's index of the GPU, if a directory knows it.
    pub nvml_index: Option<u32>,
    /// Its state.
    pub state: DeviceState,
    /// The live handles made from it.
    pub alive: LiveHandles,
}

/// The result of draining a device: it accepts no work and has none left.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Drained {
    /// The error that lost the device, if any. The drain did not wait for work then.
    pub lost: Option<DriverError>,
    /// Number of dropped buffers whose memory was freed.
    pub freed: usize,
    /// Live handles, which must be dropped before the device can be closed.
    pub alive: LiveHandles,
}

impl Drained {
    pub(crate) fn new(lost: Option<DriverError>, freed: usize, alive: LiveHandles) -> Self {
        Self { lost, freed, alive }
    }
}

/// The results of closing all devices, in the order in which they were closed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct CloseReport {
    /// Ordinal and result of each device that was open.
    pub devices: Vec<(i32, Result<Closed, RegistryError>)>,
}

impl CloseReport {
    /// Whether every device was closed and no clean-up was refused.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.devices.iter().all(|(_, outcome)| outcome.is_ok())
    }
}
