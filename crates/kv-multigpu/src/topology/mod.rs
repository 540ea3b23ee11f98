//! Where the devices of a machine are, and what joins them: from CUDA, from NVML where there is one, and
//! from the host's list of PCI devices.
//!
//! A fact that no source has is `None` or [`LinkKind::Unknown`]. Nothing here fails because a library or a
//! file is missing.
//!
//! ```
//! use std::sync::Arc;
//!
//! use cuda_sim::{SimConfig, SimDriver};
//! use kv_multigpu::DeviceRegistry;
//! use kv_multigpu::topology::{LinkMeter, Sources, Topology};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = SimConfig { devices: 4, peer_group: 2, device_bytes: 64 << 20, ..SimConfig::default() };
//! let driver = SimDriver::new(config)?;
//! let registry = DeviceRegistry::new(Arc::new(driver))?;
//! let devices = (0..4).map(|i| registry.device(i)).collect::<Result<Vec<_>, _>>()?;
//!
//! let topology = Topology::discover(&devices, &Sources::default())?;
//! assert!(topology.pair(0, 1).is_some_and(|pair| pair.access));
//! assert!(topology.pair(1, 2).is_some_and(|pair| !pair.access));
//!
//! // On request: copies are timed once for each pair, and then known.
//! let meter = LinkMeter::new();
//! let links = meter.matrix(&devices)?;
//! assert!(links.link(0, 1).map(|l| l.bytes_per_second) > links.link(1, 2).map(|l| l.bytes_per_second));
//! # Ok(())
//! # }
//! ```

mod meter;
#[cfg(feature = "nvml")]
mod nvml;
mod sysfs;

use std::fmt;
use std::path::PathBuf;

use cuda_driver::{Device, DeviceAttribute, DeviceError, PeerAttribute};

use kv_place::{GpuCapacity, Link, LinkMatrix, PlacementError};

pub use meter::LinkMeter;
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use nvml::NvmlLinks;

/// One device and where it is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GpuPlace {
    /// CUDA's ordinal in this process.
    pub ordinal: i32,
    /// UUID, the same in every process.
    pub uuid: [u8; 16],
    /// Name.
    pub name: String,
    /// `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// The PCIe bridges above it, from the host bridge down. Empty where the host does not list them.
    pub pcie_ancestors: Vec<String>,
    /// The host's memory node beside it.
    pub numa_node: Option<u32>,
    /// All memory, in bytes.
    pub memory_bytes: u64,
    /// Speed of the memory by its clock and width, in bytes a second.
    pub memory_bytes_per_second: Option<u64>,
}

/// The way from one device to another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PairLink {
    /// Whether the first can access memory of the second.
    pub access: bool,
    /// Whether atomic operations on it are done by the second.
    pub native_atomics: bool,
    /// How CUDA ranks it among the machine's: 0 is the quickest.
    pub rank: Option<i32>,
    /// The kind of link, if the [`LinkSource`] knows it. It does not follow from the places on PCIe, because GPUs with
    /// NVLink are below one host bridge too.
    pub kind: LinkKind,
    /// How far they are from each other on PCIe, by the host's list.
    pub pcie: Option<PcieDistance>,
}

/// What joins two devices.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum LinkKind {
    /// NVLink, directly or through switches.
    NvLink {
        /// Links that serve the pair.
        links: u32,
        /// Generation, where NVML tells.
        version: Option<u32>,
    },
    /// PCIe.
    Pcie(PcieDistance),
    /// No source knows.
    Unknown,
}

impl LinkKind {
    /// The nominal speed in one direction, in bytes a second.
    #[must_use]
    pub fn nominal_bytes_per_second(self) -> Option<u64> {
        match self {
            Self::NvLink { links, version } => {
                let each: u64 = match version? {
                    1 => 20_000_000_000,
                    5.. => 50_000_000_000,
                    _ => 25_000_000_000,
                };
                Some(each.saturating_mul(u64::from(links)))
            }
            Self::Pcie(_) | Self::Unknown => None,
        }
    }
}

/// How far two devices are from each other on PCIe.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum PcieDistance {
    /// Below one bridge.
    SameBridge,
    /// Below one host bridge.
    SameHostBridge,
    /// Beside one memory node of the host.
    SameNode,
    /// Across the nodes.
    System,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NvLink { links, version: Some(version) } => {
                write!(f, "{links} NVLinks of generation {version}")
            }
            Self::NvLink { links, version: None } => write!(f, "{links} NVLinks"),
            Self::Pcie(PcieDistance::SameBridge) => f.write_str("PCIe, one bridge"),
            Self::Pcie(PcieDistance::SameHostBridge) => f.write_str("PCIe, one host bridge"),
            Self::Pcie(PcieDistance::SameNode) => f.write_str("PCIe, one node"),
            Self::Pcie(PcieDistance::System) => f.write_str("PCIe, across nodes"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// A source of the machine's links beside CUDA, such as `NvmlLinks` (feature `nvml`).
pub trait LinkSource: fmt::Debug {
    /// The link between the devices with these UUIDs; `None` if the source does not know it.
    fn link(&self, from: [u8; 16], to: [u8; 16]) -> Option<LinkKind>;
}

/// The sources of a topology, beside CUDA.
#[derive(Debug)]
pub struct Sources<'a> {
    /// The host's list of PCI devices; `/sys` on Linux.
    pub sysfs: PathBuf,
    /// A source of links.
    pub links: Option<&'a dyn LinkSource>,
}

