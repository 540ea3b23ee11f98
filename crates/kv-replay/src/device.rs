//! The devices of a run: simulated ones, or GPUs by their ordinals.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use cuda_driver::CudaDriver;
use cuda_driver::{CountingDriver, Device, DeviceError, Driver, Unavailable};
use cuda_sim::{Profile, SimConfig, SimConfigError, SimDriver};
use kv_multigpu::place::Strategy;
use kv_multigpu::{DeviceRegistry, RegistryError};
use kv_pool::clock::ManualClock;

use crate::config::RunConfig;
use crate::place::Division;

/// The devices of a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DeviceSpec {
    Sim { devices: u32 },
    Cuda { ordinals: Vec<i32> },
    EveryCuda,
}

#[derive(Clone, Eq, PartialEq, thiserror::Error)]
pub enum DeviceSpecError {
    #[error("unknown device {token:?}; expected sim, sim:N, cuda or cuda:0[,cuda:1…]")]
    Unknown { token: String },
    #[error("{text:?} mixes simulated devices and GPUs; expected sim, sim:N or cuda:0[,cuda:1…]")]
    Mixed { text: String },
    /// A list of simulated devices. Only their number can be given.
    #[error("{text:?} names simulated devices one by one; expected sim:{devices}")]
    SimList { text: String, devices: usize },
    #[error("device {token:?} is named twice")]
    Twice { token: String },
}

cuda_driver::messages::one_line_debug!(DeviceSpecError);

impl Default for DeviceSpec {
    fn default() -> Self {
        Self::Sim { devices: 1 }
    }
}

impl FromStr for DeviceSpec {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<Self, DeviceSpecError> {
        if text == "sim" {
            return Ok(Self::default());
        }
        if text == "cuda" {
            return Ok(Self::EveryCuda);
        }
        if let Some(devices) = text.strip_prefix("sim:").and_then(number)
            && devices > 0
        {
            return Ok(Self::Sim { devices });
        }
        let simulated = |token: &&str| *token == "sim" || token.starts_with("sim:");
        match (text.split(',').count(), text.split(',').filter(simulated).count()) {
            (1, _) | (_, 0) => {}
            (devices, simulated) if devices == simulated => {
                return Err(DeviceSpecError::SimList { text: text.to_owned(), devices });
            }
            _ => return Err(DeviceSpecError::Mixed { text: text.to_owned() }),
        }
        let mut ordinals = Vec::new();
        for token in text.split(',') {
            let ordinal = token
                .strip_prefix("cuda:")
                .and_then(number)
                .ok_or_else(|| DeviceSpecError::Unknown { token: token.to_owned() })?;
            if ordinals.contains(&ordinal) {
                return Err(DeviceSpecError::Twice { token: token.to_owned() });
            }
            ordinals.push(ordinal);
        }
        Ok(Self::Cuda { ordinals })
    }
}

/// Parses a number made only of digits. Rust's own parser would also accept a sign.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sim { devices: 1 } => f.write_str("sim"),
            Self::Sim { devices } => write!(f, "sim:{devices}"),
            Self::Cuda { ordinals } => {
                for (index, ordinal) in ordinals.iter().enumerate() {
                    let separator = if index == 0 { "" } else { "," };
                    write!(f, "{separator}cuda:{ordinal}")?;
                }
                Ok(())
            }
            Self::EveryCuda => f.write_str("cuda"),
        }
    }
}

