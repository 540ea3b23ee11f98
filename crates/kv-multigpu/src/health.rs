//! What has become of each device, and what closing it said.

use cuda_driver::{Closed, DriverError, LiveHandles};

use crate::identity::{DeviceKind, DeviceUuid};

/// What has become of a device, as this process knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum DeviceState {
    /// It has not been opened yet.
    Unopened,
    /// It is handed out.
    Open,
    /// It is not handed out any more, and what was made from it may still be alive.
    Draining,
    /// A sticky error lost it; it can be drained and closed.
    Lost {
        /// The first error, with the call that met it.
        first: DriverError,
        /// Ordinal of a device that was lost before it by the same error: look there for the cause.
        /// NVIDIA's driver answers the error of one device's fault in all contexts of the process.
        after: Option<i32>,
    },
    /// Its context was given back.
    Closed {
        /// The error that had lost it, if one had.
        lost: Option<DriverError>,
    },
}

impl DeviceState {
    /// Whether the device can still be given work.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        matches!(self, Self::Unopened | Self::Open)
    }
}

/// One device, as a report has it.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct DeviceEntry {
    /// CUDA's ordinal in this process.
    pub ordinal: i32,
    /// Its UUID.
    pub uuid: DeviceUuid,
    /// Its marketing name.
    pub name: String,
    /// PCI bus id, `domain:bus:device.function`; of a part, its GPU's.
    pub pci_bus_id: String,
    /// All memory of the device, in bytes.
    pub total_bytes: u64,
    /// Whether it is a whole GPU.
    pub kind: DeviceKind,
    /// NVML's index of the GPU, where a directory knows it.
    pub nvml_index: Option<u32>,
    /// What has become of it.
    pub state: DeviceState,
    /// What was made from it and is alive.
    pub alive: LiveHandles,
}

/// A device that takes no more work and has none left.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Drained {
    /// The error that lost the device, if one did. The drain did not wait for work then.
    pub lost: Option<DriverError>,
    /// Dropped buffers whose memory was freed.
    pub freed: usize,
    /// What is still alive and must be dropped before the device can be closed.
    pub alive: LiveHandles,
}

impl Drained {
    pub(crate) fn new(lost: Option<DriverError>, freed: usize, alive: LiveHandles) -> Self {
        Self { lost, freed, alive }
    }
}

/// Why a device was not closed.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseDeviceError {
    /// The ordinal names no device.
    #[error("no device {ordinal} to close: the driver reports {count}")]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: i32,
        /// How many devices the driver reports.
        count: i32,
    },
    /// It is not open.
    #[error("no device {ordinal} to close: it is not open")]
    NotOpen {
        /// The ordinal asked for.
        ordinal: i32,
    },
    /// Something that was made from it is alive. It is drained, and can be closed later.
    #[error("device {ordinal} cannot be closed while it is in use: {alive}")]
    InUse {
        /// The ordinal asked for.
        ordinal: i32,
        /// What is alive.
        alive: LiveHandles,
    },
    /// It is closed, and the driver refused a part of the clean-up.
    #[error("device {ordinal} is closed, and a part of its clean-up was refused")]
    Refused {
        /// The ordinal asked for.
        ordinal: i32,
        /// The first refusal.
        #[source]
        source: DriverError,
    },
}

cuda_driver::messages::one_line_debug!(CloseDeviceError);

/// What closing all devices said, in the order in which they were closed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct CloseReport {
    /// Ordinal and outcome of each device that was open.
    pub devices: Vec<(i32, Result<Closed, CloseDeviceError>)>,
}

impl CloseReport {
    /// Whether every device was closed and no clean-up was refused.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.devices.iter().all(|(_, outcome)| outcome.is_ok())
    }
}