impl Default for Sources<'_> {
    /// The host's own list, and no other source.
    fn default() -> Self {
        Self { sysfs: PathBuf::from("/sys"), links: None }
    }
}

/// The devices and the ways between them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Topology {
    gpus: Vec<GpuPlace>,
    /// # Invariants
    /// One for each ordered pair, row by row from the first; none on the diagonal.
    pairs: Vec<Option<PairLink>>,
}

impl Topology {
    /// Finds the places of `devices` and the links between them. Positions are those in `devices`.
    ///
    /// # Errors
    /// What CUDA answers to questions that every driver knows. The absence of any other source is no error.
    pub fn discover(devices: &[Device], sources: &Sources<'_>) -> Result<Self, DeviceError> {
        let gpus: Vec<_> =
            devices.iter().map(|device| place(device, sources)).collect::<Result<_, _>>()?;
        let mut pairs = Vec::with_capacity(devices.len() * devices.len());
        for (from, near) in devices.iter().zip(&gpus) {
            for (to, far) in devices.iter().zip(&gpus) {
                let itself = near.uuid == far.uuid;
                pairs.push(if itself {
                    None
                } else {
                    Some(pair((from, near), (to, far), sources)?)
                });
            }
        }
        Ok(Self { gpus, pairs })
    }

    /// The devices.
    #[must_use]
    pub fn gpus(&self) -> &[GpuPlace] {
        &self.gpus
    }

    /// The way from one device to another; none on the diagonal and outside.
    #[must_use]
    pub fn pair(&self, from: usize, to: usize) -> Option<&PairLink> {
        if from >= self.gpus.len() || to >= self.gpus.len() {
            return None;
        }
        self.pairs[from * self.gpus.len() + to].as_ref()
    }

    /// The devices as a placement takes them, each with `free_bytes` of its position.
    ///
    /// An unknown memory speed counts as 1 TB/s.
    #[must_use]
    pub fn capacities(&self, free_bytes: impl Fn(usize) -> u64) -> Vec<GpuCapacity> {
        let capacity = |(position, gpu): (usize, &GpuPlace)| GpuCapacity {
            uuid: gpu.uuid,
            free_bytes: free_bytes(position),
            memory_bytes_per_second: gpu
                .memory_bytes_per_second
                .unwrap_or(1_000_000_000_000)
                .max(1),
        };
        self.gpus.iter().enumerate().map(capacity).collect()
    }

    /// Estimated links for a placement: nine tenths of the nominal speed over NVLink, 20 GB/s over other direct links,
    /// and 25 GB/s through the host.
    ///
    /// [`LinkMeter::matrix`] measures instead.
    ///
    /// # Errors
    /// [`PlacementError::Gpus`] for a number of devices that no placement takes.
    pub fn estimated_links(&self) -> Result<LinkMatrix, PlacementError> {
        LinkMatrix::from_fn(self.gpus.len(), |from, to| {
            let pair = self.pair(from, to);
            let nominal = pair.and_then(|pair| pair.kind.nominal_bytes_per_second());
            match pair {
                Some(PairLink { access: true, .. }) => Link {
                    latency_ns: 5_000,
                    bytes_per_second: nominal.map_or(20_000_000_000, |speed| speed / 10 * 9),
                },
                _ => Link { latency_ns: 20_000, bytes_per_second: 25_000_000_000 },
            }
        })
    }
}

fn place(device: &Device, sources: &Sources<'_>) -> Result<GpuPlace, DeviceError> {
    let info = device.info();
    // An attribute that a driver does not know is no error; a lost device is.
    let attribute = |which| match device.attribute(which) {
        Ok(value) => Ok(u32::try_from(value).ok()),
        Err(error) if device.poison().is_some() => Err(error),
        Err(_) => Ok(None),
    };
    let seen = sysfs::look(&sources.sysfs, &info.pci_bus_id);
    let clock_khz = attribute(DeviceAttribute::MEMORY_CLOCK_RATE)?;
    let width_bits = attribute(DeviceAttribute::GLOBAL_MEMORY_BUS_WIDTH)?;
    // Two transfers a clock.
    let speed = |khz: u32, bits: u32| (u64::from(khz) * 250).saturating_mul(u64::from(bits));
    Ok(GpuPlace {
        ordinal: device.ordinal(),
        uuid: info.uuid,
        name: info.name.clone(),
        pci_bus_id: info.pci_bus_id.clone(),
        pcie_ancestors: seen.ancestors,
        numa_node: attribute(DeviceAttribute::HOST_NUMA_ID)?.or(seen.numa_node),
        memory_bytes: info.total_bytes,
        memory_bytes_per_second: clock_khz.zip(width_bits).map(|(khz, bits)| speed(khz, bits)),
    })
}

fn pair(
    (from, near): (&Device, &GpuPlace),
    (to, far): (&Device, &GpuPlace),
    sources: &Sources<'_>,
) -> Result<PairLink, DeviceError> {
    let access = from.can_access(to)?;
    let told = |which| from.peer_attribute(to, which).ok();
    let link = sources.links.and_then(|links| links.link(near.uuid, far.uuid));
    Ok(PairLink {
        access,
        native_atomics: told(PeerAttribute::NATIVE_ATOMIC_SUPPORTED) == Some(1),
        rank: told(PeerAttribute::PERFORMANCE_RANK),
        kind: link.unwrap_or(LinkKind::Unknown),
        pcie: sysfs::distance(near, far),
    })
}