impl DeviceSpec {
    /// Number of named devices; 0 for those that only the driver can count.
    pub fn count(&self) -> usize {
        match self {
            Self::Sim { devices } => *devices as usize,
            Self::Cuda { ordinals } => ordinals.len(),
            Self::EveryCuda => 0,
        }
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SimSizes {
    /// Memory of each device, in bytes. The process spends memory only on touched pages.
    pub device_bytes: u64,
    pub pinned_bytes: u64,
    /// Seed of the scheduler and of the byte pattern in fresh memory.
    pub seed: u64,
    pub profile: Profile,
}

impl SimSizes {
    /// Enough memory for the pools of `config` and everything else in a run.
    ///
    /// For an invalid shape this counts only the rest: [`RunConfig::check`] refuses the shape.
    pub fn for_config(config: &RunConfig) -> Self {
        /// Block tables, staging, checksums, and rounding up to pages, generously.
        const BESIDE_POOLS_BYTES: u64 = 4 << 30;
        let block_bytes = config.block_bytes().unwrap_or(0);
        let room =
            |blocks: u64| blocks.saturating_mul(block_bytes).saturating_add(BESIDE_POOLS_BYTES);
        // The tokens of an iteration are in a separate buffer before they are stored in the pool.
        let token_bytes = block_bytes / u64::from(config.block_tokens).max(1);
        let chunk_bytes = token_bytes.saturating_mul(config.step_tokens.into());
        let pools = match config.device_memory {
            None => room(config.device_blocks),
            Some(bytes) => bytes.saturating_add(BESIDE_POOLS_BYTES),
        };
        let device_bytes = pools.saturating_add(chunk_bytes);
        Self {
            // A larger pool is refused by `OpenDevices::check_fits`, which names the option.
            device_bytes: device_bytes.min(SimConfig::DEVICE_BYTES_MAX),
            pinned_bytes: room(config.host_blocks),
            seed: config.seed,
            profile: Profile::h100(),
        }
    }
}

#[derive(thiserror::Error)]
pub enum ProfileReadError {
    #[error("cannot read the profile {}: neither h100 nor h200, nor a file", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a profile", path.display())]
    Parse { path: PathBuf, source: SimConfigError },
}

cuda_driver::messages::one_line_debug!(ProfileReadError);

/// The profile `h100`, `h200`, or that of a file in the form of [`Profile::parse`].
pub fn read_profile(name: &str) -> Result<Profile, ProfileReadError> {
    if let Some(profile) = Profile::built_in(name) {
        return Ok(profile);
    }
    let path = || Path::new(name).to_owned();
    let text = fs::read_to_string(name)
        .map_err(|source| ProfileReadError::Read { path: path(), source })?;
    Profile::parse(&text).map_err(|source| ProfileReadError::Parse { path: path(), source })
}

#[derive(thiserror::Error)]
pub enum DeviceOpenError {
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    #[error("there is no cuda:{ordinal}; the driver reports {count} device(s)")]
    NoSuchDevice { ordinal: i32, count: i32 },
    #[error("cannot simulate this machine")]
    Sim(#[from] SimConfigError),
    #[error("cannot open the devices")]
    Registry(#[source] Box<RegistryError>),
    #[error("cannot ask device {ordinal} for its memory")]
    MemoryInfo { ordinal: i32, source: DeviceError },
    /// The pool could never be mapped completely. Without this check that would show late.
    #[error(
        "--device-blocks takes {needed_bytes} bytes on {device}, which has {total_bytes} bytes \
         of memory"
    )]
    TooSmall { device: String, needed_bytes: u64, total_bytes: u64 },
    /// The host tier could never be pinned. Trying might let the operating system kill the process.
    #[error(
        "--host-blocks takes {needed_bytes} bytes, and this machine has {total_bytes} bytes of memory"
    )]
    HostTooSmall { needed_bytes: u64, total_bytes: u64 },
}

cuda_driver::messages::one_line_debug!(DeviceOpenError);

impl From<RegistryError> for DeviceOpenError {
    fn from(error: RegistryError) -> Self {
        Self::Registry(Box::new(error))
    }
}

/// Devices, opened on one driver that counts the calls.
#[derive(Debug)]
pub struct OpenDevices {
    pub driver: Arc<CountingDriver>,
    pub devices: Vec<Device>,
    pub description: String,
    pub sim: Option<Arc<SimDriver>>,
    /// The clock for ages in the pool. A run moves it with the arrival times of its trace, so that
    /// equal runs evict the same blocks.
    pub clock: ManualClock,
}

pub fn open(spec: &DeviceSpec, sim: SimSizes) -> Result<OpenDevices, DeviceOpenError> {
    open_some(spec, sim, |_| true)
}

/// Opens device `position`, counted from 0, of those of `spec`. Behind the last one, the first comes again.
pub fn open_one(
    spec: &DeviceSpec,
    position: usize,
    sim: SimSizes,
) -> Result<OpenDevices, DeviceOpenError> {
    open_some(spec, sim, |(at, count)| at == position % count)
}

