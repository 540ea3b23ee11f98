//! Devices and links as NVML lists them. Optional.

use std::fmt;

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::error::NvmlError;

use super::{LinkKind, LinkSource, PcieDistance};
use crate::identity::{DeviceDirectory, DeviceKind, DeviceListing, DeviceUuid};

/// More links than any GPU has.
const LINKS_MAX: u32 = 36;

/// NVML, if the machine has it: its list of devices, and their links.
pub struct Nvml {
    nvml: Option<nvml_wrapper::Nvml>,
}

impl Nvml {
    /// Loads NVML if the machine has it. Without NVML no device is listed and no link is known.
    #[must_use]
    pub fn load() -> Self {
        let nvml = nvml_wrapper::Nvml::init()
            .inspect_err(
                |error| tracing::info!(%error, "no NVML: the driver and the host tell alone"),
            )
            .ok();
        Self { nvml }
    }

    /// Whether NVML was found.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.nvml.is_some()
    }
}

impl DeviceDirectory for Nvml {
    fn find(&self, bytes: [u8; 16]) -> Option<DeviceListing> {
        let nvml = self.nvml.as_ref()?;
        let whole = || -> Result<DeviceListing, NvmlError> {
            let uuid = DeviceUuid { is_mig: false, bytes }.to_string();
            let nvml_index = nvml.device_by_uuid(uuid)?.index()?;
            Ok(DeviceListing { nvml_index, kind: DeviceKind::Gpu })
        };
        let part = || -> Result<DeviceListing, NvmlError> {
            let uuid = DeviceUuid { is_mig: true, bytes }.to_string();
            let part = nvml.device_by_uuid(uuid)?;
            let nvml_index = part.mig_parent_device()?.index()?;
            Ok(DeviceListing { nvml_index, kind: DeviceKind::Mig })
        };
        whole().or_else(|_| part()).ok()
    }
}

impl LinkSource for Nvml {
    fn link(&self, from: [u8; 16], to: [u8; 16]) -> Option<LinkKind> {
        let nvml = self.nvml.as_ref()?;
        let device = |bytes| nvml.device_by_uuid(DeviceUuid { is_mig: false, bytes }.to_string());
        let (near, far) = (device(from).ok()?, device(to).ok()?);
        nvlinks(&near, &far).or_else(|| pcie(&near, far).ok().map(LinkKind::Pcie))
    }
}

type NvmlDevice<'a> = nvml_wrapper::Device<'a>;

/// The NVLinks that serve a pair: those that end at the other GPU, or where they end at switches, as many
/// as both have.
fn nvlinks(near: &NvmlDevice<'_>, far: &NvmlDevice<'_>) -> Option<LinkKind> {
    let active = |device: &NvmlDevice<'_>| {
        let is_active = |&link: &u32| device.link_wrapper_for(link).is_active().unwrap_or(false);
        (0..LINKS_MAX).filter(is_active).collect::<Vec<_>>()
    };
    let (ours, theirs) = (active(near), active(far));
    let peer = far.pci_info().ok()?;
    let ends_there = |&&link: &&u32| {
        near.link_wrapper_for(link).remote_pci_info().is_ok_and(|remote| {
            (remote.domain, remote.bus, remote.device) == (peer.domain, peer.bus, peer.device)
        })
    };
    let direct = ours.iter().filter(ends_there).count();
    let switched = || match near.p2p_status(far, P2pCapabilitiesIndex::NvLink) {
        Ok(P2pStatus::Ok) => ours.len().min(theirs.len()),
        _ => 0,
    };
    let links = if direct > 0 { direct } else { switched() };
    if links == 0 {
        return None;
    }
    let version = ours.first().and_then(|&link| near.link_wrapper_for(link).version().ok());
    Some(LinkKind::NvLink { links: links as u32, version })
}

#[cfg(target_os = "linux")]
fn pcie(near: &NvmlDevice<'_>, far: NvmlDevice<'_>) -> Result<PcieDistance, NvmlError> {
    Ok(match near.topology_common_ancestor(far)? {
        TopologyLevel::Internal | TopologyLevel::Single | TopologyLevel::Multiple => {
            PcieDistance::SameBridge
        }
        TopologyLevel::HostBridge => PcieDistance::SameHostBridge,
        TopologyLevel::Node => PcieDistance::SameNode,
        TopologyLevel::System => PcieDistance::System,
    })
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvml").field("loaded", &self.is_loaded()).finish()
    }
}
