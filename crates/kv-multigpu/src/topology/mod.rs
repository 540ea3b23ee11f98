//! The locations of a machine's devices and the links between them: from CUDA, from NVML if there
//! is one, and from the host's list of PCI devices.
//!
//! A fact that no source provides is `None` or [`LinkKind::Unknown`]. A missing library or file is
//! never an error.
//!
//! ```
//! use std::sync::Arc;
//!
//! use cuda_sim::{SimConfig, SimDriver};
//! use kv_multigpu::DeviceRegistry;
//! use kv_multigpu::topology::{Sources, Topology};
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
//! // For a placement, by what is known of each pair.
//! let links = topology.estimated_links()?;
//! assert!(links.link(1, 2).is_some_and(|link| link.bytes_per_second > 0));
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "nvml")]
mod nvml;
mod sysfs;

use std::fmt;
use std::path::PathBuf;

use cuda_driver::{Device, DeviceAttribute, DeviceError, PeerAttribute};

use crate::place::{GpuCapacity, Link, LinkMatrix, PlacementError};

pub use crate::identity::{DeviceDirectory, DeviceListing};
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use nvml::Nvml;

/// One device and its location.
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
    /// The PCIe bridges above it, from the host bridge down. Empty if the host does not list them.
    pub pcie_ancestors: Vec<String>,
    /// The NUMA node beside it.
    pub numa_node: Option<u32>,
    /// Bytes of all its memory.
    pub memory_bytes: u64,
    /// Speed of the memory, computed from its clock and width, in bytes per second.
    pub memory_bytes_per_second: Option<u64>,
}

/// The connection from one device to another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PairLink {
    /// Whether the first can access memory of the second.
    pub access: bool,
    /// Whether the second device executes atomic operations on its memory natively.
    pub native_atomics: bool,
    /// CUDA's rank of the connection among the machine's: 0 is the fastest.
    pub rank: Option<i32>,
    /// The kind of link, if the [`LinkSource`] knows it. It does not follow from the PCIe
    /// locations, because GPUs with NVLink are below one host bridge too.
    pub kind: LinkKind,
    /// Their distance on PCIe, from the host's list.
    pub pcie: Option<PcieDistance>,
}

/// The link between two devices.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum LinkKind {
    /// NVLink, directly or through switches.
    NvLink {
        /// Number of links that serve the pair.
        links: u32,
        /// Generation, if NVML reports it.
        version: Option<u32>,
    },
    /// PCIe.
    Pcie(PcieDistance),
    /// No source knows.
    Unknown,
}

impl LinkKind {
    /// The nominal speed in one direction, in bytes a second.
    pub(crate) fn nominal_bytes_per_second(self) -> Option<u64> {
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

/// The distance of two devices on PCIe.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum PcieDistance {
    /// Below one bridge.
    SameBridge,
    /// Below one host bridge.
    SameHostBridge,
    /// At one NUMA node of the host.
    SameNode,
    /// At different NUMA nodes.
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

/// A source of the machine's links besides CUDA, such as `Nvml` (feature `nvml`).
pub trait LinkSource: fmt::Debug {
    /// The link between the devices with these UUIDs; `None` if the source does not know it.
    fn link(&self, from: [u8; 16], to: [u8; 16]) -> Option<LinkKind>;
}

/// The sources of a topology besides CUDA.
#[derive(Debug)]
pub struct Sources<'a> {
    /// The host's list of PCI devices; `/sys` on Linux.
    pub sysfs: PathBuf,
    /// A source of links.
    pub links: Option<&'a dyn LinkSource>,
}

impl Default for Sources<'_> {
    /// The host's own list, without another source.
    fn default() -> Self {
        Self { sysfs: PathBuf::from("/sys"), links: None }
    }
}

/// The devices and the connections between them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Topology {
    gpus: Vec<GpuPlace>,
    /// # Invariants
    /// One for each ordered pair, row by row from the first; `None` on the diagonal.
    pairs: Vec<Option<PairLink>>,
}

impl Topology {
    /// Finds the locations of `devices` and the links between them. Indices are those in `devices`.
    ///
    /// # Errors
    /// CUDA's errors for queries that every driver supports. The absence of any other source is not
    /// an error.
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

    /// The connection from one device to another; `None` on the diagonal and outside.
    #[must_use]
    pub fn pair(&self, from: usize, to: usize) -> Option<&PairLink> {
        if from >= self.gpus.len() || to >= self.gpus.len() {
            return None;
        }
        self.pairs[from * self.gpus.len() + to].as_ref()
    }

    /// The devices in the form that a placement takes, each with the `free_bytes` of its index.
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
    /// # Errors
    /// [`PlacementError::Gpus`] for a number of devices that no placement supports.
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
    // An attribute that the driver does not know is not an error, but a lost device is.
    let attribute = |which| match device.attribute(which) {
        Ok(value) => Ok(u32::try_from(value).ok()),
        Err(error) if device.poison().is_some() => Err(error),
        Err(_) => Ok(None),
    };
    let seen = sysfs::look(&sources.sysfs, &info.pci_bus_id);
    let clock_khz = attribute(DeviceAttribute::MEMORY_CLOCK_RATE)?;
    let width_bits = attribute(DeviceAttribute::GLOBAL_MEMORY_BUS_WIDTH)?;
    // Two transfers per clock.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_any_number_and_generation_have_a_speed() {
        for links in [0, 1, 18, u32::MAX] {
            for version in [None, Some(0), Some(1), Some(4), Some(u32::MAX)] {
                let kind = LinkKind::NvLink { links, version };
                assert_eq!(kind.nominal_bytes_per_second().is_some(), version.is_some());
            }
        }
    }
}