/// Opens the devices of `spec` that `wanted` names by their position and their number.
fn open_some(
    spec: &DeviceSpec,
    sim: SimSizes,
    wanted: impl Fn((usize, usize)) -> bool,
) -> Result<OpenDevices, DeviceOpenError> {
    let (upstream, ordinals, sim): (Arc<dyn Driver>, Vec<i32>, _) = match spec {
        DeviceSpec::Sim { devices } => {
            let machine = Arc::new(SimDriver::new(SimConfig {
                devices: *devices,
                device_bytes: sim.device_bytes,
                pinned_bytes: sim.pinned_bytes,
                seed: sim.seed,
                name: format!("Simulated {}", sim.profile.name),
                profile: sim.profile,
                ..SimConfig::default()
            })?);
            machine.register_kernels(kv_kernels::references());
            machine.register_kernels(kv_stage::references());
            (machine.clone(), (0..*devices as i32).collect(), Some(machine))
        }
        DeviceSpec::Cuda { ordinals } => (cuda()?, ordinals.clone(), None),
        DeviceSpec::EveryCuda => (cuda()?, Vec::new(), None),
    };
    let driver = Arc::new(CountingDriver::new(upstream));
    let registry = DeviceRegistry::new(driver.clone())?;
    let count = registry.count();
    let ordinals = if ordinals.is_empty() { (0..count).collect() } else { ordinals };
    if let Some(&ordinal) = ordinals.iter().find(|&&ordinal| ordinal >= count) {
        return Err(DeviceOpenError::NoSuchDevice { ordinal, count });
    }
    let devices = ordinals
        .iter()
        .enumerate()
        .filter(|(position, _)| wanted((*position, ordinals.len())))
        .map(|(_, &ordinal)| registry.device(ordinal))
        .collect::<Result<Vec<Device>, RegistryError>>()?;
    let names: Vec<_> = devices.iter().map(|device| &*device.info().name).collect();
    let description = format!("{spec} ({})", combined(&names));
    Ok(OpenDevices { driver, devices, description, sim, clock: ManualClock::new() })
}

/// Names of devices; equal neighbours are combined.
pub(crate) fn combined(names: &[&str]) -> String {
    let groups = names.chunk_by(|a, b| a == b).map(|group| match group {
        [one] => (*one).to_owned(),
        many => format!("{} x {}", many.len(), many[0]),
    });
    groups.collect::<Vec<_>>().join(", ")
}

/// Memory of this machine in bytes, if the operating system reports it.
pub fn machine_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

impl OpenDevices {
    /// Checks that each device's part of the pool fits into its memory. A run would find that out
    /// only after the pool had grown so far. Also checks that the host tier fits into this
    /// machine's memory, if Linux reports its size.
    pub fn check_fits(&self, config: &RunConfig) -> Result<(), DeviceOpenError> {
        let block_bytes = config.block_bytes().unwrap_or(0);
        let layers = u64::from(config.shape.layers).max(1);
        let layer_bytes = block_bytes / layers;
        let devices = self.devices.len().max(1) as u64;
        // A lower bound. The placement of a run on several devices gives the exact number.
        let bytes_here = match config.place {
            Division::Layers(Strategy::RoundRobin | Strategy::Contiguous) => {
                layer_bytes * (layers / devices)
            }
            Division::Layers(_) if devices > 1 => 0,
            Division::Layers(_) => block_bytes,
            Division::Heads => block_bytes / devices,
        };
        let pools = || config.device_blocks.saturating_mul(bytes_here);
        let needed_bytes = config.device_memory.unwrap_or_else(pools);
        for device in &self.devices {
            let (_, total_bytes) = device.memory_info().map_err(|source| {
                DeviceOpenError::MemoryInfo { ordinal: device.ordinal(), source }
            })?;
            if needed_bytes > total_bytes {
                let device = device.info().name.clone();
                return Err(DeviceOpenError::TooSmall { device, needed_bytes, total_bytes });
            }
        }
        let needed_bytes = config.host_blocks.saturating_mul(block_bytes);
        if let Some(total_bytes) = machine_bytes().filter(|&total| needed_bytes > total) {
            return Err(DeviceOpenError::HostTooSmall { needed_bytes, total_bytes });
        }
        Ok(())
    }
}

fn cuda() -> Result<Arc<dyn Driver>, Unavailable> {
    #[cfg(feature = "cuda")]
    return CudaDriver::probe();
    #[cfg(not(feature = "cuda"))]
    Err(Unavailable::NoLibrary)
}
