//! The configuration of a simulated machine.

use cuda_driver::{Classed, ErrorClass, guard};

use crate::{Pace, Profile, RaceCheck, environment};

/// Maximum number of devices of one simulated machine.
const DEVICES_MAX: u32 = 32;

/// Maximum number of copy engines of a device.
const COPY_ENGINES_MAX: u32 = 1024;

/// Upper limit of each percentage of a profile.
const PERCENT_MAX: u32 = 1_000_000;

/// Newest compute capability that the simulated device supports, as in `sm_90`.
pub(crate) const COMPUTE_CAPABILITY_MAX: (u32, u32) = (9, 0);

/// The simulated machine: its devices, their memory, and the seed of all its random choices.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SimConfig {
    /// Number of devices, 1 to 32.
    pub devices: u32,
    /// Memory of each device, in bytes: 1 to 8 TiB. The host process spends memory only on pages
    /// that are touched.
    pub device_bytes: u64,
    /// Maximum of pinned host memory at any time, in bytes.
    pub pinned_bytes: u64,
    /// Granularity of virtual memory, in bytes: a power of two from 4 KiB to 1 GiB. All
    /// reservations together hold at most 2^25 pages, and one physical handle at most 2^22.
    pub granularity: u64,
    /// Seed of the scheduler and of the byte pattern in fresh memory.
    pub seed: u64,
    /// Initial pace: how far the devices advance on their own
    /// ([`SimDriver::set_pace`](crate::SimDriver::set_pace) changes the pace). The default is the
    /// value of the environment variable `CUDA_SIM_PACE` (`slowest`, `fastest`, `random` or
    /// `one-behind`), or [`Pace::Random`] where the variable is not set.
    pub pace: Pace,
    /// Whether devices can access each other's memory.
    pub peer_access: bool,
    /// Number of neighbouring devices that can access each other's memory, at least 1. With 4 of 8
    /// devices: devices 0 to 3, and devices 4 to 7.
    pub peer_group: u32,
    /// Whether the device records which bytes of its memory were ever written. A kernel that reads
    /// any other byte is then reported. Costs one bit for each byte of partly written pages.
    pub track_initialised: bool,
    /// Whether the device looks for accesses that nothing orders: see [`Race`](crate::Race).
    pub races: RaceCheck,
    /// Whether the implicit waits of `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`,
    /// `cuModuleUnload` and of the end of a context order earlier work, as in NVIDIA's drivers.
    /// With `false`, the race check treats those calls as if they did not wait, like an allocator
    /// in stream order. The end of a context then abandons work: the two race, and the work is over
    /// afterwards, but what it waited for may not be.
    pub implicit_waits: bool,
    /// Compute capability that each device reports, major and minor: at most 9.0. The device runs
    /// PTX for that architecture.
    pub compute_capability: (u32, u32),
    /// Costs of operations and calls in virtual time.
    pub profile: Profile,
    /// Device name that each device reports.
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
            pace: guard!("sim.pace-of-environment", environment::PACE.value(), else Pace::Random),
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
    /// Maximum memory of one device, in bytes: 8 TiB.
    pub const DEVICE_BYTES_MAX: u64 = 8 << 40;

    /// Whether `device` can access memory of `peer`, another device.
    pub(crate) fn can_access(&self, device: u32, peer: u32) -> bool {
        self.peer_access && self.group_of(device) == self.group_of(peer)
    }

    pub(crate) fn group_of(&self, device: u32) -> u32 {
        device / self.peer_group
    }

    pub(crate) fn check(&self) -> Result<(), SimConfigError> {
        guard!("sim.unknown-pace", environment::check()?);
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

/// Why a configuration is refused, or a text is no profile or no script of a schedule.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimConfigError {
    /// The number of devices is 0 or too large.
    #[error("cannot simulate {devices} devices: the number must be 1 to {most}")]
    Devices {
        /// Requested number of devices.
        devices: u32,
        /// Maximum number of devices.
        most: u32,
    },
    /// The peer group size is 0.
    #[error("cannot simulate peer groups of 0 devices")]
    PeerGroup,
    /// The compute capability is not supported.
    #[error("cannot simulate compute capability {major}.{minor}: the newest is {}.{}", most.0, most.1)]
    ComputeCapability {
        /// Requested major number.
        major: u32,
        /// Requested minor number.
        minor: u32,
        /// The newest supported capability, major and minor.
        most: (u32, u32),
    },
    /// The granularity is not one that virtual memory can have.
    #[error("granularity {granularity} is not a power of two from 4 KiB to 1 GiB")]
    Granularity {
        /// Requested granularity, in bytes.
        granularity: u64,
    },
    /// The memory size of a device is 0 or too large.
    #[error("cannot simulate a device of {device_bytes} bytes: the size must be 1 byte to 8 TiB")]
    DeviceBytes {
        /// Requested memory, in bytes.
        device_bytes: u64,
    },
    /// An environment variable has an unknown value. Every machine is refused then, even if its
    /// configuration does not come from the environment.
    #[error("environment variable {variable}={found:?} is none of {}", known.join(", "))]
    Environment {
        /// Name of the variable.
        variable: &'static str,
        /// Its value.
        found: String,
        /// The values that it may have.
        known: Vec<&'static str>,
    },
    /// A count or percentage of the profile is outside the range of the cost model.
    #[error("cannot simulate a profile with {key} = {found}: the value must be 1 to {most}")]
    Profile {
        /// Name of the field of [`Profile`].
        key: &'static str,
        /// Its value.
        found: u32,
        /// The greatest value allowed.
        most: u32,
    },
    /// A line of a profile has no equals sign.
    #[error("line {line}: expected `key = value`")]
    NoProfileValue {
        /// The line, counted from 1.
        line: usize,
    },
    /// A key of a profile is unknown.
    #[error("line {line}: unknown key `{key}`")]
    UnknownProfileKey {
        /// The line, counted from 1.
        line: usize,
        /// The key.
        key: String,
    },
    /// A key of a profile was already given on an earlier line.
    #[error("line {line}: `{key}` is given a second time")]
    ProfileKeyTwice {
        /// The line, counted from 1.
        line: usize,
        /// The key.
        key: String,
    },
    /// The base of a profile is not a built-in profile, or comes after other keys.
    #[error("line {line}: `base` takes h100 or h200 and comes first, found `{found}`")]
    ProfileBase {
        /// The line, counted from 1.
        line: usize,
        /// The text.
        found: String,
    },
    /// A value of a profile does not have the form that its key takes.
    #[error("line {line}: `{key}` takes {form}, not `{found}`")]
    ProfileValue {
        /// The line, counted from 1.
        line: usize,
        /// The key.
        key: String,
        /// The text.
        found: String,
        /// The form that the key takes.
        form: &'static str,
    },
    /// A text is no script of a schedule.
    #[error("{part:?} is not a decision of a schedule")]
    Script {
        /// The part that is not a number.
        part: String,
    },
}

cuda_driver::messages::one_line_debug!(SimConfigError);

impl Classed for SimConfigError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Shed
    }
}
