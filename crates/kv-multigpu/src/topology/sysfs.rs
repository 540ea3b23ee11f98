//! The host's list of PCI devices: what is above a device, and which memory node is beside it.

use std::fs;
use std::path::Path;

use super::{GpuPlace, PcieDistance};

/// What the host tells of a PCI device.
#[derive(Debug, Default)]
pub(super) struct PciEntry {
    pub(super) ancestors: Vec<String>,
    pub(super) numa_node: Option<u32>,
}

/// Looks a device up under `sysfs`. What is not there is not told.
pub(super) fn look(sysfs: &Path, pci_bus_id: &str) -> PciEntry {
    let entry = sysfs.join("bus/pci/devices").join(pci_bus_id.to_lowercase());
    let Ok(place) = fs::canonicalize(&entry) else { return PciEntry::default() };
    let names: Vec<_> = place.iter().filter_map(|name| name.to_str()).map(str::to_owned).collect();
    // From the host bridge (`pci0000:00`) down; the last is the device itself.
    let bridge = names.iter().position(|name| name.starts_with("pci") && name.contains(':'));
    let ancestors = match bridge {
        Some(bridge) => names[bridge..names.len() - 1].to_vec(),
        None => Vec::new(),
    };
    let node = fs::read_to_string(place.join("numa_node")).ok();
    // A host without nodes writes -1.
    let numa_node = node.and_then(|text| text.trim().parse().ok());
    PciEntry { ancestors, numa_node }
}

/// How far two devices are from each other, if the host tells where they are.
pub(super) fn distance(near: &GpuPlace, far: &GpuPlace) -> Option<PcieDistance> {
    let (above, below) = (&near.pcie_ancestors, &far.pcie_ancestors);
    if above.is_empty() || below.is_empty() {
        return None;
    }
    let shared = above.iter().zip(below).take_while(|(a, b)| a == b).count();
    Some(match shared {
        0 if near.numa_node.is_some() && near.numa_node == far.numa_node => PcieDistance::SameNode,
        0 => PcieDistance::System,
        1 => PcieDistance::SameHostBridge,
        _ => PcieDistance::SameBridge,
    })
}
