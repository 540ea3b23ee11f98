//! What a simulated machine looks like.

use crate::{Pace, Profile, RaceCheck, environment};

/// Most devices of one simulated machine.
const DEVICES_MAX: u32 = 32;

/// Most copy engines of a device.
const COPY_ENGINES_MAX: u32 = 1024;

/// Most percent of a profile.
const PERCENT_MAX: u32 = 1_000_000;

/// Newest architecture whose instructions the simulated device knows, as in `sm_90`.
pub(crate) const COMPUTE_CAPABILITY_MAX: (u32, u32) = (9, 0);

/// The simulated machine: its devices, their memory, and the seed of every choice it makes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SimConfig {
    /// Number of devices, 1 to 32.
    pub devices: u32,
    /// Memory of each device, in bytes: 1 to 8 TiB. Only what is touched takes memory of this process.
    pub device_bytes: u64,
    /// Most pinned host memory there may be at once, in bytes.
    pub pinned_bytes: u64,
    /// Granularity of virtual memory, in bytes: a power of two from 4 KiB to 1 GiB. All reservations
    /// together have at most 2^25 pages of it, and one physical handle at most 2^22.
    pub granularity: u64,
    /// Seed of the scheduler and of the pattern in fresh memory.
    pub seed: u64,
    /// How far the devices go on by themselves at first ([`SimDriver::set_pace`](crate::SimDriver::set_pace)
    /// changes it). By default what the variable `CUDA_SIM_PACE` of the environment says (`slowest`,
    /// `fastest`, `random` or `one-behind`), or [`Pace::Random`] where it is not set.
    pub pace: Pace,
    /// Whether devices can access each other's memory.
    pub peer_access: bool,
    /// How many neighbouring devices can: 0 to 3 and 4 to 7 of eight, if it is 4. At least 1.
    pub peer_group: u32,
    /// Whether the device knows which bytes of its memory were ever written, so that a kernel that
    /// reads others is found. Costs one bit for each byte of pages that are written in part.
    pub track_initialised: bool,
    /// Whether accesses that nothing orders are looked for: see [`Race`](crate::Race).
    pub races: RaceCheck,
    /// Whether the waits inside `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`, `cuModuleUnload` and the end of a
    /// context order what was enqueued before them, as drivers make them. Off: code is looked at as
    /// if they did not wait, as allocators in stream order do not.
    pub implicit_waits: bool,
    /// Compute capability that each device reports, major and minor: at most 9.0, whose PTX it runs.
    pub compute_capability: (u32, u32),
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
            pace: environment::PACE.value(),
            peer_access: true,
            peer_group: DEVICES_MAX,
            track_initialised: true,
            races: environment::RACES.value(),
            implicit_waits: true,
            compute_capability: COMPUTE_CAPABILITY_MAX,
            profile: Profile::h100(),
            name: "Simulated H100".to_owned(),
        }
    }
}

impl SimConfig {
    /// Most memory that a device can have, in bytes: 8 TiB.
    pub const DEVICE_BYTES_MAX: u64 = 8 << 40;

    /// Whether `device` can access memory of `peer`, another device.
    pub(crate) fn can_access(&self, device: u32, peer: u32) -> bool {
        self.peer_access && self.group_of(device) == self.group_of(peer)
    }

    /// The group of neighbours that `device` is in.
    pub(crate) fn group_of(&self, device: u32) -> u32 {
        device / self.peer_group
    }

    pub(crate) fn check(&self) -> Result<(), SimConfigError> {
        environment::check()?;
        if !(1..=DEVICES_MAX).contains(&self.devices) {
            return Err(SimConfigError::Devices { devices: self.devices, most: DEVICES_MAX });
        }
        if self.peer_group == 0 {
            return Err(SimConfigError::PeerGroup);
        }
        let (most, (major, minor)) = (COMPUTE_CAPABILITY_MAX, self.compute_capability);
        if (major, minor) > most || minor > 9 {
            return Err(SimConfigError::ComputeCapability { major, minor, most });
        }
        let sensible = (4 << 10)..=(1 << 30);
        if !self.granularity.is_power_of_two() || !sensible.contains(&self.granularity) {
            return Err(SimConfigError::Granularity { granularity: self.granularity });
        }
        if self.device_bytes == 0 || self.device_bytes > Self::DEVICE_BYTES_MAX {
            return Err(SimConfigError::DeviceBytes { device_bytes: self.device_bytes });
        }
        let Profile { copy_engines, duplex_percent, .. } = self.profile;
        let Profile { set_access_many_percent, unmap_many_percent, .. } = self.profile;
        for (key, found, most) in [
            ("copy_engines", copy_engines, COPY_ENGINES_MAX),
            ("duplex_percent", duplex_percent, PERCENT_MAX),
            ("set_access_many_percent", set_access_many_percent, PERCENT_MAX),
            ("unmap_many_percent", unmap_many_percent, PERCENT_MAX),
        ] {
            if !(1..=most).contains(&found) {
                return Err(SimConfigError::Profile { key, found, most });
            }
        }
        Ok(())
    }
}

/// Why a machine cannot be simulated.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
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
    /// Groups of no devices.
    #[error("devices in peer groups of none")]
    PeerGroup,
    /// An architecture that cannot be simulated.
    #[error("compute capability {major}.{minor}, of which {}.{} is the newest", most.0, most.1)]
    ComputeCapability {
        /// Major number asked for.
        major: u32,
        /// Minor number asked for.
        minor: u32,
        /// The newest, major and minor.
        most: (u32, u32),
    },
    /// A page size that virtual memory cannot have.
    #[error("granularity {granularity} is not a power of two from 4 KiB to 1 GiB")]
    Granularity {
        /// Granularity asked for, in bytes.
        granularity: u64,
    },
    /// A device without memory, or with too much.
    #[error("a device of {device_bytes} bytes, where 1 byte to 8 TiB can be simulated")]
    DeviceBytes {
        /// Memory asked for, in bytes.
        device_bytes: u64,
    },
    /// A variable of the environment with a word that stands for nothing. Every machine is refused then,
    /// whether or not its configuration came from the environment.
    #[error("{variable}={found:?} in the environment, where {} are known", known.join(", "))]
    Environment {
        /// Name of the variable.
        variable: &'static str,
        /// Its value.
        found: String,
        /// The words that it may have.
        known: Vec<&'static str>,
    },
    /// A count or a percentage of the profile that the cost model does not take.
    #[error("{key} = {found} in the profile, where 1 to {most} can be simulated")]
    Profile {
        /// Name of the field of [`Profile`].
        key: &'static str,
        /// Its value.
        found: u32,
        /// The greatest that can be simulated.
        most: u32,
    },
}

cuda_driver::messages::one_line_debug!(SimConfigError);
