//! What a simulated machine looks like.

use crate::Profile;

/// Most devices of one simulated machine.
const DEVICES_MAX: u32 = 32;

/// The simulated machine: its devices, their memory, and the seed of every choice it makes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SimConfig {
    /// Number of devices, 1 to 32.
    pub devices: u32,
    /// Memory of each device, in bytes. Only what is touched takes memory of this process.
    pub device_bytes: u64,
    /// Most pinned host memory there may be at once, in bytes.
    pub pinned_bytes: u64,
    /// Granularity of virtual memory, in bytes: a power of two from 4 KiB to 1 GiB.
    pub granularity: u64,
    /// Seed of the scheduler and of the pattern in fresh memory.
    pub seed: u64,
    /// Whether every pair of devices can access each other's memory.
    pub peer_access: bool,
    /// Whether the device knows which bytes of its memory were ever written, so that a kernel that
    /// reads others is found. Costs one bit for each byte of pages that are written in part.
    pub track_initialised: bool,
    /// What operations and calls cost in virtual time.
    pub profile: Profile,
    /// Name that each device reports.
    pub name: String,
}

impl Default for SimConfig {
    /// One device of 8 GiB with pages of 2 MiB.
    fn default() -> Self {
        Self {
            devices: 1,
            device_bytes: 8 << 30,
            pinned_bytes: 8 << 30,
            granularity: 2 << 20,
            seed: 0,
            peer_access: true,
            track_initialised: true,
            profile: Profile::h100(),
            name: "Simulated H100".to_owned(),
        }
    }
}

impl SimConfig {
    pub(crate) fn check(&self) -> Result<(), SimConfigError> {
        if !(1..=DEVICES_MAX).contains(&self.devices) {
            return Err(SimConfigError::Devices { devices: self.devices, most: DEVICES_MAX });
        }
        let sensible = (4 << 10)..=(1 << 30);
        if !self.granularity.is_power_of_two() || !sensible.contains(&self.granularity) {
            return Err(SimConfigError::Granularity { granularity: self.granularity });
        }
        if self.device_bytes == 0 || self.device_bytes > 1 << 46 {
            return Err(SimConfigError::DeviceBytes { device_bytes: self.device_bytes });
        }
        Ok(())
    }
}

/// Why a machine cannot be simulated.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimConfigError {
    /// Too few or too many devices.
    #[error("{devices} devices, where 1 to {most} can be simulated")]
    Devices {
        /// Devices asked for.
        devices: u32,
        /// Most that there can be.
        most: u32,
    },
    /// A page size that virtual memory cannot have.
    #[error("granularity {granularity} is not a power of two from 4 KiB to 1 GiB")]
    Granularity {
        /// Granularity asked for, in bytes.
        granularity: u64,
    },
    /// A device without memory, or with more than its addresses can name.
    #[error("a device of {device_bytes} bytes, where 1 byte to 64 TiB can be simulated")]
    DeviceBytes {
        /// Memory asked for, in bytes.
        device_bytes: u64,
    },
}
